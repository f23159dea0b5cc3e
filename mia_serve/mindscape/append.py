"""A mindscape that grows: more text of a book, more turns of a chat, and a valid mindscape after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mia_serve.core import MiaError
from mia_serve.mindscape.chunking import OpenText, chunk_open
from mia_serve.mindscape.draft import FAILED, NO_ENTITIES, OPEN, Addition, Draft
from mia_serve.mindscape.mindscape import Mindscape, Summarise
from mia_serve.mindscape.records import Tail

__all__ = [
    "FAILED",
    "NO_ENTITIES",
    "OPEN",
    "Addition",
    "append_chunks",
    "append_text",
    "grow",
    "text_addition",
    "text_behind",
]


def append_chunks(
    mindscape: Mindscape,
    book_id: str,
    texts: Sequence[str],
    summarise: Summarise,
    *,
    session: str | None = None,
    date: str = "",
) -> Mindscape:
    """Add chunks to a book, or turns to a chat.

    The result is what building at once gives, however the texts are split over calls, if the summaries depend on the
    windows' texts alone. Only windows whose texts changed are summed up again.

    Args:
        mindscape: What is there; it is not changed.
        book_id: The book or chat; a new one is put behind all others.
        texts: The chunks, in reading order, or the turns.
        summarise: Makes the summaries of the windows that changed, in one call.
        session: Session of the chat that the turns belong to: its last one, which grows, or a new one, with which the
            last one ends. None for a book.
        date: Date of a new session.

    Returns:
        The mindscape with them. A summary of the whole book is dropped, as it is no longer one.

    Raises:
        MiaError: There are no texts, the session has ended, or the mindscape does not fit.
    """
    return grow(mindscape, [Addition(book_id, tuple(texts), session, date)], summarise)


def append_text(
    mindscape: Mindscape,
    book_id: str,
    text: str,
    tokenizer: Any,
    summarise: Summarise,
    *,
    size: int = 1200,
    overlap: int = 100,
) -> Mindscape:
    """Add text to a book: `append_chunks` with chunks as `chunk_text` makes them of the whole text.

    The last chunks are cut anew; see `chunk_open` for what holds of tokenizers.

    Args:
        mindscape: What is there; it is not changed.
        book_id: The book; a new one is put behind all others.
        text: What follows, without a gap.
        tokenizer: As in `chunk_text`, and the same as before.
        summarise: Makes the summaries of the windows that changed.
        size: Most tokens in a chunk of a new book; one that is there keeps its own.
        overlap: Tokens that a chunk of a new book shares with the one before.

    Raises:
        MiaError: As `append_chunks`, or the mindscape does not say where the book's text ends.
    """
    return grow(mindscape, [text_addition(mindscape, book_id, text, tokenizer, size, overlap)], summarise)


def text_addition(
    mindscape: Mindscape,
    book_id: str,
    text: str,
    tokenizer: Any,
    size: int,
    overlap: int,
    title: str = "",
    author: str = "",
) -> Addition:
    """Cut what is added to the text of a book; arguments as of `append_text` and `Addition`."""
    tail = next((tail for tail in mindscape.tails if tail.book_id == book_id), None)
    if tail is None:
        if any(session.book_id == book_id for session in mindscape.sessions):
            raise MiaError(
                f"the mindscape does not say where the text of {book_id!r} ends: build it again, or add chunks"
            )
        tail = Tail(book_id, 0, "", 0, 0, size, overlap)
    return text_behind(tail, text, tokenizer, title, author)


def text_behind(tail: Tail, text: str, tokenizer: Any, title: str = "", author: str = "") -> Addition:
    """Cut text that goes on where the text of a book ends; see `text_addition`."""
    rest = OpenText(tail.text, tail.start, tail.skip)
    chunks, closed, rest = chunk_open(rest, text, tokenizer, tail.size, tail.overlap)
    return Addition(
        tail.book_id,
        tuple(chunk.text for chunk in chunks),
        title=title,
        author=author,
        keep=tail.closed,
        tail=Tail(tail.book_id, tail.closed + closed, *rest, tail.size, tail.overlap),
    )


def grow(
    mindscape: Mindscape,
    additions: Sequence[Addition],
    summarise: Summarise,
    *,
    chats: Summarise | None = None,
    provisional: Summarise | None = None,
) -> Mindscape:
    """Add to several books and chats at once, with all that is to be summed up in one call.

    Summed up are windows and sessions whose texts changed, those of stand-ins (`notes["failed"]`), and provisional ones
    (`notes["open"]`) that have ended.

    Args:
        mindscape: What is there; it is not changed.
        additions: In order.
        summarise: Makes the summaries of windows of books.
        chats: Makes those of sessions of chats; `summarise` where None.
        provisional: Makes those of windows and sessions that may still grow; as the others where None.

    Raises:
        MiaError: As `append_chunks`.
    """
    draft = Draft(mindscape)
    for addition in additions:
        draft.add(addition)
    grown = draft.finish(summarise, chats=chats, provisional=provisional)
    assert grown is not None  # nothing was removed
    return grown
