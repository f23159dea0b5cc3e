"""One training run from a recipe: rows, encoder, loop, finished encoder."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

from mia_serve.core import Encoder, MiaError
from mia_serve.eval.versions import package_versions
from mia_train import distributed, sharding
from mia_train.card import CardFacts, write_card
from mia_train.config import GeneratorRecipe, Recipe
from mia_train.data import check_rows, make_collator, prepare_rows
from mia_train.evaluate import RetrievalEvaluation, make_evaluation
from mia_train.finish import changes_since, check_resumable, publish, write_run_facts
from mia_train.launch import check_world
from mia_train.logs import peak_memory_gib
from mia_train.loop import MiaTrainer
from mia_train.model import MiaModel, load_encoder, place_encoder
from mia_train.rows import Row, read_rows
from mia_train.schedule import Schedule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        folder: The finished encoder, with log and checkpoints.
        steps: Optimiser steps, those before resuming included.
        skipped: Steps left out because their gradient was not finite.
        loss: Last logged loss.
        metrics: Those of the last evaluation, by name.
        seconds: Time in training steps, without loading, evaluation and saving.
        rows_per_second: Over all processes.
        tokens_per_second: Real tokens, over all processes.
        peak_memory_gib: Of rank 0: on its device, or resident on CPU.
    """

    folder: Path
    steps: int
    skipped: int
    loss: float | None
    metrics: dict[str, float]
    seconds: float
    rows_per_second: float
    tokens_per_second: float
    peak_memory_gib: float


