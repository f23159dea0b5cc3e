"""A run's course does not depend on how its work is cut up: loss and gradient norm agree with the reference run's.

At every step to a small tolerance, and without drift to one side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_serve.core import Encoder
from mia_train import collate, trainer
from mia_train.config import Recipe
from tests.train.conftest import make_recipe, make_rows, still_bert
from tests.train.test_trainer import interrupt_at

__all__ = ["make_recipe", "still_bert"]  # fixtures
Build = Callable[..., Recipe]
STEPS, BATCH = 6, 8
LORA = {"rank": 2, "alpha": 4, "dropout": 0.0}
BASES = {"still_bert": {}, "tiny_qwen3": {}, "tiny_qwen3 + lora": {"lora": LORA}}


def course(recipe: Recipe) -> dict[str, np.ndarray]:
    """Return (STEPS,) loss and gradient norm of a finished run."""
    lines = (Path(recipe.training.output_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss" in line]
    assert len(steps) == STEPS
    return {key: np.array([line[key] for line in steps]) for key in ("loss", "grad_norm")}


def assert_agree(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray], tolerance: float = 2e-4) -> None:
    for key, expected in reference.items():
        off = ours[key] / expected - 1.0
        assert np.abs(off).max() < tolerance, (key, off)
        # Rounding falls to either side; an error in scaling would push every step the same way, and further each time.
        drifts = np.abs(off[-1]) > 1e-5 and (np.sign(off) == np.sign(off[-1])).all()
        assert not (drifts and (np.diff(np.abs(off)) > 0).all()), (key, off)


@pytest.fixture(params=BASES)
def run(request: pytest.FixtureRequest, make_recipe: Build) -> Callable[..., dict[str, np.ndarray]]:
    """Train with changes to the training section; own negatives, so that a batch may be split by accumulation."""
    base = request.getfixturevalue(request.param.split(" ")[0])
    count = iter(range(100))

    def train(interrupt: int | None = None, loss: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
        recipe = make_recipe(
            base,
            make_rows(20),  # no multiple of the batch: the second pass starts inside a step
            out=f"run-{next(count)}",
            data={"view": "signature", "hard_negatives": 2},
            loss=loss or {},
            training={"max_steps": STEPS, "batch_size": BATCH, "warmup": 0.2, **training},
            **BASES[request.param],
        )
        if interrupt is not None:
            with pytest.MonkeyPatch.context() as patch:
                interrupt_at(patch, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    trainer.run(recipe)
        trainer.run(recipe, resume="auto" if interrupt is not None else None)
        return course(recipe)

    return train


def test_TRN_26_accumulation_and_batch_size(run: Callable[..., Any]) -> None:
    reference = run()
    assert reference["loss"][-1] < reference["loss"][0]
    for accumulation in (2, 8):
        assert_agree(run(batch_size=BATCH // accumulation, accumulation=accumulation), reference)


def test_mini_batches_of_the_gradient_cache(run: Callable[..., Any]) -> None:
    in_batch = {"negatives": "in_batch"}
    reference = run(loss=in_batch)
    for tokens in (1, 150):
        assert_agree(run(loss=in_batch, mini_batch_tokens=tokens), reference)
    split = {"batch_size": BATCH // 2, "accumulation": 2}
    assert_agree(run(loss=in_batch, mini_batch_tokens=150, **split), run(loss=in_batch, **split))


def test_gradient_checkpointing(run: Callable[..., Any]) -> None:
    reference = run()
    assert_agree(run(gradient_checkpointing=True), reference)
    assert_agree(run(gradient_checkpointing=True, mini_batch_tokens=150), reference)


@pytest.mark.parametrize("run", ["tiny_qwen3", "tiny_qwen3 + lora"], indirect=True)  # BERT's positions are learned
def test_TRN_01_padding_side(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reference = run()
    padded = collate.pad_sequences
    monkeypatch.setattr(collate, "pad_sequences", lambda rows, pad_id: padded(rows, pad_id, side="left"))
    assert_agree(run(), reference)


def test_attention_backend(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reference = run()
    used = []
    load = trainer.load_encoder

    def eager(*arguments: Any) -> Encoder:
        encoder = load(*arguments)
        used.append(encoder.model.config._attn_implementation)
        encoder.model.set_attn_implementation("eager")
        used.append(encoder.model.config._attn_implementation)
        return encoder

    monkeypatch.setattr(trainer, "load_encoder", eager)
    assert_agree(run(), reference)
    assert used == ["sdpa", "eager"]


@pytest.mark.parametrize("step", [2, 3])
def test_TRN_17_a_killed_run_resumes_to_the_same_numbers(step: int, run: Callable[..., Any]) -> None:
    """Step 2 is inside the first pass over the rows, step 3 at its seam."""
    reference = run(save_steps=1)
    resumed = run(interrupt=step, save_steps=1)
    for key, expected in reference.items():
        np.testing.assert_allclose(resumed[key], expected, rtol=1e-6, err_msg=key)
    cached = {"save_steps": 1, "mini_batch_tokens": 150}
    assert_agree(run(interrupt=step, **cached), reference)
