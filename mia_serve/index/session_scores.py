"""Pooled scores of all sessions, exact, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from threading import Lock

import numpy as np
import torch

from mia_serve.index.blocks import VectorBlocks
from mia_serve.index.exact import double_product
from mia_serve.index.pooling import Pooling, finish_pool, join_pools, partial_pool
from mia_serve.index.table import ChunkTable
from mia_serve.index.threads import share, workers

Sink = Callable[[np.ndarray, torch.Tensor], None]

_ELEMENTS = 1 << 20  # float64 numbers held at once: 8 MiB
_TALL = 1 << 12  # vectors in a tile
_KEPT_MEANS = 1 << 25  # numbers in the mean vectors that are kept from one search to the next: 256 MiB


class Members:
    """Sessions that have an allowed chunk, and these chunks, short sessions first so that neighbours are as long.

    Args:
        table: The chunks.
        allowed: (P,) bool; None for all.

    Attributes:
        names: Session ids, ascending, (S,).
        column_of: Place in names by the table's session code, -1 without an allowed chunk, (C,) int64.
    """

    def __init__(self, table: ChunkTable, allowed: np.ndarray | None) -> None:
        self._positions = np.arange(len(table)) if allowed is None else np.flatnonzero(allowed)
        self._codes = table.session[self._positions]
        self._sizes = np.bincount(self._codes, minlength=len(table.session_names))
        live = np.flatnonzero(self._sizes)
        live = live[np.argsort(table.session_rank()[live])]
        self.names = [table.session_names[code] for code in live.tolist()]
        self.column_of = np.full(len(self._sizes), -1)
        self.column_of[live] = np.arange(len(live))

    @cached_property
    def column(self) -> np.ndarray:
        """Place in names of each session, by ascending length, (S,) int64."""
        sizes = np.empty(len(self.names), np.int64)
        live = np.flatnonzero(self._sizes)
        sizes[self.column_of[live]] = self._sizes[live]
        return np.argsort(sizes, kind="stable")

    @cached_property
    def place(self) -> np.ndarray:
        """Inverse of column, (S,) int64."""
        place = np.empty(len(self.names), np.int64)
        place[self.column] = np.arange(len(place))
        return place

    @cached_property
    def positions(self) -> np.ndarray:
        """Positions of the chunks, session after session in the order of column."""
        return self._positions[np.argsort(self.place[self.column_of[self._codes]], kind="stable")]

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each session's chunks start in positions, (S + 1,) int64."""
        sizes = np.bincount(self.place[self.column_of[self._codes]], minlength=len(self.names))
        return np.concatenate([[0], np.cumsum(sizes)])


