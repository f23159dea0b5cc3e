"""What mining did: what each rule dropped, what is missing, how positives and negatives score."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mia_train.candidates import Candidates
    from mia_train.embedding import Embedder
    from mia_train.mining import MiningSettings

_EXCLUSIONS = {
    "positive_id": "a positive, by id",
    "positive_text": "a positive, by text",
    "same_query": "a positive of the same query in another row",
}


@dataclass(frozen=True)
class Found:
    """How many negatives of one kind were asked for and found, and how many rows lack some."""

    wanted: int
    found: int
    missing: int
    short_rows: int


@dataclass(frozen=True)
class Distribution:
    """Summary of n scores."""

    count: int
    mean: float
    std: float
    min: float
    q25: float
    median: float
    q75: float
    max: float

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> Distribution | None:
        """Summarise all scores of the parts; None where there is none."""
        scores = np.concatenate(parts).astype(np.float64) if parts else np.empty(0)
        if not len(scores):
            return None
        quarters = np.quantile(scores, [0, 0.25, 0.5, 0.75, 1])
        return cls(len(scores), *(round(float(v), 6) for v in (scores.mean(), scores.std(), *quarters)))


@dataclass(frozen=True)
class MiningReport:
    """What one call of :func:`mia_train.mining.mine` did.

    Attributes:
        rows: Rows mined.
        corpus: Documents.
        repeated_texts: Documents that repeat the text of another one and therefore took no part.
        candidates: Candidates in all windows together.
        dropped: How many times a rule dropped a document: the exclusions (positives), which come before a window is
            filled, and the filters, which work on it.
        settings: The mining settings.
        hard: Hard negatives.
        simple: Simple negatives.
        rows_without_negative: Rows that got none of either kind; they are kept.
        rows_without_group: Rows whose group is not in the corpus: they get no simple negatives.
        rows_without_positive: Rows none of whose positives is in the corpus, by text. If it holds the same books in
            another cut, passages with the answer are not known as such and become negatives.
        positive_scores: Of all positives, by the score that the margins compare.
        negative_scores: Of the hard negatives chosen.
        encoded: Texts that were encoded.
        cache_hits: Texts whose vectors were known.
    """

    rows: int
    corpus: int
    repeated_texts: int
    candidates: int
    dropped: dict[str, int]
    settings: dict[str, Any]
    hard: Found
    simple: Found
    rows_without_negative: int
    rows_without_group: int
    rows_without_positive: int
    positive_scores: Distribution | None
    negative_scores: Distribution | None
    encoded: int
    cache_hits: int


class Tally:
    """Counts of a mining run in progress."""

    def __init__(self) -> None:
        self._rows = self._candidates = self._bare = 0
        self._dropped: Counter[str] = Counter()
        self._positives: list[np.ndarray] = []
        self._negatives: list[np.ndarray] = []
        self._found: dict[str, list[int]] = {"hard": [0, 0, 0], "simple": [0, 0, 0]}  # wanted, found, short rows

    def window(self, candidates: int, dropped: Counter[str]) -> None:
        """Add a row's window and what was dropped for it."""
        self._candidates += candidates
        self._dropped.update(dropped)

    def scores(self, positives: np.ndarray, negatives: np.ndarray) -> None:
        """Add the scores of a row's positives and hard negatives."""
        self._positives.append(positives)
        self._negatives.append(negatives)

    def row(self, hard: int, simple: int, wanted_hard: int, wanted_simple: int) -> None:
        """Add what a row got of what it should."""
        self._rows += 1
        self._bare += hard + simple == 0
        for kind, found, wanted in (("hard", hard, wanted_hard), ("simple", simple, wanted_simple)):
            counts = self._found[kind]
            for i, value in enumerate((wanted, found, found < wanted)):
                counts[i] += value

    def report(self, settings: MiningSettings, candidates: Candidates, embedder: Embedder) -> MiningReport:
        """Return the report."""
        wanted = {kind: Found(w, f, w - f, short) for kind, (w, f, short) in self._found.items()}
        rules = (*_EXCLUSIONS, *settings.filters, "range_min")
        return MiningReport(
            rows=self._rows,
            corpus=len(candidates.corpus),
            repeated_texts=candidates.repeated_texts(),
            candidates=self._candidates,
            dropped={rule: self._dropped[rule] for rule in rules},
            settings={**asdict(settings), "range_max": settings.window},
            hard=wanted["hard"],
            simple=wanted["simple"],
            rows_without_negative=self._bare,
            rows_without_group=sum(not groups for groups in candidates.groups),
            rows_without_positive=candidates.foreign,
            positive_scores=Distribution.of(self._positives),
            negative_scores=Distribution.of(self._negatives),
            encoded=embedder.encoded,
            cache_hits=embedder.hits,
        )


def format_report(report: MiningReport) -> str:
    """Return the report as a table for people, newline at the end."""
    lines = [
        f"{report.rows} rows, {report.corpus} documents ({report.repeated_texts} repeat another's text)",
        f"{report.encoded} texts encoded, {report.cache_hits} vectors from the cache",
        "",
        f"{'left out of the ranking':<46}{'count':>10}",
    ]
    lines += [f"  {text:<44}{report.dropped[rule]:>10}" for rule, text in _EXCLUSIONS.items()]
    lines.append(f"{'candidates, at most ' + str(report.settings['range_max']) + ' a row':<46}{report.candidates:>10}")
    for rule, count in report.dropped.items():
        if rule not in _EXCLUSIONS:
            share = f"{count / report.candidates:>8.1%}" if report.candidates else ""
            lines.append(f"  {'dropped by ' + rule + ' ' + str(report.settings[rule]):<44}{count:>10}{share}")
    lines += ["", f"{'negatives':<12}{'wanted':>10}{'found':>10}{'missing':>10}{'short rows':>12}"]
    for kind, found in (("hard", report.hard), ("simple", report.simple)):
        lines.append(f"  {kind:<10}{found.wanted:>10}{found.found:>10}{found.missing:>10}{found.short_rows:>12}")
    lines.append(f"rows without any negative: {report.rows_without_negative} (kept)")
    if report.rows_without_group:
        lines.append(f"rows whose group is not in the corpus: {report.rows_without_group}")
    if report.rows_without_positive:
        lines.append(
            f"rows whose positives are not in the corpus, by text: {report.rows_without_positive}; is it the one that "
            "they were made from? In another cut of it, negatives may hold the answer"
        )
    if report.hard.missing:
        active = [rule for rule, count in report.dropped.items() if count and rule not in _EXCLUSIONS]
        lines.append(f"hard negatives are missing; to find more, relax {', '.join(['range_max', *active])}")
    return "\n".join([*lines, "", *_score_lines(report)]) + "\n"


def _score_lines(report: MiningReport) -> list[str]:
    """Return the table of scores, a line a statistic."""
    lines = [f"{'score':<12}{'positives':>12}{'negatives':>12}"]
    columns = (report.positive_scores, report.negative_scores)
    for name in Distribution.__dataclass_fields__:
        values = ["-" if column is None else getattr(column, name) for column in columns]
        shown = [
            value if isinstance(value, str) else f"{value:.4f}" if name != "count" else str(value) for value in values
        ]
        lines.append(f"  {name:<10}{shown[0]:>12}{shown[1]:>12}")
    return lines
