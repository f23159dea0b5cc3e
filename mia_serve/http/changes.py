"""What a write changes, as a record of the log, and the way back from records to a mindscape.

A record says what is different, and not what was done: it is put together again without an encoder, a tokenizer or a
summariser, and means the same whatever they are by then. It brings the vectors of what is new in it.

    version      of the collection after the write
    chunks       [[id, text]] new ones, and those with another text
    sessions     [[id, book, [chunk ids], summary, title, date]] new ones, and those that are different
    gone         [session ids] that went
    order        [session ids], all of them, where the order does not follow from the rest
    books        [[id, title, author, summary]] facts that are new or different
    tails        {book: [closed, text, start, skip, size, overlap] or null} where that is different
    notes, summarizer, window   where they are different
    vectors      {spec hash: {dim, chunks, sessions}} rows of `chunks` and `sessions`, float32 little-endian in base64
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mia_serve.mindscape.mindscape import Mindscape
from mia_serve.mindscape.records import BookFacts, Chunk, Session, Tail


class Fresh(NamedTuple):
    """Vectors by chunk id and by session id, of one encoder."""

    chunks: dict[str, np.ndarray]
    sessions: dict[str, np.ndarray]


def change_record(version: int, old: Mindscape | None, new: Mindscape | None) -> dict[str, Any]:
    """Say what is different between two mindscapes (None: nothing is there), but for vectors and nodes."""
    record: dict[str, Any] = {"version": version}
    before = {s.id: s for s in old.sessions} if old else {}
    texts = {c.id: c for c in old.chunks} if old else {}
    sessions = new.sessions if new else ()
    changed = [s for s in sessions if (known := before.get(s.id)) is not s and known != s]
    left = {s.id for s in sessions}
    record["chunks"] = [
        [c.id, c.text]
        for c in (new.chunks if new else ())
        if (chunk := texts.get(c.id)) is not c and (chunk is None or chunk.text != c.text)
    ]
    record["sessions"] = [[s.id, s.book_id, list(s.chunk_ids), s.summary, s.title, s.date] for s in changed]
    record["gone"] = [i for i in before if i not in left]
    order = [s.id for s in sessions]
    if [s.id for s in _ordered(_placed(before.values(), record["gone"], changed))] != order:
        record["order"] = order
    facts = {b.id: b for b in old.books} if old else {}
    if books := [[b.id, b.title, b.author, b.summary] for b in (new.books if new else ()) if facts.get(b.id) != b]:
        record["books"] = books
    if tails := _changed_tails(old, new):
        record["tails"] = tails
    for key in ("notes", "summarizer", "window"):
        if new is not None and (old is None or getattr(old, key) != getattr(new, key)):
            value = getattr(new, key)
            record[key] = dict(value) if key == "notes" else value
    return record


def packed(fresh: Fresh, dim: int) -> dict[str, Any]:
    """Write vectors into a record's form."""
    return {
        "dim": dim,
        **{
            part: base64.b64encode(_rows(vectors.values(), dim).astype("<f4").tobytes()).decode()
            for part, vectors in fresh._asdict().items()
        },
    }


