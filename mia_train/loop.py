"""The training loop: ``transformers.Trainer`` with our batches, losses, evaluation and checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from mia_serve.core import Encoder, MiaError, fuse_views
from mia_train import distributed
from mia_train.collate import Collator, Schedule, SlotKeys, TrainBatch
from mia_train.evaluate import RetrievalEvaluation
from mia_train.finish import RECIPE_FILE, write_run_facts
from mia_train.logs import Meter, MetricsLog, NonFiniteGuard
from mia_train.losses import Candidates, LossOutput, PositiveKeys, info_nce, joint
from mia_train.model import MiaModel, load_encoder
from mia_train.schema import LossConfig, Recipe

MAX_NONFINITE_STEPS = 5


def batch_loss(vectors: Tensor, batch: TrainBatch, config: LossConfig, alpha: float) -> LossOutput:
    """Compute the loss of a micro-batch from its readouts.

    Args:
        vectors: (R, d) unit vectors in the order of building.
        batch: The micro-batch.
        config: Kind of negatives, temperature, beta, margin.
        alpha: Weight of the signature-aware view in the fused query.
    """
    query = vectors[batch.query_readouts]

    def of_view(queries: Tensor, keys: SlotKeys, weights: Tensor | None) -> LossOutput:
        return info_nce(
            queries,
            Candidates(vectors[keys.readouts], keys.ids, keys.texts, keys.valid),
            PositiveKeys(keys.positive_ids, keys.positive_texts),
            negatives=config.negatives,
            temperature=config.temperature,
            mask_margin=config.mask_margin,
            row_weights=weights,
        )

    def loss(target_readouts: Tensor, keys: SlotKeys, weights: Tensor | None = None) -> LossOutput:
        target = vectors[target_readouts]
        total = of_view(fuse_views(query, target, alpha), keys, weights)
        for view, weight in ((query, config.query_view), (target, config.signature_view)):
            if weight > 0:
                total = total._replace(loss=total.loss + weight * of_view(view, keys, weights).loss)
        return total

    chunk = loss(batch.chunk_readouts, batch.documents)
    if config.beta is None or batch.nodes is None or batch.node_readouts is None:
        return chunk
    return joint(chunk, loss(batch.node_readouts, batch.nodes, batch.node_weights), config.beta)


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
        self.meter = Meter(arguments.device)
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

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one micro-batch with the clock on."""
        self.meter.start()
        return super().training_step(*args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of one micro-batch; see :func:`batch_loss`."""
        vectors = model(inputs.groups)[inputs.order]
        output = batch_loss(vectors, inputs, self.recipe.loss, self.encoder.spec.alpha)
        self.meter.add(inputs, output)
        self.guard.see(inputs.query_ids)
        return (output.loss, output) if return_outputs else output.loss

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
        super().save_model(output_dir, _internal_call)
        distributed.barrier()  # the folder is renamed into place; no rank may write its random state before that

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(str(output_dir or self.args.output_dir))
        encoder = self.encoder
        if state_dict is not None:  # sharded parameters, gathered by the caller: put them into a whole model
            encoder = load_encoder(self.recipe.model)
            whole = MiaModel(encoder, lora=self.recipe.lora)
            whole.load_state_dict(state_dict)
        encoder.save(folder)
        write_run_facts(self.recipe, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(self.encoder, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            load_weights(self.encoder, Path(str(self.state.best_model_checkpoint)))


def load_weights(encoder: Encoder, folder: Path) -> None:
    """Copy the weights of a checkpoint of the same run into an encoder, in place.

    Raises:
        MiaError: They are not weights of such a model, or of such adapters.
    """
    adapter, model = folder / "adapter_model.safetensors", encoder.model
    fits = adapter.is_file() == hasattr(model, "peft_config")
    try:
        if fits and adapter.is_file():
            from peft import get_peft_model_state_dict, set_peft_model_state_dict

            weights = load_file(adapter)
            fits = weights.keys() == get_peft_model_state_dict(model, save_embedding_layers=False).keys()
            if fits:
                set_peft_model_state_dict(model, weights)
        elif fits:
            model.load_state_dict(Encoder.load(folder, device="cpu", dtype="float32").model.state_dict())
    except RuntimeError:  # sizes or names differ; torch lists them all
        fits = False
    if not fits:
        raise MiaError(
            f"{folder}: its weights do not fit the model and lora sections of this recipe; resume with those of "
            f"{folder / RECIPE_FILE}, or give another training.output_dir"
        )


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
