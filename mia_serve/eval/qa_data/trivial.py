"""What one answer to every question scores: the floor that a system must be told apart from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mia_serve.eval.answers import answer_f1, exact_match, normalise_answer
from mia_serve.eval.qa_data.base import QaBenchmark, QaQuestion


class Constant(NamedTuple):
    """Scores of one answer given to every question.

    Attributes:
        label: What is answered, in words.
        answer: The answer.
        metrics: Metric -> mean score: ``accuracy``, ``pair_accuracy``; for free questions ``f1`` and ``em``.
    """

    label: str
    answer: str
    metrics: dict[str, float]


def constant_answers(benchmark: QaBenchmark) -> tuple[Constant, ...]:
    """Score what can be answered without reading: always TRUE, always FALSE, always one letter, the commonest answer.

    Args:
        benchmark: Its questions, of one or several tasks; each answer is scored on the questions that it can answer.

    Returns:
        The constants, those of claims first, then letters in order, then the free answer.
    """
    asked = benchmark.questions
    claims = [q for q in asked if q.task == "claim"]
    choices = [q for q in asked if q.task in ("choice", "letter")]
    free = [q for q in asked if q.task == "free"]
    constants = [_claims(claims, answer) for answer in ("TRUE", "FALSE") if claims]
    letters = sorted({chr(ord("A") + i) for q in choices for i in range(len(q.options))})
    constants += [_constant(f"always {x}", x, {"accuracy": [float(q.label == x) for q in choices]}) for x in letters]
    if free:
        answer = commonest_answer(free)
        f1, em = ([score(answer, q.answers) for q in free] for score in (answer_f1, exact_match))
        constants.append(_constant(f"always {answer!r}", answer, {"f1": f1, "em": em}))
    return tuple(constants)


def commonest_answer(questions: Sequence[QaQuestion]) -> str:
    """Return the reference answer that most questions have (letter case, punctuation and articles aside).

    Of equally common ones it is the first, as it was first written.
    """
    written: dict[str, str] = {}
    count: Counter[str] = Counter()
    for question in questions:
        own: dict[str, str] = {}
        for answer in question.answers:
            own.setdefault(normalise_answer(answer), answer)
        for key, answer in own.items():
            written.setdefault(key, answer)
        count.update(list(own))
    return written[max(count, key=lambda key: count[key])]


def _claims(claims: Sequence[QaQuestion], answer: str) -> Constant:
    right = [float(q.label == answer) for q in claims]
    pairs: dict[str, float] = {}
    for question, score in zip(claims, right, strict=True):
        if question.pair is not None:
            pairs[question.pair] = min(score, pairs.get(question.pair, 1.0))
    scores = {"accuracy": right, "pair_accuracy": list(pairs.values())}
    return _constant(f"always {answer}", answer, {name: values for name, values in scores.items() if values})


def _constant(label: str, answer: str, scores: dict[str, list[float]]) -> Constant:
    return Constant(label, answer, {name: sum(values) / len(values) for name, values in scores.items()})
