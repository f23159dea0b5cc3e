"""One fine-tuning run of a generator from a recipe: rows, examples, loop, finished model."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from datasets.utils.logging import disable_progress_bar
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.utils import logging as transformers_logging
from trl import SFTConfig

from mia_serve.core import MiaError
from mia_serve.core.names import resolve_folder
from mia_serve.eval.versions import package_versions
from mia_train import distributed, sharding
from mia_train.config import dump_recipe
from mia_train.finish import RECIPE_FILE, changes_since
from mia_train.generator.card import GeneratorFacts, render_generator_card
from mia_train.generator.examples import REPORT_FILE, ExamplesReport, prepare_examples
from mia_train.generator.loop import GeneratorTrainer
from mia_train.generator.schema import GeneratorRecipe
from mia_train.launch import check_world
from mia_train.logs import peak_memory_gib
from mia_train.model import add_lora
from mia_train.trainer import RunResult, open_output, planned_steps, step_of

logger = logging.getLogger(__name__)

_VERSIONS = ("mia-retrieval", "torch", "transformers", "trl", "peft", "accelerate")


def run(recipe: GeneratorRecipe, resume: str | None = None) -> RunResult:
    """Fine-tune one generator; every process of a launch calls it.

    Args:
        recipe: The resolved recipe.
        resume: A checkpoint folder, or ``auto`` for the last one in ``training.output_dir`` (none: start afresh).

    Raises:
        MiaError: The rows, the base or the checkpoint do not fit the recipe; nothing has been trained then.
        TrainingDiverged: Too many steps in a row without a finite gradient.
    """
    output = Path(recipe.training.output_dir)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
        disable_progress_bar()
    first = sft_arguments(recipe, recipe.training.max_steps or 1)  # joins the process group
    check_world(first.world_size)
    checkpoint = distributed.on_main(lambda: open_output(output, resume))
    if checkpoint and distributed.is_main():
        for change in changes_since(Path(checkpoint), recipe):
            print(f"warning: {change}; examples that are already made stay as they are", file=sys.stderr)
    base = resolve_folder(recipe.model.base)
    tokenizer = load_tokenizer(base)
    folder = distributed.on_main(
        lambda: prepare_examples(recipe, tokenizer, output, str(first.device), reuse=checkpoint is not None)
    )
    examples = load_from_disk(str(folder))
    arguments = sft_arguments(recipe, planned_steps(recipe, len(examples), first.world_size))
    sharding.shard_on_cpu()
    set_seed(recipe.training.seed)  # LoRA's start
    model = load_generator(recipe, base)
    start = (step_of(checkpoint) or 0) if checkpoint else 0
    trainer = GeneratorTrainer(recipe, model, arguments, examples, tokenizer, start)
    trainer.train(resume_from_checkpoint=checkpoint)
    return _finish(recipe, base, trainer, tokenizer)


def load_tokenizer(base: Path) -> PreTrainedTokenizerBase:
    """Open the tokenizer of a base model.

    Raises:
        MiaError: There is none that can be read.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise MiaError(f"model.base: {base}: no tokenizer that can be read ({_line(error)})") from None
    return tokenizer


def load_generator(recipe: GeneratorRecipe, base: Path) -> Any:
    """Load a causal language model in the recipe's format, with new adapters where it has a ``lora`` section.

    Raises:
        MiaError: The folder holds no such model.
    """
    if (base / "adapter_config.json").is_file() and not (base / "config.json").is_file():
        raise MiaError(f"model.base: {base} holds adapters; merge them first, and give the merged folder")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.model.dtype]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    except (OSError, ValueError) as error:
        raise MiaError(f"model.base: {base}: no causal language model that can be read ({_line(error)})") from None
    return model if recipe.lora is None else add_lora(model, recipe.lora, "CAUSAL_LM")


def sft_arguments(recipe: GeneratorRecipe, steps: int) -> SFTConfig:
    """Translate a recipe into TRL's arguments; the first call joins the process group.

    Args:
        recipe: The recipe.
        steps: Optimiser steps, known once the examples are counted.
    """
    training = recipe.training
    return SFTConfig(
        output_dir=training.output_dir,
        max_steps=steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulation,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.scheduler,
        warmup_steps=min(training.warmup_steps(steps), steps),
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        **sharding.backend_arguments(bf16=False),  # GeneratorTrainer enters autocast itself
        gradient_checkpointing=training.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=training.seed,
        data_seed=recipe.data.seed,
        logging_steps=training.log_steps,
        logging_first_step=True,
        save_strategy="steps",
        save_steps=training.save_steps or steps,  # the last step is saved in any case
        save_total_limit=2,
        report_to=list(training.report_to),
        run_name=Path(training.output_dir).name,
        max_length=None,  # the examples fit; TRL would cut the answer off
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        ddp_timeout=7200,  # rank 0 retrieves and tokenises while the others wait
        disable_tqdm=True,
        log_level="warning",
    )


