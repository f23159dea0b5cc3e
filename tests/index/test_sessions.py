"""Session search and session scores against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from mia_serve.index import SessionIndex, collect, session_scores
from tests.index.reference import best_sessions, build, products, unit

POOLINGS = ["max", "topk", "mean", "early", "lme"]


def make(backend: str = "torch", seed: int = 0, rows: int = 80):
    """Chunks of ragged, interleaved sessions; small integers, so that many scores tie exactly."""
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-2, 3, (rows, 3)).astype(np.float32)
    queries = rng.integers(-2, 3, (12, 3)).astype(np.float32)
    ids = [f"c{i}" for i in rng.permutation(rows)]
    sessions = [f"s{i}" for i in (rng.integers(0, 11, rows) * rng.integers(0, 2, rows))]
    return build(vectors, ids, sessions, backend), vectors, queries, ids, sessions


def assert_found(hits, expected) -> None:
    """Compare with the loop; poolings that sum in another order may differ in the last place of the score."""
    for i, row in enumerate(expected):
        assert hits.ids[i] == [entry[0] for entry in row]
        np.testing.assert_allclose(hits.scores[i], [entry[1] for entry in row], rtol=3e-7, atol=1e-7)
        chunks = {entry[0]: entry[2:] for entry in row}
        for name, chunk, score in zip(hits.ids[i], hits.best_chunk[i], hits.best_score[i].tolist(), strict=True):
            assert chunks[name] == (chunk, score)


@pytest.mark.parametrize("backend", ["torch", "faiss"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("topk", [1, 3])
def test_equals_a_loop(backend: str, pooling: str, topk: int) -> None:
    index, vectors, queries, ids, sessions = make(backend)
    for k in (1, 6, 50):
        hits = index.search_sessions(queries, k, pooling, topk)
        assert_found(hits, best_sessions(queries, vectors, ids, sessions, k, pooling, topk))
        assert hits.scores.dtype == hits.best_score.dtype == np.float32


def some(data: str, rng: np.random.Generator, rows: int, dim: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Vectors and three queries whose scores are random, tied all over, or all negative."""
    vectors, queries = unit(rng, rows, dim), unit(rng, 3, dim)
    if data == "tied":
        return rng.integers(-1, 2, (rows, dim)).astype(np.float32), np.sign(queries).astype(np.float32)
    return (np.abs(vectors), -np.abs(queries)) if data == "negative" else (vectors, queries)


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("data", ["random", "tied", "negative"])
def test_equals_brute_force_for_few_sessions(count: int, data: str) -> None:
    rng = np.random.default_rng(count)
    vectors, queries = some(data, rng, 5_000)
    ids = [f"c{i}" for i in range(5_000)]
    sessions = [f"s{i}" for i in (rng.permutation(5_000) % count)]
    index = build(vectors, ids, sessions)
    for pooling in POOLINGS:
        expected = best_sessions(queries, vectors, ids, sessions, 5, pooling)
        assert_found(index.search_sessions(queries, 5, pooling), expected)


