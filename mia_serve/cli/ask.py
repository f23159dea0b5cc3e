"""``mia-serve ask``: one question answered from a mindscape by a language model, in one shot or by the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Optional

import typer

from mia_serve.cli.common import (
    AlphaOption,
    AnswerModes,
    CacheOption,
    Cover,
    CoverOption,
    CoverWeight,
    CoverWeightOption,
    DeviceOption,
    Encoders,
    JsonOption,
    K0Option,
    KSumOption,
    MindscapeOption,
    SignatureUpdates,
    cache_folder,
    check_apart,
    check_folder,
    check_output,
    check_outside,
    check_query,
    emit,
    run_defaults,
)
from mia_serve.cli.embed import check_kept
from mia_serve.cli.llm_options import (
    BudgetOption,
    GuidedOption,
    LlmCacheOption,
    LlmModelOption,
    LlmOption,
    MaxTokens,
    PriceOption,
    ReplayOption,
    cost_text,
    open_client,
)
from mia_serve.cli.search import QueryOption, SearchMode, search_encoders

if TYPE_CHECKING:
    from mia_serve.llm import ChatClient
    from mia_serve.mindscape import Mindscape
    from mia_serve.rag import Question
    from mia_serve.rag.agent import AgentResult, AgentSettings
    from mia_serve.rag.static import Answer
    from mia_serve.retriever import Retriever

_SNIPPET = 160  # characters of a passage or summary that are shown


class Answering(StrEnum):
    """How the question is to be answered."""

    free = "free"
    choice = "choice"
    letter = "letter"
    claim = "claim"


class Passages(StrEnum):
    """Which passages the agent answers from."""

    last = "last"
    union = "union"


class Asked(NamedTuple):
    """What the language model is asked, and how."""

    question: Question
    k: int
    signature: SearchMode
    mode: AnswerModes
    prior: float | None
    max_tokens: int
    as_summary: bool
    guided: bool
    settings: AgentSettings | None


def ask(
    context: typer.Context,
    mindscape: MindscapeOption,
    query: QueryOption,
    task: Annotated[Answering, typer.Option(help="A short phrase, an option, an option's letter, or TRUE/FALSE.")] = (
        Answering.free
    ),
    option: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--option", metavar="TEXT", help="An option of `choice` and `letter`; once for each, A first."),
    ] = None,
    encoder: Annotated[str | None, typer.Option(help="E2; the mindscape's encoder, without E2, by default.")] = None,
    e1: Annotated[
        str | None, typer.Option("--e1", help="E1; what the checkpoint of --encoder names by default.")
    ] = None,
    selector: Annotated[str | None, typer.Option(help="Encoder that chooses the signature; E1 by default.")] = None,
    signature: Annotated[
        SearchMode | None, typer.Option("--signature", help="What E2 gets beside the question; as trained by default.")
    ] = None,
    k: Annotated[int, typer.Option("-k", "--k", min=1, help="Passages.")] = 10,
    mode: Annotated[
        AnswerModes, typer.Option(help="What the prompt holds: passages, signature, the agent's facts; auto decides.")
    ] = AnswerModes.auto,
    as_summary: Annotated[
        bool, typer.Option("--mia-gen", help="Show the signature as the book's summary, as MiA-Gen was trained.")
    ] = False,
    alpha: AlphaOption = None,
    k0: K0Option = 50,
    k_sum: KSumOption = None,
    prior: Annotated[
        float | None,
        typer.Option(min=0.0, help="What the signature's sessions add to their chunks' scores; 0.1 without an E2."),
    ] = None,
    cover: CoverOption = Cover.member,
    cover_weight: CoverWeightOption = CoverWeight.e1_score,
    agent: Annotated[bool, typer.Option("--agent", help="Let the model search again until it can answer.")] = False,
    n_stop: Annotated[
        int | None, typer.Option("--n-stop", min=1, help="With --agent: searches at most; 3 by default.")
    ] = None,
    signature_update: Annotated[
        SignatureUpdates | None,
        typer.Option("--signature-update", help="With --agent: how the signature changes; select."),
    ] = None,
    rewrite_query: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--rewrite-query/--keep-query", help="With --agent: search next for what the model names."),
    ] = None,
    passages: Annotated[
        Passages | None,
        typer.Option(help="With --agent: answer from the last search's passages (default), or the best of all."),
    ] = None,
    llm: LlmOption = None,
    llm_model: LlmModelOption = None,
    llm_cache: LlmCacheOption = None,
    replay: ReplayOption = False,
    budget: BudgetOption = None,
    price: PriceOption = None,
    max_tokens: MaxTokens = 512,
    guided: GuidedOption = False,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Answer a question from a mindscape, with the passages that show it."""
    check_output(json_to, "--json")
    check_output(llm_cache, "--llm-cache")
    check_query(query)
    check_folder(mindscape, "--mindscape")
    check_outside({"--json": json_to, "--llm-cache": llm_cache}, {"--mindscape": mindscape})
    check_apart({"--json": json_to}, {"--llm-cache": llm_cache})
    first_name, second_name = search_encoders(mindscape, encoder, e1)
    if prior == 0 and second_name is None and signature is not SearchMode.none:
        raise ValueError(
            "--prior 0: without an E2 the signature reaches retrieval in no other way; take --signature none"
        )
    defaults = run_defaults(second_name)
    sessions = k_sum or defaults.k_sum
    of_agent = {
        "n_stop": n_stop,
        "signature_update": signature_update,
        "rewrite_query": rewrite_query,
        "passages": passages,
    }
    given = {name: value for name, value in of_agent.items() if value is not None}
    _check_settings(agent, given, mode, signature, as_summary)
    asked = Asked(
        _question(query, task, option or []),
        k,
        signature or SearchMode(defaults.signature_mode),
        mode,
        prior,
        max_tokens,
        as_summary,
        guided,
        _settings(
            task,
            mode,
            k=k,
            k_sum=sessions,
            use_signature=signature is not SearchMode.none,
            answer_tokens=max_tokens,
            cite=True,
            guided=guided,
            **given,
        )
        if agent
        else None,
    )
    client = open_client(llm, llm_model, llm_cache, replay, budget=budget)
    if llm and llm_model and llm_cache is None:
        _check_reachable(llm)
    encoders = Encoders(device, cache_folder(cache))
    from mia_serve.mindscape import Mindscape
    from mia_serve.mindscape.vectors import kept_vectors
    from mia_serve.retriever import Retriever

    opened = Mindscape.load(mindscape)
    first = encoders.open(first_name)
    if encoder is None and e1 is None:
        check_kept(mindscape, first_name, first)
    second = encoders.open(second_name) if second_name is not None else None
    chooser = encoders.open(selector) if selector is not None else first
    retriever = Retriever(
        opened,
        first,
        second,
        chooser,
        k0=k0,
        k_sum=sessions,
        prior=prior or 0.0,
        cover=cover.value,
        cover_weight=cover_weight.value,
        alpha=alpha,
        device=device,
        vectors=kept_vectors(mindscape, first, second, chooser),
    )
    answer, ran = asyncio.run(_answer(client, retriever, asked))
    record = {
        "query": query,
        "task": task.value,
        "options": option or [],
        "e1": {"name": first_name, "spec_hash": first.spec_hash},
        "e2": None if second is None or second_name is None else {"name": second_name, "spec_hash": second.spec_hash},
        "llm": {"model": client.model, "stats": client.stats.to_dict()},
        **_record(answer, opened),
        "agent": None if ran is None else {key: value for key, value in ran.to_dict().items() if key != "answer"},
        "texts": encoders.report.to_dict(),
    }
    text = _text(asked, answer, ran, opened) + cost_text(client.stats, price)
    emit(text, record, json_to)
    if answer.failed is not None:
        raise RuntimeError(f"no answer ({answer.failed}): {answer.detail}")


