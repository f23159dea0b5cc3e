"""Keyword summaries by hand."""

from __future__ import annotations

import pytest

from mia_serve.mindscape import keyword_summaries

LAMP = (
    "The ferry left and old Ada Reave lit the lamp. Then Ada Reave, said the boy, hid the lamp and the Lamp Inn shut."
)
MILL = "The miller left and the cat slept. The cat, in boots, went to the king and the cat bowed."


def test_title_then_names_then_the_words_that_set_a_window_apart():
    lamp, mill = keyword_summaries([[LAMP], [MILL]], ["the lamp", ""], max_words=8)
    assert lamp.startswith("the lamp. Ada Reave. ")
    assert mill.startswith("cat ")  # three times here, nowhere else; "the" and "left" are in both windows
    for summary in (lamp, mill):
        assert "left" not in summary and len(summary.replace(",", "").split()) <= 8


def test_the_same_whatever_the_order_of_windows_and_bounded():
    one = keyword_summaries([[LAMP], [MILL]], ["a", "b"])
    assert one == keyword_summaries([[MILL], [LAMP]], ["b", "a"])[::-1]
    assert keyword_summaries([[LAMP]], ["a very long title of a story"], max_words=3) == ["a very long"]


def test_chinese_windows_get_pairs_of_characters():
    (first, _) = keyword_summaries([["账本在船上，账本不见了。"], ["猫在磨坊里睡觉。"]], ["潮汐账", ""], max_words=12)
    assert first.startswith("潮汐账. ") and "账本" in first


def test_bad_input():
    with pytest.raises(ValueError, match="1 windows but 2 titles"):
        keyword_summaries([["a b"]], ["x", "y"])
    with pytest.raises(ValueError, match="window 1 holds no text"):
        keyword_summaries([["a b"], [" "]], ["x", "y"])


def test_a_window_without_a_word_of_its_own_still_has_a_summary():
    assert keyword_summaries([["1914"], ["..."], ["潮"]], ["", "", ""]) == ["1914", "...", "潮"]
