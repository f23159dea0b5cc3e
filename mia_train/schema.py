"""What a recipe may say: typed sections, and the checks that need two of them.

Numbers that are not given default to the papers' (spec "Training": batch 4 a device, 2,000 steps, warm-up 0.1,
learning rate 1e-4, temperature 0.01, five hard and five simple negatives).
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

METRICS = ("r@3", "r@5", "r@10", "hit@1", "mrr", "ndcg@10")
TRAIN_BENCHMARKS = ("saltmarsh", "fairytaleqa", "qmsum")
EVAL_BENCHMARKS = (*TRAIN_BENCHMARKS, "locomo")
ROW_SUFFIXES = (".jsonl", ".parquet")


class BenchmarkRef(NamedTuple):
    """A benchmark as a recipe names it: ``name:split``, or ``name:split:series`` for all books pooled."""

    name: str
    split: str
    series: bool


def is_row_file(source: str) -> bool:
    """Tell a file of rows (by its suffix) from a benchmark's name."""
    return source.endswith(ROW_SUFFIXES)


def parse_benchmark(reference: str, known: tuple[str, ...] = EVAL_BENCHMARKS) -> BenchmarkRef:
    """Read ``fairytaleqa:val`` or ``fairytaleqa:val:series``.

    Raises:
        ValueError: Not of that form, or no benchmark of that name; names the nearest one.
    """
    match = re.fullmatch(r"([A-Za-z0-9_-]+):([A-Za-z0-9_-]+)(:series)?", reference)
    if match is None:
        raise ValueError(
            f"{reference!r} is neither a {' or '.join(ROW_SUFFIXES)} file nor a benchmark "
            f"'name:split' (names: {', '.join(known)})"
        )
    if match[1] not in known:
        near = difflib.get_close_matches(match[1], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no benchmark {match[1]!r} here{hint} (allowed: {', '.join(known)})")
    return BenchmarkRef(match[1], match[2], match[3] is not None)


def _no_bool(value: Any) -> Any:
    # Python counts True as 1, so `batch_size: yes` would train with a batch of one.
    if isinstance(value, bool):
        raise ValueError("needs a number, not true or false")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Real = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1, allow_inf_nan=False)]
Weight = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_list)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """The encoder to start from.

    Attributes:
        base: Hub id, folder, or ``package:module/path`` for a folder inside an installed Python package.
        pooling: Overrides what the base's own folder says; None keeps it.
        max_query_tokens: Limit of the whole query side, signature included; None: the base's own limit.
        max_document_tokens: Limit of a document; None: the base's own limit.
        alpha: Weight of the signature view at query time, s = (1 - alpha) * s_qry + alpha * s_sig.
        signature_pooling: Mean pooling only: the signature view averages ``all`` tokens, or those of the ``query``.
        instruction: Text put before every query; None keeps the base's own.
        dtype: Format the base weights are held in. bf16 and nf4 (QLoRA: 4-bit, by bitsandbytes) need LoRA, whose own
            weights stay fp32.
    """

    base: Annotated[str, Field(min_length=1)]
    pooling: Literal["mean", "cls", "last"] | None = None
    max_query_tokens: Annotated[int, BeforeValidator(_no_bool), Field(ge=8)] | None = None
    max_document_tokens: Annotated[int, BeforeValidator(_no_bool), Field(ge=8)] | None = None
    alpha: Share = 0.5
    signature_pooling: Literal["all", "query"] | None = None
    instruction: str | None = None
    dtype: Literal["fp32", "bf16", "nf4"] = "fp32"


class LoraSection(_Section):
    """Low-rank adapters; leave the section out for a full fine-tune.

    Attributes:
        rank: Rank of each adapter.
        alpha: Scale numerator: an adapter's output is multiplied by alpha / rank.
        dropout: Dropout before each adapter.
        targets: Module names that get an adapter, or ``all-linear``.
    """

    rank: Positive = 128
    alpha: Positive = 256
    dropout: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=1)] = 0.05
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"

    @field_validator("targets")
    @classmethod
    def _some_target(cls, value: Any) -> Any:
        if not value:
            raise ValueError("needs at least one module name, or all-linear")
        return value


