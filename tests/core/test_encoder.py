"""Vectors: parity with the peers, independence of batch mates, views, folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from mia_serve.core import Encoder, EncoderSpec, MiaError, embed_batch, pad_sequences
from mia_serve.core.encoder import batches_by_tokens
from mia_serve.core.load import folder_facts, positions
from mia_serve.core.names import resolve_folder
from tests.conftest import CORPUS, MINILM

TEXTS = [
    "a", "the key", *CORPUS[:4], "lamp " * 300, "Who hid the ledger?", "boat " * 40,
]  # fmt: skip


def reference(folder: Path, texts: list[str], limit: int) -> np.ndarray:
    """Last-token vectors by transformers alone, one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        ids = ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]
        with torch.no_grad():
            rows.append(model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].numpy())
    out = np.stack(rows)
    return out / np.linalg.norm(out, axis=1, keepdims=True)


def test_equals_sentence_transformers_on_the_real_minilm(minilm: Encoder, minilm_folder: Path):
    peer = SentenceTransformer(str(minilm_folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    ours = minilm.encode_documents(TEXTS)
    assert ours.dtype == np.float32 and np.abs(ours - peer).max() < 1e-5


def test_equals_transformers_on_a_tiny_qwen3(tiny_qwen3: Path):
    encoder = Encoder.load(tiny_qwen3, max_document_tokens=200)
    assert encoder.spec.pooling == "last" and encoder.spec.template.node_token == "<|repo_name|>"
    assert np.abs(encoder.encode_documents(TEXTS) - reference(tiny_qwen3, TEXTS, 200)).max() < 1e-5


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_bert", "tiny_xlmr"])
def test_TRN_01_SRV_01_a_row_does_not_depend_on_its_batch_mates(name: str, request: pytest.FixtureRequest):
    encoder = Encoder.load(request.getfixturevalue(name))
    together = encoder.encode_documents(TEXTS)
    encoder.tokens_per_batch = 1
    alone = encoder.encode_documents(TEXTS)
    assert np.abs(together - alone).max() < 1e-5
    assert np.abs(encoder.encode_documents(TEXTS[::-1])[::-1] - alone).max() < 1e-5
    assert np.allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-6)


def test_TRN_01_both_padding_sides(tiny_qwen3: Path):
    encoder = Encoder.load(tiny_qwen3)
    rows = [s for t in TEXTS[:6] for s in encoder.tokenise_query(t, ["The lamp went out.", "A boat"], node=True)]
    with torch.no_grad():
        right, left = (embed_batch(encoder.model, pad_sequences(rows, encoder.pad_id, s)) for s in ("right", "left"))
        single = torch.cat([embed_batch(encoder.model, pad_sequences([r], encoder.pad_id)) for r in rows])
    assert (right - left).abs().max() < 1e-5 and (right - single).abs().max() < 1e-5


def test_TRN_24_xlmr_positions(tiny_xlmr: Path):
    encoder = Encoder.load(tiny_xlmr)
    assert encoder.spec.max_document_tokens == 64 == positions(encoder.model.config)
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_xlmr), AutoModel.from_pretrained(tiny_xlmr).eval()
    with torch.no_grad():
        hidden = model(**tokenizer(TEXTS[2], return_tensors="pt")).last_hidden_state[0].mean(0)
    expected = (hidden / hidden.norm()).numpy()
    assert np.abs(encoder.encode_documents([TEXTS[2], "lamp " * 200])[0] - expected).max() < 1e-5


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_bert", "minilm_folder"])
def test_query_view_equals_the_query_only_encoding_and_fusion_is_linear(name: str, request: pytest.FixtureRequest):
    encoder = Encoder.load(request.getfixturevalue(name))
    queries = ["Who hid the key?", "boat", "why"]
    signatures = [["The ferryman lied.", "The lamp went out."], None, "The ledger was false."]
    views = encoder.encode_views(queries, signatures)
    alone = encoder.encode_queries(queries)
    assert np.abs(views.query - alone).max() < 1e-5
    assert np.array_equal(views.chunk[1], views.query[1])
    assert np.abs(views.chunk[[0, 2]] - views.query[[0, 2]]).max() > 1e-2
    for alpha in (0.0, 0.3, 1.0):
        fused = encoder.encode_queries(queries, signatures, alpha=alpha)
        expected = (1 - alpha) * views.query + alpha * views.chunk
        expected[1] = alone[1]
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.abs(fused - expected).max() < 1e-5
    if encoder.text.has_node_token:
        assert np.abs(views.node - views.chunk).max() > 1e-3
    else:
        assert np.array_equal(views.node, views.chunk)


