"""The systems that a question-answering evaluation compares, each as a function from a question to what it answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from mia_serve.core import MiaError
from mia_serve.eval import collapsed, gist
from mia_serve.eval.qa import QaHaystack, QaSettings
from mia_serve.eval.qa_data import QaQuestion
from mia_serve.rag import static
from mia_serve.rag.agent import AgentSettings, run_agent
from mia_serve.rag.batching import AsyncRetriever, Found
from mia_serve.rag.modes import choose_mode, measure_signals
from mia_serve.rag.question import AnswerMode, Question
from mia_serve.signature import Signature

if TYPE_CHECKING:
    from mia_serve.llm import ChatClient
    from mia_serve.retriever import Pool

T = TypeVar("T")

AUTO = "auto"
#: System key -> label, in the order of the tables.
LABELS: dict[str, str] = {
    "base": "untrained, query-only",
    "e1": "E1, query-only",
    "e2_query": "E2, query-only",
    "sig_first_k": "E2 + first-K σ, chunks only",
    "sig": "E2 + σ, chunks only",
    "mia_rag": "MiA-RAG: σ to both",
    "mia_rag_auto": "MiA-RAG, σ shown by choice",
    "summary_only": "global summary only",
    "raptor": "RAPTOR-style tree",
    "gist": "read with gists",
    "agent_no_sig": "agent without σ",
    "agent": "MiA-Agent",
}
#: The same for those that need an E2 where there is none: σ then weighs its sessions as a prior on E1.
PRIOR_LABELS: dict[str, str] = {
    "sig_first_k": "E1 + first-K σ as prior",
    "sig": "E1 + σ as prior, chunks only",
    "mia_rag": "MiA-RAG, σ as prior on E1",
    "mia_rag_auto": "MiA-RAG, prior, σ by choice",
    "agent": "MiA-Agent, σ as prior on E1",
}
#: Systems whose passages are ranked without a language model.
RETRIEVAL = ("base", "e1", "e2_query", "sig_first_k", "sig")
#: Rows that are run where none are named. The prompts of mia_rag_auto are those of sig or mia_rag: it costs no call.
DEFAULT = ("base", "e1", "e2_query", "sig", "mia_rag", "mia_rag_auto", "summary_only")
AGENT = ("agent_no_sig", "agent")
#: Differences that are reported, (first, second) for first - second: RQ1, RQ2, RQ3, then the baselines.
PAIRS: tuple[tuple[str, str], ...] = (
    ("e1", "base"),
    ("sig", "e2_query"),
    ("sig", "e1"),
    ("sig", "base"),
    ("sig", "sig_first_k"),
    ("agent", "agent_no_sig"),
    ("agent", "mia_rag"),
    ("mia_rag", "sig"),
    ("mia_rag_auto", "sig"),
    ("mia_rag_auto", "mia_rag"),
    ("mia_rag", "summary_only"),
    ("mia_rag", "raptor"),
    ("mia_rag", "gist"),
)


_AGENT_K_SUM = 5  # where K_sum is chosen for each question: the papers'
_UPDATE_TOKENS = 1024  # of an update: evidence and query, with room for a thought before them


class Outcome(NamedTuple):
    """What a system answered, and from what; without a language model only the passages.

    Attributes:
        chunks: Ids of the passages retrieved, best first.
        scores: Their scores.
        signature: The signature searched with, at the end.
        answered: The answer; None where no model was asked.
        evidence: Facts that the agent gathered, JSON-ready.
        steps: Steps of the agent, JSON-ready; None for others.
        ranked: Whether the passages are in an order that recall among the first k can be taken of.
        problem: What went wrong on the way to an answer that there is, for the count of failures.
    """

    chunks: tuple[str, ...]
    scores: tuple[float, ...]
    signature: Signature | None = None
    answered: static.Answer | None = None
    evidence: tuple[dict[str, Any], ...] = ()
    steps: tuple[dict[str, Any], ...] | None = None
    ranked: bool = True
    problem: str = ""


@dataclass
class Bench:
    """One haystack, ready to be asked: its retrievers, the model and the settings; equal searches are made once.

    Attributes:
        haystack: The haystack.
        searcher: Searches with E1 and E2.
        plain: Searches with the untrained encoder; None where there is none beside E1.
        client: The language model; None: passages only.
        settings: Settings of the run.
        best_mode: Answer mode that the paper found best on the benchmark.
        tree: Chunks and summaries in one ranking, for the RAPTOR-style baseline; built when it is first asked.
    """

    haystack: QaHaystack
    searcher: AsyncRetriever
    plain: AsyncRetriever | None
    client: ChatClient | None
    settings: QaSettings
    best_mode: str
    tree: collapsed.CollapsedTree = field(default_factory=collapsed.CollapsedTree)
    _kept: dict[tuple[str, str], asyncio.Future[Any]] = field(default_factory=dict)

    async def once(self, what: str, question: QaQuestion, make: Callable[[], Awaitable[T]]) -> T:
        """Return what ``make`` gives, made once for a question however many systems want it."""
        key = (what, question.id)
        if key not in self._kept:
            self._kept[key] = asyncio.ensure_future(make())
        return await asyncio.shield(cast("asyncio.Future[T]", self._kept[key]))

    async def pool(self, question: QaQuestion) -> Pool:
        """Return what the question lights up under E1."""
        return await self.once("pool", question, lambda: self.searcher.pool(question.text))

    async def signature(self, question: QaQuestion, mode: str) -> Signature:
        """Return the question's signature of a mode."""
        return await self.once(mode, question, lambda: self.searcher.signature(question.text, cast("Any", mode)))


