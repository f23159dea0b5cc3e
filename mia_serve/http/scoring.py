"""Scores of every chunk and session for one query, and how they become a ranking: what `/search` is made of.

Everything here blocks; it runs in the retriever's worker (`AsyncRetriever.together`) or in a pool of threads.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mia_serve import fusion
from mia_serve.lexical import BM25Index

if TYPE_CHECKING:
    from mia_serve.mindscape import Mindscape
    from mia_serve.retriever import Mode, Retriever
    from mia_serve.signature import Signature

_TOGETHER = 8  # queries scored at once over all chunks, so that a crowd of them does not fill the memory


class Asked(NamedTuple):
    """One query as an encoder is to score it.

    Attributes:
        query: The query.
        signature: What it is searched with; None for the query alone.
        encoder: "e1" or "e2".
        prior: β of the signature as a prior; 0 for none.
    """

    query: str
    signature: Signature | None
    encoder: Literal["e1", "e2"]
    prior: float


class Choosing(NamedTuple):
    """One query whose signature is to be chosen, of at most ``k_sum`` sessions (None: the retriever's setting)."""

    query: str
    mode: Mode
    k_sum: int | Literal["auto"] | None


def dense_scores(retriever: Retriever, asked: Sequence[Asked]) -> list[np.ndarray]:
    """Score all chunks for each query, (N,) float32 by row of ``mindscape.chunks``; -inf where it is not ranked.

    They are the scores of ``Retriever.search``, prior included.
    """
    count = len(retriever.mindscape.chunks)
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, item in enumerate(asked):
        groups[item.encoder, item.prior, item.signature is None].append(place)
    scores = [np.full(count, -np.inf, np.float32) for _ in asked]
    for places in groups.values():
        for start in range(0, len(places), _TOGETHER):
            part = places[start : start + _TOGETHER]
            first = asked[part[0]]
            given = [signature for place in part if (signature := asked[place].signature) is not None]
            queries = [asked[place].query for place in part]
            hits = retriever.search(queries, count, given or "none", first.encoder, first.prior).hits
            for place, rows, found in zip(part, hits.rows, hits.scores, strict=True):
                scores[place][rows[rows >= 0]] = found[rows >= 0]
    return scores


def choose_signatures(retriever: Retriever, choosing: Sequence[Choosing]) -> list[Signature]:
    """Choose the signature of each query, each with its own size."""
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, item in enumerate(choosing):
        groups[item.mode, item.k_sum].append(place)
    chosen: dict[int, Signature] = {}
    for places in groups.values():
        first = choosing[places[0]]
        # A shallow copy shares vectors and indexes: only the size is its own.
        sized = copy.copy(retriever)
        sized.k_sum = retriever.k_sum if first.k_sum is None else first.k_sum
        found = sized.signatures([choosing[place].query for place in places], first.mode)
        chosen |= dict(zip(places, found, strict=True))
    return [chosen[place] for place in range(len(choosing))]


def session_scores(mindscape: Mindscape, chunk_scores: np.ndarray) -> np.ndarray:
    """Score each session by its best chunk (late interaction), (S,), from scores of all chunks (N,)."""
    starts = np.concatenate([[0], np.cumsum([len(session.chunk_ids) for session in mindscape.sessions])[:-1]])
    return np.maximum.reduceat(chunk_scores, starts)


class LexicalSessions:
    """BM25 over whole sessions, their chunks on lines; made when first asked for, kept as long as its snapshot."""

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Any, BM25Index] = WeakKeyDictionary()
        self._lock = Lock()

    def of(self, owner: Any, mindscape: Mindscape, analyzer: str) -> BM25Index:
        """Return the index of a mindscape's sessions, columns in its order.

        Args:
            owner: What the index is kept with, and dropped with.
            mindscape: The sessions.
            analyzer: Name of the analyzer.
        """
        with self._lock:  # two searches at once would both build it
            index = self._indexes.get(owner)
            if index is None:
                texts = {chunk.id: chunk.text for chunk in mindscape.chunks}
                documents = ["\n".join(texts[i] for i in session.chunk_ids) for session in mindscape.sessions]
                index = BM25Index([session.id for session in mindscape.sessions], documents, analyzer)
                self._indexes[owner] = index
            return index


def fuse(lexical: np.ndarray, dense: np.ndarray) -> tuple[np.ndarray, float]:
    """Mix two sides' scores of all candidates (S,), each z-scored, by `fusion.adaptive_alpha`.

    Returns:
        (S,) float64, -inf where the dense side has none; and the weight of the lexical side.
    """
    present = np.isfinite(dense)
    known = np.where(present, dense, 0.0)[None]
    alpha = fusion.adaptive_alpha(lexical[None], known, present[None])
    return fusion.mix(lexical[None], known, alpha, present[None])[0], float(alpha[0])


def best(ids: Sequence[str], scores: np.ndarray, k: int) -> list[int]:
    """Return the places of the k highest scores, best first, ties by ascending id; -inf is no candidate."""
    there = np.flatnonzero(scores > -np.inf)
    if k < len(there):
        floor = np.partition(scores[there], len(there) - k)[len(there) - k]
        there = there[scores[there] >= floor]  # all that tie with the k-th
    return sorted(there.tolist(), key=lambda place: (-scores[place], ids[place]))[:k]