class DataConfig(_Section):
    """Where rows come from and what one row gives a step.

    Attributes:
        train: Files of rows (JSONL or Parquet) and benchmarks (``fairytaleqa:train``; with ``:series`` signatures and
            hard negatives are sought in all books pooled), taken together.
        eval: Benchmark searched during training; None: no evaluation. Do not report on what picked the checkpoint.
        view: ``query`` trains E1 on the query alone, ``signature`` trains E2 on (query, signature).
        signature_encoder: E1 that chooses the signatures of rows that bring none; None: the untrained base.
        mindscape: Folder of the mindscape that the row files' passages come from; rows without a signature get theirs
            out of it. Benchmarks bring their own.
        signature_mode: How it chooses: best coverage, the first sessions of the pool, or, as in MiA-RAG, the summary of
            the whole book (``global_summary``).
        k_sum: Most sessions in a signature.
        signature_dropout: Share of rows whose signature is left out, so that E2 also serves plain queries.
        signature_noise: Share of rows in whose signature one summary is swapped for that of another row.
        signature_gold: Share of the rows whose signature misses every gold session that get one, in a random place.
            E2 learns to read a signature only from rows in which there is something to find.
        hard_negatives: Negatives mined for the query, a row.
        simple_negatives: Negatives drawn evenly from the same document, a row.
        mixture: Weight of each source (a row's ``source``: a benchmark's name, or what the file says, else the file's
            stem). Every batch then comes from one source, and sources come in these ratios; None: all rows alike,
            shuffled together.
        seed: Of every draw above.
    """

    train: Annotated[Names, Field(min_length=1)]
    eval: str | None = None
    view: Literal["query", "signature"] = "query"
    signature_encoder: str | None = None
    mindscape: str | None = None
    signature_mode: Literal["coverage", "first_k", "global_summary"] = "coverage"
    k_sum: Positive = 5
    signature_dropout: Share = 0.0
    signature_noise: Share = 0.0
    signature_gold: Share = 0.0
    hard_negatives: Count = 5
    simple_negatives: Count = 5
    mixture: dict[str, Weight] | None = None
    seed: Count = 0

    @field_validator("train")
    @classmethod
    def _train_sources(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for source in value:
            if is_row_file(source):
                continue
            reference = parse_benchmark(source, TRAIN_BENCHMARKS)
            if reference.split != "train":
                raise ValueError(f"{source!r}: only '{reference.name}:train' (or ':train:series') is for training")
        if len(set(value)) < len(value):
            raise ValueError("names the same source twice")
        return value

    @field_validator("eval")
    @classmethod
    def _eval_source(cls, value: str | None) -> str | None:
        if value is not None:
            parse_benchmark(value)
        return value


class DistillConfig(_Section):
    """Learn the scores that a teacher gave a row's passages (``score`` in the rows; ``mia-train mine`` writes them).

    Attributes:
        kind: ``kl``: the distribution over the row's candidates; ``margin_mse``: the lead of the positive over each.
        weight: Weight of this loss; the contrastive one keeps 1.
        temperature: Divides teacher scores and cosines in ``kl``.
        teacher_scale: Multiplies teacher scores first: brings logits to the range of cosines.
    """

    kind: Literal["kl", "margin_mse"] = "kl"
    weight: Weight = 1.0
    temperature: Weight = 0.05
    teacher_scale: Weight = 1.0


class LossConfig(_Section):
    """InfoNCE over the candidates of a query.

    Attributes:
        negatives: ``own``: the row's own negatives only (the papers' form). ``in_batch``: also every other row's
            documents, from all processes, with false negatives masked.
        temperature: Divides the cosine.
        beta: Weight of the chunk loss in the joint form, beta * L_chunk + (1 - beta) * L_node; None: chunks only.
        mask_margin: A negative that scores above its positive by more than this is masked; None: never by score.
        query_view: Weight of the same loss on the query-only view alone, added to that of the fused query.
        signature_view: Likewise, on the signature-aware view alone.
        contrastive: Weight of InfoNCE itself; 0 leaves distillation alone.
        distill: Distillation, or None.
        matryoshka: Widths, descending, at which the loss is taken as well, so that vectors may be cut to them; the full
            width always takes part.
    """

    negatives: Literal["own", "in_batch"] = "own"
    temperature: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)] = 0.01
    beta: Share | None = None
    mask_margin: Real | None = None
    query_view: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)] = 0.0
    signature_view: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)] = 0.0
    contrastive: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)] = 1.0
    distill: DistillConfig | None = None
    matryoshka: tuple[Positive, ...] = ()

    @field_validator("matryoshka")
    @classmethod
    def _descending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value), reverse=True):
            raise ValueError(f"{list(value)} must be descending, each width once")
        return value


