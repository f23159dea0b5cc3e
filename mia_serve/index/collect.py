"""First stage of a search: one pass over all vectors in float32 that keeps only what can reach the k best.

The bar of a query is the k-th best score so far, less the error of float32. Almost nothing reaches it once the first
tile is done, so a tile costs its matrix product, one comparison, and next to nothing else; the scores of a tile are
the largest thing held. Chunks may belong to groups (sessions), of which the best k by their best chunk are wanted.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from mia_serve.index.blocks import Span, VectorBlocks
from mia_serve.index.flat import product
from mia_serve.index.threads import share, workers

_SCORES = 1 << 20  # of one tile
_TALL = 1 << 13  # vectors in one tile
_SHORT = 1 << 10  # not less, that all threads may have some
_AT_ONCE = 4  # tiles of full size that are held at once
_TILE_ELEMENTS = 1 << 22  # numbers in one tile's vectors
_DENSE = 16  # where more than one in so many scores reach the bar, it is worth raising it first
_HITS = 1 << 13  # hits that are held before the first look at them
_SPARE = 4096  # hits of one query, beyond some for each of k, that are worth settling one by one
_LOWEST = torch.finfo(torch.float32).min


class Candidates(NamedTuple):
    """What a first stage found for n queries.

    Attributes:
        query: (m,) int64, ascending.
        position: (m,) int64.
        floor: (n,) float32: a chunk that is not among them scores at most this; a query whose k-th best score does not
            exceed it has to be searched exhaustively.
    """

    query: np.ndarray
    position: np.ndarray
    floor: np.ndarray


def collect(
    queries: torch.Tensor,
    vectors: VectorBlocks,
    k: int,
    margin: torch.Tensor,
    allowed: np.ndarray | None = None,
    group: np.ndarray | None = None,
) -> Candidates:
    """Find every chunk that may be among the k best, or the best of one of the k best groups.

    Args:
        queries: (n, d) float32 on the device, n not large (the scores of a tile are n times as many as its vectors).
        vectors: By position.
        k: At most the number of allowed chunks, or of groups that have one.
        margin: (n,) float32, how far a product may be off.
        allowed: (P,) bool; None for all.
        group: (P,) integers; None: every chunk is its own.

    Returns:
        Candidates whose floor is -inf where they are complete; +inf, and none, where there were too many.
    """
    hits = _Hits(queries, k, margin, group)
    threads = torch.get_num_threads() if queries.device.type == "cpu" else 1
    scores_each = _SCORES // max(1, threads // _AT_ONCE)
    even = max(_SHORT, len(vectors) // (4 * threads))
    spans = list(vectors.spans(max(1, min(_TALL, even, scores_each // len(queries), _TILE_ELEMENTS // vectors.dim))))

    def scan(span: Span) -> None:
        keep = None if allowed is None else allowed[span.start : span.start + span.rows.stop - span.rows.start]
        if keep is None or keep.any():
            _scan_tile(queries, vectors.tile(span), span.start, keep, hits)

    share(scan, spans, workers(queries.device, len(spans)))
    hits.prune()
    return hits.candidates()


def _scan_tile(queries: torch.Tensor, tile: torch.Tensor, start: int, keep: np.ndarray | None, hits: _Hits) -> None:
    """Add to hits what of a tile's allowed vectors reaches the bar."""
    positions = np.arange(start, start + len(tile))
    if keep is not None and 2 * keep.sum() <= len(keep):
        tile, positions, keep = tile[torch.from_numpy(keep).to(tile.device)], positions[keep], None
    scores = product(queries, tile)
    if keep is not None and not keep.all():
        scores[:, torch.from_numpy(~keep).to(scores.device)] = -torch.inf
    found = _reaching(scores, hits.bar)
    if len(found) > max(scores.numel() // _DENSE, 2 * hits.k * len(queries)):
        found = _reaching(scores, hits.raised(scores, positions))
    values = scores.view(-1)[torch.from_numpy(found).to(scores.device)].cpu().numpy()
    query, column = np.divmod(found, len(positions))
    hits.add(query, positions[column], values)


def _reaching(scores: torch.Tensor, bar: torch.Tensor) -> np.ndarray:
    """Return the flat places of the scores that reach the bar."""
    if scores.device.type == "cpu":  # in NumPy, whose search for the few True is much faster
        return np.flatnonzero(scores.numpy() >= bar.numpy())
    return (scores >= bar).view(-1).nonzero()[:, 0].cpu().numpy()


class _Hits:
    """(query, position, score) that reached the bar; on the host, where sorting so few is quickest.

    Attributes:
        k: As in collect.
        bar: What a score must reach by now, (n, 1) float32 on the device; it never falls.
    """

    def __init__(self, queries: torch.Tensor, k: int, margin: torch.Tensor, group: np.ndarray | None) -> None:
        self.k, self.bar = k, queries.new_full((len(queries), 1), _LOWEST)
        self._slack, self._group = 2 * margin[:, None], group
        self._slack_here = self._slack[:, 0].cpu().numpy()
        none = np.empty(0, np.int64)
        self._parts = [(none, none, np.empty(0, np.float32))]
        self._count, self._limit = 0, _HITS
        self._overfull = np.zeros(len(queries), bool)
        self._lock = Lock()

    def raised(self, scores: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        """Raise the bar by one tile's scores (n, t); returns what each has to reach, in its group too, (n, 1 or t)."""
        floor = None
        best, slack = scores, self._slack
        if self._group is not None:
            names, codes = np.unique(self._group[positions], return_inverse=True)
            index = torch.from_numpy(codes).to(scores.device).expand(len(scores), -1)
            best = scores.new_full((len(scores), len(names)), -torch.inf).scatter_reduce_(1, index, scores, "amax")
            floor, slack = best.gather(1, index) - slack, 2 * slack
        if best.shape[1] >= self.k:
            self._raise(best.topk(self.k).values[:, -1:] - slack)
        return self.bar if floor is None else torch.maximum(self.bar, floor)

    def add(self, query: np.ndarray, position: np.ndarray, score: np.ndarray) -> None:
        """Take hits, and prune when there are many new ones."""
        with self._lock:
            self._parts.append((query, position, score))
            self._count += len(query)
            due = self._count > self._limit
            if due:
                bar = self.prune()
        if due:
            self._raise(torch.from_numpy(bar[:, None]).to(self.bar))

    def _raise(self, bar: torch.Tensor) -> None:
        with self._lock:
            self.bar = torch.maximum(self.bar, bar)

    def prune(self) -> np.ndarray:
        """Drop what cannot count any more; returns a bar for each query, (n,) float32."""
        query, position, score = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        if self._group is None:
            order, bar = _by_query(query, score, self.k, self._slack_here)
            query, position, score = query[order], position[order], score[order]
            kept = score >= bar[query]
        else:
            group = self._group[position]
            order = np.argsort(query * (int(group.max(initial=0)) + 1) + group)
            query, position, score, group = query[order], position[order], score[order], group[order]
            first = np.flatnonzero(np.diff(query, prepend=-1) | np.diff(group, prepend=-1))
            best = np.maximum.reduceat(score, first) if len(first) else score
            _, bar = _by_query(query[first], best, self.k, self._slack_here)
            spread = np.repeat(best, np.diff(first, append=len(query)))
            kept = (spread >= bar[query]) & (score >= spread - self._slack_here[query])
            bar = bar - self._slack_here  # of a chunk, not of its group's best
        self._overfull |= np.bincount(query[kept], minlength=len(bar)) > 4 * self.k + _SPARE
        kept &= ~self._overfull[query]
        bar[self._overfull] = np.inf
        self._parts = [(query[kept], position[kept], score[kept])]
        self._count = int(kept.sum())
        self._limit = max(_HITS, 2 * self._count)
        return bar

    def candidates(self) -> Candidates:
        """Return what the last prune left."""
        query, position, _ = self._parts[0]
        return Candidates(query, position, np.where(self._overfull, np.inf, -np.inf).astype(np.float32))


def _by_query(query: np.ndarray, score: np.ndarray, k: int, slack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort by query and descending score; also return for each query its k-th score less the slack, or the lowest."""
    bits = score.view(np.int32)
    ascending = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))  # as signed integers in the order of the floats
    order = np.argsort((query << 32) | (0x7FFFFFFF - ascending.astype(np.int64)))  # one key: much faster than two
    counts = np.bincount(query, minlength=len(slack))
    bar = np.full(len(slack), _LOWEST, np.float32)
    full = counts >= k
    last = (np.cumsum(counts) - counts + k - 1)[full]
    bar[full] = score[order][last] - slack[full]
    return order, bar
