"""Shards searched in this process find what one machine finds; no Ray is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mia_serve.core import Encoder
from mia_serve.core.errors import MiaError
from mia_serve.http.ray_retriever import ShardedRetriever, merge
from mia_serve.http.ray_shards import Shard, split_books
from mia_serve.index import Hits
from mia_serve.retriever import Results
from mia_serve.signature import Signature
from tests.ray.conftest import QUERIES, Library


class Here:
    """An encoder of this process."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.spec_hash, self.dim = encoder, encoder.spec_hash, encoder.dim

    async def vectors(self, texts: Sequence[str], signatures: Any = None, alpha: float | None = None) -> np.ndarray:
        return self.encoder.encode_queries(texts, signatures, alpha)


def sharded(library: Library, shards: int, e2: bool = True, **settings: Any) -> ShardedRetriever:
    def asker(shard: Shard) -> Any:
        async def ask(method: str, *arguments: Any) -> Any:
            return getattr(shard, method)(*arguments)

        return ask

    askers = [asker(Shard(span)) for span in split_books(library.folder, shards)]
    return ShardedRetriever(askers, Here(library.e1), Here(library.e2) if e2 else None, **settings)


def same(found: Results, expected: Results) -> None:
    assert found.hits.ids == expected.hits.ids
    np.testing.assert_array_equal(found.hits.scores, expected.hits.scores)
    np.testing.assert_array_equal(found.hits.rows, expected.hits.rows)
    assert found.signatures == expected.signatures


def test_books_are_parted_whole_and_evenly(library: Library) -> None:
    book_of = [chunk.book_id for chunk in library.mindscape.chunks]  # 3, 21, 8, 1, 14, 30, 5, 11 chunks
    assert [(s.start, s.stop) for s in split_books(library.folder, 2)] == [(0, 47), (47, 93)]
    assert [s.start for s in split_books(library.folder, 8)] == [0, 3, 24, 32, 33, 47, 77, 82]
    for shards in range(1, 9):
        spans = split_books(library.folder, shards)
        assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])] and spans[-1].stop == len(book_of)
        books = [set(book_of[s.start : s.stop]) for s in spans]
        assert all(books) and sum(map(len, books)) == 8
    assert split_books(library.folder, 20) == split_books(library.folder, 8), "no book is split"
    with pytest.raises(MiaError, match="shards"):
        split_books(library.folder, 0)


@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("settings", [{"k0": 7, "k_sum": 3}, {"k0": 25, "k_sum": "auto", "prior": 0.2}, {"alpha": 0.3}])
def test_any_number_of_shards_equals_one_machine(library: Library, shards: int, settings: dict[str, Any]) -> None:
    ours, one = sharded(library, shards, **settings), library.retriever(**settings)
    for mode in ("none", "coverage", "first_k"):
        found = asyncio.run(ours.search(QUERIES, 12, mode))
        same(found, one.search(QUERIES, 12, mode))
    same(asyncio.run(ours.search(QUERIES, 500, "none", "e1")), one.search(QUERIES, 500, "none", "e1"))
    same(asyncio.run(ours.search(QUERIES, 5, "coverage", "e1", 0.1)), one.search(QUERIES, 5, "coverage", "e1", 0.1))
    assert asyncio.run(ours.signatures(QUERIES, "coverage")) == one.signatures(QUERIES)


def test_given_signatures_weigh_sessions_outside_the_pool(library: Library) -> None:
    sessions = library.mindscape.sessions
    given = [Signature((sessions[i].id, sessions[-1 - i].id), (sessions[i].summary, "else")) for i in range(5)]
    given[2] = Signature((), ("no session of ours",))
    ours, one = sharded(library, 4, k0=3), library.retriever(k0=3)
    for name in ("e1", "e2"):
        found = asyncio.run(ours.search(QUERIES, 9, given, name, 0.3))
        same(found, one.search(QUERIES, 9, given, name, 0.3))
    made = asyncio.run(ours.given(["else", sessions[2].summary, sessions[-1].summary]))
    assert made.session_ids == (sessions[2].id, sessions[-1].id) and made.texts[0] == "else"


def test_pool_and_texts_come_from_the_shards(library: Library) -> None:
    ours, one = sharded(library, 3, k0=6), library.retriever(k0=6)
    pool, small = asyncio.run(ours.pool(QUERIES[0]))
    expected = one.pools([QUERIES[0]])[0]
    assert [small.sessions[i].id for i in pool.sessions] == [
        library.mindscape.sessions[i].id for i in expected.sessions
    ]
    rows = [92, 0, 47]
    assert asyncio.run(ours.chunks(rows)) == [library.mindscape.chunks[row] for row in rows]


def test_ties_are_merged_by_id() -> None:
    def hits(*found: tuple[str, float, int]) -> Hits:
        ids, scores, rows = zip(*found, strict=True)
        return Hits([list(ids)], np.asarray([scores], np.float32), np.asarray([rows]))

    parts = [hits(("b", 0.5, 3), ("d", 0.25, 1)), hits(("a", 0.5, 9), ("c", 0.25, 7), ("e", 0.1, 8))]
    assert merge(parts, 3).ids == [["a", "b", "c"]] and merge(parts, 3).rows.tolist() == [[9, 3, 7]]
    assert merge(parts, 9).scores.tolist() == [[0.5, 0.5, 0.25, 0.25, pytest.approx(0.1)]]


def test_a_shard_refuses_another_state_and_names_missing_vectors(library: Library) -> None:
    span = split_books(library.folder, 2)[0]
    with pytest.raises(MiaError, match="changed since it was split"):
        Shard(span._replace(mark="older"))
    with pytest.raises(MiaError, match="keeps no vectors of the encoder with spec hash beef: run `mia-serve embed`"):
        Shard(span).search("beef", np.ones((1, 4), np.float32), 1)