def test_causal_views_are_read_at_the_recorded_positions(tiny_qwen3: Path):
    encoder = Encoder.load(tiny_qwen3)
    (sequence,) = encoder.tokenise_query("Who hid the key?", ["The ferryman lied."])
    model = AutoModel.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([sequence.ids])).last_hidden_state[0]
    views = encoder.encode_views(["Who hid the key?"], [["The ferryman lied."]])
    tokens = encoder.tokenizer.convert_ids_to_tokens(sequence.ids)
    assert tokens[-2:] == ["<|repo_name|>", "<|endoftext|>"]
    for view, at in (("query", tokens.index("<|endoftext|>")), ("node", -2), ("chunk", -1)):
        expected = torch.nn.functional.normalize(hidden[at], dim=0).numpy()
        assert np.abs(getattr(views, view)[0] - expected).max() < 1e-5, view


def test_signature_pooling_over_the_query_tokens(minilm: Encoder):
    encoder = Encoder.load(MINILM, device="cpu", signature_pooling="query")
    _, conditioned = encoder.tokenise_query("Who hid the key?", ["A lamp."])
    assert conditioned.spans == {"chunk": (0, 7)}
    with torch.no_grad():
        hidden = encoder.model(input_ids=torch.tensor([conditioned.ids])).last_hidden_state[0, :7].mean(0)
    expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
    assert np.abs(encoder.encode_views(["Who hid the key?"], ["A lamp."]).chunk[0] - expected).max() < 1e-5
    assert encoder.spec_hash != minilm.spec_hash


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_bert", "minilm_folder"])
def test_TRN_22_saved_folder_opens_here_and_in_sentence_transformers(name: str, request, tmp_path: Path):
    encoder = Encoder.load(request.getfixturevalue(name), max_document_tokens=64)
    template = type(encoder.spec.template).from_dict(
        {**encoder.spec.template.__dict__, "query_prefix": "query: ", "document_prefix": "passage: "}
    )
    encoder = Encoder(encoder.model, encoder.tokenizer, encoder.spec.with_changes(template=template), encoder.device)
    encoder.save(tmp_path / "e")
    again = Encoder.load(tmp_path / "e")
    assert again.spec == encoder.spec and again.spec_hash == encoder.spec_hash
    assert again.tokenise_query("who", ["s"]) == encoder.tokenise_query("who", ["s"])
    peer = SentenceTransformer(str(tmp_path / "e"), device="cpu")
    short = [t for t in TEXTS if len(t) < 60]
    assert np.abs(peer.encode_document(TEXTS) - encoder.encode_documents(TEXTS)).max() < 1e-5
    assert np.abs(peer.encode_query(short) - encoder.encode_queries(short)).max() < 1e-5


