"""Merging adapters: the merged folder gives the adapter's vectors, or there is no folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, Qwen3Config, Qwen3Model

import tests.conftest
from mia_serve.cli.common import run_defaults
from mia_serve.core import SPEC_FILE, Encoder, MiaError
from mia_train import trainer
from mia_train.cli import main
from mia_train.config import Recipe, load_recipe
from mia_train.merge import MergeFailed, merge_adapter
from mia_train.model import add_lora
from mia_train.schema import LoraSection

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
DOCUMENTS = [
    "The ferryman counted the lamps along the quay and found one missing.",
    "潮水退去以后，他在码头上找到了那本账。",
    "lamp",
    "Nobody in the village would say where the boat had gone. " * 20,
]
QUERIES = ["Who hid the ledger?", "谁找到了账？"]
SIGNATURES = [["The ferryman lied.", "The ledger lay under the floor."], ["账。"]]
Build = Callable[..., Recipe]


def randomise(model: torch.nn.Module, std: float, seed: int = 1) -> None:
    """Give every adapter values in both halves, as training would; ``std`` is that of the half that starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                zero = "lora_B" in name or "lora_embedding_A" in name
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (std if zero else 0.2))


def make_adapter(
    base: Path, folder: Path, targets: str | tuple[str, ...] = "all-linear", std: float = 0.1, seed: int = 1
) -> Path:
    """Write an adapter checkpoint of ours, with prompts."""
    encoder = Encoder.load(base, device="cpu")
    template = replace(encoder.spec.template, query_prefix="find: ", document_prefix="text: ")
    encoder = Encoder(encoder.model, encoder.tokenizer, encoder.spec.with_changes(template=template), encoder.device)
    encoder.model = add_lora(encoder.model, LoraSection(rank=2, alpha=4, dropout=0.1, targets=targets))
    randomise(encoder.model, std, seed)
    encoder.save(folder)
    return folder


def all_vectors(encoder: Encoder) -> np.ndarray:
    views = encoder.encode_views(QUERIES, SIGNATURES)
    fused = encoder.encode_queries(QUERIES, SIGNATURES)
    return np.concatenate([encoder.encode_documents(DOCUMENTS), views.query, views.chunk, views.node, fused])


