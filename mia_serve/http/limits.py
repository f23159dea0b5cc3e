"""How many requests and tokens a key may use in a minute."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from mia_serve.http.errors import HttpError, retry_after


@dataclass(frozen=True)
class Allowance:
    """Limits of a minute and the counts that they are held against.

    A window begins with the first request that is counted in it and ends a minute later.

    Args:
        requests_per_minute: None: no limit.
        tokens_per_minute: None: no limit.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    _counts: FixedWindowRateLimiter = field(default_factory=lambda: FixedWindowRateLimiter(MemoryStorage()))

    def of(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> Allowance:
        """Return the allowance of a key that has limits of its own; None leaves the common one."""
        return replace(
            self,
            requests_per_minute=requests_per_minute or self.requests_per_minute,
            tokens_per_minute=tokens_per_minute or self.tokens_per_minute,
        )

    def admit(self, who: str) -> None:
        """Count a request.

        Raises:
            HttpError: 429: the minute's requests or tokens are used up; Retry-After says until when.
        """
        if self.tokens_per_minute is not None:
            item = RateLimitItemPerMinute(self.tokens_per_minute)
            if not self._counts.test(item, "tokens", who):
                raise self._exceeded(item, "tokens", who)
        if self.requests_per_minute is not None:
            item = RateLimitItemPerMinute(self.requests_per_minute)
            if not self._counts.hit(item, "requests", who):
                raise self._exceeded(item, "requests", who)

    def charge(self, who: str, tokens: int) -> None:
        """Count tokens that were used."""
        if self.tokens_per_minute is not None and tokens > 0:
            self._counts.hit(RateLimitItemPerMinute(self.tokens_per_minute), "tokens", who, cost=tokens)

    def _exceeded(self, item: RateLimitItem, what: str, who: str) -> HttpError:
        wait = self._counts.get_window_stats(item, what, who).reset_time - time.time()
        return HttpError(
            429,
            f"the limit of {item.amount} {what} a minute is reached; try again after the time in Retry-After",
            f"{what}_per_minute",
            headers=retry_after(wait),
        )