def test_adapter_only_folder_in_the_published_mia_emb_layout(tiny_qwen3: Path, tmp_path: Path):
    torch.manual_seed(1)
    base = AutoModel.from_pretrained(tiny_qwen3, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    encoder = Encoder.load(tmp_path / "adapter")
    template = encoder.spec.template
    assert template.node_token == "<|repo_name|>" and template.query_prefix.startswith("Instruct: Given a search query")
    assert encoder.spec.pooling == "last" and template.end == ("<|endoftext|>",)
    with torch.no_grad():
        ids = torch.tensor([encoder.tokenise_document("The lamp.").ids])
        hidden = adapted.eval()(input_ids=ids).last_hidden_state[0, -1]
    expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
    ours = encoder.encode_documents(["The lamp."])[0]
    assert np.abs(ours - expected).max() < 1e-5
    assert np.abs(ours - Encoder.load(tiny_qwen3).encode_documents(["The lamp."])[0]).max() > 1e-3
    # an adapter that is not all there would leave the bare base, silently
    config = tmp_path / "adapter" / "adapter_config.json"
    asked = json.loads(config.read_text())
    for change, message in (
        ({"target_modules": ["q_proj", "k_proj"]}, "its adapter lacks .*k_proj"),
        ({"task_type": "CAUSAL_LM"}, "task_type 'CAUSAL_LM'; allowed: FEATURE_EXTRACTION"),
        ({"base_model_name_or_path": str(tmp_path / "adapter")}, "is the adapter itself"),
    ):
        config.write_text(json.dumps(asked | change))
        with pytest.raises(MiaError, match=message):
            Encoder.load(tmp_path / "adapter")
    config.write_text(json.dumps(asked))
    # saved by us: adapter alone, opens here and in sentence-transformers
    encoder.save(tmp_path / "ours")
    assert not (tmp_path / "ours" / "model.safetensors").exists()
    assert Encoder.load(tmp_path / "ours").spec_hash == encoder.spec_hash
    peer = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert np.abs(peer.encode_document(["The lamp."])[0] - ours).max() < 1e-5


def test_spec_hash_moves_with_weights_and_spec_and_not_with_the_place(tiny_bert: Path, tmp_path: Path):
    shutil.copytree(tiny_bert, tmp_path / "moved")
    a, b = Encoder.load(tiny_bert), Encoder.load(tmp_path / "moved")
    assert a.spec_hash == b.spec_hash
    assert Encoder.load(tiny_bert, pooling="cls").spec_hash != a.spec_hash
    assert Encoder.load(tiny_bert, dtype="bfloat16").spec_hash != a.spec_hash
    with torch.no_grad():
        b.model.encoder.layer[0].output.dense.bias.add_(1e-3)
    assert a.spec_hash != b.spec_hash


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_changed_weight_anywhere_is_another_encoder(tiny_bert: Path, dtype: str):
    encoder = Encoder.load(tiny_bert, dtype=dtype)
    before = encoder.spec_hash
    table = encoder.model.get_input_embeddings().weight
    with torch.no_grad():
        for row in (1, 7, len(table) - 2):
            kept = table[row, 3].clone()
            table[row, 3] += 0.5
            assert encoder.spec_hash != before
            table[row, 3] = kept
        assert encoder.spec_hash == before
        swapped = table[[5, 6]].clone()
        table[[6, 5]] = swapped
        assert encoder.spec_hash != before


def test_TRN_40_bfloat16_gives_float32_unit_rows(tiny_qwen3: Path):
    encoder = Encoder.load(tiny_qwen3, dtype="bfloat16")
    vectors = encoder.encode_documents(TEXTS)
    assert vectors.dtype == np.float32 and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    exact = Encoder.load(tiny_qwen3).encode_documents(TEXTS)
    assert (vectors * exact).sum(1).min() > 0.99


def test_out_array_is_written_in_place_and_order_is_the_callers(tiny_bert: Path, tmp_path: Path):
    encoder = Encoder.load(tiny_bert)
    out = np.lib.format.open_memmap(tmp_path / "v.npy", mode="w+", dtype=np.float32, shape=(len(TEXTS), 32))
    assert encoder.encode_documents(TEXTS, out=out) is out
    assert np.array_equal(np.load(tmp_path / "v.npy"), encoder.encode_documents(TEXTS))
    with pytest.raises(MiaError, match="must be float32"):
        encoder.encode_documents(TEXTS, out=np.zeros((1, 32), np.float32))
    assert encoder.encode_documents([]).shape == (0, 32)


def test_SRV_06_out_of_memory_halves_the_budget_and_fails_only_the_rows_concerned(tiny_bert: Path):
    encoder = Encoder.load(tiny_bert)
    expected = encoder.encode_documents(TEXTS)
    limit, model = 40, encoder.model

    class Small(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            if input_ids.numel() > limit:
                raise torch.OutOfMemoryError
            return model(input_ids=input_ids, attention_mask=attention_mask)

    encoder.model = Small()
    from mia_serve.core import EncodeFailed

    with pytest.raises(EncodeFailed) as caught:
        encoder.encode_documents(TEXTS)
    failed = [i for i, t in enumerate(TEXTS) if len(encoder.tokenise_document(t).ids) > limit]
    assert caught.value.rows == failed != []
    assert encoder.tokens_per_batch >= limit // 2  # rows that never fit do not make all later batches tiny
    good = [i for i in range(len(TEXTS)) if i not in failed]
    assert np.abs(caught.value.vectors["document"][good] - expected[good]).max() < 1e-5


def test_batches_by_tokens_by_hand():
    assert [list(b) for b in batches_by_tokens([9, 4, 4, 2, 1, 1], 8)] == [[0], [1, 2], [3, 4, 5]]


def test_spec_refuses_what_it_does_not_know(minilm: Encoder):
    text = minilm.spec.to_json()
    assert EncoderSpec.from_json(text) == minilm.spec
    raw = json.loads(text)
    with pytest.raises(MiaError, match="unknown field 'colour'"):
        EncoderSpec.from_json(json.dumps({**raw, "colour": 1}))
    with pytest.raises(MiaError, match="template was edited by hand"):
        EncoderSpec.from_json(json.dumps({**raw, "template": {**raw["template"], "query_prefix": "q: "}}))
    with pytest.raises(MiaError, match="pooling is 'max'; allowed: mean, cls, last"):
        EncoderSpec.from_json(json.dumps({**raw, "pooling": "max"}))


def test_wrong_folders_are_told_in_one_line(tmp_path: Path, tiny_bert: Path):
    with pytest.raises(FileNotFoundError, match="no installed Python package 'no_such_thing'"):
        resolve_folder("package:no_such_thing/model")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        resolve_folder("./nothing-here")
    with pytest.raises(FileNotFoundError, match="neither a folder here nor a hub model"):
        resolve_folder("nobody/no-such-model")
    with pytest.raises(MiaError, match="not a model folder"):
        folder_facts(tmp_path)
    shutil.copytree(tiny_bert, tmp_path / "dense")
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "2_Dense", "type": "x.Dense"}]
    (tmp_path / "dense" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(MiaError, match=r"module 'Dense' of modules.json; allowed"):
        Encoder.load(tmp_path / "dense")
    with pytest.raises(MiaError, match="fields are those of EncoderSpec"):
        Encoder.load(tiny_bert, colour="red")
