"""Scores and orders that do not depend on backend, tile or batch.

A float32 matrix product gives the same pair of vectors scores that differ in the last bits from one tile shape or
library to the next, so equal vectors stop being ties. Here every score is a float64 inner product rounded once to
float32, and ties are ordered by id.
"""

from __future__ import annotations

import math

import torch

_ELEMENTS = 1 << 23  # float64 numbers held at once: 64 MiB


def rescore(queries: torch.Tensor, vectors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Score given rows for each query.

    Args:
        queries: (n, d) float32.
        vectors: (N, d) float32.
        rows: (n, f) int64, -1 where padded.

    Returns:
        (n, f) float32, -inf where padded.
    """
    scores = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    wide = max(1, min(rows.shape[1], _ELEMENTS // vectors.shape[1]))
    tall = max(1, _ELEMENTS // (wide * vectors.shape[1]))
    for top in range(0, rows.shape[0], tall):
        query = queries[top : top + tall].double()[:, :, None]
        for left in range(0, rows.shape[1], wide):
            part = rows[top : top + tall, left : left + wide]
            products = torch.bmm(vectors[part.clamp(min=0)].double(), query)[:, :, 0]
            scores[top : top + tall, left : left + wide] = products.masked_fill_(part < 0, -torch.inf).float()
    return scores


def score_all(queries: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Score every row for each query, (n, N) float32."""
    scores = torch.empty((len(queries), len(vectors)), dtype=torch.float32, device=queries.device)
    query = queries.double()
    tile = max(1, _ELEMENTS // vectors.shape[1])
    for start in range(0, len(vectors), tile):
        scores[:, start : start + tile] = query @ vectors[start : start + tile].double().T
    return scores


def by_score_then_rank(
    scores: torch.Tensor, rows: torch.Tensor, rank: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort each row by descending score, ties by ascending rank of the id; padding (row -1) last.

    Args:
        scores: (n, f) float32.
        rows: (n, f) int64, -1 where padded.
        rank: (N,) int64, place of each row's id among the sorted ids.

    Returns:
        Sorted scores and rows.
    """
    key = torch.where(rows >= 0, rank[rows.clamp(min=0)], len(rank))
    by_rank = key.argsort(dim=1)
    scores, rows = scores.gather(1, by_rank), rows.gather(1, by_rank)
    scores, by_score = scores.sort(dim=1, descending=True, stable=True)
    return scores, rows.gather(1, by_score)


def exhaustive_top(
    queries: torch.Tensor, vectors: torch.Tensor, order: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the k best rows by full exact scoring, in bounded memory: slower, and right for any number of ties.

    Args:
        queries: (n, d) float32.
        vectors: (N, d) float32.
        order: (N,) int64, rows by ascending id.
        k: At most N.

    Returns:
        Scores and rows, (n, k) each.
    """
    tile = max(k, 1 << 14)
    tall = max(1, _ELEMENTS // (tile + k))
    found = []
    for part in queries.split(tall):
        best = part.new_empty((len(part), 0))
        rows = torch.empty((len(part), 0), dtype=torch.int64, device=part.device)
        for start in range(0, len(order), tile):
            block = order[start : start + tile]
            # Blocks come in id order behind the running best, so a stable sort keeps the lowest id of equals in front.
            best = torch.cat([best, score_all(part, vectors[block])], dim=1)
            rows = torch.cat([rows, block.expand(len(part), -1)], dim=1)
            best, kept = best.sort(dim=1, descending=True, stable=True)
            best, rows = best[:, :k], rows.gather(1, kept[:, :k])
        found.append((best, rows))
    scores, rows_found = zip(*found, strict=True)
    return torch.cat(scores), torch.cat(rows_found)


def float32_margin(dim: int) -> float:
    """Bound the error of a float32 inner product of two unit vectors.

    The rounding errors of d terms add up like √d (Higham and Mary, 2019); eight times that is never met in practice.
    """
    return 8 * math.sqrt(dim) * 2.0**-24
