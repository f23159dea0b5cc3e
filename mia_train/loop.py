"""The training loop: ``transformers.Trainer`` with our batches, losses, evaluation and checkpoints."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import save_fsdp_optimizer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_callback import PrinterCallback

from mia_serve.core import Encoder, MiaError
from mia_train import distributed, sharding
from mia_train.collate import Collator, TrainBatch
from mia_train.evaluate import RetrievalEvaluation
from mia_train.finish import RECIPE_FILE, write_run_facts
from mia_train.gradcache import cached_backward
from mia_train.logs import Meter, MetricsLog, NonFiniteGuard
from mia_train.model import MiaModel
from mia_train.objective import Objective, batch_loss
from mia_train.schedule import Schedule
from mia_train.schema import Recipe

MAX_NONFINITE_STEPS = 5


class MiaTrainer(Trainer):
    """Hugging Face's Trainer on :class:`MiaModel`.

    Args:
        recipe: The recipe.
        encoder: The encoder in training; its weights are those of ``model``.
        model: The module that is trained.
        arguments: Made by :func:`mia_train.trainer.training_arguments`.
        schedule: The samples of the whole run in order.
        collator: Makes micro-batches of them.
        evaluation: Called on rank 0 where the recipe has ``data.eval``; None on the other ranks.
        start: Step the run starts at (after resuming).
    """

    def __init__(
        self,
        recipe: Recipe,
        encoder: Encoder,
        model: MiaModel,
        arguments: TrainingArguments,
        schedule: Schedule,
        collator: Collator,
        evaluation: RetrievalEvaluation | None = None,
        start: int = 0,
    ) -> None:
        super().__init__(
            model=model,
            args=arguments,
            data_collator=collator,  # type: ignore[arg-type]
            train_dataset=schedule,
            eval_dataset=[0] if recipe.data.eval else None,  # only asked whether it is there; see evaluate()
        )
        # Every micro-batch has the same number of rows and its loss is their mean, so dividing by the number of
        # accumulated passes is right, and num_items_in_batch (counted from labels, which we have none of) is not.
        self.model_accepts_loss_kwargs = False
        self.schedule = schedule
        self.recipe, self.encoder, self.evaluation = recipe, encoder, evaluation
        self.meter = Meter(
            arguments.device,
            distills=recipe.loss.distill is not None,
            signatures=recipe.data.view == "signature",
        )
        self.output = Path(str(arguments.output_dir))
        self.log_file = MetricsLog(self.output, start) if distributed.is_main() else None
        self.guard = NonFiniteGuard(self.output, MAX_NONFINITE_STEPS)
        self.evaluations: dict[int, dict[str, float]] = {}  # by step
        self.last_loss: float | None = None
        if self.log_file is not None:
            self._recall(self.log_file.kept)
        self.remove_callback(PrinterCallback)
        self.add_callback(_StepLine())

    def _recall(self, lines: list[dict[str, Any]]) -> None:
        """Take over what an interrupted run had found out, so that log and card tell of the whole run."""
        for line in lines:
            if "loss" in line:
                self.last_loss, self.guard.skipped = line["loss"], line["skipped_steps"]
                self.meter.recall(line)
            metrics = {k.removeprefix("eval_"): v for k, v in line.items() if k.startswith("eval_")}
            if metrics:
                self.evaluations[line["step"]] = metrics

    @property
    def last_metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation; empty before the first."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}

    @property
    def best_metrics(self) -> dict[str, float]:
        """Metrics of the best step so far."""
        return self.evaluations.get(self.state.best_global_step or 0, {})

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.schedule)  # which is shuffled already

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        return None

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: no estimate is made."""
        return 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs.to(self.args.device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-batch, forward and backward, with the clock on."""
        self.meter.start()
        if self.recipe.training.mini_batch_tokens is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        batch = self._prepare_inputs(inputs)
        passes = self.current_gradient_accumulation_steps

        def loss_of(vectors: Tensor) -> tuple[Tensor, Tensor]:
            output = self._objective(vectors, batch)
            return output.loss / passes, output.loss.detach()

        rounds = len(batch.groups)
        if self.is_fsdp_enabled:
            rounds = int(distributed.max_over_ranks(torch.tensor(rounds, device=self.args.device)))
        syncs = self.accelerator.sync_gradients  # false in all micro-batches of a step but the last

        def no_sync() -> AbstractContextManager[None]:
            return self.accelerator.no_sync(model) if syncs else nullcontext()

        return cached_backward(model, batch.groups, loss_of, no_sync=no_sync, rounds=rounds) / passes

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of one micro-batch in one forward; see :func:`batch_loss`."""
        output = self._objective(model(inputs.groups), inputs)
        return (output.loss, output) if return_outputs else output.loss

    def _objective(self, forwarded: Tensor, batch: TrainBatch) -> Objective:
        """Compute the objective from the readouts in order of forwarding, and count the micro-batch."""
        output = batch_loss(forwarded[batch.order], batch, self.recipe.loss, self.encoder.spec.alpha)
        self.meter.add(batch, output)
        self.guard.see(batch.query_ids)
        return output

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Called once an optimiser step, after clipping and right before the step itself.
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None:
            self.guard.check(norm, model.parameters(), self.state.global_step + 1)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add our measurements, pass the line on to the trackers and append it to the JSONL log."""
        if "loss" in logs:
            self.last_loss = logs["loss"]
            logs |= self.meter.read()
            logs["skipped_steps"] = self.guard.skipped
            logs["data_epoch"] = self.state.global_step * self._global_batch / len(self.schedule.rows)
        super().log(logs, start_time)
        if self.log_file is not None:
            # The Trainer's epoch is the share of the schedule; ours is in passes over the rows.
            self.log_file.write(self.state.global_step, {k: v for k, v in logs.items() if k != "epoch"})

    @property
    def _global_batch(self) -> int:
        return int(self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Search the benchmark on rank 0 and return the same metrics on every rank."""
        self.meter.pause()
        self.encoder.model.eval()
        metrics = distributed.on_main(lambda: self.evaluation() if self.evaluation is not None else {})
        self.evaluations[self.state.global_step] = metrics
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        best = super()._determine_best_metric(metrics, trial)
        if best:  # save it even where save_steps is not due, or there would be nothing to go back to
            self.control.should_save = True
        return bool(best)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write an encoder folder; collective."""
        self.meter.pause()
        weights = self.whole_weights()
        # Every rank waits: the folder is renamed into place, and none may write its random state before that.
        distributed.on_main(lambda: self._save(output_dir, weights))

    def whole_weights(self) -> dict[str, Tensor] | None:
        """Return rank 0's copy of the weights where the model is in shards (FSDP), else None; collective."""
        if not self.is_fsdp_enabled:
            return None
        return sharding.gather_weights(cast(nn.Module, self.model), trained_only=self.recipe.lora is not None)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(str(output_dir or self.args.output_dir))
        sharding.save_encoder(self.encoder, folder, state_dict)
        write_run_facts(self.recipe, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # As the Trainer does, without its second copy of the weights: those of the encoder folder are read back.
        plugin, scheduler = self.accelerator.state.fsdp_plugin, cast(Any, self.lr_scheduler)
        save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
        if self.args.should_save:
            torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._load_weights(Path(str(self.state.best_model_checkpoint)))

    def _load_weights(self, folder: Path) -> None:
        if not self.is_fsdp_enabled:
            load_weights(self.encoder, folder)
            return
        weights: dict[str, Tensor] = {}
        distributed.on_main(lambda: weights.update(checkpoint_weights(self.encoder, folder)))
        sharding.scatter_weights(cast(nn.Module, self.model), weights)


def load_weights(encoder: Encoder, folder: Path) -> None:
    """Copy the weights of a checkpoint of the same run into an encoder, in place; see :func:`checkpoint_weights`."""
    encoder.model.load_state_dict(checkpoint_weights(encoder, folder), strict=False)


def checkpoint_weights(encoder: Encoder, folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by the names they have in an encoder's model; with adapters those alone.

    Raises:
        MiaError: They are not weights of such a model, or of such adapters.
    """
    adapter, model = folder / "adapter_model.safetensors", encoder.model
    adapted = hasattr(model, "peft_config")
    expected = {name: weight.shape for name, weight in model.state_dict().items()}
    weights: dict[str, Tensor] = {}
    if adapted == adapter.is_file():
        if adapted:  # peft leaves the adapter's own name out in files
            expected = {name: shape for name, shape in expected.items() if ".default" in name}
            names = {name.replace(".default", ""): name for name in expected}
            weights = {names.get(name, name): weight for name, weight in load_file(adapter).items()}
        else:
            weights = Encoder.load(folder, device="cpu", dtype="float32").model.state_dict()
    if not weights or {name: weight.shape for name, weight in weights.items()} != expected:
        raise MiaError(
            f"{folder}: its weights do not fit the model and lora sections of this recipe; resume with those of "
            f"{folder / RECIPE_FILE}, or give another training.output_dir"
        )
    return weights


class _StepLine(TrainerCallback):
    """Print one line a log entry on standard error, on rank 0."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            line = (
                f"loss {logs['loss']:.4f}  grad {logs.get('grad_norm', float('nan')):.2f}  "
                f"lr {logs['learning_rate']:.2e}  pos {logs['positive_similarity']:.3f}  "
                f"hard {logs['hardest_negative_similarity']:.3f}  {logs['rows_per_s']:.1f} rows/s"
            )
        else:
            line = "  ".join(f"{k.removeprefix('eval_')} {v:.4f}" for k, v in logs.items() if k.startswith("eval_"))
        if line:
            print(f"step {state.global_step}/{state.max_steps}  {line}", file=sys.stderr, flush=True)
