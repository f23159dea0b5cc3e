"""The records of a mindscape, and what one is built from."""

from __future__ import annotations

from dataclasses import dataclass


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
class Book:
    """Input of `Mindscape.from_books`.

    Attributes:
        id: Name of the book, unique in its collection.
        chunks: The texts of its passages, in reading order.
        title: Title, handed to the summariser and kept with each session.
        chunk_ids: Ids of the passages, used as they are; `{id}:{i}` when not given.
        summaries: One summary per window of the book; None lets the summariser make them.
    """

    id: str
    chunks: tuple[str, ...]
    title: str = ""
    chunk_ids: tuple[str, ...] | None = None
    summaries: tuple[str, ...] | None = None


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
