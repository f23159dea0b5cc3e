"""Token sequences that wait for an encoder, in order of arrival and by length."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mia_serve.core.pooling import Sequence as Tokens

Views = dict[str, Any]  # view name -> (d,) float32 unit vector
Found = list["Views | None"]

_SLACK = 0.05  # part of a batch that may be padding


class Job:
    """One request: sequences that wait, and where their vectors go.

    Args:
        count: Its sequences.
        tokens: Tokens of all of them.
        bulk: Whether it waits behind others.
        future: Is given what is found.
        loop: The event loop that the future belongs to; None: it is a future of threads.
    """

    __slots__ = ("bulk", "error", "found", "future", "left", "loop", "since", "waiting", "waiting_tokens")

    def __init__(self, count: int, tokens: int, bulk: bool, future: Any, loop: asyncio.AbstractEventLoop | None):
        self.found: Found = [None] * count
        self.left = self.waiting = count
        self.waiting_tokens = tokens
        self.bulk, self.future, self.loop = bulk, future, loop
        self.error: BaseException | None = None
        self.since = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether it has failed or was cancelled."""
        return self.error is not None or self.future.cancelled()


class Item:
    """One sequence of a job."""

    __slots__ = ("job", "length", "place", "taken", "tokens")

    def __init__(self, job: Job, place: int, tokens: Tokens) -> None:
        self.job, self.place, self.tokens = job, place, tokens
        self.length = len(tokens.ids)
        self.taken = False


class Line:
    """Sequences that wait, in order of arrival and by length."""

    def __init__(self) -> None:
        self._arrived: deque[Item] = deque()
        self._by_length: dict[int, deque[Item]] = {}
        self._lengths: list[int] = []  # keys of the former, ascending

    def add(self, item: Item) -> None:
        """Put a sequence at the end."""
        self._arrived.append(item)
        same = self._by_length.get(item.length)
        if same is None:
            same = self._by_length[item.length] = deque()
            insort(self._lengths, item.length)
        same.append(item)

    def __bool__(self) -> bool:
        while self._arrived and (self._arrived[0].taken or self._arrived[0].job.over):
            self._drop(self._arrived.popleft())
        return bool(self._arrived)

    def batch(self, budget: int, free: float) -> list[Item]:
        """Take the oldest sequence and those nearest to it in length.

        Args:
            budget: Padded tokens that all of them may make; an oldest sequence over it goes alone.
            free: Tokens of padding that are let pass, however small the batch.
        """
        if not self:
            return []
        anchor = self._arrived[0]
        items, used = [self._take(anchor)], anchor.length
        longest = anchor.length
        below = above = anchor.length
        while True:
            near = self._nearest(below, above, anchor.length)
            if near is None:
                return items
            item, side = near
            tall = max(longest, item.length)
            padded = tall * (len(items) + 1)
            padding = padded - used - item.length
            if padded > budget or padding > max(_SLACK * padded, free):
                # Nothing further off on this side fits either.
                if side < 0:
                    below = -1
                else:
                    above = 1 << 60
                continue
            items.append(self._take(item))
            used, longest = used + item.length, tall
            if side < 0:
                below = item.length
            else:
                above = item.length

    def _nearest(self, below: int, above: int, length: int) -> tuple[Item, int] | None:
        """Return the first item at or under ``below``, or at or over ``above``, whichever is nearer to ``length``."""
        low, high = self._first(below, -1), self._first(above, 1)
        if low is not None and (high is None or length - low.length <= high.length - length):
            return low, -1
        return None if high is None else (high, 1)

    def _first(self, length: int, step: int) -> Item | None:
        while True:
            place = bisect_left(self._lengths, length)
            if step < 0 and (place == len(self._lengths) or self._lengths[place] != length):
                place -= 1
            if not 0 <= place < len(self._lengths):
                return None
            same = self._by_length[self._lengths[place]]
            while same and (same[0].taken or same[0].job.over):
                same.popleft()
            if same:
                return same[0]
            del self._by_length[self._lengths[place]]
            del self._lengths[place]

    def _take(self, item: Item) -> Item:
        item.taken = True
        return item

    def _drop(self, item: Item) -> None:
        """Let go of an item that is done with, so that no length keeps it."""
        item.taken = True
        same = self._by_length.get(item.length)
        while same and (same[0].taken or same[0].job.over):
            same.popleft()

    def clear(self) -> set[Job]:
        """Let all of it go, and return whose it was."""
        jobs = {item.job for item in self._arrived if not item.taken}
        self._arrived.clear()
        self._by_length.clear()
        self._lengths.clear()
        return jobs
