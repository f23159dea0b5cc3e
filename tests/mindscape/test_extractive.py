from __future__ import annotations

from functools import partial

import pytest

from mia_serve.core import MiaError
from mia_serve.mindscape import Book, Mindscape, Window, book_summaries, extractive_summaries
from mia_serve.mindscape import extractive as module
from mia_serve.mindscape.sentences import count_words

WINDOW = (
    "The red boat left the old harbour. Nobody saw it go at all.",
    "The red boat sank near the old harbour. Yes! The boat was red and very old.",
)


def test_sentences_nearest_the_centroid_in_text_order(stub):
    # "Nobody saw it go at all." shares no word with the others; "Yes!" is too short to be a candidate.
    (summary,) = extractive_summaries([Window(WINDOW)], stub, max_words=22)
    assert summary == (
        "The red boat left the old harbour. The red boat sank near the old harbour. The boat was red and very old."
    )
    (summary,) = extractive_summaries([Window(WINDOW, "The Wreck")], stub, max_words=10)
    assert summary == "The Wreck. The red boat left the old harbour."  # the bound leaves room for 8 words


def test_all_windows_in_one_call(stub):
    extractive_summaries([Window(WINDOW), Window(WINDOW)], stub)
    assert len(stub.calls) == 1
    assert "Yes!" not in stub.calls[0]
    assert extractive_summaries([], stub) == []


def test_chinese(stub):
    window = ("武松上山打老虎。天气很好呀今天。", "老虎被武松打死在山上。“好！”武松打虎下山去。")
    (summary,) = extractive_summaries([Window(window, "水浒传")], stub, max_words=21)
    assert summary == "水浒传。武松上山打老虎。老虎被武松打死在山上。"
    assert count_words(summary) == 20


@pytest.mark.parametrize("bound", [1, 3, 8, 60])
def test_bounded_and_never_empty(stub, bound):
    windows = [WINDOW, ("One single sentence that goes on and on and on without an end",), ("Yes.",), ("虎" * 80,)]
    for title in ("", "A Title", "a title that is longer than most of the bounds given here"):
        for summary in extractive_summaries([Window(w, title) for w in windows], stub, max_words=bound):
            assert summary.strip() and count_words(summary) <= bound
            assert summary.startswith(title.split()[0] if title else "")


def test_only_the_richest_sentences_are_encoded(stub, monkeypatch):
    monkeypatch.setattr(module, "_CANDIDATES", 2)  # and a bound of 10 words asks for no more
    windows = [
        Window(("It was so as it was. The dragon Fafnir guards gold. Fafnir the dragon was slain.",)),
        Window(("It was so as it was. The mermaid sings of gold. It was the sea.",)),
    ]
    extractive_summaries(windows, stub, max_words=10)
    assert stub.calls[0][:2] == ["The dragon Fafnir guards gold.", "Fafnir the dragon was slain."]
    extractive_summaries(windows[:1], stub, max_words=10, among=windows[1:])
    assert stub.calls[1] == stub.calls[0][:2]  # the other window is weighed against, and not encoded


def test_a_book_is_summed_up_by_the_central_sentences_of_its_sessions(stub):
    # "The Wreck." is too short to be a sentence of a session summary that begins with it, and comes first anyway.
    sessions = [
        "The Wreck. The red boat left the old harbour.",
        "The Wreck. Nobody saw it go at all.",
        "The Wreck. The red boat sank near the old harbour.",
    ]
    whole = "The Wreck. The red boat left the old harbour. The red boat sank near the old harbour."
    assert book_summaries([sessions], ["The Wreck"], stub, max_words=18) == [whole]
    assert (
        book_summaries([WINDOW, sessions], ["", "The Wreck"], stub, max_words=18)[1] == whole
    )  # whatever else is there
    assert len(stub.calls) == 2


def test_a_title_of_many_words_is_said_once(stub):
    title = "The Tale of the Old Red Boat"
    sessions = [f"{title}. The red boat left the old harbour.", f"{title}. The red boat sank near the harbour."]
    (summary,) = book_summaries([sessions], [title], stub)
    assert summary == f"{title}. The red boat left the old harbour. The red boat sank near the harbour."


def test_a_book_of_one_session_keeps_its_summary(stub):
    assert book_summaries([["Yes! What the meeting was about, word for word"]], ["M1"], stub) == [
        "Yes! What the meeting was about, word for word"
    ]
    assert book_summaries([], [], stub) == [] and not stub.calls
    with pytest.raises(MiaError, match="1 books but 0 titles"):
        book_summaries([WINDOW], [], stub)
    with pytest.raises(MiaError, match="book 1 holds no text"):
        book_summaries([WINDOW, []], ["", ""], stub)


def test_bad_input(stub):
    with pytest.raises(MiaError, match="max_words is 0"):
        extractive_summaries([Window(WINDOW)], stub, max_words=0)
    with pytest.raises(MiaError, match="window 1 holds no text"):
        extractive_summaries([Window(WINDOW), Window((" ",))], stub)


def test_real_encoder_as_summariser_of_a_book(minilm):
    book = Book("wreck", (*WINDOW, "Cook the rice for twenty minutes with a pinch of salt."), "The Wreck")
    m = Mindscape.from_books([book], summarise=partial(extractive_summaries, encoder=minilm, max_words=20))
    assert m.sessions[0].summary.startswith("The Wreck. ")
    assert "boat" in m.sessions[0].summary and "rice" not in m.sessions[0].summary
