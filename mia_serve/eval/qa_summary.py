"""From the answers of a run to its result: means with intervals, paired differences, failures, published figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mia_serve.eval.paper import benchmark_key, published
from mia_serve.eval.qa_data import constant_answers
from mia_serve.eval.qa_metrics import (
    PAIR_ACCURACY,
    Values,
    claim_pairs,
    difference_of,
    mean_of,
    metric_names,
    unit_values,
)
from mia_serve.eval.qa_systems import PAIRS
from mia_serve.eval.versions import package_versions

if TYPE_CHECKING:
    from mia_serve.eval.qa import QaHaystack
    from mia_serve.eval.qa_data import QaBenchmark, QaQuestion

Answers = Mapping[str, Mapping[str, Mapping[str, Any]]]

#: Counted beside the labels of `LlmFailed`: a reply in which no answer could be read.
UNREADABLE = "unreadable"


def run_record(
    benchmark: QaBenchmark,
    haystacks: Sequence[QaHaystack],
    systems: Sequence[str],
    done: Answers,
    facts: Mapping[str, Any],
    *,
    n_boot: int,
    seed: int,
) -> dict[str, Any]:
    """Sum a run up; the same answers always give the same record.

    Args:
        benchmark: Books and questions.
        haystacks: Its haystacks.
        systems: Keys of the systems, in order.
        done: System -> question -> record of ``answers.jsonl``.
        facts: Settings, encoders, model, labels and modes of the run.
        n_boot: Resamples for the intervals.
        seed: Of the resamples.
    """
    questions = [question for haystack in haystacks for question in haystack.questions]
    answered = facts["model"] is not None
    names = metric_names(questions, facts["settings"]["k"], answered)
    values = {key: {name: unit_values(done[key], questions, name) for name in names} for key in systems}
    labels = facts["labels"]
    return {
        "benchmark": _benchmark_facts(benchmark, haystacks, questions, bool(facts["settings"].get("series"))),
        "settings": {**facts["settings"], "n_boot": n_boot, "seed": seed, "bootstrap": "whole books, percentile 95 %"},
        "encoders": facts["encoders"],
        "llm": _llm_facts(facts["model"], systems, done),
        "systems": [
            {
                "key": key,
                "label": labels[key],
                "mode": facts["modes"][key] if answered else None,
                "answers": len(questions),
                "metrics": _means(values[key], done[key], questions, n_boot, seed),
                "failures": failures(done[key], answered),
                "usage": _usage(done[key]),
            }
            for key in systems
        ],
        "pairs": _pairs(values, labels, n_boot, seed),
        "trivial": [
            {"label": one.label, "answer": one.answer, "metrics": one.metrics} for one in constant_answers(benchmark)
        ]
        if answered
        else [],
        "paper": {
            "benchmark": benchmark_key(benchmark.name, benchmark.language),
            "figures": {
                key: {metric: figure._asdict() for metric, figure in figures.items()}
                for key, figures in published(benchmark_key(benchmark.name, benchmark.language)).items()
            },
        },
        "versions": package_versions(),
    }


def failures(records: Mapping[str, Mapping[str, Any]], answered: bool = True) -> dict[str, int]:
    """Count what went wrong, by label: answers, and what came before them.

    That is steps of the agent (``update …``), whose state then stayed, and choices of pages (``no pages chosen …``),
    after which the answer is from the gists alone.
    """
    counts: Counter[str] = Counter()
    for record in records.values():
        if record["failed"]:
            counts[record["failed"]] += 1
        elif answered and record["prediction"] is None:
            counts[UNREADABLE] += 1
        if record.get("problem"):
            counts[record["problem"]] += 1
        counts.update(f"update {step['failed']}" for step in record["steps"] or () if step.get("failed"))
    return dict(sorted(counts.items()))


def _means(
    values: Mapping[str, Values],
    records: Mapping[str, Mapping[str, Any]],
    questions: Sequence[QaQuestion],
    n_boot: int,
    seed: int,
) -> dict[str, Any]:
    """Return each metric's mean; one that no question has says why."""
    found = {}
    for name, of in values.items():
        mean = mean_of(of, n_boot, seed)
        if mean["mean"] is None:
            reasons = Counter(records[question.id]["reasons"].get(name, "") for question in questions)
            reason = reasons.most_common(1)[0][0]
            if not reason and name.startswith("recall"):
                continue  # a system that retrieves nothing
            mean["reason"] = reason or mean["reason"]
        found[name] = mean
    return found


def _pairs(
    values: Mapping[str, Mapping[str, Values]], labels: Mapping[str, str], n_boot: int, seed: int
) -> list[dict[str, Any]]:
    pairs = []
    for first, second in PAIRS:
        if first not in values or second not in values:
            continue
        metrics = {}
        for name, own in values[first].items():
            other = values[second][name]
            if any(a is not None and b is not None for a, b in zip(own.values, other.values, strict=True)):
                metrics[name] = difference_of(own, other, n_boot, seed)
        pairs.append(
            {"first": first, "second": second, "label": f"{labels[first]} − {labels[second]}", "metrics": metrics}
        )
    return pairs


def _usage(records: Mapping[str, Mapping[str, Any]]) -> list[int]:
    return [sum(record["usage"][i] for record in records.values()) for i in (0, 1)]


def _llm_facts(model: str | None, systems: Sequence[str], done: Answers) -> dict[str, Any] | None:
    """Return the model and the tokens that its replies stand for, whether or not they were recorded earlier."""
    if model is None:
        return None
    used = [_usage(done[key]) for key in systems]
    stats = {"prompt_tokens": sum(u[0] for u in used), "completion_tokens": sum(u[1] for u in used)}
    return {"model": model, "url": None, "stats": stats}


def _benchmark_facts(
    benchmark: QaBenchmark, haystacks: Sequence[QaHaystack], questions: Sequence[QaQuestion], series: bool
) -> dict[str, Any]:
    sizes = {haystack.id: len(haystack.mindscape.chunks) for haystack in haystacks}
    pairs = claim_pairs(questions)
    ordered = sorted(sizes.values())
    gold = {key: value for haystack in haystacks for key, value in haystack.gold.items()}
    return {
        "name": benchmark.name,
        "split": benchmark.split,
        "language": benchmark.language,
        "series": series,
        "questions": len(questions),
        "pairs": len(pairs),
        "lone_claims": sum(len(claims) != 2 for claims in pairs.values()),
        "books": len({question.book for question in questions}),
        "haystacks": len(haystacks),
        "haystack_books": sum(len(haystack.books) for haystack in haystacks),
        "chunks": sum(sizes.values()),
        "sessions": sum(len(haystack.mindscape.sessions) for haystack in haystacks),
        "haystack_sizes": {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]},
        "chunks_by_haystack": sizes,
        "without_gold": sum(value is None for value in gold.values()),
        "without_gold_reasons": dict(benchmark.without_gold),
        "dropped": dict(benchmark.dropped),
        "evidence": dict(benchmark.evidence),
        "summarizer": sorted({haystack.mindscape.summarizer for haystack in haystacks}),
        "metric_of_pairs": PAIR_ACCURACY if pairs else None,
    }
