"""The signature of an agent's next step, chosen by the set function instead of the model.

Candidates are the sessions of the passages and those of σ_t. What they are to cover is the passages and, beside them,
the facts of the evidence: a session that explains what was found earlier stays although the search has moved on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mia_serve.index.flat import full_float32
from mia_serve.retriever import COVER_TEMPERATURE
from mia_serve.signature import Selection, Signature, select_signature

if TYPE_CHECKING:
    from mia_serve.mindscape import Mindscape
    from mia_serve.retriever import Retriever


class Choice(NamedTuple):
    """What one signature is chosen from.

    Attributes:
        question: The question asked, which stays while the queries change.
        rows: The passages, rows of ``mindscape.chunks``.
        scores: Their scores.
        facts: Texts of the evidence.
        fact_sessions: Sessions that hold each fact's sources, rows of ``mindscape.sessions``.
        sessions: The candidates, rows of ``mindscape.sessions``; among equal gains the first one wins.
        k: Most sessions.
    """

    question: str
    rows: tuple[int, ...]
    scores: tuple[float, ...]
    facts: tuple[str, ...]
    fact_sessions: tuple[tuple[int, ...], ...]
    sessions: tuple[int, ...]
    k: int


def choose_signatures(retriever: Retriever, choices: Sequence[Choice]) -> list[Signature]:
    """Choose a signature for each state by `select_signature`, with the retriever's objective.

    The passages weigh as they do for the first signature (by score or all alike). Where there are facts, they have half
    of the weight, in equal parts. Under "member" coverage a session covers its own passages, and the facts that
    they state, fully.
    """
    selector = retriever.selector
    queries = selector.encode_queries([choice.question for choice in choices])
    texts = [fact for choice in choices for fact in choice.facts]
    encoded = selector.encode_documents(texts) if texts else np.zeros((0, queries.shape[1]), np.float32)
    facts = np.split(encoded, np.cumsum([len(choice.facts) for choice in choices])[:-1])
    made: dict[int, Signature] = {}
    for k in {choice.k for choice in choices}:
        members = [i for i, choice in enumerate(choices) if choice.k == k]
        found = _select(retriever, [choices[i] for i in members], queries[members], [facts[i] for i in members], k)
        made |= {i: _record(retriever, choices[i], found, row) for row, i in enumerate(members)}
    return [made[i] for i in range(len(choices))]


def _select(
    retriever: Retriever, choices: Sequence[Choice], queries: np.ndarray, facts: Sequence[np.ndarray], k: int
) -> Selection:
    """Pad B choices to one batch: (B, H) candidates, (B, C) passages and facts."""
    chunks = retriever.chunk_vectors(retriever.selector)
    summaries = retriever.session_vectors(retriever.selector)
    height = max(len(choice.sessions) for choice in choices)
    width = max(len(choice.rows) + len(choice.facts) for choice in choices)
    query_sim = np.zeros((len(choices), height), np.float32)
    cover_sim = np.zeros((len(choices), width, height), np.float32)
    unit_sim = np.zeros((len(choices), height, height), np.float32)
    weight = np.zeros((len(choices), width), np.float32)
    for b, choice in enumerate(choices):
        units = np.asarray(summaries[list(choice.sessions)], np.float32)
        covered = np.concatenate([np.asarray(chunks[list(choice.rows)], np.float32), facts[b]])
        h, c = len(units), len(covered)
        query_sim[b, :h], unit_sim[b, :h, :h] = units @ queries[b], units @ units.T
        cover_sim[b, :c, :h] = covered @ units.T
        if retriever.cover == "member":
            cover_sim[b, :c, :h][_members(retriever.mindscape, choice)] = 1.0
        weight[b, :c] = _weights(choice, retriever.cover_weight)
    query, cover, unit, counts = (
        torch.from_numpy(array).to(retriever.device) for array in (query_sim, cover_sim, unit_sim, weight)
    )
    pool = torch.tensor([[h < len(choice.sessions) for h in range(height)] for choice in choices])
    with full_float32(retriever.device):
        return select_signature(
            query, cover, unit, k, retriever.weights, pool_mask=pool.to(retriever.device), cover_weight=counts
        )


def _members(mindscape: Mindscape, choice: Choice) -> np.ndarray:
    """Return which candidate holds which passage or fact, (C, H) bool."""
    own = [(int(mindscape.session_of[row]),) for row in choice.rows]
    return np.array([[session in of for session in choice.sessions] for of in (*own, *choice.fact_sessions)])


def _weights(choice: Choice, cover_weight: str) -> np.ndarray:
    """Return what each passage and each fact counts; they sum to 1."""
    weights = torch.ones(len(choice.rows), dtype=torch.float64)
    if cover_weight == "e1_score":
        weights = torch.tensor(choice.scores, dtype=torch.float64).div(COVER_TEMPERATURE)
        weights = weights.softmax(dim=0)
    passages = (weights / weights.sum()).numpy()
    if not choice.facts:
        return passages
    return np.concatenate([passages / 2, np.full(len(choice.facts), 0.5 / len(choice.facts))])


def _record(retriever: Retriever, choice: Choice, found: Selection, row: int) -> Signature:
    picks = [pick for pick in found.indices[row].tolist() if pick >= 0]
    terms = dict(zip(("relevance", "coverage", "diversity"), found.terms[row].tolist(), strict=True))
    chosen = sessions_signature(retriever, [choice.sessions[pick] for pick in picks], "update")
    return replace(
        chosen,
        gains=tuple(found.gains[row, : len(picks)].tolist()),
        terms=terms | {"value": float(found.value[row])},
        pick_terms=tuple((q, c, d) for q, c, d in found.pick_terms[row, : len(picks)].tolist()),
    )


def sessions_signature(retriever: Retriever, sessions: Sequence[int], mode: str) -> Signature:
    """Return the signature of these sessions, its texts in the order in which the retriever has them read.

    Args:
        retriever: Holds the sessions and the order.
        sessions: Rows of ``mindscape.sessions``, best first.
        mode: How they were chosen.
    """
    known = retriever.mindscape.sessions
    read = sessions if retriever.order == "selection" else sorted(sessions)
    return Signature(tuple(known[i].id for i in sessions), tuple(known[i].summary for i in read), mode=mode)
