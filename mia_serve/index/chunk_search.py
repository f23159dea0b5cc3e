"""The k best chunks: candidates by a first stage, settled in float64."""

from __future__ import annotations

import numpy as np
import torch

from mia_serve.index.blocks import VectorBlocks
from mia_serve.index.collect import collect
from mia_serve.index.exact import exhaustive_top, pair_scores
from mia_serve.index.faiss_flat import FaissFlat
from mia_serve.index.flat import margin
from mia_serve.index.table import ChunkTable

_QUERIES = 512
_HITS = 1 << 21  # candidates of one batch of queries, at the very most


def batch_size(k: int) -> int:
    """Return how many queries to search at once so that their candidates fit a bounded memory."""
    return max(1, min(_QUERIES, _HITS // (4 * k + 4096)))


def search_chunks(
    queries: torch.Tensor,
    table: ChunkTable,
    vectors: VectorBlocks,
    k: int,
    allowed: np.ndarray | None,
    faiss: FaissFlat | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores (n, k) float32 and positions (n, k) int64 of the k best chunks, ties by id.

    Args:
        queries: (n, d) float32 on the device.
        table: Ids, for ties.
        vectors: By position.
        k: At most the number of allowed chunks.
        allowed: (P,) bool; None for all.
        faiss: Its index as the first stage where it can answer; None: torch.
    """
    rank, order = table.rank(), table.order()
    scores = np.empty((len(queries), k), np.float32)
    positions = np.empty((len(queries), k), np.int64)
    use_faiss = faiss is not None and faiss.takes(k, vectors, allowed)
    size = batch_size(k)
    for start in range(0, len(queries), size):
        batch = queries[start : start + size]
        error = margin(batch, vectors.max_norm())
        if faiss is not None and use_faiss:
            found = faiss.candidates(batch, vectors, k, error, allowed)
        else:
            found = collect(batch, vectors, k, error, allowed)
        exact = pair_scores(batch, vectors, found.query, found.position)
        best = np.lexsort((rank[found.position], -exact, found.query))
        counts = np.bincount(found.query, minlength=len(batch))
        enough = np.flatnonzero(counts >= k)
        picked = best[(np.cumsum(counts) - counts)[enough][:, None] + np.arange(k)]
        scores[start + enough], positions[start + enough] = exact[picked], found.position[picked]
        sure = np.zeros(len(batch), bool)
        sure[enough] = scores[start + enough, -1] > found.floor[enough]
        if not sure.all():
            unsure = np.flatnonzero(~sure)
            given = batch[torch.from_numpy(unsure).to(batch.device)]
            scores[start + unsure], places = exhaustive_top(given, vectors, k, rank, allowed)
            positions[start + unsure] = order[places]
    return scores, positions


def search_given(
    queries: torch.Tensor,
    table: ChunkTable,
    vectors: VectorBlocks,
    positions: np.ndarray,
    k: int,
    bias: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rank given chunks, for each query its own.

    Args:
        queries: (n, d) float32 on the device.
        table: Ids, for ties.
        vectors: By position.
        positions: (n, f) int64, -1 where padded.
        k: At most f.
        bias: (n, f), added to the scores; None for none.

    Returns:
        Scores (n, k) float32, -inf where padded, and positions (n, k) int64, -1 where padded.
    """
    scores = np.full(positions.shape, -np.inf, np.float32)
    present = positions >= 0
    scores[present] = pair_scores(queries, vectors, np.nonzero(present)[0], positions[present])
    if bias is not None:
        scores = scores + bias.astype(np.float32)
    order = np.lexsort((table.rank()[positions], -scores, ~present))[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(positions, order, axis=1)
