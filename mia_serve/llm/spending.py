"""What a client has done, and how much it may do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mia_serve.core.errors import MiaError
from mia_serve.llm.cache import Reply, Usage
from mia_serve.llm.failures import LlmFailed

if TYPE_CHECKING:
    from mia_serve.llm.client import ChatClient, Message


@dataclass
class Stats:
    """What a client has done.

    Attributes:
        calls: Calls that reached for the endpoint.
        cached: Replies out of the recording.
        failed: Chats that ended without a usable reply.
        cut: Chats whose reply was cut off and used as far as it went.
        prompt_tokens: Of the calls, as the endpoint counts them.
        completion_tokens: Of the calls.
        seconds: Time in which at least one call was under way.
    """

    calls: int = 0
    cached: int = 0
    failed: int = 0
    cut: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the counts, JSON-ready."""
        return asdict(self) | {"seconds": round(self.seconds, 3)}

    def to_text(self) -> str:
        """Return one line for people."""
        parts = [f"{self.calls} calls", f"{self.cached} recorded replies used"]
        if self.failed:
            parts.append(f"{self.failed} without a usable reply")
        if self.cut:
            parts.append(f"{self.cut} cut off and used as far as they went")
        parts.append(f"{self.prompt_tokens} + {self.completion_tokens} tokens")
        if self.seconds:
            parts.append(f"{self.seconds:.1f} s ({self.completion_tokens / self.seconds:.0f} new tokens/s)")
        return ", ".join(parts)


@dataclass
class Budget:
    """Limits that all clients which share it keep together; recorded replies are free.

    It is looked at before each call, so tokens can exceed the limit by what is under way at that moment, calls cannot.
    A call whose endpoint tells no usage counts as a token for every three bytes.

    Args:
        max_calls: Calls to the endpoint; None for any number.
        max_tokens: Tokens, prompts and replies together; None for any number.

    Attributes:
        calls: Calls made so far.
        tokens: Tokens used so far.

    Raises:
        MiaError: A limit is below 1.
    """

    max_calls: int | None = None
    max_tokens: int | None = None
    calls: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_tokens"):
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise MiaError(f"budget {name}={limit}: give at least 1, or None for no limit")

    def begin(self) -> None:
        """Count a call that is about to be made.

        Raises:
            LlmFailed: ("budget") The limit is reached.
        """
        for used, limit, what in ((self.calls, self.max_calls, "calls"), (self.tokens, self.max_tokens, "tokens")):
            if limit is not None and used >= limit:
                raise LlmFailed("budget", f"the budget of {limit} {what} is used up ({used}); raise it to go on")
        self.calls += 1

    def spend(self, tokens: int) -> None:
        """Count the tokens of a call that was answered."""
        self.tokens += tokens


class Stopwatch:
    """Adds up the time in which at least one call is under way."""

    def __init__(self, stats: Stats) -> None:
        self._stats, self._running, self._since = stats, 0, 0.0

    def __enter__(self) -> None:
        if not self._running:
            self._since = time.perf_counter()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if not self._running:
            self._stats.seconds += time.perf_counter() - self._since


class Metered:
    """A client that adds up the tokens of its own calls: what one question costs, among many on one client.

    Args:
        client: Makes the calls.

    Attributes:
        usage: Tokens of the replies so far.
    """

    def __init__(self, client: ChatClient) -> None:
        self.client, self.model, self.usage = client, client.model, Usage()

    async def chat(
        self, messages: Sequence[Message], schema: dict[str, Any] | None = None, max_tokens: int = 1024
    ) -> Reply:
        """Ask, see `ChatClient.chat`."""
        reply = await self.client.chat(messages, schema, max_tokens)
        self.usage = Usage(*map(sum, zip(self.usage, reply.usage, strict=True)))
        return reply
