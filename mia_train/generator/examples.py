"""Rows into token ids: each row once for each number of chunks, cut to fit, with the loss on the answer alone."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mia_serve.core import Encoder, MiaError
from mia_serve.core.storage import write_aside
from mia_serve.eval.datasets import load_benchmark
from mia_train.generator.rows import (
    GeneratorRow,
    build_generator_rows,
    load_retrieval_encoders,
    read_generator_rows,
    write_generator_rows,
)
from mia_train.generator.schema import ROW_SUFFIX, GeneratorRecipe
from mia_train.schema import parse_benchmark

ROWS_FILE = "rows.jsonl"
EXAMPLES_FOLDER = "examples"
REPORT_FILE = "examples.json"
_AT_ONCE = 256  # examples handed to the tokenizer together, which it spreads over the cores
_PROBE = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]

Context = Literal["summary", "signature", "none"]


class Example(NamedTuple):
    """One training sequence.

    Attributes:
        id: The row's.
        k: Chunks asked for.
        input_ids: Prompt, answer and end of turn.
        prompt_tokens: How many of them are the prompt, which has no loss.
        chunks: Chunks of which something is shown.
        cut: Whether chunks were shortened or left out to fit.
    """

    id: str
    k: int
    input_ids: list[int]
    prompt_tokens: int
    chunks: int
    cut: bool


@dataclass(frozen=True)
class ExamplesReport:
    """What became of the rows.

    Attributes:
        rows: Rows read or built.
        examples: Sequences made of them.
        cut: Sequences in which chunks were shortened or left out to fit.
        dropped_chunks: Chunks of which nothing is left, over all sequences.
        short: Sequences whose row has fewer chunks than they were to show.
        without_context: Rows that have no summary (or signature), though the recipe shows one.
        longest: Tokens of the longest sequence.
        tokens: Of all sequences.
        answer_tokens: Those with a loss.
    """

    rows: int
    examples: int
    cut: int
    dropped_chunks: int
    short: int
    without_context: int
    longest: int
    tokens: int
    answer_tokens: int


class ChatEncoder:
    """Turn chat messages into ids as a server does: the template's text, tokenised without further special tokens.

    The prompt is tokenised alone, as it will be when served, and the answer after it, so that no token spans both.

    Args:
        tokenizer: Of the model in training.
        max_tokens: Most tokens of a sequence.

    Raises:
        MiaError: There is no chat template, it takes no system message, or it does not end an answer with the
            end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        if not tokenizer.chat_template:
            raise MiaError("model.base: its tokenizer has no chat template; take an instruction-tuned model")
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.end = tokenizer.eos_token_id
        special = sorted(token for token in tokenizer.all_special_tokens if token)
        self._control = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        try:
            self._answer_ids(["c"])
        except TemplateError as error:
            raise MiaError(f"model.base: its chat template takes no system and user message ({error})") from None

    def encode(self, rows: Sequence[tuple[GeneratorRow, int]], context: Context) -> list[Example]:
        """Encode (row, number of chunks) pairs; chunks are cut from the last one until a sequence fits.

        Raises:
            MiaError: Of a row not even a part of a chunk would fit.
        """
        shown = [row.chunks[:k] for row, k in rows]
        prompts = [row.prompt(chunks, context) for (row, _), chunks in zip(rows, shown, strict=True)]
        ids = self._ids([self._text(prompt) for prompt in prompts])
        answers = self._answer_ids([row.answer for row, _ in rows])
        return [
            self._fit(row, k, chunks, context, prompt, answer)
            for (row, k), chunks, prompt, answer in zip(rows, shown, ids, answers, strict=True)
        ]

    def check_text(self, row: GeneratorRow) -> None:
        """Refuse a row whose text would end a turn or open another one."""
        texts = (row.question, row.answer, *row.chunks, row.summary or "", *(row.signature or ()), *(row.options or ()))
        for text in texts:
            found = self._control.search(text)
            if found:
                raise MiaError(
                    f"row {row.id!r}: its text holds {found[0]!r}, a control token of this tokenizer; remove it"
                )

    def _fit(
        self,
        row: GeneratorRow,
        k: int,
        chunks: tuple[str, ...],
        context: Context,
        prompt: list[int],
        answer: list[int],
    ) -> Example:
        asked = chunks
        while (excess := len(prompt) + len(answer) - self.max_tokens) > 0 and chunks:
            last = self.tokenizer(chunks[-1], add_special_tokens=False, return_offsets_mapping=True)
            keep = len(last["input_ids"]) - excess
            end = last["offset_mapping"][keep - 1][1] if keep > 0 else 0
            # The offsets of a token that holds part of a character are those of the whole one.
            rest = chunks[-1][: min(end, len(chunks[-1]) - 1)].rstrip()
            chunks = (*chunks[:-1], rest) if rest else chunks[:-1]
            (prompt,) = self._ids([self._text(row.prompt(chunks, context))])
        if not chunks:
            raise MiaError(
                f"row {row.id!r}: question, {'answer' if context == 'none' else f'answer and {context}'} leave no room "
                f"for a chunk in model.max_tokens {self.max_tokens}; raise it"
            )
        return Example(row.id, k, prompt + answer, len(prompt), len(chunks), chunks != asked)

    def _answer_ids(self, answers: Sequence[str]) -> list[list[int]]:
        start, texts = self._text(_PROBE), []  # what follows a prompt does not depend on it
        for answer in answers:
            whole = self.tokenizer.apply_chat_template(
                [*_PROBE, {"role": "assistant", "content": answer}], tokenize=False
            )
            if not str(whole).startswith(start):
                raise MiaError(
                    "model.base: its chat template writes a prompt differently once it is answered, so that training "
                    "would show what serving never does; take a base with another template"
                )
            texts.append(str(whole)[len(start) :])
        ids = self._ids(texts)
        for own in ids:
            if self.end not in own:
                raise MiaError(
                    f"model.base: its chat template does not end an answer with {self.tokenizer.eos_token!r}, so the "
                    "model would not learn to stop; take an instruction-tuned model"
                )
            del own[len(own) - own[::-1].index(self.end) :]  # a line break, which nobody generates
        return ids

    def _text(self, messages: list[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return list(self.tokenizer(texts, add_special_tokens=False)["input_ids"])


def prepare_examples(
    recipe: GeneratorRecipe, tokenizer: PreTrainedTokenizerBase, output: Path, device: str, reuse: bool = False
) -> Path:
    """Write rows, examples and a report into the run's folder; return the examples' folder. Meant for rank 0 alone.

    Args:
        recipe: The recipe.
        tokenizer: Of the base.
        output: Folder of the run.
        device: Where chunks are retrieved.
        reuse: Keep the examples if they are there (a resumed run must see the same ones).
    """
    folder = output / EXAMPLES_FOLDER
    if reuse and folder.is_dir():
        return folder
    data = recipe.data
    encoder = ChatEncoder(tokenizer, recipe.model.max_tokens)
    rows = collect_rows(recipe, device)
    lacking = 0
    if data.context != "none":
        lacking = sum(not (row.summary if data.context == "summary" else row.signature) for row in rows)
        if lacking == len(rows):
            raise MiaError(f"data.context: {data.context}, but no row has a {data.context}; take another, or none")
    for row in rows:
        encoder.check_text(row)
    write_generator_rows(output / ROWS_FILE, rows)
    examples = ((row, k) for row in rows for k in data.chunks)
    counts: Counter[str] = Counter()
    batches = []
    while pairs := list(islice(examples, _AT_ONCE)):
        made = encoder.encode(pairs, data.context)
        batches.append(_record_batch(made, counts["examples"]))
        _count(counts, made, [min(k, len(row.chunks)) for row, k in pairs])
    with write_aside(folder) as aside:
        Dataset(pa.Table.from_batches(batches)).save_to_disk(str(aside))
    report = ExamplesReport(rows=len(rows), without_context=lacking, **counts)
    (output / REPORT_FILE).write_text(json.dumps(asdict(report), indent=2) + "\n", "utf-8")
    print(describe(report), file=sys.stderr)
    return folder


def collect_rows(recipe: GeneratorRecipe, device: str) -> list[GeneratorRow]:
    """Read the row files of a recipe, and build the rows of its benchmarks."""
    data = recipe.data
    files = [source for source in data.train if source.endswith(ROW_SUFFIX)]
    rows = read_generator_rows(files) if files else []
    encoders: tuple[Encoder | None, Encoder | None] = (None, None)
    if data.benchmarks and data.encoder is not None:
        encoders = load_retrieval_encoders(data.encoder, device)
    for source in data.benchmarks:
        name, split, series = parse_benchmark(source)
        rows += build_generator_rows(
            load_benchmark(name, split, series, limit=data.limit),
            *encoders,
            chunks=max(data.chunks),
            first=min(data.chunks),
            evidence=data.evidence,
            signatures=data.context == "signature",
            k_sum=data.k_sum,
            seed=data.seed,
        )
    return rows


def describe(report: ExamplesReport) -> str:
    """Say in a line what became of the rows."""
    notes = [
        f"{report.examples} examples of {report.rows} rows",
        f"{report.tokens / max(report.examples, 1):.0f} tokens each, {report.longest} the longest",
    ]
    if report.cut:
        notes.append(f"chunks cut to fit in {report.cut} ({report.dropped_chunks} chunks left out)")
    if report.short:
        notes.append(f"{report.short} show fewer chunks than asked for, their rows have no more")
    if report.without_context:
        notes.append(f"{report.without_context} rows have no summary or signature")
    return "; ".join(notes)


class ExampleCollator:
    """Pad examples as TRL does, with labels on the answer alone, and say which examples they are.

    Args:
        pad_id: Fills up ``input_ids``; the attention mask is told the lengths, so any id will do.
    """

    def __init__(self, pad_id: int) -> None:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        self._pad = DataCollatorForLanguageModeling(pad_token_id=pad_id)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``attention_mask``, ``labels`` (-100: no loss), each (B, L), and ``example`` (B,)."""
        labelled = [
            {"input_ids": e["input_ids"], "labels": [-100] * e["prompt_tokens"] + e["input_ids"][e["prompt_tokens"] :]}
            for e in examples
        ]
        batch: dict[str, torch.Tensor] = self._pad(labelled)
        return batch | {"example": torch.tensor([e["example"] for e in examples])}


def _count(counts: Counter[str], made: list[Example], available: list[int]) -> None:
    """Add a batch of examples to the counts of the report; ``available`` are the chunks that could be shown."""
    counts["examples"] += len(made)
    counts["cut"] += sum(example.cut for example in made)
    counts["dropped_chunks"] += sum(n - example.chunks for n, example in zip(available, made, strict=True))
    counts["short"] += sum(n < example.k for n, example in zip(available, made, strict=True))
    counts["longest"] = max(counts["longest"], *(len(example.input_ids) for example in made))
    counts["tokens"] += sum(len(example.input_ids) for example in made)
    counts["answer_tokens"] += sum(len(example.input_ids) - example.prompt_tokens for example in made)


def _record_batch(examples: list[Example], first: int) -> pa.RecordBatch:
    """Lay examples out in Arrow, numbered from ``first``; lists of Python integers would take ten times the memory."""
    lengths = [len(example.input_ids) for example in examples]
    ids = pa.ListArray.from_arrays(
        pa.array(np.cumsum([0, *lengths]), pa.int32()),
        pa.array(np.concatenate([np.asarray(e.input_ids, np.int32) for e in examples])),
    )
    return pa.RecordBatch.from_pydict(
        {
            "example": pa.array(range(first, first + len(examples)), pa.int64()),
            "id": pa.array([e.id for e in examples]),
            "k": pa.array([e.k for e in examples], pa.int32()),
            "input_ids": ids,
            "prompt_tokens": pa.array([e.prompt_tokens for e in examples], pa.int32()),
        }
    )
