"""The agent's settings, its state, and the trace it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from mia_serve.core import MiaError
from mia_serve.llm import Usage
from mia_serve.rag.question import ANSWER_MODES, AnswerMode, Question
from mia_serve.signature import Signature

Decision = Literal["ANSWER", "REFINE"]
SignatureUpdate = Literal["select", "rewrite", "submodular"]
Passages = Literal["last", "union"]


@dataclass(frozen=True)
class AgentSettings:
    """How the agent works; the defaults are the paper's (MiA-Signature, arXiv 2605.06416, algorithm 1).

    Attributes:
        k: Passages of one retrieval.
        k_sum: Most sessions (or texts) in the signature.
        n_stop: Most retrievals; then the question is answered.
        rewrite_query: Whether the model says what to search for next; else it is always the question.
        signature_update: How σ changes: the model picks "select" among σ_t and the sessions of the passages, writes
            texts of its own ("rewrite"), or has no say and the set function chooses ("submodular").
        use_signature: False is the baseline without one: retrieval by the query alone, no σ in any prompt.
        max_facts: Most facts in the evidence memory.
        max_fact_words: Most words of a fact.
        mode: What the answer is given; blocks of a signature that is not used are left out.
        passages: The answer's passages: those of the "last" retrieval, or the k best of the "union" of all, by
            reciprocal rank fusion.
        update_tokens: Most tokens of a reply that updates the state.
        answer_tokens: Most tokens of the answer's reply.
        context_tokens: Tokens that prompt and reply may take together; what the endpoint says of its model where None.
        guided: Have the endpoint keep the answer's reply to JSON, as that of an update always is.
        cite: Number the answer's passages and ask to cite them.

    Raises:
        MiaError: A setting is out of range.
    """

    k: int = 10
    k_sum: int = 5
    n_stop: int = 3
    rewrite_query: bool = True
    signature_update: SignatureUpdate = "select"
    use_signature: bool = True
    max_facts: int = 12
    max_fact_words: int = 40
    mode: AnswerMode = "chunks"
    passages: Passages = "last"
    update_tokens: int = 1024
    answer_tokens: int = 512
    context_tokens: int | None = None
    guided: bool = False
    cite: bool = False

    def __post_init__(self) -> None:
        """Check each setting."""
        counts = ("k", "k_sum", "n_stop", "max_facts", "max_fact_words", "update_tokens", "answer_tokens")
        for name in counts:
            if getattr(self, name) < 1:
                raise MiaError(f"{name}={getattr(self, name)}: give at least 1")
        for name, allowed in (
            ("signature_update", get_args(SignatureUpdate)),
            ("mode", ANSWER_MODES),
            ("passages", get_args(Passages)),
        ):
            if getattr(self, name) not in allowed:
                given = getattr(self, name)
                raise MiaError(f"{name}={given!r}: allowed are {', '.join(map(repr, allowed))}")

    @property
    def asks_signature(self) -> bool:
        """Whether the model is asked for σ."""
        return self.use_signature and self.signature_update != "submodular"

    @property
    def answer_mode(self) -> AnswerMode:
        """The mode without what is not there."""
        if self.use_signature:
            return self.mode
        return "chunks+evi" if "evi" in self.mode else "chunks"


class Fact(NamedTuple):
    """One grounded fact, with the ids of the chunks that state it."""

    text: str
    sources: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {"text": self.text, "sources": list(self.sources)}


@dataclass(frozen=True)
class AgentState:
    """What the model is shown at one step.

    Attributes:
        question: The question.
        step: Retrievals before this one.
        query: q_t.
        signature: σ_t; None in the baseline without one.
        evidence: E_t, oldest first.
        rows: P_t, rows of ``mindscape.chunks``, best first.
        scores: Their scores.
        sessions: H_t, rows of ``mindscape.sessions``: those of P_t in its order, each once.
        seen: Rows of all chunks retrieved so far, by id; the facts' sources are among them.
    """

    question: Question
    step: int
    query: str
    signature: Signature | None
    evidence: tuple[Fact, ...]
    rows: tuple[int, ...]
    scores: tuple[float, ...]
    sessions: tuple[int, ...]
    seen: Mapping[str, int]


@dataclass(frozen=True)
class Step:
    """One step of the loop, as it is recorded.

    Attributes:
        step: Its number, from 0.
        query: q_t, which was searched for.
        signature: σ_t, which was searched with; None in the baseline without one.
        chunks: P_t, ids of the chunks found, best first.
        scores: Their scores.
        candidates: H_t, ids of their sessions, each once.
        decision: What the model decided; REFINE where it failed to.
        next_query: q_{t+1}.
        evidence: E_{t+1}.
        failed: Why the update failed, which leaves the state as it was; or "query refused" where q_t and σ_t are those
            of the step before because the encoder does not take the query that the model wrote; None: neither.
        usage: Tokens of the update.
    """

    step: int
    query: str
    signature: Signature | None
    chunks: tuple[str, ...]
    scores: tuple[float, ...]
    candidates: tuple[str, ...]
    decision: Decision
    next_query: str
    evidence: tuple[Fact, ...]
    failed: str | None
    usage: Usage

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        record = {name: value for name, value in vars(self).items() if name not in ("signature", "evidence", "usage")}
        return {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in record.items()},
            "signature": None if self.signature is None else self.signature.to_dict(),
            "evidence": [fact.to_dict() for fact in self.evidence],
            "usage": list(self.usage),
        }
