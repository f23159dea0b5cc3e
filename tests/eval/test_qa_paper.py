"""The published figures, their averages, and our runs laid out beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mia_serve.core.errors import MiaError
from mia_serve.eval.paper import (
    ANSWER_INPUTS,
    COLUMNS,
    PAPER_B_TABLE,
    STATIC_TABLE,
    paper_averages,
    published,
)
from mia_serve.eval.paper_tables import paper_record, paper_text


def _results(row: int) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for column, (benchmark, metric) in COLUMNS.items():
        found.setdefault(benchmark, {})[metric] = STATIC_TABLE[row].figures[column].value
    return found


def test_averages_are_the_papers_on_its_own_rows():
    base = paper_averages(_results(0))
    assert base.recall == pytest.approx((27.0 + 48.5 + 33.7) / 3) and base.recall == pytest.approx(36.4)
    assert base.performance == pytest.approx((63.35 + 41.8 + 37.0 + 49.2) / 4) and base.performance == pytest.approx(
        47.84, abs=0.005
    )
    assert paper_averages(_results(2)).recall == pytest.approx(46.7, abs=0.05)  # (43.7 + 59.5 + 36.8) / 3
    # What was derived from the average gives it back: NarrativeQA's F1 of MiA-RAG.
    assert paper_averages(_results(3)).performance == pytest.approx(56.0, abs=0.05)


def test_an_average_without_one_of_its_parts_is_none():
    found = _results(0)
    found["detectiveqa-zh"]["recall@10"] = None
    assert paper_averages(found).recall is None and paper_averages(found).performance is not None
    assert paper_averages({}) == (None, None)


def test_figures_carry_where_they_come_from():
    row = STATIC_TABLE[2].figures
    assert row["nqa_f1"] == (45.1, "stated", None, None)
    assert row["dqa_en_r"] == (44.7, "inferred", None, None) and row["dqa_en_acc"] == (None, "not obtained", None, None)
    assert STATIC_TABLE[3].figures["nqa_f1"] == (42.85, "derived", 42.5, 43.2)
    assert STATIC_TABLE[1].figures["avg_r"].tag == "derived"
    assert published("nocha")["agent"]["pair_accuracy"].value == ANSWER_INPUTS["chunks+sig+evi"] == 71.4
    assert published("literaryqa") == {}
    assert PAPER_B_TABLE[0].cells["nocha"] == (31.75,) and PAPER_B_TABLE[4].cells["nocha"] == (34.92, 34.92, 46.03)


def interval(mean: float | None) -> dict[str, Any]:
    low, high = (None, None) if mean is None else (mean - 0.1, mean + 0.1)
    return {"mean": mean, "low": low, "high": high, "n": 10, "excludes_zero": False, "reason": ""}


def run(name: str, language: str, metrics: dict[str, float | None]) -> dict[str, Any]:
    keys = {
        "base": "untrained, query-only",
        "e2_query": "E2, query-only",
        "sig": "E2 + σ, chunks only",
        "agent": "MiA-Agent",
    }
    scored = {metric: interval(mean) for metric, mean in metrics.items()}
    pair = {"first": "sig", "second": "e2_query", "label": "", "metrics": {m: interval(0.02) for m in metrics}}
    return {
        "benchmark": {"name": name, "language": language, "split": "test", "questions": 10, "books": 3},
        "llm": {"model": "a-model-with-a-rather-long-name-of-its-own"},
        "systems": [{"key": key, "label": label, "metrics": scored} for key, label in keys.items()],
        "pairs": [pair],
        "settings": {"uses_prior": False},
    }


RUNS = [
    run("detectiveqa", "en", {"accuracy": 0.5, "recall@10": 0.2}),
    run("detectiveqa", "zh", {"accuracy": 0.7, "recall@10": 0.4}),
    run("narrativeqa", "en", {"f1": 0.4, "recall@10": 0.5}),
    run("novelhopqa", "en", {"f1": 0.3, "recall@10": 0.1}),
    run("nocha", "en", {"accuracy": 0.8, "pair_accuracy": 0.55, "recall@10": None}),
    run("literaryqa", "en", {"f1": 0.25, "em": 0.1, "recall@10": None, "answer_words": 3.0}),
]


def numbers(text: str) -> list[str]:
    return text.split()


def test_runs_are_laid_out_beside_the_papers_with_averages_over_benchmarks():
    record = paper_record(RUNS)
    assert record["averages"]["sig"]["recall"] == pytest.approx((30 + 50 + 10) / 3)
    assert record["averages"]["sig"]["performance"] == pytest.approx((60 + 40 + 30 + 55) / 4)
    assert record["results"]["sig"]["literaryqa"] == {"f1": 25.0, "em": 10.0, "recall@10": None}  # words: no share
    json.dumps(record, allow_nan=False)
    text = paper_text(RUNS)
    assert max(map(len, text.splitlines())) <= 100
    ours = next(line for line in text.splitlines() if "ours: E2 + σ" in line)
    assert ours.split()[-12:] == numbers("50.0 20.0 70.0 40.0 40.0 50.0 30.0 10.0 55.0 80.0 30.0 46.2")
    theirs = next(line for line in text.splitlines() if line.startswith("MiA-Emb + σ, chunks only"))
    assert theirs.split()[-12:] == numbers("? 44.7i ? 42.7i 45.1 59.5 ? 36.8i 61.9 ? 46.7 54.2")
    assert "RQ1" in text and "RQ2" in text and "RQ3" in text and "+2.0 [-8.0, +12.0]" in text
    assert "literaryqa test" in text


def test_what_was_not_run_is_a_dash():
    text = paper_text(RUNS[2:3])
    ours = next(line for line in text.splitlines() if "ours: E2 + σ" in line)
    assert ours.split()[-12:] == numbers("– – – – 40.0 50.0 – – – – – –")
    assert text.count("Ours: not run.") == 2  # RQ2 and RQ3


def test_two_runs_of_one_benchmark_are_refused():
    with pytest.raises(MiaError, match="two runs are of narrativeqa"):
        paper_text([RUNS[2], RUNS[2]])


def test_a_run_without_an_E2_says_so_among_others():
    """A row holds what runs with an E2 and without one scored: the reader is told which is which."""
    without = RUNS[2] | {"settings": {"uses_prior": True}}
    text = " ".join(paper_text([RUNS[0], without]).split())
    assert "narrativeqa test, 10 questions on 3 books, a-model-with-a-rather-long-name-of-its-own, σ as a prior" in text
    assert text.count("σ as a prior") == 1
