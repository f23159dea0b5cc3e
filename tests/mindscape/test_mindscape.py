from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from mia_serve.core import MiaError
from mia_serve.mindscape import Book, BookFacts, Chunk, ConversationSession, Mindscape, Node, Session, Window


def test_windows_of_20_never_cross_a_book_and_the_last_is_short():
    books = [
        Book("a", tuple(f"a{i}" for i in range(41)), "The A", author="Ann"),
        Book("b", ("b0",)),
        Book("c", tuple(f"c{i}" for i in range(20))),
    ]
    asked = []

    def summarise(windows: Sequence[Window]) -> list[str]:
        asked.append(windows)
        return [f"{len(window.texts)} chunks from {window.texts[0]}" for window in windows]

    m = Mindscape.from_books(books, summarise=summarise, summarizer="counting")
    assert [len(s.chunk_ids) for s in m.sessions] == [20, 20, 1, 1, 20]
    assert [s.book_id for s in m.sessions] == ["a", "a", "a", "b", "c"]
    assert [s.id for s in m.sessions] == ["a:w0", "a:w1", "a:w2", "b:w0", "c:w0"]
    assert m.sessions[2].summary == "1 chunks from a40"
    assert m.session_of.tolist() == [0] * 20 + [1] * 20 + [2, 3] + [4] * 20
    assert m.session_of.dtype == np.int64 and not m.session_of.flags.writeable
    assert all(c.book_id == m.sessions[s].book_id for c, s in zip(m.chunks, m.session_of, strict=True))
    assert len(asked) == 1 and m.summarizer == "counting"
    assert [(w.book_id, w.title, w.part, w.parts) for w in asked[0]] == [
        *(("a", "The A", part, 3) for part in (1, 2, 3)),
        ("b", "", 1, 1),
        ("c", "", 1, 1),
    ]
    assert m.books == (BookFacts("a", "The A", "Ann"), BookFacts("b"), BookFacts("c")) and m.window == 20


def test_evl_18_chunks_of_two_books_do_not_share_ids():
    m = Mindscape.from_books([Book("one", ("zero",), summaries=("s",)), Book("two", ("zero",), summaries=("t",))])
    assert [c.id for c in m.chunks] == ["one:0", "two:0"]
    parts = [Mindscape.from_books([Book(b, ("zero",), summaries=("s",))]) for b in ("one", "two")]
    assert [c.id for c in Mindscape.concat(parts).chunks] == ["one:0", "two:0"]


def test_evl_18_shared_ids_are_an_error_unless_namespaced():
    same = [Book(b, ("x",), chunk_ids=("0",), summaries=("s",)) for b in ("one", "two")]
    with pytest.raises(MiaError, match="chunk id '0' occurs twice"):
        Mindscape.from_books(same)
    part = Mindscape.from_books([Book("b", ("x", "y"), summaries=("s",))])
    with pytest.raises(MiaError, match="chunk id 'b:0' occurs twice"):
        Mindscape.concat([part, part])
    pooled = Mindscape.concat([part, part], namespaces=["en", "zh"])
    assert [c.id for c in pooled.chunks] == ["en/b:0", "en/b:1", "zh/b:0", "zh/b:1"]
    assert [s.chunk_ids for s in pooled.sessions] == [("en/b:0", "en/b:1"), ("zh/b:0", "zh/b:1")]
    assert pooled.session_of.tolist() == [0, 0, 1, 1]
    with pytest.raises(MiaError, match="namespace 'en' occurs twice"):
        Mindscape.concat([part, part], namespaces=["en", "en"])


def test_concat_keeps_order_and_names_of_summarizers(two_books):
    other = Mindscape.from_books([Book("z", ("t",), summaries=("s",))], summarizer="gpt")
    pooled = Mindscape.concat([two_books, other])
    assert pooled.session_of.tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert pooled.summarizer == "mixed: given, gpt"
    assert Mindscape.concat([two_books]).summarizer == "given"


