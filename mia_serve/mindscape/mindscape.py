"""The mindscape: a collection's chunks, its sessions with their summaries, and the map between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mia_serve.core import MiaError
from mia_serve.mindscape.records import Book, BookFacts, Chunk, ConversationSession, Node, Session, Tail, Window

T = TypeVar("T")

#: Chunks in one window of a book (MiA-Signature, arXiv 2605.06416).
WINDOW = 20

#: Makes one summary per window.
Summarise = Callable[[Sequence[Window]], list[str]]


@dataclass(frozen=True, eq=False)
class Mindscape:
    """Chunks and sessions of one collection.

    The sessions part the chunks: read one after the other they hold every chunk once, in order. That is checked when
    a mindscape is made, so everything downstream may rely on it (and on
    ids being unique, texts and summaries not empty).

    Attributes:
        chunks: All chunks, in document order.
        sessions: All sessions, in document order.
        summarizer: Who wrote the summaries, e.g. `"given"` or `"extractive(...)"`.
        books: What is known of whole books, in document order; some or all may be missing.
        nodes: Entities of the books, if any were looked for.
        window: Chunks in a full window of a book; None where the sessions were not cut that way.
        tails: Where the texts of books end that may go on; see `append_text`.
        notes: How it was made, in JSON's types; kept with it, not read here.
        session_of: (n_chunks,) int64, index into `sessions` of each chunk's session; read-only.

    Raises:
        MiaError: An id occurs twice, a text or summary is empty, sessions and chunks disagree, or a book or node names
            what is not there.
    """

    chunks: tuple[Chunk, ...]
    sessions: tuple[Session, ...]
    summarizer: str = "given"
    books: tuple[BookFacts, ...] = ()
    nodes: tuple[Node, ...] = ()
    window: int | None = None
    tails: tuple[Tail, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    session_of: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the records and derive `session_of`."""
        object.__setattr__(self, "chunks", tuple(self.chunks))
        object.__setattr__(self, "sessions", tuple(self.sessions))
        object.__setattr__(self, "books", tuple(self.books))
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "tails", tuple(self.tails))
        _check(self.chunks, self.sessions)
        _check_facts(self)
        session_of = np.repeat(np.arange(len(self.sessions)), [len(s.chunk_ids) for s in self.sessions]).astype(
            np.int64
        )
        session_of.setflags(write=False)
        object.__setattr__(self, "session_of", session_of)

    @classmethod
    def from_books(
        cls,
        books: Sequence[Book],
        window: int = WINDOW,
        summarise: Summarise | None = None,
        summarizer: str = "",
    ) -> Mindscape:
        """Cut books into windows of consecutive chunks; each book is cut on its own, so no window crosses a book.

        Windows do not overlap and the last one of a book may be short. Session ids are `{book}:w{i}`.

        Args:
            books: The books, in the order in which they are pooled.
            window: Chunks per window.
            summarise: Makes the summaries of the books that bring none, in one call for all windows.
            summarizer: Name to record for the summaries; `"given"` or `"custom"` when left empty.

        Returns:
            The mindscape of all books.

        Raises:
            MiaError: A book is empty, ids collide, or summaries are missing or not one per window.
        """
        if window < 1:
            raise MiaError(f"window is {window}: a window holds at least 1 chunk (the papers use {WINDOW})")
        _unique([book.id for book in books], "book id", "give every book its own id")
        summaries = _book_summaries(books, window, summarise)
        chunks: list[Chunk] = []
        sessions: list[Session] = []
        for book in books:
            ids = (
                book.chunk_ids
                if book.chunk_ids is not None
                else tuple(f"{book.id}:{i}" for i in range(len(book.chunks)))
            )
            if len(ids) != len(book.chunks):
                raise MiaError(
                    f"book {book.id!r} has {len(book.chunks)} chunks but {len(ids)} chunk_ids: give one a chunk"
                )
            for w, (texts, part) in enumerate(
                zip(split_windows(book.chunks, window), split_windows(ids, window), strict=True)
            ):
                session = Session(f"{book.id}:w{w}", book.id, tuple(part), summaries[book.id][w], title=book.title)
                sessions.append(session)
                chunks += [Chunk(i, text, session.id, book.id) for i, text in zip(part, texts, strict=True)]
        made = summarise is not None and any(book.summaries is None for book in books)
        facts = tuple(BookFacts(book.id, book.title, book.author) for book in books)
        return cls(tuple(chunks), tuple(sessions), summarizer or ("custom" if made else "given"), facts, window=window)

    @classmethod
    def from_conversation(
        cls, conversation_id: str, sessions: Sequence[ConversationSession], summarizer: str = "given"
    ) -> Mindscape:
        """Turn a conversation into a mindscape: turns are the chunks, dated sessions the sessions.

        All ids are prefixed by `{conversation_id}:`, so that conversations can be pooled.

        Raises:
            MiaError: A session has no turns or no summary, or ids collide.
        """
        chunks: list[Chunk] = []
        rows: list[Session] = []
        for s in sessions:
            names = s.turn_ids if s.turn_ids is not None else tuple(f"{s.id}:{i}" for i in range(len(s.turns)))
            if len(names) != len(s.turns):
                raise MiaError(f"session {s.id!r} has {len(s.turns)} turns but {len(names)} turn_ids: give one a turn")
            ids = tuple(f"{conversation_id}:{name}" for name in names)
            row = Session(f"{conversation_id}:{s.id}", conversation_id, ids, s.summary, title=s.title, date=s.date)
            rows.append(row)
            chunks += [Chunk(i, text, row.id, conversation_id) for i, text in zip(ids, s.turns, strict=True)]
        return cls(tuple(chunks), tuple(rows), summarizer)

    @classmethod
    def concat(cls, parts: Sequence[Mindscape], namespaces: Sequence[str] | None = None) -> Mindscape:
        """Pool mindscapes into one, in the order given (a series of books, a library of conversations).

        Args:
            parts: The mindscapes.
            namespaces: One name a part, put before all its ids as `{name}/{id}`; needed when parts share ids.

        Raises:
            MiaError: Two parts share an id.
        """
        if not parts:
            raise MiaError("nothing to concatenate: give at least one mindscape")
        if namespaces is not None:
            if len(namespaces) != len(parts):
                raise MiaError(f"{len(parts)} mindscapes but {len(namespaces)} namespaces: give one a mindscape")
            _unique(list(namespaces), "namespace", "give every mindscape its own")
            parts = [_prefixed(part, name) for part, name in zip(parts, namespaces, strict=True)]
        names = list(dict.fromkeys(part.summarizer for part in parts))
        windows = {part.window for part in parts}
        return cls(
            tuple(chunk for part in parts for chunk in part.chunks),
            tuple(session for part in parts for session in part.sessions),
            names[0] if len(names) == 1 else "mixed: " + ", ".join(names),
            tuple(book for part in parts for book in part.books),
            tuple(node for part in parts for node in part.nodes),
            windows.pop() if len(windows) == 1 else None,
            tuple(tail for part in parts for tail in part.tails),
        )

    def save(self, path: str | Path, vectors: Mapping[str, tuple[np.ndarray, str]] | None = None) -> None:
        """Write the mindscape, and vector files with the hash of the encoder that made them; see `store.save`."""
        from mia_serve.mindscape import store

        store.save(self, path, vectors)

    @classmethod
    def load(cls, path: str | Path) -> Mindscape:
        """Open a folder written by `save`; a half-written or altered one is refused; see `store.load`."""
        from mia_serve.mindscape import store

        return store.load(path)

    @staticmethod
    def load_vectors(path: str | Path, name: str, spec_hash: str) -> np.ndarray:
        """Memory-map the vector file `name`, (rows, d), if `spec_hash` made it; see `store.load_vectors`."""
        from mia_serve.mindscape import store

        return store.load_vectors(path, name, spec_hash)


