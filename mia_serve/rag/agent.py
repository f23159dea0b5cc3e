"""The agent loop of MiA-Signature (arXiv 2605.06416, algorithm 1).

State (q_t, σ_t, E_t): what to search for, the signature, the facts found. It starts at (q, First-K, nothing). Each step
retrieves with (q_t, σ_t) and has a model update the state from what came back, until it decides to answer or N_stop
retrievals are done. The answer is given from the last passages, the new signature and the evidence, to the question as
it was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mia_serve.core import MiaError
from mia_serve.llm import Usage
from mia_serve.rag.batching import AsyncRetriever, Found
from mia_serve.rag.choose import sessions_signature
from mia_serve.rag.fitting import Contents
from mia_serve.rag.question import Question
from mia_serve.rag.state import AgentSettings, AgentState, Decision, Fact, Step
from mia_serve.rag.static import Answer, Passage, answer
from mia_serve.rag.update import Update, UpdateFailed, ask_update
from mia_serve.signature import Signature

if TYPE_CHECKING:
    from mia_serve.llm import ChatClient
    from mia_serve.mindscape import Mindscape

__all__ = ["AgentResult", "AgentSettings", "Decision", "Fact", "Step", "run_agent", "run_agents"]

REFUSED = "query refused"
"""Label of a step whose query the encoder did not take (too long), so that the one before was kept."""

_RRF = 60  # of reciprocal rank fusion (Cormack, Clarke & Büttcher, SIGIR 2009)
_WAITING = 4  # questions under way for each call that may be


@dataclass(frozen=True)
class AgentResult:
    """What the agent answered, and how it came to it.

    Attributes:
        answer: The answer; its ``failed`` is set where the model gave none.
        steps: One a retrieval.
        passages: What the answer was to be given from: the last P_t, or the best of all.
        signature: The last σ; None in the baseline without one.
        evidence: The last E.
    """

    answer: Answer
    steps: tuple[Step, ...]
    passages: tuple[Passage, ...]
    signature: Signature | None
    evidence: tuple[Fact, ...]

    @property
    def usage(self) -> Usage:
        """Tokens of all updates and of the answer."""
        used = [*(step.usage for step in self.steps), self.answer.usage]
        return Usage(sum(one.prompt_tokens for one in used), sum(one.completion_tokens for one in used))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "answer": self.answer.to_dict(),
            "steps": [step.to_dict() for step in self.steps],
            "signature": None if self.signature is None else self.signature.to_dict(),
            "evidence": [fact.to_dict() for fact in self.evidence],
            "usage": list(self.usage),
        }


async def run_agent(
    client: ChatClient,
    searcher: AsyncRetriever,
    mindscape: Mindscape,
    question: Question,
    settings: AgentSettings = AgentSettings(),
    on_step: Callable[[Step], None] | None = None,
    on_passages: Callable[[Sequence[Passage]], None] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> AgentResult:
    """Answer one question by the agent loop.

    Where an update fails, the state stays as it was and the loop goes on. Retrieval is not repeated for a pair (q, σ)
    that was just searched; the model is asked again all the same, as the step that it is told is another one. A query
    of the model's that the encoder refuses (too long) leaves q and σ as they were.

    Args:
        client: The model, which updates and answers.
        searcher: The mindscape's retriever. Without an E2 the signature is a prior on E1. Without a signature
            (``use_signature=False``) it is searched by the query alone, with E2 where there is one.
        mindscape: What is searched.
        question: The question.
        settings: How the agent works.
        on_step: Told each step when the model has updated the state.
        on_passages: Told what the answer is to be given from, before the model is asked for it.
        on_text: Told the pieces of the answer's reply as the model writes them; see `ChatClient.chat`.

    Raises:
        MiaError: The question is too long for the encoder, its options do not fit its task, or texts that the model
            writes were to be a signature without an E2 to read them.
        LlmFailed: Any other call would fail too (``hopeless``); all other failures are in the result.
    """
    Contents().prompt(question)  # options that do not fit the task are refused before anything is asked
    if settings.use_signature and settings.signature_update == "rewrite" and searcher.uses_prior:
        raise MiaError(
            "signature_update='rewrite' has the model write texts, which only an E2 can search with: give the "
            "retriever an e2, or take 'select' or 'submodular'"
        )
    ran = await _loop(client, searcher, mindscape, question, settings, on_step)
    passages = _passages(mindscape, ran.searches, settings)
    if on_passages is not None:
        on_passages(passages)
    answered = await answer(
        client,
        question,
        passages,
        signature=ran.signature,
        evidence=[fact.text for fact in ran.evidence],
        mode=settings.answer_mode,
        max_tokens=settings.answer_tokens,
        context_tokens=settings.context_tokens,
        guided=settings.guided,
        cite=settings.cite,
        on_text=on_text,
    )
    return AgentResult(answered, tuple(ran.steps), passages, ran.signature, ran.evidence)


async def run_agents(
    client: ChatClient,
    searcher: AsyncRetriever,
    mindscape: Mindscape,
    questions: Iterable[Question],
    settings: AgentSettings = AgentSettings(),
    on_result: Callable[[Question, AgentResult], None] | None = None,
) -> list[AgentResult]:
    """Answer many questions at once, so that the model always has enough to do.

    Four questions for each call that the client may have under way are open at a time, whatever their number.

    Args:
        client: The model.
        searcher: The mindscape's retriever.
        mindscape: What is searched.
        questions: The questions.
        settings: How the agent works.
        on_result: Told of each result as it comes, in any order.

    Returns:
        One result a question, in their order.

    Raises:
        MiaError: See `run_agent`; the first error ends all.
        LlmFailed: See `run_agent`.
    """
    results: dict[int, AgentResult] = {}
    waiting: Iterator[tuple[int, Question]] = iter(enumerate(questions))

    async def work() -> None:
        for place, question in waiting:
            results[place] = await run_agent(client, searcher, mindscape, question, settings)
            if on_result is not None:
                on_result(question, results[place])

    workers = [asyncio.create_task(work()) for _ in range(_WAITING * client.concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[place] for place in sorted(results)]


class _Ran(NamedTuple):
    """What the loop left: its steps, its different searches, and the last σ and E."""

    steps: list[Step]
    searches: list[Found]
    signature: Signature | None
    evidence: tuple[Fact, ...]


async def _loop(
    client: ChatClient,
    searcher: AsyncRetriever,
    mindscape: Mindscape,
    question: Question,
    settings: AgentSettings,
    on_step: Callable[[Step], None] | None,
) -> _Ran:
    query, signature = question.text, await _first_signature(searcher, question, settings)
    evidence: tuple[Fact, ...] = ()
    steps: list[Step] = []
    searches: list[Found] = []
    seen: dict[str, int] = {}
    for step in range(settings.n_stop):
        failed = None
        if not steps or _pair(query, signature) != _pair(steps[-1].query, steps[-1].signature):
            try:
                searches.append(await searcher.search(query, settings.k, signature))
            except MiaError:  # the model wrote what the encoder does not take
                if not steps:
                    raise
                failed, query, signature = REFUSED, steps[-1].query, steps[-1].signature
        found = searches[-1]
        seen |= zip(found.ids, found.rows, strict=True)
        sessions = tuple(dict.fromkeys(mindscape.session_of[list(found.rows)].tolist()))
        state = AgentState(question, step, query, signature, evidence, found.rows, found.scores, sessions, seen)
        try:
            update = await ask_update(client, searcher, state, settings)
        except UpdateFailed as failure:
            update, failed = Update("REFINE", query, signature, evidence, failure.usage), failure.label
        steps.append(_step(mindscape, state, found, update, failed))
        if on_step is not None:
            on_step(steps[-1])
        query, signature, evidence = update.next_query, update.signature, update.evidence
        if update.decision == "ANSWER":
            break
    return _Ran(steps, searches, signature, evidence)


def _pair(query: str, signature: Signature | None) -> tuple[Any, ...]:
    """Return what a search depends on; how the sessions were chosen is no part of it."""
    return (query, None) if signature is None else (query, signature.session_ids, signature.texts)


async def _first_signature(searcher: AsyncRetriever, question: Question, settings: AgentSettings) -> Signature | None:
    if not settings.use_signature:
        return None
    pool = await searcher.pool(question.text)  # its sessions are in the order of E1, so the first ones are First-K
    return sessions_signature(searcher.retriever, pool.sessions[: settings.k_sum].tolist(), "first_k")


def _step(mindscape: Mindscape, state: AgentState, found: Found, update: Update, failed: str | None) -> Step:
    return Step(
        step=state.step,
        query=state.query,
        signature=state.signature,
        chunks=found.ids,
        scores=found.scores,
        candidates=tuple(mindscape.sessions[row].id for row in state.sessions),
        decision=update.decision,
        next_query=update.next_query,
        evidence=update.evidence,
        failed=failed,
        usage=update.usage,
    )


def _passages(mindscape: Mindscape, searches: Sequence[Found], settings: AgentSettings) -> tuple[Passage, ...]:
    """Return the last P_t, or the k best of all: by reciprocal rank fusion, among equals the latest search first."""
    scores: dict[int, float] = {}
    if settings.passages == "last":
        scores = dict(zip(searches[-1].rows, searches[-1].scores, strict=True))
    else:
        for found in reversed(searches):
            for rank, row in enumerate(found.rows, start=1):
                scores[row] = scores.get(row, 0.0) + 1 / (_RRF + rank)
    best = sorted(scores, key=lambda row: -scores[row])[: settings.k]  # stable
    chunks = mindscape.chunks
    return tuple(Passage(chunks[row].id, chunks[row].text, scores[row], chunks[row].session_id) for row in best)