def test_conversation_turns_are_chunks():
    m = Mindscape.from_conversation(
        "conv-1",
        [
            ConversationSession("S1", ("A: hi", "B: hello"), "They greet.", ("D1:1", "D1:2"), date="8 May 2023"),
            ConversationSession("S2", ("A: bye",), "They part."),
        ],
    )
    assert [c.id for c in m.chunks] == ["conv-1:D1:1", "conv-1:D1:2", "conv-1:S2:0"]
    assert m.sessions[0] == Session(
        "conv-1:S1", "conv-1", ("conv-1:D1:1", "conv-1:D1:2"), "They greet.", date="8 May 2023"
    )
    assert m.session_of.tolist() == [0, 0, 1]


def test_books_with_and_without_summaries_mix():
    books = [Book("a", ("x",), summaries=("given",)), Book("b", ("y",), "B")]
    m = Mindscape.from_books(books, summarise=lambda windows: [f"{windows[0].title}: {windows[0].texts}"])
    assert [s.summary for s in m.sessions] == ["given", "B: ('y',)"]


@pytest.mark.parametrize(
    ("books", "kwargs", "message"),
    [
        ([Book("a", ("x",))], {}, "'a' has no summaries"),
        ([Book("a", ())], {}, "'a' has no chunks"),
        ([], {}, "at least one chunk"),
        ([Book("a", ("x",), summaries=("s", "t"))], {}, "2 summaries for 1 windows"),
        ([Book("a", ("x",), summaries=(" ",))], {}, "session 'a:w0' has no summary"),
        ([Book("a", ("x", "\n"), summaries=("s",))], {}, "chunk 'a:1' is empty"),
        ([Book("a", ("x",), chunk_ids=("1", "2"), summaries=("s",))], {}, "1 chunks but 2 chunk_ids"),
        ([Book("a", ("x",), summaries=("s",))] * 2, {}, "book id 'a' occurs twice"),
        ([Book("a", ("x",), summaries=("s",))], {"window": 0}, "window is 0"),
        ([Book("a", ("x",))], {"summarise": lambda windows: []}, "returned 0 summaries for 1 windows"),
    ],
)
def test_bad_books(books, kwargs, message):
    with pytest.raises(MiaError, match=message):
        Mindscape.from_books(books, **kwargs)


def test_sessions_must_part_the_chunks():
    chunks = (Chunk("1", "x", "s", "b"), Chunk("2", "y", "s", "b"))
    with pytest.raises(MiaError, match="belongs to no session"):
        Mindscape(chunks, (Session("s", "b", ("1",), "sum"),))
    with pytest.raises(MiaError, match="lists chunk '2'"):
        Mindscape(chunks, (Session("s", "b", ("2", "1"), "sum"),))
    with pytest.raises(MiaError, match="lists chunk '1'"):
        Mindscape((dataclasses.replace(chunks[0], book_id="other"),), (Session("s", "b", ("1",), "sum"),))


def test_concat_carries_books_and_nodes_into_their_namespaces(two_books):
    nodes = (Node("red/x", "X", "a sailor", "red", "person", ("red:0", "red:4")),)
    books = (BookFacts("red", "The Red Book", "Ann", "Red from end to end."),)
    m = dataclasses.replace(two_books, books=books, nodes=nodes)
    pooled = Mindscape.concat([m, two_books], namespaces=["en", "zh"])
    assert pooled.books == (
        BookFacts("en/red", "The Red Book", "Ann", "Red from end to end."),
        BookFacts("zh/red", "The Red Book"),
        BookFacts("zh/blue"),
    )
    assert pooled.nodes == (Node("en/red/x", "X", "a sailor", "en/red", "person", ("en/red:0", "en/red:4")),)
    assert pooled.window == 2
    assert Mindscape.concat([m, Mindscape.from_books([Book("z", ("t",), summaries=("s",))])]).window is None


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"books": [BookFacts("red"), BookFacts("red")]}, "book id 'red' occurs twice"),
        ({"books": [BookFacts("green")]}, "no chunk belongs to book 'green'"),
        ({"nodes": [Node("n", "N", "d", "red"), Node("n", "N", "d", "red")]}, "node id 'n' occurs twice"),
        ({"nodes": [Node("n", "N", "d", "green")]}, "node 'n': no chunk belongs to book 'green'"),
        ({"nodes": [Node("n", "N", "d", "red", chunk_ids=("red:9",))]}, "node 'n' names chunk 'red:9'"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_facts_that_do_not_fit_are_refused(two_books, facts, message):
    with pytest.raises(MiaError, match=message):
        dataclasses.replace(two_books, **facts)
