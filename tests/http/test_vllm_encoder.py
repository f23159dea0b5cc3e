"""The encoder behind a real vLLM pooling server, beside the one in this process."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from mia_serve.core import Encoder, MiaError, Sequence
from mia_serve.core.load import load_parts, load_text_parts
from mia_serve.http.queue import EncodeQueue
from mia_serve.http.queued_encoder import QueuedEncoder
from mia_serve.http.vllm_encoder import VllmEncoder
from mia_serve.llm import Engine, LlmFailed
from tests.conftest import _bpe

POOLING = ("--runner", "pooling", "--max-model-len", "1024", "--max-num-batched-tokens", "2048")
LIMITS = {"max_query_tokens": 1024, "max_document_tokens": 1024}
TEXTS = [
    "The ferryman counted the lamps along the quay and found one missing.",
    "潮水退去以后，他在码头上找到了那本账。",
    "x",
    "Say <|endoftext|> aloud, or <|im_end|>; it is a text.",
    "She kept the ledger under the floor. " * 60,
] * 5
SIGNATURES: list[Any] = [
    ["The boat is gone.", "The key lies under the clock."],
    None,
    ["A quay."],
    [],
    "A village.",
] * 5


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 like `tiny_qwen3`, with heads as wide as vLLM's attention for CPUs knows."""
    return make_qwen3(tmp_path_factory.mktemp("qwen3"))


