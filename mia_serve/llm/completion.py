"""How a completion is read out of what an endpoint sends: whole, or piece by piece while it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mia_serve.llm.cache import Usage
from mia_serve.llm.endpoint import encodable
from mia_serve.llm.failures import LlmFailed

if TYPE_CHECKING:
    from mia_serve.llm.endpoint import Endpoint

_ABSENT = object()
_BROKEN = ("unreachable", "bad response")  # what it means where a reply had begun: the connection or the server broke


class Completion(NamedTuple):
    """What an endpoint sent: the text, why it ended, and the tokens, as far as it told."""

    text: str
    finish_reason: str
    usage: Usage


class Told:
    """Tells a listener the pieces of one reply, each once.

    A reply that was cut off is asked for again from its beginning. What was told of the first try is not told again;
    where the second goes another way, no more is told of it.

    Args:
        on_text: The listener.

    Attributes:
        text: What was told so far.
    """

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self.text, self._on_text = "", on_text

    def tell(self, text: str) -> None:
        """Tell what a text, the reply as far as it is known, has beyond what was told."""
        if len(text) > len(self.text) and text.startswith(self.text):
            piece, self.text = text[len(self.text) :], text
            self._on_text(piece)


def read_completion(endpoint: Endpoint, completion: Any) -> Completion:
    """Read a whole completion; local servers leave out fields that the protocol has.

    Raises:
        LlmFailed: It is none.
    """
    first = _first(completion)
    content = getattr(getattr(first, "message", None), "content", _ABSENT)  # the openai package checks no types
    if not isinstance(content, str | None):
        raise endpoint.foreign(str(completion))
    reason = getattr(first, "finish_reason", None)
    return Completion(encodable(content or ""), encodable(str(reason or "stop")), _usage(completion))


async def read_stream(endpoint: Endpoint, request: dict[str, Any], told: Told) -> Completion:
    """Ask for a completion and tell its text while it comes; the connection is closed when this is cancelled.

    Raises:
        LlmFailed: Nothing came, or ("interrupted") it broke off before its end.
    """
    streamed = request | {"stream": True, "stream_options": {"include_usage": True}}
    stream = await endpoint.guard(endpoint.api.chat.completions.create(**streamed))
    text, reason, usage = "", None, Usage()
    async with stream:
        while (piece := await _next(endpoint, stream)) is not None:
            first = _first(piece)
            content = getattr(getattr(first, "delta", None), "content", None)
            if not isinstance(content, str | None):
                raise endpoint.foreign(str(piece))
            if any(counts := _usage(piece)):  # in the last piece, or in every one with what it is by then
                usage = counts
            reason = getattr(first, "finish_reason", None) or reason
            if content:
                text += encodable(content)
                told.tell(text)
    if reason is None:
        raise LlmFailed("interrupted", f"{endpoint.base_url} ended a reply without saying why")
    return Completion(text, encodable(str(reason)), usage)


async def _next(endpoint: Endpoint, stream: Any) -> Any:
    try:
        return await endpoint.guard(anext(stream, None))
    except LlmFailed as failure:
        if failure.reason not in _BROKEN:
            raise
        raise LlmFailed("interrupted", f"{endpoint.base_url} broke off within a reply: {failure}") from None


def _first(completion: Any) -> Any:
    choices = getattr(completion, "choices", None)
    return choices[0] if isinstance(choices, list) and choices else None


def _usage(completion: Any) -> Usage:
    used = getattr(completion, "usage", None)
    return Usage(_count(getattr(used, "prompt_tokens", 0)), _count(getattr(used, "completion_tokens", 0)))


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
