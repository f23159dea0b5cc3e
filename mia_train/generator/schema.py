"""What a generator's recipe (``task: generator``) may say.

Numbers that are not given default to MiA-Gen's (arXiv 2512.17220, table 7): full fine-tune, batch 2 a device, warm-up
0.05, learning rate 1e-5, every question with 3, 5 and 10 chunks.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mia_train.schema import (
    Count,
    LoraSection,
    Names,
    Positive,
    RunSection,
    Weight,
    _no_bool,
    _Section,
    parse_benchmark,
)

ROW_SUFFIX = ".jsonl"
ANSWERED_BENCHMARKS = ("saltmarsh", "fairytaleqa")  # whose reference answers are short phrases


class GeneratorModel(_Section):
    """The language model to start from.

    Attributes:
        base: Hub id, folder, or ``package:module/path``; a causal language model with a chat template.
        max_tokens: Most tokens of an example, prompt and answer; chunks are cut, from the last one, to fit.
        dtype: Format the base weights are held in; bf16 needs LoRA, whose own weights stay fp32.
    """

    base: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, BeforeValidator(_no_bool), Field(ge=32)] = 16384
    dtype: Literal["fp32", "bf16"] = "fp32"


class GeneratorData(_Section):
    """Where rows come from, and what of a row is shown.

    Attributes:
        train: Files of generator rows (JSONL) and benchmarks with answers (``fairytaleqa:train``; with ``:series`` all
            books are pooled), taken together.
        encoder: Retrieves the chunks of benchmark questions, and chooses their signatures: an E1, or an E2 that was
            trained here and so names its E1. None: the chunks that do not answer are drawn from the same book.
        chunks: Numbers of chunks; each row is trained on once for each.
        context: What tells of the whole book: its ``summary``, the ``signature`` of the question, or ``none``.
        evidence: Chunks of benchmark questions. ``gold``: the gold ones in random places among others (as in MiA-Gen's
            NarrativeQA part). ``retrieved``: those that were found, in their order (as in its CLIPPER part).
        k_sum: Most sessions in the signature of a benchmark question.
        limit: Most questions of each benchmark, spread over all of it; None: all.
        seed: Of the places of gold chunks and of the order of examples.
    """

    train: Annotated[Names, Field(min_length=1)]
    encoder: str | None = None
    chunks: Annotated[tuple[Positive, ...], Field(min_length=1)] = (3, 5, 10)
    context: Literal["summary", "signature", "none"] = "summary"
    evidence: Literal["gold", "retrieved"] = "gold"
    k_sum: Positive = 5
    limit: Positive | None = None
    seed: Count = 0

    @field_validator("train")
    @classmethod
    def _known_sources(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for source in value:
            if source.endswith(ROW_SUFFIX):
                continue
            if source.endswith(".parquet"):
                raise ValueError(f"{source!r}: generator rows are read from {ROW_SUFFIX} files")
            reference = parse_benchmark(source, ANSWERED_BENCHMARKS)
            if reference.split != "train":
                raise ValueError(f"{source!r}: only '{reference.name}:train' (or ':train:series') is for training")
        if len(set(value)) < len(value):
            raise ValueError("names the same source twice")
        return value

    @field_validator("chunks")
    @classmethod
    def _each_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"{list(value)} names a number twice")
        return value

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """The sources that are benchmarks."""
        return tuple(source for source in self.train if not source.endswith(ROW_SUFFIX))


class GeneratorTraining(RunSection):
    """Steps, optimiser and logs: as for a retriever, with MiA-Gen's defaults."""

    batch_size: Positive = 2
    learning_rate: Weight = 1e-5
    warmup: Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)] = 0.05


class GeneratorRecipe(_Section):
    """One run of supervised fine-tuning of a generator."""

    task: Literal["generator"]
    model: GeneratorModel
    lora: LoraSection | None = None
    data: GeneratorData
    training: GeneratorTraining

    @model_validator(mode="after")
    def _sections_agree(self) -> GeneratorRecipe:
        # Messages start with the YAML path: pydantic knows none for a check that spans sections.
        self.training.check_length()
        if self.model.dtype == "bf16" and self.lora is None:
            raise ValueError(
                "model.dtype: bf16 weights swallow small updates in a full fine-tune; set model.dtype: fp32 and "
                "training.bf16: true (bf16 compute on fp32 weights), or add a lora section"
            )
        benchmarks = self.data.benchmarks
        for key, value in (("evidence", self.data.evidence), ("context", self.data.context)):
            if benchmarks and value in ("retrieved", "signature") and self.data.encoder is None:
                raise ValueError(f"data.encoder: data.{key}: {value} of {benchmarks[0]} needs an encoder")
        if benchmarks and self.data.context == "summary":
            raise ValueError(
                f"data.context: {benchmarks[0]} has no summaries of whole books; take signature or none, or row files"
            )
        return self


def generator_warnings(recipe: GeneratorRecipe) -> list[str]:
    """Name what is allowed but rarely meant, one line each."""
    data = recipe.data
    keys = set() if data.benchmarks else {"encoder", "evidence", "k_sum", "limit"}
    if data.context != "signature":
        keys.add("k_sum")
    why = "without a benchmark in data.train" if not data.benchmarks else "without data.context: signature"
    return [f"data.{key}: has no effect {why}" for key in sorted(keys & data.model_fields_set)]
