"""Metrics against hand-computed values, against ranx, and the EVL probes that concern them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import ranx

from mia_serve.core.errors import MiaError
from mia_serve.eval.metrics import (
    METRICS,
    SESSION_METRICS,
    chance_scores,
    refused_metrics,
    score_queries,
)
from mia_serve.index import SessionIndex


def test_hand_computed_values() -> None:
    ranked = [["x", "a", "y", "z", "b", "v", "c"]]
    (scores,) = score_queries(ranked, [{"a", "b", "c", "never"}])
    assert scores["r@3"] == pytest.approx(1 / 4)
    assert scores["r@5"] == pytest.approx(2 / 4)
    assert scores["r@10"] == pytest.approx(3 / 4)  # fractional: the gold id that was not retrieved counts
    assert scores["hit@1"] == 0.0
    assert scores["mrr"] == pytest.approx(1 / 2)
    gain = 1 / math.log2(3) + 1 / math.log2(6) + 1 / math.log2(8)
    ideal = sum(1 / math.log2(rank + 1) for rank in range(1, 5))
    assert scores["ndcg@10"] == pytest.approx(gain / ideal)


def test_chosen_metrics_with_hit_1_apart_from_recall_1() -> None:
    ranked, gold = [["a", "x", "b", "y", "z", "c"]], [{"a", "b", "c"}]
    (scores,) = score_queries(ranked, gold, metrics=SESSION_METRICS)
    assert tuple(scores) == SESSION_METRICS
    assert scores["hit@1"] == 1.0 and scores["r@1"] == pytest.approx(1 / 3)
    gain, ideal = 1 + 1 / math.log2(4), 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert scores["ndcg@5"] == pytest.approx(gain / ideal)
    with pytest.raises(MiaError, match="unknown metric 'map'; available: hit@1"):
        score_queries(ranked, gold, metrics=["map"])


def test_evl_07_every_query_may_have_a_haystack_of_its_own() -> None:
    small, large = score_queries(
        [["a", "b"], ["a", "b"]], [["a"], ["a"]], haystack_size=[4, 9], metrics=SESSION_METRICS
    )
    assert small["r@5"] is None and small["ndcg@5"] is None and small["r@3"] == 1.0
    assert large["r@5"] == 1.0
    with pytest.raises(MiaError, match="2 rankings but 1 haystack sizes"):
        score_queries([["a"], ["a"]], [["a"], ["a"]], haystack_size=[4])


def test_first_hit_miss_and_empty_ranking() -> None:
    hit, miss, empty = score_queries([["a", "b"], ["b", "c"], []], [["a"], ["a"], ["a"]])
    assert set(hit.values()) == {1.0}
    assert set(miss.values()) == {0.0}
    assert set(empty.values()) == {0.0}


def test_deep_gold_counts_for_mrr_only() -> None:
    (scores,) = score_queries([[str(i) for i in range(50)]], [["49"]])
    assert scores["mrr"] == pytest.approx(1 / 50)
    assert scores["r@10"] == scores["ndcg@10"] == 0.0


def test_equal_to_ranx_on_random_runs_without_ties() -> None:
    rng = np.random.default_rng(5)
    documents = [f"d{i}" for i in range(40)]
    ranked, gold, qrels, run = [], [], {}, {}
    for query in range(60):
        scores = rng.permutation(40).astype(float)
        order = [documents[i] for i in np.argsort(-scores)[:25]]
        relevant = list(rng.choice(documents, size=int(rng.integers(1, 15)), replace=False))
        ranked.append(order)
        gold.append(relevant)
        qrels[f"q{query:03d}"] = {d: 1 for d in relevant}
        run[f"q{query:03d}"] = {d: float(scores[documents.index(d)]) for d in order}
    ours = score_queries(ranked, gold)
    names = {"r@3": "recall@3", "r@5": "recall@5", "r@10": "recall@10", "mrr": "mrr", "ndcg@10": "ndcg@10"}
    names["hit@1"] = "hit_rate@1"
    theirs = ranx.evaluate(ranx.Qrels(qrels), ranx.Run(run), list(names.values()), return_mean=False)
    for metric, name in names.items():
        np.testing.assert_allclose([row[metric] for row in ours], theirs[name], atol=1e-6, err_msg=metric)


def search(vectors: np.ndarray, query: np.ndarray) -> list[str]:
    """Rank d2, d3, d1 (added in that order) by the index whose rankings are what is scored."""
    index = SessionIndex(vectors.shape[1], "torch", "cpu")
    index.add(["d2", "d3", "d1"], vectors, ["s"] * 3)
    return index.search(query[None], 3).ids[0]


def test_evl_02_constant_scorer_follows_score_desc_id_asc() -> None:
    order = search(np.ones((3, 2), np.float32), np.ones(2, np.float32))
    assert order == ["d1", "d2", "d3"]
    (scores,) = score_queries([order], [["d3"]])
    assert scores["mrr"] == pytest.approx(1 / 3)  # pytrec_eval alone would say 1.0


def test_evl_01_close_scores_keep_their_order() -> None:
    vectors = np.array([[0.9], [0.9001], [0.8999]], np.float32)  # one and the same number in bfloat16
    assert search(vectors, np.ones(1, np.float32)) == ["d3", "d2", "d1"]


def test_evl_07_cutoff_at_or_above_the_haystack_is_refused() -> None:
    assert {r.metric for r in refused_metrics(5)} == {"r@5", "r@10", "ndcg@10"}
    assert refused_metrics(11) == ()
    (scores,) = score_queries([["a", "b", "c"]], [["a"]], haystack_size=5)
    assert scores["r@5"] is None and scores["r@10"] is None and scores["ndcg@10"] is None
    assert scores["r@3"] == scores["hit@1"] == scores["mrr"] == 1.0


def test_evl_07_chance_level_equals_random_rankings() -> None:
    rng = np.random.default_rng(0)
    size, depth, gold = 30, 12, ["3", "7", "20"]
    ranked = [[str(i) for i in rng.permutation(size)[:depth]] for _ in range(8000)]
    scores = score_queries(ranked, [gold] * len(ranked))
    chance = chance_scores(size, len(gold), depth)
    for metric in METRICS:
        assert np.mean([row[metric] for row in scores]) == pytest.approx(chance[metric], abs=0.012), metric
    scores, chance = (
        score_queries(ranked, [gold] * len(ranked), metrics=SESSION_METRICS),
        chance_scores(size, len(gold), depth, SESSION_METRICS),
    )
    for metric in SESSION_METRICS:
        assert np.mean([row[metric] for row in scores]) == pytest.approx(chance[metric], abs=0.012), metric


def test_chance_edges() -> None:
    everything = chance_scores(20, 20, 10)
    assert everything["hit@1"] == everything["mrr"] == 1.0
    assert everything["ndcg@10"] == pytest.approx(1.0)
    assert chance_scores(20, 0, 10)["mrr"] is None
    with pytest.raises(MiaError, match="gold ids in a haystack"):
        chance_scores(3, 4, 10)


def test_evl_09_no_gold_is_none_not_zero() -> None:
    with_gold, without = score_queries([["a"], ["a"]], [["a"], []])
    assert with_gold["mrr"] == 1.0
    assert set(without.values()) == {None}


def test_bad_rankings_are_refused() -> None:
    with pytest.raises(MiaError, match="'a' more than once"):
        score_queries([["a", "b", "a"]], [["a"]])
    with pytest.raises(MiaError, match="1 rankings but 2 gold"):
        score_queries([["a"]], [["a"], ["b"]])
