"""Run a question-answering evaluation: all questions and systems in flight at once, every answer safe when it is there.

    run.json         the result, written at the end
    settings.json    what the answers depend on; a run goes on only with equals
    answers.jsonl    one record an answer, appended as each ends
    haystacks.jsonl  the haystacks' books and sessions
    texts.jsonl      texts of the chunks that an answer names
    replies.jsonl    the language model's replies
    mindscapes/      the mindscapes

A run's folder can be moved; `mia-serve report` reads it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mia_serve.core import MiaError
from mia_serve.eval.qa import Progress, QaHaystack, QaSettings, Summariser, build_haystacks, data_hash
from mia_serve.eval.qa_data import QaBenchmark, QaQuestion
from mia_serve.eval.qa_folder import (
    FORMAT,
    SETTINGS,
    VERSION,
    check_resumable,
    finished,
    lines,
    named_texts,
    passing,
    write,
)
from mia_serve.eval.qa_metrics import recall_at, recall_name, score_answer
from mia_serve.eval.qa_prompts import prompts_hash
from mia_serve.eval.qa_summary import run_record
from mia_serve.eval.qa_systems import Bench, Outcome, answer_mode, answer_question, label, prompt_name
from mia_serve.eval.report import encoder_facts
from mia_serve.llm import Journal, LlmFailed
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.retriever import Retriever

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.llm import ChatClient

#: Answers under way for each call that may be under way: between two calls a question searches.
_AHEAD = 4
#: Answers in a row that failed for a passing reason (busy, 5xx, timeouts), after which the endpoint is taken for down.
_GIVE_UP = 20


@dataclass(frozen=True)
class QaEncoders:
    """The encoders of a run.

    Attributes:
        base: Untrained; the first stage where there is no E1.
        e1: Query-only retriever.
        e2: Retriever of (query, signature) pairs.
        selector: Chooses the signature; the first stage's where None.
    """

    base: Encoder | None
    e1: Encoder | None = None
    e2: Encoder | None = None
    selector: Encoder | None = None

    @property
    def first(self) -> Encoder:
        """The encoder of the first stage."""
        found = self.e1 or self.base
        if found is None:
            raise MiaError("no first-stage encoder: give a base encoder or an E1 (--base, --e1)")
        return found

    def facts(self) -> dict[str, dict[str, Any] | None]:
        """Return what makes their vectors, by role."""
        roles = {"base": self.base, "e1": self.e1, "e2": self.e2, "selector": self.selector or self.first}
        return {role: encoder_facts(encoder) for role, encoder in roles.items()}


@dataclass(frozen=True)
class QaPlan:
    """All that a run is given.

    Attributes:
        benchmark: Books and questions.
        settings: What decides the answers.
        systems: Keys of `qa_systems.LABELS`, in order.
        encoders: The encoders.
        client: The language model; None: passages only.
        summarise: Writes session summaries.
        folder: The run's folder; made where it is missing.
        asked: What else decides which questions are asked (limit, series): recorded, and compared on resuming.
        names: Names of the encoders by role; recorded.
        n_boot: Resamples for the intervals.
        seed: Of the resamples.
        mindscapes: Folder of the mindscapes; ``mindscapes`` in the run's where None.
        kept: Vectors of chunks by haystack and encoder; filled, so that runs over the same chunks can share it.
    """

    benchmark: QaBenchmark
    settings: QaSettings
    systems: tuple[str, ...]
    encoders: QaEncoders
    client: ChatClient | None
    summarise: Summariser
    folder: Path
    asked: Mapping[str, Any]
    names: Mapping[str, str | None] = field(default_factory=dict)
    n_boot: int = 10_000
    seed: int = 0
    mindscapes: Path | None = None
    kept: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)


class _OneAtATime:
    """An encoder that several retrievers' threads share."""

    def __init__(self, encoder: Encoder, lock: Lock) -> None:
        self._encoder, self._lock = encoder, lock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode_queries(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._encoder.encode_queries(*args, **kwargs)

    def encode_documents(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._encoder.encode_documents(*args, **kwargs)


async def run_qa(plan: QaPlan, say: Progress = lambda line: None) -> dict[str, Any]:
    """Answer what is not answered yet, and sum up.

    A run that was killed goes on where it was: answers in ``answers.jsonl`` stand, and no model is asked again for a
    reply that is in its cache.

    Args:
        plan: The run.
        say: Called with a line at each step.

    Returns:
        The content of ``run.json``.

    Raises:
        MiaError: The folder holds a run with other settings, or another process writes it.
        RuntimeError: The language model cannot be used any further; the same run goes on later.
    """
    started = time.perf_counter()
    plan.folder.mkdir(parents=True, exist_ok=True)
    if "agent" in plan.systems and plan.settings.signature_update == "rewrite" and plan.encoders.e2 is None:
        raise MiaError("signature_update rewrite needs an E2 that reads the model's texts: give --encoder, or select")
    settings = _settings(plan)
    check_resumable(plan.folder, settings)
    journal = Journal(plan.folder / "answers.jsonl", exclusive=True)
    try:
        write(plan.folder / SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        haystacks = await build_haystacks(
            plan.benchmark,
            plan.settings,
            plan.encoders.first.tokenizer,
            plan.mindscapes or plan.folder / "mindscapes",
            plan.summarise,
            say,
        )
        write(plan.folder / "haystacks.jsonl", lines(haystack.to_dict() for haystack in haystacks))
        done = finished(journal, plan.systems)
        await _answer_all(plan, haystacks, done, journal, say)
    except LlmFailed as failure:
        raise RuntimeError(f"{failure}; what is answered is kept: the same command goes on from there") from failure
    finally:
        journal.close()
    write(plan.folder / "texts.jsonl", lines(named_texts(haystacks, done)))
    say("intervals")
    record = {"format": FORMAT, "version": VERSION} | run_record(
        plan.benchmark, haystacks, plan.systems, done, _facts(plan), n_boot=plan.n_boot, seed=plan.seed
    )
    record["spent"] = {} if plan.client is None else plan.client.stats.to_dict()
    record["seconds"] = round(time.perf_counter() - started, 3)
    write(plan.folder / "run.json", json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return record


async def _answer_all(
    plan: QaPlan,
    haystacks: Sequence[QaHaystack],
    done: dict[str, dict[str, dict[str, Any]]],
    journal: Journal,
    say: Progress,
) -> None:
    """Have every system answer every question that it has not answered, all in flight, bounded."""
    left = [
        (haystack, question, [key for key in plan.systems if question.id not in done[key]])
        for haystack in haystacks
        for question in haystack.questions
    ]
    total = sum(len(keys) for _, _, keys in left)
    if not total:
        return
    counter = _Counter(total, plan, say)
    async with AsyncExitStack() as stack:
        benches = await _benches(plan, [h for h in haystacks if any(k for o, _, k in left if o is h)], stack, say)
        jobs = iter([(key, benches[h.id], question) for h, question, keys in left for key in keys])
        in_a_row = 0

        async def work() -> None:
            nonlocal in_a_row
            for key, bench, question in jobs:
                record = await _record(key, plan, bench, question)
                journal.append(record)
                done[key][question.id] = record
                counter.step()
                in_a_row = in_a_row + 1 if passing(record["failed"]) else 0
                if in_a_row >= _GIVE_UP:
                    raise RuntimeError(
                        f"{in_a_row} answers in a row failed ({record['failed']}); what is answered is kept: the same "
                        "command goes on from there"
                    )

        size = 64 if plan.client is None else max(64, _AHEAD * plan.client.concurrency)
        await _together([asyncio.ensure_future(work()) for _ in range(min(size, total))])


async def _together(tasks: list[asyncio.Future[None]]) -> None:
    """Wait for all; when one fails, stop the others and raise its error."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
    raised = [e for e in errors if isinstance(e, BaseException) and not isinstance(e, asyncio.CancelledError)]
    if raised:
        raise raised[0]


async def _benches(
    plan: QaPlan, haystacks: Sequence[QaHaystack], stack: AsyncExitStack, say: Progress
) -> dict[str, Bench]:
    """Make the retrievers, with the vectors of all chunks and sessions."""
    lock, encoders = Lock(), plan.encoders
    shared = {id(e): cast("Encoder", _OneAtATime(e, lock)) for e in vars(encoders).values() if e is not None}

    def take(encoder: Encoder | None) -> Encoder | None:
        return None if encoder is None else shared[id(encoder)]

    settings, first, e2 = plan.settings, shared[id(encoders.first)], take(encoders.e2)
    benches = {}
    for number, haystack in enumerate(haystacks, 1):
        say(f"vectors of {haystack.id} ({number} of {len(haystacks)}): {len(haystack.mindscape.chunks)} chunks")
        options: dict[str, Any] = {"k0": settings.k0, "k_sum": settings.k_sum, "alpha": settings.alpha}
        options |= {"prior": settings.prior if e2 is None else 0.0, "device": encoders.first.device}
        vectors = options["vectors"] = dict(plan.kept.get(haystack.id, {}))
        main = Retriever(haystack.mindscape, first, e2, take(encoders.selector), **options)
        for encoder in {id(e): e for e in (first, e2, main.selector) if e is not None}.values():
            main.chunk_vectors(encoder)
        main.session_vectors(main.selector)
        other = None
        if "base" in plan.systems and encoders.base is not None and encoders.base is not encoders.first:
            other = Retriever(haystack.mindscape, shared[id(encoders.base)], **options)
            other.chunk_vectors(other.e1)
        _check_questions(haystack, [first, e2] if other is None else [first, e2, other.e1])
        plan.kept[haystack.id] = {key: of for key, of in vectors.items() if not key.endswith("/sessions")}
        searcher = await stack.enter_async_context(AsyncRetriever(main))
        plainer = None if other is None else await stack.enter_async_context(AsyncRetriever(other))
        best = plan.benchmark.mode
        benches[haystack.id] = Bench(haystack, searcher, plainer, plan.client, settings, best)
    return benches


def _check_questions(haystack: QaHaystack, encoders: Sequence[Encoder | None]) -> None:
    """Refuse a question that an encoder does not take, before any call of a language model."""
    texts = [question.text for question in haystack.questions]
    for encoder in dict.fromkeys(encoder for encoder in encoders if encoder is not None):
        try:
            encoder.encode_queries(texts)
        except MiaError as error:
            raise MiaError(f"a question of {haystack.id!r}: {error}") from None


async def _record(key: str, plan: QaPlan, bench: Bench, question: QaQuestion) -> dict[str, Any]:
    """Have one system answer one question; whatever goes wrong with one answer is an answer that failed."""
    failed, outcome = None, Outcome((), (), ranked=False)
    try:
        outcome = await answer_question(key, bench, question)
    except LlmFailed as failure:
        if failure.hopeless:
            raise
        failed = failure.label
    pool = await bench.pool(question)
    mindscape, settings, gold = bench.haystack.mindscape, plan.settings, bench.haystack.gold[question.id]
    answered = outcome.answered
    prediction = None if answered is None else answered.text
    failed = failed or (None if answered is None else answered.failed)
    metrics: dict[str, float | None] = {}
    if plan.client is not None:
        metrics |= score_answer(question, prediction, plan.benchmark.language)
    recall = recall_at(outcome.chunks, gold, settings.k, len(mindscape.chunks))
    if outcome.ranked:
        metrics[recall_name(settings.k)] = recall.value
    mode = answered.mode if answered is not None else answer_mode(key, settings, bench.best_mode)
    return {
        "system": key,
        "id": question.id,
        "haystack": bench.haystack.id,
        "book": question.book,
        "task": question.task,
        "question": question.text,
        "options": list(question.options),
        "references": list(question.answers),
        "label": question.label,
        "pair": question.pair,
        "tags": dict(question.tags),
        "gold": None if gold is None else list(gold),
        "prediction": prediction,
        "reply": "" if answered is None else answered.reply,
        "failed": failed,
        "problem": outcome.problem,
        "mode": None if plan.client is None else mode,
        "chunks": list(outcome.chunks),
        "scores": [round(float(score), 5) for score in outcome.scores],
        "e1": [[mindscape.chunks[row].id, round(float(s), 5)] for row, s in zip(pool.rows, pool.scores, strict=True)],
        "pool": [mindscape.sessions[session].id for session in pool.sessions],
        "signature": None if outcome.signature is None else outcome.signature.to_dict(),
        "evidence": list(outcome.evidence),
        "steps": None if outcome.steps is None else list(outcome.steps),
        "citations": [] if answered is None else list(answered.citations),
        "trimmed": None if answered is None else answered.trimmed.to_dict(),
        "metrics": metrics,
        "reasons": {recall_name(settings.k): recall.reason} if recall.reason and outcome.ranked else {},
        "usage": _usage(answered, outcome.steps),
    }


def _usage(answered: Any, steps: Sequence[Mapping[str, Any]] | None) -> list[int]:
    """Sum the tokens of an answer and of the steps before it."""
    used = [answered.usage] if answered is not None else []
    used += [step["usage"] for step in steps or () if step.get("usage")]
    return [sum(int(one[i]) for one in used) for i in (0, 1)]


class _Counter:
    """Tells how far the run is, at most once a second."""

    def __init__(self, total: int, plan: QaPlan, say: Progress) -> None:
        self.total, self.plan, self.say = total, plan, say
        self.count, self.last = 0, time.monotonic()

    def step(self) -> None:
        self.count += 1
        now = time.monotonic()
        if now - self.last >= 1 or self.count == self.total:
            self.last = now
            spent = "" if self.plan.client is None else f"; {self.plan.client.stats.to_text()}"
            self.say(f"{self.count} of {self.total} answers{spent}")


def _facts(plan: QaPlan) -> dict[str, Any]:
    """Return what the record tells of the run beside its results."""
    e2 = plan.encoders.e2
    settings = plan.settings.to_dict() | dict(plan.asked) | {"names": dict(plan.names), "uses_prior": e2 is None}
    if e2 is not None and settings["alpha"] is None:
        settings["alpha"] = e2.spec.alpha
    return {
        "settings": settings,
        "encoders": plan.encoders.facts(),
        "model": None if plan.client is None else plan.client.model,
        "labels": {key: label(key, e2 is not None) for key in plan.systems},
        "modes": {key: prompt_name(key, plan.settings, plan.benchmark.mode) for key in plan.systems},
    }


def _settings(plan: QaPlan) -> dict[str, Any]:
    """Return all that the answers depend on."""
    benchmark = plan.benchmark
    return {
        "format": FORMAT,
        "version": VERSION,
        "benchmark": benchmark.name,
        "split": benchmark.split,
        "questions": len(benchmark.questions),
        "data": data_hash(benchmark),
        "best_mode": benchmark.mode,
        "llm": None if plan.client is None else plan.client.model,
        "prompts": None if plan.client is None else prompts_hash(plan.settings.summarizer == "llm"),
        "encoders": {role: facts and facts["spec_hash"] for role, facts in plan.encoders.facts().items()},
        **asdict(plan.settings),
        **plan.asked,
    }
