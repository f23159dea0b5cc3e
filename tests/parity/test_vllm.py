"""A merged folder served by vLLM's pooling runner gives the vectors of our own encoder.

vLLM lives in an environment of its own, whose interpreter ``MIA_VLLM_PYTHON`` names.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel, Qwen3Config, Qwen3Model

from mia_serve.core import Encoder
from mia_train.merge import merge_adapter
from mia_train.model import add_lora
from mia_train.schema import LoraSection

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif("MIA_VLLM_PYTHON" not in os.environ, reason="MIA_VLLM_PYTHON names no vLLM environment"),
]

DOCUMENTS = [
    "The ferryman counted the lamps along the quay and found one missing.",
    "潮水退去以后，他在码头上找到了那本账。",
    "key",
    "Nobody in the village would say where the boat had gone that night. " * 3,
]
QUERIES = ["Who hid the ledger?", "谁找到了账？", "boat"]
SIGNATURES = [["The ferryman lied.", "She kept the ledger under the floor."], ["账。"], ["The boat was gone."]]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def merged_encoder(base: Path, folder: Path, pooling: str) -> Path:
    """Put a random adapter and prompts on a base, save it as a checkpoint, and merge that."""
    encoder = Encoder.load(base, device="cpu", pooling=pooling)
    template = replace(encoder.spec.template, query_prefix="Instruct: find\nQuery: ", document_prefix="text: ")
    encoder = Encoder(encoder.model, encoder.tokenizer, encoder.spec.with_changes(template=template), encoder.device)
    encoder.model = add_lora(encoder.model, LoraSection(rank=2, alpha=4, dropout=0.0))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in encoder.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    encoder.save(folder / "adapter")
    merge_adapter(folder / "adapter", folder / "merged")
    return folder / "merged"


def vllm_vectors(model: Path, prompts: list[str | list[int]]) -> np.ndarray:
    """Return (n, d) vectors of texts and token ids by vLLM's pooling runner."""
    request, answer = model.parent / "request.json", model.parent / "answer.json"
    request.write_text(json.dumps({"model": str(model), "max_model_len": 512, "prompts": prompts}), "utf-8")
    command = [os.environ["MIA_VLLM_PYTHON"], str(Path(__file__).with_name("vllm_embed.py")), str(request), str(answer)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return np.array(json.loads(answer.read_text("utf-8")))


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_SRV_21_TRN_21_vllm_gives_the_vectors_of_our_encoder(
    pooling: str, tiny_qwen3: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    # vLLM's attention on CPU starts at heads of 32, wider than the shared tiny models'
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3 if pooling == "last" else tiny_bert)
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.1,
    }  # fmt: skip
    if pooling == "last":
        model = Qwen3Model(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True))
    else:
        model = BertModel(BertConfig(**sizes))
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    folder = merged_encoder(tmp_path / "base", tmp_path, pooling)
    encoder = Encoder.load(folder, device="cpu")
    queries = encoder.encode_views(QUERIES, SIGNATURES)
    documents = encoder.encode_documents(DOCUMENTS)
    prompts: list[str | list[int]] = [s.ids for s in encoder.text.documents(DOCUMENTS)]
    prompts += [encoder.tokenise_query(q)[0].ids for q in QUERIES]
    prompts += [encoder.tokenise_query(q, s)[-1].ids for q, s in zip(QUERIES, SIGNATURES, strict=True)]
    # As text, the prompt must be put before by whoever calls vLLM; its tokenizer adds the special tokens.
    prompts += [encoder.spec.template.document_prefix + d for d in DOCUMENTS]
    prompts += [encoder.spec.template.query_prefix + q for q in QUERIES]
    expected = np.concatenate([documents, queries.query, queries.chunk, documents, queries.query])
    theirs = vllm_vectors(folder, prompts)
    assert np.allclose(np.linalg.norm(theirs, axis=1), 1, atol=1e-5)  # normalised, as modules.json says
    cosine = (theirs * expected).sum(1)
    print(f"\n{pooling}: lowest cosine to vLLM {cosine.min():.8f} over {len(cosine)} vectors")
    assert cosine.min() > 0.9999
    bare = Encoder.load(tmp_path / "base", device="cpu", pooling=pooling).encode_documents(DOCUMENTS)
    assert (bare * documents).sum(1).max() < 0.99  # the adapter is in the weights
