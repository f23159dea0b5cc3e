"""What a run writes while it trains: the JSONL log, rates, the state of the negatives, and non-finite steps."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mia_train import distributed
from mia_train.collate import TrainBatch
from mia_train.objective import Objective

LOG_FILE = "metrics.jsonl"
NONFINITE_FILE = "nonfinite_batches.json"


class MetricsLog:
    """The JSONL log of a run, one object a line with a step that never falls.

    Args:
        folder: The run's output folder.
        start: Step the run starts at; lines of an interrupted run beyond it are dropped.

    Attributes:
        kept: The lines of the interrupted run that stay.
    """

    def __init__(self, folder: Path, start: int = 0) -> None:
        self.path = folder / LOG_FILE
        lines: list[dict[str, Any]] = []
        if start > 0 and self.path.is_file():
            for line in self.path.read_text("utf-8").splitlines():
                try:
                    lines.append(json.loads(line))
                except json.JSONDecodeError:  # the run was killed while it wrote
                    break
        self.kept = [line for line in lines if line["step"] <= start]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.kept), "utf-8")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append one line; what is not a finite number becomes null."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **clean}) + "\n")


class Meter:
    """Count rows, tokens and the state of the negatives between two log lines, over all ranks.

    Args:
        device: Where the sums are kept.
        distills: Report the distillation loss.
        signatures: Report the contrastive loss with and without the signature, of the rows that have one.
    """

    TOTALS = ("total_rows", "total_tokens", "total_seconds")
    # Sums that are kept on the device, so that counting never waits for it.
    _SUMS = ("batches", "positive", "hardest", "masked", "candidates", "distill", "with", "without", "shown")

    def __init__(self, device: torch.device, *, distills: bool = False, signatures: bool = False) -> None:
        self.device, self.distills, self.signatures = device, distills, signatures
        self.rows = self.tokens = 0  # of the whole run, this rank
        self.seconds = 0.0
        self._started: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._sums = torch.zeros(len(self._SUMS), device=self.device)
        self._rows = self._tokens = self._slots = 0
        self._seconds = 0.0

    def start(self) -> None:
        """Start or go on with the clock (nothing happens if it runs)."""
        self._started = time.perf_counter() if self._started is None else self._started

    def pause(self) -> None:
        """Stop the clock while something else than training runs (evaluation, saving)."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def add(self, batch: TrainBatch, output: Objective) -> None:
        """Count one micro-batch."""
        self._rows += len(batch.query_ids)
        self._tokens += batch.tokens
        self._slots += batch.slots
        one = torch.ones((), device=self.device)
        found = output.contrast
        of_contrast = (found.positive, found.hardest, found.masked, found.candidates)
        of_signatures = (output.with_signature, output.without_signature, output.signature_rows)
        parts = (one, *of_contrast, output.distill, *of_signatures)
        self._sums += torch.stack([part.detach().float().to(self.device) for part in parts])

    def read(self) -> dict[str, float]:
        """Return the values since the last reading and start anew; collective, so every rank must call it."""
        self.pause()
        host = torch.tensor([self._rows, self._tokens, self._slots], dtype=torch.float64).to(self._float64)
        counts = distributed.sum_over_ranks(host.to(self.device)).tolist()
        sums = dict(zip(self._SUMS, distributed.sum_over_ranks(self._sums).tolist(), strict=True))
        seconds, batches = max(self._seconds, 1e-9), max(sums["batches"], 1.0)
        self.rows, self.tokens = self.rows + int(counts[0]), self.tokens + int(counts[1])
        self.seconds += self._seconds
        self._reset()
        self.start()
        more = {"distill_loss": sums["distill"] / batches} if self.distills else {}
        if self.signatures:
            shown = sums["shown"] or float("nan")
            more |= {"loss_with_signature": sums["with"] / shown, "loss_without_signature": sums["without"] / shown}
        return {
            "rows_per_s": counts[0] / seconds,
            "tokens_per_s": counts[1] / seconds,
            "padding": 1.0 - counts[1] / max(counts[2], 1.0),
            "positive_similarity": sums["positive"] / batches,
            "hardest_negative_similarity": sums["hardest"] / batches,
            "masked_negatives": sums["masked"],
            "negatives_per_row": sums["candidates"] / max(counts[0], 1.0) - 1.0,
            **more,
            **{name: getattr(self, name.removeprefix("total_")) for name in self.TOTALS},
        }

    def recall(self, line: dict[str, Any]) -> None:
        """Go on counting from a line that :meth:`read` gave an interrupted run."""
        for name in self.TOTALS:
            setattr(self, name.removeprefix("total_"), line.get(name, 0))

    @property
    def _float64(self) -> torch.dtype:
        return torch.float32 if self.device.type == "mps" else torch.float64


class TrainingDiverged(RuntimeError):
    """Too many steps in a row had no finite gradient."""


class NonFiniteGuard:
    """Skip optimiser steps whose gradient is not finite, and give up when that does not end.

    The gradient norm is taken after the ranks have averaged, so all of them decide alike.

    Args:
        folder: Where the batch ids are saved on giving up.
        limit: Consecutive non-finite steps after which the run aborts.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.skipped = 0
        self._consecutive: list[dict[str, Any]] = []
        self._batch_ids: list[str] = []

    def see(self, query_ids: tuple[str, ...]) -> None:
        """Note the rows that go into the step in progress."""
        self._batch_ids.extend(query_ids)

    def check(self, norm: float | Tensor, parameters: Any, step: int) -> None:
        """Drop the gradients if their norm is not finite.

        Raises:
            TrainingDiverged: ``limit`` steps in a row were not finite; their query ids have been saved.
        """
        ids, self._batch_ids = self._batch_ids, []
        if math.isfinite(float(norm)):
            self._consecutive.clear()
            return
        for parameter in parameters:
            parameter.grad = None  # AdamW passes over parameters without a gradient: no update, no decay, no moments
        self.skipped += 1
        everyone = distributed.gather_objects(ids)
        self._consecutive.append({"step": step, "query_ids": [i for part in everyone for i in part]})
        if distributed.is_main():
            print(f"step {step}: gradient norm is {float(norm)}; step skipped", file=sys.stderr)
        if len(self._consecutive) < self.limit:
            return
        file = self.folder / NONFINITE_FILE
        if distributed.is_main():
            file.write_text(json.dumps(self._consecutive, indent=2), "utf-8")
        raise TrainingDiverged(
            f"{self.limit} steps in a row had no finite gradient; the rows are listed in {file}. "
            "Lower training.learning_rate, or look at these rows"
        )


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: allocated on a CUDA device, resident in this process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * per_unit / 2**30
