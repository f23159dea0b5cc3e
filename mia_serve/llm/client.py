"""An asynchronous chat client over the ``openai`` package: bounded, recorded, with typed failures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from mia_serve.core.errors import MiaError
from mia_serve.llm.cache import Reply, ReplyCache, Usage, call_key
from mia_serve.llm.completion import Completion, Told, read_completion, read_stream
from mia_serve.llm.endpoint import Endpoint, checked_key
from mia_serve.llm.failures import LlmFailed
from mia_serve.llm.neutral import neutral
from mia_serve.llm.spending import Budget, Stats, Stopwatch

_LARGER = 4  # times the limit of tokens, for a reply that was cut off
_CONTEXT: list[Message] = []  # what the length of the context is recorded under: a call without messages
_PAUSE = 0.5  # seconds before a reply that broke off is asked for again, twice as many each time


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
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Return the model's reply.

        A reply that is cut off at ``max_tokens`` is asked for once more with four times as many, or as many as the
        model's context has room for. In the messages, strings that are control tokens of language models are broken
        (see `neutral`): a text in a prompt stays a text.

        Args:
            messages: The chat so far.
            schema: JSON schema that the endpoint is asked to keep to (``response_format``); most accept an object
                at its root only.
            max_tokens: Most tokens of the reply.
            enough: Says whether the text of a reply that was cut off will do as it is; None: it never does.
            on_text: Told the pieces of the reply's text as the model writes them, in order; a recorded reply comes as
                one piece. Where a reply that was cut off is continued in other words, or fails in the end, what was
                told is not what is returned.

        Raises:
            LlmFailed: There is no usable reply; its ``reason`` says why.
        """
        told = None if on_text is None else Told(on_text)
        safe = [Message(role=message["role"], content=neutral(message["content"])) for message in messages]
        try:
            reply = await self._usable(safe, schema, max_tokens, enough or _never, told)
        except LlmFailed:
            self.stats.failed += 1
            raise
        if told is not None:
            told.tell(reply.text)  # a recorded one
        return reply

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
        told: Told | None,
    ) -> Reply:
        reply = await self._recorded(messages, schema, max_tokens, max_tokens, told)
        if reply.finish_reason == "length" and not enough(reply.text):
            larger = await self._larger(reply.usage, max_tokens)
            if larger <= max_tokens:
                raise self._cut_off(max_tokens)
            try:
                # Recorded under the plain limit, whatever the context had room for: replay need not know.
                reply = await self._recorded(messages, schema, max_tokens * _LARGER, larger, told)
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
        self,
        messages: Sequence[Message],
        schema: dict[str, Any] | None,
        limit: int,
        max_tokens: int,
        told: Told | None,
    ) -> Reply:
        if self.cache is None:
            return await self._call(messages, schema, max_tokens, told)
        key = call_key(self.model, messages, schema, self.temperature, self.seed, limit)
        # Equal calls at the same time: the first one asks, the others find its reply.
        async with self._locks.setdefault(key, asyncio.Lock()):
            found = self.cache.get(key, self.model)
            if found is not None:
                self.stats.cached += 1
                return found
            try:
                reply = await self._call(messages, schema, max_tokens, told)
            except LlmFailed as failure:
                if not failure.hopeless:
                    self.cache.put(key, self.model, self.seed, failure)
                raise
            self.cache.put(key, self.model, self.seed, reply)
            return reply

    async def _call(
        self, messages: Sequence[Message], schema: dict[str, Any] | None, max_tokens: int, told: Told | None
    ) -> Reply:
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
                completion = await self._completion(request, told)
            self.stats.prompt_tokens += completion.usage.prompt_tokens
            self.stats.completion_tokens += completion.usage.completion_tokens
            self.budget.spend(sum(completion.usage) or len(json.dumps(request) + completion.text) // 3)
            return Reply(*completion, seconds=round(time.perf_counter() - started, 3))

    async def _completion(self, request: dict[str, Any], told: Told | None) -> Completion:
        """Ask the endpoint; a reply that breaks off is asked for again as long as nothing of it was told."""
        assert self._endpoint is not None
        api = self._endpoint.api
        if told is None:
            return read_completion(self._endpoint, await self._endpoint.guard(api.chat.completions.create(**request)))
        before = told.text
        for tried in range(api.max_retries):
            try:
                return await read_stream(self._endpoint, request, told)
            except LlmFailed as failure:
                if failure.reason != "interrupted" or told.text != before:
                    raise
            await asyncio.sleep(_PAUSE * 2**tried)
        return await read_stream(self._endpoint, request, told)

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
