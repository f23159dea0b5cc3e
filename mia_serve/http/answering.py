"""One answer out of a snapshot of a collection, told step by step to whoever listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from mia_serve.http.errors import HttpError, retry_after
from mia_serve.http.events import Emit
from mia_serve.http.schemas_answer import (
    AnswerRequest,
    AnswerResponse,
    AnswerUsage,
    FactOut,
    LeftOut,
    PassageOut,
    PassagesEvent,
    StepChunk,
    StepOut,
    TokenEvent,
)
from mia_serve.http.schemas_search import SignatureOut, signature_out
from mia_serve.http.searching import _given as given_signature
from mia_serve.llm import ChatClient, LlmFailed, Usage
from mia_serve.rag import AgentSettings, Answer, Passage, Question, ask, run_agent
from mia_serve.rag.modes import PAPER_MODES
from mia_serve.rag.state import Fact, Step
from mia_serve.signature import Signature

if TYPE_CHECKING:
    from mia_serve.http.snapshot import Snapshot

_STEPS = 3  # the agent's, as in the paper
_WAITING = 8  # answers under way for each call that the model may be given at a time

_under_way: WeakKeyDictionary[ChatClient, int] = WeakKeyDictionary()


async def answer(
    snapshot: Snapshot,
    client: ChatClient,
    request: AnswerRequest,
    context_tokens: int | None,
    threads: Executor,
    emit: Emit | None = None,
) -> AnswerResponse:
    """Answer a question.

    Args:
        snapshot: What is searched; it must hold something.
        client: The language model.
        request: What is asked.
        context_tokens: Context of the model; None: what its endpoint says.
        threads: Where given summaries are looked up.
        emit: Told ``signature``, ``step``, ``passages`` and ``token`` as they happen.

    Raises:
        LlmFailed: The model gave no answer.
        HttpError: The question does not fit the model's context, or the signature is of no use here.
        MiaError: The question is too long for the encoder.
    """
    with _counted(client):
        question = Question("question", request.question, request.task, tuple(request.options))
        if request.mode == "agent":
            return await _by_agent(snapshot, client, question, request, context_tokens, emit)
        given = await _given(snapshot, request, threads)
        chosen = request.signature if request.signature in ("coverage", "first_k") else "coverage"
        answered = await ask(
            client,
            snapshot.searcher,
            question,
            k=request.k,
            signature_mode="none" if request.unsigned else chosen,
            signature=given,
            mode=request.answer_mode,
            context_tokens=context_tokens,
            cite=True,
            on_signature=None if emit is None else lambda signature: emit("signature", signature_out(signature)),
            on_passages=_passages_to(snapshot, emit),
            on_text=_text_to(emit),
        )
        return _response(snapshot, client, answered, answered.usage)


def check_room(client: ChatClient) -> None:
    """Refuse an answer where too many are under way.

    Raises:
        HttpError: 429.
    """
    if _under_way.get(client, 0) >= _WAITING * client.concurrency:
        message = "the language model is busy: too many answers wait for it; try again after the time in Retry-After"
        raise HttpError(429, message, "busy", headers=retry_after(5))


@contextmanager
def _counted(client: ChatClient) -> Iterator[None]:
    _under_way[client] = _under_way.get(client, 0) + 1
    try:
        yield
    finally:
        _under_way[client] -= 1


async def _given(snapshot: Snapshot, request: AnswerRequest, threads: Executor) -> Signature | None:
    if not isinstance(request.signature, list) or not request.signature:
        return None
    loop = asyncio.get_running_loop()
    given = await loop.run_in_executor(threads, given_signature, snapshot.mindscape, request.signature)
    if snapshot.searcher.uses_prior and not given.session_ids:
        raise HttpError(
            400,
            "without an E2 the server weighs the sessions of a signature, and none of these summaries is a session's: "
            "give summaries as /map shows them, or 'coverage'",
            "unknown_summaries",
            "signature",
        )
    return given


async def _by_agent(
    snapshot: Snapshot,
    client: ChatClient,
    question: Question,
    request: AnswerRequest,
    context_tokens: int | None,
    emit: Emit | None,
) -> AnswerResponse:
    settings = AgentSettings(
        k=request.k,
        n_stop=request.steps or _STEPS,
        use_signature=not request.unsigned,
        mode=PAPER_MODES[request.task] if request.answer_mode == "auto" else request.answer_mode,
        context_tokens=context_tokens,
        cite=True,
    )
    ran = await run_agent(
        client,
        snapshot.searcher,
        snapshot.mindscape,
        question,
        settings,
        on_step=None if emit is None else lambda step: emit("step", _step_out(snapshot, step)),
        on_passages=_passages_to(snapshot, emit),
        on_text=_text_to(emit),
    )
    made = _response(snapshot, client, ran.answer, ran.usage)
    made.steps = [_step_out(snapshot, step) for step in ran.steps]
    made.evidence = _facts_out(ran.evidence)
    return made


def _passages_to(snapshot: Snapshot, emit: Emit | None) -> Callable[[Sequence[Passage]], None] | None:
    if emit is None:
        return None
    return lambda passages: emit("passages", PassagesEvent(passages=_passages_out(snapshot, passages)))


def _text_to(emit: Emit | None) -> Callable[[str], None] | None:
    return None if emit is None else lambda text: emit("token", TokenEvent(text=text))


def _response(snapshot: Snapshot, client: ChatClient, answered: Answer, usage: Usage) -> AnswerResponse:
    if answered.failed is not None:
        raise _failure(answered)
    return AnswerResponse(
        version=snapshot.version,
        model=client.model,
        answer=answered.text,
        reply=answered.reply,
        citations=list(answered.citations),
        cited=answered.cited,
        passages=_passages_out(snapshot, answered.passages),
        signature=_signature_out(answered.signature),
        answer_mode=answered.mode,
        left_out=LeftOut(**answered.trimmed.to_dict()),
        steps=None,
        evidence=None,
        usage=AnswerUsage(**usage._asdict(), total_tokens=sum(usage)),
    )


def _failure(answered: Answer) -> Exception:
    """Return what a failed answer is raised as."""
    label = answered.failed or ""
    if label == "too long":
        return HttpError(
            413,
            "the question with its options does not fit the context of the language model: shorten it",
            "too_long",
            "question",
        )
    reason, _, status = label.rpartition(" ")
    if reason == "http":
        return LlmFailed("http", answered.detail, int(status))
    return LlmFailed(label, answered.detail)  # type: ignore[arg-type]


def _passages_out(snapshot: Snapshot, passages: Sequence[Passage]) -> list[PassageOut]:
    chunks = snapshot.mindscape.chunks
    book_of = {passage.id: chunks[snapshot.row_of(passage.id)].book_id for passage in passages}
    return [PassageOut(**passage._asdict(), book_id=book_of[passage.id]) for passage in passages]


def _step_out(snapshot: Snapshot, step: Step) -> StepOut:
    chunks = snapshot.mindscape.chunks
    return StepOut(
        step=step.step + 1,
        query=step.query,
        signature=_signature_out(step.signature),
        chunks=[
            StepChunk(id=id, session_id=chunks[snapshot.row_of(id)].session_id, score=score)
            for id, score in zip(step.chunks, step.scores, strict=True)
        ],
        decision=step.decision,
        next_query=step.next_query,
        evidence=_facts_out(step.evidence),
        failed=step.failed,
    )


def _facts_out(facts: Sequence[Fact]) -> list[FactOut]:
    return [FactOut(text=fact.text, sources=list(fact.sources)) for fact in facts]


def _signature_out(signature: Signature | None) -> SignatureOut | None:
    return None if signature is None else signature_out(signature)
