"""Rows of a generator: a question, what it is answered from, and the answer; reading, writing, and making them.

One JSON object a line::

    {"id": "q1", "question": "…", "answer": "…", "chunks": ["best first", "…"], "task": "free",
     "summary": "…" or null, "signature": ["…"] or null, "options": ["…"]}

``answer`` is what the generator is to say, word for word, so it has the form that the prompt of its task asks for: a
phrase (``free``), JSON with the letter of an option (``choice``), the letter alone (``letter``), or
``<explanation>…</explanation><answer>TRUE</answer>`` (``claim``).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal

import numpy as np

from mia_serve.cli.common import run_defaults
from mia_serve.core import Encoder, MiaError
from mia_serve.eval.datasets import Benchmark, Haystack, Query
from mia_serve.rag import TASKS, Task, build_prompt
from mia_serve.retriever import Retriever
from mia_serve.signature import Signature
from mia_train.rows import id_key

_KEYS = ("id", "question", "answer", "chunks", "task", "summary", "signature", "options")
_CLAIM = re.compile(r"<explanation>.+</explanation>\s*<answer>(TRUE|FALSE)</answer>", re.DOTALL)


@dataclass(frozen=True)
class GeneratorRow:
    """One question with its answer; ``chunks`` best first, ``options`` for the tasks that choose."""

    id: str
    question: str
    answer: str
    chunks: tuple[str, ...]
    task: Task = "free"
    summary: str | None = None
    signature: tuple[str, ...] | None = None
    options: tuple[str, ...] | None = None

    def prompt(self, chunks: Sequence[str], context: Literal["summary", "signature", "none"]) -> list[dict[str, str]]:
        """Return the chat messages that ask this question from ``chunks``, as they will be when served."""
        summary = self.summary if context == "summary" else None
        signature = self.signature if context == "signature" else None
        return build_prompt(self.task, self.question, chunks, summary, signature, self.options)


def read_generator_rows(paths: Iterable[str | Path]) -> list[GeneratorRow]:
    """Read rows from JSONL files.

    Raises:
        MiaError: Not such a row; names file, line and key.
        FileNotFoundError: There is no such file.
    """
    rows, seen = [], set()
    for path in paths:
        # Not splitlines(): it also splits at characters that JSON strings may hold (U+2028, form feeds).
        for number, line in enumerate(Path(path).read_text("utf-8").split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = _parse(json.loads(line))
            except ValueError as error:
                raise MiaError(f"{path}, line {number}: {error}") from None
            if row.id in seen:
                raise MiaError(f"{path}, line {number}: id {row.id!r} occurs twice; give every row its own")
            seen.add(row.id)
            rows.append(row)
    if not rows:
        raise MiaError(f"{', '.join(map(str, paths))}: no rows")
    return rows


def write_generator_rows(path: str | Path, rows: Iterable[GeneratorRow]) -> None:
    """Write rows as JSONL, without keys that have no value."""
    lines = ({k: v for k, v in asdict(row).items() if v is not None} for row in rows)
    Path(path).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")


def _parse(raw: Any) -> GeneratorRow:
    if not isinstance(raw, dict):
        raise ValueError(f"a row is an object with the keys {', '.join(_KEYS)}")
    unknown = sorted(set(raw) - set(_KEYS))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r} (allowed: {', '.join(_KEYS)})")
    for key in ("id", "question", "answer"):
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise ValueError(f"{key} must be a text that is not empty")
    if not _texts(raw.get("chunks")) or not raw["chunks"]:
        raise ValueError("chunks must be a list of at least one text")
    if raw.get("summary") is not None and not isinstance(raw["summary"], str):
        raise ValueError("summary must be a text or null")
    for key in ("signature", "options"):
        if raw.get(key) is not None and not _texts(raw[key]):
            raise ValueError(f"{key} must be a list of texts or null")
    task = raw.get("task", "free")
    if task not in TASKS:
        raise ValueError(f"task {task!r}; allowed: {', '.join(TASKS)}")
    options = tuple(raw["options"]) if raw.get("options") else None
    build_prompt(task, raw["question"], (), options=options)  # refuses options that do not fit the task
    _check_answer(task, raw["answer"].strip(), len(options or ()))
    return GeneratorRow(
        id=raw["id"],
        question=raw["question"],
        answer=raw["answer"].strip(),
        chunks=tuple(raw["chunks"]),
        task=task,
        summary=raw.get("summary") or None,
        signature=tuple(raw["signature"]) if raw.get("signature") else None,
        options=options,
    )


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) and text.strip() for text in value)


def _check_answer(task: str, answer: str, options: int) -> None:
    """Refuse an answer that is not in the form the prompt asks for: the generator would learn to break its rule."""
    letters = ascii_uppercase[:options]
    if task == "letter" and answer not in tuple(letters):
        raise ValueError(f"answer {answer!r} must be one of {', '.join(letters)}")
    if task == "claim" and _CLAIM.fullmatch(answer) is None:
        raise ValueError(f"answer {answer!r} must be <explanation>…</explanation><answer>TRUE</answer>, or with FALSE")
    if task == "choice":
        try:
            given = json.loads(answer)
        except ValueError:
            given = None
        if not isinstance(given, dict) or set(given) != {"answer", "reasoning"} or given["answer"] not in [*letters]:
            raise ValueError(
                f'answer {answer!r} must be {{"answer": "x", "reasoning": "…"}} with x one of {", ".join(letters)}; '
                "for a letter alone take task: letter"
            )


def load_retrieval_encoders(name: str, device: str = "auto") -> tuple[Encoder, Encoder | None]:
    """Open E1, or E2 and the E1 that it was trained with (which its ``mia_run.json`` names).

    Returns:
        E1, and E2 where there is one.
    """
    encoder = Encoder.load(name, device=device)
    first = run_defaults(name).e1
    if first is None or Path(first).resolve() == Path(name).resolve():
        return encoder, None
    return Encoder.load(first, device=device), encoder


def build_generator_rows(
    benchmark: Benchmark,
    e1: Encoder | None = None,
    e2: Encoder | None = None,
    *,
    chunks: int = 10,
    first: int = 3,
    evidence: Literal["gold", "retrieved"] = "gold",
    signatures: bool = False,
    k_sum: int = 5,
    seed: int = 0,
) -> list[GeneratorRow]:
    """Turn the answered questions of a benchmark into rows; questions without an answer are left out.

    Args:
        benchmark: Haystacks and their questions.
        e1: Retrieves, and chooses signatures, as it will when serving; None where the chunks that do not answer are to
            be drawn evenly from the book of those that do.
        e2: Retrieves with (query, signature) in E1's place.
        chunks: Chunks a row, as many as its longest prompt will show.
        first: Chunks of the shortest prompt, which is to hold the gold ones.
        evidence: ``gold`` puts the gold chunks in random places among the first ones, so that a generator does not
            learn where to look; ``retrieved`` leaves what was retrieved.
        signatures: Give the rows signatures.
        k_sum: Most sessions in a signature.
        seed: Of what is drawn; together with the question's id.
    """
    if e1 is None and (evidence == "retrieved" or signatures):
        raise MiaError("retrieved evidence and signatures need an encoder (e1)")
    rows: list[GeneratorRow] = []
    left_out = 0
    for haystack in benchmark.haystacks:
        queries = [query for query in haystack.queries if query.answer.strip()]
        left_out += len(haystack.queries) - len(queries)
        if not queries:
            continue
        draws = [np.random.default_rng([seed, id_key(query.id) % 2**63]) for query in queries]
        chosen: list[Signature] | None = None
        if e1 is None:
            ranked = [_same_book(haystack, query, draw) for query, draw in zip(queries, draws, strict=True)]
        else:
            texts = [query.text for query in queries]
            retriever = Retriever(haystack.mindscape, e1, e2, k_sum=k_sum)
            hits, chosen = retriever.search(texts, chunks + max(len(query.gold) for query in queries))
            ranked = hits.ids
            if signatures and chosen is None:
                chosen = retriever.signatures(texts)
        text_of = {chunk.id: chunk.text for chunk in haystack.mindscape.chunks}
        for i, (query, draw) in enumerate(zip(queries, draws, strict=True)):
            ids = place_gold(query.gold, ranked[i], first, draw) if evidence == "gold" else ranked[i]
            rows.append(
                GeneratorRow(
                    id=query.id,
                    question=query.text,
                    answer=query.answer.strip(),
                    chunks=tuple(text_of[found] for found in ids[:chunks]),
                    signature=chosen[i].texts if signatures and chosen is not None else None,
                )
            )
    if left_out:
        print(f"{benchmark.name}: {left_out} questions have no answer and are left out", file=sys.stderr)
    return rows


def _same_book(haystack: Haystack, query: Query, random: np.random.Generator) -> list[str]:
    """Return the chunks of the books that a question has its answer in, in random order."""
    book_of = {chunk.id: chunk.book_id for chunk in haystack.mindscape.chunks}
    books = {book_of[chunk] for chunk in query.gold}
    own = [chunk for chunk, book in book_of.items() if book in books]
    return [own[i] for i in random.permutation(len(own))]


def place_gold(gold: Sequence[str], ranked: Sequence[str], first: int, random: np.random.Generator) -> list[str]:
    """Put the gold chunks in random places among the first ``first``, and fill up with the ranked ones that are not.

    Gold chunks beyond ``first`` come right behind.
    """
    others = [chunk for chunk in ranked if chunk not in gold]
    size = min(first, len(gold) + len(others))
    places = set(random.choice(size, min(size, len(gold)), replace=False).tolist())
    wanted, rest = iter(gold), iter(others)
    head = [next(wanted) if i in places else next(rest, None) for i in range(size)]
    return [chunk for chunk in (*head, *wanted, *rest) if chunk is not None]