def make_qwen3(folder: Path) -> Path:
    tokenizer = _bpe("<|endoftext|>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, initializer_range=0.2,
    )  # fmt: skip
    Qwen3Model(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def local(qwen3: Path) -> Encoder:
    return Encoder.load(qwen3, device="cpu", **LIMITS)


@pytest.fixture(scope="module")
def pooling_server(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if "MIA_VLLM_PYTHON" not in os.environ:
        pytest.skip("MIA_VLLM_PYTHON names no vLLM environment; scripts/setup_vllm_cpu.sh makes one")
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with Engine(qwen3, name="tiny", arguments=POOLING, log=log, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def remote(qwen3: Path, pooling_server: Engine) -> Iterator[VllmEncoder]:
    encoder = VllmEncoder.load(qwen3, pooling_server.url, spec=LIMITS)
    yield encoder
    encoder.close()


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    return (a * b).sum(axis=1)


class StandIn(http.server.ThreadingHTTPServer):
    """A pooling server for what the real one does not do on demand: it reads last tokens with the local encoder.

    Attributes:
        asked: The lists of token ids that came, one a request.
        busy: Most requests that were under way at a time.
        fail: Statuses to answer with before anything else.
        spoil: Changes the rows of an answer.
    """

    daemon_threads = True

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.encoder, self.asked, self.fail = encoder, list[list[list[int]]](), list[int]()
        self.spoil: Callable[[list[dict[str, Any]]], Any] = list
        self.lock, self.under_way, self.busy, self.delay = threading.Lock(), 0, 0, 0.0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.models = [{"id": "org/model", "max_model_len": 1024}]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        self.answer(200, {"data": self.server.models})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        own = self.server
        with own.lock:
            if own.fail:
                self.answer(own.fail.pop(0), {"error": {"message": "not now"}})
                return
            own.asked.append(asked["input"])
            own.under_way += 1
            own.busy = max(own.busy, own.under_way)
            views = own.encoder.embed_sequences([Sequence(i, {"v": (len(i) - 1, len(i))}) for i in asked["input"]])
        time.sleep(own.delay)
        rows = [
            {"index": at, "embedding": base64.b64encode((3 * found["v"]).astype("<f4").tobytes()).decode()}
            for at, found in enumerate(views)
            if found is not None
        ]
        with own.lock:
            own.under_way -= 1
        self.answer(200, {"data": own.spoil(rows[::-1]), "model": asked["model"], "object": "list"})

    def answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stand_in(local: Encoder) -> Iterator[StandIn]:
    with StandIn(local) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture
def behind(qwen3: Path, stand_in: StandIn) -> Iterator[VllmEncoder]:
    encoder = VllmEncoder.load(qwen3, stand_in.url, spec=LIMITS, concurrency=3, max_retries=2)
    stand_in.asked.clear()
    yield encoder
    encoder.close()


def test_a_query_is_asked_for_up_to_its_end_and_then_with_its_signature(
    local: Encoder, behind: VllmEncoder, stand_in: StandIn
):
    signature = ["The boat is gone.", "The key lies under the clock."]
    found = behind.encode_queries(["Where is the boat?"], [signature])
    np.testing.assert_allclose(found, local.encode_queries(["Where is the boat?"], [signature]), atol=1e-6)
    (sequence,) = local.tokenise_query("Where is the boat?", signature)
    end = sequence.spans["query"][1]
    node = sequence.spans["node"][1]
    assert [ids for request in stand_in.asked for ids in request] == [
        sequence.ids[:end], sequence.ids[:node], sequence.ids
    ]  # fmt: skip
    assert sequence.ids[end - 1] == local.tokenizer.convert_tokens_to_ids("<|endoftext|>")


def test_no_weights_are_needed(qwen3: Path, local: Encoder, stand_in: StandIn, tmp_path: Path):
    for file in qwen3.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(MiaError, match="its model cannot be read"):
        Encoder.load(tmp_path)
    encoder = VllmEncoder.load(tmp_path, stand_in.url, spec=LIMITS)
    np.testing.assert_allclose(encoder.encode_documents(TEXTS[:5]), local.encode_documents(TEXTS[:5]), atol=1e-6)
    with pytest.raises(MiaError, match="copy the folder"):
        encoder.save(tmp_path / "saved")
    encoder.close()


def test_spec_and_tokenizer_without_weights_are_those_with_them(qwen3: Path, tiny_bert: Path, tiny_xlmr: Path):
    for folder in (qwen3, tiny_bert, tiny_xlmr):
        _, tokenizer, spec = load_parts(str(folder), torch.float32, {"alpha": 0.25})
        light, light_spec = load_text_parts(str(folder), {"alpha": 0.25})
        assert light_spec == spec and light.get_vocab() == tokenizer.get_vocab()


def test_few_requests_are_under_way_and_all_texts_come_back(local: Encoder, behind: VllmEncoder, stand_in: StandIn):
    stand_in.delay = 0.02
    texts = [f"{i} " + "lamp " * (i * 7 % 200) for i in range(300)]
    np.testing.assert_allclose(behind.encode_documents(texts), local.encode_documents(texts), atol=2e-6)
    assert 1 < stand_in.busy <= 3
    assert max(sum(map(len, request)) for request in stand_in.asked) <= 8192 and len(stand_in.asked) > 3


def test_a_server_that_is_busy_is_asked_again_and_one_that_fails_is_told(behind: VllmEncoder, stand_in: StandIn):
    stand_in.fail = [503, 429]
    assert behind.encode_documents(["a"]).shape == (1, 128)
    stand_in.fail = [500] * 3
    with pytest.raises(LlmFailed, match="answered 500") as caught:
        behind.encode_documents(["a"])
    assert caught.value.transient
    assert behind.encode_documents(["a"]).shape == (1, 128), "and the next one works"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rows: rows[1:], r"0 vectors of width \[\] for 1 texts of a model that is 128 wide"),
        (lambda rows: [rows[0] | {"embedding": rows[0]["embedding"][:64]}], r"width \[12\]"),
        (lambda rows: [rows[0] | {"embedding": "!!"}], "Error in its embeddings"),
        (lambda rows: [rows[0] | {"embedding": [0.5] * 128}], "Error in its embeddings"),
        (lambda rows: "none", "Error in its embeddings"),
    ],
)
def test_an_answer_that_is_none_is_never_a_vector(behind: VllmEncoder, stand_in: StandIn, spoil: Any, said: str):
    stand_in.spoil = spoil
    with pytest.raises(LlmFailed, match=said) as caught:
        behind.encode_documents(["a"])
    assert caught.value.reason == "bad response"


def test_nan_is_told(behind: VllmEncoder, stand_in: StandIn):
    broken = base64.b64encode(np.full(128, np.nan, "<f4").tobytes()).decode()
    stand_in.spoil = lambda rows: [row | {"embedding": broken} for row in rows]
    with pytest.raises(RuntimeError, match="NaN"):
        behind.encode_documents(["a"])