def available(wanted: Sequence[str], *, base: bool, e1: bool, e2: bool, llm: bool) -> tuple[str, ...]:
    """Return the systems that can be run, in the order of the tables.

    Args:
        wanted: Keys of ``LABELS``.
        base: Whether there is an untrained encoder.
        e1: Whether there is an E1 beside it.
        e2: Whether there is an E2.
        llm: Whether there is a language model.

    Raises:
        MiaError: A system is unknown, or none is left.
    """
    unknown = next((key for key in wanted if key not in LABELS), None)
    if unknown is not None:
        raise MiaError(f"unknown system {unknown!r}; available: {', '.join(LABELS)}, or all")
    missing = {key for key, there in (("base", base), ("e1", e1), ("e2_query", e2)) if not there}
    left = [key for key in LABELS if key in wanted and key not in missing and (llm or key in RETRIEVAL)]
    if not left:
        raise MiaError(
            f"none of the systems {', '.join(wanted)} can be run with what is given; give --llm, --e1 or --encoder"
        )
    return tuple(left)


def label(key: str, e2: bool) -> str:
    """Return a system's label; without an E2 it says how the signature reaches retrieval."""
    return LABELS[key] if e2 else PRIOR_LABELS.get(key, LABELS[key])


def prompt_name(key: str, settings: QaSettings, best: str) -> str:
    """Return what a system's prompts hold, for the table."""
    others = {"summary_only": "summary", "raptor": "tree", "gist": "gists+pages"}
    return others.get(key) or answer_mode(key, settings, best)


def answer_mode(key: str, settings: QaSettings, best: str) -> str:
    """Return what a system's prompt holds.

    MiA-RAG shows σ, the agent what the paper found best on the benchmark, unless the settings say otherwise; the agent
    without σ has the same prompt less σ.
    """
    if key == "mia_rag_auto":
        return AUTO
    if key == "mia_rag":
        return settings.mode or "chunks+sig"
    if key in AGENT:
        mode = best if settings.mode in (None, AUTO) else settings.mode
        if key == "agent":
            return mode
        return "chunks+evi" if mode.endswith("evi") else "chunks"
    return "chunks+sig" if key == "summary_only" else "chunks"


async def answer_question(key: str, bench: Bench, question: QaQuestion) -> Outcome:
    """Have one system answer one question.

    Raises:
        LlmFailed: Any other call would fail too.
    """
    if key in AGENT:
        return await _agent(key, bench, question)
    if key == "summary_only":
        return await _summary_only(bench, question)
    if key == "raptor":
        return await _raptor(bench, question)
    if key == "gist":
        return await _gist(bench, question)
    found = await _search(key, bench, question)
    signature = found.signature
    if bench.client is None:
        return Outcome(found.ids, found.scores, signature)
    mode = answer_mode(key, bench.settings, bench.best_mode)
    if mode == AUTO:
        signals = measure_signals(bench.haystack.mindscape, await bench.pool(question), found.rows, signature)
        mode = choose_mode(question.task, signals)
    answered = await _answer(bench, question, passages(bench, found), signature, mode)
    return Outcome(found.ids, found.scores, signature, answered)


