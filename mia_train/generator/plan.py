"""What a generator's recipe comes to on a number of processes: the facts that ``mia-train check`` prints."""

from __future__ import annotations

from dataclasses import dataclass

from mia_train.config import missing_inputs, recipe_warnings
from mia_train.generator.schema import GeneratorRecipe
from mia_train.plan import describe_adapters, describe_schedule


@dataclass(frozen=True)
class GeneratorPlan:
    """Resolved facts of a run.

    Attributes:
        train: Sources of rows.
        examples_per_row: How often a row is trained on in a pass, once for each number of chunks.
        shown: What a prompt holds, in words.
        processes: Processes that train together.
        global_batch: Examples an optimiser step.
        tokens_per_step: Most tokens a step.
        steps: Optimiser steps; None where epochs decide, once the rows are counted.
        schedule: Learning rate in words.
        adapters: LoRA in words.
        precision: Number formats in words.
        warnings: Allowed, but rarely meant.
        missing: Inputs that are not on this machine.
    """

    base: str
    train: tuple[str, ...]
    examples_per_row: int
    shown: str
    processes: int
    global_batch: int
    tokens_per_step: int
    steps: int | None
    schedule: str
    adapters: str
    precision: str
    warnings: tuple[str, ...]
    missing: tuple[str, ...]


def make_generator_plan(recipe: GeneratorRecipe, processes: int = 1) -> GeneratorPlan:
    """Work out the facts of a recipe on ``processes`` processes; reads neither weights nor rows."""
    data, training = recipe.data, recipe.training
    batch = training.batch_size * training.accumulation * processes
    context = "" if data.context == "none" else f"{data.context} and "
    return GeneratorPlan(
        base=recipe.model.base,
        train=data.train,
        examples_per_row=len(data.chunks),
        shown=f"{context}{', '.join(map(str, data.chunks))} chunks",
        processes=processes,
        global_batch=batch,
        tokens_per_step=batch * recipe.model.max_tokens,
        steps=training.max_steps,
        schedule=describe_schedule(training),
        adapters=describe_adapters(recipe.lora),
        precision=f"weights {recipe.model.dtype}, {'trained ones fp32, ' if recipe.lora else ''}"
        f"compute {'bf16' if training.bf16 else 'fp32'}"
        + (", gradient checkpointing (non-reentrant)" if training.gradient_checkpointing else ""),
        warnings=tuple(recipe_warnings(recipe)),
        missing=tuple(missing_inputs(recipe)),
    )


def format_generator_plan(plan: GeneratorPlan) -> str:
    """Lay a plan out as aligned lines."""
    lines = {
        "base": plan.base,
        "rows": f"{', '.join(plan.train)}; {plan.examples_per_row} examples a row: {plan.shown}",
        "global batch": f"{plan.global_batch} examples on {plan.processes} process{'es' if plan.processes > 1 else ''}",
        "tokens per step": f"at most {plan.tokens_per_step:,}",
        "learning rate": plan.schedule,
        "LoRA": plan.adapters,
        "precision": plan.precision,
    }
    return "\n".join(f"  {name:<16}{text}" for name, text in lines.items())
