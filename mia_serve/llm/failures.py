"""How a call to a language model can fail."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "unreachable",  # no connection
    "timeout",
    "http",  # a status other than 2xx; see LlmFailed.status
    "too long",  # prompt and reply do not fit the model's context
    "bad response",  # something else than the OpenAI protocol
    "interrupted",  # a reply that was read while it was written broke off
    "filtered",  # the endpoint withheld the reply
    "no content",
    "truncated",  # the reply hit the limit of tokens, and the larger one too
    "bad reply",  # not the JSON that was asked for, and not after a second try
    "not recorded",  # replay met a call that was never made
    "budget",  # what may be spent is spent
]
_RETRY_LATER = (408, 409, 429)
_SAME_FOR_ALL = (401, 403, 404)


class LlmFailed(RuntimeError):
    """A call that gave no usable reply.

    Attributes:
        reason: What went wrong, one of a few words (`Reason`).
        status: HTTP status where the reason is "http".
    """

    def __init__(self, reason: Reason, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.reason, self.status = reason, status

    @property
    def label(self) -> str:
        """The reason with its status, to count by: "truncated", "http 500"."""
        return self.reason if self.status is None else f"{self.reason} {self.status}"

    @property
    def transient(self) -> bool:
        """Whether the same call may well succeed later."""
        busy = self.status is not None and (self.status in _RETRY_LATER or self.status >= 500)
        return busy or self.reason in ("unreachable", "timeout", "bad response", "interrupted")

    @property
    def hopeless(self) -> bool:
        """Whether any other call would fail too: no connection, a refused key, no such model, no record, no budget."""
        return self.status in _SAME_FOR_ALL or self.reason in ("unreachable", "not recorded", "budget")
