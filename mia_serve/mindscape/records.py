"""The records of a mindscape, and what one is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Chunk:
    """The smallest retrievable text: a passage of a book, or one turn of a conversation."""

    id: str
    text: str
    session_id: str
    book_id: str


@dataclass(frozen=True)
class Session:
    """A run of consecutive chunks with one summary: a window of a book, or one dated chat session."""

    id: str
    book_id: str
    chunk_ids: tuple[str, ...]
    summary: str
    title: str = ""
    date: str = ""


@dataclass(frozen=True)
class BookFacts:
    """What a mindscape knows of a whole book (or conversation).

    Attributes:
        id: The `book_id` of its chunks and sessions.
        title: Title, if it has one.
        author: Author, as the source writes the name.
        summary: Summary of the whole book, `""` where none was made.
    """

    id: str
    title: str = ""
    author: str = ""
    summary: str = ""


@dataclass(frozen=True)
class Node:
    """An entity of a book: a person, a place, a thing.

    Attributes:
        id: Unique in the mindscape.
        name: Its name, as the book writes it.
        description: What the book says of it.
        book_id: The book it belongs to.
        kind: "person", "place" and the like; `""` where it was not said.
        chunk_ids: Chunks that it was found in.
    """

    id: str
    name: str
    description: str
    book_id: str
    kind: str = ""
    chunk_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tail:
    """Where the text of a book ends so far, for `append_text` to go on.

    Attributes:
        book_id: The book.
        closed: Chunks of the book that can no longer change; those behind them are cut anew.
        text: See `OpenText`; so are `start` and `skip`.
        start: See `OpenText`.
        skip: See `OpenText`.
        size: Most tokens in a chunk.
        overlap: Tokens that a chunk shares with the one before.
    """

    book_id: str
    closed: int
    text: str
    start: int
    skip: int
    size: int
    overlap: int


class Window(NamedTuple):
    """What one summary is to be made of: consecutive chunks of a book, or the turns of one chat session.

    Attributes:
        texts: The texts of its chunks, in order.
        title: Title of the book (or session), `""` for none.
        book_id: The book (or conversation).
        part: Its place among the windows of the book, from 1.
        parts: Windows that the book has; of a book that still grows, those it has so far.
        date: Date of the chat session as its source writes it, `""` where none is known.
    """

    texts: tuple[str, ...]
    title: str = ""
    book_id: str = ""
    part: int = 1
    parts: int = 1
    date: str = ""


@dataclass(frozen=True)
class Book:
    """Input of `Mindscape.from_books`.

    Attributes:
        id: Name of the book, unique in its collection.
        chunks: The texts of its passages, in reading order.
        title: Title, handed to the summariser and kept with each session.
        chunk_ids: Ids of the passages, used as they are; `{id}:{i}` when not given.
        summaries: One summary per window of the book; None lets the summariser make them.
        author: Author, kept with the book.
    """

    id: str
    chunks: tuple[str, ...]
    title: str = ""
    chunk_ids: tuple[str, ...] | None = None
    summaries: tuple[str, ...] | None = None
    author: str = ""


@dataclass(frozen=True)
class ConversationSession:
    """Input of `Mindscape.from_conversation`: one dated session.

    Attributes:
        id: Name of the session, unique in its conversation.
        turns: The texts of its turns (`speaker: text`), in order.
        summary: Summary of the session.
        turn_ids: Names of the turns, unique in the conversation; `{id}:{i}` when not given.
        title: Title of the session, if it has one.
        date: Date as the source writes it.
    """

    id: str
    turns: tuple[str, ...]
    summary: str
    turn_ids: tuple[str, ...] | None = None
    title: str = ""
    date: str = ""
