"""Keyword summaries by hand."""

from __future__ import annotations

import pytest

from mia_serve.mindscape import Window, keyword_summaries

LAMP = (
    "The ferry left and old Ada Reave lit the lamp. Then Ada Reave, said the boy, hid the lamp and the Lamp Inn shut."
)
MILL = "The miller left and the cat slept. The cat, in boots, went to the king and the cat bowed."


def test_title_then_names_then_the_words_that_set_a_window_apart():
    lamp, mill = keyword_summaries([Window((LAMP,), "the lamp"), Window((MILL,))], max_words=8)
    assert lamp.startswith("the lamp. Ada Reave. ")
    assert mill.startswith("cat ")  # three times here, nowhere else; "the" and "left" are in both windows
    for summary in (lamp, mill):
        assert "left" not in summary and len(summary.replace(",", "").split()) <= 8


def test_the_same_whatever_the_order_of_windows_and_bounded():
    windows = [Window((LAMP,), "a"), Window((MILL,), "b")]
    one = keyword_summaries(windows)
    assert one == keyword_summaries(windows[::-1])[::-1]
    assert keyword_summaries([Window((LAMP,), "a very long title of a story")], max_words=3) == ["a very long"]


def test_a_window_weighed_among_others_has_the_summary_that_it_has_with_them():
    windows = [Window((LAMP,), "a"), Window((MILL,), "b")]
    assert keyword_summaries(windows[:1], among=windows[1:]) == keyword_summaries(windows)[:1]
    assert keyword_summaries(windows[:1]) != keyword_summaries(windows)[:1]


def test_chinese_windows_get_pairs_of_characters():
    windows = [Window(("账本在船上，账本不见了。",), "潮汐账"), Window(("猫在磨坊里睡觉。",))]
    (first, _) = keyword_summaries(windows, max_words=12)
    assert first.startswith("潮汐账. ") and "账本" in first


def test_bad_input():
    with pytest.raises(ValueError, match="max_words is 0"):
        keyword_summaries([Window(("a b",))], max_words=0)
    with pytest.raises(ValueError, match="window 1 holds no text"):
        keyword_summaries([Window(("a b",)), Window((" ",))])


def test_a_window_without_a_word_of_its_own_still_has_a_summary():
    assert keyword_summaries([Window((text,)) for text in ("1914", "...", "潮")]) == ["1914", "...", "潮"]
