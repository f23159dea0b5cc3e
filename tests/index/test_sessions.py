"""Session max-sim, top-k mean and mean against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from mia_serve.index import SessionIndex

POOLINGS = ["max", "topk", "mean"]


def make(backend: str = "torch", seed: int = 0, rows: int = 80):
    """Chunks of ragged, interleaved sessions; small integers, so that many scores tie exactly."""
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-2, 3, (rows, 3)).astype(np.float32)
    queries = rng.integers(-2, 3, (12, 3)).astype(np.float32)
    ids = [f"c{i}" for i in rng.permutation(rows)]
    sessions = [f"s{i}" for i in (rng.integers(0, 11, rows) * rng.integers(0, 2, rows))]
    index = SessionIndex(3, backend, "cpu")
    index.add(ids, vectors, sessions)
    return index, vectors, queries, ids, sessions


def reference(query: np.ndarray, vectors, ids, sessions, pooling: str, topk: int) -> list[tuple[float, str, str]]:
    """(score, session, best chunk) of every session, best first, ties by session id."""
    found = []
    for session in set(sessions):
        scored = sorted((-float(v @ query), i) for v, i, s in zip(vectors, ids, sessions, strict=True) if s == session)
        values = np.array([-score for score, _ in scored])
        value = {"max": values[0], "topk": values[:topk].mean(), "mean": values.mean()}[pooling]
        found.append((float(np.float32(value)), session, scored[0][1]))
    return sorted(found, key=lambda row: (-row[0], row[1]))


@pytest.mark.parametrize("backend", ["torch", "faiss"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("topk", [1, 3])
def test_equals_a_loop(backend: str, pooling: str, topk: int) -> None:
    index, vectors, queries, ids, sessions = make(backend)
    hits = index.search_sessions(queries, 6, pooling, topk)
    for i, query in enumerate(queries):
        expected = reference(query, vectors, ids, sessions, pooling, topk)[:6]
        assert hits.ids[i] == [session for _, session, _ in expected]
        assert hits.best_chunk[i] == [chunk for _, _, chunk in expected]
        np.testing.assert_allclose(hits.scores[i], [score for score, _, _ in expected], rtol=1e-6)


def test_all_negative_scores() -> None:
    index = SessionIndex(1, "torch", "cpu")
    index.add(["a", "b", "c"], np.float32([[-1], [-0.5], [-0.25]]), ["x", "x", "y"])
    hits = index.search_sessions(np.ones((1, 1)), 5)
    assert hits.ids == [["y", "x"]] and hits.best_chunk == [["c", "b"]]
    assert hits.scores.tolist() == [[-0.25, -0.5]]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_SRV_47_long_sessions_have_no_head_start(pooling: str) -> None:
    index = SessionIndex(2, "torch", "cpu")
    index.add([f"l{i}" for i in range(100)], np.tile(np.float32([[0.6, 0.8]]), (100, 1)), ["long"] * 100)
    index.add(["short"], np.float32([[0.6, 0.8]]), ["a short one"])
    hits = index.search_sessions(np.float32([[1, 0]]), 2, pooling)
    assert hits.scores[0, 0] == hits.scores[0, 1]
    assert hits.ids == [["a short one", "long"]]


def test_SRV_47_log_sum_exp_is_not_offered() -> None:
    index, _, queries, _, _ = make()
    with pytest.raises(ValueError, match="allowed are 'max', 'topk', 'mean'"):
        index.search_sessions(queries, 3, "lse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="topk=0"):
        index.search_sessions(queries, 3, "topk", 0)


def test_deleting_a_session_removes_it() -> None:
    index, _, queries, ids, sessions = make()
    index.search_sessions(queries, 3)
    index.delete([i for i, s in zip(ids, sessions, strict=True) if s == "s0"])
    hits = index.search_sessions(queries, 50)
    assert all(set(row) == set(sessions) - {"s0"} for row in hits.ids)
