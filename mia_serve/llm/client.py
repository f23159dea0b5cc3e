"""An asynchronous chat client over the ``openai`` package: bounded, recorded, with typed failures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from mia_serve.core.errors import MiaError
from mia_serve.llm.cache import Reply, ReplyCache, Usage, call_key
from mia_serve.llm.endpoint import Endpoint, checked_key, encodable
from mia_serve.llm.failures import LlmFailed
from mia_serve.llm.spending import Budget, Stats, Stopwatch

_ABSENT = object()
_LARGER = 4  # times the limit of tokens, for a reply that was cut off
_CONTEXT: list[Message] = []  # what the length of the context is recorded under: a call without messages


class Message(TypedDict):
    """One message of a chat: role ("system", "user", "assistant") and text."""

    role: str
    content: str


class ChatClient:
    """Chat completions of one model at one address.

    Use it as ``async with ChatClient(...) as client`` within one event loop. Start as many `chat` calls as you like:
    ``concurrency`` of them are on their way at a time, which is what keeps a batching server such as vLLM busy.

    Args:
        base_url: Address of an OpenAI-compatible endpoint, such as ``http://localhost:8000/v1``. Not needed in replay.
        model: Name of the model there.
        api_key: Key; by default that of MIA_LLM_KEY or OPENAI_API_KEY, where one is set. It is never written anywhere.
        cache: Recorded replies.
        concurrency: Calls under way at most.
        timeout: Seconds for one attempt.
        max_retries: Further attempts after a connection error, timeout, 408, 409, 429 or 5xx, with growing pauses.
        temperature: Of the sampling; 0 takes the likeliest token.
        seed: Of the sampling, where the endpoint honours it.
        budget: Calls and tokens that may be spent, on this client and others that share it.

    Attributes:
        stats: What the client has done so far.

    Raises:
        MiaError: The address or the key is not one, a number is out of range, or the package ``openai`` is missing.
    """

    def __init__(
        self,
        base_url: str | None,
        model: str,
        api_key: str | None = None,
        cache: ReplyCache | None = None,
        concurrency: int = 32,
        timeout: float = 600.0,
        max_retries: int = 4,
        temperature: float = 0.0,
        seed: int = 0,
        budget: Budget | None = None,
    ) -> None:
        if concurrency < 1:
            raise MiaError(f"concurrency={concurrency}: give at least 1 call at a time")
        if not model:
            raise MiaError("model is empty; give the name under which the endpoint serves it")
        self.base_url, self.model, self.cache, self.budget = base_url, model, cache, budget or Budget()
        self.temperature, self.seed, self.concurrency = temperature, seed, concurrency
        self.stats = Stats()
        checked_key(api_key)
        self._endpoint: Endpoint | None = None
        if cache is None or cache.mode != "replay":
            self._endpoint = Endpoint(base_url, api_key, timeout, max_retries)
        self._free = asyncio.Semaphore(concurrency)
        self._busy = Stopwatch(self.stats)
        self._locks: dict[str, asyncio.Lock] = {}
        self._context: asyncio.Task[int | None] | None = None

    async def chat(
        self,
        messages: Sequence[Message],
        schema: dict[str, Any] | None = None,
        max_tokens: int = 1024,
        enough: Callable[[str], bool] | None = None,
    ) -> Reply:
        """Return the model's reply.

        A reply that is cut off at ``max_tokens`` is asked for once more with four times as many, or as many as the
        model's context has room for.

        Args:
            messages: The chat so far.
            schema: JSON schema that the endpoint is asked to keep to (``response_format``); most accept an object
                at its root only.
            max_tokens: Most tokens of the reply.
            enough: Says whether the text of a reply that was cut off will do as it is; None: it never does.

        Raises:
            LlmFailed: There is no usable reply; its ``reason`` says why.
        """
        try:
            return await self._usable(messages, schema, max_tokens, enough or _never)
        except LlmFailed:
            self.stats.failed += 1
            raise

    async def context_tokens(self) -> int | None:
        """Return how many tokens of prompt and reply the model takes together, or None where that is not known.

        The endpoint is asked once. The answer is recorded like a reply, so that prompts cut to fit it are the same in
        replay.
        """
        if self._context is None:
            self._context = asyncio.ensure_future(self._find_context())
        return await asyncio.shield(self._context)

    async def _usable(
        self,
        messages: Sequence[Message],
        schema: dict[str, Any] | None,
        max_tokens: int,
        enough: Callable[[str], bool],
    ) -> Reply:
        reply = await self._recorded(messages, schema, max_tokens, max_tokens)
        if reply.finish_reason == "length" and not enough(reply.text):
            larger = await self._larger(reply.usage, max_tokens)
            if larger <= max_tokens:
                raise self._cut_off(max_tokens)
            try:
                # Recorded under the plain limit, whatever the context had room for: replay need not know.
                reply = await self._recorded(messages, schema, max_tokens * _LARGER, larger)
            except LlmFailed as failure:
                raise self._cut_off(max_tokens) if failure.reason == "too long" else failure from None
            if reply.finish_reason == "length" and not enough(reply.text):
                raise self._cut_off(larger)
        if reply.finish_reason == "length":
            self.stats.cut += 1
        if reply.finish_reason == "content_filter":
            raise LlmFailed("filtered", f"the endpoint withheld the reply of {self.model!r} (content filter)")
        if not reply.text.strip():
            raise LlmFailed("no content", f"the reply of {self.model!r} is empty ({reply.finish_reason})")
        return reply

    def _cut_off(self, at: int) -> LlmFailed:
        return LlmFailed("truncated", f"the reply of {self.model!r} was cut off at {at} tokens")

    async def _larger(self, usage: Usage, max_tokens: int) -> int:
        """Return the limit for the second try; not above ``max_tokens`` where the context is full."""
        wanted, context = max_tokens * _LARGER, await self.context_tokens()
        return wanted if context is None else min(wanted, context - usage.prompt_tokens)

    async def _find_context(self) -> int | None:
        key = call_key(self.model, _CONTEXT, None, 0.0, 0, 0)
        found: int | None = None
        if self._endpoint is not None:
            try:
                served = await self._endpoint.models()
            except LlmFailed:  # it serves chats and no list; nothing hangs on it
                served = []
            found = next((model.max_model_len for model in served if model.id == self.model), None)
        if self.cache is None:
            return found
        if found is not None:
            self.cache.put(key, self.model, 0, Reply(str(found), "stop", Usage()))
            return found
        try:
            recorded = self.cache.get(key, self.model)
        except LlmFailed:
            return None
        return int(recorded.text) if recorded is not None and recorded.text.isdecimal() else None

    async def _recorded(
        self, messages: Sequence[Message], schema: dict[str, Any] | None, limit: int, max_tokens: int
    ) -> Reply:
        if self.cache is None:
            return await self._call(messages, schema, max_tokens)
        key = call_key(self.model, messages, schema, self.temperature, self.seed, limit)
        # Equal calls at the same time: the first one asks, the others find its reply.
        async with self._locks.setdefault(key, asyncio.Lock()):
            found = self.cache.get(key, self.model)
            if found is not None:
                self.stats.cached += 1
                return found
            try:
                reply = await self._call(messages, schema, max_tokens)
            except LlmFailed as failure:
                if not failure.hopeless:
                    self.cache.put(key, self.model, self.seed, failure)
                raise
            self.cache.put(key, self.model, self.seed, reply)
            return reply

    async def _call(self, messages: Sequence[Message], schema: dict[str, Any] | None, max_tokens: int) -> Reply:
        assert self._endpoint is not None, "replay makes no call"
        # max_tokens and not its newer name: every compatible server knows it.
        request: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": max_tokens,
        }
        if schema is not None:
            request["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
        async with self._free:
            self.budget.begin()
            self.stats.calls += 1
            started = time.perf_counter()
            with self._busy:
                completion = await self._endpoint.guard(self._endpoint.api.chat.completions.create(**request))
            reply = self._reply(completion, time.perf_counter() - started)
            self.budget.spend(sum(reply.usage) or len(json.dumps(request) + reply.text) // 3)
            return reply

    def _reply(self, completion: Any, seconds: float) -> Reply:
        """Read a completion; local servers leave out fields that the protocol has."""
        assert self._endpoint is not None
        choices = getattr(completion, "choices", None)
        first = choices[0] if isinstance(choices, list) and choices else None
        content = getattr(getattr(first, "message", None), "content", _ABSENT)  # the openai package checks no types
        if not isinstance(content, str | None):
            raise self._endpoint.foreign(str(completion))
        used = getattr(completion, "usage", None)
        usage = Usage(_count(getattr(used, "prompt_tokens", 0)), _count(getattr(used, "completion_tokens", 0)))
        self.stats.prompt_tokens += usage.prompt_tokens
        self.stats.completion_tokens += usage.completion_tokens
        reason = encodable(str(getattr(first, "finish_reason", None) or "stop"))
        return Reply(encodable(content or ""), reason, usage, seconds=round(seconds, 3))

    async def close(self) -> None:
        """Close connections and cache."""
        if self._endpoint is not None:
            await self._endpoint.api.close()
        if self.cache is not None:
            self.cache.close()

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _never(text: str) -> bool:
    return False


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
