"""When the signature helps a generator and when it is noise: each question's answer mode, chosen without labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from mia_serve.rag.prompts import Task
from mia_serve.rag.question import AnswerMode
from mia_serve.signature.spread import activation_spread

if TYPE_CHECKING:
    from mia_serve.mindscape import Mindscape
    from mia_serve.retriever import Pool
    from mia_serve.signature import Signature

WIDE = 10.0
"""Sessions over which the activation of a question about a whole book spreads: twice the papers' signature."""

NEEDED: dict[Task, float] = {"claim": 0.0, "choice": 0.2, "letter": 0.4, "free": 0.6}
"""Least `signature_need` at which a task's questions are shown the signature.

In the papers it helps the verification of claims about whole novels (NoCha, 61.9 to 68.3 % of the pairs; 71.4 % with
evidence) and, by their averages, the choice between options in detective stories; between those of InfiniteBench it
makes no difference, and the short answers of NarrativeQA and NovelHopQA are best without it. The steps are even ones
between those ends and not tuned.
"""

PAPER_MODES: dict[Task, AnswerMode] = {
    "claim": "chunks+sig+evi",
    "choice": "chunks",
    "letter": "chunks",
    "free": "chunks",
}
"""What the papers' agent answers best from: for claims all of it, for short answers the passages alone (and for the
tasks that choose, where they do not say, the same)."""


class Signals(NamedTuple):
    """What retrieval alone tells of a question.

    Attributes:
        size: Summaries in the signature.
        spread: Sessions over which the mass of E1's best chunks spreads, from 1 (`activation_spread`).
        covered: Share of the signature's sessions of which a passage is shown, 0 to 1; 1 where there is no signature.
        agreement: Share of the passages that are also among as many best chunks of E1, 0 to 1: how little the signature
            moved retrieval.
    """

    size: int
    spread: float
    covered: float
    agreement: float


def measure_signals(mindscape: Mindscape, pool: Pool, rows: Sequence[int], signature: Signature | None) -> Signals:
    """Measure the signals of one question.

    Args:
        mindscape: What was searched.
        pool: The question's pool under E1.
        rows: Chunks that are shown as passages, rows of ``mindscape.chunks``.
        signature: The signature they were found with.
    """
    sessions = torch.from_numpy(mindscape.session_of[pool.rows])[None]
    spread = float(activation_spread(torch.from_numpy(pool.scores)[None], sessions)[0])
    shown = {mindscape.chunks[row].session_id for row in rows}
    wanted = set(signature.session_ids) if signature is not None else set()
    best = set(pool.rows[: len(rows)].tolist())
    return Signals(
        size=len(signature.texts) if signature is not None else 0,
        spread=spread,
        covered=len(wanted & shown) / len(wanted) if wanted else 1.0,
        agreement=len(best & set(rows)) / len(rows) if rows else 1.0,
    )


def signature_need(signals: Signals) -> float:
    """Return how much a question seems to be about more than its passages show, 0 to 1.

    The mean of three shares: how wide the activation is, from one session to ten; how much of the signature lies in
    sessions without a passage; how many passages the signature brought in.
    """
    wide = min(1.0, max(0.0, (signals.spread - 1) / (WIDE - 1)))
    return (wide + (1 - signals.covered) + (1 - signals.agreement)) / 3


def choose_mode(task: Task, signals: Signals, *, evidence: bool = False) -> AnswerMode:
    """Choose what the prompt of one question holds, without labels and without a call of a model.

    The signature is shown where `signature_need` reaches the task's `NEEDED`, and the evidence of an agent with it; the
    passages alone otherwise.

    Args:
        task: How the question is answered.
        signals: See `measure_signals`.
        evidence: Whether there is evidence to show.
    """
    if not signals.size or signature_need(signals) < NEEDED[task]:
        return "chunks"
    return "chunks+sig+evi" if evidence else "chunks+sig"
