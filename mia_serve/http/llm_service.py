"""The language model of a server: found, or started, without holding up what needs none."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mia_serve.core.errors import MiaError
from mia_serve.http.config import LlmConfig
from mia_serve.llm.spending import Stats

if TYPE_CHECKING:
    from mia_serve.llm import ChatClient, Engine
    from mia_serve.mindscape import Summarise, Window

logger = logging.getLogger(__name__)

_AGAIN_S = 5.0  # between two looks for an endpoint that is not there yet


class LlmService:
    """Opens, watches and closes the language model.

    Args:
        config: Where it is, or what to start; None: there is none.

    Attributes:
        client: For the event loop of the server; None: there is none, or it is not up.
        error: Why ``client`` is None although a model is configured.
    """

    def __init__(self, config: LlmConfig | None) -> None:
        self.config = config
        self.client: ChatClient | None = None
        self.error: str | None = None if config is None else "the language model is starting"
        self._summed, self._counting = Stats(), threading.Lock()
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def stats(self) -> Stats | None:
        """What was asked of the model so far, for answers and for summaries; None where none is configured."""
        if self.config is None:
            return None
        with self._counting:
            found = replace(self._summed)
        if self.client is not None:
            _add(found, self.client.stats)
        return found

    def count(self, stats: Stats) -> None:
        """Add what another client of the same model has done."""
        with self._counting:
            _add(self._summed, stats)

    def start(self) -> None:
        """Open it in the background."""
        if self.config is not None:
            self._task = asyncio.create_task(self._run(self.config))

    async def close(self) -> None:
        """Close the client, and stop a server that was started, with all its processes."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self.client is not None:
            await self.client.close()

    def summaries(self, stand_in: Summarise) -> Summaries:
        """Return what lets the model write summaries, and takes the stand-in where it does not."""
        return Summaries(self, stand_in)

    async def _run(self, config: LlmConfig) -> None:
        try:
            if config.serve is not None:
                await self._serve(config, config.serve)
            else:
                await self._find(config)
        except (MiaError, OSError, RuntimeError) as error:
            # Searching goes on without a model; only answers need one.
            if self.client is not None:
                self.count(self.client.stats)
            self.client, self.error = None, "the language model is down; the server's log says why"
            logger.error("no language model: %s", error)

    async def _serve(self, config: LlmConfig, model: str) -> None:
        """Start vLLM and stay with it until it ends."""
        from mia_serve.llm import Engine

        def engine() -> Engine:
            made = Engine(
                model,
                python=config.python,
                name=config.model,
                arguments=config.arguments,
                startup_timeout=config.startup_s,
                device=config.device,
            )
            if self._closed:
                made.close()
            return made

        self._engine = await asyncio.to_thread(engine)
        self.client, self.error = _client(config, self._engine.url, self._engine.model), None
        logger.info("language model %s is up", self._engine.model)
        await asyncio.to_thread(self._engine.wait)

    async def _find(self, config: LlmConfig) -> None:
        """Take the model that is named, or ask the endpoint for its only one until it answers."""
        from mia_serve.llm import LlmFailed, served_models

        assert config.url is not None, "checked with the configuration"
        model = config.model
        while model is None:
            try:
                names = [found.id for found in await served_models(config.url, _key(config))]
            except LlmFailed as failure:
                self.error = f"the language model cannot be asked ({failure.label})"
                await asyncio.sleep(_AGAIN_S)
                continue
            if len(names) != 1:
                raise MiaError(f"the endpoint has {len(names)} models ({', '.join(names)}); name one under llm.model")
            (model,) = names
        self.client, self.error = _client(config, config.url, model), None


class Summaries:
    """Summaries by the language model while it is up, else by a stand-in: a write never waits for a model that is down.

    Args:
        service: The language model.
        stand_in: Sums up what the model does not.
    """

    def __init__(self, service: LlmService, stand_in: Summarise) -> None:
        self._service, self._stand_in = service, stand_in

    def books(self, windows: Sequence[Window]) -> list[str]:
        """Sum up windows of books."""
        return self._write(windows, chat=False)

    def chats(self, windows: Sequence[Window]) -> list[str]:
        """Sum up sessions of conversations."""
        return self._write(windows, chat=True)

    def _write(self, windows: Sequence[Window], chat: bool) -> list[str]:
        from mia_serve.llm import LlmFailed
        from mia_serve.mindscape.written import LlmSummariser

        config, served = self._service.config, self._service.client
        if config is None or served is None:
            return self._stand_in(windows)
        client = _client(config, served.base_url, served.model)  # a client belongs to one event loop
        try:
            with LlmSummariser(client, self._stand_in, context_tokens=config.context_tokens, progress=False) as writer:
                return writer.chats(windows) if chat else writer(windows)
        except LlmFailed as failure:
            logger.warning("summaries are extracts: the language model failed (%s)", failure.label)
            return self._stand_in(windows)
        finally:
            self._service.count(client.stats)


def _add(to: Stats, more: Stats) -> None:
    for name in ("calls", "failed", "prompt_tokens", "completion_tokens"):
        setattr(to, name, getattr(to, name) + getattr(more, name))


def _client(config: LlmConfig, url: str | None, model: str) -> ChatClient:
    from mia_serve.llm import ChatClient

    return ChatClient(url, model, _key(config), concurrency=config.concurrency, timeout=config.timeout_s)


def _key(config: LlmConfig) -> str | None:
    return os.environ.get(config.api_key_env) if config.api_key_env else None