class RunSection(_Section):
    """Steps, optimiser and logs, the same for retrievers and generators.

    Attributes:
        output_dir: Folder of checkpoints, the JSONL log and the finished model.
        max_steps: Optimiser steps; give this or ``epochs``.
        epochs: Passes over the rows.
        batch_size: Rows a device and forward pass.
        accumulation: Forward passes a step. Unlike a larger batch it adds no in-batch negatives.
        learning_rate: Peak.
        warmup: Below 1 a share of all steps, otherwise a number of steps.
        scheduler: Course of the learning rate after the warm-up.
        bf16: Compute in bfloat16 under autocast; trained weights and optimiser state stay fp32.
        gradient_checkpointing: Recompute activations (always the non-reentrant kind) to save memory.
        save_steps: Steps between checkpoints; None: as ``eval_steps``, or the end only.
        report_to: ``wandb``, ``tensorboard`` beside the JSONL log, which is always written.
        max_grad_norm: Gradients are clipped to this norm; 0: not clipped.
        log_steps: Steps between log lines.
    """

    output_dir: Annotated[str, Field(min_length=1)]
    max_steps: Positive | None = None
    epochs: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)] | None = None
    batch_size: Positive = 4
    accumulation: Positive = 1
    learning_rate: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)] = 1e-4
    warmup: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)] = 0.1
    scheduler: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    weight_decay: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)] = 0.0
    bf16: bool = False
    gradient_checkpointing: bool = False
    save_steps: Positive | None = None
    report_to: Annotated[tuple[Literal["wandb", "tensorboard"], ...], BeforeValidator(_as_list)] = ()
    seed: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, lt=2**32)] = 0  # as far as NumPy's seeds reach
    max_grad_norm: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)] = 1.0
    log_steps: Positive = 10

    def warmup_steps(self, steps: int) -> int:
        """Return the warm-up in steps out of ``steps`` (a share is rounded up, as the Trainer does)."""
        return math.ceil(self.warmup * steps) if self.warmup < 1 else int(self.warmup)

    def check_length(self) -> None:
        """Refuse a run without a length, or with two, and a warm-up that takes all of it.

        Raises:
            ValueError: The message starts with the YAML path.
        """
        if (self.max_steps is None) == (self.epochs is None):
            given = "neither" if self.max_steps is None else "both"
            raise ValueError(f"training.max_steps: give max_steps or epochs, one of the two; {given} given")
        if self.warmup >= 1:
            if self.warmup != int(self.warmup):
                raise ValueError(
                    f"training.warmup: {self.warmup} is neither a share below 1 nor a whole number of steps"
                )
            if self.max_steps is not None and self.warmup >= self.max_steps:
                raise ValueError(
                    f"training.warmup: {int(self.warmup)} steps leave nothing of max_steps {self.max_steps}; "
                    "lower it, or give a share such as 0.1"
                )


class TrainingSection(RunSection):
    """Steps, optimiser, evaluation, logs.

    Attributes:
        mini_batch_tokens: Turns the gradient cache on: a batch of any size in forwards of at most so many tokens,
            padding included, with the gradient of one whole forward; None: one forward.
        eval_steps: Steps between evaluations; None: at the end only.
        metric: Picks the best checkpoint; one of r@3, r@5, r@10, hit@1, mrr, ndcg@10.
    """

    mini_batch_tokens: Positive | None = None
    eval_steps: Positive | None = None
    metric: str = "mrr"

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, value: str) -> str:
        if value not in METRICS:
            near = difflib.get_close_matches(value.lower().removeprefix("eval_"), METRICS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown metric {value!r}{hint} (available: {', '.join(METRICS)})")
        return value


class Recipe(_Section):
    """One training run."""

    model: ModelConfig
    lora: LoraSection | None = None
    data: DataConfig
    loss: LossConfig = LossConfig()
    training: TrainingSection

    @property
    def negatives_per_row(self) -> int:
        """Negatives that each row brings, hard and simple."""
        return self.data.hard_negatives + self.data.simple_negatives

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        # Messages start with the YAML path: pydantic knows none for a check that spans sections.
        training = self.training
        if self.negatives_per_row == 0 and self.loss.negatives == "own":
            raise ValueError(
                "loss.negatives: 'own' needs at least 2 candidates per query, and data.hard_negatives + "
                "data.simple_negatives is 0; raise one of them or set loss.negatives: in_batch"
            )
        training.check_length()
        if self.data.eval and training.eval_steps and training.save_steps and training.save_steps % training.eval_steps:
            raise ValueError(
                f"training.save_steps: {training.save_steps} is no multiple of eval_steps {training.eval_steps}, so "
                "the best checkpoint may not have been saved; make it one, or leave save_steps out"
            )
        if self.data.mixture is not None and training.max_steps is None:
            raise ValueError(
                "training.epochs: with data.mixture every source is passed over at its own rate, so there is no epoch "
                "of them all; give max_steps"
            )
        if self.model.dtype == "bf16" and self.lora is None:
            raise ValueError(
                "model.dtype: bf16 weights swallow small updates in a full fine-tune; set model.dtype: fp32 and "
                "training.bf16: true (bf16 compute on fp32 weights), or add a lora section"
            )
        if self.model.dtype == "nf4" and self.lora is None:
            raise ValueError("model.dtype: nf4 weights are frozen, so nothing would train; add a lora section")
        if self.loss.contrastive == 0 and self.loss.distill is None:
            raise ValueError("loss.contrastive: 0 leaves no loss; raise it, or add loss.distill")
        if self.loss.distill is not None and self.negatives_per_row == 0:
            raise ValueError(
                "loss.distill: it compares a row's positive with the row's own negatives, and data.hard_negatives + "
                "data.simple_negatives is 0; raise one of them, or leave loss.distill out"
            )
        return self
