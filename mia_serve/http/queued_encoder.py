"""An encoder whose forwards go through a queue that all requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mia_serve.core.encoder import EncodeFailed, Encoder, fill_rows, fuse_rows
from mia_serve.core.errors import TooLong
from mia_serve.http.queue import EncodeQueue, Found

if TYPE_CHECKING:
    from mia_serve.core.pooling import Sequence as Tokens
    from mia_serve.core.tokenise import Signature
    from mia_serve.http.waiting import Job

Views = tuple[str, ...]

__all__ = ["Encoded", "QueuedEncoder", "TooLong"]

_THREADS = 2  # that tokenise; the tokenizer's own code runs outside of the interpreter's lock
_LONG = 100_000  # characters; requests over it are tokenised one by one, past the others
_MANY = 256  # texts; the vectors of more are gathered in a thread


class Encoded(NamedTuple):
    """Vectors of n texts, and what they took.

    Attributes:
        vectors: (n, d) float32 unit rows.
        tokens: Tokens of each text as the model read it, the template's among them.
    """

    vectors: np.ndarray
    tokens: list[int]


class QueuedEncoder(Encoder):
    """An `Encoder` for many threads and tasks at once: its forwards are batched with everyone else's.

    The methods of `Encoder` block, and belong into worker threads; those that end in ``_async`` belong into an event
    loop.

    Args:
        encoder: Knows model and tokenizer.
        queue: Runs the forwards.
        bulk: Whether its work waits behind that of others, and is never refused.
    """

    def __init__(self, encoder: Encoder, queue: EncodeQueue, bulk: bool = False) -> None:
        vars(self).update(vars(encoder))  # not super().__init__, which would build the tokenizer's state once more
        self._plain = encoder
        self.queue, self.bulk = queue, bulk
        self._threads = ThreadPoolExecutor(_THREADS, "mia-tokenise")
        self._long = ThreadPoolExecutor(1, "mia-tokenise-long")

    @cached_property
    def spec_hash(self) -> str:
        """Return the encoder's hash, which reads all weights, taken once."""
        return self._plain.spec_hash

    def for_bulk(self) -> QueuedEncoder:
        """Return the same encoder for work that holds up no one, such as the chunks of a book."""
        return QueuedEncoder(self, self.queue, bulk=True)

    def embed_sequences(self, sequences: Sequence[Tokens]) -> Found:
        """Queue sequences and wait for their vectors; see `Encoder.embed_sequences`.

        Raises:
            RuntimeError: It was called on an event loop, which would stand still.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self.queue.submit(sequences, self.bulk).result()
        raise RuntimeError("this encoder blocks; on an event loop use its methods that end in _async")

    async def encode_queries_async(
        self,
        texts: Sequence[str],
        signatures: Sequence[Signature] | None = None,
        alpha: float | None = None,
        truncate: bool = False,
    ) -> Encoded:
        """Encode queries, each with its signature where it has one; see `Encoder.encode_queries`.

        Raises:
            MiaError: As there.
            TooLong: A query is too long and may not be cut.
            QueueFull: Too much waits.
        """
        alpha = self.checked_alpha(alpha)
        given = None if alpha == 0.0 else signatures
        made = lambda: self.text.queries(texts, given, truncate=truncate)  # noqa: E731
        arrays, tokens = await self._encode(made, texts, ("query", "chunk"))
        return Encoded(fuse_rows(arrays["query"], arrays["chunk"], alpha), tokens)

    async def encode_documents_async(
        self, texts: Sequence[str] | Sequence[list[int]], truncate: bool = False
    ) -> Encoded:
        """Encode documents.

        Args:
            texts: n documents, or their token ids without those of the template.
            truncate: Cut a document that is too long instead of refusing it.

        Raises:
            TooLong: A document is too long; nothing was queued then.
            QueueFull: Too much waits.
        """

        def made() -> list[list[Tokens]]:
            if texts and not isinstance(texts[0], str):
                found = self.text.documents_of_ids([list(map(int, ids)) for ids in texts], truncate)
            else:
                found = self.text.documents(list(map(str, texts)), truncate)
            return [[sequence] for sequence in found]

        arrays, tokens = await self._encode(made, texts, ("document",))
        return Encoded(arrays["document"], tokens)

    async def _encode(
        self, tokenise: Callable[[], list[list[Tokens]]], texts: Sequence[str] | Sequence[list[int]], views: Views
    ) -> tuple[dict[str, np.ndarray], list[int]]:
        """Tokenise and queue in a thread, and wait for the vectors; the loop is woken once, by its batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Found] = loop.create_future()
        made: list[list[Tokens]] = []
        jobs: list[Job] = []

        def work() -> None:
            if future.cancelled():
                return
            try:
                made.extend(tokenise())
                jobs.append(self.queue.submit_to(future, [s for sequences in made for s in sequences], self.bulk))
            except BaseException as error:
                loop.call_soon_threadsafe(_refuse, future, error)
                return
            if future.cancelled():  # meanwhile; a later cancelling finds the job below
                self.queue.forget(jobs[0])

        if not self.bulk:
            self.queue.check()
        (self._long if sum(map(len, texts)) > _LONG else self._threads).submit(work)
        try:
            found = await future
        except asyncio.CancelledError:
            for job in jobs:
                self.queue.forget(job)
            raise
        if len(made) > _MANY:
            return await loop.run_in_executor(self._threads, self._gather, made, found, views)
        return self._gather(made, found, views)

    def _gather(self, made: list[list[Tokens]], found: Found, views: Views) -> tuple[dict[str, np.ndarray], list[int]]:
        """Return (n, d) arrays, one a view, and the tokens of each text."""
        arrays = {view: np.full((len(made), self.dim), np.nan, np.float32) for view in views}
        failed = fill_rows([i for i, sequences in enumerate(made) for _ in sequences], found, arrays)
        if failed:
            raise EncodeFailed(sorted(failed), arrays)
        return arrays, [sum(len(s.ids) for s in sequences) for sequences in made]


def _refuse(future: asyncio.Future[Found], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
