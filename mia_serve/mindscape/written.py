"""Summaries written by a language model: of sessions, and of whole books out of those of their sessions."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from mia_serve.core import MiaError
from mia_serve.llm import ChatClient, LlmFailed, Message
from mia_serve.mindscape.calls import ask_all, together
from mia_serve.mindscape.fitting import Room, estimate_tokens, find_room, group_texts, halves
from mia_serve.mindscape.mindscape import Summarise, summarised
from mia_serve.mindscape.records import Window
from mia_serve.mindscape.replies import clean_reply, whole_enough
from mia_serve.mindscape.wording import (
    NOTHING,
    PROMPT_HASH,
    book_messages,
    chunk_messages,
    merge_messages,
    piece_messages,
    stretch_messages,
    window_messages,
)

__all__ = ["PROMPT_HASH", "LlmSummariser", "Written", "window_messages", "write_book_summaries", "write_summaries"]

T = TypeVar("T")
_Ask = Callable[[Sequence[str]], Awaitable[str]]

#: Most tokens of a reply; of one that was cut off its whole sentences are kept, if they are enough.
SESSION_TOKENS, BOOK_TOKENS = 512, 2048

# Most words and characters that are kept: about twice what is asked for. Five summaries of sessions are a signature.
_SESSION, _STRETCH, _BOOK = (200, 1600), (500, 4000), (1200, 9000)
_CHUNK = (499, 499)
_LEVELS = 6  # of summaries of summaries
_SPLITS = 4  # times that a prompt is halved which the endpoint calls too long


class Written(NamedTuple):
    """Summaries, and where the model gave none.

    Attributes:
        summaries: One each, in order.
        failures: Label of the failure (`LlmFailed.label`) by window: ``(book_id, part)``. For books the key is
            ``(place in the list, 0)``, and ``(place, n)`` for the n-th chunk, from 1, that is missing in the summary.
    """

    summaries: list[str]
    failures: dict[tuple[str, int], str]


async def write_summaries(
    client: ChatClient,
    windows: Sequence[Window],
    fallback: Summarise | None = None,
    progress: bool | None = None,
    *,
    chat: bool = False,
    max_tokens: int = SESSION_TOKENS,
    context_tokens: int | None = None,
) -> Written:
    """Let a model sum up each window in 50 to 100 words.

    As many windows are under way as the client lets through. A window that the model's context cannot hold is summed
    up in pieces, and then out of the summaries of these.

    Args:
        client: The model.
        windows: What is to be summed up.
        fallback: Makes the summaries of the windows that failed, in one call for all.
        progress: Whether stderr shows a bar; None: where it is a terminal.
        chat: Whether the windows are sessions of conversations.
        max_tokens: Most tokens of a reply.
        context_tokens: Tokens of a prompt and its reply together; None: what the endpoint says of the model.

    Raises:
        LlmFailed: The endpoint cannot be used, or the budget is spent; or some windows failed and there is no fallback
            (the others were asked all the same, so that a client that records need not ask again).
        MiaError: The context is too small, or the fallback does not return one summary a window.
    """
    if not windows:
        return Written([], {})
    frame = window_messages(max(windows, key=lambda w: len(w.title))._replace(texts=()), chat=chat)
    longest = max(sum(map(estimate_tokens, window.texts)) for window in windows)
    room = await find_room(client, frame, longest, max_tokens, context_tokens)
    results = await ask_all(client, windows, lambda w: _session(client, w, room, chat), "summarise", progress)
    failed = {i: result for i, result in enumerate(results) if isinstance(result, LlmFailed)}
    failures = {(windows[i].book_id, windows[i].part): failure.label for i, failure in failed.items()}
    stand_in: Mapping[int, str] = {}
    if failed and fallback is None:
        first = next(iter(failed.values()))
        raise LlmFailed(
            first.reason,
            f"{len(failed)} of {len(windows)} windows have no summary ({count_labels(failures)}), the first because "
            f"{first}; give a fallback for them, or run again",
            first.status,
        )
    if failed and fallback is not None:
        made = await asyncio.to_thread(summarised, [windows[i] for i in failed], fallback)
        stand_in = dict(zip(failed, made, strict=True))
    return Written([r if isinstance(r, str) else stand_in[i] for i, r in enumerate(results)], failures)


async def write_book_summaries(
    client: ChatClient,
    parts: Sequence[Sequence[str]],
    titles: Sequence[str],
    progress: bool | None = None,
    *,
    per_chunk: bool = False,
    max_tokens: int = BOOK_TOKENS,
    context_tokens: int | None = None,
) -> Written:
    """Let a model sum up whole books: the second stage of MiA-RAG's mindscape (2512.17220).

    Where the parts of a book do not fit into one prompt, runs of them are summed up first.

    Args:
        client: The model.
        parts: The session summaries of each book, in order; its chunks with ``per_chunk``.
        titles: One title a book, ``""`` for none.
        progress: Whether stderr shows a bar; None: where it is a terminal.
        per_chunk: Make the paper's first stage too: every chunk in fewer than 500 characters.
        max_tokens: Most tokens of a book's summary.
        context_tokens: Tokens of a prompt and its reply together; None: what the endpoint says of the model.

    Returns:
        One summary a book, empty where the model gave none. With ``per_chunk``, a chunk that failed is left out.

    Raises:
        LlmFailed: The endpoint cannot be used, or the budget is spent.
        MiaError: Titles and books differ in number, a book has no parts, or the context is too small.
    """
    if len(parts) != len(titles):
        raise MiaError(f"{len(parts)} books but {len(titles)} titles: give one a book (an empty one is fine)")
    empty = next((i for i, book in enumerate(parts) if not any(map(str.strip, book))), None)
    if empty is not None:
        raise MiaError(f"book {empty} ({titles[empty]!r}) has no text to sum up: drop it, or give its parts")
    if not parts:
        return Written([], {})
    failures: dict[tuple[str, int], str] = {}
    if per_chunk:
        parts, failures = await _chunks(client, parts, titles, progress)
    longest = max(sum(map(estimate_tokens, book)) for book in parts)
    frame = book_messages(max(titles, key=len), ())
    room = await find_room(client, frame, longest, max_tokens, context_tokens)

    async def one(book: tuple[Sequence[str], str]) -> str:
        if not book[0]:
            raise LlmFailed("no content", "none of the book's chunks has a summary")
        return await _book(client, *book, room)

    results = await ask_all(client, list(zip(parts, titles, strict=True)), one, "summarise books", progress)
    failures |= {(str(i), 0): result.label for i, result in enumerate(results) if isinstance(result, LlmFailed)}
    return Written([result if isinstance(result, str) else "" for result in results], failures)


async def _chunks(
    client: ChatClient, parts: Sequence[Sequence[str]], titles: Sequence[str], progress: bool | None
) -> tuple[list[list[str]], dict[tuple[str, int], str]]:
    """Sum up every chunk; chunks that are no part of the story, and those that failed, are left out."""
    places = [(i, n) for i, book in enumerate(parts) for n in range(len(book))]

    async def one(place: tuple[int, int]) -> str:
        i, n = place
        return await _say(client, chunk_messages(titles[i], parts[i][n]), SESSION_TOKENS, _CHUNK)

    found: list[list[str]] = [[] for _ in parts]
    failures = {}
    results = await ask_all(client, places, one, "summarise chunks", progress)
    for (i, n), result in zip(places, results, strict=True):
        if isinstance(result, LlmFailed):
            failures[str(i), n + 1] = result.label
        elif result.strip(" .。\"'").upper() != NOTHING:
            found[i].append(result)
    return found, failures


async def _session(client: ChatClient, window: Window, room: Room, chat: bool) -> str:
    async def whole(texts: Sequence[str]) -> str:
        return await _say(client, window_messages(window, chat=chat), room.reply, _SESSION)

    async def piece(texts: Sequence[str]) -> str:
        return await _say(client, piece_messages(window, texts, chat=chat), room.reply, _SESSION)

    async def merged(texts: Sequence[str]) -> str:
        return await _say(client, merge_messages(window, texts, chat=chat), room.reply, _SESSION)

    return await _reduce(window.texts, whole, piece, merged, merged, room)


async def _book(client: ChatClient, parts: Sequence[str], title: str, room: Room) -> str:
    async def whole(texts: Sequence[str]) -> str:
        return await _say(client, book_messages(title, texts), room.reply, _BOOK)

    async def stretch(texts: Sequence[str]) -> str:
        return await _say(client, stretch_messages(title, texts), room.reply, _STRETCH)

    return await _reduce(parts, whole, stretch, stretch, whole, room)


async def _say(client: ChatClient, messages: Sequence[Message], max_tokens: int, bounds: tuple[int, int]) -> str:
    # A model that does not come to an end says the same over and over: more tokens would only hold more of that.
    reply = await client.chat(messages, max_tokens=max_tokens, enough=lambda text: whole_enough(text, *bounds))
    return clean_reply(reply.text, *bounds, cut=reply.finish_reason == "length")


async def _reduce(
    texts: Sequence[str], whole: _Ask, part: _Ask, again: _Ask, final: _Ask, room: Room, level: int = 0
) -> str:
    """Ask about all texts at once if they fit; else about runs of them, and then about the answers.

    Args:
        texts: In order.
        whole: Asks about all of them.
        part: Asks about some.
        again: Asks about some of the answers, where even these do not fit.
        final: Asks about all answers.
        room: What fits.
        level: Of how many answers to answers the texts are.
    """
    groups = [list(texts)] if room.tokens is None else group_texts(texts, room.tokens)
    if len(groups) == 1 or level == _LEVELS:
        try:
            return await whole(texts)
        except LlmFailed as failure:
            groups = list(_halved(texts, failure, level < _LEVELS))
    answers = await together(*(_each(group, part) for group in groups))
    return await _reduce([a for found in answers for a in found], final, again, again, final, room, level + 1)


async def _each(texts: Sequence[str], ask: _Ask, splits: int = _SPLITS) -> list[str]:
    """Ask about some texts, and about halves of them where the endpoint calls that too long."""
    try:
        return [await ask(texts)]
    except LlmFailed as failure:
        groups = _halved(texts, failure, splits > 0)
    answers = await together(*(_each(group, ask, splits - 1) for group in groups))
    return [a for found in answers for a in found]


def _halved(texts: Sequence[str], failure: LlmFailed, allowed: bool) -> tuple[list[str], list[str]]:
    """Return the halves of texts that are too long; raise a failure that this does not mend."""
    parted = halves(texts) if allowed and failure.reason == "too long" else None
    if parted is None:
        raise failure
    return parted


def count_labels(failures: Mapping[Any, str]) -> str:
    """Return how often each label occurs, most frequent first: ``"truncated 2, timeout 1"``."""
    return ", ".join(f"{label} {n}" for label, n in Counter(failures.values()).most_common())


class LlmSummariser:
    """A `Summarise` that lets a language model write, for code that is not asynchronous.

    It runs an event loop of its own in a thread, so it may be called from anywhere, also where a loop is running (which
    then waits). The client belongs to that loop from the first call on and is closed with it: give it one of its own.

    Args:
        client: The model.
        fallback: Sums up the windows that the model does not.
        max_tokens: Most tokens of a session's summary; a book's gets four times as many.
        context_tokens: Tokens of a prompt and its reply together; None: what the endpoint says of the model.
        progress: Whether stderr shows a bar; None: where it is a terminal.

    Attributes:
        windows: Windows summed up so far.
        failures: Label of each window ``(book_id, part)`` that the fallback summed up.
        book_failures: The same of books and chunks, in the last call of `book_summaries`; see `Written`.
    """

    def __init__(
        self,
        client: ChatClient,
        fallback: Summarise | None = None,
        *,
        max_tokens: int = SESSION_TOKENS,
        context_tokens: int | None = None,
        progress: bool | None = None,
    ) -> None:
        self.client, self.fallback = client, fallback
        self.max_tokens, self.context_tokens, self.progress = max_tokens, context_tokens, progress
        self.windows = 0
        self.failures: dict[tuple[str, int], str] = {}
        self.book_failures: dict[tuple[str, int], str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def __call__(self, windows: Sequence[Window]) -> list[str]:
        """Sum up windows of books; raises what `write_summaries` does."""
        return self._write(windows, chat=False)

    def chats(self, windows: Sequence[Window]) -> list[str]:
        """Sum up sessions of conversations; a `Summarise` too."""
        return self._write(windows, chat=True)

    def book_summaries(
        self, parts: Sequence[Sequence[str]], titles: Sequence[str], per_chunk: bool = False
    ) -> list[str]:
        """Sum up whole books, see `write_book_summaries`; empty where the model gives no summary."""
        written = self.run(
            write_book_summaries(
                self.client,
                parts,
                titles,
                self.progress,
                per_chunk=per_chunk,
                max_tokens=self.max_tokens * BOOK_TOKENS // SESSION_TOKENS,
                context_tokens=self.context_tokens,
            )
        )
        self.book_failures = written.failures
        return written.summaries

    @property
    def summarizer(self) -> str:
        """Name of who wrote the summaries: ``llm(MODEL)``, with the number of those that it did not write."""
        if not self.failures:
            return f"llm({self.client.model})"
        told = f"{len(self.failures)} of {self.windows} not: {count_labels(self.failures)}"
        return f"llm({self.client.model}; {told})"

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Run other work with the client, such as `extract_entities`, in its loop."""
        if self._closed:
            job.close()
            raise MiaError("the summariser is closed; make another one, with a client of its own")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="mia-llm", daemon=True)
            self._thread.start()
        waiting = asyncio.run_coroutine_threadsafe(job, self._loop)
        try:
            return waiting.result()
        except BaseException:  # Ctrl-C too: what is under way must not go on unseen
            waiting.cancel()
            raise

    def close(self) -> None:
        """Close the client and end the thread; a second time does nothing."""
        if self._closed:
            return
        self.run(self.client.close())
        self._closed = True
        assert self._loop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LlmSummariser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, windows: Sequence[Window], chat: bool) -> list[str]:
        written = self.run(
            write_summaries(
                self.client,
                windows,
                self.fallback,
                self.progress,
                chat=chat,
                max_tokens=self.max_tokens,
                context_tokens=self.context_tokens,
            )
        )
        self.windows += len(windows)
        self.failures |= written.failures
        return written.summaries
