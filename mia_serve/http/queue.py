"""Batches of token sequences out of many requests: one worker, no starvation, a bound on what waits."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from mia_serve.http.waiting import Found, Item, Job, Line
from mia_serve.llm.failures import LlmFailed

if TYPE_CHECKING:
    from mia_serve.core.encoder import Encoder
    from mia_serve.core.pooling import Sequence as Tokens

logger = logging.getLogger(__name__)

_BULK_EVERY = 4  # every so many batches one is anchored by bulk work, however busy the server is
_RESTART_S = 0.5  # between the end of a worker and the next one
_FORWARD_S = 0.25  # that a forward may take: whoever comes meanwhile waits for its end
_LEAST = 1 / 8  # of the encoder's own budget, under which forwards are not cut for that
_FREE = 1 / 128  # of the same: less padding than that costs less than another forward
# A worker asks for the interpreter's lock after every operation of a model; a thread that computes in Python meanwhile
# keeps it for so long.
_SWITCH_S = 0.0005


class QueueFull(RuntimeError):
    """Too much waits already.

    Attributes:
        retry_after: Seconds after which there should be room.
    """

    def __init__(self, waiting: int, limit: int, retry_after: float) -> None:
        super().__init__(f"{waiting} tokens wait to be encoded, {limit} may; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class QueueDead(RuntimeError):
    """The worker died over a request, or the queue is closed."""


class QueueMetrics(Protocol):
    """What a queue reports; it is called from several threads."""

    def waiting(self, items: int, tokens: int) -> None:
        """Take what waits now."""

    def batch(self, items: int, tokens: int, padded: int, budget: int, seconds: float) -> None:
        """Take a forward: its sequences, their tokens, the same with padding, the budget, and its time."""

    def waited(self, seconds: float) -> None:
        """Take the time that the oldest sequence of a batch has waited."""

    def failed(self, reason: str) -> None:
        """Take a failure: "full", "encoder", "memory" or "worker"."""

    def worker(self, alive: bool) -> None:
        """Take whether the worker is at work."""


class _Batch(NamedTuple):
    items: list[Item]
    budget: int


class EncodeQueue:
    """Token sequences of many requests, run through one encoder in batches.

    The oldest sequence anchors a batch, and those nearest to it in length that wait fill it. So nothing starves,
    and little is padding. A worker takes what there is as soon as it is free; it never waits for a batch to fill.

    Args:
        encoder: Runs the batches, in the worker's thread alone.
        tokens_per_batch: Padded tokens of one forward, at most the encoder's own budget; None: as many as take a
            quarter of a second, so that no one waits long for the forward of others.
        max_tokens_waiting: Tokens that may wait; more is refused. Bulk work is not counted.
        metrics: Is told what happens.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        tokens_per_batch: int | None = None,
        max_tokens_waiting: int = 1_000_000,
        metrics: QueueMetrics | None = None,
    ) -> None:
        self._encoder, self._own_budget, self._most = encoder, tokens_per_batch, max_tokens_waiting
        self._metrics = metrics
        self._changed = threading.Condition()
        self._now, self._bulk = Line(), Line()
        self._items = self._tokens = 0  # that wait, without bulk
        self._since_bulk = 0
        self._ran = (0.0, 0.0)  # padded tokens and seconds of forwards, the recent ones above all
        self._running: list[Item] = []
        self._idle, self._closing = True, False
        self._worker: threading.Thread | None = None
        self._keeper: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether a worker is there to take batches."""
        return self._worker is not None and self._worker.is_alive()

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait, bulk work left out."""
        return self._tokens

    def start(self) -> None:
        """Start the worker, and what starts another one should it die."""
        if self._keeper is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            self._keeper = threading.Thread(target=self._keep, name="mia-queue", daemon=True)
            self._keeper.start()

    def submit(self, sequences: Sequence[Tokens], bulk: bool = False) -> Future[Found]:
        """Queue the sequences of one request.

        Args:
            sequences: Its token sequences.
            bulk: Whether it may wait behind others and is never refused: work that holds up no one.

        Returns:
            A future of one dict a sequence, as :meth:`Encoder.embed_sequences` returns them. Cancelling it drops what
            still waits.

        Raises:
            QueueFull: Too much waits.
            QueueDead: The queue is closed.
        """
        future: Future[Found] = Future()
        self._submit(sequences, bulk, future, None)
        return future

    def submit_to(self, future: asyncio.Future[Found], sequences: Sequence[Tokens], bulk: bool = False) -> Job:
        """Queue sequences for a future of an event loop, from any thread; see :meth:`submit`.

        Returns:
            What :meth:`forget` takes once the future is cancelled.
        """
        return self._submit(sequences, bulk, future, future.get_loop())

    def check(self) -> None:
        """Raise `QueueFull` where nothing more may wait: before a request is tokenised in vain."""
        if self._tokens >= self._most:
            self._refuse()

    def forget(self, job: Job) -> None:
        """Count what a cancelled or failed job still has waiting no longer; the lines drop it when they meet it."""
        with self._changed:
            if not job.bulk:
                self._tokens, self._items = self._tokens - job.waiting_tokens, self._items - job.waiting
            job.waiting = job.waiting_tokens = 0

    def close(self, drain: bool = True, timeout: float = 20.0) -> None:
        """Take nothing new; with ``drain`` finish what waits within the time, then fail the rest; safe to repeat."""
        end = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while drain and self._keeper is not None and not self._idle and time.monotonic() < end:
                self._changed.wait(min(0.1, max(0.0, end - time.monotonic())))
            jobs = self._now.clear() | self._bulk.clear()
            self._idle = True
            self._changed.notify_all()
        self._fail(jobs, QueueDead("the server is stopping"))
        if self._keeper is not None:
            self._keeper.join(max(0.0, end - time.monotonic()) + 1.0)

    def _submit(
        self, sequences: Sequence[Tokens], bulk: bool, future: Any, loop: asyncio.AbstractEventLoop | None
    ) -> Job:
        tokens = sum(len(sequence.ids) for sequence in sequences)
        job = Job(len(sequences), tokens, bulk, future, loop)
        if not sequences:
            _deliver([job])
            return job
        with self._changed:
            if self._closing:
                raise QueueDead("the server is stopping")
            # A request that is larger than the bound is let in where nothing waits: it could never be otherwise.
            if not bulk and self._tokens and self._tokens + tokens > self._most:
                self._refuse()
            line = self._bulk if bulk else self._now
            for place, sequence in enumerate(sequences):
                line.add(Item(job, place, sequence))
            if not bulk:
                self._items, self._tokens = self._items + len(sequences), self._tokens + tokens
            self._idle = False
            self._tell("waiting", self._items, self._tokens)
            self._changed.notify()
        if loop is None:
            future.add_done_callback(lambda _: self.forget(job))
        return job

    def _refuse(self) -> NoReturn:
        self._tell("failed", "full")
        tokens, seconds = self._ran
        raise QueueFull(self._tokens, self._most, min(60.0, max(1.0, self._tokens * seconds / max(tokens, 1.0))))

    def _keep(self) -> None:
        """Run workers, one after another, until the queue is closed."""
        while not (self._closing and self._idle):
            self._worker = threading.Thread(target=self._work, name="mia-encode", daemon=True)
            self._worker.start()
            self._tell("worker", True)
            self._worker.join()
            if not self._closing:
                self._tell("worker", False)
                logger.error("the encoder's worker has died; another one starts in %s s", _RESTART_S)
                time.sleep(_RESTART_S)

    def _work(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._run(batch)
        except BaseException as error:
            logger.exception("the encoder's worker died")
            self._tell("failed", "worker")
            self._fail({item.job for item in self._running}, QueueDead(f"the encoder's worker died: {error!r}"))

    def _next(self) -> _Batch | None:
        """Wait for work and take a batch of it; None when the queue is closed and empty."""
        with self._changed:
            while not (self._now or self._bulk):
                self._idle, self._running = True, []
                self._changed.notify_all()
                if self._closing:
                    return None
                self._changed.wait()
            self._idle = False
            bulk = bool(self._bulk) and (not self._now or self._since_bulk >= _BULK_EVERY - 1)
            self._since_bulk = 0 if bulk else self._since_bulk + 1
            budget = self._budget()
            free = _FREE * self._encoder.tokens_per_batch if self._encoder.pads else budget
            items = (self._bulk if bulk else self._now).batch(budget, free)
            for item in items:
                item.job.waiting, item.job.waiting_tokens = item.job.waiting - 1, item.job.waiting_tokens - item.length
                if not bulk:
                    self._tokens, self._items = self._tokens - item.length, self._items - 1
            self._running = items
            self._tell("waiting", self._items, self._tokens)
            self._tell("waited", time.monotonic() - items[0].job.since)
            return _Batch(items, budget)

    def _budget(self) -> int:
        """Return the padded tokens of the next forward."""
        own = self._encoder.tokens_per_batch
        if self._own_budget is not None:
            return min(own, self._own_budget)
        tokens, seconds = self._ran
        return int(min(own, max(_LEAST * own, _FORWARD_S * tokens / seconds if seconds else 0)))

    def _run(self, batch: _Batch) -> None:
        started = time.monotonic()
        self._embed(batch.items)
        seconds = time.monotonic() - started
        tokens = sum(item.length for item in batch.items)
        padded = max(item.length for item in batch.items) * len(batch.items) if self._encoder.pads else tokens
        self._ran = (0.9 * self._ran[0] + padded, 0.9 * self._ran[1] + seconds)
        self._tell("batch", len(batch.items), tokens, padded, batch.budget, seconds)
        _deliver(list({item.job: None for item in batch.items if item.job.left == 0 or item.job.error}))
        self._running = []

    def _embed(self, items: list[Item]) -> None:
        """Run items; where that fails, halves of them, down to the one that is to blame."""
        items = [item for item in items if not item.job.over]
        if not items:
            return
        try:
            found = self._encoder.embed_sequences([item.tokens for item in items])
        except Exception as error:
            # Where the encoder is a server that does not answer, asking it for every item alone would take hours.
            if len(items) == 1 or (isinstance(error, LlmFailed) and (error.transient or error.hopeless)):
                self._blame({item.job for item in items}, error)
                return
            middle = len(items) // 2
            self._embed(items[:middle])
            self._embed(items[middle:])
            return
        for item, views in zip(items, found, strict=True):
            if views is None:
                self._tell("failed", "memory")
            item.job.found[item.place] = views
            item.job.left -= 1

    def _blame(self, jobs: set[Job], error: BaseException) -> None:
        """Let jobs fail for what the encoder raised."""
        logger.error("%d request(s) failed in the encoder: %s", len(jobs), type(error).__name__, exc_info=error)
        for job in jobs:
            self._tell("failed", "encoder")
            job.error = error
            self.forget(job)

    def _fail(self, jobs: set[Job], error: BaseException) -> None:
        for job in jobs:
            job.error = job.error or error
            self.forget(job)
        _deliver(list(jobs))

    def _tell(self, what: str, *values: Any) -> None:
        if self._metrics is not None:
            getattr(self._metrics, what)(*values)


def _deliver(jobs: list[Job]) -> None:
    """Settle futures: those of an event loop all in one call into it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        if job.loop is None:
            _settle(job)
        else:
            by_loop.setdefault(job.loop, []).append(job)
    for loop, theirs in by_loop.items():
        _call(loop, partial(_settle_all, theirs))


def _settle_all(jobs: list[Job]) -> None:
    for job in jobs:
        _settle(job)


def _settle(job: Job) -> None:
    if job.future.done():
        return
    try:
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.found)
    except (InvalidStateError, asyncio.InvalidStateError):
        pass  # cancelled at this very moment


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> None:
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        logger.debug("the event loop of a request is closed")
