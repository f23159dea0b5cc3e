"""What the routes of one server share: encoders, their queues, collections, the language model, counters."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from mia_serve.http.config import EncoderConfig, ServerConfig
from mia_serve.http.keys import KeyRing
from mia_serve.http.limits import Allowance
from mia_serve.http.llm_service import LlmService
from mia_serve.http.metrics import Metrics

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.http.collections import Collections
    from mia_serve.http.queue import EncodeQueue
    from mia_serve.http.queued_encoder import QueuedEncoder
    from mia_serve.llm import ChatClient
    from mia_serve.mindscape import Summarise

logger = logging.getLogger(__name__)

_PROBE_KEPT_S = 1.0  # as long the answer of a probe stands, so that probing is no load
_PROBE = "Is anyone there?"


@dataclass
class Services:
    """Everything that a server's routes use; made by `open_services`.

    Attributes:
        config: What the server was told.
        e1: The query-only encoder, behind its queue.
        e2: The signature-aware one.
        queues: Of the encoders; one where both are the same model.
        collections: The collections on disk.
        metrics: What is counted.
        threads: Runs what blocks.
        keys: Who may do what; None: everyone everything.
        allowance: Limits of a minute.
        language_model: Opens, watches and closes the language model.
        ready: Whether collections are recovered and encoders warm.
        draining: Whether the server is about to stop.
        probe_timeout_s: Seconds after which an encoder that has not answered is taken for down.
    """

    config: ServerConfig
    e1: QueuedEncoder
    e2: QueuedEncoder | None
    queues: list[EncodeQueue]
    collections: Collections
    metrics: Metrics
    threads: ThreadPoolExecutor
    keys: KeyRing | None
    allowance: Allowance
    language_model: LlmService
    ready: bool = False
    draining: bool = False
    probe_timeout_s: float = 10.0
    _opening: asyncio.Task[None] | None = None
    _probing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _probed: tuple[float, str | None] = (float("-inf"), None)

    @property
    def llm(self) -> ChatClient | None:
        """Client of the language model; None: there is none, or it is not up; see `llm_error`."""
        return self.language_model.client

    @property
    def llm_error(self) -> str | None:
        """Why there is no language model, where one is configured."""
        return self.language_model.error

    @property
    def trouble(self) -> str | None:
        """Why requests are not served; None: they are."""
        if self.draining:
            return "the server is about to stop"
        if self.failure is not None:
            return "the collections could not be opened; the server's log says why"
        return None if self.ready else "the server is starting: collections are read and encoders warmed up"

    @property
    def failure(self) -> BaseException | None:
        """Why the collections could not be opened."""
        task = self._opening
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    def encoder(self, name: str | None) -> QueuedEncoder:
        """Return the encoder that a client names: ``e1``, ``e2``, or the served name of its model; E1 for None.

        Raises:
            KeyError: There is none of that name.
        """
        return self.served()[name] if name is not None else self.e1

    def served(self) -> dict[str, QueuedEncoder]:
        """Return the encoders by the names that clients may use."""
        names = {"e1": self.e1}
        if self.e2 is not None and self.config.e2 is not None:
            names |= {"e2": self.e2, self.config.e2.served_name: self.e2}
        # Where both have one name it is E1's, which needs no signature.
        return names | {self.config.e1.served_name: self.e1}

    async def start(self) -> None:
        """Start the workers at once, and open the rest in the background; `ready` says when that is done."""
        for queue in self.queues:
            queue.start()
        end = time.monotonic() + self.probe_timeout_s
        while not all(queue.alive for queue in self.queues) and time.monotonic() < end:
            await asyncio.sleep(0.005)  # a thread of theirs starts the worker; no probe should fall in between
        self.language_model.start()
        self._opening = asyncio.create_task(self._open())

    async def close(self) -> None:
        """Stop everything; what waits is finished, within the time that the configuration gives."""
        self.draining = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self.collections.close()
        loop = asyncio.get_running_loop()
        for queue in self.queues:
            await loop.run_in_executor(None, queue.close, True, self.config.drain_s)
        await self.language_model.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def probe(self) -> str | None:
        """Encode a text with every encoder and return what is wrong, None where nothing is; at most once a second."""
        async with self._probing:
            if time.monotonic() - self._probed[0] > _PROBE_KEPT_S:
                found = await self._probe()
                self._probed = (time.monotonic(), found)
            return self._probed[1]

    async def _probe(self) -> str | None:
        if not all(queue.alive for queue in self.queues):
            return "an encoder's worker is down and is being started again"
        from mia_serve.http.queue import QueueFull

        encoders = [self.e1] if self.e2 is None else [self.e1, self.e2]
        try:
            async with asyncio.timeout(self.probe_timeout_s):
                await asyncio.gather(*(encoder.encode_documents_async([_PROBE], truncate=True) for encoder in encoders))
        except QueueFull:
            return None  # busy, and at work: too much to do is no illness
        except TimeoutError:
            return f"an encoder has not answered for {self.probe_timeout_s:g} s"
        except Exception as error:
            logger.error("the health probe failed: %s", type(error).__name__)
            return "an encoder fails; the server's log says why"
        return None

    async def _open(self) -> None:
        await self.collections.open()
        await self._probe()
        self.ready = True
        logger.info("ready: %d collections", len(self.collections.list()))


def get_services(connection: HTTPConnection) -> Services:
    """Return what the routes share; a dependency."""
    return connection.app.state.services


def open_services(config: ServerConfig) -> Services:
    """Load what a server needs; `Services.start` sets it to work.

    Raises:
        MiaError: A model, the keys or the language model are not what they should be.
        FileNotFoundError: One of them is missing.
    """
    from mia_serve.http.queued_encoder import QueuedEncoder

    keys = KeyRing(config.keys) if config.keys is not None else None
    metrics = Metrics()
    first = _load(config.e1, config.limits.tokens_per_text)
    second = None
    if config.e2 is not None:
        same = config.e2.model_copy(update={"name": config.e1.name}) == config.e1
        second = first if same else _load(config.e2, config.limits.tokens_per_text)
    queues = [_queue(encoder, config, metrics, name) for name, encoder in _distinct(first, second)]
    e1 = QueuedEncoder(first, queues[0])
    e2 = None if second is None else e1 if second is first else QueuedEncoder(second, queues[-1])
    language_model = LlmService(config.llm)
    metrics.watch_llm(lambda: language_model.stats)
    collections = _collections(config, e1, e2, language_model)
    threads = ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)), thread_name_prefix="mia-routes")
    limits = Allowance(config.limits.requests_per_minute, config.limits.tokens_per_minute)
    return Services(config, e1, e2, queues, collections, metrics, threads, keys, limits, language_model)


def _distinct(first: Encoder, second: Encoder | None) -> list[tuple[str, Encoder]]:
    return [("e1", first)] if second is None or second is first else [("e1", first), ("e2", second)]


def _load(config: EncoderConfig, most: int | None) -> Encoder:
    """Open an encoder whose texts have at most so many tokens; None: as many as the model takes."""
    from mia_serve.core import Encoder
    from mia_serve.core.tokenise import TextTokeniser

    if config.backend == "vllm":
        from mia_serve.http.vllm_encoder import VllmEncoder

        assert config.url is not None, "checked with the configuration"
        encoder: Encoder = VllmEncoder.load(config.model, config.url)
    else:
        encoder = Encoder.load(config.model, device=config.device, dtype=config.dtype)
    if most is not None:
        spec = encoder.spec
        encoder.spec = spec.with_changes(
            max_query_tokens=min(most, spec.max_query_tokens), max_document_tokens=min(most, spec.max_document_tokens)
        )
        encoder.text = TextTokeniser(encoder.tokenizer, encoder.spec)
    return encoder


def _queue(encoder: Encoder, config: ServerConfig, metrics: Metrics, name: str) -> EncodeQueue:
    from mia_serve.http.queue import EncodeQueue

    return EncodeQueue(
        encoder,
        tokens_per_batch=config.queue.tokens_per_batch,
        max_tokens_waiting=config.limits.waiting_tokens,
        metrics=metrics.of_queue(name),
    )


def _collections(
    config: ServerConfig, e1: QueuedEncoder, e2: QueuedEncoder | None, language_model: LlmService
) -> Collections:
    from mia_serve.http.collections import Collections

    own = config.collections
    summarise, chats, summarizer = _summaries(config, e1, language_model)
    return Collections(
        config.data,
        e1,
        e2,
        summarise=summarise,
        chats=chats,
        summarizer=summarizer,
        settings={"k0": own.k0, "k_sum": own.k_sum, "alpha": own.alpha, "prior": own.prior},
        window=own.window,
        chunk_tokens=own.chunk_tokens,
        chunk_overlap=own.chunk_overlap,
    )


def _summaries(
    config: ServerConfig, e1: QueuedEncoder, language_model: LlmService
) -> tuple[Summarise | None, Summarise | None, str]:
    """Return what sums up windows of books and sessions of chats, None for sentences that E1 picks, and its name."""
    from mia_serve.mindscape import extractive_summaries, keyword_summaries

    match config.collections.summarizer:
        case "keywords":
            return keyword_summaries, keyword_summaries, "keywords"
        case "extractive":
            return None, None, f"extractive({config.e1.served_name})"
        case _:
            bulk = e1.for_bulk()
            write = language_model.summaries(lambda windows: extractive_summaries(windows, bulk))
            return write.books, write.chats, "llm"
