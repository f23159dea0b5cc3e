"""A mindscape that grows is the mindscape that is built at once."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mia_serve.core import MiaError
from mia_serve.mindscape import (
    Book,
    BookFacts,
    Mindscape,
    Node,
    Summarise,
    Window,
    append_chunks,
    append_text,
    build_mindscape,
    keyword_summaries,
)
from mia_serve.mindscape.append import FAILED, OPEN, Addition, grow
from mia_serve.mindscape.sources import SourceBook, SourceChat, Sources, SourceSession
from tests.mindscape.test_chunking import story, words


class Counting:
    """A summariser of the window alone: its first and last word, and how much lies between; keeps what it was asked."""

    def __init__(self, mark: str = "") -> None:
        self.mark, self.asked = mark, []

    def __call__(self, windows: Sequence[Window]) -> list[str]:
        self.asked += windows
        found = [" ".join(w.texts).split() for w in windows]
        return [f"{self.mark}{text[0]} .. {text[-1]}, {len(text)}" for text in found]


def same(one: Mindscape, other: Mindscape) -> None:
    assert one.chunks == other.chunks
    assert one.sessions == other.sessions
    assert (one.books, one.tails, one.window) == (other.books, other.tails, other.window)


def pieces(rng: random.Random, items: Sequence, n: int) -> list:
    cuts = sorted(rng.sample(range(1, len(items)), min(n, len(items) - 1)))
    return [items[a:b] for a, b in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_chunks_in_any_split_make_the_windows_of_the_whole(seed):
    rng = random.Random(seed)
    texts = [f"{seed} text {i}" for i in range(rng.randrange(2, 60))]
    others = [Book("b", ("in between", "and here"), "B"), Book("z", ("at the end",))]
    whole = Mindscape.from_books([Book("a", tuple(texts), "A"), *others], 5, Counting(), "counting")
    first, *rest = pieces(rng, texts, rng.randrange(1, 9))
    grown = Mindscape.from_books([Book("a", tuple(first), "A"), *others], 5, Counting(), "counting")
    for part in rest:
        summarise, before = Counting(), {s.id: s for s in grown.sessions}
        grown = append_chunks(grown, "a", part, summarise)
        changed = [s.id for s in grown.sessions if before.get(s.id) != s]
        assert [f"a:w{w.part - 1}" for w in summarise.asked] == changed  # nothing else was summed up again
        assert grown.session_of.tolist() == sorted(grown.session_of.tolist())
    same(grown, whole)


@pytest.mark.parametrize("seed", range(8))
def test_text_in_any_split_makes_the_mindscape_of_the_whole(seed):
    rng = random.Random(seed)
    text, other = story(seed, 900), SourceBook("other", "Other", "", "One. Two. Three.")

    def build(part: str) -> Mindscape:
        books = [SourceBook("a", "A", "Ann", part), other]
        return build_mindscape(
            Sources(books, [], []), words, Counting(), size=20, overlap=3, window=4, summarizer="counting"
        )

    first, *rest = pieces(rng, text, rng.choice([1, 5, 25]))
    grown = build(first)
    for part in rest:
        grown = append_text(grown, "a", part, words, Counting())
    same(grown, build(text))


def chat(turns: Sequence[tuple[str, str, str]]) -> Sources:
    """Rows of (session, name of the turn, text)."""
    sessions: dict[str, list[tuple[str, str]]] = {}
    for session, name, text in turns:
        sessions.setdefault(session, []).append((name, text))
    made = tuple(
        SourceSession(s, tuple(t for _, t in found), f"day {s}", tuple(n for n, _ in found))
        for s, found in sessions.items()
    )
    return Sources([], [SourceChat("c", made, "Us")], [])


def add(
    mindscape: Mindscape, sources: Sources, summarise: Summarise, provisional: Summarise | None = None
) -> Mindscape:
    (one,) = sources.chats
    additions = [Addition(one.id, s.turns, s.id, s.date, s.turn_ids, one.title) for s in one.sessions]
    return grow(mindscape, additions, summarise, provisional=provisional)


@pytest.mark.parametrize("seed", range(8))
def test_turns_in_any_split_make_the_chat_of_the_whole(seed):
    rng = random.Random(seed)
    turns = [(f"s{i // rng.choice([3, 4])}", "", f"I say {i}") for i in range(30)]
    turns = [(s, f"D:{i}" if rng.random() < 0.3 else "", text) for i, (s, _, text) in enumerate(sorted(turns))]
    grown = None
    for part in pieces(rng, turns, rng.randrange(1, 12)):
        if grown is None:
            grown = build_mindscape(chat(part), None, Counting(), summarizer="counting")
        else:
            grown = add(grown, chat(part), Counting())
    assert grown is not None
    same(grown, build_mindscape(chat(turns), None, Counting(), summarizer="counting"))


def test_by_hand(two_books):
    grown = append_chunks(two_books, "red", ["red passage 5", "red passage 6"], Counting())
    assert [(s.id, s.chunk_ids, s.summary, s.title) for s in grown.sessions[2:4]] == [
        ("red:w2", ("red:4", "red:5"), "red .. 5, 6", "The Red Book"),
        ("red:w3", ("red:6",), "red .. 6, 3", "The Red Book"),
    ]
    assert [s.summary for s in grown.sessions if s.book_id == "blue"] == ["b0", "b1"]
    assert [c.id for c in grown.chunks][5:8] == ["red:5", "red:6", "blue:0"]
    new = append_chunks(grown, "green", ["a b"], Counting())
    assert new.sessions[-1].id == "green:w0" and new.books[-1] == BookFacts("green")
    assert len(two_books.chunks) == 9  # what was there is not changed


def test_what_is_known_of_a_book_stays_but_its_summary():
    m = Mindscape.from_books([Book("a", ("x", "y"), "A", author="Ann"), Book("b", ("z",))], 2, Counting())
    nodes = (Node("n", "N", "d", "a", chunk_ids=("a:1",)),)
    m = replace(m, books=tuple(replace(b, summary="All of it.") for b in m.books), nodes=nodes, notes={"build": 1})
    grown = append_chunks(m, "a", ["w"], Counting())
    assert grown.books == (BookFacts("a", "A", "Ann"), BookFacts("b", summary="All of it."))
    assert grown.nodes == nodes and grown.notes == {"build": 1}


def test_open_sessions_have_provisional_summaries_until_they_end():
    turns = [(f"s{i // 4}", "", f"I say {i}") for i in range(12)]
    whole = build_mindscape(chat(turns), None, Counting("full "), summarizer="x")
    grown, full, quick = (
        build_mindscape(chat(turns[:1]), None, Counting("full ")),
        Counting("full "),
        Counting("quick "),
    )
    for turn in turns[1:]:
        grown = add(grown, chat([turn]), full, quick)
        assert [s.summary.split()[0] for s in grown.sessions] == ["full"] * (len(grown.sessions) - 1) + ["quick"]
        assert grown.notes[OPEN] == [grown.sessions[-1].id]
    assert [(w.part, len(w.texts)) for w in full.asked] == [(1, 4), (2, 4)]  # each session once, when the next began
    assert grown.sessions[:2] == whole.sessions[:2]
    ended = grow(grown, [], full)  # all that is open, with the better summariser
    assert ended.sessions == whole.sessions and OPEN not in ended.notes


def test_a_window_is_summed_up_in_full_once_it_is_full():
    full, quick = Counting("full "), Counting("quick ")
    m = Mindscape.from_books([Book("a", ("x",))], 2, full)
    for i in range(4):
        m = grow(m, [Addition("a", (f"t{i}",))], full, provisional=quick)
    assert [s.summary for s in m.sessions] == ["full x .. t0, 2", "full t1 .. t2, 2", "quick t3 .. t3, 1"]
    assert len(full.asked) == 3 and m.notes == {OPEN: ["a:w2"]}


def test_stand_ins_are_asked_for_again():
    m = Mindscape.from_books([Book("a", ("x", "y", "z")), Book("b", ("u",))], 2, Counting("stand-in "))
    summarise = Counting()
    grown = grow(replace(m, notes={FAILED: {"a:w0": "timeout"}}), [Addition("b", ("v",))], summarise)
    assert [(w.book_id, w.part) for w in summarise.asked] == [("a", 1), ("b", 1)]
    assert grown.sessions[0].summary == "x .. y, 2" and grown.notes == {}


def test_keywords_are_weighed_against_what_is_asked_for_with_them():
    # Such summaries depend on other windows: those that are closed keep theirs, new ones see what they are given.
    lamp, mill, sea = "lamp lamp oil night", "mill corn night", "sea salt night"
    m = Mindscape.from_books([Book("a", (lamp, mill))], 1, keyword_summaries, "keywords")
    windows = [Window((text,)) for text in (lamp, mill)]
    grown = append_chunks(m, "a", [sea], lambda new: keyword_summaries(new, among=windows))
    assert grown.sessions[:2] == m.sessions
    assert grown.sessions[2].summary == keyword_summaries([*windows, Window((sea,))])[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: append_chunks(m, "red", [], Counting()), "nothing is added to 'red'"),
        (lambda m: append_chunks(m, "red", [" "], Counting()), "chunk 'red:5' is empty"),
        (lambda m: append_chunks(m, "red", ["x"], Counting(), session="w2"), "'red' is a book"),
        (lambda m: append_chunks(m, "red", ["x"], lambda windows: []), "returned 0 summaries for 1 windows"),
        (lambda m: append_chunks(replace(m, window=None), "red", ["x"], Counting()), "how many chunks a window has"),
        (lambda m: append_text(m, "red", "x", words, Counting()), "where the text of 'red' ends"),
    ],
)
def test_what_does_not_fit_is_refused(two_books, change, message):
    with pytest.raises(MiaError, match=message):
        change(two_books)


def test_a_session_that_has_ended_and_a_chat_without_session_are_refused():
    m = build_mindscape(chat([("s1", "", "a"), ("s2", "", "b")]), None, Counting())
    with pytest.raises(MiaError, match=re.escape("session 's1' of 'c' has ended")):
        append_chunks(m, "c", ["x"], Counting(), session="s1")
    with pytest.raises(MiaError, match="'c' is a chat: name the session"):
        append_chunks(m, "c", ["x"], Counting())
    with pytest.raises(MiaError, match="chunk id 'c:D1' occurs twice"):
        add(add(m, chat([("s2", "D1", "x")]), Counting()), chat([("s2", "D1", "x")]), Counting())


def test_a_chat_that_is_called_like_a_book_does_not_mix_with_it(two_books):
    with pytest.raises(MiaError, match="'red' is a book: add chunks to it"):
        append_chunks(two_books, "red", ["I say x"], Counting(), session="s1")


def test_sessions_that_are_called_like_windows_go_on():
    turns = [("w0", "", "I say a"), ("w1", "", "I say b"), ("w1", "", "I say c")]
    grown = build_mindscape(chat(turns[:2]), None, Counting(), summarizer="counting")
    same(add(grown, chat(turns[2:]), Counting()), build_mindscape(chat(turns), None, Counting(), summarizer="counting"))
