"""Search over HTTP against the library called directly, and against slow references."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mia_serve import fusion
from mia_serve.core import Encoder
from mia_serve.lexical import BM25Index
from mia_serve.mindscape import Mindscape
from mia_serve.retriever import Retriever
from mia_serve.signature import DEFAULT_WEIGHTS
from tests.http.conftest import Running

WORDS = [
    "ferryman",
    "lamps",
    "quay",
    "ledger",
    "floor",
    "key",
    "clock",
    "village",
    "boat",
    "night",
    "parrot",
    "harbour",
]
BOOKS = ("tide", "mill")
QUERY = "Where did the ferryman keep the ledger?"
NAME = "search-tests"


def passages(book: str) -> list[dict[str, str]]:
    """Eleven passages of random words, so that two-chunk windows leave a short one; the last two are the same."""
    rng = np.random.default_rng(len(book) + ord(book[0]))
    texts = [f"The {' '.join(rng.choice(WORDS, 6))} of part {i}." for i in range(10)]
    return [{"id": f"{book}-{i:02}", "text": text} for i, text in enumerate([*texts, texts[-1]])]


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.post("/v1/collections", json={"id": NAME}).status_code == 201
        for book in BOOKS:
            fill(client, book)
        yield client


def fill(client: httpx.Client, book: str) -> None:
    body = {"chunks": passages(book), "book_id": book, "title": book.title()}
    assert client.post(f"/v1/collections/{NAME}/chunks", json=body).status_code == 201


@pytest.fixture(scope="module")
def mindscape(http: httpx.Client, server: Running) -> Mindscape:
    return server.services.collections.get(NAME).snapshot.mindscape


@pytest.fixture(scope="module")
def library(mindscape: Mindscape, tiny_bert: Path, tiny_qwen3: Path) -> Retriever:
    """The retriever as a program would make it, with encoders of its own."""
    return Retriever(mindscape, Encoder.load(tiny_bert, "cpu"), Encoder.load(tiny_qwen3, "cpu"), device="cpu")


def search(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(f"/v1/collections/{NAME}/search", json={"query": QUERY} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(found: dict[str, Any]) -> list[str]:
    return [hit.get("id") or hit["session_id"] for hit in found["hits"]]


def scores(found: dict[str, Any]) -> list[float]:
    return [hit["score"] for hit in found["hits"]]


def naive_sessions(mindscape: Mindscape, chunk_scores: np.ndarray) -> np.ndarray:
    return np.array([max(chunk_scores[mindscape.session_of == s]) for s in range(len(mindscape.sessions))])


def naive_order(names: list[str], values: np.ndarray) -> list[str]:
    return [names[i] for i in sorted(range(len(names)), key=lambda i: (-values[i], names[i]))]


@pytest.mark.parametrize("encoder", [None, "e1", "e2"])
@pytest.mark.parametrize("signature", [None, "none", "coverage", "first_k"])
def test_dense_search_equals_the_library(
    http: httpx.Client, library: Retriever, encoder: str | None, signature: str | None
) -> None:
    prior = 0.1 if encoder == "e1" and signature in ("coverage", "first_k") else None
    expected = library.search([QUERY], 7, signature, encoder, prior)
    found = search(http, k=7, encoder=encoder, signature=signature)
    assert ids(found) == expected.hits.ids[0]
    np.testing.assert_allclose(scores(found), expected.hits.scores[0], atol=1e-5)
    if expected.signatures is None:
        assert found["signature"] is None
    else:
        chosen = expected.signatures[0]
        assert found["signature"]["session_ids"] == list(chosen.session_ids)
        assert found["signature"]["summaries"] == list(chosen.texts)
        np.testing.assert_allclose(found["signature"]["gains"], chosen.gains, atol=1e-5)
    chunk = next(c for c in library.mindscape.chunks if c.id == ids(found)[0])
    assert found["hits"][0] | {"score": 0} == {
        "id": chunk.id, "text": chunk.text, "session_id": chunk.session_id, "book_id": chunk.book_id, "score": 0
    }  # fmt: skip


def test_a_given_signature_equals_the_library_and_changes_the_hits(http: httpx.Client, library: Retriever) -> None:
    given = ["The boat left the harbour at night.", library.mindscape.sessions[3].summary]
    expected = library.search([QUERY], 22, [given])
    found = search(http, k=22, signature=given)
    assert ids(found) == expected.hits.ids[0] != ids(search(http, k=22, signature=[]))
    np.testing.assert_allclose(scores(found), expected.hits.scores[0], atol=1e-5)
    assert found["signature"]["mode"] == "given" and found["signature"]["summaries"] == given
    assert found["signature"]["session_ids"] == [library.mindscape.sessions[3].id]  # the one that is a session's
    assert search(http, signature=[])["signature"] is None


def test_given_summaries_weigh_their_sessions_where_e1_searches(http: httpx.Client, library: Retriever) -> None:
    session = library.mindscape.sessions[3]
    plain, weighed = (search(http, k=22, encoder="e1", signature=s) for s in ("none", [session.summary]))
    before, after = (dict(zip(ids(found), scores(found), strict=True)) for found in (plain, weighed))
    for chunk_id in before:
        assert after[chunk_id] - before[chunk_id] == pytest.approx(0.1 * (chunk_id in session.chunk_ids), abs=1e-5)
    answer = http.post(
        f"/v1/collections/{NAME}/search",
        json={"query": "q", "encoder": "e1", "signature": ["A summary of no session."]},
    )
    assert answer.status_code == 400 and "none of these summaries" in answer.json()["error"]["message"]


@pytest.mark.parametrize("signature", ["none", "coverage"])
def test_sessions_score_as_their_best_chunk(http: httpx.Client, library: Retriever, signature: str) -> None:
    mindscape = library.mindscape
    hits = library.search([QUERY], 100, signature).hits
    values = np.empty(len(mindscape.chunks))
    values[hits.rows[0]] = hits.scores[0]
    pooled = naive_sessions(mindscape, values)
    found = search(http, k=5, target="sessions", signature=signature)
    assert ids(found) == naive_order([s.id for s in mindscape.sessions], pooled)[:5]
    np.testing.assert_allclose(scores(found), sorted(pooled)[::-1][:5], atol=1e-5)
    first = next(s for s in mindscape.sessions if s.id == ids(found)[0])
    assert (found["hits"][0]["summary"], found["hits"][0]["book_id"]) == (first.summary, first.book_id)


def test_lexical_search_equals_bm25(http: httpx.Client, mindscape: Mindscape) -> None:
    index = BM25Index([c.id for c in mindscape.chunks], [c.text for c in mindscape.chunks])
    expected = index.search([QUERY], 50)
    found = search(http, k=50, mode="lexical")
    assert ids(found) == expected.ids[0] and 0 < len(ids(found)) < len(mindscape.chunks)
    np.testing.assert_allclose(scores(found), expected.scores[0], rtol=1e-6)
    assert found["signature"] is None
    assert search(http, query="zebra", mode="lexical")["hits"] == []


def session_texts(mindscape: Mindscape) -> list[str]:
    texts = {chunk.id: chunk.text for chunk in mindscape.chunks}
    return ["\n".join(texts[i] for i in session.chunk_ids) for session in mindscape.sessions]


def test_lexical_sessions_are_one_text_each(http: httpx.Client, mindscape: Mindscape) -> None:
    expected = BM25Index([s.id for s in mindscape.sessions], session_texts(mindscape)).search([QUERY], 4)
    found = search(http, k=4, mode="lexical", target="sessions")
    assert ids(found) == expected.ids[0]
    np.testing.assert_allclose(scores(found), expected.scores[0], rtol=1e-6)


@pytest.mark.parametrize("target", ["chunks", "sessions"])
@pytest.mark.parametrize("signature", ["none", "coverage"])
def test_fused_search_mixes_z_scores_of_all_candidates(
    http: httpx.Client, library: Retriever, target: str, signature: str
) -> None:
    mindscape = library.mindscape
    hits = library.search([QUERY], 100, signature).hits
    dense = np.empty(len(mindscape.chunks))
    dense[hits.rows[0]] = hits.scores[0]
    names, texts = [c.id for c in mindscape.chunks], [c.text for c in mindscape.chunks]
    if target == "sessions":
        dense, names, texts = (
            naive_sessions(mindscape, dense),
            [s.id for s in mindscape.sessions],
            session_texts(mindscape),
        )
    lexical = BM25Index(names, texts).scores([QUERY])[0].astype(float)
    sides = [(side - side.mean()) / side.std() for side in (lexical, dense)]
    alpha = sides[0].max() / (sides[0].max() + sides[1].max())
    mixed = alpha * sides[0] + (1 - alpha) * sides[1]
    found = search(http, k=6, mode="fused", target=target, signature=signature, explain=True)
    assert found["explanation"]["alpha"] == pytest.approx(alpha, abs=1e-4)
    assert found["explanation"]["alpha"] == pytest.approx(
        float(fusion.adaptive_alpha(lexical[None], dense[None])[0]), abs=1e-4
    )
    np.testing.assert_allclose(scores(found), np.sort(mixed)[::-1][:6], atol=1e-3)
    assert ids(found) == naive_order(names, mixed.round(4))[:6]


@pytest.mark.parametrize("target", ["chunks", "sessions"])
@pytest.mark.parametrize("encoder", ["e1", "e2"])
def test_an_explanation_adds_up(http: httpx.Client, library: Retriever, target: str, encoder: str) -> None:
    found = search(http, k=5, target=target, encoder=encoder, signature="coverage", explain=True)
    told, chosen, pool = found["explanation"], library.signatures([QUERY])[0], library.pools([QUERY])[0]
    mindscape = library.mindscape
    assert [entry["session_id"] for entry in told["pool"]] == [mindscape.sessions[row].id for row in pool.sessions]
    assert sum(entry["chunks"] for entry in told["pool"]) == len(pool.rows)
    assert told["pool"][0]["score"] == pytest.approx(float(pool.scores[0]), abs=1e-5)
    assert [pick["session_id"] for pick in told["picks"]] == list(chosen.session_ids)
    assert told["weights"] == list(DEFAULT_WEIGHTS)
    for pick in told["picks"]:
        assert pick["gain"] == pytest.approx(np.dot(pick["terms"], told["weights"]), abs=1e-5)
    before = search(http, k=5, target=target, encoder="e1", signature="none")
    assert [hit["id"] for hit in told["hits_before"]] == ids(before)
    np.testing.assert_allclose([hit["score"] for hit in told["hits_before"]], scores(before), atol=1e-6)
    assert set(told["scores"]) == {*ids(before), *ids(found)}
    for hit in found["hits"]:
        sides = told["scores"][hit.get("id") or hit["session_id"]]
        assert hit["score"] == pytest.approx(sides[encoder] + sides["prior"], abs=2e-6)
        assert (sides["prior"] > 0) == (encoder == "e1" and hit["session_id"] in chosen.session_ids)
    if target == "chunks":
        vectors = library.chunk_vectors(library.e1) @ library.e1.encode_queries([QUERY])[0]
        words = BM25Index([c.id for c in mindscape.chunks], [c.text for c in mindscape.chunks]).scores([QUERY])[0]
        for row, chunk in enumerate(mindscape.chunks):
            if chunk.id in told["scores"]:
                assert told["scores"][chunk.id]["e1"] == pytest.approx(float(vectors[row]), abs=1e-5)
                assert told["scores"][chunk.id]["lexical"] == pytest.approx(float(words[row]), rel=1e-5)


def test_without_explain_there_is_no_explanation(http: httpx.Client) -> None:
    assert search(http)["explanation"] is None


@pytest.mark.parametrize("mode", ["dense", "fused"])
@pytest.mark.parametrize("target", ["chunks", "sessions"])
def test_SRV_32_more_than_there_are_gives_all_once(
    http: httpx.Client, mindscape: Mindscape, mode: str, target: str
) -> None:
    found = ids(search(http, k=1000, mode=mode, target=target))
    everything = mindscape.chunks if target == "chunks" else mindscape.sessions
    assert sorted(found) == sorted(item.id for item in everything)


@pytest.mark.parametrize("mode", ["dense", "fused"])
def test_SRV_37_equal_scores_come_by_ascending_id(http: httpx.Client, mode: str) -> None:
    found = search(http, k=1000, mode=mode)
    place = {hit["id"]: i for i, hit in enumerate(found["hits"])}
    for book in BOOKS:  # chunks 09 and 10 have one text
        assert place[f"{book}-10"] == place[f"{book}-09"] + 1


def test_searches_at_once_answer_as_alone(http: httpx.Client, server: Running) -> None:
    bodies = [
        {"query": f"{WORDS[i % 12]} {WORDS[i * 5 % 12]}", "k": 1 + i % 4, "mode": ("dense", "fused", "lexical")[i % 3],
         "target": ("chunks", "sessions")[i % 2], "signature": ("none", "coverage", "first_k", None)[i % 4],
         "explain": i % 5 == 0}
        for i in range(24)
    ]  # fmt: skip
    alone = [http.post(f"/v1/collections/{NAME}/search", json=body).json() for body in bodies]

    async def crowd() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            asked = [client.post(f"/v1/collections/{NAME}/search", json=body) for body in bodies]
            return [answer.json() for answer in await asyncio.gather(*asked)]

    for one, other in zip(alone, asyncio.run(crowd()), strict=True):
        assert ids(one) == ids(other)
        np.testing.assert_allclose(scores(one), scores(other), atol=1e-4)
        assert (one["signature"] or {}).get("session_ids") == (other["signature"] or {}).get("session_ids")


def test_a_signature_is_the_librarys_with_its_own_size(http: httpx.Client, library: Retriever) -> None:
    small = Retriever(library.mindscape, library.e1, library.e2, k_sum=2, device="cpu", vectors=library.vectors)
    for path, extra in ((f"/v1/collections/{NAME}/signature", {}), ("/v1/signature", {"collection": NAME})):
        for mode in ("coverage", "first_k"):
            expected = library.signatures([QUERY], mode)[0]
            found = http.post(path, json={"query": QUERY, "mode": mode} | extra).json()
            assert found["session_ids"] == list(expected.session_ids) and len(found["session_ids"]) == 5
            assert found["summaries"] == list(expected.texts) and found["mode"] == mode
            np.testing.assert_allclose(found["gains"], expected.gains, atol=1e-5)
            np.testing.assert_allclose(found["terms"], expected.pick_terms, atol=1e-5)
            assert (
                found["pool"][0]["session_id"] == library.mindscape.sessions[library.pools([QUERY])[0].sessions[0]].id
            )
            two = http.post(path, json={"query": QUERY, "mode": mode, "k_sum": 2} | extra).json()
            assert two["session_ids"] == list(small.signatures([QUERY], mode)[0].session_ids)
    assert 1 <= len(http.post(path, json={"query": QUERY, "k_sum": "auto"} | extra).json()["session_ids"]) <= 11
    assert len(http.post(path, json={"query": QUERY} | extra).json()["session_ids"]) == 5  # its size did not stay


def test_an_empty_collection_has_no_hits(http: httpx.Client) -> None:
    http.post("/v1/collections", json={"id": "void"})
    for mode in ("dense", "lexical", "fused"):
        for target in ("chunks", "sessions"):
            body = {"query": QUERY, "mode": mode, "target": target, "explain": True}
            answer = http.post("/v1/collections/void/search", json=body)
            assert answer.status_code == 200 and answer.json()["hits"] == [], answer.text
    for size, says in ((0, "greater than"), (65, "less than"), ("all", "'auto'"), (True, "integer"), ([], "'auto'")):
        answer = http.post("/v1/collections/void/signature", json={"query": QUERY, "k_sum": size})
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    answer = http.post("/v1/collections/void/signature", json={"query": QUERY, "k_sum": 3.0})
    assert answer.status_code == 200 and answer.json()["summaries"] == answer.json()["pool"] == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "query"),
        ({"query": ""}, "query"),
        ({"query": "  "}, "empty text"),
        ({"query": 7}, "query"),
        ({"query": ["a"]}, "query"),
        ({"query": "a\x00"}, "NUL"),
        ({"query": "a" * 10**6}, "32768"),
        ({"query": "boat " * 200}, "too long|tokens"),
        ({"query": "q", "k": 0}, "k"),
        ({"query": "q", "k": 1001}, "k"),
        ({"query": "q", "k": "many"}, "k"),
        ({"query": "q", "k": True}, "k"),
        ({"query": "q", "mode": "vector"}, "'dense', 'lexical' or 'fused'"),
        ({"query": "q", "target": "books"}, "'chunks' or 'sessions'"),
        ({"query": "q", "signature": "best"}, "'none', 'coverage' or 'first_k'"),
        ({"query": "q", "signature": 3}, "a list of summaries"),
        ({"query": "q", "signature": [""]}, "signature"),
        ({"query": "q", "signature": ["a\x00"]}, "NUL"),
        ({"query": "q", "signature": ["a"] * 65}, "64"),
        ({"query": "q", "encoder": "e3"}, "'e1' or 'e2'"),
        ({"query": "q", "explain": "perhaps"}, "explain"),
        ({"query": "q", "top_k": 3}, "top_k"),
    ],
)
def test_a_wrong_search_is_refused_with_the_reason(http: httpx.Client, body: dict[str, Any], says: str) -> None:
    answer = http.post(f"/v1/collections/{NAME}/search", json=body)
    assert answer.status_code in (400, 413), answer.text
    assert any(part in answer.json()["error"]["message"] for part in says.split("|")), answer.text


def test_without_an_e2_a_signature_is_a_prior(
    client: Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]], tiny_bert: Path
) -> None:
    async def ask() -> None:
        async with client(e2=None) as http:
            await http.post("/v1/collections", json={"id": NAME})
            for book in BOOKS:
                body = {"chunks": passages(book), "book_id": book}
                await http.post(f"/v1/collections/{NAME}/chunks", json=body)
            mindscape = http.app.state.services.collections.get(NAME).snapshot.mindscape  # type: ignore[attr-defined]
            library = Retriever(mindscape, Encoder.load(tiny_bert, "cpu"), device="cpu")
            for signature, prior in ((None, None), ("coverage", 0.1)):
                expected = library.search([QUERY], 9, signature, None, prior)
                asked = {"query": QUERY, "k": 9, "signature": signature, "explain": True}
                found = (await http.post(f"/v1/collections/{NAME}/search", json=asked)).json()
                assert ids(found) == expected.hits.ids[0]
                np.testing.assert_allclose(scores(found), expected.hits.scores[0], atol=1e-5)
                assert (found["signature"] is None) == (signature is None)
                assert all(sides["e2"] is None for sides in found["explanation"]["scores"].values())
            body = {"query": QUERY, "encoder": "e2"}
            refused = await http.post(f"/v1/collections/{NAME}/search", json=body)
            assert refused.status_code == 400 and "no E2" in refused.json()["error"]["message"]
            body = {"query": QUERY, "documents": ["a"], "signature": ["s"]}
            refused = await http.post("/v1/rerank", json=body)
            assert refused.status_code == 400 and "no E2" in refused.json()["error"]["message"]

    asyncio.run(ask())


def test_what_is_written_and_searched_counts_against_the_tokens_of_a_minute(
    client: Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]],
) -> None:
    async def ask() -> None:
        async with client(limits={"tokens_per_minute": 300}) as http:
            await http.post("/v1/collections", json={"id": NAME})
            path = f"/v1/collections/{NAME}"
            few = {"chunks": [{"id": "a", "text": "boat"}], "book_id": "b"}
            assert (await http.post(f"{path}/chunks", json=few)).status_code == 201
            statuses = [(await http.post(f"{path}/search", json={"query": QUERY})).status_code for _ in range(40)]
            # A search costs tens of tokens here, so the first go through and the last do not.
            assert statuses[0] == 200 and statuses[-1] == 429 and statuses == sorted(statuses)
        async with client(limits={"tokens_per_minute": 300}) as http:
            await http.post("/v1/collections", json={"id": NAME})
            many = {"chunks": passages("tide") + passages("mill"), "book_id": "b"}
            assert (await http.post(f"{path}/chunks", json=many)).status_code == 201
            refused = await http.post(f"{path}/search", json={"query": QUERY})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1

    asyncio.run(ask())