def run(recipe: Recipe, resume: str | None = None) -> RunResult:
    """Train one recipe; every process of a launch calls it.

    Args:
        recipe: The resolved recipe.
        resume: A checkpoint folder, or ``auto`` for the last one in ``training.output_dir`` (none: start afresh).

    Raises:
        MiaError: The rows, the encoder or the checkpoint do not fit the recipe; nothing has been trained then.
        TrainingDiverged: Too many steps in a row without a finite gradient.
    """
    output = Path(recipe.training.output_dir)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    first_arguments = training_arguments(recipe)  # joins the process group
    _check_launch(recipe, first_arguments)
    sharded = sharding.is_fsdp()
    checkpoint = distributed.on_main(lambda: open_output(output, resume))
    if checkpoint:
        distributed.on_main(lambda: check_resumable(Path(checkpoint), recipe, first_arguments.world_size))
        for change in changes_since(Path(checkpoint), recipe) if distributed.is_main() else ():
            made = "; rows that are already made stay as they are" if change.startswith(("model.", "data.")) else ""
            print(f"warning: {change}{made}", file=sys.stderr)
    set_seed(recipe.training.seed)  # LoRA's start
    encoder = load_encoder(recipe.model, recipe.loss.matryoshka)
    device = str(first_arguments.device)
    path = distributed.on_main(lambda: prepare_rows(recipe, output, device, reuse=checkpoint is not None))
    rows = read_rows([path])
    distributed.on_main(lambda: check_rows(rows, recipe, encoder, first_arguments.world_size))
    steps = planned_steps(recipe, len(rows), first_arguments.world_size)
    arguments = training_arguments(recipe, steps)
    sharding.shard_on_cpu()
    model = MiaModel(
        encoder,
        lora=recipe.lora,
        gradient_checkpointing=recipe.training.gradient_checkpointing,
        bf16=recipe.training.bf16,
    )
    if not sharded:  # FSDP moves it layer by layer, as it shards
        place_encoder(encoder, arguments.device)
    evaluations: list[RetrievalEvaluation | None] = []
    distributed.on_main(lambda: evaluations.append(make_evaluation(recipe, encoder)))
    batch = recipe.training.batch_size * recipe.training.accumulation * arguments.world_size
    trainer = MiaTrainer(
        recipe,
        encoder,
        model,
        arguments,
        Schedule(rows, steps * batch, recipe.training.seed, batch // recipe.training.accumulation, recipe.data.mixture),
        make_collator(recipe, encoder, rows, groups=2 if sharded or sharding.is_deepspeed() else 4),
        evaluations[0] if evaluations else None,
        start=(step_of(checkpoint) or 0) if checkpoint else 0,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return _finish(recipe, encoder, trainer, rows)


def _check_launch(recipe: Recipe, arguments: TrainingArguments) -> None:
    """Refuse what this kind of launch does not do, before any weights load."""
    check_world(arguments.world_size)
    if sharding.is_fsdp() and recipe.data.eval:
        raise MiaError(
            "data.eval: evaluation during training needs whole weights on rank 0, and FSDP shards them; "
            "leave data.eval out (mia-serve eval retrieval does it afterwards), or launch with DDP or ZeRO-2"
        )
    if arguments.deepspeed_plugin is not None and arguments.deepspeed_plugin.zero_stage == 3:
        raise MiaError(
            "deepspeed_config.zero_stage is 3; allowed: 1 and 2; for parameters in shards use "
            "recipes/accelerate/fsdp.yaml"
        )
    if recipe.model.dtype == "nf4" and (sharding.is_fsdp() or sharding.is_deepspeed()):
        raise MiaError(
            "model.dtype: nf4 is trained by one process or under DDP, every process with the whole 4-bit base; launch "
            "with recipes/accelerate/ddp.yaml, or set model.dtype: bf16"
        )
    if recipe.training.mini_batch_tokens is not None and sharding.is_deepspeed():
        raise MiaError(
            "training.mini_batch_tokens: the gradient cache makes several backward passes a step, and DeepSpeed allows "
            "one; launch with DDP or FSDP, or leave it out"
        )


def open_output(output: Path, resume: str | None) -> str | None:
    """Return the checkpoint to go on from, and make sure that no run is mixed into another."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MiaError(f"training.output_dir: {output} cannot be a folder ({error.strerror})") from None
    found = [path for path in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    whole = [path for path in found if step_of(path) is not None]
    last = str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else None
    if resume == "auto":
        return last
    if resume is not None:
        if step_of(resume) is None:
            raise MiaError(f"{resume}: no checkpoint of mia-train (no trainer_state.json); give a checkpoint-N folder")
        return resume
    if last is not None:
        raise MiaError(
            f"{output} holds {Path(last).name} of an earlier run; go on with --resume auto, or give another "
            "training.output_dir"
        )
    return None


def step_of(checkpoint: str | Path) -> int | None:
    """Return the step of a checkpoint; None where it was cut short: the Trainer's state is written last."""
    try:
        return int(json.loads((Path(checkpoint) / "trainer_state.json").read_text("utf-8"))["global_step"])
    except (OSError, ValueError):
        return None


def planned_steps(recipe: Recipe | GeneratorRecipe, rows: int, world_size: int) -> int:
    """Return the optimiser steps of a run: ``max_steps``, or what ``epochs`` passes over the rows take.

    Raises:
        MiaError: The warm-up takes them all.
    """
    training = recipe.training
    if training.max_steps is not None:
        return training.max_steps
    batch = training.batch_size * training.accumulation * world_size
    steps = max(1, math.ceil((training.epochs or 1.0) * rows / batch))
    if training.warmup >= max(1, steps):
        raise MiaError(
            f"training.warmup: {training.warmup:.0f} steps leave nothing of the {steps} that {training.epochs:g} "
            f"epochs of {rows} rows take; lower it, or give a share such as 0.1"
        )
    return steps


def training_arguments(recipe: Recipe, steps: int | None = None) -> TrainingArguments:
    """Translate a recipe into the Trainer's arguments; the first call joins the process group.

    Args:
        recipe: The recipe.
        steps: Optimiser steps, known once the rows are counted.
    """
    training = recipe.training
    steps = steps or training.max_steps or 1
    evaluates = recipe.data.eval is not None
    eval_steps = min(training.eval_steps or steps, steps)
    save_steps = training.save_steps or eval_steps  # the last step is saved in any case
    metric: dict[str, Any] = {}
    if evaluates:
        pick = eval_steps < steps and save_steps % eval_steps == 0
        metric = {"metric_for_best_model": training.metric, "greater_is_better": True, "load_best_model_at_end": pick}
    return TrainingArguments(
        output_dir=training.output_dir,
        max_steps=steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulation,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.scheduler,
        warmup_steps=min(training.warmup_steps(steps), steps),
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        **sharding.backend_arguments(training.bf16),
        seed=training.seed,
        logging_steps=training.log_steps,
        logging_first_step=True,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=eval_steps if evaluates else None,
        save_strategy="steps",
        save_steps=save_steps,
        save_total_limit=2,
        report_to=list(training.report_to),
        run_name=Path(training.output_dir).name,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        ddp_timeout=7200,  # rank 0 mines rows and evaluates while the others wait
        disable_tqdm=True,
        log_level="warning",
        **metric,
    )


def _finish(recipe: Recipe, encoder: Encoder, trainer: MiaTrainer, rows: list[Row]) -> RunResult:
    """Write the finished encoder and its card, and say what the run cost."""
    output, meter = Path(recipe.training.output_dir), trainer.meter
    meter.read()  # what came after the last log line
    result = RunResult(
        folder=output,
        steps=trainer.state.global_step,
        skipped=trainer.guard.skipped,
        loss=trainer.last_loss,
        metrics=dict(trainer.last_metrics),
        seconds=meter.seconds,
        rows_per_second=meter.rows / max(meter.seconds, 1e-9),
        tokens_per_second=meter.tokens / max(meter.seconds, 1e-9),
        peak_memory_gib=peak_memory_gib(trainer.args.device),
    )
    weights = trainer.whole_weights()
    distributed.on_main(lambda: _write_finished(recipe, encoder, trainer, rows, result, weights))
    if distributed.is_main():
        best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
        print(
            f"trained {result.steps} steps: {meter.rows} rows in {result.seconds:.0f} s, "
            f"{result.rows_per_second:.1f} rows/s, {result.tokens_per_second:.0f} tokens/s, "
            f"peak memory {result.peak_memory_gib:.2f} GiB"
            + (f", {result.skipped} steps skipped" if result.skipped else "")
            + (f", best {Path(best).name}" if best else "")
            + f"\nencoder: {output}",
            file=sys.stderr,
        )
    return result


def _write_finished(
    recipe: Recipe,
    encoder: Encoder,
    trainer: MiaTrainer,
    rows: list[Row],
    result: RunResult,
    weights: dict[str, torch.Tensor] | None,
) -> None:
    publish(encoder, result.folder, weights)
    write_run_facts(recipe, result.folder)
    device = trainer.args.device
    best = trainer.best_metrics if trainer.args.load_best_model_at_end else result.metrics
    facts = CardFacts(
        name=result.folder.resolve().name,
        recipe=recipe,
        rows=Counter(row.source or "rows" for row in rows),
        steps=result.steps,
        processes=trainer.args.world_size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        seconds=result.seconds,
        rows_per_second=result.rows_per_second,
        peak_memory_gib=result.peak_memory_gib,
        dim=encoder.dim,
        pooling=encoder.spec.pooling,
        metrics={"trained": {k: v for k, v in best.items() if not k.startswith("plain_")}} if best else {},
        benchmark=recipe.data.eval or "",
        final_loss=result.loss,
        base_revision=encoder.spec.revision,
        versions={name: version for name, version in package_versions().items() if version},
        merged=recipe.lora is None,
    )
    write_card(facts, result.folder)