class Replay:
    """Puts a mindscape and its vectors together from one that was saved and the records behind it.

    Args:
        mindscape: What was saved; None for nothing.
        vectors: Its vectors, as `Retriever` takes them.
        version: Its version.
    """

    def __init__(self, mindscape: Mindscape | None, vectors: Mapping[str, np.ndarray], version: int) -> None:
        self.version = version
        self._saved = mindscape
        self._vectors = vectors
        self._sessions: dict[str, dict[str, Session]] = {}
        self._texts: dict[str, str] = {}
        self._facts: dict[str, BookFacts] = {}
        self._tails: dict[str, Tail] = {}
        self._notes: Mapping[str, Any] = {}
        self._summarizer, self._window = "custom", None
        self._changed: tuple[set[str], set[str]] = set(), set()
        self._fresh: dict[str, Fresh] = {}
        if mindscape is not None:
            self._sessions = _placed(mindscape.sessions, (), ())
            self._texts = {c.id: c.text for c in mindscape.chunks}
            self._facts = {b.id: b for b in mindscape.books}
            self._tails = {t.book_id: t for t in mindscape.tails}
            self._notes, self._summarizer, self._window = mindscape.notes, mindscape.summarizer, mindscape.window

    def apply(self, record: dict[str, Any]) -> None:
        """Take a record; they come in order."""
        self.version = record["version"]
        changed = [Session(i, book, tuple(ids), *rest) for i, book, ids, *rest in record["sessions"]]
        self._sessions = _placed(_ordered(self._sessions), record["gone"], changed)
        if "order" in record:
            by_id = {s.id: s for s in _ordered(self._sessions)}
            self._sessions = _placed([by_id[i] for i in record["order"]], (), ())
        self._texts |= dict(record["chunks"])
        self._facts |= {i: BookFacts(i, *rest) for i, *rest in record.get("books", ())}
        for book, tail in record.get("tails", {}).items():
            if tail is None:
                self._tails.pop(book, None)
            else:
                self._tails[book] = Tail(book, *tail)
        self._notes = record.get("notes", self._notes)
        self._summarizer, self._window = record.get("summarizer", self._summarizer), record.get("window", self._window)
        ids = [i for i, _ in record["chunks"]], [row[0] for row in record["sessions"]]
        for part in (0, 1):
            self._changed[part].update(ids[part])
            for fresh in self._fresh.values():
                for name in ids[part]:
                    fresh[part].pop(name, None)
        for spec_hash, rows in record["vectors"].items():
            own = self._fresh.setdefault(spec_hash, Fresh({}, {}))
            for part, name in enumerate(Fresh._fields):
                array = np.frombuffer(base64.b64decode(rows[name]), "<f4").reshape(-1, rows["dim"])
                own[part].update(zip(ids[part], array, strict=False))  # an encoder may have no rows of summaries

    def mindscape(self) -> Mindscape | None:
        """Return what is there after all records; None for nothing."""
        sessions = list(_ordered(self._sessions))
        if not sessions:
            return None
        known = {c.id: c for c in self._saved.chunks} if self._saved is not None else {}
        chunks = []
        for s in sessions:
            for i in s.chunk_ids:
                chunk = Chunk(i, self._texts[i], s.id, s.book_id)
                chunks.append(known[i] if known.get(i) == chunk else chunk)
        books = [book for book in self._sessions]
        return Mindscape(
            tuple(chunks),
            tuple(sessions),
            self._summarizer,
            tuple(self._facts[b] for b in books if b in self._facts),
            (),
            self._window,
            tuple(self._tails[b] for b in books if b in self._tails),
            self._notes,
        )

    def rows(self, part: str, spec_hash: str, ids: Sequence[str], dim: int) -> tuple[np.ndarray, list[int]]:
        """Collect an encoder's vectors of these chunks or sessions.

        Args:
            part: "chunks" or "sessions".
            spec_hash: The encoder's.
            ids: Of the mindscape's chunks or sessions.
            dim: Width of the vectors.

        Returns:
            (n, d) float32 rows, and which of them are not known.
        """
        which = Fresh._fields.index(part)
        fresh = self._fresh[spec_hash][which] if spec_hash in self._fresh else {}
        saved = self._vectors.get(spec_hash + ("/sessions" if part == "sessions" else ""))
        names = getattr(self._saved, part) if self._saved is not None else ()
        usable = saved is not None and saved.shape == (len(names), dim)
        row_of = {item.id: i for i, item in enumerate(names) if item.id not in self._changed[which]} if usable else {}
        return carried(saved if usable else None, row_of, ids, fresh, dim)


def carried(
    old: np.ndarray | None, row_of: Mapping[str, int], ids: Sequence[str], fresh: Mapping[str, np.ndarray], dim: int
) -> tuple[np.ndarray, list[int]]:
    """Put (n, d) rows together from fresh ones and old ones; also say which ids have neither."""
    out = np.empty((len(ids), dim), np.float32)
    take = np.fromiter((-1 if i in fresh else row_of.get(i, -2) for i in ids), np.int64, len(ids))
    if old is not None and (take >= 0).any():
        out[take >= 0] = old[take[take >= 0]]
    for place in np.flatnonzero(take == -1).tolist():
        out[place] = fresh[ids[place]]
    missing = np.flatnonzero(take == -2).tolist()
    return out, missing


def _placed(
    sessions: Iterable[Session], gone: Iterable[str], changed: Iterable[Session]
) -> dict[str, dict[str, Session]]:
    """Put sessions by their books: those that are there keep their places, new ones come last in their book."""
    left = set(gone)
    books: dict[str, dict[str, Session]] = {}
    for session in sessions:
        if session.id not in left:
            books.setdefault(session.book_id, {})[session.id] = session
    for session in changed:
        books.setdefault(session.book_id, {})[session.id] = session
    return books


def _ordered(books: Mapping[str, Mapping[str, Session]]) -> Iterable[Session]:
    return (session for own in books.values() for session in own.values())


def _changed_tails(old: Mindscape | None, new: Mindscape | None) -> dict[str, list[Any] | None]:
    before = {t.book_id: t for t in old.tails} if old else {}
    after = {t.book_id: t for t in new.tails} if new else {}
    tails: dict[str, list[Any] | None] = {book: None for book in before if book not in after}
    for book, tail in after.items():
        if before.get(book) != tail:
            tails[book] = [tail.closed, tail.text, tail.start, tail.skip, tail.size, tail.overlap]
    return tails


def _rows(vectors: Iterable[np.ndarray], dim: int) -> np.ndarray:
    rows = list(vectors)
    return np.stack(rows) if rows else np.empty((0, dim), np.float32)
