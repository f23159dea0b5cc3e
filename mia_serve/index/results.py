"""What a search returns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Hits(NamedTuple):
    """Chunks found for n queries, best first; equal scores by ascending id.

    Attributes:
        ids: Chunk ids of each query; never padded.
        scores: Inner products, (n, k) float32, -inf where padded.
        rows: Rows of the index (order of insertion), (n, k) int64, -1 where padded.
    """

    ids: list[list[str]]
    scores: np.ndarray
    rows: np.ndarray


class SessionHits(NamedTuple):
    """Sessions found for n queries, best first; equal scores by ascending session id.

    Attributes:
        ids: Session ids of each query.
        scores: Pooled scores, (n, k) float32.
        best_chunk: Id of the best chunk of each session found.
    """

    ids: list[list[str]]
    scores: np.ndarray
    best_chunk: list[list[str]]
