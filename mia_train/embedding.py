"""Encode many texts once: shared over processes, kept in a cache, with the same bits for any number of processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from mia_serve.core import Encoder, MiaError
from mia_serve.core.vector_cache import Role, VectorCache, encode_texts, encoder_facts
from mia_train.distributed import gather_objects, is_main, on_main, rank, world_size

A = TypeVar("A")
B = TypeVar("B")

# What a text is batched with moves the last bits of its vector. Blocks are therefore cut from the whole list, and a
# process takes whole blocks: the number of processes changes who encodes a block, never what is in it.
BLOCK = 256
_SHARD, _SHARD_SECONDS = 4096, 60.0  # a killed run loses at most so many texts, or so much time


def once(work: Callable[[], B], shared: bool) -> B:
    """Run ``work`` on rank 0 and give every rank its result, or simply run it where nothing is shared."""
    return on_main(work) if shared else work()


def in_turns(blocks: Sequence[A], work: Callable[[A], B], shared: bool) -> Iterator[tuple[A, B]]:
    """Yield every block with its result, in order, on every rank; each result is made by one rank.

    A failure on one rank is raised on all of them, so that none waits for ever.

    Args:
        blocks: The same on every rank.
        work: What to do with a block; its result must be picklable where it is shared.
        shared: Whether all ranks call this together; otherwise this process does it all.
    """
    if not shared:
        for block in blocks:
            yield block, work(block)
        return
    me = rank()
    for first in range(0, len(blocks), world_size()):
        result: Any = None
        failure: Exception | None = None
        if first + me < len(blocks):
            try:
                result = work(blocks[first + me])
            except Exception as error:
                failure = error
        user = isinstance(failure, MiaError)
        told = None if failure is None else (user, str(failure) if user else f"{type(failure).__name__}: {failure}")
        results = gather_objects((result, told))
        if failure is not None:
            raise failure
        for other, (_, said) in enumerate(results):
            if said is not None:
                raise (MiaError if said[0] else RuntimeError)(f"process {other}: {said[1]}")
        for block, (made, _) in zip(blocks[first : first + len(results)], results, strict=False):
            yield block, made


class Embedder:
    """An encoder whose work is shared over processes and remembered in a cache.

    Args:
        encoder: The same on every rank.
        cache: Folder of vectors known from before (see :class:`VectorCache`); None for none. Only rank 0 touches it.
        shared: Whether all ranks of the process group call this together; otherwise this process works alone.

    Attributes:
        encoded: Texts encoded so far, by all ranks together.
        hits: Texts whose vectors came out of the cache.
    """

    def __init__(self, encoder: Encoder, cache: str | Path | None = None, shared: bool = False) -> None:
        self.encoder, self.cache, self.shared = encoder, cache, shared
        self.encoded = self.hits = 0

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encode different queries, without signatures.

        Returns:
            (n, d) float32 unit rows on rank 0; the other ranks get (0, d).

        Raises:
            MiaError: A query is too long for the encoder.
        """
        return self._embed(texts, "query")

    def documents(self, texts: Sequence[str]) -> np.ndarray:
        """Encode different documents; returns as :meth:`queries`."""
        return self._embed(texts, "document")

    def _embed(self, texts: Sequence[str], role: Role) -> np.ndarray:
        here = not self.shared or is_main()
        vectors = np.empty((len(texts) if here else 0, self.encoder.dim), np.float32)
        cache: VectorCache | None = None

        def look_up() -> list[int]:
            nonlocal cache
            if self.cache is None:
                return list(range(len(texts)))
            cache = VectorCache(self.cache, encoder_facts(self.encoder, role))
            return cache.fill(texts, vectors)

        missing = once(look_up, self.shared)
        self.hits += len(texts) - len(missing)
        self.encoded += len(missing)
        missing.sort(key=lambda i: (-len(texts[i]), i))  # like lengths together: little padding, even shares
        blocks = [missing[start : start + BLOCK] for start in range(0, len(missing), BLOCK)]
        waiting: list[int] = []
        written = time.monotonic()
        bar = tqdm(total=len(missing), desc=f"encode, {role}", disable=not here or not sys.stderr.isatty())
        try:
            for block, found in in_turns(
                blocks, lambda b: encode_texts(self.encoder, [texts[i] for i in b], role), self.shared
            ):
                bar.update(len(block))
                if not here:
                    continue
                vectors[block] = found
                waiting += block
                due = len(waiting) >= _SHARD or time.monotonic() - written > _SHARD_SECONDS
                if cache is not None and due:
                    cache.add([texts[i] for i in waiting], vectors[waiting])
                    waiting, written = [], time.monotonic()
        finally:
            bar.close()
            if cache is not None:
                cache.add([texts[i] for i in waiting], vectors[waiting])
        return vectors