def test_a_wrong_server_is_noticed_at_the_start(qwen3: Path, tiny_bert: Path, stand_in: StandIn):
    with pytest.raises(MiaError, match=r"backend vllm is for models that are read at last tokens.*'mean'"):
        VllmEncoder.load(tiny_bert, stand_in.url)
    stand_in.fail = [404]
    with pytest.raises(MiaError, match=r"does not embed with 'org/model'.*--runner pooling"):
        VllmEncoder.load(qwen3, stand_in.url, spec=LIMITS)
    with pytest.raises(MiaError, match="for 1024 tokens, the encoder takes 2048; start it with --max-model-len 2048"):
        VllmEncoder.load(qwen3, stand_in.url, spec={"max_query_tokens": 2048})
    stand_in.models.append({"id": "other", "max_model_len": 1024})
    with pytest.raises(MiaError, match="serves 'org/model', 'other', not"):
        VllmEncoder.load(qwen3, stand_in.url, spec=LIMITS)
    VllmEncoder.load(qwen3, stand_in.url, served="other", spec=LIMITS).close()
    with pytest.raises(LlmFailed, match="is it up"):
        VllmEncoder.load(qwen3, "http://127.0.0.1:9/v1", spec=LIMITS)


def test_other_names_have_other_hashes_and_a_closed_encoder_says_so(qwen3: Path, stand_in: StandIn):
    stand_in.models.append({"id": "other", "max_model_len": 1024})
    first, second = (VllmEncoder.load(qwen3, stand_in.url, served=m["id"], spec=LIMITS) for m in stand_in.models)
    assert first.spec_hash != second.spec_hash and len(first.spec_hash) == 16
    for encoder in (first, second, first):
        encoder.close()
    with pytest.raises(RuntimeError, match="closed"):
        first.encode_documents(["a"])


def test_it_works_behind_the_queue(local: Encoder, behind: VllmEncoder):
    queue = EncodeQueue(behind)
    queue.start()
    queued = QueuedEncoder(behind, queue)
    texts, signatures = TEXTS[:4], SIGNATURES[:4]
    found = asyncio.run(queued.encode_queries_async(texts, signatures))
    np.testing.assert_allclose(found.vectors, local.encode_queries(texts, signatures), atol=1e-6)
    queue.close()


@pytest.mark.vllm
def test_SRV_21_documents_and_views_are_those_of_the_encoder_in_this_process(local: Encoder, remote: VllmEncoder):
    assert cosines(remote.encode_documents(TEXTS), local.encode_documents(TEXTS)).min() > 0.999
    ours, theirs = local.encode_views(TEXTS, SIGNATURES), remote.encode_views(TEXTS, SIGNATURES)
    for view in ours._fields:
        assert cosines(getattr(theirs, view), getattr(ours, view)).min() > 0.999, view
    assert cosines(ours.query, ours.chunk).min() < 0.99, "or the views could not be told apart"
    for alpha in (None, 0.0, 1.0):
        queries = [encoder.encode_queries(TEXTS, SIGNATURES, alpha) for encoder in (local, remote)]
        assert cosines(*queries).min() > 0.999


@pytest.mark.vllm
def test_SRV_20_a_text_as_long_as_the_model_goes_whole_and_a_longer_one_is_cut_here(
    local: Encoder, remote: VllmEncoder
):
    texts = ["ferryman " * n for n in (400, 3000)]
    assert len(remote.text.document(texts[1]).ids) == 1024
    assert cosines(remote.encode_documents(texts), local.encode_documents(texts)).min() > 0.999


@pytest.mark.vllm
def test_the_prefix_cache_pays_for_the_query_so_that_only_the_signature_is_new(
    remote: VllmEncoder, pooling_server: Engine
):
    def cached() -> float:
        with urllib.request.urlopen(pooling_server.url.removesuffix("/v1") + "/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    query = "Where has the boat gone, and who has seen the lamp that is missing from the quay? " * 4
    tokens = len(remote.text.query(query)[0].ids)
    before = cached()
    remote.encode_queries([query], [["The ferryman knows.", "Nobody says."]])
    assert cached() - before > 0.8 * tokens


@pytest.mark.vllm
def test_many_texts_at_once_come_back_in_order(local: Encoder, remote: VllmEncoder):
    texts = [f"{i} " + "lamp " * (i % 37) for i in range(300)]
    expected = local.encode_documents(texts)
    assert ((remote.encode_documents(texts) @ expected.T).argmax(axis=1) == np.arange(300)).mean() > 0.98
    assert cosines(remote.encode_documents(texts), expected).min() > 0.999


@pytest.mark.vllm
def test_cut_vectors_are_unit_vectors(qwen3: Path, local: Encoder, pooling_server: Engine):
    narrow = VllmEncoder.load(qwen3, pooling_server.url, spec=LIMITS | {"truncate_dim": 8})
    cut = local.encode_documents(TEXTS)[:, :8]
    expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    found = narrow.encode_documents(TEXTS)
    narrow.close()
    assert narrow.dim == 8 and cosines(found, expected).min() > 0.999
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
