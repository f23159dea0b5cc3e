"""QLoRA: adapters on a base in 4 bits. bitsandbytes runs on the CPU too, so a GPU is not needed to see it train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mia_serve.core import Encoder, MiaError
from mia_train import loop, trainer
from mia_train.config import Recipe, load_recipe
from mia_train.model import load_encoder
from mia_train.plan import make_plan
from mia_train.schema import ModelConfig

from .test_trainer import LORA, interrupt_at, losses_of

Build = Callable[..., Recipe]
RECIPE = Path(__file__).parents[2] / "recipes" / "e2_qwen3_embedding_8b_qlora.yaml"
QLORA = {"model": {"dtype": "nf4"}, "lora": LORA}


def test_without_bitsandbytes_it_is_one_line_before_any_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mia_train.model.find_spec", lambda name: None)
    with pytest.raises(MiaError, match=r"model\.dtype: nf4 needs bitsandbytes; run `pip install bitsandbytes`"):
        load_encoder(ModelConfig(base="no/such/base", dtype="nf4"))


@pytest.mark.parametrize("launch", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_four_bit_base_is_not_sharded(
    launch: str, tiny_qwen3: Path, make_recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = trainer.training_arguments(make_recipe(tiny_qwen3))
    monkeypatch.setenv(launch, "true")
    with pytest.raises(MiaError, match=r"model\.dtype: nf4 is trained by one process or under DDP"):
        trainer._check_launch(make_recipe(tiny_qwen3, **QLORA), arguments)


def test_the_recipe_is_the_papers_on_one_gpu_and_says_that_it_was_not_run() -> None:
    recipe = load_recipe(RECIPE)
    papers = load_recipe(RECIPE.with_name("e2_qwen3_embedding_8b_lora.yaml"))
    assert make_plan(recipe).global_batch == make_plan(papers, processes=8).global_batch == 32
    assert (recipe.lora, recipe.loss, recipe.data) == (papers.lora, papers.loss, papers.data)
    assert make_plan(recipe).precision.startswith(
        "weights nf4 (linear layers in 4 bits, the rest fp32), trained ones fp3"
    )
    assert "Validated but not run (no GPU)" in RECIPE.read_text()


def test_it_trains_saves_adapters_alone_and_resumes(
    tiny_qwen3: Path, make_recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    sections = QLORA | {"training": {"bf16": True, "gradient_checkpointing": True, "warmup": 0.0}}
    seen: dict[str, torch.nn.Parameter] = {}
    step = loop.MiaTrainer.training_step

    def looking(self: loop.MiaTrainer, *args: object, **kwargs: object) -> object:
        seen.update(self.encoder.model.named_parameters())
        return step(self, *args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(loop.MiaTrainer, "training_step", looking)
        whole = make_recipe(tiny_qwen3, out="whole", **sections)
        folder = trainer.run(whole).folder
    layers = {name: p for name, p in seen.items() if name.endswith("base_layer.weight")}
    assert len(layers) == 14  # seven projections in each of two layers
    assert {type(p).__name__ for p in layers.values()} == {"Params4bit"} and not any(
        p.requires_grad for p in layers.values()
    )
    trained = {name: p for name, p in seen.items() if p.requires_grad}
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items()) and len(trained) == 28

    assert not (folder / "model.safetensors").exists()
    saved = load_file(folder / "adapter_model.safetensors")
    assert all(w.dtype == torch.float32 for w in saved.values())
    assert all(bool(w.any()) for name, w in saved.items() if "lora_B" in name)  # B starts at 0: it moved
    assert Encoder.load(folder, device="cpu").encode_queries(["where was the quay"]).shape == (1, 32)

    cut = make_recipe(tiny_qwen3, out="cut", **sections)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(cut)
    trainer.run(cut, resume="auto")
    assert losses_of(cut) == pytest.approx(losses_of(whole), abs=1e-6)
