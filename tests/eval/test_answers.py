"""Answer scores against values worked out by hand from SQuAD's rules."""

from __future__ import annotations

import pytest

from mia_serve.eval.answers import answer_f1, exact_match, normalise_answer


def test_normalising_drops_case_punctuation_articles_and_spaces() -> None:
    assert normalise_answer("  The Ferry-man's\tlamp, an  A-frame! ") == "ferrymans lamp aframe"
    assert normalise_answer("Theatre another") == "theatre another"  # articles only as whole words


@pytest.mark.parametrize(
    ("prediction", "references", "match", "f1"),
    [
        ("The lamp.", ["a lamp"], 1.0, 1.0),
        ("under the old clock", ["under the clock"], 0.0, 2 * 2 / (3 + 2)),
        ("under the old clock", ["the ledger", "clock"], 0.0, 2 * 1 / (3 + 1)),  # the best reference counts
        ("very very late", ["very late"], 0.0, 2 * 2 / (3 + 2)),  # a word counts as often as both have it
        ("a boat", ["lamp"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),  # nothing is left of either
        ("the", ["lamp"], 0.0, 0.0),
        ("lamp", [], 0.0, 0.0),
    ],
)
def test_scores(prediction: str, references: list[str], match: float, f1: float) -> None:
    assert exact_match(prediction, references) == match
    assert answer_f1(prediction, references) == pytest.approx(f1)