def exact_scores(queries: torch.Tensor, vectors: VectorBlocks, positions: np.ndarray) -> torch.Tensor:
    """Return (n, len(positions)) float64 inner products."""
    scores = torch.empty((len(queries), len(positions)), dtype=torch.float64, device=queries.device)
    step = max(1, min(_TALL, _ELEMENTS // vectors.dim))
    for start in range(0, len(positions), step):
        scores[:, start : start + step] = double_product(queries, vectors.take(positions[start : start + step]))
    return scores


def pooled_scores(
    queries: torch.Tensor,
    vectors: VectorBlocks,
    members: Members,
    pooling: Pooling,
    topk: int,
    beta: float,
    sink: Sink,
) -> None:
    """Hand (columns (s,), scores (n, s) float64) of some sessions after others to sink, until all were there.

    For "max", "topk" and "lme"; a session that is longer than a tile is taken in runs. Sink may be called by several
    threads at once.
    """
    tall = max(1, min(_TALL, _ELEMENTS // len(queries)))
    sizes = np.diff(members.starts)

    def score(tile: tuple[int, int]) -> None:
        first, last = tile
        partial: torch.Tensor | None = None
        for start in range(members.starts[first], members.starts[last], tall):
            run = members.positions[start : min(start + tall, members.starts[last])]
            scores = exact_scores(queries, vectors, run)
            shaped = _padded(scores, sizes[first:last]) if last - first > 1 else scores[:, None, :]
            part = partial_pool(shaped, pooling, topk, beta)
            partial = part if partial is None else join_pools(partial, part, pooling, topk, beta)
        if partial is not None:
            here = torch.from_numpy(sizes[first:last]).to(queries.device)
            sink(members.column[first:last], finish_pool(partial, here, pooling, topk, beta))

    tiles = _tiles(sizes, tall)
    share(score, tiles, workers(queries.device, len(tiles)))


class SessionMeans:
    """Mean vectors of the sessions, made at the first pass over them and kept where there is room."""

    def __init__(self, vectors: VectorBlocks, members: Members) -> None:
        self._vectors, self._members = vectors, members
        self._kept: list[tuple[np.ndarray, torch.Tensor]] = []
        self._lock = Lock()

    def scores(self, queries: torch.Tensor, pooling: Pooling, sink: Sink) -> None:
        """Do what pooled_scores does for "mean" and "early" (a cosine: of a zero vector it is 0)."""
        wide = queries.double()

        def score(columns: np.ndarray, means: torch.Tensor) -> None:
            scores = wide @ means.T
            if pooling == "early":
                norms = wide.norm(dim=1)[:, None] * means.norm(dim=1)
                scores = torch.where(norms > 0, scores / norms.clamp(min=torch.finfo(norms.dtype).tiny), 0.0)
            sink(columns, scores)

        if len(self._members.names) * self._vectors.dim > _KEPT_MEANS:
            self._make(score)
            return
        with self._lock:
            if not self._kept:
                made: list[tuple[np.ndarray, torch.Tensor]] = []
                self._make(lambda columns, means: made.append((columns, means)))
                self._kept = made
        share(lambda part: score(*part), self._kept, workers(queries.device, len(self._kept)))

    def _make(self, sink: Sink) -> None:
        """Hand (columns (s,), mean vectors (s, d) float64) of some sessions after others to sink."""
        members, vectors = self._members, self._vectors
        sizes = np.diff(members.starts)
        tall = max(1, min(_TALL, _ELEMENTS // vectors.dim))

        def average(tile: tuple[int, int]) -> None:
            first, last = tile
            owner = np.repeat(np.arange(last - first), sizes[first:last])
            sums = torch.zeros((last - first, vectors.dim), dtype=torch.float64, device=vectors.device)
            begin = members.starts[first]
            for start in range(begin, members.starts[last], tall):
                stop = min(start + tall, members.starts[last])
                rows = torch.from_numpy(owner[start - begin : stop - begin]).to(sums.device)
                sums.index_add_(0, rows, vectors.take(members.positions[start:stop]).double())
            sink(members.column[first:last], sums / torch.from_numpy(sizes[first:last]).to(sums.device)[:, None])

        tiles = _tiles(sizes, tall)
        share(average, tiles, workers(vectors.device, len(tiles)))


def _tiles(sizes: np.ndarray, tall: int) -> list[tuple[int, int]]:
    """Cut sessions, given by their ascending sizes, into runs (first, last) of at most tall chunks once padded."""
    tiles, first = [], 0
    while first < len(sizes):
        padded = np.arange(1, min(tall, len(sizes) - first) + 1) * sizes[first : first + tall]
        last = first + max(1, int(np.searchsorted(padded, tall, "right")))
        tiles.append((first, last))
        first = last
    return tiles


def _padded(scores: torch.Tensor, sizes: np.ndarray) -> torch.Tensor:
    """Lay (n, t) scores of sessions one after the other out as (n, s, longest), -inf where a session ends."""
    longest = int(sizes.max())
    if (sizes == longest).all():
        return scores.view(len(scores), len(sizes), longest)
    shaped = scores.new_full((len(scores), len(sizes), longest), -torch.inf)
    inside = torch.from_numpy(np.arange(longest) < sizes[:, None]).to(scores.device)
    shaped[:, inside] = scores
    return shaped
