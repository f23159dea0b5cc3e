"""Scores and orders that do not depend on backend, tile or batch.

A float32 matrix product gives the same pair of vectors scores that differ in the last bits from one tile shape or
library to the next, so equal vectors stop being ties. Here every score is a float64 inner product rounded once to
float32, and ties are ordered by id.
"""

from __future__ import annotations

import numpy as np
import torch

from mia_serve.index.blocks import VectorBlocks

_ELEMENTS = 1 << 21  # float64 numbers held at once: 16 MiB
_PAIRS = 1 << 16  # of them, where pairs are scored: what stays in the cache

_SMALL = 1 << 22  # multiplications

LEAST = torch.iinfo(torch.int64).min  # below every key


def pair_scores(queries: torch.Tensor, vectors: VectorBlocks, query: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Score given pairs.

    Args:
        queries: (n, d) float32.
        vectors: By position.
        query: (m,) int64, rows of queries.
        position: (m,) int64.

    Returns:
        (m,) float32.
    """
    scores = np.empty(len(query), np.float32)
    step = max(1, _PAIRS // vectors.dim)
    parts = [slice(start, start + step) for start in range(0, len(query), step)]
    if queries.device.type == "cpu":  # nothing in here is worth waking torch's threads
        given = queries.numpy().astype(np.float64)
        for part in parts:
            scores[part] = np.einsum("md,md->m", vectors.take(position[part]).numpy(), given[query[part]])
        return scores + np.float32(0)
    wide = queries.double()
    for part in parts:
        which = torch.from_numpy(query[part]).to(queries.device)
        scores[part] = rounded((vectors.take(position[part]).double() * wide[which]).sum(1)).cpu().numpy()
    return scores


def double_product(queries: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Multiply (n, d) by the transpose of (t, d), both float32, in float64; (n, t) float64."""
    small = queries.numel() * len(vectors) < _SMALL
    if small and queries.device.type == "cpu":  # by NumPy, which wakes no threads for it
        return torch.from_numpy(queries.numpy().astype(np.float64) @ vectors.numpy().astype(np.float64).T)
    return queries.double() @ vectors.double().T


def rounded(scores: torch.Tensor) -> torch.Tensor:
    """Round float64 scores once; -0 becomes 0, so that the two tie."""
    return scores.float() + 0.0


def to_keys(scores: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Pack scores and ranks into int64 keys: the greater key is the greater score or, of equals, the lesser rank.

    Args:
        scores: Finite float32, or -inf.
        rank: 0 to 2³² - 1, of a shape that broadcasts.
    """
    bits = scores.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as signed integers in the order of the floats
    return (ordered.long() << 32) | (0xFFFFFFFF - rank.long())


def from_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 scores and int64 ranks that keys were made of."""
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def merge_top(best: torch.Tensor, keys: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k greatest of (n, a) and (n, b) keys, descending, or all where there are fewer."""
    both = torch.cat([best, keys], dim=1)
    return both.topk(min(k, both.shape[1]), dim=1).values


def exhaustive_top(
    queries: torch.Tensor, vectors: VectorBlocks, k: int, rank: np.ndarray, allowed: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best chunks by full exact scoring, in bounded memory: slower, and right for any number of ties.

    Args:
        queries: (n, d) float32.
        vectors: By position.
        k: At most the number of allowed positions.
        rank: (P,) place of each id among the sorted ids.
        allowed: (P,) bool; None for all.

    Returns:
        Scores (n, k) float32 and ranks (n, k) int64.
    """
    ranks = torch.from_numpy(rank).to(queries.device)
    found = []
    for part in queries.split(max(1, _ELEMENTS // (4 * k))):
        best = torch.empty((len(part), 0), dtype=torch.int64, device=part.device)
        tall = max(1, min(_ELEMENTS // len(part), _ELEMENTS // vectors.dim))
        for start, tile in vectors.tiles(tall):
            stop = start + len(tile)
            keys = to_keys(rounded(double_product(part, tile)), ranks[start:stop])
            if allowed is not None:
                keys = keys[:, torch.from_numpy(allowed[start:stop]).to(keys.device)]
            best = merge_top(best, keys, k)
        found.append(best)
    scores, place = from_keys(torch.cat(found))
    return scores.cpu().numpy(), place.cpu().numpy()