def split_windows(items: Sequence[T], window: int = WINDOW) -> list[list[T]]:
    """Cut a sequence into consecutive windows without overlap; the last one may be short."""
    return [list(items[i : i + window]) for i in range(0, len(items), window)]


def _book_summaries(books: Sequence[Book], window: int, summarise: Summarise | None) -> dict[str, list[str]]:
    """One list of summaries a book; those that are missing are made in a single call."""
    summaries: dict[str, list[str]] = {}
    asked: list[Book] = []
    for book in books:
        if not book.chunks:
            raise MiaError(f"book {book.id!r} has no chunks: drop it, or chunk its text first")
        windows = -(-len(book.chunks) // window)
        if book.summaries is None:
            asked.append(book)
        elif len(book.summaries) != windows:
            raise MiaError(
                f"book {book.id!r} brings {len(book.summaries)} summaries for {windows} windows "
                f"({len(book.chunks)} chunks by {window}): give one a window"
            )
        else:
            summaries[book.id] = list(book.summaries)
    if not asked:
        return summaries
    if summarise is None:
        raise MiaError(
            f"book {asked[0].id!r} has no summaries: give Book.summaries, or summarise= (extractive_summaries)"
        )
    windows_of = [w for book in asked for w in book_windows(book.id, book.title, book.chunks, window)]
    for one, summary in zip(windows_of, summarised(windows_of, summarise), strict=True):
        summaries.setdefault(one.book_id, []).append(summary)
    return summaries


def book_windows(book_id: str, title: str, chunks: Sequence[str], window: int = WINDOW) -> list[Window]:
    """Cut the chunks of one book into the windows that are summarised."""
    parts = split_windows(chunks, window)
    return [Window(tuple(texts), title, book_id, part, len(parts)) for part, texts in enumerate(parts, 1)]


def summarised(windows: Sequence[Window], summarise: Summarise) -> list[str]:
    """Return one summary a window.

    Raises:
        MiaError: The summariser returned another number.
    """
    made = list(summarise(windows)) if windows else []
    if len(made) != len(windows):
        raise MiaError(
            f"the summariser returned {len(made)} summaries for {len(windows)} windows: it must return one a window"
        )
    return made


def _prefixed(part: Mindscape, name: str) -> Mindscape:
    chunks = (
        replace(c, id=f"{name}/{c.id}", session_id=f"{name}/{c.session_id}", book_id=f"{name}/{c.book_id}")
        for c in part.chunks
    )
    sessions = (
        replace(
            s,
            id=f"{name}/{s.id}",
            book_id=f"{name}/{s.book_id}",
            chunk_ids=tuple(f"{name}/{i}" for i in s.chunk_ids),
        )
        for s in part.sessions
    )
    books = tuple(replace(b, id=f"{name}/{b.id}") for b in part.books)
    nodes = tuple(
        replace(
            n,
            id=f"{name}/{n.id}",
            book_id=f"{name}/{n.book_id}",
            chunk_ids=tuple(f"{name}/{i}" for i in n.chunk_ids),
        )
        for n in part.nodes
    )
    tails = tuple(replace(t, book_id=f"{name}/{t.book_id}") for t in part.tails)
    return Mindscape(tuple(chunks), tuple(sessions), part.summarizer, books, nodes, part.window, tails)


def _unique(values: Sequence[str], what: str, fix: str) -> None:
    if len(set(values)) == len(values):
        return
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise MiaError(f"{what} {value!r} occurs twice: {fix}")
        seen.add(value)


def _check(chunks: Sequence[Chunk], sessions: Sequence[Session]) -> None:
    if not chunks:
        raise MiaError("a mindscape needs at least one chunk")
    _unique([c.id for c in chunks], "chunk id", "put the book's id before it (the default), or concat with namespaces=")
    _unique([s.id for s in sessions], "session id", "put the book's id before it, or concat with namespaces=")
    row = 0
    for session in sessions:
        if not session.chunk_ids:
            raise MiaError(f"session {session.id!r} has no chunks: drop it")
        if not session.summary.strip():
            raise MiaError(f"session {session.id!r} has no summary: give one, or make it with extractive_summaries")
        for chunk_id in session.chunk_ids:
            chunk = chunks[row] if row < len(chunks) else None
            if chunk is None or (chunk.id, chunk.session_id, chunk.book_id) != (chunk_id, session.id, session.book_id):
                raise MiaError(
                    f"session {session.id!r} lists chunk {chunk_id!r}, but chunk {row} is {chunk and chunk.id!r}: "
                    "sessions must hold the chunks once each, in order"
                )
            if not chunk.text.strip():
                raise MiaError(f"chunk {chunk.id!r} is empty: drop it or give its text")
            row += 1
    if row != len(chunks):
        raise MiaError(
            f"chunk {chunks[row].id!r} belongs to no session: sessions must hold the chunks once each, in order"
        )


def _check_facts(mindscape: Mindscape) -> None:
    """Check books, nodes and window against chunks and sessions."""
    if mindscape.window is not None and mindscape.window < 1:
        raise MiaError(f"window is {mindscape.window}: a window holds at least 1 chunk (the papers use {WINDOW})")
    _unique([b.id for b in mindscape.books], "book id", "give one BookFacts a book")
    _unique([n.id for n in mindscape.nodes], "node id", "put the book's id before it")
    _unique([t.book_id for t in mindscape.tails], "tail of book", "give one a book")
    known = {s.book_id for s in mindscape.sessions}
    for what, name, book in (
        *(("book", b.id, b.id) for b in mindscape.books),
        *(("node", n.id, n.book_id) for n in mindscape.nodes),
        *(("tail", t.book_id, t.book_id) for t in mindscape.tails),
    ):
        if book not in known:
            raise MiaError(f"{what} {name!r}: no chunk belongs to book {book!r}; drop it, or give the book's chunks")
    if mindscape.nodes:
        ids = {c.id for c in mindscape.chunks}
        for node in mindscape.nodes:
            unknown = next((i for i in node.chunk_ids if i not in ids), None)
            if unknown is not None:
                raise MiaError(f"node {node.id!r} names chunk {unknown!r}, which is not there: drop it")
