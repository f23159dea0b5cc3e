"""One address that speaks the OpenAI protocol: how it is reached, what it serves, and how it refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from mia_serve.core.errors import MiaError
from mia_serve.llm.failures import LlmFailed

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")

#: Environment variables that may hold the API key, first wins.
KEY_SETTINGS = ("MIA_LLM_KEY", "OPENAI_API_KEY")
_NO_KEY = "none"  # local servers take any
# How servers say that prompt and reply do not fit: OpenAI and vLLM, then SGLang, llama.cpp, TGI.
_TOO_LONG = re.compile(
    r"context[ _](length|window|size)|max_model_len|longer than the model|prompt is too long"
    r"|max(_completion|_new)?_tokens\S* (cannot be greater|is too large|must be <=)|too many tokens",
    re.IGNORECASE,
)
_REFUSALS = (400, 413, 422)


class ServedModel(NamedTuple):
    """A model of an endpoint.

    Attributes:
        id: Name to call it by.
        max_model_len: Tokens of prompt and reply together at most; None where the endpoint does not say.
    """

    id: str
    max_model_len: int | None


class Endpoint:
    """An address with its key; makes calls through the ``openai`` package and types what goes wrong.

    Args:
        base_url: Such as ``http://localhost:8000/v1``.
        api_key: Key; by default that of MIA_LLM_KEY or OPENAI_API_KEY, where one is set. It is never shown.
        timeout: Seconds for one attempt.
        max_retries: Further attempts after a connection error, timeout, 408, 409, 429 or 5xx, with growing pauses.

    Raises:
        MiaError: The address or the key is not one, or the package ``openai`` is missing.
    """

    def __init__(self, base_url: str | None, api_key: str | None, timeout: float, max_retries: int) -> None:
        self.base_url = base_url
        self._key = checked_key(api_key)
        self.api = _connect(base_url, self._key, timeout, max_retries)

    async def models(self) -> list[ServedModel]:
        """Ask which models are served.

        Raises:
            LlmFailed: There is no answer, or not one of the protocol.
        """
        body = await self.guard(self._list())
        rows = body.get("data") if isinstance(body, dict) else None
        if not isinstance(rows, list) or not all(
            isinstance(row, dict) and isinstance(row.get("id"), str) for row in rows
        ):
            raise self.foreign(str(body))
        lengths = (row.get("max_model_len") for row in rows)
        return [
            ServedModel(encodable(row["id"]), length if type(length) is int and length > 0 else None)
            for row, length in zip(rows, lengths, strict=True)
        ]

    async def _list(self) -> Any:
        return json.loads(await (await self.api.models.with_raw_response.list()).http_response.aread())

    async def guard(self, call: Awaitable[T]) -> T:
        """Await a call of the ``openai`` package.

        Raises:
            LlmFailed: Whatever it raised, typed, without the key.
        """
        import openai

        try:
            return await call
        except openai.APITimeoutError:
            raise LlmFailed("timeout", f"{self.base_url} did not answer in time") from None
        except openai.APIConnectionError as error:
            cause = self.shown(str(error.__cause__ or error))
            raise LlmFailed("unreachable", f"{self.base_url} cannot be reached ({cause}); is it up?") from None
        except openai.APIStatusError as error:
            raise self._refused(error.status_code, error.message) from None
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            raise self.foreign(str(error)) from None

    def _refused(self, status: int, message: str) -> LlmFailed:
        said = f"{self.base_url} answered {status}: {self.shown(message)}"
        if status in _REFUSALS and _TOO_LONG.search(message):
            return LlmFailed("too long", f"{said}; shorten the prompt or ask for a shorter reply")
        hint = "; does the address end in /v1, and is the model's name right?" * (status == 404)
        return LlmFailed("http", said + hint, status)

    def foreign(self, got: str) -> LlmFailed:
        """Return the failure for an answer that is not one of the protocol."""
        return LlmFailed(
            "bad response",
            f"{self.base_url} does not answer in the OpenAI protocol ({self.shown(got)}); does it end in /v1?",
        )

    def shown(self, text: str) -> str:
        """Return one short line; an endpoint may echo the key."""
        line = encodable(" ".join(text.split()))
        return (line if self._key == _NO_KEY else line.replace(self._key, "***"))[:300]


async def served_models(base_url: str, api_key: str | None = None, timeout: float = 30.0) -> list[ServedModel]:
    """Ask an endpoint which models it serves.

    Args:
        base_url: Such as ``http://localhost:8000/v1``.
        api_key: Key; by default that of MIA_LLM_KEY or OPENAI_API_KEY.
        timeout: Seconds to wait.

    Raises:
        MiaError: The address or the key is not one, or the package ``openai`` is missing.
        LlmFailed: There is no answer, or not one of the protocol.
    """
    endpoint = Endpoint(base_url, api_key, timeout, max_retries=1)
    async with endpoint.api:
        return await endpoint.models()


def checked_key(key: str | None) -> str:
    """Return the key without the line break that it has out of a file; what is said of a wrong one does not show it.

    Raises:
        MiaError: It could not be sent.
    """
    key = key or next((os.environ[name] for name in KEY_SETTINGS if os.environ.get(name)), _NO_KEY)
    key = key.strip() or _NO_KEY
    if not key.isascii() or not key.isprintable():
        raise MiaError("the API key holds a line break or a character that is not ASCII; set it again")
    return key


def encodable(text: str) -> str:
    """Put a ? for half of a surrogate pair, which a model may well reply and no file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


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
