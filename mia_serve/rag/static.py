"""One-shot RAG: E1's best chunks → signature → E2's passages → prompt → answer (MiA-RAG, arXiv 2512.17220)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mia_serve.core.errors import MiaError
from mia_serve.llm import LlmFailed, Usage
from mia_serve.rag.fitting import Contents, PromptTooLong, Trimmed, fit
from mia_serve.rag.modes import choose_mode, measure_signals
from mia_serve.rag.prompts import answer_schema
from mia_serve.rag.question import ANSWER_MODES, AnswerMode, Question
from mia_serve.rag.reading import citations, read_answer
from mia_serve.signature import Signature

if TYPE_CHECKING:
    from mia_serve.llm import ChatClient
    from mia_serve.rag.batching import AsyncRetriever
    from mia_serve.retriever import Mode

MAX_TOKENS = 512
"""Tokens of a reply: a claim's explanation is the longest of them."""

_TRIES = 6  # calls for one answer at most, each with three quarters of the prompt before
_SHORTER = 0.75


class Passage(NamedTuple):
    """One retrieved chunk.

    Attributes:
        id: The chunk's id.
        text: Its text.
        score: The score it was ranked by.
        session_id: Its session.
    """

    id: str
    text: str
    score: float
    session_id: str


@dataclass(frozen=True)
class Answer:
    """What a question was answered, and from what.

    Attributes:
        text: The answer as it is read out of the reply (see `read_answer`); None where there is none.
        reply: The whole reply; "" where there is none.
        passages: Passages that the prompt held, best first; the first one may have been cut, see ``trimmed``.
        signature: The signature that was searched with, whether or not the prompt held it.
        mode: What the prompt held.
        citations: Ids of the passages that the reply cites, or of all passages shown where it cites none.
        trimmed: What did not fit the model's context.
        usage: Tokens of the call.
        failed: Label of the failure (`LlmFailed.label`); None where there is a reply.
        cited: Whether the citations are the reply's own.
        detail: What the failure says.
    """

    text: str | None
    reply: str
    passages: tuple[Passage, ...]
    signature: Signature | None
    mode: AnswerMode
    citations: tuple[str, ...]
    trimmed: Trimmed
    usage: Usage
    failed: str | None = None
    cited: bool = False
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "answer": self.text,
            "reply": self.reply,
            "failed": self.failed,
            "detail": self.detail,
            "mode": self.mode,
            "passages": [passage._asdict() for passage in self.passages],
            "citations": list(self.citations),
            "cited": self.cited,
            "signature": None if self.signature is None else self.signature.to_dict(),
            "trimmed": self.trimmed.to_dict(),
            "usage": list(self.usage),
        }


