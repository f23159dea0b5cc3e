"""QLoRA on a CUDA device; tests/train/test_qlora.py has the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mia_serve.core import Encoder
from mia_train import loop, trainer
from mia_train.config import Recipe
from tests.train.conftest import make_recipe
from tests.train.test_trainer import LORA, losses_of

__all__ = ["make_recipe"]  # a fixture
pytestmark = pytest.mark.gpu


def test_adapters_train_on_a_four_bit_base(
    tiny_qwen3: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    seen: dict[str, torch.nn.Parameter] = {}
    step = loop.MiaTrainer.training_step

    def looking(self: loop.MiaTrainer, *args: object, **kwargs: object) -> object:
        seen.update(self.encoder.model.named_parameters())
        return step(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop.MiaTrainer, "training_step", looking)
    recipe = make_recipe(
        tiny_qwen3,
        model={"dtype": "nf4"},
        lora=LORA,
        training={"bf16": True, "gradient_checkpointing": True, "warmup": 0.0, "max_steps": 20},
    )
    folder = trainer.run(recipe).folder
    layers = [p for name, p in seen.items() if name.endswith("base_layer.weight")]
    assert len(layers) == 14 and {type(p).__name__ for p in layers} == {"Params4bit"}
    assert all(p.is_cuda and p.dtype == torch.uint8 for p in layers)
    assert {p.dtype for p in seen.values() if p.requires_grad} == {torch.float32}
    losses = losses_of(recipe)
    assert losses[20] < losses[1]
    assert all(bool(w.any()) for n, w in load_file(folder / "adapter_model.safetensors").items() if "lora_B" in n)
    assert Encoder.load(folder).encode_queries(["where was the quay"]).shape == (1, 32)
