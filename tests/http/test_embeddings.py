"""`/v1/embeddings` against the encoder itself, and against hand-made numbers."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mia_serve.core import Encoder
from tests.http.conftest import SIGNATURE, Running

TEXTS = ["The ferryman counted the lamps.", "a b c", "码头上的账本", "x"]


@pytest.fixture(scope="module")
def e1(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert, device="cpu")


@pytest.fixture(scope="module")
def e2(tiny_qwen3: Path) -> Encoder:
    return Encoder.load(tiny_qwen3, device="cpu")


def embed(server: Running, **keys: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json={"model": "e1"} | keys)


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    record = answer.json()
    assert record["object"] == "list"
    assert [item["index"] for item in record["data"]] == list(range(len(record["data"])))
    return np.array([item["embedding"] for item in record["data"]], np.float32)


def refusal(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_vectors_are_the_encoders(server: Running, e1: Encoder, e2: Encoder):
    np.testing.assert_allclose(vectors(embed(server, input=TEXTS)), e1.encode_documents(TEXTS), atol=1e-5)
    np.testing.assert_allclose(vectors(embed(server, input=TEXTS[0])), e1.encode_documents(TEXTS[:1]), atol=1e-5)
    query = vectors(embed(server, input=TEXTS, input_type="query", model="e2"))
    np.testing.assert_allclose(query, e2.encode_queries(TEXTS), atol=1e-5)


@pytest.mark.parametrize("name", ["e1", "tiny-bert"])
def test_a_model_has_two_names(server: Running, name: str):
    assert embed(server, input="x", model=name).json()["model"] == name


def test_an_unknown_model_is_named_with_those_there_are(server: Running):
    message = refusal(embed(server, input="x", model="gpt-4"), 404)
    assert "'gpt-4'" in message and "e1" in message and "tiny-qwen3" in message


def test_token_ids_are_encoded_as_their_text_is(server: Running, e1: Encoder):
    ids = [e1.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    expected = e1.encode_documents(TEXTS)
    np.testing.assert_allclose(vectors(embed(server, input=ids)), expected, atol=1e-5)
    np.testing.assert_allclose(vectors(embed(server, input=ids[0])), expected[:1], atol=1e-5)


def test_base64_is_little_endian_float32(server: Running):
    plain = vectors(embed(server, input=TEXTS))
    packed = embed(server, input=TEXTS, encoding_format="base64").json()["data"]
    rows = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed]
    np.testing.assert_array_equal(np.stack(rows), plain)


@pytest.mark.parametrize("signature", [SIGNATURE, SIGNATURE[0], [SIGNATURE] * 4, [SIGNATURE, None, [], [SIGNATURE[1]]]])
def test_a_signature_is_shared_or_each_texts_own(server: Running, e2: Encoder, signature: Any):
    each = signature if isinstance(signature, list) and not isinstance(signature[0], str) else [signature] * 4
    expected = e2.encode_queries(TEXTS, each)
    found = vectors(embed(server, input=TEXTS, input_type="query", model="e2", signature=signature))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found[0] - e2.encode_queries(TEXTS[:1])[0]).max() > 1e-3, "the signature changes the query"


def test_a_signature_of_documents_is_refused(server: Running):
    assert "input_type" in refusal(embed(server, input="x", signature=SIGNATURE))
    assert "3 entries for 1 texts" in refusal(embed(server, input="x", input_type="query", signature=[None] * 3))


def test_SRV_16_usage_counts_every_token_of_the_template(server: Running, e1: Encoder):
    usage = embed(server, input="a b c").json()["usage"]
    expected = len(e1.tokenizer("a b c")["input_ids"])
    assert usage == {"prompt_tokens": expected, "total_tokens": expected} and expected == 5
    assert embed(server, input=["a b c"]).json()["usage"] == usage
    assert embed(server, input=["a b c"] * 3).json()["usage"]["total_tokens"] == 15


async def test_SRV_14_dimensions_are_cut_then_made_unit(client, tiny_bert: Path, tmp_path: Path):
    encoder = Encoder.load(tiny_bert, device="cpu", matryoshka=(16, 8))
    encoder.save(tmp_path)
    whole = encoder.encode_documents(TEXTS)
    async with client(e1={"model": str(tmp_path), "device": "cpu"}, e2=None) as http:
        for width in (32, 16, 8):
            answer = await http.post("/v1/embeddings", json={"model": "e1", "input": TEXTS, "dimensions": width})
            found = vectors(answer)
            expected = whole[:, :width] / np.linalg.norm(whole[:, :width], axis=1, keepdims=True)
            np.testing.assert_allclose(found, expected, atol=1e-5)
        wrong = await http.post("/v1/embeddings", json={"model": "e1", "input": TEXTS, "dimensions": 12})
        assert "32, 16, 8" in refusal(wrong)
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["dimensions"]) for model in listed] == [
            ("e1", [32, 16, 8]), (tmp_path.name, [32, 16, 8])
        ]  # fmt: skip


def test_SRV_14_a_model_of_one_width_takes_that_alone(server: Running):
    assert vectors(embed(server, input="x", dimensions=32)).shape == (1, 32)
    assert "may have: 32" in refusal(embed(server, input="x", dimensions=16))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "input[0] is empty"),
        (["a", ""], "input[1] is empty"),
        ([], "empty list"),
        ([[1, 2], []], "input[1] is empty"),
        (["a", 1], "input[1] is a number"),
        ([["a"]], "input[0] holds a string"),
        ([1, -1], "input[0] holds -1"),
        ([1, 10**30], "token ids are integers"),
        ([True], "input[0] is a boolean"),
        ([1.5], "input[0] holds 1.5"),
        (None, "input must be"),
        ({"text": "a"}, "input must be"),
        (7, "input must be"),
        (["a\x00b"], "NUL"),
        (["a"] * 2049, "at most 2048"),
    ],
)
def test_a_wrong_input_is_named(server: Running, given: Any, told: str):
    answer = embed(server, input=given)
    assert told in refusal(answer)
    assert answer.json()["error"]["param"].startswith("input")


def test_a_text_longer_than_the_model_is_refused_and_named(server: Running):
    message = refusal(embed(server, input=["short", "quay " * 500]), 413)
    assert "document 1 has 500 tokens" in message and "128" in message


async def test_a_lower_limit_of_tokens_holds_for_queries_too(client):
    async with client(limits={"tokens_per_text": 20}) as http:
        for kind, words, status in (
            ("document", 18, 200),
            ("document", 19, 413),
            ("query", 18, 200),
            ("query", 19, 413),
        ):
            asked = {"model": "e1", "input": "quay " * words, "input_type": kind}
            assert (await http.post("/v1/embeddings", json=asked)).status_code == status, (kind, words)


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "16"}, "dimensions"),
        ({"input_type": "passage"}, "input_type"),
        ({"model": ""}, "model"),
        ({"input_type": "query", "signature": 3}, "signature"),
        ({"input_type": "query", "signature": [[1]]}, "signature"),
        ({"input_type": "query", "signature": ["s"] * 65}, "signature"),
    ],
)
def test_a_wrong_option_is_named(server: Running, keys: dict[str, Any], param: str):
    answer = embed(server, input="x", **keys)
    assert refusal(answer) and answer.json()["error"]["param"] == param


def test_keys_of_other_clients_are_ignored(server: Running):
    assert embed(server, input="x", user="me", truncate="END", extra={"a": 1}).status_code == 200


def test_the_openai_client_gets_the_same_vectors(server: Running, e1: Encoder):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        found = api.embeddings.create(model="e1", input=TEXTS)
        np.testing.assert_allclose([row.embedding for row in found.data], e1.encode_documents(TEXTS), atol=1e-5)
        assert {model.id for model in api.models.list()} == {"e1", "e2", "tiny-bert", "tiny-qwen3"}
        with pytest.raises(openai.BadRequestError, match="is empty"):
            api.embeddings.create(model="e1", input=[""])