async def _answer(client: ChatClient, retriever: Retriever, asked: Asked) -> tuple[Answer, AgentResult | None]:
    from mia_serve.rag.batching import AsyncRetriever
    from mia_serve.rag.static import ask as ask_once

    async with client, AsyncRetriever(retriever) as searcher:
        if asked.settings is not None:
            from mia_serve.rag.agent import run_agent

            result = await run_agent(client, searcher, retriever.mindscape, asked.question, asked.settings)
            return result.answer, result
        once = await ask_once(
            client,
            searcher,
            asked.question,
            k=asked.k,
            signature_mode=asked.signature.value,
            mode=asked.mode.value,
            prior=asked.prior,
            max_tokens=asked.max_tokens,
            cite=not asked.as_summary,
            as_summary=asked.as_summary,
            guided=asked.guided,
        )
        return once, None


def _check_reachable(url: str) -> None:
    """Fail before anything is loaded where nobody answers.

    Raises:
        LlmFailed: There is no connection.
    """
    from mia_serve.llm import LlmFailed, served_models

    try:
        asyncio.run(served_models(url))
    except LlmFailed as failure:
        if failure.reason == "unreachable":  # some endpoints list no models, and answer all the same
            raise


def _question(query: str, task: Answering, options: list[str]) -> Question:
    from mia_serve.rag import Question, build_prompt

    build_prompt(task.value, query, (), options=options)  # refuses options that do not fit the task
    return Question("question", query, task.value, tuple(options))


