"""Scores of answers and passages, against values worked out by hand."""

from __future__ import annotations

import pytest

from mia_serve.eval.answers import answer_f1, exact_match, normalise_answer
from mia_serve.eval.qa_data import QaQuestion
from mia_serve.eval.qa_metrics import (
    NO_GOLD,
    PAIR_ACCURACY,
    TOO_SMALL,
    difference_of,
    mean_of,
    metric_names,
    recall_at,
    score_answer,
    unit_values,
)


def test_recall_is_the_share_of_the_gold_found_among_the_first_k():
    found = [f"c{i}" for i in range(20)]
    assert recall_at(found, ("c0", "c9", "c10", "c15"), 10, 400).value == 0.5
    assert recall_at(found, ("c9", "c9"), 10, 400).value == 1  # an id counts once
    assert recall_at(found[:3], ("c2", "c3"), 10, 400).value == 0.5  # fewer were found than asked for
    assert recall_at([], ("c2",), 10, 400).value == 0


def test_EVL_07_EVL_09_recall_that_says_nothing_is_null_with_its_reason():
    assert recall_at(["c0"], ("c0",), 10, 10) == (None, TOO_SMALL)
    assert recall_at(["c0"], ("c0",), 10, 11).value == 1
    assert recall_at(["c0"], None, 10, 400) == recall_at(["c0"], (), 10, 400) == (None, NO_GOLD)


def test_answers_score_by_their_task_and_none_is_wrong():
    asked = QaQuestion("q", "Who?", "free", "b", answers=("the ferryman", "old Tom"))
    assert score_answer(asked, "Old Tom.") == {"f1": 1, "em": 1, "answer_words": 2}
    assert score_answer(asked, "old ferryman")["f1"] == pytest.approx(2 / 3)  # one of two against one of one
    assert score_answer(asked, None) == {"f1": 0, "em": 0, "answer_words": None}
    chosen = QaQuestion("q", "Who?", "choice", "b", options=("x", "y"), label="B")
    assert [score_answer(chosen, one)["accuracy"] for one in ("B", "b", "A", None)] == [1, 1, 0, 0]
    claim = QaQuestion("q", "He did.", "claim", "b", label="FALSE")
    assert [score_answer(claim, one)["accuracy"] for one in ("FALSE", "TRUE", None)] == [1, 0, 0]


def test_chinese_f1_counts_characters():
    assert normalise_answer("他把“那本账”，藏在 Anna 家！", "zh") == "他 把 那 本 账 藏 在 anna 家"
    # 账本 against 那本账: two of two characters, two of three: 2 * 2 / (2 + 3).
    assert answer_f1("账本", ["那本账。"], "zh") == pytest.approx(0.8)
    assert exact_match("那本账。", ["那本账"], "zh") == 1
    assert answer_f1("账本", ["那本账。"]) == 0  # by words they have nothing in common
    asked = QaQuestion("q", "谁？", "free", "b", answers=("船夫",))
    assert score_answer(asked, "老船夫", "zh") == {"f1": pytest.approx(0.8), "em": 0, "answer_words": 3}


def _claims() -> list[QaQuestion]:
    named = (("b1", "p1"), ("b1", "p1"), ("b1", "p2"), ("b1", "p2"), ("b2", "p3"), ("b2", "p3"), ("b2", "p4"))
    return [QaQuestion(f"q{i}", "He did.", "claim", book, label="TRUE", pair=p) for i, (book, p) in enumerate(named)]


def _records(right: str) -> dict[str, dict[str, dict[str, float]]]:
    return {f"q{i}": {"metrics": {"accuracy": float(one)}} for i, one in enumerate(right)}


def test_a_pair_is_right_if_both_claims_are_and_a_lone_claim_is_none():
    questions = _claims()
    pairs = unit_values(_records("1110011"), questions, PAIR_ACCURACY)
    assert pairs.values == [1, 0, 0, None] and pairs.books == ["b1", "b1", "b2", "b2"]
    mean = mean_of(pairs, 100, 0)
    assert mean["mean"] == pytest.approx(1 / 3) and (mean["n"], mean["excluded"], mean["clusters"]) == (3, 1, 2)
    assert mean_of(unit_values(_records("1110011"), questions, "accuracy"), 100, 0)["mean"] == pytest.approx(5 / 7)


def test_differences_are_paired_pair_by_pair_and_resampled_by_book():
    questions = _claims()
    first = unit_values(_records("1111111"), questions, PAIR_ACCURACY)
    second = unit_values(_records("1100111"), questions, PAIR_ACCURACY)
    found = difference_of(first, second, 1000, 0)
    assert found["mean"] == pytest.approx(1 / 3) and found["n"] == 3
    # Two books: a resample draws b1 twice (1/2), b2 twice (0) or both (1/3).
    assert (found["low"], found["high"]) == (0, 0.5) and not found["excludes_zero"]


def test_metrics_of_a_run_follow_its_tasks():
    assert metric_names(_claims(), 10, True) == ["accuracy", "pair_accuracy", "recall@10"]
    assert metric_names(_claims(), 10, False) == ["recall@10"]
    free = QaQuestion("q", "Who?", "free", "b", answers=("x",))
    assert metric_names([free], 5, True) == ["f1", "em", "recall@5", "answer_words"]
