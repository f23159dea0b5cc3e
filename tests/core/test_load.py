"""Model folders that are damaged or ask for what their model cannot do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mia_serve.core import SPEC_FILE, Encoder, MiaError
from mia_serve.core.names import full_name


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


@pytest.mark.parametrize("file", ["modules.json", "tokenizer.json", "adapter_config.json", SPEC_FILE])
def test_a_file_that_is_no_json_is_named(file: str, folder: Path):
    (folder / file).write_text("{half")
    with pytest.raises(MiaError, match=r"model.*(is not valid JSON|cannot be read)"):
        Encoder.load(folder, device="cpu")


def test_weights_that_are_cut_or_not_all_there_are_refused(folder: Path):
    weights = load_file(folder / "model.safetensors")
    name = next(key for key in weights if "query.weight" in key)
    save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MiaError, match=f"its weights lack '{name}'"):
        Encoder.load(folder, device="cpu")
    (folder / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(MiaError, match="its model cannot be read"):
        Encoder.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_query_tokens": 129}, "max_query_tokens is 129; the model's positions reach 128"),
        ({"max_document_tokens": 1000}, "max_document_tokens is 1000; the model's positions reach 128"),
        ({"max_document_tokens": 2}, "max_document_tokens is 2; allowed: integers from 3"),
        ({"max_query_tokens": 12.5}, "max_query_tokens is 12.5; allowed: integers from 3"),
        ({"dim": 16}, "dim is 16 but the model is 32 wide"),
        ({"dim": "32"}, "dim is '32'; allowed"),
        ({"alpha": "half"}, "alpha is 'half'; allowed"),
        ({"template": None}, "must each hold a JSON object"),
    ],
)
def test_a_spec_that_the_model_cannot_serve_is_refused(change: dict, message: str, tiny_bert: Path, tmp_path: Path):
    encoder = Encoder.load(tiny_bert, device="cpu")
    encoder.save(tmp_path / "ours")
    spec = tmp_path / "ours" / SPEC_FILE
    spec.write_text(json.dumps(json.loads(spec.read_text()) | change))
    with pytest.raises(MiaError, match=message):
        Encoder.load(tmp_path / "ours", device="cpu")
    if "template" not in change:
        with pytest.raises(MiaError, match=message):
            Encoder.load(tiny_bert, device="cpu", **change)


def test_a_device_that_torch_does_not_know(tiny_bert: Path):
    with pytest.raises(MiaError, match="device 'gpu'; allowed: auto, cpu, cuda"):
        Encoder.load(tiny_bert, device="gpu")


def test_an_encoder_that_gives_nan_says_so(tiny_bert: Path):
    encoder = Encoder.load(tiny_bert, device="cpu")
    with torch.no_grad():
        encoder.model.get_input_embeddings().weight[encoder.tokenise_document("lamps").ids[1]] = float("nan")
    with pytest.raises(RuntimeError, match="NaN for text 1"):
        encoder.encode_documents(["boat", "lamps"])
    # Never the query-only view in its place.
    with pytest.raises(RuntimeError, match="NaN for text 0"):
        encoder.encode_queries(["boat"], [["lamps"]])


def test_a_packaged_model_opens_by_its_published_name_with_the_same_spec(minilm: Encoder):
    opened = Encoder.load("all-MiniLM-L6-v2", device="cpu")
    assert opened.spec_hash == minilm.spec_hash and opened.spec.base == minilm.spec.base


def test_a_folder_is_not_mistaken_for_a_published_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all-MiniLM-L6-v2").mkdir()
    assert full_name("all-MiniLM-L6-v2") == "all-MiniLM-L6-v2"
