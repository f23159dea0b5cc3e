"""A mindscape that is edited: chunks and books go, texts change, and what is left is a valid mindscape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mia_serve.core import MiaError
from mia_serve.mindscape.draft import Draft
from mia_serve.mindscape.mindscape import Mindscape, Summarise


def remove_chunks(
    mindscape: Mindscape, ids: Sequence[str], summarise: Summarise, *, chats: Summarise | None = None
) -> Mindscape:
    """Remove chunks; ids that are not there are left out.

    Sessions that lose some of their chunks are summed up again, those that lose all of them go, and so do books. The
    others stay as they are: windows are not filled up from the next one. Entities that were found in the removed chunks
    alone go as well. The text of a book that was edited cannot be gone on with (`append_text`).

    Args:
        mindscape: What is there; it is not changed.
        ids: The chunks.
        summarise: Makes the summaries of the windows that changed, in one call.
        chats: Makes those of sessions of chats; `summarise` where None.

    Raises:
        MiaError: Nothing would be left.
    """
    draft = Draft(mindscape)
    draft.remove(ids)
    return _finished(draft, summarise, chats)


def replace_texts(
    mindscape: Mindscape, texts: Mapping[str, str], summarise: Summarise, *, chats: Summarise | None = None
) -> Mindscape:
    """Give chunks other texts, in their places; their sessions are summed up again.

    Args:
        mindscape: What is there; it is not changed.
        texts: Chunk id -> text.
        summarise: As in `remove_chunks`; so is `chats`.
        chats: See `summarise`.

    Raises:
        MiaError: A chunk is not there, or a text is empty.
    """
    draft = Draft(mindscape)
    draft.replace(texts)
    return _finished(draft, summarise, chats)


def remove_book(mindscape: Mindscape, book_id: str) -> Mindscape:
    """Remove a book or chat with all that is known of it.

    Raises:
        MiaError: There is no book of that name, or nothing would be left.
    """
    draft = Draft(mindscape)
    if not draft.remove_book(book_id).deleted:
        raise MiaError(f"the mindscape has no book {book_id!r}: give the book_id of a chunk")
    return _finished(draft, lambda windows: [], None)


def _finished(draft: Draft, summarise: Summarise, chats: Summarise | None) -> Mindscape:
    edited = draft.finish(summarise, chats=chats)
    if edited is None:
        raise MiaError("nothing would be left of the mindscape: remove its folder instead")
    return edited
