"""An edited mindscape is the mindscape that is built of what is left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mia_serve.core import MiaError
from mia_serve.mindscape import (
    BookFacts,
    ConversationSession,
    Mindscape,
    Node,
    Window,
    append_chunks,
    append_text,
    build_mindscape,
    remove_book,
    remove_chunks,
    replace_texts,
)
from mia_serve.mindscape.append import FAILED, NO_ENTITIES, OPEN, Addition, grow
from mia_serve.mindscape.draft import Draft
from mia_serve.mindscape.records import Chunk, Session
from mia_serve.mindscape.sources import SourceBook, Sources
from tests.mindscape.test_append import Counting, same
from tests.mindscape.test_chunking import words


class Reference:
    """The slow way: lists of sessions with their texts, built from nothing after each change."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.sessions: list[list] = []  # [session id, book, [[id, text], ...]]
        self.numbers: dict[str, int] = {}
        self.windows: dict[str, int] = {}

    def own(self, book: str) -> list[list]:
        return [s for s in self.sessions if s[1] == book]

    def append(self, book: str, texts: Sequence[str], session: str | None = None) -> None:
        for text in texts:
            own = self.own(book)
            if session is None and (not own or len(own[-1][2]) >= self.window):
                name = f"{book}:w{self.windows.get(book, 0)}"
                self.windows[book] = self.windows.get(book, 0) + 1
            elif session is not None and (not own or own[-1][0] != f"{book}:{session}"):
                name = f"{book}:{session}"
            else:
                name = own[-1][0]
            if not own or own[-1][0] != name:
                at = 1 + max((i for i, s in enumerate(self.sessions) if s[1] == book), default=len(self.sessions) - 1)
                self.sessions.insert(at, [name, book, []])
                own = self.own(book)
            prefix = book if session is None else name
            number = self.numbers.get(prefix, 0)
            self.numbers[prefix] = number + 1
            own[-1][2].append([f"{prefix}:{number}", text])

    def remove(self, ids: set[str]) -> None:
        for s in self.sessions:
            s[2] = [pair for pair in s[2] if pair[0] not in ids]
        self.sessions = [s for s in self.sessions if s[2]]
        left = {s[1] for s in self.sessions}
        for known in (self.numbers, self.windows):  # a book that has gone begins anew
            for name in [name for name in known if not any(name == b or name.startswith(f"{b}:") for b in left)]:
                del known[name]

    def replace(self, texts: dict[str, str]) -> None:
        for s in self.sessions:
            s[2] = [[i, texts.get(i, text)] for i, text in s[2]]

    def build(self) -> Mindscape:
        chunks, sessions = [], []
        for name, book, pairs in self.sessions:
            own = self.own(book)
            place = Window(tuple(t for _, t in pairs), "", book, own.index([name, book, pairs]) + 1, len(own))
            (summary,) = Counting()([place])
            sessions.append(Session(name, book, tuple(i for i, _ in pairs), summary))
            chunks += [Chunk(i, text, name, book) for i, text in pairs]
        books = tuple(BookFacts(b) for b in dict.fromkeys(s.book_id for s in sessions))
        return Mindscape(tuple(chunks), tuple(sessions), "counting", books, window=self.window)


@pytest.mark.parametrize("seed", range(10))
def test_any_edits_make_what_a_rebuild_makes(seed):
    rng = random.Random(seed)
    slow = Reference(3)
    fast: Mindscape | None = None
    before: dict[str, list[str]] = {}
    for step in range(60):
        draft = Draft(fast, 3, "counting")
        for n in range(rng.choice([1, 1, 4])):
            there = [pair[0] for s in slow.sessions for pair in s[2]]
            kind = rng.random()
            if kind < 0.45 or not there:
                book = rng.choice("abc")
                session = f"s{step // 7}" if book == "c" else None
                texts = [f"{step} {n} {i}" for i in range(rng.randrange(1, 6))]
                slow.append(book, texts, session)
                assert draft.add(Addition(book, tuple(texts), session)).added[-1] == slow.own(book)[-1][2][-1][0]
            elif kind < 0.75:
                gone = set(rng.sample(there, min(len(there), rng.randrange(1, 5))))
                if rng.random() < 0.4:
                    gone |= set(there[-2:])  # the ends are where numbers might come twice
                slow.remove(gone)
                assert set(draft.remove([*sorted(gone), "nobody"]).deleted) == gone
            elif kind < 0.8:
                book = rng.choice("abc")
                slow.remove({i for s in slow.own(book) for i, _ in s[2]})
                draft.remove_book(book)
            else:
                texts = {i: f"new {step} {n}" for i in rng.sample(there, min(len(there), 2))}
                slow.replace(texts)
                assert set(draft.replace(texts).replaced) == set(texts)
        summarise = Counting()
        made = draft.finish(summarise)
        if not slow.sessions:
            assert made is None
            fast, before = None, {}
            continue
        assert made is not None
        whole = slow.build()
        same(made, whole)
        texts_of = {name: [text for _, text in pairs] for name, _, pairs in slow.sessions}
        changed = [texts_of[s.id] for s in made.sessions if before.get(s.id) != texts_of[s.id]]
        assert sorted(list(w.texts) for w in summarise.asked) == sorted(changed)  # nothing else was summed up
        fast, before = made, texts_of


