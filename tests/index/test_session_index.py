"""SessionIndex against a NumPy reference on both backends, and its probes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mia_serve.core import MiaError
from mia_serve.core.scoring import fuse_views
from mia_serve.index import SessionIndex
from tests.index.reference import best_chunks, build, products, unit

BACKENDS = ["torch", "faiss"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [1, 7, 40, 97, 300])
def test_equals_numpy_with_ties_and_negative_scores(backend: str, k: int) -> None:
    rng = np.random.default_rng(0)
    vectors = unit(rng, 300, 24)
    vectors[40:140] = vectors[3]  # far more ties than the spare rows fetched
    vectors[200:205] = -vectors[3]
    queries = np.concatenate([unit(rng, 20, 24), vectors[3:4], -vectors[3:4]])
    ids = [f"c{i}" for i in rng.permutation(300)]
    hits = build(vectors, ids, backend=backend).search(queries, k)
    scores, rows = best_chunks(queries, vectors, ids, k)
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
    hits = build(vectors, ids, backend=backend).search(queries, 13)
    np.testing.assert_array_equal(hits.rows, best_chunks(queries, vectors, ids, 13)[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_corpus_of_equal_vectors_is_ranked_by_id(backend: str) -> None:
    vectors = np.tile(unit(np.random.default_rng(2), 1, 8), (20_000, 1))
    ids = [f"{i:05d}" for i in reversed(range(20_000))]
    assert build(vectors, ids, backend=backend).search(vectors[:2], 3).ids == [["00000", "00001", "00002"]] * 2


def test_batch_equals_single() -> None:
    rng = np.random.default_rng(4)
    vectors, queries = unit(rng, 400, 32), unit(rng, 25, 32)
    index = build(vectors)
    together = index.search(queries, 10)
    for i, query in enumerate(queries):
        alone = index.search(query[None], 10)
        assert alone.ids[0] == together.ids[i]
        np.testing.assert_array_equal(alone.scores[0], together.scores[i])


@pytest.mark.parametrize("backend", BACKENDS)
def test_SRV_32_k_beyond_the_corpus(backend: str) -> None:
    hits = build(np.eye(2, 3, dtype=np.float32), backend=backend).search(np.eye(1, 3, dtype=np.float32), 5)
    assert hits.ids == [["c0", "c1"]] and hits.scores.shape == hits.rows.shape == (1, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_index_and_no_queries(backend: str) -> None:
    empty = SessionIndex(3, backend, "cpu")
    assert empty.search(np.ones((2, 3)), 4).ids == [[], []]
    assert empty.search_sessions(np.ones((2, 3)), 4).ids == [[], []]
    assert empty.score_sessions(np.ones((2, 3))).scores.shape == (2, 0)
    assert empty.search_within(np.ones((2, 3)), np.full((2, 5), -1), 3).ids == [[], []]
    full = build(np.eye(3, dtype=np.float32), backend=backend)
    assert full.search(np.empty((0, 3)), 4).ids == []
    assert full.search_sessions(np.empty((0, 3)), 4).ids == []
    full.add([], np.empty((0, 3)), [])
    assert len(full) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_SRV_37_ties_by_ascending_id(backend: str) -> None:
    vectors = np.tile(np.float32([[0.6, 0.8]]), (60, 1))
    ids = [f"{i:02d}" for i in reversed(range(60))]
    for k in (1, 3, 60):
        assert build(vectors, ids, backend=backend).search(vectors[:1], k).ids[0] == sorted(ids)[:k]


def test_SRV_37_positive_and_negative_zero_tie() -> None:
    index = build(np.float32([[-0.0, 1], [0.0, 1], [-1.0, 1]]), ["b", "a", "c"])
    hits = index.search(np.float32([[1, 0]]), 3)
    assert hits.ids == [["a", "b", "c"]] and hits.scores.tolist() == [[0.0, 0.0, -1.0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_SRV_38_not_finite_is_refused_with_its_row(backend: str, value: float) -> None:
    index = build(np.eye(4, dtype=np.float32), backend=backend)
    bad = np.zeros((3, 4), np.float32)
    bad[1, 0] = value
    calls = (
        lambda: index.search(bad, 1),
        lambda: index.search_sessions(bad, 1),
        lambda: index.score_sessions(bad),
        lambda: index.search_within(bad, np.zeros((3, 1), int), 1),
    )
    for call in calls:
        with pytest.raises(ValueError, match="queries, row 1"):
            call()
    for change in (index.add, index.upsert):
        with pytest.raises(ValueError, match="vectors, row 1"):
            change(["x", "c0", "z"], bad, ["s"] * 3)
    assert index.ids == ("c0", "c1", "c2", "c3")


@pytest.mark.parametrize("backend", BACKENDS)
def test_SRV_41_delete_and_add_again(backend: str) -> None:
    index = build(np.eye(3, dtype=np.float32), backend=backend)
    index.search(np.eye(3), 1)
    index.delete(["c1"])
    assert "c1" not in index and index.ids == ("c0", "c2")
    assert index.search(np.eye(3)[1:2], 3).ids == [["c0", "c2"]]
    index.add(["c1"], np.eye(3)[1:2], ["s"])
    assert index.search(np.eye(3)[1:2], 1).ids == [["c1"]]
    index.delete(["c0", "c1", "c2"])
    assert len(index) == 0 and index.search(np.eye(3), 2).ids == [[], [], []]
    index.add(["c0"], np.eye(3)[:1], ["s"])
    assert index.search(np.eye(3)[:1], 2).ids == [["c0"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_changes_in_any_order_leave_what_a_fresh_index_holds(backend: str) -> None:
    rng = np.random.default_rng(5)
    index, expected, rows, given = SessionIndex(6, backend, "cpu"), {}, {}, 0
    queries = rng.integers(-2, 3, (5, 6)).astype(np.float32)
    for step in range(60):
        names = [f"c{i}" for i in rng.choice(80, rng.integers(1, 12), replace=False)]
        vectors = rng.integers(-2, 3, (len(names), 6)).astype(np.float32)
        owners = [f"s{i}" for i in rng.integers(0, 7, len(names))]
        if step % 3 == 2:
            gone = [name for name in names if name in expected]
            index.delete(gone)
            for name in gone:
                del expected[name], rows[name]
        else:
            index.upsert(names, vectors, owners)
            for name, vector, owner in zip(names, vectors, owners, strict=True):
                expected[name], rows[name] = (vector, owner), given
                given += 1
        if step % 20 == 7:
            index.compact()
        if not expected:
            continue
        ids = list(expected)
        fresh = build(np.stack([expected[i][0] for i in ids]), ids, [expected[i][1] for i in ids])
        hits, wanted = index.search(queries, 9), fresh.search(queries, 9)
        assert hits.ids == wanted.ids and set(index.ids) == set(ids) and len(index) == len(ids)
        np.testing.assert_array_equal(hits.scores, wanted.scores)
        np.testing.assert_array_equal(hits.rows, [[rows[name] for name in row] for row in hits.ids])
        sessions, wanted_sessions = index.search_sessions(queries, 4), fresh.search_sessions(queries, 4)
        assert sessions.ids == wanted_sessions.ids and sessions.best_chunk == wanted_sessions.best_chunk


def test_row_numbers_are_for_life() -> None:
    rng = np.random.default_rng(6)
    vectors = unit(rng, 12, 4)
    index = build(vectors)
    index.delete([f"c{i}" for i in range(0, 10, 2)])
    assert [index.row_of(f"c{i}") for i in (1, 9, 11)] == [1, 9, 11]
    index.delete(["c1", "c3", "c5"])  # more dead than alive: compacts by itself
    index.add(["new"], vectors[:1], ["s"])
    assert index.row_of("new") == 12 and index.ids == ("c7", "c9", "c10", "c11", "new")
    hits = index.search_within(vectors[7:8], np.array([[11, 7, 12, -1]]), 3)
    assert hits.ids[0][0] == "c7" and sorted(hits.rows[0].tolist()) == [7, 11, 12]
    for row in (5, 13, -2):
        with pytest.raises(ValueError, match=rf"rows hold {row}, which is no chunk"):
            index.search_within(vectors[:1], np.array([[7, row]]), 1)
    with pytest.raises(ValueError, match="'c5' is not in the index"):
        index.row_of("c5")


def test_an_updated_chunk_has_its_new_vector_session_and_metadata() -> None:
    index = build(np.eye(3, dtype=np.float32), metadata=[{"by": "ann"}, None, {"by": "bob"}])
    index.upsert(["c0", "c9"], np.float32([[0, 0, 2], [1, 1, 0]]), ["t", "t"], [{"by": "eve"}, None])
    assert index.search(np.eye(3)[2:], 1).ids == [["c0"]] and len(index) == 4
    assert (index.session_of("c0"), index.metadata_of("c0"), index.metadata_of("c9")) == ("t", {"by": "eve"}, None)
    assert index.metadata_of("c2") == {"by": "bob"} and index.session_of("c1") == "s"
    with pytest.raises(ValueError, match="'c0' is given twice"):
        index.upsert(["c0", "c0"], np.eye(3)[:2], ["t", "t"])
    assert index.search(np.eye(3)[2:], 1).ids == [["c0"]]


def test_SRV_43_ids_round_trip_exactly(tmp_path) -> None:
    ids = ["7080030971", "s-1", "山/ü \n", "-1", "0007", "7"]
    build(np.eye(6, dtype=np.float32), ids).save(tmp_path / "index")
    index = SessionIndex.load(tmp_path / "index")
    assert index.ids == tuple(ids)
    assert index.search(np.eye(6), 1).ids == [[i] for i in ids]
    with pytest.raises(ValueError, match="not a non-empty string"):
        index.add([7_080_030_971], np.ones((1, 6)), ["s"])  # type: ignore[list-item]


@pytest.mark.parametrize("backend", BACKENDS)
def test_SRV_44_ids_are_unique(backend: str) -> None:
    rng = np.random.default_rng(5)
    for row in build(unit(rng, 5, 3), backend=backend).search(unit(rng, 9, 3), 5).ids:
        assert sorted(row) == ["c0", "c1", "c2", "c3", "c4"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_SRV_59_the_same_query_again_with_another_k_filter_or_state(backend: str) -> None:
    vectors = np.float32([[3], [2], [1]])
    index = build(vectors, backend=backend, metadata=[{"by": "ann"}, {"by": "bob"}, {"by": "ann"}])
    query = np.ones((1, 1))
    assert index.search(query, 1).ids == [["c0"]]
    assert index.search(query, 3).ids == [["c0", "c1", "c2"]]
    assert index.search(query, 3, where={"by": "bob"}).ids == [["c1"]]
    assert index.search_sessions(query, 1).best_chunk == [["c0"]]
    assert index.search_sessions(query, 1, where={"by": "bob"}).best_chunk == [["c1"]]
    index.delete(["c0"])
    assert index.search(query, 3).ids == [["c1", "c2"]]
    assert index.search_sessions(query, 1).best_chunk == [["c1"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_EVL_01_close_scores_stay_apart_in_half_precision_settings(backend: str) -> None:
    vectors = np.zeros((2, 64), np.float32)
    vectors[0, :2] = 0.9, np.sqrt(1 - 0.9**2)
    vectors[1, :2] = 0.901, np.sqrt(1 - 0.901**2)  # bfloat16 rounds both first components to 0.8984
    query = np.eye(1, 64, dtype=np.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hits = build(vectors, backend=backend).search(query, 2)
        sessions = build(vectors, sessions=["a", "b"], backend=backend).search_sessions(query, 2)
    assert hits.ids == [["c1", "c0"]] and hits.scores[0, 0] - hits.scores[0, 1] > 9e-4
    assert sessions.ids == [["b", "a"]]


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_callers_settings_neither_reach_the_first_stage_nor_get_lost(precision: str) -> None:
    rng = np.random.default_rng(6)
    vectors, queries = unit(rng, 3000, 32), unit(rng, 8, 32)
    index, matmul = build(vectors), torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = index.search(queries, 5).rows
        assert matmul.fp32_precision == precision
    finally:
        matmul.fp32_precision = before
    np.testing.assert_array_equal(rows, best_chunks(queries, vectors, list(index.ids), 5)[1])


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_score_fusion_is_one_search_with_the_fused_query(alpha: float) -> None:
    rng = np.random.default_rng(7)
    vectors, query, target = unit(rng, 200, 16), unit(rng, 10, 16), unit(rng, 10, 16)
    fused = fuse_views(torch.from_numpy(query), torch.from_numpy(target), alpha).numpy()
    scores = (1 - alpha) * products(query, vectors) + alpha * products(target, vectors)
    for backend in BACKENDS:
        hits = build(vectors, backend=backend).search(fused, 20)
        np.testing.assert_array_equal(hits.rows, np.argsort(-scores, axis=1)[:, :20])
    raw = build(vectors).search((1 - alpha) * query + alpha * target, 20)
    np.testing.assert_allclose(raw.scores, -np.sort(-scores, axis=1)[:, :20], atol=1e-6)


def test_search_within_ranks_given_rows() -> None:
    rng = np.random.default_rng(8)
    vectors, queries = unit(rng, 50, 8), unit(rng, 3, 8)
    index = build(vectors)
    rows = np.array([[4, 9, -1, 30], [1, 2, 3, 4], [7, -1, -1, -1]])
    hits = index.search_within(queries, rows, 3)
    for i, row in enumerate(rows):
        real = row[row >= 0]
        expected = real[np.argsort(-(vectors[real] @ queries[i]))][:3]
        assert hits.ids[i] == [f"c{r}" for r in expected]
    assert hits.rows[2].tolist() == [7, -1, -1] and hits.scores[2, 1] == -np.inf
    with pytest.raises(ValueError, match=r"allowed are -1\.\.49"):
        index.search_within(queries, rows + 20, 3)
    bias = np.zeros(rows.shape)
    bias[1, 2] = 5.0
    biased = index.search_within(queries, rows, 3, bias)
    assert biased.ids[1][0] == "c3" and biased.scores[1, 0] == np.float32(vectors[3] @ queries[1]) + np.float32(5)


def test_vectors_and_metadata_are_copied() -> None:
    vectors, metadata = np.eye(3, dtype=np.float32), [{"by": "ann"}, None, None]
    index = build(vectors, metadata=metadata)
    vectors[:] = 0
    metadata[0]["by"] = "bob"
    assert index.search(np.eye(3), 1).ids == [["c0"], ["c1"], ["c2"]] and index.metadata_of("c0") == {"by": "ann"}


def test_other_number_formats_and_lengths_are_accepted() -> None:
    index = SessionIndex(2, "torch", "cpu")
    index.add(["a"], np.array([[3, 4]]), ["s"])
    index.add(["b"], np.array([[1, 0]], np.float16), ["s"])
    assert index.search(np.array([[1.0, 0.0]]), 2).scores.tolist() == [[3.0, 1.0]]


@pytest.mark.parametrize(
    ("ids", "vectors", "sessions", "message"),
    [
        (["a", "a"], np.eye(2), ["s", "s"], "given twice"),
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
    index = build(np.eye(2, dtype=np.float32))
    with pytest.raises(ValueError, match=message):
        index.add(ids, vectors, sessions)
    assert index.ids == ("c0", "c1")


@pytest.mark.parametrize("metadata", [[{"x": 1}, None], ["x"], [{1: 2}], [{"x": np.nan}], [{"x": {1, 2}}]])
def test_wrong_metadata_is_refused_whole(metadata) -> None:
    index = build(np.eye(2, dtype=np.float32))
    with pytest.raises(ValueError, match="metadata"):
        index.add(["a"], np.eye(1, 2), ["s"], metadata)
    assert index.ids == ("c0", "c1")


@pytest.mark.parametrize("ids", [["c0", "nope"], ["c0", "c0"], "c0"])
def test_wrong_deletions_are_refused_whole(ids) -> None:
    index = build(np.eye(2, dtype=np.float32))
    with pytest.raises(ValueError):
        index.delete(ids)
    assert len(index) == 2 and index.search(np.eye(2), 2).ids == [["c0", "c1"], ["c1", "c0"]]


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_wrong_k_is_refused(k) -> None:
    with pytest.raises(ValueError, match="integer >= 1"):
        build(np.eye(2, dtype=np.float32)).search(np.eye(2), k)


def test_queries_of_another_dimension_are_refused() -> None:
    index = build(np.eye(2, dtype=np.float32))
    for call in (lambda q: index.search(q, 1), lambda q: index.search_sessions(q, 1)):
        with pytest.raises(ValueError, match=r"queries \(1, 3\) float64: expected \(n, 2\)"):
            call(np.ones((1, 3)))


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


def test_changes_of_nothing_leave_nothing_unsaved(tmp_path: Path):
    index = SessionIndex(2, "torch", "cpu")
    index.add(["a"], np.eye(2)[:1], ["s"])
    index.save(tmp_path / "ix")
    other = SessionIndex.load(tmp_path / "ix", device="cpu")
    other.add(["b"], np.eye(2)[1:], ["s"])
    other.save(tmp_path / "ix")
    index.add([], np.empty((0, 2)), [])
    index.delete([])
    index.upsert([], np.empty((0, 2)), [])
    assert index.reload() and index.ids == ("a", "b")


def test_metadata_handed_out_is_a_copy():
    index = SessionIndex(2, "torch", "cpu")
    index.add(["a"], np.eye(2)[:1], ["s"], [{"year": 1}])
    index.metadata_of("a")["year"] = 2
    assert index.search(np.eye(2)[:1], 1, where={"year": 1}).ids == [["a"]]


def test_a_bias_that_float32_cannot_hold_is_refused():
    index = SessionIndex(2, "torch", "cpu")
    index.add(["a"], np.eye(2)[:1], ["s"])
    with pytest.raises(MiaError, match="finite float32 numbers"):
        index.search_within(np.eye(2)[:1], np.array([[0]]), 1, bias=np.array([[1e39]]))
    assert index.search_within(np.eye(2)[:1], [[0]], 1, bias=[[1.0]]).scores.tolist() == [[2.0]]


def test_any_topk_and_a_beta_of_any_number_type():
    index = SessionIndex(2, "torch", "cpu")
    index.add(["a", "b"], np.eye(2), ["s", "s"])
    assert index.search_sessions(np.eye(2)[:1], 1, "topk", topk=2**70).scores.tolist() == [[0.5]]
    assert index.search_sessions(np.eye(2)[:1], 1, "lme", beta=np.float32(1e-6)).scores[0, 0] == pytest.approx(0.5)
    with pytest.raises(MiaError, match="at least 1e-06"):
        index.search_sessions(np.eye(2)[:1], 1, "lme", beta=1e-17)