def _settings(task: Answering, mode: AnswerModes, **given: Any) -> AgentSettings:
    from mia_serve.rag.agent import AgentSettings
    from mia_serve.rag.modes import PAPER_MODES

    shown: Any = PAPER_MODES[task.value] if mode is AnswerModes.auto else mode.value
    return AgentSettings(mode=shown, **{name: getattr(value, "value", value) for name, value in given.items()})


def _check_settings(
    agent: bool, of_agent: Collection[str], mode: AnswerModes, signature: SearchMode | None, as_summary: bool
) -> None:
    """Refuse options that mean nothing without, or with, the agent, and to show what there is not.

    Raises:
        ValueError: Naming the option.
    """
    if of_agent and not agent:
        option = "--" + next(iter(of_agent)).replace("_", "-")
        raise ValueError(f"{option} is a setting of the agent: give --agent too, or leave it out")
    if agent and signature not in (None, SearchMode.none):
        raise ValueError(f"--signature {signature}: the agent starts with first_k; leave it out, or take none")
    if signature is SearchMode.none and "signature_update" in of_agent:
        raise ValueError(
            "--signature-update changes the signature and --signature none has none: leave out one of them"
        )
    if agent and as_summary:
        raise ValueError("--mia-gen is for one-shot answers, as MiA-Gen was trained: leave out it or --agent")
    if "evi" in mode and not agent:
        raise ValueError(f"--mode {mode.value} shows the facts that an agent finds: give --agent, or another --mode")
    if "sig" in mode and signature is SearchMode.none:
        raise ValueError(f"--mode {mode.value} shows the signature: take another --signature than none")


def _record(answer: Answer, mindscape: Mindscape) -> dict[str, Any]:
    chunks = {chunk.id: chunk for chunk in mindscape.chunks}
    record = answer.to_dict()
    for passage in record["passages"]:
        passage["book_id"] = chunks[passage["id"]].book_id
    return record


def _text(asked: Asked, answer: Answer, ran: AgentResult | None, mindscape: Mindscape) -> str:
    lines = [f"answer: {answer.text}" if answer.text is not None else "answer: none could be read in the reply"]
    if answer.failed is None and (answer.text is None or asked.question.task in ("choice", "claim")):
        lines.append(f"reply: {_snippet(answer.reply, 4 * _SNIPPET)}")
    if answer.failed is None:
        lines.append("cited:" if answer.cited else "answered from (the reply names no passage):")
        texts = {passage.id: passage.text for passage in answer.passages}
        wanted = f"{asked.question.text}\n{answer.text or ''}"
        lines += [f"  {i}  {_snippet(_from_best_sentence(texts[i], wanted))}" for i in answer.citations]
    lines += _signature_lines(answer, mindscape)
    for step in ran.steps if ran is not None else ():
        found = f"{len(step.evidence)} facts" if step.failed is None else f"failed: {step.failed}"
        lines.append(f"step {step.step + 1}: {step.decision}, {found}; searched for {_snippet(step.query)}")
    lines += [f"fact: {_snippet(fact.text)}  ({', '.join(fact.sources)})" for fact in ran.evidence] if ran else []
    lines.append(f"prompt: {answer.mode}, {len(answer.passages)} passages; left out: {answer.trimmed.to_text()}")
    return "\n".join(lines) + "\n"


def _signature_lines(answer: Answer, mindscape: Mindscape) -> list[str]:
    found = answer.signature
    if found is None:
        return []
    if found.mode == "global_summary":
        return [f"signature: the summary of a book of {len(found.session_ids)} sessions"]
    summaries = {session.id: session.summary for session in mindscape.sessions}
    if not found.session_ids:  # texts that the model wrote
        return [f"signature: {found.mode}", *(f"  {_snippet(text)}" for text in found.texts)]
    shown = [f"  {i}  {_snippet(summaries[i])}" for i in found.session_ids if i in summaries]
    return [f"signature: {found.mode}, {len(found.texts)} sessions", *shown]


def _from_best_sentence(text: str, wanted: str) -> str:
    """Return a passage from its sentence that shares most with question and answer, words that are rare in it first."""
    from collections import Counter

    from mia_serve.mindscape.sentences import split_sentences, split_terms

    sentences = split_sentences(text)
    terms = [set(split_terms(sentence)) for sentence in sentences]
    among = Counter(term for found in terms for term in found)
    shared = set(split_terms(wanted))
    scores = [sum(1 / among[term] for term in found & shared) for found in terms]
    best = scores.index(max(scores, default=0.0)) if any(scores) else 0
    return " ".join(["…"] * bool(best) + sentences[best:])


def _snippet(text: str, most: int = _SNIPPET) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"
