"""SessionIndex against a NumPy reference on both backends, and its probes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from mia_serve.core.scoring import fuse_views
from mia_serve.index import SessionIndex, flat, session_index

BACKENDS = ["torch", "faiss"]


def unit(rng: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    """Random unit rows."""
    x = rng.standard_normal((rows, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def build(backend: str, vectors: np.ndarray, ids: list[str] | None = None, sessions: list[str] | None = None):
    index = SessionIndex(vectors.shape[1], backend, "cpu")
    names = ids if ids is not None else [f"c{i}" for i in range(len(vectors))]
    index.add(names, vectors, sessions if sessions is not None else ["s"] * len(vectors))
    return index


def reference(queries: np.ndarray, vectors: np.ndarray, ids: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows of the k best by score descending, then id ascending."""
    scores = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    rank = np.empty(len(ids), int)
    rank[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
    rows = np.stack([np.lexsort((rank, -row))[:k] for row in scores])
    return np.take_along_axis(scores, rows, axis=1), rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [1, 7, 40, 97])
def test_equals_numpy_with_ties_and_negative_scores(backend: str, k: int) -> None:
    rng = np.random.default_rng(0)
    vectors = unit(rng, 300, 24)
    vectors[40:140] = vectors[3]  # far more ties than the spare rows fetched
    vectors[200:205] = -vectors[3]
    queries = np.concatenate([unit(rng, 20, 24), vectors[3:4], -vectors[3:4]])
    ids = [f"c{i}" for i in rng.permutation(300)]
    hits = build(backend, vectors, ids).search(queries, k)
    scores, rows = reference(queries, vectors, ids, k)
    np.testing.assert_array_equal(hits.rows, rows)
    np.testing.assert_array_equal(hits.scores, scores)
    assert hits.ids == [[ids[i] for i in row] for row in rows]
    assert hits.scores.dtype == np.float32 and hits.rows.dtype == np.int64


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_integers_tie_everywhere(backend: str) -> None:
    rng = np.random.default_rng(1)
    vectors = rng.integers(-1, 2, (500, 4)).astype(np.float32)
    queries = rng.integers(-1, 2, (30, 4)).astype(np.float32)
    ids = [str(i) for i in range(500)]
    hits = build(backend, vectors, ids).search(queries, 13)
    np.testing.assert_array_equal(hits.rows, reference(queries, vectors, ids, 13)[1])


def test_tiles_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    vectors, queries = unit(rng, 211, 16), unit(rng, 17, 16)
    vectors[50:120] = vectors[5]
    queries[0] = vectors[5]
    whole = build("torch", vectors, sessions=[f"s{i % 9}" for i in range(211)])
    expected, sessions = whole.search(queries, 12), whole.search_sessions(queries, 4)
    monkeypatch.setattr(flat, "_QUERY_TILE", 4)
    monkeypatch.setattr(flat, "_SCORE_TILE", 4 * 32)
    monkeypatch.setattr("mia_serve.index.exact._ELEMENTS", 64)
    monkeypatch.setattr(session_index, "_SESSION_SCORES", 500)
    tiled = whole.search(queries, 12)
    np.testing.assert_array_equal(tiled.rows, expected.rows)
    np.testing.assert_array_equal(tiled.scores, expected.scores)
    again = whole.search_sessions(queries, 4)
    assert again.ids == sessions.ids and again.best_chunk == sessions.best_chunk


def test_score_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    matmul = torch.Tensor.__matmul__

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        product = matmul(a, b)
        largest = max(largest, product.numel())
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    monkeypatch.setattr(flat, "_SCORE_TILE", 1 << 16)
    rng = np.random.default_rng(3)
    build("torch", unit(rng, 5000, 8)).search(unit(rng, 600, 8), 5)
    assert 0 < largest <= 1 << 16


def test_batch_equals_single() -> None:
    rng = np.random.default_rng(4)
    vectors, queries = unit(rng, 400, 32), unit(rng, 25, 32)
    index = build("torch", vectors)
    together = index.search(queries, 10)
    for i, query in enumerate(queries):
        alone = index.search(query[None], 10)
        assert alone.ids[0] == together.ids[i]
        np.testing.assert_array_equal(alone.scores[0], together.scores[i])


