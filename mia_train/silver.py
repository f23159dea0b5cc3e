"""Silver evidence: training rows for books that have questions and answers, but no gold passages.

Algorithm 1 of MiA-RAG: the question, the question with its answer and the answer alone each retrieve the best
chunks; a vote over the three lists keeps the candidates; a language model names those that support the answer. What
it leaves are hard negatives. Entity nodes, where given, go the same way into ``Row.nodes``.

Without a language model the first candidates of the vote are the silver evidence (source ``silver-vote`` instead of
``silver-llm``). The candidates behind them are then likely to hold evidence too, so they make poor hard negatives: none
are taken unless asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mia_serve.core import Encoder, MiaError
from mia_serve.llm import ChatClient, Journal, LlmFailed
from mia_train.rows import Nodes, Passage, Row, id_key, text_key
from mia_train.silver_filter import PROMPT_HASH, keep
from mia_train.silver_input import Question, Unit
from mia_train.silver_vote import Found, find_candidates, rows_of_books

#: Failed calls in a row after which the endpoint is taken for down.
GIVE_UP = 10


@dataclass(frozen=True)
class SilverSettings:
    """How silver evidence is found.

    Attributes:
        filter: "llm" lets a language model choose, "none" keeps the first of the vote.
        top_k: Units that each of the three queries retrieves.
        candidates: Units that the vote keeps.
        keep: Silver units of a question without a language model.
        hard: Hard negatives, most; None: 5 with a language model, none without.
        simple: Simple negatives, drawn evenly from the same book.
        seed: Of the draws; together with the question's id.
        max_tokens: Of a reply.

    Raises:
        MiaError: Without a language model, ``keep`` is above ``candidates``.
    """

    filter: Literal["llm", "none"] = "llm"
    top_k: int = 10
    candidates: int = 10
    keep: int = 2
    hard: int | None = None
    simple: int = 5
    seed: int = 0
    max_tokens: int = 512

    def __post_init__(self) -> None:
        """Refuse more silver units than there are candidates, which would quietly be fewer."""
        if self.filter == "none" and self.keep > self.candidates:
            raise MiaError(f"keep is {self.keep}, but the vote leaves {self.candidates} candidates; keep at most those")

    @property
    def source(self) -> str:
        """``Row.source`` of the rows."""
        return "silver-llm" if self.filter == "llm" else "silver-vote"

    @property
    def hard_negatives(self) -> int:
        """Hard negatives that a row gets, most."""
        return self.hard if self.hard is not None else 5 if self.filter == "llm" else 0


@dataclass(frozen=True)
class Failure:
    """Why a question has no silver evidence: a word to count by, and what was said."""

    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Silver:
    """Rows in the order of the questions, and the report: JSON-ready counts."""

    rows: list[Row]
    report: dict[str, Any]


def make_silver(
    questions: Sequence[Question],
    chunks: Sequence[Unit],
    encoder: Encoder,
    *,
    nodes: Sequence[Unit] = (),
    vectors: np.ndarray | None = None,
    client: ChatClient | None = None,
    settings: SilverSettings | None = None,
    work: str | Path | None = None,
) -> Silver:
    """Find the silver evidence of all questions.

    Args:
        questions: Questions with answers.
        chunks: All chunks, see `silver_input.chunk_units`.
        encoder: Retrieves the candidates.
        nodes: Entity nodes, if any.
        vectors: The encoder's vectors of the chunks, (n_chunks, d); encoded where None.
        client: The language model, for ``settings.filter`` "llm".
        settings: How; the papers' values where None.
        work: File that keeps candidates and decisions as they come, so that a killed run goes on where it was.

    Raises:
        MiaError: No client, the work file is another run's, or was made with other settings.
        LlmFailed: The endpoint cannot be used. What it answered is in the work file.
    """
    settings = settings if settings is not None else SilverSettings()

    def find(asked: Sequence[Question]) -> dict[str, Found]:
        return find_candidates(
            asked, chunks, encoder, nodes=nodes, vectors=vectors, top_k=settings.top_k, size=settings.candidates
        )

    if settings.filter == "none":
        found = find(questions)
        chosen = {i: Found(f.chunks[: settings.keep], f.nodes[: settings.keep]) for i, f in found.items()}
        return _finish(questions, chunks, nodes, found, chosen, [], settings, {})
    if client is None:
        raise MiaError("filter 'llm' needs a client for a language model; give one, or filter 'none'")
    journal = None if work is None else Journal(work, exclusive=True)
    try:
        run = _Run(journal, _facts(questions, chunks, nodes, encoder, client, settings))
        for question_id, candidates in find([q for q in questions if q.id not in run.candidates]).items():
            run.note(question_id, "candidates", candidates)
        resumed = len(run.silver) + len(run.failed)
        judge = _Judge(client, _by_id(chunks), _by_id(nodes), settings.max_tokens)
        left = asyncio.run(_choose(questions, judge, run))
    finally:
        if journal is not None:
            journal.close()
    failures = [f for q in questions for f in (run.failed.get(q.id), left.get(q.id)) if f is not None]
    used = {"model": client.model, "resumed": resumed, **asdict(client.stats)}
    return _finish(questions, chunks, nodes, run.candidates, run.silver, failures, settings, {"llm": used})


def _by_id(units: Sequence[Unit]) -> dict[str, Unit]:
    return {unit.id: unit for unit in units}


class _Run:
    """What is known of each question so far, in memory and in the work file."""

    def __init__(self, journal: Journal | None, facts: dict[str, Any]) -> None:
        self._journal = journal
        self.candidates: dict[str, Found] = {}
        self.silver: dict[str, Found] = {}
        self.failed: dict[str, Failure] = {}
        records = journal.read() if journal is not None else iter(())
        header = next(records, None)
        if header is None:
            if journal is not None:
                journal.append({"settings": facts})
            return
        assert journal is not None
        before = header.get("settings")
        if not isinstance(before, dict):
            raise MiaError(f"{journal.path} is not the work file of this command; move it, or give another output")
        changed = [key for key in facts if before.get(key) != facts[key]]
        if changed:
            told = ", ".join(f"{key} ({before.get(key)} there, {facts[key]} now)" for key in changed)
            raise MiaError(
                f"{journal.path} was begun with other settings: {told}; remove it to begin anew, or give another output"
            )
        for record in records:
            self._take(record)

    def note(self, question_id: str, what: str, result: Found | Failure) -> None:
        """Keep one result."""
        record = {"id": question_id, what: asdict(result)}
        if self._journal is not None:
            self._journal.append(record)
        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        for what, kept in (("candidates", self.candidates), ("silver", self.silver)):
            if what in record:
                kept[record["id"]] = Found(tuple(record[what]["chunks"]), tuple(record[what]["nodes"]))
        if "failed" in record:
            self.failed[record["id"]] = Failure(**record["failed"])


def _facts(
    questions: Sequence[Question],
    chunks: Sequence[Unit],
    nodes: Sequence[Unit],
    encoder: Encoder,
    client: ChatClient,
    settings: SilverSettings,
) -> dict[str, Any]:
    """Return all that a candidate or a decision depends on; negatives are drawn anew and may change."""
    return {
        "questions": _hash(questions),
        "mindscape": _hash(chunks),
        "nodes": _hash(nodes) if nodes else None,
        "encoder": encoder.spec_hash,
        "top_k": settings.top_k,
        "candidates": settings.candidates,
        "model": client.model,
        "temperature": client.temperature,
        "seed": client.seed,
        "max_tokens": settings.max_tokens,
        "prompt": PROMPT_HASH,
    }


def _hash(records: Iterable[Question | Unit]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(list(vars(record).values()), ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Judge:
    """Asks the model about one question."""

    client: ChatClient
    chunks: Mapping[str, Unit]
    nodes: Mapping[str, Unit]
    max_tokens: int

    async def choose(self, question: Question, found: Found) -> Found:
        units = [self.chunks[i] for i in found.chunks]
        chunks = await keep(self.client, question, units, max_tokens=self.max_tokens)
        nodes: list[str] = []
        if chunks and found.nodes:  # a question without a silver chunk is dropped whatever its nodes are
            units = [self.nodes[i] for i in found.nodes]
            nodes = await keep(self.client, question, units, nodes=True, max_tokens=self.max_tokens)
        return Found(tuple(chunks), tuple(nodes))


async def _choose(questions: Sequence[Question], judge: _Judge, run: _Run) -> dict[str, Failure]:
    """Let the model decide the questions that are undecided; return those that a later run may ask again.

    Raises:
        LlmFailed: The endpoint refuses everybody, or fails time after time.
    """
    from tqdm import tqdm

    left: dict[str, Failure] = {}
    todo = [q for q in questions if q.id not in run.silver and q.id not in run.failed]
    waiting = iter(todo)
    stopped: LlmFailed | None = None
    in_a_row = 0

    async def work() -> None:
        nonlocal stopped, in_a_row
        for question in waiting:
            try:
                run.note(question.id, "silver", await judge.choose(question, run.candidates[question.id]))
                in_a_row = 0
            except LlmFailed as failure:
                in_a_row = in_a_row + 1 if failure.transient else 0
                if failure.hopeless or in_a_row >= GIVE_UP:
                    stopped = stopped or failure
                result = Failure(question.id, failure.label, str(failure))
                if failure.transient or failure.hopeless:
                    left[question.id] = result
                else:
                    run.note(question.id, "failed", result)
            bar.update()
            if stopped is not None:
                return

    async with judge.client as client:
        with tqdm(total=len(todo), unit="question", disable=None) as bar:
            # As many as the client lets through: prompts are long, so they are not built before their turn.
            await asyncio.gather(*(work() for _ in range(min(client.concurrency, len(todo)))))
    if stopped is not None:
        raise stopped
    return left


def _finish(
    questions: Sequence[Question],
    chunks: Sequence[Unit],
    nodes: Sequence[Unit],
    candidates: Mapping[str, Found],
    silver: Mapping[str, Found],
    failures: Sequence[Failure],
    settings: SilverSettings,
    more: dict[str, Any],
) -> Silver:
    """Turn decisions into rows, and count."""
    of_chunks, of_nodes = _Drawer(chunks, settings), _Drawer(nodes, settings)
    asked = {q.id: (q.book, text_key(q.text)) for q in questions}
    # Asked twice (with another answer), a question has evidence in both rows: what supports one answer is no negative
    # of the other.
    known: dict[tuple[str | None, int], set[str]] = {}
    for question_id, found in silver.items():
        if question_id in asked:
            known.setdefault(asked[question_id], set()).update(found.chunks, found.nodes)
    rows = []
    for question in questions:
        chosen = silver.get(question.id)
        if chosen is None or not chosen.chunks:
            continue
        node_part = None
        if chosen.nodes:
            node_part = Nodes(
                *of_nodes.draw(question, candidates[question.id].nodes, chosen.nodes, known[asked[question.id]])
            )
        positives, negatives = of_chunks.draw(
            question, candidates[question.id].chunks, chosen.chunks, known[asked[question.id]]
        )
        rows.append(
            Row(
                query_id=question.id,
                query=question.text,
                positives=positives,
                negatives=negatives,
                nodes=node_part,
                group=question.book or of_chunks.unit_of[positives[0].id].book or "",
                source=settings.source,
            )
        )
    hard, wanted = settings.hard_negatives, settings.hard_negatives + settings.simple
    report = {
        "source": settings.source,
        "questions": len(questions),
        "kept": len(rows),
        "dropped_none": sum(not found.chunks for found in silver.values()),
        "failed": len(failures),
        "failed_by_reason": dict(sorted(Counter(failure.reason for failure in failures).items())),
        "silver_per_question": _mean([len(row.positives) for row in rows]),
        "silver_nodes_per_question": _mean([len(row.nodes.positives) if row.nodes else 0 for row in rows]),
        "hard_negatives_per_question": _mean([sum(p.kind == "hard" for p in row.negatives) for row in rows]),
        "rows_short_of_hard_negatives": sum(sum(p.kind == "hard" for p in r.negatives) < hard for r in rows),
        "rows_short_of_negatives": sum(len(row.negatives) < wanted for row in rows),
        "settings": asdict(settings) | {"hard": hard},
        **more,
        "failures": [asdict(failure) for failure in failures],
    }
    return Silver(rows, report)


def _mean(counts: Sequence[int]) -> float:
    return round(sum(counts) / len(counts), 4) if counts else 0.0


class _Drawer:
    """Draw the negatives of a question."""

    def __init__(self, units: Sequence[Unit], settings: SilverSettings) -> None:
        self.units, self.settings = units, settings
        self.unit_of = _by_id(units)
        self.rows_of = rows_of_books(units)

    def draw(
        self, question: Question, candidates: Sequence[str], silver: Sequence[str], known: Set[str]
    ) -> tuple[tuple[Passage, ...], tuple[Passage, ...]]:
        """Return positives and negatives; no negative has the id or the normalised text of another passage.

        Nor of one in ``known``: the ids of the evidence of all rows with this question.
        """
        positives = tuple(Passage(unit_id, self.unit_of[unit_id].text) for unit_id in silver)
        taken = {text_key(self.unit_of[unit_id].text) for unit_id in known if unit_id in self.unit_of}
        negatives: list[Passage] = []

        def take(units: Iterable[Unit], count: int, kind: str) -> None:
            for unit in units:
                if count == 0:
                    return
                if text_key(unit.text) not in taken:
                    taken.add(text_key(unit.text))
                    negatives.append(Passage(unit.id, unit.text, kind))
                    count -= 1

        take((self.unit_of[i] for i in candidates if i not in silver), self.settings.hard_negatives, "hard")
        # Of the question's book and of every book (nodes), as it was searched; else of the books of its evidence.
        found = {self.unit_of[i].book for i in silver}
        books = {question.book, None} if question.book else found
        rows = sorted(row for book in books for row in self.rows_of.get(book, []))
        random = np.random.default_rng([self.settings.seed, id_key(question.id) % 2**63])
        take((self.units[rows[i]] for i in random.permutation(len(rows))), self.settings.simple, "simple")
        return positives, tuple(negatives)
