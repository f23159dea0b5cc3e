"""The k best sessions by their pooled chunk scores."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from mia_serve.index.blocks import VectorBlocks
from mia_serve.index.chunk_search import batch_size
from mia_serve.index.collect import collect
from mia_serve.index.exact import LEAST, from_keys, merge_top, pair_scores, rounded, to_keys
from mia_serve.index.flat import margin
from mia_serve.index.pooling import Pooling
from mia_serve.index.session_scores import Members, SessionMeans, Sink, exact_scores, pooled_scores
from mia_serve.index.table import ChunkTable

_TALL = 1 << 12  # chunks of one session that are scored at once


class FoundSessions(NamedTuple):
    """For n queries, best first, (n, k) each.

    Attributes:
        columns: Places in Members.names, int64.
        scores: Pooled scores, float32.
        best: Positions of the best chunks, int64.
        best_scores: Their scores, float32.
    """

    columns: np.ndarray
    scores: np.ndarray
    best: np.ndarray
    best_scores: np.ndarray


class SessionView(NamedTuple):
    """What a search over sessions looks at: chunks, vectors, and the sessions made of the allowed ones."""

    table: ChunkTable
    vectors: VectorBlocks
    allowed: np.ndarray | None
    members: Members
    means: SessionMeans


def search_sessions(
    queries: torch.Tensor, view: SessionView, k: int, pooling: Pooling, topk: int, beta: float
) -> FoundSessions:
    """Find the k ≤ S best sessions for queries (n, d) float32."""
    size = batch_size(k)
    parts = []
    for start in range(0, len(queries), size):
        batch = queries[start : start + size]
        if pooling == "max":
            parts.append(_by_best_chunk(batch, view, k))
        else:
            parts.append(_by_pool(batch, view, k, pooling, topk, beta))
    return FoundSessions(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def score_sessions(queries: torch.Tensor, view: SessionView, pooling: Pooling, topk: int, beta: float) -> np.ndarray:
    """Score every session, (n, S) float32, columns as in Members.names."""
    scores = np.empty((len(queries), len(view.members.names)), np.float32)
    size = batch_size(1)
    for start in range(0, len(queries), size):
        part = scores[start : start + size]

        def take(columns: np.ndarray, pooled: torch.Tensor, part: np.ndarray = part) -> None:
            part[:, columns] = rounded(pooled).cpu().numpy()

        _pool(queries[start : start + size], view, pooling, topk, beta, take)
    return scores


def _pool(queries: torch.Tensor, view: SessionView, pooling: Pooling, topk: int, beta: float, sink: Sink) -> None:
    if pooling in ("mean", "early"):
        view.means.scores(queries, pooling, sink)
    else:
        pooled_scores(queries, view.vectors, view.members, pooling, topk, beta, sink)


def _by_pool(
    queries: torch.Tensor, view: SessionView, k: int, pooling: Pooling, topk: int, beta: float
) -> FoundSessions:
    """Score all sessions exactly and keep the best."""
    best = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
    lock = Lock()

    def take(columns: np.ndarray, pooled: torch.Tensor) -> None:
        nonlocal best
        keys = to_keys(rounded(pooled), torch.from_numpy(columns).to(pooled.device))
        with lock:
            best = merge_top(best, keys, k)

    _pool(queries, view, pooling, topk, beta, take)
    scores, columns = (part.cpu().numpy() for part in from_keys(best))
    return FoundSessions(columns, scores, *_best_chunks(queries, view, columns))


def _by_best_chunk(queries: torch.Tensor, view: SessionView, k: int) -> FoundSessions:
    """Find the sessions of the best chunks in one pass of float32, settle them in float64."""
    table, vectors = view.table, view.vectors
    rank = table.rank()
    error = margin(queries, vectors.max_norm())
    found = collect(queries, vectors, k, error, view.allowed, table.session)
    exact = pair_scores(queries, vectors, found.query, found.position)
    column = view.members.column_of[table.session[found.position]]
    order = np.lexsort((rank[found.position], -exact, column, found.query))
    query, column = found.query[order], column[order]
    first = np.flatnonzero((np.diff(query, prepend=-1) != 0) | (np.diff(column, prepend=-1) != 0))
    query, column, hit = query[first], column[first], order[first]  # the best chunk of each session found
    best = np.lexsort((column, -exact[hit], query))
    counts = np.bincount(query, minlength=len(queries))
    enough = np.flatnonzero((counts >= k) & (found.floor == -np.inf))
    picked = best[(np.cumsum(counts) - counts)[enough][:, None] + np.arange(k)]
    shape = (len(queries), k)
    columns, positions, scores = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.float32)
    columns[enough] = column[picked]
    positions[enough], scores[enough] = found.position[hit[picked]], exact[hit[picked]]
    rest = np.setdiff1d(np.arange(len(queries)), enough)
    if len(rest):  # more ties than are worth settling one by one
        given = queries[torch.from_numpy(rest).to(queries.device)]
        settled = _by_pool(given, view, k, "max", 1, 1.0)
        columns[rest], scores[rest], positions[rest] = settled.columns, settled.scores, settled.best
    return FoundSessions(columns, scores, positions, scores)


def _best_chunks(queries: torch.Tensor, view: SessionView, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and scores, (n, k) each, of the best chunks of sessions found; equal scores by id."""
    members, rank = view.members, view.table.rank()
    keys = torch.full(columns.shape, LEAST, device=queries.device)
    sessions, which = np.unique(columns, return_inverse=True)
    askers = np.split(np.argsort(which.ravel(), kind="stable"), np.cumsum(np.bincount(which.ravel()))[:-1])
    for group, asking in zip(members.place[sessions].tolist(), askers, strict=True):
        query, place = (torch.from_numpy(part).to(keys.device) for part in np.divmod(asking, columns.shape[1]))
        for start in range(members.starts[group], members.starts[group + 1], _TALL):
            run = members.positions[start : min(start + _TALL, members.starts[group + 1])]
            scores = rounded(exact_scores(queries[query], view.vectors, run))
            found = to_keys(scores, torch.from_numpy(rank[run]).to(keys.device)).amax(dim=1)
            keys[query, place] = torch.maximum(keys[query, place], found)
    best_scores, ranks = (part.cpu().numpy() for part in from_keys(keys))
    return view.table.order()[ranks].astype(np.int64), best_scores
