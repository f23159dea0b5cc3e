"""An asynchronous chat client over the ``openai`` package: bounded, recorded, with typed failures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict
from urllib.parse import urlsplit

from mia_serve.core.errors import MiaError
from mia_serve.llm.cache import Reply, ReplyCache, Usage, call_key
from mia_serve.llm.failures import LlmFailed

if TYPE_CHECKING:
    from openai import AsyncOpenAI

#: Environment variables that may hold the API key, first wins.
KEY_SETTINGS = ("MIA_LLM_KEY", "OPENAI_API_KEY")
_NO_KEY = "none"  # local servers take any
_ABSENT = object()
_LARGER = 4  # times the limit of tokens, for a reply that was cut off


class Message(TypedDict):
    """One message of a chat: role ("system", "user", "assistant") and text."""

    role: str
    content: str


@dataclass
class Stats:
    """What a client has done: calls that reached for the endpoint, replies out of the cache, tokens of the calls."""

    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


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
    ) -> None:
        if concurrency < 1:
            raise MiaError(f"concurrency={concurrency}: give at least 1 call at a time")
        if not model:
            raise MiaError("model is empty; give the name under which the endpoint serves it")
        self.base_url, self.model, self.cache = base_url, model, cache
        self.temperature, self.seed, self.concurrency = temperature, seed, concurrency
        self.stats = Stats()
        self._key = _checked_key(api_key or next((os.environ[n] for n in KEY_SETTINGS if os.environ.get(n)), _NO_KEY))
        self._api: AsyncOpenAI | None = None
        if cache is None or cache.mode != "replay":
            self._api = _connect(base_url, self._key, timeout, max_retries)
        self._free = asyncio.Semaphore(concurrency)
        self._locks: dict[str, asyncio.Lock] = {}

    async def chat(
        self, messages: Sequence[Message], schema: dict[str, Any] | None = None, max_tokens: int = 1024
    ) -> Reply:
        """Return the model's reply.

        A reply that is cut off at ``max_tokens`` is asked for once more with four times as many.

        Args:
            messages: The chat so far.
            schema: JSON schema that the endpoint is asked to keep to (``response_format``); most accept an object
                at its root only.
            max_tokens: Most tokens of the reply.

        Raises:
            LlmFailed: There is no usable reply; its ``reason`` says why.
        """
        reply = await self._recorded(messages, schema, max_tokens)
        if reply.finish_reason == "length":
            max_tokens *= _LARGER
            reply = await self._recorded(messages, schema, max_tokens)
        if reply.finish_reason == "length":
            raise LlmFailed("truncated", f"the reply of {self.model!r} was cut off at {max_tokens} tokens")
        if reply.finish_reason == "content_filter":
            raise LlmFailed("filtered", f"the endpoint withheld the reply of {self.model!r} (content filter)")
        if not reply.text.strip():
            raise LlmFailed("no content", f"the reply of {self.model!r} is empty ({reply.finish_reason})")
        return reply

    async def _recorded(self, messages: Sequence[Message], schema: dict[str, Any] | None, max_tokens: int) -> Reply:
        if self.cache is None:
            return await self._call(messages, schema, max_tokens)
        key = call_key(self.model, messages, schema, self.temperature, self.seed, max_tokens)
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
        import openai

        assert self._api is not None, "replay makes no call"
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
            self.stats.calls += 1
            try:
                return self._reply(await self._api.chat.completions.create(**request))
            except openai.APITimeoutError:
                raise LlmFailed("timeout", f"{self.base_url} did not answer in time") from None
            except openai.APIConnectionError as error:
                cause = self._shown(str(error.__cause__ or error))
                raise LlmFailed("unreachable", f"{self.base_url} cannot be reached ({cause}); is it up?") from None
            except openai.APIStatusError as error:
                hint = "; does the address end in /v1, and is the model's name right?" * (error.status_code == 404)
                detail = f"{self.base_url} answered {error.status_code}: {self._shown(error.message)}{hint}"
                raise LlmFailed("http", detail, error.status_code) from None
            except (openai.OpenAIError, ValueError, RecursionError) as error:
                raise self._foreign(str(error)) from None

    def _reply(self, completion: Any) -> Reply:
        """Read a completion; local servers leave out fields that the protocol has."""
        choices = getattr(completion, "choices", None)
        first = choices[0] if isinstance(choices, list) and choices else None
        content = getattr(getattr(first, "message", None), "content", _ABSENT)  # the openai package checks no types
        if not isinstance(content, str | None):
            raise self._foreign(str(completion))
        used = getattr(completion, "usage", None)
        usage = Usage(_count(getattr(used, "prompt_tokens", 0)), _count(getattr(used, "completion_tokens", 0)))
        self.stats.prompt_tokens += usage.prompt_tokens
        self.stats.completion_tokens += usage.completion_tokens
        return Reply(_encodable(content or ""), _encodable(str(getattr(first, "finish_reason", None) or "stop")), usage)

    def _foreign(self, got: str) -> LlmFailed:
        return LlmFailed(
            "bad response",
            f"{self.base_url} does not answer in the OpenAI protocol ({self._shown(got)}); does it end in /v1?",
        )

    def _shown(self, text: str) -> str:
        """Return one short line; an endpoint may echo the key."""
        line = _encodable(" ".join(text.split()))
        return (line if self._key == _NO_KEY else line.replace(self._key, "***"))[:300]

    async def close(self) -> None:
        """Close connections and cache."""
        if self._api is not None:
            await self._api.close()
        if self.cache is not None:
            self.cache.close()

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _encodable(text: str) -> str:
    """Put a ? for half of a surrogate pair, which a model may well reply and no file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _checked_key(key: str) -> str:
    """Return a key without the line break that it has out of a file; the message about a wrong one does not show it."""
    key = key.strip() or _NO_KEY
    if not key.isascii() or not key.isprintable():
        raise MiaError("the API key holds a line break or a character that is not ASCII; set it again")
    return key


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # a port that is none, or half of an IPv6 address
        return False


def _connect(base_url: str | None, key: str, timeout: float, max_retries: int) -> AsyncOpenAI:
    if not base_url or not _is_address(base_url) or " " in base_url:
        raise MiaError(f"address {base_url!r} of the language model: give one such as http://localhost:8000/v1")
    try:
        from openai import AsyncOpenAI, Timeout
    except ImportError:
        raise MiaError(
            "the client for language models needs the package openai: pip install 'mia-retrieval[llm]'"
        ) from None
    return AsyncOpenAI(
        base_url=base_url, api_key=key, timeout=Timeout(timeout, connect=min(timeout, 10.0)), max_retries=max_retries
    )