def test_by_hand(two_books):
    summarise = Counting()
    m = remove_chunks(two_books, ["red:2", "red:3", "blue:1", "nobody"], summarise)
    assert [(s.id, s.chunk_ids, s.summary) for s in m.sessions] == [
        ("red:w0", ("red:0", "red:1"), "r0"),
        ("red:w2", ("red:4",), "r2"),
        ("blue:w0", ("blue:0",), "蓝 .. 0, 3"),
        ("blue:w1", ("blue:2", "blue:3"), "b1"),
    ]
    assert [w.texts for w in summarise.asked] == [("蓝 passage 0",)]  # what did not change is not summed up again
    assert len(two_books.chunks) == 9  # what was there is not changed
    m = replace_texts(m, {"red:4": "another text", "red:0": "red passage 0"}, summarise)
    assert [c.text for c in m.chunks if c.session_id == "red:w2"] == ["another text"]
    assert len(summarise.asked) == 2 and m.sessions[1].summary == "another .. text, 2"
    assert m.sessions[0] is two_books.sessions[0] and m.chunks[0] is two_books.chunks[0]  # shared, not copied
    m = remove_book(m, "blue")
    assert {s.book_id for s in m.sessions} == {"red"} and [b.id for b in m.books] == ["red"]


def test_numbers_go_on_behind_those_of_deleted_chunks(two_books):
    m = remove_chunks(two_books, ["red:1"], Counting())  # in the middle: a count would name the next one red:4
    m = append_chunks(m, "red", ["x"], Counting())
    assert [c.id for c in m.chunks if c.book_id == "red"] == ["red:0", "red:2", "red:3", "red:4", "red:5"]
    m = remove_chunks(m, ["red:4", "red:5"], Counting())  # at the end, with the window: only a note knows of them
    m = append_chunks(m, "red", ["y", "z"], Counting())
    assert [(s.id, s.chunk_ids) for s in m.sessions if s.book_id == "red"] == [
        ("red:w0", ("red:0",)),
        ("red:w1", ("red:2", "red:3")),
        ("red:w3", ("red:6", "red:7")),
    ]
    assert m.notes == {}  # the numbers are told by what is there again


def test_numbers_are_remembered_on_disk(two_books, tmp_path):
    remove_chunks(two_books, ["red:4", "blue:3"], Counting()).save(tmp_path / "m")
    m = append_chunks(Mindscape.load(tmp_path / "m"), "red", ["x"], Counting())
    assert [c.id for c in m.chunks if c.book_id == "red"][-1] == "red:5"
    m = append_chunks(remove_book(append_chunks(m, "z", ["u"], Counting()), "red"), "red", ["anew"], Counting())
    assert [c.id for c in m.chunks][-2:] == ["z:0", "red:0"]  # a book that was removed begins anew


def test_turns_of_a_chat_are_numbered_likewise():
    m = Mindscape.from_conversation("c", [ConversationSession("s1", ("a", "b", "c"), "s")])
    m = append_chunks(remove_chunks(m, ["c:s1:1"], Counting()), "c", ["d"], Counting(), session="s1")
    m = append_chunks(remove_chunks(m, ["c:s1:3"], Counting()), "c", ["e"], Counting(), session="s1")
    assert [c.id for c in m.chunks] == ["c:s1:0", "c:s1:2", "c:s1:4"]