async def answer(
    client: ChatClient,
    question: Question,
    passages: Sequence[Passage],
    *,
    signature: Signature | None = None,
    evidence: Sequence[str] = (),
    mode: AnswerMode = "chunks",
    max_tokens: int = MAX_TOKENS,
    context_tokens: int | None = None,
    cite: bool = False,
    as_summary: bool = False,
    guided: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Have a question answered from passages.

    A prompt that does not fit the model's context is trimmed (see `fit`) by an estimate of its tokens. Where the
    endpoint still finds it too long, it is trimmed by a quarter and sent again, up to five times.

    Args:
        client: The model.
        question: The question.
        passages: Passages, best first.
        signature: Its texts, most useful first, are shown where the mode says so.
        evidence: Facts, oldest first, shown where the mode says so.
        mode: What the prompt holds beside the passages.
        max_tokens: Most tokens of the reply.
        context_tokens: Tokens that prompt and reply may take together; what the endpoint says of its model where None.
        cite: Number the passages and ask to cite them.
        as_summary: Show the signature as the summary of the book, as MiA-Gen was trained.
        guided: Have the endpoint keep the reply to the JSON of the task (`answer_schema`).
        on_text: Told the pieces of the reply as the model writes them; see `ChatClient.chat`.

    Returns:
        The answer; one with ``failed`` set where the model gave none.

    Raises:
        MiaError: The mode is unknown, or the question's options do not fit its task.
        LlmFailed: Any other call would fail too (``hopeless``).
    """
    if mode not in ANSWER_MODES:
        raise MiaError(f"mode={mode!r}: allowed are {', '.join(map(repr, ANSWER_MODES))}")
    contents = Contents(
        tuple(passage.text for passage in passages),
        signature.texts if signature is not None and "sig" in mode else (),
        tuple(evidence) if "evi" in mode else (),
        cite,
        as_summary,
        guided,
    )
    schema = answer_schema(question.task, len(question.options)) if guided else None
    context = context_tokens if context_tokens is not None else await client.context_tokens()
    limit = None if context is None else context - max_tokens
    trimmed = Trimmed()
    for attempt in range(_TRIES):
        try:
            fitted = fit(question, contents, limit)
            trimmed = fitted.trimmed
            reply = await client.chat(fitted.messages, schema, max_tokens, on_text=on_text)
        except PromptTooLong as error:
            return Answer(None, "", (), signature, mode, (), trimmed, Usage(), "too long", detail=str(error))
        except LlmFailed as failure:
            if failure.hopeless:
                raise
            if failure.reason == "too long" and attempt < _TRIES - 1:
                limit = int(fitted.tokens * _SHORTER)
                continue
            label, detail = failure.label, str(failure)
            shown = tuple(passages[: len(fitted.contents.passages)])
            return Answer(None, "", shown, signature, mode, (), trimmed, Usage(), label, detail=detail)
        break
    shown = tuple(passages[: len(fitted.contents.passages)])
    ids = tuple(passage.id for passage in shown)
    named = citations(reply.text, ids) if cite else ()
    text = read_answer(question.task, reply.text, len(question.options))
    return Answer(text, reply.text, shown, signature, mode, named or ids, trimmed, reply.usage, cited=bool(named))


async def ask(
    client: ChatClient,
    searcher: AsyncRetriever,
    question: Question,
    *,
    k: int = 10,
    signature_mode: Mode = "coverage",
    signature: Signature | None = None,
    mode: AnswerMode | Literal["auto"] = "chunks",
    evidence: Sequence[str] | None = None,
    encoder: str | None = None,
    prior: float | None = None,
    max_tokens: int = MAX_TOKENS,
    context_tokens: int | None = None,
    cite: bool = False,
    as_summary: bool = False,
    guided: bool = False,
    on_signature: Callable[[Signature], None] | None = None,
    on_passages: Callable[[Sequence[Passage]], None] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Answer a question from a mindscape: signature, retrieval with it, and one call of the model.

    Args:
        client: The model.
        searcher: The mindscape's retriever; without an E2 the signature reaches it as a prior.
        question: The question; its text is the query.
        k: Passages.
        signature_mode: How the signature is chosen; "none": the query alone is searched, and no signature shown.
        signature: One to search with instead of one that is chosen.
        mode: What the prompt holds; "auto" decides by `choose_mode`.
        evidence: Facts for the modes that show some, oldest first; there is no memory to take them from here.
        encoder: "e1" or "e2" (see `Retriever.search`).
        prior: Weight of the signature as a prior.
        max_tokens: See `answer`.
        context_tokens: See `answer`.
        cite: See `answer`.
        as_summary: See `answer`.
        guided: See `answer`.
        on_signature: Told the signature before it is searched with.
        on_passages: Told the passages before the model is asked.
        on_text: See `answer`.

    Raises:
        MiaError: A setting is unknown or out of range, or the mode shows what there is not.
        LlmFailed: Any other call would fail too (``hopeless``).
    """
    _check_mode(mode, signature_mode if signature is None else signature.mode, evidence)
    if signature is None and signature_mode != "none":
        signature = await searcher.signature(question.text, signature_mode)
    if on_signature is not None and signature is not None:
        on_signature(signature)
    found = await searcher.search(question.text, k, signature, encoder, prior)
    chunks = searcher.mindscape.chunks
    passages = [
        Passage(chunk_id, chunks[row].text, score, chunks[row].session_id)
        for chunk_id, score, row in zip(found.ids, found.scores, found.rows, strict=True)
    ]
    if on_passages is not None:
        on_passages(passages)
    if mode == "auto":
        pool = await searcher.pool(question.text)
        signals = measure_signals(searcher.mindscape, pool, found.rows, signature)
        mode = choose_mode(question.task, signals, evidence=bool(evidence))
    return await answer(
        client,
        question,
        passages,
        signature=signature,
        evidence=evidence or (),
        mode=mode,
        max_tokens=max_tokens,
        context_tokens=context_tokens,
        cite=cite,
        as_summary=as_summary,
        guided=guided,
        on_text=on_text,
    )


def _check_mode(mode: str, signature_mode: str, evidence: Sequence[str] | None) -> None:
    allowed = (*ANSWER_MODES, "auto")
    if mode not in allowed:
        raise MiaError(f"mode={mode!r}: allowed are {', '.join(map(repr, allowed))}")
    if "sig" in mode and signature_mode == "none":
        raise MiaError(f"mode={mode!r} shows a signature and signature_mode='none' makes none: change one of them")
    if "evi" in mode and evidence is None:
        raise MiaError(f"mode={mode!r} shows evidence: give some, or let an agent gather it (run_agent)")