@pytest.mark.parametrize("data", ["random", "tied", "negative"])
def test_equals_brute_force_for_100_000_sessions(data: str) -> None:
    rng = np.random.default_rng(3)
    rows, count = 120_000, 100_000
    vectors, queries = some(data, rng, rows)
    code = rng.permutation(rows) % count
    index = build(vectors, [f"c{i:06}" for i in range(rows)], [f"s{i:06}" for i in code])
    scores, sizes = products(queries, vectors), np.bincount(code)
    pooled = {name: np.zeros((3, count)) for name in ("mean", "lme")} | {"max": np.full((3, count), -np.inf)}
    for i, row in enumerate(scores):
        np.maximum.at(pooled["max"][i], code, row)
        np.add.at(pooled["mean"][i], code, row)
        np.add.at(pooled["lme"][i], code, np.exp(10 * row))
    pooled["mean"] /= sizes
    pooled["lme"] = np.log(pooled["lme"] / sizes) / 10
    pooled["topk"] = pooled["mean"]  # no session has more than two chunks
    for pooling, values in pooled.items():
        hits = index.search_sessions(queries, 7, pooling)
        values = values.astype(np.float32) + np.float32(0)
        for i, row in enumerate(values):
            best = np.lexsort((np.arange(count), -row))[:7]
            np.testing.assert_allclose(hits.scores[i], row[best], rtol=3e-7, atol=1e-7)
            if data == "random" or pooling == "max":  # ties of the others hang on the last bit of a sum
                assert hits.ids[i] == [f"s{s:06}" for s in best]
            for name, chunk in zip(hits.ids[i], hits.best_chunk[i], strict=True):
                mine = np.flatnonzero(code == int(name[1:]))
                assert chunk == f"c{mine[np.argmax(scores[i, mine].astype(np.float32))]:06}"


