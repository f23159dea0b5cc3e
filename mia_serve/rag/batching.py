"""A retriever for many questions in flight: what is asked while a batch is worked on makes the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mia_serve.core import MiaError
from mia_serve.signature import Signature

if TYPE_CHECKING:
    from mia_serve.mindscape import Mindscape
    from mia_serve.retriever import Mode, Pool, Retriever

T = TypeVar("T")
R = TypeVar("R")

PRIOR = 0.1
"""β with which a signature weighs its sessions where there is no E2 to read it (see `Retriever`)."""

_MOST = 64  # asked at once in one batch, so that the first of many questions do not wait for the encoding of the last


class Found(NamedTuple):
    """What one search found.

    Attributes:
        ids: Chunk ids, best first.
        scores: Their scores.
        rows: Their rows of ``mindscape.chunks``.
        signature: The signature that was searched with; None for the query alone.
    """

    ids: tuple[str, ...]
    scores: tuple[float, ...]
    rows: tuple[int, ...]
    signature: Signature | None


class _Job(NamedTuple):
    group: Hashable
    serve: Callable[[Retriever, list[Any]], Sequence[Any]]
    item: Any
    waiter: asyncio.Future[Any]


class _Outcome(NamedTuple):
    value: Any = None
    error: Exception | None = None


class AsyncRetriever:
    """Serves one `Retriever` to all questions of an event loop, from one worker thread.

    A batch starts as soon as the worker is idle and takes what waits by then; equal kinds of requests in it become one
    call of the retriever. Results are those of asking one by one. Where a call fails, its requests are tried one by
    one, so that only those at fault fail. Use it as ``async with AsyncRetriever(retriever) as searcher``.

    Without an E2 a signature reaches retrieval as a prior on E1: that of the retriever, or 0.1 where it has none.

    Args:
        retriever: What to search with; nobody else may use it meanwhile.
    """

    def __init__(self, retriever: Retriever) -> None:
        self.retriever = retriever
        self._waiting: list[_Job] = []
        self._work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "retriever")
        self._closed = False

    @property
    def mindscape(self) -> Mindscape:
        """What is searched."""
        return self.retriever.mindscape

    @cached_property
    def session_rows(self) -> dict[str, int]:
        """Row of ``mindscape.sessions`` of each session id."""
        return {session.id: row for row, session in enumerate(self.mindscape.sessions)}

    @property
    def uses_prior(self) -> bool:
        """Whether a signature reaches retrieval as a prior on E1, for want of an E2 that reads it."""
        return self.retriever.e2 is None

    async def search(
        self,
        query: str,
        k: int = 10,
        signature: Signature | None = None,
        encoder: str | None = None,
        prior: float | None = None,
    ) -> Found:
        """Find the k best chunks for a query and its signature; without one, for the query alone.

        Args:
            query: The query.
            k: Chunks wanted.
            signature: The signature to search with.
            encoder: "e1" or "e2"; None: E2 where there is one. E1 takes a signature as a prior.
            prior: β of the signature as a prior; None: the retriever's own, and for E1 at least 0.1.

        Raises:
            MiaError: The query is empty or too long, or another argument is out of range.
        """
        if signature is not None and prior is None and (encoder == "e1" or self.uses_prior):
            prior = self.retriever.prior or PRIOR
        # Queries alone are searched apart: a batch of pairs is encoded in another way, and with a prior, searched so.
        group = ("search", k, encoder, prior, signature is None)
        return await self._ask(group, partial(_search, k=k, encoder=encoder, prior=prior), (query, signature))

    async def signature(self, query: str, mode: Mode = "coverage") -> Signature:
        """Choose the signature of a query: "coverage", "first_k" or "global_summary"; see `Retriever.signatures`."""
        return await self._ask(("signature", mode), partial(_signatures, mode=mode), query)

    async def pool(self, query: str) -> Pool:
        """Find the pool of a query; see `Retriever.pools`."""
        return await self._ask("pool", _pools, query)

    async def together(self, serve: Callable[[Retriever, list[T]], Sequence[R]], item: T) -> R:
        """Have ``serve(retriever, items)`` called in the worker, with this item and those that others ask it for.

        Args:
            serve: A function that returns one result an item; requests with the same one are put together.
            item: What it is asked for here.
        """
        return await self._ask(serve, serve, item)

    async def _ask(self, group: Hashable, serve: Callable[[Retriever, list[Any]], Sequence[Any]], item: Any) -> Any:
        if self._closed:
            raise MiaError("this AsyncRetriever is closed: ask within its `async with`")
        loop = asyncio.get_running_loop()
        if self._work is not None and not self._work.done() and self._work.get_loop() is not loop:
            raise MiaError("this AsyncRetriever is at work for another event loop: give each loop its own")
        waiter: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(_Job(group, serve, item, waiter))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._serve_all())  # starts after all that is asked in this turn
        return await waiter

    async def _serve_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = [job for job in self._waiting[:_MOST] if not job.waiter.done()]  # done: given up meanwhile
            del self._waiting[:_MOST]
            outcomes = await loop.run_in_executor(self._thread, _serve_batch, self.retriever, batch)
            for job, outcome in zip(batch, outcomes, strict=True):
                if job.waiter.done():
                    continue
                if outcome.error is not None:
                    job.waiter.set_exception(outcome.error)
                else:
                    job.waiter.set_result(outcome.value)

    async def close(self) -> None:
        """Finish the batch that is worked on, refuse what waits behind it, and end the thread."""
        self._closed = True
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            if not job.waiter.done():
                job.waiter.set_exception(MiaError("the AsyncRetriever was closed while this was waiting"))
        if self._work is not None and not self._work.done():  # what is done may be of a loop that is closed by now
            await asyncio.wait([self._work])
        self._thread.shutdown(wait=False)  # idle by now

    async def __aenter__(self) -> AsyncRetriever:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _serve_batch(retriever: Retriever, batch: list[_Job]) -> list[_Outcome]:
    """Serve a batch in the worker thread, one call for each group; outcomes in the order of the batch."""
    groups: dict[Hashable, list[int]] = {}
    for position, job in enumerate(batch):
        groups.setdefault(job.group, []).append(position)
    outcomes = [_Outcome()] * len(batch)
    for positions in groups.values():
        serve, items = batch[positions[0]].serve, [batch[position].item for position in positions]
        for position, outcome in zip(positions, _serve_group(retriever, serve, items), strict=True):
            outcomes[position] = outcome
    return outcomes


def _serve_group(
    retriever: Retriever, serve: Callable[[Retriever, list[Any]], Sequence[Any]], items: list[Any]
) -> list[_Outcome]:
    try:
        return [_Outcome(value) for value, _ in zip(serve(retriever, items), items, strict=True)]
    except Exception as error:  # of whatever kind: it belongs to who asked
        if len(items) == 1:
            return [_Outcome(error=error)]
    return [outcome for item in items for outcome in _serve_group(retriever, serve, [item])]


def _search(
    retriever: Retriever,
    items: list[tuple[str, Signature | None]],
    *,
    k: int,
    encoder: str | None,
    prior: float | None,
) -> list[Found]:
    queries, given = [query for query, _ in items], [signature for _, signature in items]
    signatures = [signature for signature in given if signature is not None]  # of all, or of none
    hits = retriever.search(queries, k, signatures or "none", encoder, prior).hits
    return [
        Found(tuple(ids), tuple(scores[: len(ids)].tolist()), tuple(rows[: len(ids)].tolist()), signature)
        for ids, scores, rows, signature in zip(hits.ids, hits.scores, hits.rows, given, strict=True)
    ]


def _signatures(retriever: Retriever, queries: list[str], *, mode: Mode) -> list[Signature]:
    return retriever.signatures(queries, mode)


def _pools(retriever: Retriever, queries: list[str]) -> list[Pool]:
    return retriever.pools(queries)
