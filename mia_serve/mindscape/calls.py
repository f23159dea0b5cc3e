"""Many calls to a language model at once: in order, bounded, and given up together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from mia_serve.llm import ChatClient, LlmFailed

T = TypeVar("T")
R = TypeVar("R")

#: Failed items in a row after which an endpoint that is there (busy, 5xx, timeouts) is taken for down.
GIVE_UP = 10


async def ask_all(
    client: ChatClient,
    items: Sequence[T],
    work: Callable[[T], Awaitable[R]],
    what: str,
    progress: bool | None = None,
) -> list[R | LlmFailed]:
    """Do the work of every item, as many at once as the client lets through.

    Args:
        client: Its ``concurrency`` bounds the items under way: prompts are long, so none is built before its turn.
        items: What is asked about.
        work: Asks about one item; may make several calls.
        what: The items' name on the progress bar.
        progress: Whether stderr shows the bar; None: where it is a terminal.

    Returns:
        What the work gave, or its failure, in the order of the items.

    Raises:
        LlmFailed: A failure that all others would share, or the tenth transient one in a row. What is under way is
            cancelled, unless the budget is spent; what was answered is in the client's record.
    """
    from tqdm import tqdm

    results: dict[int, R | LlmFailed] = {}
    waiting = iter(enumerate(items))
    in_a_row = 0
    # Failures out of a recording say nothing of the endpoint, and come in another order than they did.
    replayed = client.cache is not None and client.cache.mode == "replay"

    async def worker() -> None:
        nonlocal in_a_row
        for i, item in waiting:
            try:
                results[i] = await work(item)
                in_a_row = 0
            except LlmFailed as failure:
                results[i] = failure
                in_a_row = in_a_row + 1 if failure.transient and not replayed else 0
                if failure.hopeless or in_a_row >= GIVE_UP:
                    raise
            bar.set_postfix_str(
                f"{client.stats.prompt_tokens} + {client.stats.completion_tokens} tokens", refresh=False
            )
            bar.update()

    hidden = None if progress is None else not progress
    with tqdm(total=len(items), desc=what, disable=hidden) as bar:
        await together(*(worker() for _ in range(min(client.concurrency, len(items)))))
    return [results[i] for i in range(len(items))]


async def together(*jobs: Coroutine[Any, Any, R]) -> list[R]:
    """Wait for all jobs; the first that fails cancels the others, and its error is raised once they have ended.

    Where it is the budget that is spent they end by themselves: what is under way is paid for, and is recorded.
    """
    tasks = [asyncio.create_task(job) for job in jobs]
    spent = False
    try:
        return await asyncio.gather(*tasks)
    except LlmFailed as failure:
        spent = failure.reason == "budget"
        raise
    finally:
        for task in tasks:
            if not spent:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
