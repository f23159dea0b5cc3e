"""Pooled scores of all sessions, exact, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch

from mia_serve.index.blocks import VectorBlocks
from mia_serve.index.pooling import Pooling, finish_pool, join_pools, partial_pool
from mia_serve.index.table import ChunkTable

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
    wide = queries.double()
    step = max(1, min(_TALL, _ELEMENTS // vectors.dim))
    for start in range(0, len(positions), step):
        scores[:, start : start + step] = wide @ vectors.take(positions[start : start + step]).double().T
    return scores


def pooled_scores(
    queries: torch.Tensor, vectors: VectorBlocks, members: Members, pooling: Pooling, topk: int, beta: float
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Yield (columns (s,), scores (n, s) float64) of some sessions after others, until all were there.

    For "max", "topk" and "lme"; a session that is longer than a tile is taken in runs.
    """
    tall = max(1, min(_TALL, _ELEMENTS // len(queries)))
    sizes = np.diff(members.starts)
    first = 0
    while first < len(sizes):
        padded = np.arange(1, tall + 1)[: len(sizes) - first] * sizes[first : first + tall]
        last = first + max(1, int(np.searchsorted(padded, tall, "right")))
        here = torch.from_numpy(sizes[first:last]).to(queries.device)
        partial: torch.Tensor | None = None
        for start in range(members.starts[first], members.starts[last], tall):
            run = members.positions[start : min(start + tall, members.starts[last])]
            scores = exact_scores(queries, vectors, run)
            shaped = _padded(scores, sizes[first:last]) if last - first > 1 else scores[:, None, :]
            part = partial_pool(shaped, pooling, topk, beta)
            partial = part if partial is None else join_pools(partial, part, pooling, topk, beta)
        if partial is not None:
            yield members.column[first:last], finish_pool(partial, here, pooling, topk, beta)
        first = last


def session_means(vectors: VectorBlocks, members: Members) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Yield (columns (s,), mean vectors (s, d) float64) of some sessions after others, until all were there."""
    sizes = np.diff(members.starts)
    tall = max(1, min(_TALL, _ELEMENTS // vectors.dim))
    first = 0
    while first < len(sizes):
        last = max(first + 1, int(np.searchsorted(members.starts, members.starts[first] + tall, "right")) - 1)
        owner = np.repeat(np.arange(last - first), sizes[first:last])
        sums = torch.zeros((last - first, vectors.dim), dtype=torch.float64, device=vectors.device)
        for start in range(members.starts[first], members.starts[last], tall):
            stop = min(start + tall, members.starts[last])
            rows = torch.from_numpy(owner[start - members.starts[first] : stop - members.starts[first]])
            sums.index_add_(0, rows.to(sums.device), vectors.take(members.positions[start:stop]).double())
        yield members.column[first:last], sums / torch.from_numpy(sizes[first:last]).to(sums.device)[:, None]
        first = last


class SessionMeans:
    """Mean vectors of the sessions, made at the first pass over them and kept where there is room."""

    def __init__(self, vectors: VectorBlocks, members: Members) -> None:
        self._vectors, self._members = vectors, members
        self._kept: list[tuple[np.ndarray, torch.Tensor]] | None = None

    def scores(self, queries: torch.Tensor, pooling: Pooling) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Yield (columns (s,), scores (n, s) float64) for "mean" and "early" (a cosine: of a zero vector it is 0)."""
        wide = queries.double()
        for columns, means in self._parts():
            scores = wide @ means.T
            if pooling == "early":
                norms = wide.norm(dim=1)[:, None] * means.norm(dim=1)
                scores = torch.where(norms > 0, scores / norms.clamp(min=torch.finfo(norms.dtype).tiny), 0.0)
            yield columns, scores

    def _parts(self) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        if len(self._members.names) * self._vectors.dim > _KEPT_MEANS:
            return session_means(self._vectors, self._members)
        if self._kept is None:
            self._kept = list(session_means(self._vectors, self._members))
        return iter(self._kept)


def _padded(scores: torch.Tensor, sizes: np.ndarray) -> torch.Tensor:
    """Lay (n, t) scores of sessions one after the other out as (n, s, longest), -inf where a session ends."""
    longest = int(sizes.max())
    if (sizes == longest).all():
        return scores.view(len(scores), len(sizes), longest)
    shaped = scores.new_full((len(scores), len(sizes), longest), -torch.inf)
    inside = torch.from_numpy(np.arange(longest) < sizes[:, None]).to(scores.device)
    shaped[:, inside] = scores
    return shaped