def passages(bench: Bench, found: Found) -> list[static.Passage]:
    """Return what was found, with its texts."""
    mindscape = bench.haystack.mindscape
    return [
        static.Passage(chunk_id, mindscape.chunks[row].text, score, mindscape.chunks[row].session_id)
        for chunk_id, score, row in zip(found.ids, found.scores, found.rows, strict=True)
    ]


async def _search(key: str, bench: Bench, question: QaQuestion) -> Found:
    k, text = bench.settings.k, question.text
    if key in ("sig", "sig_first_k", "mia_rag", "mia_rag_auto"):
        mode = "first_k" if key == "sig_first_k" else "coverage"
        signature = await bench.signature(question, mode)
        return await bench.once(f"search {mode}", question, lambda: bench.searcher.search(text, k, signature))
    if key == "base" and bench.plain is not None:
        return await bench.plain.search(text, k, encoder="e1")
    return await bench.searcher.search(text, k, encoder="e2" if key == "e2_query" else "e1")


async def _answer(
    bench: Bench,
    question: QaQuestion,
    shown: Sequence[static.Passage],
    signature: Signature | None,
    mode: str,
    *,
    as_summary: bool = False,
) -> static.Answer:
    assert bench.client is not None  # `available` drops the systems that need one
    return await static.answer(
        bench.client,
        asked(question),
        shown,
        signature=signature,
        mode=cast("AnswerMode", mode),
        max_tokens=bench.settings.max_tokens,
        context_tokens=bench.settings.context_tokens,
        as_summary=as_summary,
        guided=bench.settings.guided,
    )


def asked(question: QaQuestion) -> Question:
    """Return the question as the pipeline takes it, without its gold."""
    return Question(question.id, question.text, question.task, question.options)


async def _summary_only(bench: Bench, question: QaQuestion) -> Outcome:
    """Answer from the summary of the whole book in which E1's best chunk lies, and no passage (MiA-RAG's baseline)."""
    signature = await bench.signature(question, "global_summary")
    answered = await _answer(bench, question, (), signature, "chunks+sig", as_summary=True)
    return Outcome((), (), signature, answered, ranked=False)


async def _agent(key: str, bench: Bench, question: QaQuestion) -> Outcome:
    settings = bench.settings
    assert bench.client is not None
    result = await run_agent(
        bench.client,
        bench.searcher,
        bench.haystack.mindscape,
        asked(question),
        AgentSettings(
            k=settings.k,
            k_sum=_AGENT_K_SUM if settings.k_sum == "auto" else settings.k_sum,
            n_stop=settings.n_stop,
            rewrite_query=settings.rewrite_query,
            signature_update=cast("Any", settings.signature_update),
            use_signature=key == "agent",
            mode=cast("Any", answer_mode(key, settings, bench.best_mode)),
            update_tokens=max(settings.max_tokens, _UPDATE_TOKENS),
            answer_tokens=settings.max_tokens,
            context_tokens=settings.context_tokens,
            guided=settings.guided,
        ),
    )
    return Outcome(
        tuple(passage.id for passage in result.passages),
        tuple(passage.score for passage in result.passages),
        result.signature if key == "agent" else None,
        result.answer,
        tuple({"text": fact.text, "sources": list(fact.sources)} for fact in result.evidence),
        tuple(step.to_dict() for step in result.steps),
    )


async def _raptor(bench: Bench, question: QaQuestion) -> Outcome:
    assert bench.client is not None
    answered = await collapsed.answer(
        bench.client,
        bench.searcher,
        bench.tree,
        asked(question),
        max_tokens=bench.settings.max_tokens,
        context_tokens=bench.settings.context_tokens,
        guided=bench.settings.guided,
    )
    found = answered.passages
    return Outcome(tuple(p.id for p in found), tuple(p.score for p in found), None, answered)


async def _gist(bench: Bench, question: QaQuestion) -> Outcome:
    """Read with gists; what it read is in no order, so it has no recall among the first k."""
    assert bench.client is not None
    answered = await gist.answer(
        bench.client,
        bench.haystack.mindscape,
        asked(question),
        max_tokens=bench.settings.max_tokens,
        context_tokens=bench.settings.context_tokens,
        guided=bench.settings.guided,
    )
    problem = answered.detail.partition("; ")[0] if answered.detail.startswith(gist.NO_PAGES) else ""
    read = tuple(p.id for p in answered.passages)
    return Outcome(read, (), None, answered, ranked=False, problem=problem)
