"""Measure the chat-memory study's methods: means, intervals over whole conversations, differences, lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mia_serve import fusion
from mia_serve.eval.bootstrap import Interval, cluster_bootstrap, paired_bootstrap
from mia_serve.eval.conversations import ConversationBenchmark
from mia_serve.eval.metrics import SESSION_METRICS, QueryScores, chance_scores, score_queries
from mia_serve.eval.study_report import Curve, Difference, LengthGap, QuestionResult, Row, Study
from mia_serve.eval.study_scores import Layout

#: Turns of the longest gold session, (fewest, most).
LENGTHS: tuple[tuple[int, int | None], ...] = ((1, 7), (8, 15), (16, 25), (26, None))
#: The category whose gold is the session that baits, not one that answers.
ADVERSARIAL = "adversarial"

#: Row in which both sides index all that is known of a session.
ALL_PARTS = "index:text+summary+facts|turns+facts+summary"
#: Differences in Hit@1 that are tested, where both rows are there.
_DIFFERENCES: tuple[tuple[str, str, str], ...] = (
    ("max", "early", "late - early"),
    ("bm25+max", "max", "fusion - late"),
    ("bm25+max", "bm25", "fusion - BM25"),
    ("bm25+max", "bm25+early", "fusion late - fusion early"),
    ("bm25+max", "rrf", "fusion - RRF"),
    ("lme10", "max", "log-mean-exp - max"),
    ("bm25+lme10", "bm25+max", "fusion log-mean-exp - fusion max"),
    ("adaptive", "bm25+max", "alpha by query - alpha by the others"),
    ("adaptive", "bm25", "alpha by query - BM25"),
    ("reranked", "fixed", "re-ranked - fusion"),
    ("index:text+summary", "bm25", "summaries in BM25 - BM25"),
    (ALL_PARTS, "bm25+max", "summaries and facts - fusion"),
    (f"{ALL_PARTS}|adaptive", ALL_PARTS, "the same, alpha by query - by the others"),
)


@dataclass(frozen=True)
class Method:
    """One way to rank sessions, before it is measured.

    Attributes:
        key: Name in files.
        label: Name in tables.
        section: Table it belongs to: single, fused, rerank, summaries (reported apart) or trivial.
        scores: (Q, S) scores; columns are sessions in order.
        alpha: Weight of BM25 for each question, (Q,).
        chosen: Weight by conversation, or fold, held out.
        hits: (Q, A) Hit@1 under each weight of ``fusion.ALPHAS``.
    """

    key: str
    label: str
    section: str
    scores: np.ndarray
    alpha: np.ndarray | None = None
    chosen: dict[str, float] | None = None
    hits: np.ndarray | None = None


def summarise(
    benchmark: ConversationBenchmark,
    layout: Layout,
    methods: Sequence[Method],
    *,
    settings: dict[str, Any],
    models: dict[str, Any],
    versions: dict[str, str | None],
    started: float,
) -> Study:
    """Measure methods: means with intervals over whole conversations, differences, categories and lengths.

    Args:
        benchmark: Conversations and questions.
        layout: That of the benchmark.
        methods: Scores of all sessions.
        settings: As reported; ``n_boot`` and ``seed`` are those of the resamples.
        models: As reported.
        versions: As reported.
        started: ``time.perf_counter()`` at the start.
    """
    questions = _question_results(benchmark, layout, methods)
    groups = [question.group for question in benchmark.questions]
    boot = {"n_boot": settings["n_boot"], "seed": settings["seed"]}

    def values(key: str, metric: str, rows: Sequence[int] | None = None) -> list[float | None]:
        return [questions[row].scores[key][metric] for row in (range(len(questions)) if rows is None else rows)]

    rows = []
    kinds = _categories(benchmark)
    by_kind: dict[str, dict[str, Interval]] = {method.key: {} for method in methods}
    for kind, members in kinds.items():
        owners = [groups[row] for row in members]
        for method in methods:
            by_kind[method.key][kind] = cluster_bootstrap(values(method.key, "hit@1", members), owners, **boot)
    for method in methods:
        metrics = {name: cluster_bootstrap(values(method.key, name), groups, **boot) for name in SESSION_METRICS}
        rows.append(
            Row(
                method.key,
                method.label,
                method.section,
                metrics,
                by_kind[method.key],
                method.chosen,
                _spread(method, layout),
            )
        )
    keys = {method.key for method in methods}
    differences = tuple(
        Difference(a, b, label, paired_bootstrap(values(a, "hit@1"), values(b, "hit@1"), groups, sides=1, **boot))
        for a, b, label in _DIFFERENCES
        if a in keys and b in keys
    )
    fused = next((method for method in methods if method.key == "bm25+max"), None)
    return Study(
        benchmark=_benchmark_facts(benchmark, layout, kinds),
        settings=settings,
        models=models,
        rows=tuple(rows),
        differences=differences,
        lengths=_lengths(benchmark, values, groups, boot) if {"early", "max"} <= keys else (),
        curve=None if fused is None or fused.hits is None else _curve(fused, groups, layout),
        chance=_chance(benchmark),
        refused=_refused(questions),
        versions=versions,
        seconds=time.perf_counter() - started,
        questions=questions,
    )


def _spread(method: Method, layout: Layout) -> dict[str, float] | None:
    if method.alpha is None:
        return None
    alphas = method.alpha[layout.valued]
    return {name: float(getattr(alphas, name)()) for name in ("mean", "min", "max")}


def _question_results(
    benchmark: ConversationBenchmark, layout: Layout, methods: Sequence[Method]
) -> tuple[QuestionResult, ...]:
    names = [[session.id for session in conversation.sessions] for conversation in benchmark.conversations]
    ids = [names[question.conversation] for question in benchmark.questions]
    gold = [tuple(own[i] for i in q.gold) for own, q in zip(ids, benchmark.questions, strict=True)]
    sizes = [len(own) for own in ids]
    rankings: dict[str, list[list[str]]] = {}
    ranked_scores: dict[str, list[np.ndarray]] = {}
    scores: dict[str, list[QueryScores]] = {}
    for method in methods:
        masked = np.where(layout.present, method.scores, -np.inf)
        order = fusion.rank(masked)
        ordered = np.take_along_axis(masked, order, axis=1)
        rankings[method.key] = [[own[i] for i in row[: len(own)]] for own, row in zip(ids, order.tolist(), strict=True)]
        ranked_scores[method.key] = [row[:size] for row, size in zip(ordered, sizes, strict=True)]
        scores[method.key] = score_queries(rankings[method.key], gold, haystack_size=sizes, metrics=SESSION_METRICS)
    return tuple(
        QuestionResult(
            id=question.id,
            conversation=benchmark.conversations[question.conversation].id,
            group=question.group,
            category=question.category,
            gold=gold[row],
            scores={method.key: scores[method.key][row] for method in methods},
            alphas={method.key: float(method.alpha[row]) for method in methods if method.alpha is not None},
            rankings={method.key: rankings[method.key][row] for method in methods},
            ranked_scores={method.key: ranked_scores[method.key][row] for method in methods},
        )
        for row, question in enumerate(benchmark.questions)
    )


def _categories(benchmark: ConversationBenchmark) -> dict[str, list[int]]:
    """Return the questions of each category, and of all but the adversarial ones where there are some."""
    kinds: dict[str, list[int]] = {}
    for row, question in enumerate(benchmark.questions):
        kinds.setdefault(question.category, []).append(row)
    kinds = dict(sorted(kinds.items(), key=lambda kind: (kind[0] == ADVERSARIAL, kind[0])))
    if ADVERSARIAL in kinds and len(kinds) > 1:
        kinds[f"all but {ADVERSARIAL}"] = [
            row for row, question in enumerate(benchmark.questions) if question.category != ADVERSARIAL
        ]
    return kinds


def _lengths(
    benchmark: ConversationBenchmark,
    values: Callable[[str, str, Sequence[int]], list[float | None]],
    groups: Sequence[str],
    boot: dict[str, Any],
) -> tuple[LengthGap, ...]:
    longest = [benchmark.longest_gold(question) for question in benchmark.questions]
    gaps = []
    for fewest, most in LENGTHS:
        members = [row for row, turns in enumerate(longest) if fewest <= turns and (most is None or turns <= most)]
        if not members:
            continue
        late, early = values("max", "hit@1", members), values("early", "hit@1", members)
        gap = paired_bootstrap(late, early, [groups[row] for row in members], sides=1, **boot)
        turns = f"{fewest}+" if most is None else f"{fewest}-{most}"
        gaps.append(LengthGap(turns, _mean(late), _mean(early), gap))
    return tuple(gaps)


def _curve(fused: Method, groups: Sequence[str], layout: Layout) -> Curve:
    assert fused.hits is not None
    hits, member = fused.hits[layout.valued], np.asarray(groups)[layout.valued]
    by_group = {name: tuple(map(float, hits[member == name].mean(axis=0))) for name in dict.fromkeys(member.tolist())}
    # One question a group makes no curve.
    return Curve(fusion.ALPHAS, tuple(map(float, hits.mean(axis=0))), by_group if len(by_group) < len(member) else {})


def _benchmark_facts(benchmark: ConversationBenchmark, layout: Layout, kinds: dict[str, list[int]]) -> dict[str, Any]:
    sessions = [len(conversation.sessions) for conversation in benchmark.conversations]
    turns = [len(session.turns) for conversation in benchmark.conversations for session in conversation.sessions]
    gold = [len(question.gold) for question in benchmark.questions]
    return {
        "name": benchmark.name,
        "questions": len(benchmark.questions),
        "dropped": dict(benchmark.dropped),
        "conversations": len(sessions),
        "sessions": {"total": sum(sessions), "min": min(sessions), "max": max(sessions)},
        "turns": {"total": sum(turns), "min_per_session": min(turns), "max_per_session": max(turns)},
        "gold_sessions": {"1": gold.count(1), "2": gold.count(2), "3+": sum(n > 2 for n in gold), "max": max(gold)},
        "categories": {kind: int(layout.valued[members].sum()) for kind, members in kinds.items()},
        "groups": len({question.group for question in benchmark.questions}),
    }


def _chance(benchmark: ConversationBenchmark) -> QueryScores:
    each = []
    for question in benchmark.questions:
        size = len(benchmark.conversations[question.conversation].sessions)
        each.append(chance_scores(size, len(question.gold), size, SESSION_METRICS))
    return {metric: _mean([scores[metric] for scores in each]) for metric in SESSION_METRICS}


def _refused(questions: Sequence[QuestionResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in questions:
        for metric, value in next(iter(one.scores.values())).items():
            if value is None:
                counts[metric] = counts.get(metric, 0) + 1
    return counts


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
