"""Share work out to threads that each compute alone.

A library that splits every product over its threads waits for the slowest of them each time, which on a busy machine
is most of the time. Threads that take whole tiles wait once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import TypeVar

import torch
from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")


def share(work: Callable[[Item], None], items: Iterable[Item], workers: int) -> None:
    """Call work for every item, in as many threads as workers says; with one worker here and now.

    Args:
        work: Called under inference mode, by one thread for one item; what it changes together needs a lock.
        items: Taken one by one, in order.
        workers: 1 or more.

    Raises:
        Exception: What work raises first; items that were not begun are left out.
    """
    if workers == 1:
        for item in items:
            work(item)
        return
    queue, lock = iter(items), Lock()

    def drain() -> None:
        torch.get_num_threads()  # torch sets up a new thread at its first call; what follows must not be undone
        with _openmp().limit(limits=1), torch.inference_mode():
            while True:
                with lock:
                    item = next(queue, _END)
                if item is _END:
                    return
                try:
                    work(item)  # type: ignore[arg-type]
                except BaseException:
                    _exhaust(queue, lock)
                    raise

    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(drain) for _ in range(workers)]:
            done.result()


def workers(device: torch.device, items: int) -> int:
    """Return how many threads to share out items to: those that torch may use, if each gets two; one on a GPU."""
    return max(1, min(torch.get_num_threads(), items // 2)) if device.type == "cpu" else 1


_END = object()


def _exhaust(queue: Iterator[Item], lock: Lock) -> None:
    with lock:
        for _ in queue:
            pass


@cache
def _openmp() -> ThreadpoolController:
    """Return OpenMP's controls; what they set holds for the calling thread alone."""
    return ThreadpoolController().select(user_api="openmp")
