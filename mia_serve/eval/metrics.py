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
TREC_MEASURES = {
    "hit@1": "success_1",
    "r@1": "recall_1",
    "r@3": "recall_3",
    "r@5": "recall_5",
    "r@10": "recall_10",
    "mrr": "recip_rank",
    "ndcg@5": "ndcg_cut_5",
    "ndcg@10": "ndcg_cut_10",
}
#: Those of chunk retrieval, and of session retrieval in a conversation, where haystacks are small. Hit@1 asks whether
#: the first id is gold, R@1 what share of the gold ids it is: they differ for questions with several.
METRICS: tuple[str, ...] = ("r@3", "r@5", "r@10", "hit@1", "mrr", "ndcg@10")
SESSION_METRICS: tuple[str, ...] = ("hit@1", "r@1", "r@3", "r@5", "mrr", "ndcg@5")
LABELS: dict[str, str] = {
    "hit@1": "Hit@1",
    "r@1": "R@1",
    "r@3": "R@3",
    "r@5": "R@5",
    "r@10": "R@10",
    "mrr": "MRR",
    "ndcg@5": "nDCG@5",
    "ndcg@10": "nDCG@10",
}
_CUTOFFS: dict[str, int] = {"hit@1": 1, "r@1": 1, "r@3": 3, "r@5": 5, "r@10": 10, "ndcg@5": 5, "ndcg@10": 10}
MAX_CUTOFF = max(_CUTOFFS[metric] for metric in METRICS if metric in _CUTOFFS)

QueryScores = dict[str, "float | None"]


class Refusal(NamedTuple):
    """Say why one metric of one query has no value."""

    metric: str
    reason: str


def refused_metrics(haystack_size: int, metrics: Sequence[str] = METRICS) -> tuple[Refusal, ...]:
    """Name the metrics whose cutoff is no smaller than the haystack: a recall of 1 by construction says nothing."""
    return tuple(
        Refusal(metric, f"haystack of {haystack_size} documents holds no cutoff of {_CUTOFFS[metric]}")
        for metric in metrics
        if _CUTOFFS.get(metric, 0) >= haystack_size
    )


def score_queries(
    ranked: Sequence[Sequence[str]],
    gold: Sequence[Collection[str]],
    *,
    haystack_size: int | Sequence[int] | None = None,
    metrics: Sequence[str] = METRICS,
) -> list[QueryScores]:
    """Score each query's ranking against its gold ids.

    Recall is fractional (share of the gold ids found), nDCG binary, Hit@1 is 1 if the first id is gold, MRR is the
    reciprocal rank of the first gold id and 0 if none is among the ids given.

    Args:
        ranked: Ids best first, one list a query, (n, depth). Order is taken as it is: no scores, no ties.
        gold: Relevant ids, one collection a query.
        haystack_size: Number of rankable documents, one number or one a query; metrics whose cutoff it cannot hold are
            None. None: not checked.
        metrics: Which to compute, of ``TREC_MEASURES``.

    Returns:
        One dict a query from every metric asked for to its value, or None where it cannot be computed
        (no gold, or haystack too small). None is never 0 and never enters a mean.

    Raises:
        MiaError: The lengths differ, an id occurs twice in one ranking, or a metric is unknown.
    """
    if len(ranked) != len(gold):
        raise MiaError(f"{len(ranked)} rankings but {len(gold)} gold sets; give one of each for every query")
    unknown = next((metric for metric in metrics if metric not in TREC_MEASURES), None)
    if unknown is not None:
        raise MiaError(f"unknown metric {unknown!r}; available: {', '.join(TREC_MEASURES)}")
    sizes = [haystack_size] * len(ranked) if haystack_size is None or isinstance(haystack_size, int) else haystack_size
    if len(sizes) != len(ranked):
        raise MiaError(f"{len(ranked)} rankings but {len(sizes)} haystack sizes; give one number, or one a query")
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
        measured = pytrec_eval.RelevanceEvaluator(relevance, {TREC_MEASURES[metric] for metric in metrics}).evaluate(
            run
        )
    refused: dict[int | None, set[str]] = {
        size: set() if size is None else {refusal.metric for refusal in refused_metrics(size, metrics)}
        for size in set(sizes)
    }
    results: list[QueryScores] = []
    for row, size in enumerate(sizes):
        values = measured.get(str(row))
        results.append(
            {
                metric: None if values is None or metric in refused[size] else float(values[TREC_MEASURES[metric]])
                for metric in metrics
            }
        )
    return results


def chance_scores(haystack_size: int, gold_count: int, depth: int, metrics: Sequence[str] = METRICS) -> QueryScores:
    """Give the expected score of a uniformly random ranking.

    Args:
        haystack_size: Documents in the haystack, n.
        gold_count: Relevant ones among them, g; 0 gives None throughout.
        depth: Ranks that MRR looks at.
        metrics: Which to give.

    Raises:
        MiaError: More gold documents than documents.
    """
    n, g = haystack_size, gold_count
    if g > n:
        raise MiaError(f"{g} gold ids in a haystack of {n} documents; gold ids must be in the haystack")
    if g == 0:
        return dict.fromkeys(metrics, None)
    values: QueryScores = {f"r@{k}": min(k / n, 1.0) for k in (1, 3, 5, 10)}
    values["hit@1"] = g / n
    # P(first gold at rank r+1) = P(no gold in the first r) * g / (n - r)
    ranks = np.arange(min(depth, n - g + 1))
    misses = np.concatenate([[1.0], np.cumprod((n - g - ranks) / (n - ranks))])[: len(ranks)]
    values["mrr"] = float(np.sum(misses * g / (n - ranks) / (ranks + 1)))
    for k in (5, 10):
        discounts = 1.0 / np.log2(np.arange(2, k + 2))
        values[f"ndcg@{k}"] = float(g / n * discounts[:n].sum() / discounts[:g].sum())
    for refusal in refused_metrics(n, metrics):
        values[refusal.metric] = None
    return {metric: values[metric] for metric in metrics}