def _finish(
    recipe: GeneratorRecipe, base: Path, trainer: GeneratorTrainer, tokenizer: PreTrainedTokenizerBase
) -> RunResult:
    """Write the finished model and its card, and say what the run cost."""
    output, meter = Path(recipe.training.output_dir), trainer.meter
    meter.read()  # what came after the last log line
    seconds = max(meter.seconds, 1e-9)
    result = RunResult(
        folder=output,
        steps=trainer.state.global_step,
        skipped=trainer.guard.skipped,
        loss=trainer.last_loss,
        metrics={},
        seconds=meter.seconds,
        rows_per_second=meter.rows / seconds,
        tokens_per_second=meter.tokens / seconds,
        peak_memory_gib=peak_memory_gib(trainer.args.device),
    )
    model = trainer.accelerator.unwrap_model(trainer.model)
    whole: Any = trainer.model
    weights = sharding.gather_weights(whole, recipe.lora is not None) if trainer.is_fsdp_enabled else None
    distributed.on_main(lambda: _publish(recipe, base, model, weights, tokenizer, trainer, result))
    if distributed.is_main():
        print(
            f"trained {result.steps} steps: {meter.rows} examples in {result.seconds:.0f} s, "
            f"{result.tokens_per_second:.0f} tokens/s, peak memory {result.peak_memory_gib:.2f} GiB"
            + (f", {result.skipped} steps skipped" if result.skipped else "")
            + f"\ngenerator: {output}",
            file=sys.stderr,
        )
    return result


def _publish(
    recipe: GeneratorRecipe,
    base: Path,
    model: Any,
    weights: dict[str, torch.Tensor] | None,
    tokenizer: PreTrainedTokenizerBase,
    trainer: GeneratorTrainer,
    result: RunResult,
) -> None:
    """Write the finished model into the run's folder; what makes it a model folder is moved in last."""
    aside = result.folder / ".finished"
    shutil.rmtree(aside, ignore_errors=True)
    if recipe.lora is None:
        save_as(model, weights, base, aside)
    else:
        model.save_pretrained(aside, **({"state_dict": weights} if weights is not None else {}))
    tokenizer.save_pretrained(aside)
    marker = "config.json" if recipe.lora is None else "adapter_config.json"
    (result.folder / marker).unlink(missing_ok=True)
    for entry in sorted(aside.iterdir(), key=lambda path: path.name == marker):
        os.replace(entry, result.folder / entry.name)
    aside.rmdir()
    dump_recipe(recipe, result.folder / RECIPE_FILE)
    device = trainer.args.device
    report = json.loads((result.folder / REPORT_FILE).read_text("utf-8"))
    facts = GeneratorFacts(
        name=result.folder.resolve().name,
        recipe=recipe,
        examples=ExamplesReport(**report),
        steps=result.steps,
        processes=trainer.args.world_size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        seconds=result.seconds,
        tokens_per_second=result.tokens_per_second,
        peak_memory_gib=result.peak_memory_gib,
        final_loss=result.loss,
        versions={name: version for name, version in package_versions(_VERSIONS).items() if version},
    )
    (result.folder / "README.md").write_text(render_generator_card(facts), "utf-8")


def save_as(model: Any, weights: dict[str, torch.Tensor] | None, base: Path, folder: Path) -> None:
    """Save a fine-tuned model in the format, and with the config and generation settings, of its base.

    The float32 master weights of a bf16 base would take twice the space, and a server would guess what to run them in.

    Args:
        model: The model.
        weights: Its whole weights where its own are shards; None: its own.
        base: Folder of the base.
        folder: Where to.
    """
    config = AutoConfig.from_pretrained(base)
    dtype = config.dtype or torch.float32
    whole = weights if weights is not None else model.state_dict()
    cast = {name: weight.to(dtype) for name, weight in whole.items() if name not in model.all_tied_weights_keys}
    model.save_pretrained(folder, state_dict=cast)
    config.dtype, config.architectures = dtype, model.config.architectures
    config.save_pretrained(folder)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
