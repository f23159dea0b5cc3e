"""One update of the agent's state by a language model (M_upd of MiA-Signature, arXiv 2605.06416, algorithm 1).

The model sees question, query, signature, other sessions of the passages, evidence and passages; it decides whether to
answer, says what to search for, and names the next signature and the facts to keep. The wording is ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, WithJsonSchema

from mia_serve.llm import ChatClient, LlmFailed, Metered, Usage, ask_json
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.rag.choose import Choice, choose_signatures, sessions_signature
from mia_serve.rag.state import AgentSettings, AgentState, Decision, Fact
from mia_serve.rag.update_prompt import LETTERS_PER_WORD, QUERY_WORDS, TEXT_WORDS, Shown, fit_update, update_schema
from mia_serve.signature import Signature

_ID = re.compile(r"\W*([A-Za-z]?)\s?([0-9]{1,4})\W*")
_CONTROL = re.compile(r"[\x00-\x20\x7f-\x9f\s]+")
_TRIES = 4  # prompts for one update, each shorter than the one that was too long
_SHORTER = 0.75


class UpdateFailed(LlmFailed):
    """The model gave no update that can be used; the state stays as it was.

    Attributes:
        usage: Tokens that were spent on it.
    """

    def __init__(self, failure: LlmFailed, usage: Usage) -> None:
        super().__init__(failure.reason, str(failure), failure.status)
        self.usage = usage


@dataclass(frozen=True)
class Update:
    """What one step makes of the state.

    Attributes:
        decision: Whether to answer now.
        next_query: q_{t+1}.
        signature: σ_{t+1}; None in the baseline without one.
        evidence: E_{t+1}, oldest first.
        usage: Tokens spent on it.
    """

    decision: Decision
    next_query: str
    signature: Signature | None
    evidence: tuple[Fact, ...]
    usage: Usage


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


def _as_id(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _decided(value: Any) -> Any:
    return value.strip(" .\n").upper() if isinstance(value, str) else value


def _or_empty(value: Any) -> Any:
    return "" if value is None else value


class _Fact(BaseModel):
    fact: str = ""
    source: Annotated[list[Annotated[str, BeforeValidator(_as_id)]], BeforeValidator(_listed)]


class _Reply(BaseModel):
    decision: Annotated[Literal["ANSWER", "REFINE"], BeforeValidator(_decided)]
    next_query: Annotated[str, BeforeValidator(_or_empty)] = ""
    evidence: list[_Fact]


class _SignedReply(_Reply):
    signature: list[str]


async def ask_update(
    client: ChatClient, searcher: AsyncRetriever, state: AgentState, settings: AgentSettings
) -> Update:
    """Ask for the next state.

    What the model says is taken as far as it can be. Ids that were not shown are dropped, as are repeats and facts that
    name no passage or fact shown; too many sessions are cut to the first ones, too many facts to the latest. A fact
    that cites one earlier fact alone keeps that one word for word; one that cites more sums them up and has the sources
    of all. Where nothing is left of the signature, of the query or of the evidence, the old one stays.

    Args:
        client: The model.
        searcher: Retriever; it chooses the signature under ``signature_update="submodular"``.
        state: q_t, σ_t, E_t, P_t and H_t.
        settings: Limits, and who makes the signature.

    Raises:
        UpdateFailed: There is no usable reply, nor after a second try.
        LlmFailed: Nor would any other call be answered (``hopeless``).
    """
    counted = Metered(client)
    try:
        shown, reply = await _asked(counted, searcher, state, settings)
    except LlmFailed as failure:
        if failure.hopeless:
            raise
        raise UpdateFailed(failure, counted.usage) from None
    evidence = _evidence(reply, shown, state, settings)
    return Update(
        decision=reply.decision,
        next_query=_query(reply, state, settings),
        signature=await _signature(reply, shown, searcher, state, settings, evidence),
        evidence=evidence,
        usage=counted.usage,
    )


async def _asked(
    counted: Metered, searcher: AsyncRetriever, state: AgentState, settings: AgentSettings
) -> tuple[Shown, _Reply]:
    """Ask within the model's context; where the endpoint finds the prompt too long all the same, ask with less."""
    context = settings.context_tokens or await counted.client.context_tokens()
    # Of a small context at most a third is kept free: most updates need far less than they may have.
    reply_tokens = settings.update_tokens if context is None else min(settings.update_tokens, context // 3)
    limit = None if context is None else context - reply_tokens
    form = _SignedReply if settings.asks_signature else _Reply
    for tries_left in reversed(range(_TRIES)):
        fitted = fit_update(searcher, state, settings, limit)
        shape: Any = Annotated[form, WithJsonSchema(update_schema(fitted.shown, settings))]
        try:
            client = cast(ChatClient, counted)
            return fitted.shown, await ask_json(client, fitted.messages, shape, reply_tokens)
        except LlmFailed as failure:
            if failure.reason != "too long" or fitted.least or not tries_left:
                raise
            limit = int(fitted.tokens * _SHORTER)
    raise AssertionError("the last try returns or raises")


def _query(reply: _Reply, state: AgentState, settings: AgentSettings) -> str:
    if reply.decision == "ANSWER" or not settings.rewrite_query:
        return state.query
    return _clean(reply.next_query, QUERY_WORDS) or state.query


async def _signature(
    reply: _Reply,
    shown: Shown,
    searcher: AsyncRetriever,
    state: AgentState,
    settings: AgentSettings,
    evidence: tuple[Fact, ...],
) -> Signature | None:
    if not settings.use_signature:
        return None
    if settings.signature_update == "submodular":
        # σ_t first: of two sessions that are worth the same, the one that is there stays.
        sessions = tuple(dict.fromkeys((*shown.signature_rows, *state.sessions)))
        facts = tuple(fact.text for fact in evidence)
        session_of = searcher.mindscape.session_of
        held = tuple(tuple(int(session_of[state.seen[i]]) for i in fact.sources) for fact in evidence)
        choice = Choice(state.question.text, state.rows, state.scores, facts, held, sessions, settings.k_sum)
        return await searcher.together(choose_signatures, choice)
    assert isinstance(reply, _SignedReply)
    if settings.signature_update == "rewrite":
        texts = tuple(dict.fromkeys(text for said in reply.signature if (text := _clean(said, TEXT_WORDS))))
        return Signature((), texts[: settings.k_sum], mode="update") if texts else state.signature
    row_of = {f"S{i}": row for i, row in enumerate(shown.signature_rows, start=1)}
    row_of |= {f"H{i}": row for i, row in enumerate(shown.candidates, start=1)}
    rows = [row_of[label] for label in _labels(reply.signature, "") if label in row_of]
    if not rows:
        return state.signature
    return sessions_signature(searcher.retriever, rows[: settings.k_sum], "update")


def _evidence(reply: _Reply, shown: Shown, state: AgentState, settings: AgentSettings) -> tuple[Fact, ...]:
    hidden = len(state.evidence) - len(shown.evidence)  # the oldest ones, which the model could not repeat
    old = {f"E{i}": fact for i, fact in enumerate(shown.evidence, start=1)}
    passages = {f"P{i}": id for i, id in enumerate(shown.passage_ids, start=1)}
    by_text = {_key(fact.text): fact for fact in shown.evidence}
    kept: dict[str, Fact] = {}
    for item in reply.evidence:
        labels = _labels(item.source, "P")
        text = _clean(item.fact, settings.max_fact_words)
        cited = [old[label] for label in labels if label in old]
        same = by_text.get(_key(text))
        named = tuple(passages[label] for label in labels if label in passages)
        if same is not None or (len(cited) == 1 and not named) or not text:
            facts = [same] if same is not None else cited
            facts = [Fact(fact.text, _union(fact.sources, named)) for fact in facts]
        else:
            facts = [Fact(text, _union(*(fact.sources for fact in cited), named))]
        for fact in facts:
            before = kept.get(_key(fact.text), Fact(fact.text, ()))
            if fact.sources:
                kept[_key(fact.text)] = Fact(before.text, _union(before.sources, fact.sources))
    if not kept:
        return state.evidence
    order = {_key(fact.text): i for i, fact in enumerate(shown.evidence)}
    listed = sorted(kept.values(), key=lambda fact: order.get(_key(fact.text), len(order)))  # stable: new ones last
    return (*state.evidence[:hidden], *listed)[-settings.max_facts :]


def _labels(said: Sequence[str], letter: str) -> list[str]:
    """Read "P3", "[p3]" and, where a letter is given for it, "3"; each once, in order."""
    found = [_ID.fullmatch(text) for text in said]
    labels = [f"{(one[1] or letter).upper()}{int(one[2])}" for one in found if one]
    return list(dict.fromkeys(labels))


def _union(*sources: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(id for some in sources for id in some))


def _key(text: str) -> str:
    return " ".join(text.split()).casefold().rstrip(" .。")


def _clean(text: str, words: int) -> str:
    """Return one line of at most so many words, without control characters and halves of surrogate pairs.

    What holds no letter and no digit, such as the dots of a form that was copied, is nothing.
    """
    limit = words * LETTERS_PER_WORD
    line = _CONTROL.sub(" ", text[: 4 * limit].encode("utf-8", "replace").decode("utf-8")).strip()
    line = " ".join(line.split(" ")[:words])[:limit].rstrip()
    return line if any(map(str.isalnum, line)) else ""
