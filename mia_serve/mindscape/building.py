"""From books and chats as they were read to a mindscape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mia_serve.mindscape.chunking import OpenText, chunk_open
from mia_serve.mindscape.mindscape import WINDOW, Mindscape, Summarise, summarised
from mia_serve.mindscape.records import Book, BookFacts, ConversationSession, Tail, Window
from mia_serve.mindscape.sources import SourceBook, SourceChat, Sources


def build_mindscape(
    sources: Sources,
    tokenizer: Any,
    summarise: Summarise,
    *,
    size: int = 1200,
    overlap: int = 100,
    window: int = WINDOW,
    summarizer: str = "custom",
    chats: Summarise | None = None,
) -> Mindscape:
    """Cut books into chunks and windows, sum up the windows and the sessions of the chats.

    The mindscape keeps where each book's text ends, so that `append_text` can go on.

    Args:
        sources: What `read_sources` returns.
        tokenizer: As in `chunk_text`; may be None for chats alone.
        summarise: Makes the summaries of all windows of the books, in one call.
        size: Most tokens in a chunk of a book.
        overlap: Tokens that a chunk shares with the one before.
        window: Chunks in a full window.
        summarizer: Name to record for the summaries.
        chats: Makes the summaries of the sessions of the chats, in one call; `summarise` where None.

    Returns:
        The mindscape: the books first, then the chats.

    Raises:
        MiaError: As `chunk_text` and `Mindscape`.
    """
    parts = []
    if sources.books:
        parts.append(_of_books(sources.books, tokenizer, summarise, size, overlap, window, summarizer))
    if sources.chats:
        parts += _of_chats(sources.chats, chats or summarise, summarizer)
    return replace(Mindscape.concat(parts), window=window)


def turn_ids(session: str, names: Sequence[str], first: int = 0) -> list[str]:
    """Name the turns of a session: by their own names, else by their place in it, `first` being that of the first."""
    return [name or f"{session}:{i}" for i, name in enumerate(names, first)]


def _of_books(
    sources: Sequence[SourceBook],
    tokenizer: Any,
    summarise: Summarise,
    size: int,
    overlap: int,
    window: int,
    summarizer: str,
) -> Mindscape:
    books, tails = [], []
    for source in sources:
        chunks, closed, rest = chunk_open(OpenText(), source.text, tokenizer, size, overlap)
        books.append(Book(source.id, tuple(chunk.text for chunk in chunks), source.title, author=source.author))
        tails.append(Tail(source.id, closed, *rest, size, overlap))
    return replace(Mindscape.from_books(books, window, summarise, summarizer), tails=tuple(tails))


def _of_chats(chats: Sequence[SourceChat], summarise: Summarise, summarizer: str) -> list[Mindscape]:
    windows = [
        Window(session.turns, chat.title, chat.id, part, len(chat.sessions), session.date)
        for chat in chats
        for part, session in enumerate(chat.sessions, 1)
    ]
    made = iter(summarised(windows, summarise))
    parts = []
    for chat in chats:
        sessions = [
            ConversationSession(
                s.id, s.turns, next(made), tuple(turn_ids(s.id, s.turn_ids)), title=chat.title, date=s.date
            )
            for s in chat.sessions
        ]
        part = Mindscape.from_conversation(chat.id, sessions, summarizer)
        parts.append(replace(part, books=(BookFacts(chat.id, chat.title),)))
    return parts
