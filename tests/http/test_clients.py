"""Clients that people already have, unchanged, against a server that listens."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import SecretStr

from mia_serve.core import Encoder
from tests.http.conftest import Running

TEXTS = [
    "The ferryman counted the lamps along the quay and found one missing.",
    "潮水退去以后，他在码头上找到了那本账。",
    "She kept the ledger under the floor. " * 12,
    "x",
    "Say [SEP] or <|endoftext|>: a text stays a text.",
]
QUERY = "Where was the ledger?"


@pytest.fixture(scope="module")
def e1(tiny_bert: Any) -> Encoder:
    return Encoder.load(tiny_bert, device="cpu")


@pytest.fixture(scope="module")
def e2(tiny_qwen3: Any) -> Encoder:
    return Encoder.load(tiny_qwen3, device="cpu")


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


def close(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), expected, atol=2e-6)


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}], ids=["default", "float"])
def test_openai_gets_the_encoders_vectors(client: openai.OpenAI, e1: Encoder, form: dict[str, Any]):
    answer = client.embeddings.create(model="e1", input=TEXTS, **form)
    close([row.embedding for row in answer.data], e1.encode_documents(TEXTS))
    assert [row.index for row in answer.data] == list(range(len(TEXTS))) and answer.model == "e1"
    tokens = sum(len(e1.tokenise_document(text).ids) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens


def test_openai_asked_for_base64_gets_float32(client: openai.OpenAI, e1: Encoder):
    answer = client.embeddings.create(model="tiny-bert", input=TEXTS[0], encoding_format="base64")
    raw: Any = answer.data[0].embedding
    close(np.frombuffer(base64.b64decode(raw), "<f4"), e1.encode_documents(TEXTS[:1])[0])


def test_openai_may_send_token_ids(client: openai.OpenAI, e1: Encoder):
    ids = e1.tokenizer(TEXTS[:2], add_special_tokens=False)["input_ids"]
    answer = client.embeddings.create(model="e1", input=ids)
    close([row.embedding for row in answer.data], e1.encode_documents(TEXTS[:2]))


def test_openai_reaches_queries_and_signatures_by_extra_body(client: openai.OpenAI, e2: Encoder):
    signature = ["The lamps are counted.", "The ledger is under the floor."]
    extra = {"input_type": "query", "signature": signature}
    answer = client.embeddings.create(model="e2", input=QUERY, extra_body=extra)
    close(answer.data[0].embedding, e2.encode_queries([QUERY], [signature])[0])
    plain = client.embeddings.create(model="e2", input=QUERY, extra_body={"input_type": "query"})
    close(plain.data[0].embedding, e2.encode_queries([QUERY])[0])
    assert np.abs(np.array(plain.data[0].embedding) - answer.data[0].embedding).max() > 1e-3


def test_openai_many_at_once(server: Running, e1: Encoder):
    texts = [f"lamp {i} " * (1 + i % 20) for i in range(64)]
    expected = e1.encode_documents(texts)

    async def all_of_them() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(client.embeddings.create(model="e1", input=text) for text in texts))

    close([answer.data[0].embedding for answer in asyncio.run(all_of_them())], expected)


def test_openai_knows_our_errors_and_models(client: openai.OpenAI):
    assert {"e1", "e2", "tiny-bert", "tiny-qwen3"} <= {model.id for model in client.models.list()}
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="nothing", input="a")
    assert caught.value.code and "e1" in str(caught.value.message)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="e1", input=[])


def test_langchain(server: Running, e1: Encoder):
    from langchain_openai import OpenAIEmbeddings

    # Without this it sends token ids of OpenAI's own tokenizer, to whatever model; its documentation says so too.
    made = OpenAIEmbeddings(
        model="e1", base_url=server.url + "/v1", api_key=SecretStr("none"), check_embedding_ctx_length=False
    )
    close(made.embed_documents(TEXTS), e1.encode_documents(TEXTS))
    close(made.embed_query(QUERY), e1.encode_documents([QUERY])[0])
    close(asyncio.run(made.aembed_documents(TEXTS)), e1.encode_documents(TEXTS))


def test_llama_index(server: Running, e1: Encoder):
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    made = OpenAILikeEmbedding(model_name="e1", api_base=server.url + "/v1", api_key="none", embed_batch_size=2)
    # It turns line breaks into blanks before it sends.
    close(made.get_text_embedding_batch(TEXTS), e1.encode_documents(TEXTS))
    close(made.get_query_embedding(QUERY), e1.encode_documents([QUERY])[0])
    close(asyncio.run(made.aget_query_embedding(QUERY)), e1.encode_documents([QUERY])[0])
