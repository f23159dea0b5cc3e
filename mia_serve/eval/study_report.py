"""The chat-memory study's result: what every method scored, with intervals, by category and by length."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mia_serve.eval.bootstrap import Interval
from mia_serve.eval.metrics import QueryScores


@dataclass(frozen=True)
class Row:
    """What a method scored.

    Attributes:
        key: Of its method.
        label: Of its method.
        section: Of its method.
        metrics: Means over all questions.
        categories: Hit@1 by category.
        chosen: Weight of BM25 by conversation, or fold, held out.
        alpha: Mean, least and greatest weight of BM25 over the questions; None where there is none.
    """

    key: str
    label: str
    section: str
    metrics: dict[str, Interval]
    categories: dict[str, Interval]
    chosen: dict[str, float] | None
    alpha: dict[str, float] | None


@dataclass(frozen=True)
class Difference:
    """Hold the paired difference in Hit@1 of two rows, first - second."""

    first: str
    second: str
    label: str
    hit: Interval


@dataclass(frozen=True)
class LengthGap:
    """Hold what late interaction gains over the mean vector for questions of one length of gold session.

    Its means are None where no question has a value.
    """

    turns: str
    late: float | None
    early: float | None
    gap: Interval


@dataclass(frozen=True)
class Curve:
    """Hit@1 of BM25 ⊕ late max by the weight of BM25: over all questions and by conversation, or fold."""

    alphas: tuple[float, ...]
    everywhere: tuple[float, ...]
    by_group: dict[str, tuple[float, ...]]

    @property
    def best(self) -> tuple[float, float]:
        """Return the best single weight, chosen with the answers in sight, and its Hit@1."""
        place = int(np.argmax(self.everywhere))
        return self.alphas[place], self.everywhere[place]


@dataclass(frozen=True)
class QuestionResult:
    """Keep what every method made of a question.

    Attributes:
        id: Of the question.
        conversation: Id of its conversation.
        group: What was resampled.
        category: Its kind.
        gold: Ids of the gold sessions.
        scores: Method -> metric -> value.
        alphas: Method -> weight of BM25 that was used.
        rankings: Method -> session ids, best first; not in the JSON lines.
        ranked_scores: Method -> their scores.
    """

    id: str
    conversation: str
    group: str
    category: str
    gold: tuple[str, ...]
    scores: dict[str, QueryScores]
    alphas: dict[str, float]
    rankings: dict[str, list[str]]
    ranked_scores: dict[str, np.ndarray]


@dataclass(frozen=True)
class Study:
    """Hold everything that a reader needs to trust, repeat or compare the numbers.

    Attributes:
        benchmark: Name and counts.
        settings: Every choice, seeds and number of resamples included.
        models: Encoder and re-ranker: name, prefixes, hashes.
        rows: One a method.
        differences: Tested differences in Hit@1.
        lengths: Length dilution; empty without the early row.
        curve: Of alpha; None without an encoder.
        chance: Expected scores of a random ranking, mean over the questions.
        refused: Questions that a metric leaves out because they have too few sessions for its cutoff.
        versions: Of Python and the packages that matter.
        seconds: Wall time.
        questions: Per-question results, not part of the JSON (see ``query_lines``).
    """

    benchmark: dict[str, Any]
    settings: dict[str, Any]
    models: dict[str, Any]
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    lengths: tuple[LengthGap, ...]
    curve: Curve | None
    chance: QueryScores
    refused: dict[str, int]
    versions: dict[str, str | None]
    seconds: float
    questions: tuple[QuestionResult, ...]

    def row(self, key: str) -> Row:
        """Return a row by its key."""
        return next(row for row in self.rows if row.key == key)

    def difference(self, first: str, second: str) -> Difference:
        """Return the difference ``first - second``."""
        return next(one for one in self.differences if (one.first, one.second) == (first, second))

    def to_dict(self) -> dict[str, Any]:
        """Return the study without its per-question results, ready for JSON."""
        curve = None
        if self.curve is not None:
            alpha, hit = self.curve.best
            curve = asdict(self.curve) | {"best_in_sight_of_the_answers": {"alpha": alpha, "hit@1": hit}}
        return {
            "benchmark": self.benchmark,
            "settings": self.settings,
            "models": self.models,
            "rows": [asdict(row) for row in self.rows],
            "differences": [asdict(one) | {"p": one.hit.p_text} for one in self.differences],
            "lengths": [asdict(one) | {"p": one.gap.p_text} for one in self.lengths],
            "alpha_curve": curve,
            "chance": self.chance,
            "refused": self.refused,
            "versions": self.versions,
            "seconds": round(self.seconds, 3),
        }

    def query_lines(self) -> str:
        """Return the per-question results as JSON lines, each with the first ten sessions of every ranking."""
        lines = []
        for one in self.questions:
            record = {
                "id": one.id,
                "conversation": one.conversation,
                "group": one.group,
                "category": one.category,
                "gold": one.gold,
                "scores": one.scores,
                "alphas": one.alphas,
                "first": {key: ids[:10] for key, ids in one.rankings.items()},
            }
            lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        return "".join(lines)
