"""What a search returns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Hits(NamedTuple):
    """Chunks found for n queries, best first; equal scores by ascending id.

    Attributes:
        ids: Chunk ids of each query; never padded.
        scores: Inner products, (n, k) float32, -inf where padded.
        rows: Row numbers of the index, (n, k) int64, -1 where padded.
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
        best_score: Score of that chunk, (n, k) float32.
    """

    ids: list[list[str]]
    scores: np.ndarray
    best_chunk: list[list[str]]
    best_score: np.ndarray


class SessionScores(NamedTuple):
    """The pooled score of every session for n queries, to be mixed with other scores.

    Attributes:
        ids: Session ids, ascending, (S,).
        scores: (n, S) float32.
    """

    ids: list[str]
    scores: np.ndarray
