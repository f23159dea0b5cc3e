"""Searches that only some chunks may answer."""

from __future__ import annotations

import numpy as np
import pytest

from mia_serve.index import SessionIndex
from tests.index.reference import best_chunks, best_sessions, build, unit


def make(backend: str):
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 400, 6), unit(rng, 9, 6)
    ids = [f"c{i}" for i in rng.permutation(400)]
    sessions = [f"s{i}" for i in rng.integers(0, 30, 400)]
    metadata = [
        {"by": str(rng.choice(["ann", "bob"])), "day": int(rng.integers(0, 50))} if i % 7 else None for i in range(400)
    ]
    return build(vectors, ids, sessions, backend, metadata), vectors, queries, ids, sessions, metadata


@pytest.mark.parametrize("backend", ["torch", "faiss"])
@pytest.mark.parametrize("where", [{"by": "ann"}, {"by": ["bob", "ann"]}, {"day": 3}, {"by": "bob", "day": [1, 2, 9]}])
def test_equals_a_search_of_the_chunks_that_agree(backend: str, where: dict) -> None:
    index, vectors, queries, ids, sessions, metadata = make(backend)
    dead = set(ids[100:160])
    index.delete(list(dead))

    def agrees(i: int) -> bool:
        entry = metadata[i] or {}
        return ids[i] not in dead and all(
            entry.get(key) in (value if isinstance(value, list) else [value]) for key, value in where.items()
        )

    kept = [i for i in range(400) if agrees(i)]
    names, owners = [ids[i] for i in kept], [sessions[i] for i in kept]
    for k in (1, 5, 300):
        hits = index.search(queries, k, where)
        scores, places = best_chunks(queries, vectors[kept], names, k)
        assert hits.ids == [[names[i] for i in row] for row in places]
        np.testing.assert_array_equal(hits.scores, scores)
        np.testing.assert_array_equal(hits.rows, np.array(kept)[places])
    for pooling in ("max", "topk", "early"):
        found = index.search_sessions(queries, 4, pooling, where=where)
        expected = best_sessions(queries, vectors[kept], names, owners, 4, pooling)
        assert found.ids == [[entry[0] for entry in row] for row in expected]
        assert found.best_chunk == [[entry[2] for entry in row] for row in expected]


def test_what_no_chunk_has_finds_nothing() -> None:
    index, _, queries, _, _, _ = make("torch")
    for where in ({"by": "eve"}, {"colour": "red"}, {"by": []}, {"by": None}):
        assert index.search(queries, 3, where).ids == [[]] * 9
        assert index.search_sessions(queries, 3, where=where).ids == [[]] * 9
    plain = build(np.eye(2, dtype=np.float32))
    assert plain.search(np.eye(2), 1, {"by": "ann"}).ids == [[], []]


def test_types_are_told_apart_as_in_json() -> None:
    values = [1, True, 1.0, "1", None, [1], 0]
    index = build(np.eye(7, dtype=np.float32), metadata=[{"x": value} for value in values])
    query = np.ones((1, 7))

    def found(wanted) -> list[str]:
        return index.search(query, 7, {"x": wanted}).ids[0]

    assert found(1) == ["c0", "c2"] and found(True) == ["c1"] and found("1") == ["c3"]
    assert found(None) == ["c4"] and found([0, None]) == ["c4", "c6"]


def test_later_chunks_deletions_and_compaction_are_seen() -> None:
    index = SessionIndex(1, "torch", "cpu")
    index.add(["a"], np.ones((1, 1)), ["s"])
    index.add(["b", "c"], np.ones((2, 1)), ["s", "s"], [{"by": "ann"}, {"by": "bob"}])
    assert index.search(np.ones((1, 1)), 9, {"by": "ann"}).ids == [["b"]]
    index.add(["d", "e", "f"], np.ones((3, 1)), ["s"] * 3, [{"by": "ann"}] * 3)
    index.delete(["b"])
    assert index.search(np.ones((1, 1)), 9, {"by": "ann"}).ids == [["d", "e", "f"]]
    index.compact()
    assert index.search(np.ones((1, 1)), 9, {"by": "ann"}).ids == [["d", "e", "f"]]
    assert index.search(np.ones((1, 1)), 9, {}).ids == [["a", "c", "d", "e", "f"]]


@pytest.mark.parametrize("where", ["by", ["by"], {1: "ann"}, {"by": {"$ne": "ann"}}, {"by": [["ann"]]}])
def test_anything_else_is_refused(where) -> None:
    index, _, queries, _, _, _ = make("torch")
    for call in (lambda: index.search(queries, 1, where), lambda: index.search_sessions(queries, 1, where=where)):
        with pytest.raises(ValueError, match="where"):
            call()
