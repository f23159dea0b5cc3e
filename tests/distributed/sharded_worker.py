"""What the tests of sharded training run in every process: ``-m tests.distributed.sharded_worker OUT BASE KIND...``.

Every kind of launch trains every case with an interruption in the middle of a pass over the rows, and goes on from its
checkpoint. Rank 0 writes what it found to ``OUT/facts-KIND.json``; the logs and encoders that the runs leave are
compared with those of one process that was not interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mia_train.launch import prepare_launch

SAVED, STOPPED, STEPS = 2, 3, 6
ROWS, GLOBAL_BATCH = 11, 4  # a pass over the rows ends inside the third step
LORA = {"rank": 2, "alpha": 4, "dropout": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "full": {"loss": {"negatives": "in_batch"}, "training": {"max_grad_norm": 0.5}},
    "lora": {
        "lora": LORA,
        "data": {"view": "signature", "signature_dropout": 0.3},
        "training": {"gradient_checkpointing": True},
    },
    "bf16": {"model": {"dtype": "bf16"}, "lora": LORA, "training": {"bf16": True, "max_steps": 3}},
}
CACHED = {**CASES["full"], "training": {"max_grad_norm": 0.5, "mini_batch_tokens": 64}}


def recipe_of(out: Path, base: str, name: str, processes: int, case: dict[str, Any]) -> Any:
    """Return a recipe of six steps of four rows each, on however many processes."""
    from mia_train.config import Recipe

    content: dict[str, Any] = {
        "model": {"base": base},
        "data": {"train": [str(out / "rows.jsonl")], "hard_negatives": 1, "simple_negatives": 1},
        "loss": {"temperature": 0.05},
        "training": {
            "output_dir": str(out / name),
            "max_steps": STEPS,
            "batch_size": GLOBAL_BATCH // processes,
            "learning_rate": 1e-3,
            "warmup": 0.0,
            "log_steps": 1,
            "save_steps": SAVED,
        },
    }
    for section, values in case.items():
        content[section] = content.get(section, {}) | values
    return Recipe.model_validate(content)


@contextmanager
def watched(stop_at: int | None = None) -> Iterator[tuple[list[tuple[str, ...]], list[Any]]]:
    """Note the rows of every micro-batch of this process, and the trainer; ``stop_at`` breaks the run off there."""
    from mia_train.logs import NonFiniteGuard
    from mia_train.loop import MiaTrainer

    rows: list[tuple[str, ...]] = []
    trainers: list[Any] = []
    see, step = NonFiniteGuard.see, MiaTrainer.training_step

    def noting(self: Any, query_ids: tuple[str, ...]) -> None:
        rows.append(query_ids)
        see(self, query_ids)

    def stopping(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainers[:] = [self]
        if self.state.global_step == stop_at:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with patch.object(NonFiniteGuard, "see", noting), patch.object(MiaTrainer, "training_step", stopping):
        yield rows, trainers


def train_and_resume(out: Path, base: str, name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Train up to step three, go on from the checkpoint of step two; return the rows of each step, and what is held."""
    from mia_train import distributed, trainer

    recipe = recipe_of(out, base, name, 2, case)
    with watched(STOPPED) as (before, _):
        try:
            trainer.run(recipe)
            raise AssertionError("the run was not interrupted")
        except KeyboardInterrupt:
            pass
    with watched() as (after, trainers):
        trainer.run(recipe, resume="auto")
    ranks = distributed.gather_objects((before, after, *shares_held(trainers[0])))

    def steps(part: int) -> list[list[str]]:
        return [list(chain(*rows)) for rows in zip(*(rank[part] for rank in ranks), strict=True)]

    return {
        "before": steps(0),
        "after": steps(1),
        "parameters": [rank[2] for rank in ranks],
        "optimizer": [rank[3] for rank in ranks],
    }


def shares_held(trainer: Any) -> tuple[float, float]:
    """Return which share of the trained parameters, and of AdamW's moments for them, this process holds."""

    def held(tensor: Any) -> int:
        return int((tensor.to_local() if hasattr(tensor, "to_local") else tensor).numel())

    parameters = [p for p in trainer.model_wrapped.parameters() if p.requires_grad]
    total = sum(p.numel() for p in parameters)
    moments = [state["exp_avg"] for state in trainer.optimizer.optimizer.state.values()]
    return sum(map(held, parameters)) / total, sum(map(held, moments)) / total


def skipped_steps(out: Path, base: str, kind: str) -> int:
    """Return the skipped steps of a run in which one process's second loss is infinite."""
    from mia_train import distributed, loop, trainer

    original, calls = loop.batch_loss, iter(range(1, 100))

    def batch_loss(*args: Any) -> Any:
        output = original(*args)
        poisoned = next(calls) == 2 and distributed.rank() == 1
        return output._replace(loss=output.loss * float("inf")) if poisoned else output

    with patch.object(loop, "batch_loss", batch_loss):
        return trainer.run(recipe_of(out, base, f"{kind}-poisoned", 2, {"training": {"max_steps": 3}})).skipped


def best_of_two(out: Path, base: str, kind: str) -> None:
    """Train two steps with adapters, of which the first is the better one."""
    from mia_train import trainer

    values = iter([0.9, 0.1])
    case = {
        "lora": LORA,
        "data": {"eval": "saltmarsh:test"},
        "training": {"max_steps": 2, "eval_steps": 1, "save_steps": 1},
    }
    with patch.object(trainer, "make_evaluation", lambda recipe, encoder: lambda: {"mrr": next(values)}):
        trainer.run(recipe_of(out, base, f"{kind}-best", 2, case))


def main() -> None:
    """Run every case under every kind of launch that is asked for."""
    out, base, kinds = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    prepare_launch()
    from mia_train import distributed, trainer

    for kind in kinds:
        os.environ["ACCELERATE_USE_FSDP"] = str(kind == "fsdp").lower()
        facts: dict[str, Any] = {
            name: train_and_resume(out, base, f"{kind}-{name}", CASES[name]) for name in ("full", "lora")
        }
        if kind != "ddp":
            trainer.run(recipe_of(out, base, f"{kind}-bf16", 2, CASES["bf16"]))
            facts["skipped"] = skipped_steps(out, base, kind)
        if kind == "fsdp":
            trainer.run(recipe_of(out, base, "fsdp-cached", 2, CACHED))
        if kind == "zero2":
            best_of_two(out, base, kind)
        facts["processes"] = distributed.world_size()
        if distributed.is_main():
            (out / f"facts-{kind}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
