"""What can be written to a collection. Each operation is done whole, or refused and not done at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mia_serve.core import MiaError
from mia_serve.mindscape.append import text_behind
from mia_serve.mindscape.draft import Addition, Changes, Draft
from mia_serve.mindscape.records import Tail

#: The book of chunks that are upserted, are not there yet and name no book.
DEFAULT_BOOK = "default"

_LONGEST_ID = 512


class Conflict(MiaError):
    """What is to be added is there already."""


@dataclass(frozen=True)
class ChunkIn:
    """A chunk to write: its id, used as it is (None: one is made), and its text."""

    id: str | None
    text: str


@dataclass(frozen=True)
class TurnIn:
    """A turn to write: its id, used as it is (None: one is made), who speaks (may be empty), and what is said."""

    id: str | None
    speaker: str
    text: str


@dataclass(frozen=True)
class AddText:
    """Text of a book, cut into chunks here; of a book that is there it is the text that follows, without a gap.

    The last chunks of the text before may be cut anew, so that all chunks are those of the whole text cut at once. A
    book whose chunks were edited or given one by one goes on with a text of its own.
    """

    book_id: str
    text: str
    title: str = ""
    author: str = ""


@dataclass(frozen=True)
class AddChunks:
    """Chunks to put behind those of a book; title and author are those of a new book."""

    book_id: str
    chunks: tuple[ChunkIn, ...]
    title: str = ""
    author: str = ""


@dataclass(frozen=True)
class AddTurns:
    """Turns of a chat's last session, or of a new one, with which the last one ends; the date is a new session's."""

    conversation_id: str
    session_id: str
    turns: tuple[TurnIn, ...]
    date: str = ""


@dataclass(frozen=True)
class Upsert:
    """Texts by chunk id: of chunks that are there, in their places; others are put behind those of a book.

    Attributes:
        chunks: All with an id.
        book_id: Book of those that are not there yet.
    """

    chunks: tuple[ChunkIn, ...]
    book_id: str = DEFAULT_BOOK


@dataclass(frozen=True)
class DeleteChunks:
    """Chunks to delete by id; ids that are not there are no error."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class DeleteBook:
    """A book or chat to delete with all its chunks; one that is not there is no error."""

    book_id: str


Operation = AddText | AddChunks | AddTurns | Upsert | DeleteChunks | DeleteBook


class Written(NamedTuple):
    """What a write did.

    Attributes:
        version: The version of the collection that holds it.
        added: Ids of new chunks.
        replaced: Ids of chunks that have another text now.
        deleted: Ids of chunks that are gone.
        unknown: Ids that were to be deleted and are not there.
    """

    version: int
    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class Cutter(NamedTuple):
    """How texts are cut: by whose tokens, most tokens in a chunk, tokens that neighbours share."""

    tokenizer: Any
    size: int
    overlap: int


def apply(operation: Operation, draft: Draft, cutter: Cutter) -> Changes:
    """Do an operation to a draft.

    Raises:
        Conflict: An id is there already.
        MiaError: The operation is not possible. In both cases the draft is as it was.
    """
    match operation:
        case AddText(book_id, text, title, author):
            _check_ids([book_id], "book")
            _check_texts([text])
            tail = draft.tails.get(book_id) or Tail(
                book_id, draft.count(book_id), "", 0, 0, cutter.size, cutter.overlap
            )
            return draft.add(text_behind(tail, text, cutter.tokenizer, title, author))
        case AddChunks(book_id, chunks, title, author):
            _check_ids([book_id], "book")
            ids = _new_ids(draft, chunks)
            texts = _check_texts(chunk.text for chunk in chunks)
            return draft.add(Addition(book_id, texts, title=title, author=author, ids=ids))
        case AddTurns(conversation_id, session_id, turns, date):
            _check_ids([conversation_id, session_id], "conversation or session")
            ids = _new_ids(draft, turns)
            _check_texts(turn.text for turn in turns)
            texts = _check_texts(f"{turn.speaker}: {turn.text}" if turn.speaker else turn.text for turn in turns)
            return draft.add(Addition(conversation_id, texts, session_id, date, ids=ids))
        case Upsert():
            return _upsert(operation, draft)
        case DeleteChunks(ids):
            return draft.remove(ids)
        case DeleteBook(book_id):
            return draft.remove_book(book_id)


def size(operation: Operation) -> int:
    """Count the characters of an operation's texts."""
    match operation:
        case AddText():
            return len(operation.text)
        case AddChunks() | Upsert():
            return sum(len(chunk.text) for chunk in operation.chunks)
        case AddTurns():
            return sum(len(turn.text) for turn in operation.turns)
        case _:
            return 0


def unknown(operation: Operation, changes: Changes) -> tuple[str, ...]:
    """Return what an operation was to delete and has not found."""
    if isinstance(operation, DeleteBook):
        return () if changes.deleted else (operation.book_id,)
    gone = set(changes.deleted)
    return (
        tuple(i for i in dict.fromkeys(operation.ids) if i not in gone) if isinstance(operation, DeleteChunks) else ()
    )


def _upsert(operation: Upsert, draft: Draft) -> Changes:
    texts: dict[str, str] = {}
    for chunk in operation.chunks:
        if chunk.id is None:
            raise MiaError("a chunk to upsert has no id: give every one an id, or add them")
        if chunk.id in texts:
            raise Conflict(f"chunk id {chunk.id!r} occurs twice in one request: give each chunk once")
        texts[chunk.id] = chunk.text
    if not texts:
        raise MiaError("there is nothing to upsert: give at least one chunk")
    _check_ids([operation.book_id], "book")
    _check_ids(texts, "chunk")
    _check_texts(texts.values())
    new = {i: text for i, text in texts.items() if i not in draft}
    # The addition first: it may be refused, the rest no more.
    added = draft.add(Addition(operation.book_id, tuple(new.values()), ids=tuple(new))).added if new else ()
    return Changes(added, draft.replace({i: text for i, text in texts.items() if i not in new}).replaced)


def _new_ids(draft: Draft, items: Sequence[ChunkIn | TurnIn]) -> tuple[str, ...]:
    """Return the ids of chunks or turns to add, `""` where one is to be made."""
    given = [item.id for item in items if item.id is not None]
    _check_ids(given, "chunk")
    taken = next((i for i in given if i in draft), None)
    if taken is not None:
        raise Conflict(f"chunk {taken!r} is there already: give another id, or upsert it")
    twice = next((i for i in given if given.count(i) > 1), None) if len(set(given)) < len(given) else None
    if twice is not None:
        raise Conflict(f"chunk id {twice!r} occurs twice in one request: give each chunk an id of its own")
    return tuple(item.id or "" for item in items)


def _check_ids(ids: Iterable[str], what: str) -> None:
    for name in ids:
        if not name.strip() or len(name) > _LONGEST_ID:
            raise MiaError(f"{what} id of {len(name)} characters: give one of 1 to {_LONGEST_ID}, not blank")
        _check_unicode(name, f"{what} id")


def _check_texts(texts: Iterable[str]) -> tuple[str, ...]:
    texts = tuple(texts)
    for i, text in enumerate(texts):
        if not text.strip():
            raise MiaError(f"text {i} is empty: drop it or give its text")
        _check_unicode(text, f"text {i}")
    return texts


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MiaError(f"{what} holds half a character (a lone surrogate) at {error.start}: drop it") from None
