"""TRL's SFT trainer with our log, our guard against non-finite steps, and compute in bfloat16 entered here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from mia_train import distributed
from mia_train.config import dump_recipe
from mia_train.finish import RECIPE_FILE
from mia_train.generator.examples import ExampleCollator
from mia_train.generator.schema import GeneratorRecipe
from mia_train.logs import MetricsLog, NonFiniteGuard

MAX_NONFINITE_STEPS = 5


class GeneratorTrainer(SFTTrainer):
    """TRL's trainer on examples that are tokenised already.

    The loss is the mean over the answer tokens of a whole optimiser step, over all passes and processes, so it does
    not depend on how the step is split.

    Args:
        recipe: The recipe.
        model: Causal language model, with adapters where the recipe has them.
        arguments: Made by :func:`mia_train.generator.train.sft_arguments`.
        examples: What :func:`mia_train.generator.examples.prepare_examples` wrote.
        tokenizer: Of the model.
        start: Step the run starts at (after resuming).
    """

    def __init__(
        self,
        recipe: GeneratorRecipe,
        model: Any,
        arguments: SFTConfig,
        examples: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        start: int = 0,
    ) -> None:
        pad = tokenizer.pad_token_id
        super().__init__(
            model=model,
            args=arguments,
            data_collator=ExampleCollator(tokenizer.eos_token_id if pad is None else pad),
            train_dataset=examples,
            processing_class=tokenizer,
        )
        self.recipe = recipe
        self._names = [f"{row} (k={k})" for row, k in zip(examples["id"][:], examples["k"][:], strict=True)]
        self.output = Path(str(arguments.output_dir))
        self.log_file = MetricsLog(self.output, start) if distributed.is_main() else None
        self.guard = NonFiniteGuard(self.output, MAX_NONFINITE_STEPS)
        self.meter = TokenMeter(arguments.device)
        self.last_loss: float | None = None
        for line in self.log_file.kept if self.log_file is not None else ():
            self.last_loss, self.guard.skipped = line["loss"], line["skipped_steps"]
            self.meter.recall(line)
        self.remove_callback(PrinterCallback)

    def _send_telemetry(self) -> None:
        """Send nothing: TRL would report model, device and number of processes to the hub at the start of a run."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Leave the card to :mod:`mia_train.generator.card`, which is written when the run is finished."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one micro-batch, forward and backward, with the clock on."""
        self.meter.start()
        return super().training_step(*args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return TRL's loss of one micro-batch."""
        numbers = inputs.pop("example").tolist()
        self.guard.see(tuple(self._names[i] for i in numbers))
        self.meter.add(inputs["attention_mask"])
        # Neither accelerate nor its FSDP policy is asked for bfloat16, which would round the gradients as well.
        device = inputs["input_ids"].device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.recipe.training.bf16):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Called once an optimiser step, after clipping and right before the step itself.
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:
            self.guard.check(norm, model.parameters(), self.state.global_step + 1)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add our measurements, pass the line on to the trackers and append it to the JSONL log."""
        measured = "loss" in logs
        if measured:
            self.last_loss = logs["loss"]
            logs |= self.meter.read()
            logs["skipped_steps"] = self.guard.skipped
            logs["data_epoch"] = self.state.epoch or 0.0
        super().log(logs, start_time)
        if self.log_file is None or not measured:
            return
        # TRL counts tokens from the last resumption on; total_tokens is of the whole run.
        self.log_file.write(self.state.global_step, {k: v for k, v in logs.items() if k not in ("epoch", "num_tokens")})
        print(
            f"step {self.state.global_step}/{self.state.max_steps}  loss {logs['loss']:.4f}  "
            f"grad {logs.get('grad_norm', float('nan')):.2f}  lr {logs['learning_rate']:.2e}  "
            f"accuracy {logs['mean_token_accuracy']:.3f}  {logs['tokens_per_s']:.0f} tokens/s",
            file=sys.stderr,
            flush=True,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a checkpoint and the recipe beside it; collective."""
        self.meter.pause()
        super().save_model(output_dir, _internal_call)
        if distributed.is_main():
            dump_recipe(self.recipe, Path(output_dir or self.output) / RECIPE_FILE)


class TokenMeter:
    """Count examples and tokens between two log lines, over all ranks."""

    TOTALS = ("total_rows", "total_tokens", "total_seconds")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = self.tokens = 0  # of the whole run
        self.seconds = 0.0
        self._started: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._counts = torch.zeros(3, dtype=torch.float64)  # rows, tokens, slots
        self._seconds = 0.0

    def start(self) -> None:
        """Start or go on with the clock (nothing happens if it runs)."""
        self._started = time.perf_counter() if self._started is None else self._started

    def pause(self) -> None:
        """Stop the clock while a checkpoint is written."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def add(self, mask: Tensor) -> None:
        """Count one micro-batch from its attention mask (B, L)."""
        self._counts += torch.tensor([len(mask), int(mask.sum()), mask.numel()], dtype=torch.float64)

    def read(self) -> dict[str, float]:
        """Return the values since the last reading and start anew; collective, so every rank must call it."""
        self.pause()
        exact = torch.float32 if self.device.type == "mps" else torch.float64
        rows, tokens, slots = distributed.sum_over_ranks(self._counts.to(self.device, exact)).tolist()
        seconds = max(self._seconds, 1e-9)
        self.rows, self.tokens, self.seconds = self.rows + int(rows), self.tokens + int(tokens), self.seconds + seconds
        self._reset()
        self.start()
        return {
            "rows_per_s": rows / seconds,
            "tokens_per_s": tokens / seconds,
            "padding": 1.0 - tokens / max(slots, 1.0),
            **{name: getattr(self, name.removeprefix("total_")) for name in self.TOTALS},
        }

    def recall(self, line: dict[str, Any]) -> None:
        """Go on counting from a line that :meth:`read` gave an interrupted run."""
        for name in self.TOTALS:
            setattr(self, name.removeprefix("total_"), line.get(name, 0))