def left_behind(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("base", "targets"),
    [
        ("tiny_qwen3", "all-linear"),
        ("tiny_qwen3", QKVO),
        ("tiny_bert", "all-linear"),
        ("tiny_xlmr", ("query", "value")),
    ],
)
def test_TRN_21_merged_equals_the_adapter_and_peft_s_own_merge(
    base: str, targets: str | tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    plain = request.getfixturevalue(base)
    adapter = make_adapter(plain, tmp_path / "adapter", targets)
    report = merge_adapter(adapter, tmp_path / "merged")
    before, merged = Encoder.load(adapter, device="cpu"), Encoder.load(tmp_path / "merged", device="cpu")
    expected = all_vectors(before)
    assert (all_vectors(merged) * expected).sum(1).min() > 0.999999
    assert report.dtype == "float32" and 0.999999 < report.cosine_min <= 1.0 + 1e-9 and report.max_abs_diff < 1e-5
    assert not hasattr(merged.model, "peft_config")
    # of the merged weights peft is the reference, and they are not the base's
    reference = PeftModel.from_pretrained(AutoModel.from_pretrained(plain, dtype=torch.float32), str(adapter))
    weights = reference.merge_and_unload().state_dict()
    ours = merged.model.state_dict()
    assert weights.keys() == ours.keys()
    assert all(torch.equal(weights[name], ours[name]) for name in weights)
    assert (Encoder.load(plain, device="cpu").encode_documents(DOCUMENTS) * expected[:4]).sum(1).max() < 0.99


def test_TRN_22_template_and_token_ids_are_those_of_the_adapter(tiny_qwen3: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_qwen3, tmp_path / "adapter")
    merge_adapter(adapter, tmp_path / "merged")
    for name in (SPEC_FILE, "tokenizer.json", "config_sentence_transformers.json", "1_Pooling/config.json"):
        assert (adapter / name).read_bytes() == (tmp_path / "merged" / name).read_bytes(), name
    one, other = (Encoder.load(folder, device="cpu") for folder in (adapter, tmp_path / "merged"))
    for query, signature in zip(QUERIES, SIGNATURES, strict=True):
        assert one.tokenise_query(query, signature, node=True) == other.tokenise_query(query, signature, node=True)
    assert one.text.documents(DOCUMENTS) == other.text.documents(DOCUMENTS)
    assert other.spec.base == str(tiny_qwen3)


@pytest.mark.parametrize("base", ["tiny_qwen3", "tiny_bert"])
def test_a_merged_e1_opens_in_sentence_transformers(base: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    adapter = make_adapter(request.getfixturevalue(base), tmp_path / "adapter")
    merge_adapter(adapter, tmp_path / "merged")
    encoder = Encoder.load(adapter, device="cpu")
    peer = SentenceTransformer(str(tmp_path / "merged"), device="cpu")
    assert np.abs(peer.encode_query(QUERIES) - encoder.encode_queries(QUERIES)).max() < 1e-5
    assert np.abs(peer.encode_document(DOCUMENTS) - encoder.encode_documents(DOCUMENTS)).max() < 1e-5


def test_a_causal_base_whose_tokenizer_appends_nothing_gets_the_token_that_is_pooled_at(
    tiny_qwen3: Path, qwen3_tokenizer: Path, tmp_path: Path
) -> None:
    plain = tests.conftest._bpe(None)
    assert plain("a")["input_ids"] == plain("a", add_special_tokens=False)["input_ids"]
    base = small_qwen3(tmp_path / "base", tiny_qwen3)
    plain.save_pretrained(base)
    adapter = make_adapter(base, tmp_path / "adapter")
    merge_adapter(adapter, tmp_path / "merged")
    for folder in (adapter, tmp_path / "merged"):
        peer = SentenceTransformer(str(folder), device="cpu")
        encoder = Encoder.load(folder, device="cpu")
        assert np.abs(peer.encode_query(QUERIES) - encoder.encode_queries(QUERIES)).max() < 1e-5
        assert np.abs(peer.encode_document(DOCUMENTS) - encoder.encode_documents(DOCUMENTS)).max() < 1e-5
    # The real Qwen3 tokenizer has a class of its own, which could put its own idea back when it is opened.
    real = AutoTokenizer.from_pretrained(qwen3_tokenizer)
    spec = encoder.spec.with_changes(template=replace(encoder.spec.template, document_prefix=""))
    Encoder(encoder.model, real, spec, encoder.device).save(tmp_path / "real")
    opened = AutoTokenizer.from_pretrained(tmp_path / "real")
    assert opened(DOCUMENTS[0])["input_ids"] == [*real(DOCUMENTS[0])["input_ids"], real.get_vocab()["<|endoftext|>"]]


def test_TRN_21_bfloat16_is_the_base_s_format_or_asked_for(tiny_qwen3: Path, tmp_path: Path) -> None:
    base = tmp_path / "bf16"
    AutoModel.from_pretrained(tiny_qwen3, dtype=torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_qwen3).save_pretrained(base)
    adapter = make_adapter(base, tmp_path / "adapter")
    expected = all_vectors(Encoder.load(adapter, device="cpu"))
    sizes = {}
    for asked, saved in (("auto", "bfloat16"), ("float32", "float32")):
        report = merge_adapter(adapter, tmp_path / asked, dtype=asked)  # type: ignore[arg-type]
        weights = load_file(tmp_path / asked / "model.safetensors")
        assert report.dtype == saved == json.loads((tmp_path / asked / "config.json").read_text())["dtype"]
        assert {w.dtype for w in weights.values()} == {getattr(torch, saved)}
        cosine = (all_vectors(Encoder.load(tmp_path / asked, device="cpu", dtype="float32")) * expected).sum(1)
        assert cosine.min() > (0.9999 if saved == "float32" else 0.999)
        sizes[asked] = report.size_bytes
        assert sizes[asked] > sum(w.nbytes for w in weights.values())
    assert 1.5 < sizes["float32"] / sizes["auto"] < 2
    report = merge_adapter(make_adapter(tiny_qwen3, tmp_path / "b"), tmp_path / "c", dtype="bfloat16")
    assert report.notes[0].startswith("the base is stored in float32")


def test_TRN_21_what_bfloat16_would_change_too_much_is_refused_with_the_measured_cosine(
    tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(tiny_qwen3, tmp_path / "adapter", std=30, seed=9)
    with pytest.raises(MergeFailed, match=r"lowest cosine to the adapter is 0\.\d+ .*must exceed 0\.999: ") as failed:
        merge_adapter(adapter, tmp_path / "merged", dtype="bfloat16")
    assert float(str(failed.value).split("adapter is ")[1].split()[0]) < 0.999
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["merge", str(adapter), "-o", str(tmp_path / "merged"), "--dtype", "bfloat16"])
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {adapter}: ") and error.count("\n") == 1
    assert left_behind(tmp_path) == {"adapter"}
    assert merge_adapter(adapter, tmp_path / "merged", dtype="float32").cosine_min > 0.9999


@pytest.mark.parametrize("damage", ["nan", "cut", "a tensor less", "a tensor more"])
def test_TRN_21_a_broken_adapter_is_refused_and_leaves_nothing(damage: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_qwen3, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(key for key in weights if "layers.1" in key and "lora_B" in key)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        if damage == "nan":
            weights[name][0, 0] = float("nan")
        elif damage == "a tensor less":
            del weights[name]
        else:  # of a third layer, which the base does not have
            weights[name.replace("layers.1", "layers.2")] = weights[name].clone()
        save_file(weights, file, {"format": "pt"})
    message = {"nan": "gives NaN", "cut": "cannot be read", "a tensor less": "lacks", "a tensor more": "has no place"}
    with pytest.raises(MiaError, match=message[damage]):
        merge_adapter(adapter, tmp_path / "merged")
    assert left_behind(tmp_path) == {"adapter"}


def small_qwen3(folder: Path, tokenizer: Path, **sizes: object) -> Path:
    torch.manual_seed(0)
    tok = AutoTokenizer.from_pretrained(tokenizer)
    config = {
        "vocab_size": len(tok), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    }  # fmt: skip
    Qwen3Model(Qwen3Config(**{**config, **sizes})).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def test_TRN_21_the_wrong_base_is_refused(tiny_qwen3: Path, tiny_bert: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_qwen3, tmp_path / "adapter", QKVO)
    wide = small_qwen3(tmp_path / "wide", tiny_qwen3, hidden_size=64)
    deep = small_qwen3(tmp_path / "deep", tiny_qwen3, num_hidden_layers=3)
    shallow = small_qwen3(tmp_path / "shallow", tiny_qwen3, num_hidden_layers=1)
    quantised = Path(shutil.copytree(tiny_qwen3, tmp_path / "quantised"))
    config = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"load_in_4bit": True}}
    (quantised / "config.json").write_text(json.dumps(config))
    before = left_behind(tmp_path)
    for base, message in (
        (wide, "adapter cannot be read .*size mismatch"),
        (deep, "lacks .*layers.2.* it was made for another model"),
        (shallow, "has no place here for .*layers.1.* it was made for another model"),
        (tiny_bert, "adapter cannot be read .*[Tt]arget modules"),
        (quantised, "stored quantised.*--base"),
        (adapter, "is itself an adapter; merge that first"),
    ):
        with pytest.raises(MiaError, match=message):
            merge_adapter(adapter, tmp_path / "merged", base=str(base))
    with pytest.raises(FileNotFoundError, match=r"nothing-here: no such folder.*--base"):
        merge_adapter(adapter, tmp_path / "merged", base=str(tmp_path / "nothing-here"))
    assert left_behind(tmp_path) == before


def test_what_has_no_adapter_is_already_whole(tiny_bert: Path, tmp_path: Path) -> None:
    Encoder.load(tiny_bert, device="cpu").save(tmp_path / "ours")
    for folder in (tiny_bert, tmp_path / "ours"):
        with pytest.raises(MiaError, match="holds no adapter: it is already a whole encoder"):
            merge_adapter(folder, tmp_path / "merged")
    assert left_behind(tmp_path) == {"ours"}


def test_an_output_that_exists_is_refused_and_folders_above_it_are_made(tiny_bert: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_bert, tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    with pytest.raises(MiaError, match="merged exists; give a new folder"):
        merge_adapter(adapter, tmp_path / "merged")
    merge_adapter(adapter, tmp_path / "deep" / "merged")
    assert left_behind(tmp_path / "deep") == {"merged"}
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(MiaError, match=r"adapter_config\.json holds no JSON object"):
        merge_adapter(adapter, tmp_path / "other")
    assert left_behind(tmp_path) == {"adapter", "deep", "merged"} and not left_behind(tmp_path / "merged")


def test_TRN_21_adapters_on_tied_embeddings(tiny_qwen3: Path, tmp_path: Path) -> None:
    base = small_qwen3(tmp_path / "base", tiny_qwen3, tie_word_embeddings=True)
    config = LoraConfig(r=2, task_type="FEATURE_EXTRACTION", target_modules=["embed_tokens", "q_proj"])
    adapted = get_peft_model(AutoModel.from_pretrained(base, dtype=torch.float32), config)
    randomise(adapted, 0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert report.cosine_min > 0.999999
    old, new = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    assert old.keys() == new.keys()
    assert (old["embed_tokens.weight"] - new["embed_tokens.weight"]).abs().max() > 0.01
    with torch.no_grad():  # not ours alone says so: transformers on the merged folder, peft on the adapter
        ids = torch.tensor([Encoder.load(tmp_path / "merged", device="cpu").tokenise_document(DOCUMENTS[0]).ids])
        one = AutoModel.from_pretrained(tmp_path / "merged").eval()(input_ids=ids).last_hidden_state
        assert torch.allclose(one, adapted.eval()(input_ids=ids).last_hidden_state, atol=1e-4)


def test_a_bare_peft_folder_as_the_papers_publish_it(tiny_qwen3: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=list(QKVO), base_model_name_or_path="./base")
    adapted = get_peft_model(AutoModel.from_pretrained(tiny_qwen3, dtype=torch.float32), config)
    randomise(adapted, 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").write_text("---\nlicense: apache-2.0\nlibrary_name: peft\n---\n\nLoad it.\n")
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    raw["base_model_name_or_path"] = "../gone"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(raw))
    with pytest.raises(FileNotFoundError, match="--base"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=str(tiny_qwen3))
    merged = Encoder.load(tmp_path / "merged", device="cpu")
    assert merged.spec.base == report.base == str(tiny_qwen3.resolve())
    assert merged.spec.template.query_prefix.startswith("Instruct: Given a search query with the book's summary")
    assert not (tmp_path / "merged" / "mia_run.json").exists()
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "license: apache-2.0" in card and "peft" not in card and "as given" in card and str(tmp_path) not in card


def test_a_trained_e2_keeps_its_run_and_its_card(tiny_bert: Path, make_recipe: Build, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "e1")
    recipe = make_recipe(
        tmp_path / "e1",
        out="e2",
        lora={"rank": 2, "alpha": 4, "dropout": 0.0},
        data={"view": "signature"},
        training={"max_steps": 2, "save_steps": 2, "warmup": 0.0},
    )
    run = trainer.run(recipe).folder
    (tmp_path / "far").mkdir()
    for output in (tmp_path / "near", tmp_path / "far" / "merged"):
        report = merge_adapter(run, output)
        assert report.cosine_min > 0.9999
        was, now = run_defaults(str(run)), run_defaults(str(output))
        assert now == was and Path(now.base or "").samefile(tmp_path / "e1")
    assert json.loads((tmp_path / "near" / "mia_run.json").read_text())["e1"] == "../e1"
    assert load_recipe(tmp_path / "near" / "recipe.yaml") == load_recipe(run / "recipe.yaml")
    old, card = (run / "README.md").read_text(), (tmp_path / "near" / "README.md").read_text()
    assert "install peft" in old and "install peft" not in card and "# near\n" in card
    assert (
        "dropout 0 on all-linear, merged into the base |" in card and "lowest cosine to the adapter is 1.0000" in card
    )
    checkpoint = merge_adapter(run / "checkpoint-2", tmp_path / "of-checkpoint")
    assert checkpoint.cosine_min > 0.9999 and run_defaults(str(tmp_path / "of-checkpoint")) == was
    # the same weights, whose run says it held its base in 4 bits
    file = run / "recipe.yaml"
    content = yaml.safe_load(file.read_text())
    content["model"]["dtype"] = "nf4"
    file.write_text(yaml.safe_dump(content))
    (note,) = merge_adapter(run, tmp_path / "nf4").notes
    assert "4-bit (nf4) base and is merged into the full-precision one" in note
    assert note in (tmp_path / "nf4" / "README.md").read_text()


def test_the_command_reports_what_it_measured(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(tiny_bert, tmp_path / "adapter")
    with pytest.raises(SystemExit) as caught:
        main(["merge", str(adapter), "-o", str(tmp_path / "merged"), "--json", "-"])
    assert caught.value.code == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert facts["cosine_min"] > 0.9999 and facts["dtype"] == "float32" and facts["least_cosine"] == 0.9999
    written = [file for file in (tmp_path / "merged").rglob("*") if file.is_file()]
    assert abs(facts["size_bytes"] - sum(file.stat().st_size for file in written)) < 2000  # the card came after
    assert f"merged {adapter} into {tiny_bert}" in shown.err and "lowest cosine 1.0000" in shown.err
    for arguments, code in ((["merge", str(adapter)], 2), (["merge", str(tiny_bert), "-o", str(tmp_path / "x")], 2)):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == code
