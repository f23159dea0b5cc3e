"""What only a GPU can show: the same answers there. Run through scripts/check_gpu.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mia_serve.core import Encoder
from mia_serve.index import GpuOptions, SessionIndex
from mia_serve.signature import select_signature
from tests.conftest import CORPUS

pytestmark = pytest.mark.gpu

TEXTS = [*CORPUS[:4], "lamp " * 200, "a"] * 8


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_bert", "tiny_xlmr"])
def test_vectors_equal_those_of_the_cpu(name: str, request: pytest.FixtureRequest):
    folder: Path = request.getfixturevalue(name)
    cpu, cuda = Encoder.load(folder, device="cpu"), Encoder.load(folder, device="cuda", dtype="float32")
    assert np.abs(cpu.encode_documents(TEXTS) - cuda.encode_documents(TEXTS)).max() < 1e-4
    signatures = [["The lamp went out.", "A boat"]] * 4
    assert np.abs(cpu.encode_queries(TEXTS[:4], signatures) - cuda.encode_queries(TEXTS[:4], signatures)).max() < 1e-4
    half = Encoder.load(folder, device="cuda")
    assert next(half.model.parameters()).dtype == torch.bfloat16
    assert (half.encode_documents(TEXTS) * cpu.encode_documents(TEXTS)).sum(1).min() > 0.99


def test_SRV_09_device_memory_does_not_grow_with_the_number_of_texts(tiny_bert: Path):
    encoder = Encoder.load(tiny_bert, device="cuda")
    peaks = []
    for count in (2_000, 40_000):
        torch.cuda.reset_peak_memory_stats()
        encoder.encode_documents([f"the lamp {i % 97}" for i in range(count)])
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
@pytest.mark.parametrize("pooling", ["max", "topk", "mean", "early", "lme"])
def test_sessions_found_are_those_of_the_cpu(pooling: str, storage: str, tmp_path: Path):
    random = np.random.default_rng(1)
    vectors = random.standard_normal((3_000, 64)).astype(np.float32)
    vectors[2_000:] = vectors[:1_000]  # ties
    index = SessionIndex(64, "torch", "cpu")
    names = [f"c{i}" for i in range(len(vectors))]
    index.add(names, vectors, [f"s{i * 7 % 150}" for i in range(len(vectors))], [{"year": i % 3} for i in range(3_000)])
    index.delete(names[100:200])
    index.save(tmp_path / "index", storage)
    found = []
    for device in ("cpu", "cuda"):
        loaded = SessionIndex.load(tmp_path / "index", device=device)
        sessions = loaded.search_sessions(vectors[:50], 5, pooling, where={"year": [0, 1]})
        chunks = loaded.search(vectors[:50], 2_500)
        found.append((sessions.ids, sessions.best_chunk, chunks.ids, chunks.scores.tolist()))
    assert found[0] == found[1]


def test_faiss_on_gpus_finds_what_torch_finds():
    faiss = pytest.importorskip("faiss")
    if not hasattr(faiss, "StandardGpuResources"):
        pytest.skip("faiss-cpu is installed; this needs faiss-gpu")
    vectors = np.random.default_rng(2).standard_normal((5_000, 64)).astype(np.float32)
    names = [f"c{i}" for i in range(len(vectors))]
    found = []
    for backend, gpu in (("torch", None), ("faiss", GpuOptions()), ("faiss", GpuOptions(float16=True))):
        index = SessionIndex(64, backend, gpu=gpu)
        index.add(names, vectors, ["s"] * len(vectors))
        found.append([index.search(vectors[:20], k).ids for k in (10, 3_000)])
    assert found[0] == found[1] == found[2]


def test_search_and_greedy_choose_the_same_as_on_the_cpu():
    random = np.random.default_rng(0)
    vectors = random.standard_normal((3_000, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = [f"c{i}" for i in range(len(vectors))]
    found = []
    for device in ("cpu", "cuda"):
        index = SessionIndex(64, "torch", device)
        index.add(ids, vectors, [f"s{i // 20}" for i in range(len(vectors))])
        found.append((index.search(vectors[:50], 20).ids, index.search_sessions(vectors[:50], 5).ids))
    assert found[0] == found[1]
    units = torch.nn.functional.normalize(torch.randn(64, 50, 32), dim=2)
    sims = ((units[:, :1] @ units.transpose(1, 2))[:, 0], units @ units.transpose(1, 2), units @ units.transpose(1, 2))
    picks = [select_signature(*(s.to(device) for s in sims)).indices.cpu() for device in ("cpu", "cuda")]
    assert torch.equal(*picks)
