"""What a recipe comes to on a number of processes: the facts that ``mia-train check`` prints and the trainer logs."""

from __future__ import annotations

from dataclasses import dataclass

from mia_train.config import missing_inputs, recipe_warnings
from mia_train.schema import LoraSection, Recipe, RunSection

_WEIGHTS = {"nf4": "nf4 (linear layers in 4 bits, the rest fp32)"}


@dataclass(frozen=True)
class Plan:
    """Resolved facts of a run.

    Attributes:
        processes: Processes that train together.
        global_batch: Rows an optimiser step.
        negatives_per_query: Negatives in a query's softmax, before false negatives are masked.
        candidates: The same in words.
        tokens_per_step: Most tokens of queries and documents a step; None where the base sets the limits.
        steps: Optimiser steps; None where epochs decide, once the rows are counted.
        schedule: Learning rate in words.
        adapters: LoRA in words.
        precision: Number formats in words.
        evaluation: What is measured when, and what picks the checkpoint.
        warnings: Allowed, but rarely meant.
        missing: Inputs that are not on this machine.
    """

    base: str
    train: tuple[str, ...]
    view: str
    processes: int
    global_batch: int
    negatives_per_query: int
    candidates: str
    tokens_per_step: int | None
    steps: int | None
    schedule: str
    adapters: str
    precision: str
    evaluation: str
    warnings: tuple[str, ...]
    missing: tuple[str, ...]


def make_plan(recipe: Recipe, processes: int = 1) -> Plan:
    """Work out the facts of a recipe on ``processes`` processes; reads neither weights nor rows."""
    model, data, training = recipe.model, recipe.data, recipe.training
    own = recipe.negatives_per_row
    rows_seen = training.batch_size * processes  # the rows whose documents meet in one softmax
    global_batch = rows_seen * training.accumulation
    negatives, candidates = own, f"{own} of the row's own ({data.hard_negatives} hard + {data.simple_negatives} simple)"
    if recipe.loss.negatives == "in_batch":
        negatives = rows_seen * (1 + own) - 1
        candidates += f" + {negatives - own} from the other {rows_seen - 1} rows"
    limits = (model.max_query_tokens, model.max_document_tokens)
    documents = (1 + own) * (1 if recipe.loss.beta is None else 2)  # the joint form brings as many nodes again
    tokens = None if None in limits else global_batch * ((limits[0] or 0) + documents * (limits[1] or 0))
    return Plan(
        base=model.base,
        train=data.train,
        view=data.view,
        processes=processes,
        global_batch=global_batch,
        negatives_per_query=negatives,
        candidates=candidates,
        tokens_per_step=tokens,
        steps=training.max_steps,
        schedule=describe_schedule(training),
        adapters=describe_adapters(recipe.lora),
        precision=f"weights {_WEIGHTS.get(model.dtype, model.dtype)}, {'trained ones fp32, ' if recipe.lora else ''}"
        f"compute {'bf16' if training.bf16 else 'fp32'}"
        + (", gradient checkpointing (non-reentrant)" if training.gradient_checkpointing else "")
        + (f", gradient cache, {training.mini_batch_tokens:,} tokens a forward" if training.mini_batch_tokens else ""),
        evaluation=_evaluation(recipe),
        warnings=tuple(recipe_warnings(recipe)),
        missing=tuple(missing_inputs(recipe)),
    )


def format_plan(plan: Plan) -> str:
    """Lay a plan out as aligned lines."""
    lines = {
        "base": plan.base,
        "rows": f"{', '.join(plan.train)}; view: {plan.view}",
        "global batch": f"{plan.global_batch} rows on {plan.processes} process{'es' if plan.processes > 1 else ''}",
        "negatives": f"{plan.negatives_per_query} per query: {plan.candidates}",
        "tokens per step": f"at most {plan.tokens_per_step:,}"
        if plan.tokens_per_step
        else "as the base's limits allow",
        "learning rate": plan.schedule,
        "LoRA": plan.adapters,
        "precision": plan.precision,
        "evaluation": plan.evaluation,
    }
    return "\n".join(f"  {name:<16}{text}" for name, text in lines.items())


def describe_schedule(training: RunSection) -> str:
    """Say in words how long a run takes and how its learning rate goes."""
    if training.max_steps is not None:
        length = f"{training.max_steps} steps, {training.warmup_steps(training.max_steps)} of them warm-up"
    else:
        warmup = f"{training.warmup:.0%}" if training.warmup < 1 else f"{training.warmup:.0f} steps"
        length = f"{training.epochs:g} epochs, {warmup} of them warm-up"
    course = "then constant" if training.scheduler == "constant_with_warmup" else f"{training.scheduler} decay to 0"
    return f"peak {training.learning_rate:g}, {length}, {course}"


def describe_adapters(lora: LoraSection | None) -> str:
    """Say in words which adapters are trained."""
    if lora is None:
        return "none (full fine-tune)"
    targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
    return f"rank {lora.rank}, alpha {lora.alpha}, dropout {lora.dropout:g} on {targets}"


def _evaluation(recipe: Recipe) -> str:
    training = recipe.training
    if recipe.data.eval is None:
        return "none"
    if training.eval_steps is None:
        return f"{recipe.data.eval} at the end"
    return f"{recipe.data.eval} every {training.eval_steps} steps; best checkpoint by {training.metric}"