def test_own_ids_are_used_as_they_are_and_numbers_step_over_them(two_books):
    m = grow(two_books, [Addition("red", ("x", "y"), ids=("page-1", ""))], Counting())
    assert [c.id for c in m.chunks if c.book_id == "red"][-2:] == ["page-1", "red:6"]
    m = grow(m, [Addition("new", ("u",), ids=("red:7",)), Addition("red", ("v",))], Counting())
    assert m.chunks[-1].id == "red:7" and [c.id for c in m.chunks if c.book_id == "red"][-1] == "red:8"
    m = grow(m, [Addition("chat", ("t", "u"), "w0", ids=("t1", ""))], Counting())
    m = grow(m, [Addition("chat", ("v",), "w0")], Counting())  # still known for a chat, whatever its ids look like
    assert m.sessions[-1].chunk_ids == ("t1", "chat:w0:1", "chat:w0:2") and m.notes == {"kinds": {"chat": "chat"}}
    for ids in (("page-1", "q"), ("q", "q"), ("red:0", "q")):
        with pytest.raises(MiaError, match="occurs twice"):
            grow(m, [Addition("other", ("x", "y"), ids=ids)], Counting())


def test_a_text_that_was_edited_cannot_be_gone_on_with():
    sources = Sources([SourceBook("a", "A", "", "One two three. " * 9), SourceBook("b", "B", "", "Four five.")], [], [])
    m = build_mindscape(sources, words, Counting(), size=6, overlap=0, window=2, summarizer="counting")
    assert {t.book_id for t in m.tails} == {"a", "b"}
    assert replace_texts(m, {"a:0": m.chunks[0].text}, Counting()).tails == m.tails  # the same text changes nothing
    for edited in (remove_chunks(m, ["a:1"], Counting()), replace_texts(m, {"a:0": "x"}, Counting())):
        assert [t.book_id for t in edited.tails] == ["b"]
        with pytest.raises(MiaError, match="where the text of 'a' ends"):
            append_text(edited, "a", "more", words, Counting())


def test_what_was_known_of_deleted_chunks_goes_with_them(two_books):
    nodes = (
        Node("n1", "N", "d", "red", chunk_ids=("red:0", "red:1")),
        Node("n2", "M", "d", "red", chunk_ids=("red:1",)),
        Node("n3", "O", "d", "blue"),
    )
    books = tuple(replace(b, summary="All of it.") for b in two_books.books)
    notes = {FAILED: {"red:w1": "timeout"}, OPEN: ["blue:w1"], NO_ENTITIES: {"red:1": "timeout"}, "build": 1}
    m = replace(two_books, nodes=nodes, books=books, notes=notes)
    m = remove_chunks(m, ["red:1", "red:2", "red:3", "blue:2", "blue:3"], Counting())
    assert [(n.id, n.chunk_ids) for n in m.nodes] == [("n1", ("red:0",)), ("n3", ())]
    assert [b.summary for b in m.books] == ["", ""] and m.notes == {
        "build": 1,
        "next": {"blue": {"blue:": 4, "blue:w": 2}},
    }
    assert [n.id for n in remove_book(m, "red").nodes] == ["n3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: replace_texts(m, {"red:0": "x", "red:9": "y"}, Counting()), "no chunk 'red:9'"),
        (lambda m: replace_texts(m, {"red:0": " "}, Counting()), "chunk 'red:0' is empty"),
        (lambda m: remove_book(m, "green"), "no book 'green'"),
        (lambda m: remove_chunks(m, [c.id for c in m.chunks], Counting()), "nothing would be left"),
        (lambda m: remove_chunks(m, ["red:0"], lambda windows: []), "returned 0 summaries for 1 windows"),
    ],
)
def test_what_cannot_be_is_refused(two_books, change, message):
    with pytest.raises(MiaError, match=message):
        change(two_books)


def test_a_refused_change_leaves_the_draft_as_it_was(two_books):
    draft = Draft(two_books)
    for addition in (
        Addition("red", ("x", " ")),
        Addition("red", ("x",), ids=("red:0",)),
        Addition("red", ("x",), session="s"),
        Addition("new", ()),
        Addition("new", ("x", "y"), ids=("same", "same")),
    ):
        with pytest.raises(MiaError):
            draft.add(addition)
    with pytest.raises(MiaError):
        draft.replace({"red:0": "x", "nobody": "y"})
    made = draft.finish(Counting())
    assert made is not None
    same(made, two_books)
