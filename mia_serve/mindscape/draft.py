"""A mindscape in the making: changes are put into it one by one, then it is summed up and made once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mia_serve.core import MiaError
from mia_serve.mindscape.mindscape import Mindscape, Summarise, summarised
from mia_serve.mindscape.records import BookFacts, Chunk, Session, Tail, Window

#: Notes of a mindscape: sessions whose summary is provisional; session -> why its summary is a stand-in; chunk -> why
#: its entities are missing.
OPEN, FAILED, NO_ENTITIES = "open", "failed", "failed_entities"

#: Further notes: numbers that ids of deleted chunks and windows had (book -> what stands before the number -> the next
#: one), and books and chats that their ids do not tell apart (book -> "book" or "chat").
NEXT, KINDS = "next", "kinds"
_OURS = (OPEN, FAILED, NEXT, KINDS, NO_ENTITIES)


@dataclass(frozen=True)
class Addition:
    """What is added to one book or to one session of a chat.

    Attributes:
        book_id: The book or chat; a new one is put behind all others.
        texts: Chunks of the book, or turns of the session.
        session: Id of the session, without the chat's; None for a book.
        date: Date of a new session.
        names: Names of the turns, `""` or missing for none.
        title: Title of a new book or chat.
        author: Author of a new book.
        keep: Chunks of the book that stay, the others are replaced; None: all stay.
        tail: Where the book's text ends now; None: it cannot be gone on with.
        ids: Ids of the chunks or turns, used as they are; `""` or missing: they are named by book, session and number.
    """

    book_id: str
    texts: tuple[str, ...]
    session: str | None = None
    date: str = ""
    names: tuple[str, ...] = ()
    title: str = ""
    author: str = ""
    keep: int | None = None
    tail: Tail | None = None
    ids: tuple[str, ...] = ()


class Changes(NamedTuple):
    """Ids of the chunks that a change has added, given another text, and deleted."""

    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()


@dataclass
class _Part:
    """A session in the making."""

    id: str
    book_id: str
    title: str
    date: str = ""
    chunks: list[Chunk] = field(default_factory=list)
    window: bool = True  # of a book, and not a session of a chat
    made: Session | None = None  # what it was made from

    @property
    def texts(self) -> list[str]:
        return [chunk.text for chunk in self.chunks]


class Draft:
    """Takes additions, deletions and new texts; each is done whole or, where it is refused, not at all.

    New chunks and windows are numbered behind the highest number that their book has had, so while a book is there no
    id of it comes to mean another text. A book that is removed, and added again later, begins anew.

    Args:
        mindscape: What is there, never changed; None for nothing.
        window: Chunks in a window, where there is no mindscape to say it.
        summarizer: Who writes summaries, where there is no mindscape to say it.
    """

    def __init__(self, mindscape: Mindscape | None, window: int | None = None, summarizer: str = "custom") -> None:
        self.mindscape = mindscape
        self.window = mindscape.window if mindscape is not None else window
        self.summarizer = mindscape.summarizer if mindscape is not None else summarizer
        self.tails: dict[str, Tail] = {}
        self._facts: dict[str, BookFacts] = {}
        self._books: dict[str, list[_Part]] = {}
        self._part_of: dict[str, _Part] = {}
        self._before: dict[str, tuple[list[str], str]] = {}  # texts and summary of sessions that were touched
        self._touched: set[str] = set()
        self._removed: set[str] = set()
        self._past: dict[str, dict[str, int]] = {}
        self._numbers: dict[str, int] = {}
        if mindscape is not None:
            self.tails = {tail.book_id: tail for tail in mindscape.tails}
            self._facts = {facts.id: facts for facts in mindscape.books}
            self._past = {book: dict(past) for book, past in mindscape.notes.get(NEXT, {}).items()}
            self._fill(mindscape)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._part_of

    def count(self, book_id: str) -> int:
        """Count the chunks of a book or chat; 0 where there is none of that name."""
        return sum(len(part.chunks) for part in self._books.get(book_id, ()))

    def add(self, addition: Addition) -> Changes:
        """Add to a book or chat.

        Raises:
            MiaError: There are no texts or an empty one, the session has ended, an id is there already, a book is
                taken for a chat or a chat for a book, or nothing says how many chunks a window has.
        """
        if not addition.texts:
            raise MiaError(f"nothing is added to {addition.book_id!r}: give at least one text")
        new = addition.book_id not in self._books
        add = self._add_chunks if addition.session is None else self._add_turns
        changes = add(self._books.get(addition.book_id, []), addition)
        self._touch_book(addition.book_id)
        if new:
            self._facts[addition.book_id] = BookFacts(addition.book_id, addition.title, addition.author)
        if addition.tail is not None:
            self.tails[addition.book_id] = addition.tail
        return changes

    def remove(self, ids: Sequence[str]) -> Changes:
        """Remove chunks; ids that are not there are left out. Sessions and books that this empties go too."""
        gone = [i for i in dict.fromkeys(ids) if i in self._part_of]
        parts: dict[str, _Part] = {}
        for chunk_id in gone:
            part = self._part_of.pop(chunk_id)
            if part.id not in parts:
                parts[part.id] = part
                self._touch(part)
            self._remember(part.book_id, f"{part.book_id}:" if part.window else f"{part.id}:", chunk_id)
        self._removed |= set(gone)
        for part in parts.values():
            part.chunks = [chunk for chunk in part.chunks if chunk.id in self._part_of]
            if not part.chunks:
                self._remember(part.book_id, f"{part.book_id}:w", part.id)
        for book_id in dict.fromkeys(part.book_id for part in parts.values()):
            self._touch_book(book_id)
            self._books[book_id] = [part for part in self._books[book_id] if part.chunks]
            if not self._books[book_id]:
                self._forget(book_id)
        return Changes(deleted=tuple(gone))

    def remove_book(self, book_id: str) -> Changes:
        """Remove a book or chat with all that is known of it; nothing where there is none of that name."""
        return self.remove([chunk.id for part in self._books.get(book_id, ()) for chunk in part.chunks])

    def replace(self, texts: Mapping[str, str]) -> Changes:
        """Give chunks other texts, in their places.

        Raises:
            MiaError: A chunk is not there, or a text is empty.
        """
        for chunk_id, text in texts.items():
            if chunk_id not in self._part_of:
                raise MiaError(f"there is no chunk {chunk_id!r}: add it, or give the id of one that is there")
            _check_text(chunk_id, text)
        changed = []
        for chunk_id, text in texts.items():
            part = self._part_of[chunk_id]
            row = next(i for i, chunk in enumerate(part.chunks) if chunk.id == chunk_id)
            if part.chunks[row].text != text:
                self._touch(part)
                self._touch_book(part.book_id)
                part.chunks[row] = replace(part.chunks[row], text=text)
                changed.append(chunk_id)
        return Changes(replaced=tuple(changed))

    def finish(
        self, summarise: Summarise, *, chats: Summarise | None = None, provisional: Summarise | None = None
    ) -> Mindscape | None:
        """Sum up what has changed and make the mindscape.

        Summed up are windows and sessions whose texts changed, those of stand-ins (`notes["failed"]`), and provisional
        ones (`notes["open"]`) that have ended.

        Args:
            summarise: Makes the summaries of windows of books.
            chats: Makes those of sessions of chats; `summarise` where None.
            provisional: Makes those of windows and sessions that may still grow; as the others where None.

        Returns:
            The mindscape; None where nothing is left.

        Raises:
            MiaError: The mindscape does not fit, or a summariser gave another number of summaries than asked for.
        """
        notes = dict(self.mindscape.notes) if self.mindscape is not None else {}
        waiting, failed = set(notes.get(OPEN, ())), dict(notes.get(FAILED, {}))
        asked: dict[str, list[tuple[_Part, Window]]] = {"books": [], "chats": [], "open": []}
        summaries: dict[str, str] = {}
        for part, place, last in self._places():
            still = provisional is not None and last and (part.book_id in self._touched or part.id in waiting)
            texts, summary = self._before.get(part.id, ([], ""))
            if part.made is not None and part.id not in self._before:
                texts, summary = list(place.texts), part.made.summary
            summaries[part.id] = summary
            changed = list(place.texts) != texts or part.id in failed
            if changed or (part.id in waiting and not still):
                asked["open" if still else "books" if part.window else "chats"].append((part, place))
                failed.pop(part.id, None)
                (waiting.add if still else waiting.discard)(part.id)
        makers = {"books": summarise, "chats": chats or summarise, "open": provisional or summarise}
        for kind, items in asked.items():
            for (part, _), text in zip(items, summarised([w for _, w in items], makers[kind]), strict=True):
                summaries[part.id] = text
        notes[OPEN] = sorted(waiting & summaries.keys())
        notes[FAILED] = {session: why for session, why in failed.items() if session in summaries}
        return self._assembled(summaries, notes) if summaries else None

    def _fill(self, mindscape: Mindscape) -> None:
        kinds = mindscape.notes.get(KINDS, {})
        row = 0
        for s in mindscape.sessions:
            kind = kinds.get(s.book_id)
            window = _looks_like_window(s.id, s.book_id, s.chunk_ids[0]) if kind is None else kind == "book"
            chunks = list(mindscape.chunks[row : row + len(s.chunk_ids)])
            row += len(chunks)
            part = _Part(s.id, s.book_id, s.title, s.date, chunks, window, s)
            self._books.setdefault(s.book_id, []).append(part)
            self._part_of.update(dict.fromkeys(s.chunk_ids, part))

    def _add_chunks(self, parts: list[_Part], addition: Addition) -> Changes:
        book_id, window = addition.book_id, self.window
        if any(not part.window for part in parts):
            raise MiaError(f"{book_id!r} is a chat: name the session that its turns belong to")
        if window is None:
            raise MiaError("the mindscape does not say how many chunks a window has: build it again, then append")
        old = [chunk for part in parts for chunk in part.chunks]
        cut = {chunk.id: chunk.text for chunk in old[len(old) if addition.keep is None else addition.keep :]}
        ids = self._new_ids(addition, f"{book_id}:", [chunk.id for chunk in old[: len(old) - len(cut)]], cut)
        title = parts[-1].title if parts else addition.title
        parts = self._books.setdefault(book_id, parts)
        for chunk_id in reversed(cut):
            self._touch(parts[-1])
            parts[-1].chunks.pop()
            del self._part_of[chunk_id]
            if not parts[-1].chunks:
                parts.pop()
                self._numbers.pop(f"{book_id}:w", None)
        for chunk_id, text in zip(ids, addition.texts, strict=True):
            if not parts or len(parts[-1].chunks) >= window:
                number = self._next(book_id, f"{book_id}:w", [part.id for part in parts])
                self._numbers[f"{book_id}:w"] = number + 1
                parts.append(_Part(f"{book_id}:w{number}", book_id, title))
            self._append(parts[-1], chunk_id, text)
        added = tuple(i for i in ids if i not in cut)
        replaced = tuple(i for i, text in zip(ids, addition.texts, strict=True) if cut.get(i, text) != text)
        return Changes(added, replaced, tuple(i for i in cut if i not in self._part_of))

    def _add_turns(self, parts: list[_Part], addition: Addition) -> Changes:
        book_id, session = addition.book_id, addition.session
        name = f"{book_id}:{session}"
        if parts and parts[-1].window:
            raise MiaError(f"{book_id!r} is a book: add chunks to it, without a session")
        grows = bool(parts) and parts[-1].id == name
        if not grows and any(part.id == name for part in parts):
            raise MiaError(f"session {session!r} of {book_id!r} has ended: add to its last one, or a new one")
        ids = self._new_ids(addition, f"{name}:", [chunk.id for chunk in parts[-1].chunks] if grows else [], {})
        parts = self._books.setdefault(book_id, parts)
        if not grows:
            title = parts[-1].title if parts else addition.title
            parts.append(_Part(name, book_id, title, addition.date, window=False))
        for chunk_id, text in zip(ids, addition.texts, strict=True):
            self._append(parts[-1], chunk_id, text)
        return Changes(tuple(ids))

    def _append(self, part: _Part, chunk_id: str, text: str) -> None:
        self._touch(part)
        part.chunks.append(Chunk(chunk_id, text, part.id, part.book_id))
        self._part_of[chunk_id] = part

    def _new_ids(self, addition: Addition, prefix: str, kept: list[str], cut: Mapping[str, str]) -> list[str]:
        """Name the texts of an addition; `kept` are the ids before them, those of `cut` are free again."""
        texts = addition.texts
        given = [*addition.ids, *[""] * (len(texts) - len(addition.ids))]
        names = [*addition.names, *[""] * (len(texts) - len(addition.names))]
        if cut:
            self._numbers.pop(prefix, None)
        number = self._next(addition.book_id, prefix, kept)
        ids: list[str] = []
        for own, name in zip(given, names, strict=True):
            chunk_id = own or (f"{addition.book_id}:{name}" if name else f"{prefix}{number}")
            while not own and not name and chunk_id in self._part_of and chunk_id not in cut:
                number += 1  # somebody else's own id
                chunk_id = f"{prefix}{number}"
            ids.append(chunk_id)
            number += 1
        seen: set[str] = set()
        for chunk_id, text in zip(ids, texts, strict=True):
            if chunk_id in seen or (chunk_id in self._part_of and chunk_id not in cut):
                raise MiaError(f"chunk id {chunk_id!r} occurs twice: give another one, or replace the chunk's text")
            _check_text(chunk_id, text)
            seen.add(chunk_id)
        self._numbers[prefix] = number
        return ids

    def _next(self, book_id: str, prefix: str, ids: Sequence[str]) -> int:
        """Return the number of what follows these ids: its place, or behind all numbers that are, or were, there."""
        known = self._numbers.get(prefix)
        if known is not None:
            return known
        return max(len(ids), _behind(ids, prefix), self._past.get(book_id, {}).get(prefix, 0))

    def _remember(self, book_id: str, prefix: str, name: str) -> None:
        number = _number(name, prefix)
        if number is not None:
            past = self._past.setdefault(book_id, {})
            past[prefix] = max(past.get(prefix, 0), number + 1)

    def _touch(self, part: _Part) -> None:
        if part.made is not None:
            self._before.setdefault(part.id, (part.texts, part.made.summary))

    def _touch_book(self, book_id: str) -> None:
        """Drop what holds of the book no longer: its summary, and where its text ends."""
        self._touched.add(book_id)
        self.tails.pop(book_id, None)
        if book_id in self._facts and self._facts[book_id].summary:
            self._facts[book_id] = replace(self._facts[book_id], summary="")

    def _forget(self, book_id: str) -> None:
        del self._books[book_id]
        self._facts.pop(book_id, None)
        self._past.pop(book_id, None)
        for prefix in [prefix for prefix in self._numbers if prefix.startswith(f"{book_id}:")]:
            del self._numbers[prefix]

    def _places(self) -> Iterator[tuple[_Part, Window, bool]]:
        """Yield each session, what its summary is made of, and whether it may still grow."""
        for parts in self._books.values():
            for i, part in enumerate(parts):
                last = i == len(parts) - 1 and (not part.window or len(part.chunks) < (self.window or 0))
                place = Window(tuple(part.texts), part.title, part.book_id, i + 1, len(parts), part.date)
                yield part, place, last

    def _assembled(self, summaries: Mapping[str, str], notes: dict[str, Any]) -> Mindscape:
        parts = [part for own in self._books.values() for part in own]
        nodes = self.mindscape.nodes if self.mindscape is not None else ()
        notes[NEXT], notes[KINDS] = self._still_past(), self._kinds()
        notes[NO_ENTITIES] = {i: why for i, why in notes.get(NO_ENTITIES, {}).items() if i in self._part_of}
        return Mindscape(
            tuple(chunk for part in parts for chunk in part.chunks),
            tuple(_session(part, summaries[part.id]) for part in parts),
            self.summarizer,
            tuple(self._facts[book] for book in self._books if book in self._facts),
            # What was found nowhere but in chunks that were removed goes with them. A chunk that was cut anew has its
            # old id; should there be fewer of them, nothing may name the last one.
            tuple(
                replace(n, chunk_ids=tuple(i for i in n.chunk_ids if i in self._part_of))
                for n in nodes
                if n.book_id in self._books and not (n.chunk_ids and self._removed.issuperset(n.chunk_ids))
            ),
            self.window,
            tuple(self.tails[book] for book in self._books if book in self.tails),
            {
                key: value
                for key, value in notes.items()
                if value or key not in (OPEN, FAILED, NEXT, KINDS, NO_ENTITIES)
            },
        )

    def _still_past(self) -> dict[str, dict[str, int]]:
        """Return the numbers to remember: those that the ids that are there do not tell."""
        found: dict[str, dict[str, int]] = {}
        for book_id, past in self._past.items():
            parts = self._books.get(book_id, [])
            for prefix, number in past.items() if parts else ():
                there = [part.id for part in parts]
                if prefix != f"{book_id}:w":
                    inside = [part for part in parts if part.window or f"{part.id}:" == prefix]
                    there = [chunk.id for part in inside for chunk in part.chunks]
                if max(len(there), _behind(there, prefix)) < number:
                    found.setdefault(book_id, {})[prefix] = number
        return found

    def _kinds(self) -> dict[str, str]:
        """Return the kind of each book that its ids would be misread of."""
        return {
            book_id: "book" if parts[0].window else "chat"
            for book_id, parts in self._books.items()
            if any(_looks_like_window(p.id, book_id, p.chunks[0].id) != p.window for p in parts)
        }


def _looks_like_window(session_id: str, book_id: str, chunk_id: str) -> bool:
    # A session of a chat may be called w0 too, and its turns w0:0, w0:1 and so on.
    return _number(session_id, f"{book_id}:w") is not None and not chunk_id.startswith(f"{session_id}:")


def _number(name: str, prefix: str) -> int | None:
    rest = name[len(prefix) :] if name.startswith(prefix) else ""
    if not (rest.isascii() and rest.isdigit()) or len(rest) > 18 or (rest[0] == "0" and rest != "0"):
        return None  # not a number as one is written here
    return int(rest)


def _behind(ids: Sequence[str], prefix: str) -> int:
    return max((n + 1 for n in (_number(i, prefix) for i in ids) if n is not None), default=0)


def _check_text(chunk_id: str, text: str) -> None:
    if not text.strip():
        raise MiaError(f"chunk {chunk_id!r} is empty: drop it or give its text")


def _session(part: _Part, summary: str) -> Session:
    session = Session(part.id, part.book_id, tuple(c.id for c in part.chunks), summary, part.title, part.date)
    return part.made if part.made == session else session
