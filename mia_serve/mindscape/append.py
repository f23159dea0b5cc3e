"""A mindscape that grows: more text of a book, more turns of a chat, and a valid mindscape after each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mia_serve.core import MiaError
from mia_serve.mindscape.building import turn_ids
from mia_serve.mindscape.chunking import OpenText, chunk_open
from mia_serve.mindscape.mindscape import Mindscape, Summarise, summarised
from mia_serve.mindscape.records import BookFacts, Chunk, Session, Tail, Window

#: Notes of a mindscape: sessions whose summary is provisional; session -> why its summary is a stand-in; chunk -> why
#: its entities are missing.
OPEN, FAILED, NO_ENTITIES = "open", "failed", "failed_entities"


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
    rest = OpenText(tail.text, tail.start, tail.skip)
    chunks, closed, rest = chunk_open(rest, text, tokenizer, tail.size, tail.overlap)
    return Addition(
        book_id,
        tuple(chunk.text for chunk in chunks),
        title=title,
        author=author,
        keep=tail.closed,
        tail=Tail(book_id, tail.closed + closed, *rest, tail.size, tail.overlap),
    )


@dataclass
class _Part:
    """A session in the making."""

    id: str
    book_id: str
    title: str
    date: str = ""
    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    summary: str = ""
    window: bool = True  # of a book, and not a session of a chat


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
    books = _parts(mindscape)
    before = {part.id: (list(part.texts), part.summary) for parts in books.values() for part in parts}
    for addition in additions:
        _add(books.setdefault(addition.book_id, []), addition, mindscape.window)
    touched = {addition.book_id for addition in additions}
    waiting, failed = set(mindscape.notes.get(OPEN, ())), dict(mindscape.notes.get(FAILED, {}))
    asked: dict[str, list[tuple[_Part, Window]]] = {"books": [], "chats": [], "open": []}
    for parts in books.values():
        for i, part in enumerate(parts):
            last = i == len(parts) - 1 and (not part.window or len(part.texts) < (mindscape.window or 0))
            still = provisional is not None and last and (part.book_id in touched or part.id in waiting)
            texts, part.summary = before.get(part.id, ([], ""))  # a window may have been cut anew and be the same
            changed = part.texts != texts or part.id in failed
            if changed or (part.id in waiting and not still):
                place = Window(tuple(part.texts), part.title, part.book_id, i + 1, len(parts), part.date)
                asked["open" if still else "books" if part.window else "chats"].append((part, place))
                failed.pop(part.id, None)
                (waiting.add if still else waiting.discard)(part.id)
    makers = {"books": summarise, "chats": chats or summarise, "open": provisional or summarise}
    for kind, items in asked.items():
        for (part, _), summary in zip(items, summarised([w for _, w in items], makers[kind]), strict=True):
            part.summary = summary
    return _assembled(mindscape, books, additions, waiting, failed)


def _parts(mindscape: Mindscape) -> dict[str, list[_Part]]:
    texts = {chunk.id: chunk.text for chunk in mindscape.chunks}
    books: dict[str, list[_Part]] = {}
    for s in mindscape.sessions:
        own = books.setdefault(s.book_id, [])
        # A session of a chat may be called w0 too, and its turns w0:0, w0:1 and so on.
        window = s.id == f"{s.book_id}:w{len(own)}" and not s.chunk_ids[0].startswith(f"{s.id}:")
        held = [texts[i] for i in s.chunk_ids]
        own.append(_Part(s.id, s.book_id, s.title, s.date, list(s.chunk_ids), held, s.summary, window))
    return books


def _add(parts: list[_Part], addition: Addition, window: int | None) -> None:
    if not addition.texts:
        raise MiaError(f"nothing is added to {addition.book_id!r}: give at least one text")
    if addition.session is not None:
        _add_turns(parts, addition, addition.session)
        return
    if any(not part.window for part in parts):
        raise MiaError(f"{addition.book_id!r} is a chat: name the session that its turns belong to")
    if window is None:
        raise MiaError("the mindscape does not say how many chunks a window has: build it again, then append")
    count = sum(len(part.ids) for part in parts)
    keep = count if addition.keep is None else addition.keep
    while parts and count > keep:
        cut = min(count - keep, len(parts[-1].ids))
        del parts[-1].ids[-cut:], parts[-1].texts[-cut:]
        count -= cut
        if not parts[-1].ids:
            addition = replace(addition, title=addition.title or parts[-1].title)
            parts.pop()
    for i, text in enumerate(addition.texts, count):
        if not parts or len(parts[-1].ids) == window:
            title = parts[-1].title if parts else addition.title
            parts.append(_Part(f"{addition.book_id}:w{len(parts)}", addition.book_id, title))
        parts[-1].ids.append(f"{addition.book_id}:{i}")
        parts[-1].texts.append(text)


def _add_turns(parts: list[_Part], addition: Addition, session: str) -> None:
    name = f"{addition.book_id}:{session}"
    if parts and parts[-1].window:
        raise MiaError(f"{addition.book_id!r} is a book: add chunks to it, without a session")
    if not parts or parts[-1].id != name:
        if any(part.id == name for part in parts):
            raise MiaError(f"session {session!r} of {addition.book_id!r} has ended: add to its last one, or a new one")
        title = parts[-1].title if parts else addition.title
        parts.append(_Part(name, addition.book_id, title, addition.date, window=False))
    names = [*addition.names, *[""] * (len(addition.texts) - len(addition.names))]
    ids = turn_ids(session, names, len(parts[-1].ids))
    parts[-1].ids += [f"{addition.book_id}:{i}" for i in ids]
    parts[-1].texts += addition.texts


def _assembled(
    mindscape: Mindscape,
    books: dict[str, list[_Part]],
    additions: Sequence[Addition],
    waiting: Iterable[str],
    failed: dict[str, str],
) -> Mindscape:
    everything = [part for parts in books.values() for part in parts]
    ids = {i for part in everything for i in part.ids}
    touched = {addition.book_id: addition for addition in additions}
    known = {facts.id for facts in mindscape.books}
    facts = [replace(b, summary="") if b.id in touched else b for b in mindscape.books]
    present = {session.book_id for session in mindscape.sessions}
    new = (a for a in touched.values() if a.book_id not in known | present)
    tails = {t.book_id: t for t in mindscape.tails if t.book_id not in touched}
    tails |= {a.book_id: a.tail for a in touched.values() if a.tail is not None}
    notes = dict(mindscape.notes) | {OPEN: sorted(waiting), FAILED: failed}
    return Mindscape(
        tuple(Chunk(i, text, p.id, p.book_id) for p in everything for i, text in zip(p.ids, p.texts, strict=True)),
        tuple(Session(p.id, p.book_id, tuple(p.ids), p.summary, p.title, p.date) for p in everything),
        mindscape.summarizer,
        (*facts, *(BookFacts(a.book_id, a.title, a.author) for a in new)),
        # A chunk that was cut anew has its old id; should there be fewer of them, nothing may name the last one.
        tuple(replace(n, chunk_ids=tuple(i for i in n.chunk_ids if i in ids)) for n in mindscape.nodes),
        mindscape.window,
        tuple(tails[book] for book in books if book in tails),
        {key: value for key, value in notes.items() if value or key not in (OPEN, FAILED)},
    )
