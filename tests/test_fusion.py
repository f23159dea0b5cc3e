"""Fusion against hand-computed values and ranx; ties, constant rows, absent candidates, and the choice of alpha."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from mia_serve.core import MiaError
from mia_serve.fusion import ALPHAS, RRF_K, leave_one_group_out, mix, rank, rrf, zscore


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_zscore_by_hand():
    # mean 2, population variance (1 + 0 + 1) / 3
    unit = np.sqrt(1.5)
    np.testing.assert_allclose(zscore(np.array([[1, 2, 3], [10, 30, 20]])), [[-unit, 0, unit], [-unit, unit, 0]])
    assert zscore(np.ones((1, 2), dtype=np.float32)).dtype == np.float64


@pytest.mark.parametrize("row", [[0.3, 0.3], [0.3], [1e-10, 0.0], [7.1] * 49])
def test_SRV_28_a_constant_row_gives_zeros(row):
    scores = np.array([row, np.arange(len(row))])
    assert zscore(scores)[0].tolist() == [0.0] * len(row)
    mixed = mix(scores, scores[::-1], 0.5)
    assert np.isfinite(mixed).all()


def test_absent_candidates_do_not_enter_the_statistics():
    scores = np.array([[1.0, 2.0, 3.0, np.nan], [5.0, np.nan, 9.0, -9.0]])
    mask = np.array([[True, True, True, False], [True, False, True, False]])
    unit = np.sqrt(1.5)
    np.testing.assert_allclose(zscore(scores, mask), [[-unit, 0, unit, 0], [-1, 0, 1, 0]])
    assert zscore(scores, np.zeros(4, dtype=bool)).tolist() == [[0.0] * 4] * 2
    mixed = mix(scores, scores, 0.5, mask)
    assert mixed[0, 3] == mixed[1, 1] == -np.inf
    assert rank(mixed).tolist() == [[2, 1, 0, 3], [2, 0, 1, 3]]


def test_mix_by_hand_with_one_alpha_and_one_a_query():
    first, second = np.array([[1.0, 3.0], [1.0, 3.0]]), np.array([[8.0, 2.0], [2.0, 8.0]])
    np.testing.assert_allclose(mix(first, second, 0.75), [[-0.5, 0.5], [-1, 1]])
    np.testing.assert_allclose(mix(first, second, np.array([0.25, 1.0])), [[0.5, -0.5], [-1, 1]])
    np.testing.assert_array_equal(mix(first, second, 1.0), zscore(first))
    np.testing.assert_array_equal(mix(first, second, 0.0), zscore(second))


def test_mix_does_not_depend_on_the_scale_of_either_side():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 5, 30))
    np.testing.assert_allclose(mix(first * 1e6 + 3, second * 1e-3 - 8, 0.4), mix(first, second, 0.4), atol=1e-8)


def test_mix_equals_ranx_on_complete_lists():
    ranx = pytest.importorskip("ranx")
    rng = np.random.default_rng(3)
    first, second = rng.gamma(2, size=(6, 25)), rng.normal(size=(6, 25))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [
            ranx.Run({f"q{q}": {f"d{d}": float(table[q, d]) for d in range(25)} for q in range(6)})
            for table in (first, second)
        ]
        fused = ranx.fuse(runs=runs, norm="zmuv", method="wsum", params={"weights": (0.35, 0.65)}).to_dict()
    ours = mix(first, second, 0.35)
    theirs = [[fused[f"q{q}"][f"d{d}"] for d in range(25)] for q in range(6)]
    np.testing.assert_allclose(ours, theirs, atol=1e-9)


def test_SRV_30_rrf_ranks_from_one_and_absent_gives_nothing():
    assert RRF_K == 60
    first, second = np.array([[9.0, 5.0, 1.0]]), np.array([[2.0, 8.0, 0.0]])
    np.testing.assert_allclose(rrf([first, second]), [[1 / 61 + 1 / 62, 1 / 62 + 1 / 61, 1 / 63 + 1 / 63]], rtol=1e-15)
    np.testing.assert_allclose(rrf([first], k=1), [[1 / 2, 1 / 3, 1 / 4]])
    # The second list holds only the last two: 8 is its first.
    present = [None, np.array([[False, True, True]])]
    np.testing.assert_allclose(rrf([first, second], present=present), [[1 / 61, 1 / 62 + 1 / 61, 1 / 63 + 1 / 62]])
    absent = np.array([[np.nan, 8.0, 0.0]])
    np.testing.assert_array_equal(rrf([first, absent], present=present), rrf([first, second], present=present))


def test_rrf_equals_ranx():
    ranx = pytest.importorskip("ranx")
    tables = np.random.default_rng(4).permuted(np.arange(40.0).reshape(1, 40).repeat(12, 0), axis=1).reshape(3, 4, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [ranx.Run({f"q{q}": {f"d{d}": table[q, d] for d in range(40)} for q in range(4)}) for table in tables]
        fused = ranx.fuse(runs=runs, norm=None, method="rrf", params={"k": 60}).to_dict()
    theirs = [[fused[f"q{q}"][f"d{d}"] for d in range(40)] for q in range(4)]
    np.testing.assert_allclose(rrf(list(tables)), theirs, rtol=1e-12)


def test_equal_scores_go_to_the_lower_column():
    scores = np.array([[0.0, 2.0, 0.0, 2.0, -0.0]])
    assert rank(scores).tolist() == [[1, 3, 0, 2, 4]]
    assert rank(scores[0]).tolist() == [1, 3, 0, 2, 4]
    many = np.zeros((1, 1000))  # long enough for an unstable sort to show
    assert rank(many)[0].tolist() == list(range(1000))
    np.testing.assert_array_equal(rrf([many])[0], 1 / (60 + np.arange(1, 1001)))


def test_alphas_are_the_21_of_the_study():
    assert [f"{alpha:.2f}" for alpha in ALPHAS] == [f"{step * 0.05:.2f}" for step in range(21)]
    assert (ALPHAS[0], ALPHAS[3], ALPHAS[8], ALPHAS[-1]) == (0.0, 0.15, 0.4, 1.0)


def test_leave_one_group_out_by_hand():
    values = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 1], [0, 0, 1]])
    groups = ["a", "a", "b", "b", "c"]
    # Without a: sums 0 2 2, tie to column 1. Without b: 2 0 1. Without c: 2 2 1, tie to column 0.
    each, chosen = leave_one_group_out(values, groups)
    assert chosen == {"a": 1, "b": 0, "c": 0}
    assert each.tolist() == [1, 1, 0, 0, 0]


def test_EVL_14_a_group_never_votes_on_its_own_alpha():
    rng = np.random.default_rng(0)
    groups = [f"conversation {number}" for number in rng.integers(0, 10, size=200)]
    values = rng.integers(0, 2, size=(200, 21)).astype(float)
    _, chosen = leave_one_group_out(values, groups)
    for name in set(groups):
        own = np.array([group == name for group in groups])
        for other in (0.0, 1e6 * rng.random((own.sum(), 21))):
            changed = values.copy()
            changed[own] = other
            assert leave_one_group_out(changed, groups)[1][name] == chosen[name]
        assert chosen[name] == int(np.argmax(values[~own].mean(axis=0)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zscore(np.array([[1.0, np.nan]])), "NaN or infinity"),
        (lambda: zscore(np.array([[1.0, -np.inf]])), "a mask for candidates"),
        (lambda: zscore(np.ones((2, 3)), np.ones(2, dtype=bool)), r"mask has shape \(2,\), the scores \(2, 3\)"),
        (lambda: mix(np.ones((2, 3)), np.ones((2, 4)), 0.5), "must score the same candidates"),
        (lambda: mix(np.ones((2, 3)), np.ones((2, 3)), 1.2), r"alpha is 1.2; it must lie in \[0, 1\]"),
        (lambda: mix(np.ones((2, 3)), np.ones((2, 3)), np.nan), "alpha is nan"),
        (lambda: mix(np.ones((2, 3)), np.ones((2, 3)), np.ones(3)), r"alpha has shape \(3,\), queries \(2,\)"),
        (lambda: rrf([]), "no score list"),
        (lambda: rrf([np.ones((1, 2)), np.ones((1, 3))]), "must score the same candidates"),
        (lambda: rrf([np.ones((1, 2))], k=-1), "k is -1"),
        (lambda: rrf([np.ones((1, 2))], present=[]), "1 score lists but 0 masks"),
        (lambda: leave_one_group_out(np.ones((2, 3)), ["a"]), "for 1 groups"),
        (lambda: leave_one_group_out(np.ones((2, 3)), ["a", "a"]), "at least two"),
        (lambda: leave_one_group_out(np.array([[np.nan], [1.0]]), ["a", "b"]), "NaN"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(MiaError, match=message):
        call()


def test_no_candidates_and_no_queries():
    assert zscore(np.zeros((2, 0))).shape == mix(np.zeros((2, 0)), np.zeros((2, 0)), 0.5).shape == (2, 0)
    assert rrf([np.zeros((0, 4))]).shape == rank(np.zeros((0, 4))).shape == (0, 4)