@pytest.mark.parametrize("order", ["best last", "best first", "all alike"])
def test_max_does_not_depend_on_where_the_best_chunks_lie(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_SCORES", 1 << 10)
    monkeypatch.setattr(collect, "_HITS", 100)
    monkeypatch.setattr(collect, "_SPARE", 20)
    rng = np.random.default_rng(1)
    vectors, queries = unit(rng, 2_000, 4), unit(rng, 7, 4)
    if order == "all alike":
        vectors[:] = vectors[0]
    else:
        vectors = vectors[np.argsort(vectors @ queries[0] * (1 if order == "best last" else -1))]
    ids = [f"c{i}" for i in rng.permutation(2_000)]
    sessions = [f"s{i // 9}" for i in range(2_000)]
    index = build(vectors, ids, sessions)
    assert_found(index.search_sessions(queries, 12), best_sessions(queries, vectors, ids, sessions, 12))


def test_tiles_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    index, _, queries, _, _ = make(rows=300)
    whole = [index.search_sessions(queries, 6, pooling, 4) for pooling in POOLINGS]
    chunks, scores = index.search(queries, 17), index.score_sessions(queries, "lme")
    for module, name, value in [
        (collect, "_SCORES", 100),
        (collect, "_HITS", 10),
        (session_scores, "_ELEMENTS", 60),
        (session_scores, "_TALL", 7),
        (session_scores, "_KEPT_MEANS", 0),
    ]:
        monkeypatch.setattr(module, name, value)
    again = make(rows=300)[0]
    for pooling, expected in zip(POOLINGS, whole, strict=True):
        found = again.search_sessions(queries, 6, pooling, 4)
        assert found.ids == expected.ids and found.best_chunk == expected.best_chunk
        np.testing.assert_allclose(found.scores, expected.scores, rtol=3e-7, atol=1e-7)
    assert again.search(queries, 17).ids == chunks.ids
    np.testing.assert_allclose(again.score_sessions(queries, "lme").scores, scores.scores, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_score_sessions_gives_every_session_its_search_score(pooling: str) -> None:
    index, _, queries, _, sessions = make()
    scores = index.score_sessions(queries, pooling)
    assert scores.ids == sorted(set(sessions)) and scores.scores.dtype == np.float32
    found = index.search_sessions(queries, 50, pooling)
    for i, row in enumerate(found.ids):
        np.testing.assert_array_equal(scores.scores[i, [scores.ids.index(name) for name in row]], found.scores[i])


def test_poolings_by_hand() -> None:
    index = build(np.float32([[1, 0], [0, 1], [0, -1]]), sessions=["a", "a", "b"])
    query = np.float32([[2, 0]])  # scores 2, 0 and 0

    def scores(pooling: str, **options) -> list[float]:
        return index.score_sessions(query, pooling, **options).scores[0].tolist()

    assert scores("max") == [2.0, 0.0]
    assert scores("mean") == scores("topk") == [1.0, 0.0]
    assert scores("topk", topk=1) == [2.0, 0.0]
    assert scores("early") == pytest.approx([np.sqrt(0.5), 0.0])
    assert scores("lme", beta=1.0) == pytest.approx([np.log((np.e**2 + 1) / 2), 0.0])
    assert scores("lme", beta=500.0) == pytest.approx([2 - np.log(2) / 500, 0.0])  # e^1000 would overflow


def test_early_of_a_session_whose_vectors_cancel_is_zero() -> None:
    index = build(np.float32([[1, 0], [-1, 0], [0, 1]]), sessions=["a", "a", "b"])
    assert index.score_sessions(np.float32([[0, -1], [0, 0]]), "early").scores.tolist() == [[0, -1], [0, 0]]


def test_all_negative_scores() -> None:
    index = build(np.float32([[-1], [-0.5], [-0.25]]), ["a", "b", "c"], ["x", "x", "y"])
    hits = index.search_sessions(np.ones((1, 1)), 5)
    assert hits.ids == [["y", "x"]] and hits.best_chunk == [["c", "b"]]
    assert hits.scores.tolist() == hits.best_score.tolist() == [[-0.25, -0.5]]


def test_SRV_37_equal_sessions_and_chunks_by_ascending_id() -> None:
    index = build(np.ones((6, 1), np.float32), ["f", "e", "d", "c", "b", "a"], ["z", "y", "x", "x", "y", "z"])
    for pooling in POOLINGS:
        hits = index.search_sessions(np.ones((1, 1)), 2, pooling)
        assert hits.ids == [["x", "y"]] and hits.best_chunk == [["c", "b"]]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_SRV_47_long_sessions_have_no_head_start(pooling: str) -> None:
    index = SessionIndex(2, "torch", "cpu")
    index.add([f"l{i}" for i in range(100)], np.tile(np.float32([[0.6, 0.8]]), (100, 1)), ["long"] * 100)
    index.add(["short"], np.float32([[0.6, 0.8]]), ["a short one"])
    hits = index.search_sessions(np.float32([[1, 0]]), 2, pooling)
    assert hits.scores[0, 0] == hits.scores[0, 1]
    assert hits.ids == [["a short one", "long"]]


@pytest.mark.parametrize("pooling", ["max", "mean", "early", "lme"])
def test_SRV_47_every_chunk_twice_moves_no_score(pooling: str) -> None:
    rng = np.random.default_rng(2)
    vectors, queries = unit(rng, 60, 8), unit(rng, 5, 8)
    sessions = [f"s{i}" for i in rng.integers(0, 6, 60)]
    once = build(vectors, sessions=sessions)
    twice = build(np.concatenate([vectors, vectors]), sessions=sessions * 2)
    first, second = (index.score_sessions(queries, pooling, beta=3.0).scores for index in (once, twice))
    np.testing.assert_allclose(first, second, rtol=2e-7, atol=1e-7)


def test_SRV_47_log_sum_exp_is_not_offered() -> None:
    index, _, queries, _, _ = make()
    with pytest.raises(ValueError, match="allowed are 'max', 'topk', 'mean', 'early', 'lme'"):
        index.search_sessions(queries, 3, "lse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="topk=0"):
        index.search_sessions(queries, 3, "topk", 0)
    for beta in (0, -1.0, np.inf, np.nan, True):
        with pytest.raises(ValueError, match="beta="):
            index.score_sessions(queries, "lme", beta=beta)


def test_deleting_a_session_removes_it() -> None:
    index, _, queries, ids, sessions = make()
    index.search_sessions(queries, 3)
    index.delete([i for i, s in zip(ids, sessions, strict=True) if s == "s0"])
    for pooling in POOLINGS:
        hits = index.search_sessions(queries, 50, pooling)
        assert all(set(row) == set(sessions) - {"s0"} for row in hits.ids)
    assert index.score_sessions(queries).ids == sorted(set(sessions) - {"s0"})
