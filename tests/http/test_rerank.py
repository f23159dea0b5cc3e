"""Rerank over HTTP against the cosines of the encoders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mia_serve.core import Encoder
from tests.http.conftest import SIGNATURE, Running

QUERY = "Who counted the lamps?"
DOCUMENTS = [
    "She kept the ledger under the floor.",
    "The ferryman counted the lamps along the quay.",
    "他在码头上找到了那本账。",
    "She kept the ledger under the floor.",
]


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def encoders(tiny_bert: Path, tiny_qwen3: Path) -> tuple[Encoder, Encoder]:
    return Encoder.load(tiny_bert, "cpu"), Encoder.load(tiny_qwen3, "cpu")


def rerank(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("signature", [None, [], SIGNATURE])
def test_scores_are_cosines_of_the_encoder_that_reads_what_is_given(
    http: httpx.Client, encoders: tuple[Encoder, Encoder], signature: list[str] | None
) -> None:
    encoder = encoders[1] if signature else encoders[0]
    query = encoder.encode_queries([QUERY], [signature] if signature else None)[0]
    cosines = encoder.encode_documents(DOCUMENTS) @ query
    found = rerank(http, signature=signature)
    assert [result["index"] for result in found["results"]] == sorted(range(4), key=lambda i: (-cosines[i].round(5), i))
    for result in found["results"]:
        assert result["relevance_score"] == pytest.approx(float(cosines[result["index"]]), abs=1e-5)
        assert "document" not in result  # clients take null for one
    order = [result["index"] for result in found["results"]]
    assert order.index(3) == order.index(0) + 1  # the same text: by index
    assert found["model"] == ("tiny-qwen3" if signature else "tiny-bert") and found["id"]
    sequences = [*encoder.tokenise_query(QUERY, signature), *map(encoder.tokenise_document, DOCUMENTS)]
    assert found["usage"]["total_tokens"] == sum(len(sequence.ids) for sequence in sequences)


def test_a_signature_changes_the_scores(http: httpx.Client) -> None:
    plain, other = (rerank(http, signature=[summary])["results"] for summary in SIGNATURE)
    assert not np.allclose([r["relevance_score"] for r in plain], [r["relevance_score"] for r in other], atol=1e-4)


def test_documents_may_be_objects_and_come_back_when_asked_for(http: httpx.Client) -> None:
    objects = [{"text": DOCUMENTS[0], "title": "ignored"}, DOCUMENTS[1], {"text": DOCUMENTS[2]}, {"text": DOCUMENTS[3]}]
    found = rerank(http, documents=objects, return_documents=True, top_n=3)
    plain = rerank(http)
    assert [(r["index"], r["relevance_score"]) for r in found["results"]] == [
        (r["index"], pytest.approx(r["relevance_score"], abs=1e-6)) for r in plain["results"][:3]
    ]
    assert all(r["document"] == {"text": DOCUMENTS[r["index"]]} for r in found["results"])
    assert found["usage"] == plain["usage"]


def test_keys_of_other_clients_are_ignored_and_top_n_may_be_more_than_there_are(http: httpx.Client) -> None:
    # What Cohere's and Jina's clients send beside the common keys.
    found = rerank(
        http, model="rerank-v3.5", top_n=99.0, max_tokens_per_doc=4096, truncation=True, return_documents=None
    )
    assert len(found["results"]) == 4


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"query": ""}, 400, "query"),
        ({"query": "a\x00"}, 400, "NUL"),
        ({"query": "a" * 10**6}, 400, "32768"),
        ({"documents": []}, 400, "documents"),
        ({"documents": "a"}, 400, "documents"),
        ({"documents": [3]}, 400, "give a string"),
        ({"documents": [" "]}, 400, "empty text"),
        ({"documents": [{"txt": "a"}]}, 400, "text"),
        ({"documents": ["a\x00"]}, 400, "NUL"),
        ({"documents": ["a"] * 2049}, 413, "2048"),
        ({"documents": ["a", "boat " * 400]}, 413, "tokens"),
        ({"top_n": 0}, 400, "top_n"),
        ({"top_n": "two"}, 400, "top_n"),
        ({"top_n": True}, 400, "top_n"),
        ({"signature": "one"}, 400, "signature"),
        ({"signature": ["boat " * 4001]}, 400, "20000"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(
    http: httpx.Client, body: dict[str, Any], status: int, says: str
) -> None:
    answer = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS} | body)
    assert answer.status_code in (status, 413), answer.text
    assert says in answer.json()["error"]["message"], answer.text


def test_a_query_that_is_too_long_is_told_in_words_of_the_protocol(http: httpx.Client) -> None:
    error = http.post("/v1/rerank", json={"query": "boat " * 600, "documents": DOCUMENTS}).json()["error"]
    assert error["code"] == "too_long" and error["param"] is None
    assert error["message"].endswith("; shorten it") and "truncate" not in error["message"]
