"""Retrieval metrics per query, computed by ``pytrec_eval`` (the trec_eval C code).

Only the bookkeeping around it is ours: the order of ties, cutoffs that a haystack cannot hold, queries
that have no gold, and the score a random ranking would get.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import pytrec_eval

from mia_serve.core.errors import MiaError

#: Metric key -> trec_eval measure. MRR is over the ids given, so over the search depth of the caller.
_TREC_MEASURES = {
    "r@3": "recall_3",
    "r@5": "recall_5",
    "r@10": "recall_10",
    "hit@1": "success_1",
    "mrr": "recip_rank",
    "ndcg@10": "ndcg_cut_10",
}
METRICS: tuple[str, ...] = tuple(_TREC_MEASURES)
LABELS: dict[str, str] = {
    "r@3": "R@3",
    "r@5": "R@5",
    "r@10": "R@10",
    "hit@1": "Hit@1",
    "mrr": "MRR",
    "ndcg@10": "nDCG@10",
}
_CUTOFFS: dict[str, int] = {"r@3": 3, "r@5": 5, "r@10": 10, "hit@1": 1, "ndcg@10": 10}
MAX_CUTOFF = max(_CUTOFFS.values())

QueryScores = dict[str, "float | None"]


class Refusal(NamedTuple):
    """Say why one metric of one query has no value."""

    metric: str
    reason: str


def refused_metrics(haystack_size: int) -> tuple[Refusal, ...]:
    """Name the metrics whose cutoff is no smaller than the haystack: a recall of 1 by construction says nothing."""
    return tuple(
        Refusal(metric, f"haystack of {haystack_size} chunks holds no cutoff of {cutoff}")
        for metric, cutoff in _CUTOFFS.items()
        if cutoff >= haystack_size
    )


def score_queries(
    ranked: Sequence[Sequence[str]], gold: Sequence[Collection[str]], *, haystack_size: int | None = None
) -> list[QueryScores]:
    """Score each query's ranking against its gold ids.

    Recall is fractional (share of the gold ids found), nDCG binary, Hit@1 is 1 if the first id is gold, MRR is the
    reciprocal rank of the first gold id and 0 if none is among the ids given.

    Args:
        ranked: Ids best first, one list a query, (n, depth). Order is taken as it is: no scores, no ties.
        gold: Relevant ids, one collection a query.
        haystack_size: Number of rankable documents; metrics whose cutoff it cannot hold are None. None: not checked.

    Returns:
        One dict a query from every name of ``METRICS`` to its value, or None where it cannot be computed
        (no gold, or haystack too small). None is never 0 and never enters a mean.

    Raises:
        MiaError: The lengths differ, or an id occurs twice in one ranking.
    """
    if len(ranked) != len(gold):
        raise MiaError(f"{len(ranked)} rankings but {len(gold)} gold sets; give one of each for every query")
    relevance: dict[str, dict[str, int]] = {}
    run: dict[str, dict[str, float]] = {}
    for row, (ids, relevant) in enumerate(zip(ranked, gold, strict=True)):
        # trec_eval sorts by score itself and breaks ties by descending id. Strictly decreasing scores (exact in its
        # 32-bit floats) leave it no tie to break, so the order it scores is the order given.
        scores = {document: float(len(ids) - rank) for rank, document in enumerate(ids)}
        if len(scores) != len(ids):
            twice = next(document for document in ids if list(ids).count(document) > 1)
            raise MiaError(f"ranking of query row {row} holds id {twice!r} more than once; ids must be unique")
        if relevant:
            relevance[str(row)] = dict.fromkeys(relevant, 1)
            run[str(row)] = scores
    measured = {}
    if run:
        measured = pytrec_eval.RelevanceEvaluator(relevance, set(_TREC_MEASURES.values())).evaluate(run)
    refused = {refusal.metric for refusal in refused_metrics(haystack_size)} if haystack_size is not None else set()
    results: list[QueryScores] = []
    for row in range(len(ranked)):
        values = measured.get(str(row))
        results.append(
            {
                metric: None if values is None or metric in refused else float(values[measure])
                for metric, measure in _TREC_MEASURES.items()
            }
        )
    return results


def chance_scores(haystack_size: int, gold_count: int, depth: int) -> QueryScores:
    """Give the expected score of a uniformly random ranking.

    Args:
        haystack_size: Documents in the haystack, n.
        gold_count: Relevant ones among them, g; 0 gives None throughout.
        depth: Ranks that MRR looks at.

    Raises:
        MiaError: More gold documents than documents.
    """
    n, g = haystack_size, gold_count
    if g > n:
        raise MiaError(f"{g} gold ids in a haystack of {n} chunks; gold ids must be in the haystack")
    if g == 0:
        return dict.fromkeys(METRICS, None)
    values: QueryScores = {f"r@{k}": min(k / n, 1.0) for k in (3, 5, 10)}
    values["hit@1"] = g / n
    # P(first gold at rank r+1) = P(no gold in the first r) * g / (n - r)
    ranks = np.arange(min(depth, n - g + 1))
    misses = np.concatenate([[1.0], np.cumprod((n - g - ranks) / (n - ranks))])[: len(ranks)]
    values["mrr"] = float(np.sum(misses * g / (n - ranks) / (ranks + 1)))
    discounts = 1.0 / np.log2(np.arange(2, MAX_CUTOFF + 2))
    values["ndcg@10"] = float(g / n * discounts[:n].sum() / discounts[:g].sum())
    for refusal in refused_metrics(n):
        values[refusal.metric] = None
    return {metric: values[metric] for metric in METRICS}