@pytest.mark.parametrize("backend", BACKENDS)
def test_SRV_32_k_beyond_the_corpus(backend: str) -> None:
    hits = build(backend, np.eye(2, 3, dtype=np.float32)).search(np.eye(1, 3, dtype=np.float32), 5)
    assert hits.ids == [["c0", "c1"]] and hits.scores.shape == hits.rows.shape == (1, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_index_and_no_queries(backend: str) -> None:
    empty = SessionIndex(3, backend, "cpu")
    assert empty.search(np.ones((2, 3)), 4).ids == [[], []]
    assert empty.search_sessions(np.ones((2, 3)), 4).ids == [[], []]
    full = build(backend, np.eye(3, dtype=np.float32))
    assert full.search(np.empty((0, 3)), 4).ids == []
    assert full.search_sessions(np.empty((0, 3)), 4).ids == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_SRV_37_ties_by_ascending_id(backend: str) -> None:
    vectors = np.tile(np.float32([[0.6, 0.8]]), (60, 1))
    ids = [f"{i:02d}" for i in reversed(range(60))]
    for k in (1, 3, 60):
        assert build(backend, vectors, ids).search(vectors[:1], k).ids[0] == sorted(ids)[:k]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_SRV_38_not_finite_is_refused_with_its_row(backend: str, value: float) -> None:
    index = build(backend, np.eye(4, dtype=np.float32))
    bad = np.zeros((3, 4), np.float32)
    bad[1, 0] = value
    for call in (lambda: index.search(bad, 1), lambda: index.search_sessions(bad, 1)):
        with pytest.raises(ValueError, match="queries, row 1"):
            call()
    with pytest.raises(ValueError, match="vectors, row 1"):
        index.add(["x", "y", "z"], bad, ["s"] * 3)
    assert len(index) == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_SRV_41_delete_and_add_again(backend: str) -> None:
    index = build(backend, np.eye(3, dtype=np.float32))
    index.search(np.eye(3), 1)
    index.delete(["c1"])
    assert "c1" not in index and index.ids == ("c0", "c2")
    assert index.search(np.eye(3)[1:2], 3).ids == [["c0", "c2"]]
    index.add(["c1"], np.eye(3)[1:2], ["s"])
    assert index.search(np.eye(3)[1:2], 1).ids == [["c1"]]
    index.delete(["c0", "c1", "c2"])
    assert len(index) == 0 and index.search(np.eye(3), 2).ids == [[], [], []]


def test_SRV_43_ids_round_trip_exactly(tmp_path) -> None:
    ids = ["7080030971", "s-1", "山/ü \n", "-1", "0007", "7"]
    build("torch", np.eye(6, dtype=np.float32), ids).save(tmp_path / "index")
    index = SessionIndex.load(tmp_path / "index")
    assert index.ids == tuple(ids)
    assert index.search(np.eye(6), 1).ids == [[i] for i in ids]
    with pytest.raises(ValueError, match="not a non-empty string"):
        index.add([7_080_030_971], np.ones((1, 6)), ["s"])  # type: ignore[list-item]


@pytest.mark.parametrize("backend", BACKENDS)
def test_SRV_44_ids_are_unique(backend: str) -> None:
    rng = np.random.default_rng(5)
    for row in build(backend, unit(rng, 5, 3)).search(unit(rng, 9, 3), 5).ids:
        assert sorted(row) == ["c0", "c1", "c2", "c3", "c4"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_EVL_01_close_scores_stay_apart_in_half_precision_settings(backend: str) -> None:
    vectors = np.zeros((2, 64), np.float32)
    vectors[0, :2] = 0.9, np.sqrt(1 - 0.9**2)
    vectors[1, :2] = 0.901, np.sqrt(1 - 0.901**2)  # bfloat16 rounds both first components to 0.8984
    query = np.eye(1, 64, dtype=np.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hits = build(backend, vectors).search(query, 2)
        sessions = build(backend, vectors, sessions=["a", "b"]).search_sessions(query, 2)
    assert hits.ids == [["c1", "c0"]] and hits.scores[0, 0] - hits.scores[0, 1] > 9e-4
    assert sessions.ids == [["b", "a"]]


def test_autocast_keeps_the_first_stage_exact() -> None:
    rng = np.random.default_rng(6)
    vectors, queries = unit(rng, 3000, 32), unit(rng, 8, 32)
    index = build("torch", vectors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = index.search(queries, 5).rows
    np.testing.assert_array_equal(rows, reference(queries, vectors, list(index.ids), 5)[1])


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_score_fusion_is_one_search_with_the_fused_query(alpha: float) -> None:
    rng = np.random.default_rng(7)
    vectors, query, target = unit(rng, 200, 16), unit(rng, 10, 16), unit(rng, 10, 16)
    fused = fuse_views(torch.from_numpy(query), torch.from_numpy(target), alpha).numpy()
    scores = (1 - alpha) * query.astype(np.float64) @ vectors.T + alpha * target.astype(np.float64) @ vectors.T
    for hits in (build("torch", vectors).search(fused, 20), build("faiss", vectors).search(fused, 20)):
        np.testing.assert_array_equal(hits.rows, np.argsort(-scores, axis=1)[:, :20])
    raw = build("torch", vectors).search((1 - alpha) * query + alpha * target, 20)
    np.testing.assert_allclose(raw.scores, -np.sort(-scores, axis=1)[:, :20], atol=1e-6)


def test_search_within_ranks_given_rows() -> None:
    rng = np.random.default_rng(8)
    vectors, queries = unit(rng, 50, 8), unit(rng, 3, 8)
    index = build("torch", vectors)
    rows = np.array([[4, 9, -1, 30], [1, 2, 3, 4], [7, -1, -1, -1]])
    hits = index.search_within(queries, rows, 3)
    for i, row in enumerate(rows):
        real = row[row >= 0]
        expected = real[np.argsort(-(vectors[real] @ queries[i]))][:3]
        assert hits.ids[i] == [f"c{r}" for r in expected]
    assert hits.rows[2].tolist() == [7, -1, -1] and hits.scores[2, 1] == -np.inf
    with pytest.raises(ValueError, match=r"allowed are -1\.\.49"):
        index.search_within(queries, rows + 20, 3)


def test_vectors_are_copied() -> None:
    vectors = np.eye(3, dtype=np.float32)
    index = build("torch", vectors)
    vectors[:] = 0
    assert index.search(np.eye(3), 1).ids == [["c0"], ["c1"], ["c2"]]


def test_other_number_formats_and_lengths_are_accepted() -> None:
    index = SessionIndex(2, "torch", "cpu")
    index.add(["a"], np.array([[3, 4]]), ["s"])
    index.add(["b"], np.array([[1, 0]], np.float16), ["s"])
    assert index.search(np.array([[1.0, 0.0]]), 2).scores.tolist() == [[3.0, 1.0]]


@pytest.mark.parametrize(
    ("ids", "vectors", "sessions", "message"),
    [
        (["a", "a"], np.eye(2), ["s", "s"], "already in the index"),
        (["c0"], np.eye(1, 2), ["s"], "already in the index"),
        (["a"], np.ones((1, 3)), ["s"], r"expected \(n, 2\)"),
        (["a"], np.ones(2), ["s"], r"expected \(n, 2\)"),
        (["a"], np.array([["x", "y"]]), ["s"], "numbers"),
        (["a", "b"], np.ones((1, 2)), ["s", "s"], "2 ids, 1 vectors"),
        ("ab", np.eye(2), ["s", "s"], "one string"),
        ([""], np.eye(1, 2), ["s"], "non-empty"),
        (["a"], np.eye(1, 2), [None], "non-empty"),
        (["a"], np.full((1, 2), 1e30), ["s"], "huge"),
    ],
)
def test_wrong_additions_are_refused_whole(ids, vectors, sessions, message: str) -> None:
    index = build("torch", np.eye(2, dtype=np.float32))
    with pytest.raises(ValueError, match=message):
        index.add(ids, vectors, sessions)
    assert index.ids == ("c0", "c1")


@pytest.mark.parametrize("ids", [["c0", "nope"], ["c0", "c0"], "c0"])
def test_wrong_deletions_are_refused_whole(ids) -> None:
    index = build("torch", np.eye(2, dtype=np.float32))
    with pytest.raises(ValueError):
        index.delete(ids)
    assert len(index) == 2


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_wrong_k_is_refused(k) -> None:
    with pytest.raises(ValueError, match="integer >= 1"):
        build("torch", np.eye(2, dtype=np.float32)).search(np.eye(2), k)


def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="allowed are 'auto', 'torch', 'faiss'"):
        SessionIndex(2, "hnsw")
    with pytest.raises(ValueError, match="dim=0"):
        SessionIndex(0)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match="faiss-cpu"):
        SessionIndex(2, "faiss")
    assert SessionIndex(2).backend == "torch"


def test_faiss_is_imported_only_when_asked_for() -> None:
    code = "import sys, mia_serve.index as i; i.SessionIndex(2); assert 'faiss' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
