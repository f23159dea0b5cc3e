"""What an answer and the passages behind it score, and the means, intervals and differences over a run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from mia_serve.eval.answers import answer_f1, exact_match
from mia_serve.eval.bootstrap import Interval, cluster_bootstrap, paired_bootstrap
from mia_serve.eval.qa_data import QaQuestion
from mia_serve.mindscape.sentences import count_words

#: Metrics of an answer, by task. Pair accuracy is over pairs of claims, all others are over questions.
ANSWER_METRICS: dict[str, tuple[str, ...]] = {
    "free": ("f1", "em"),
    "choice": ("accuracy",),
    "letter": ("accuracy",),
    "claim": ("accuracy", "pair_accuracy"),
}
PAIR_ACCURACY = "pair_accuracy"
#: Words (Chinese: characters) of the answer that is scored.
LENGTH = "answer_words"
#: Reason for a null recall -> key.
NO_GOLD, TOO_SMALL = "no gold is known", "the haystack holds no more passages than are retrieved"

#: A record of a run's ``answers.jsonl``.
Record = Mapping[str, Any]


class Recall(NamedTuple):
    """Share of the gold chunks that were found, or why there is none."""

    value: float | None
    reason: str = ""


class Values(NamedTuple):
    """One metric of one system: a value a unit (None: there is none), and the book of each unit."""

    values: list[float | None]
    books: list[Hashable]


def recall_name(k: int) -> str:
    """Return the key of recall among the first k."""
    return f"recall@{k}"


def recall_at(found: Sequence[str], gold: Sequence[str] | None, k: int, haystack_size: int) -> Recall:
    """Give |gold ∩ first k| / |gold|, as MiA-Signature's scores imply (spec: half-question grid).

    Where gold is unknown, or every passage would be retrieved anyway, there is no value: null, never 0 and never 1.

    Args:
        found: Ids of the passages, best first.
        gold: Ids of the gold passages; None or empty where they are unknown.
        k: Passages that count.
        haystack_size: Passages that could be found.
    """
    if not gold:
        return Recall(None, NO_GOLD)
    if haystack_size <= k:
        return Recall(None, TOO_SMALL)
    wanted = set(gold)
    return Recall(len(wanted & set(found[:k])) / len(wanted))


def score_answer(question: QaQuestion, prediction: str | None, language: str = "en") -> dict[str, float | None]:
    """Score an answer; None (a failed or unreadable reply) is wrong.

    Args:
        question: The question with its references or label.
        prediction: The phrase, the letter, or TRUE or FALSE.
        language: With "zh" F1 counts Chinese characters as words.

    Returns:
        ``f1``, ``em`` and length (None without an answer) of a free answer, ``accuracy`` of all others.
    """
    if question.task != "free":
        return {"accuracy": float(prediction is not None and prediction.upper() == question.label.upper())}
    if prediction is None:
        return {"f1": 0.0, "em": 0.0, LENGTH: None}
    return {
        "f1": answer_f1(prediction, question.answers, language),
        "em": exact_match(prediction, question.answers, language),
        LENGTH: float(count_words(prediction)),
    }


def metric_names(questions: Sequence[QaQuestion], k: int, answered: bool) -> list[str]:
    """List the metrics of a run in the order of its tables."""
    names: dict[str, None] = {}
    if answered:
        for question in questions:
            names |= dict.fromkeys(ANSWER_METRICS[question.task])
        if not any(question.pair for question in questions):
            names.pop(PAIR_ACCURACY, None)
    names[recall_name(k)] = None
    if answered and any(question.task == "free" for question in questions):
        names[LENGTH] = None
    return list(names)


def unit_values(records: Mapping[str, Record], questions: Sequence[QaQuestion], metric: str) -> Values:
    """Collect a metric of one system, question by question, or for pair accuracy pair by pair.

    A pair counts as right if both its claims are; one of which a claim is not among the questions has no value.

    Args:
        records: Question id -> record.
        questions: All questions of the run.
        metric: Key of a record's ``metrics``, or ``pair_accuracy``.
    """
    if metric != PAIR_ACCURACY:
        values = [records[question.id]["metrics"].get(metric) for question in questions]
        return Values(values, [question.book for question in questions])
    pairs = claim_pairs(questions)
    rights: list[float | None] = [
        float(all(records[claim.id]["metrics"]["accuracy"] == 1 for claim in claims)) if len(claims) == 2 else None
        for claims in pairs.values()
    ]
    return Values(rights, [claims[0].book for claims in pairs.values()])


def claim_pairs(questions: Sequence[QaQuestion]) -> dict[str, list[QaQuestion]]:
    """Group claims by their pair, in order."""
    pairs: dict[str, list[QaQuestion]] = {}
    for question in questions:
        if question.pair is not None:
            pairs.setdefault(question.pair, []).append(question)
    return pairs


def mean_of(values: Values, n_boot: int, seed: int) -> dict[str, Any]:
    """Return mean and 95 % interval over whole books, JSON-ready."""
    return interval_record(cluster_bootstrap(values.values, values.books, n_boot=n_boot, seed=seed))


def difference_of(first: Values, second: Values, n_boot: int, seed: int) -> dict[str, Any]:
    """Return the paired difference ``first - second`` with interval and two-sided p-value, JSON-ready."""
    return interval_record(
        paired_bootstrap(first.values, second.values, first.books, n_boot=n_boot, seed=seed), paired=True
    )


def interval_record(interval: Interval, paired: bool = False) -> dict[str, Any]:
    """Return an interval as a dict; a difference with its p-value as text and whether it excludes 0."""
    record = asdict(interval)
    if paired:
        return record | {"p": interval.p_text, "excludes_zero": interval.excludes_zero}
    return {key: value for key, value in record.items() if key not in ("p_value", "sides")}
