"""Fusion against hand-computed values and ranx; ties, constant rows, absent candidates, and the choice of alpha."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from mia_serve.core import MiaError
from mia_serve.fusion import ALPHAS, RRF_K, adaptive_alpha, leave_one_group_out, mix, rank, rrf, zscore


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


@pytest.mark.parametrize("scale", [1e-200, 1 / 3, 1e8 / 3, 1e200, 1.7e308])
@pytest.mark.parametrize("columns", [1, 7, 49, 5000])
def test_a_constant_row_gives_zeros_at_any_scale_and_layout(scale, columns):
    for row in (np.full((2, columns), scale), np.full((columns, 2), -scale).T):
        assert not zscore(row).any()
        assert not zscore(np.where(np.arange(columns) < 3, row, np.nan), np.arange(columns) < 3).any()
    noise = scale * (1 + np.array([[0, 1, 2, 0]]) * np.finfo(float).eps / 2)
    assert not zscore(noise).any()


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**40, 2.0**700, 2.0**1020])
def test_large_scores_that_vary_have_the_same_zscores(scale):
    scores = np.array([[1.0, 2.0, 3.0, -4.0], [0.0, 0.0, 0.0, 8.0]])
    np.testing.assert_array_equal(zscore(scores * scale), zscore(scores))
    np.testing.assert_allclose(zscore(np.array([[1e200, 3e200, -1.7e308]])), [[1 / np.sqrt(2)] * 2 + [-np.sqrt(2)]])


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


RANX = """
import json, sys
import ranx
tables = json.load(sys.stdin)
for options in json.loads(sys.argv[1]):
    runs = [ranx.Run({f"q{q}": {f"d{d}": s for d, s in enumerate(row)} for q, row in enumerate(t)}) for t in tables]
    fused = ranx.fuse(runs=runs, **options).to_dict()
    print(json.dumps([[float(fused[f"q{q}"][f"d{d}"]) for d in range(len(row))] for q, row in enumerate(tables[0])]))
"""


def test_mix_and_rrf_equal_ranx_on_complete_lists():
    pytest.importorskip("ranx")
    rng = np.random.default_rng(3)
    first, second = rng.gamma(2, size=(6, 25)), rng.normal(size=(6, 25))
    options = [
        {"norm": "zmuv", "method": "wsum", "params": {"weights": [0.35, 0.65]}},
        {"norm": None, "method": "rrf", "params": {"k": 60}},
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RANX, json.dumps(options)],
        input=json.dumps([first.tolist(), second.tolist()]),
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},  # compiling it takes half a minute
        capture_output=True,
        text=True,
        check=True,
    )
    mixed, ranked = (json.loads(line) for line in done.stdout.splitlines())
    np.testing.assert_allclose(mix(first, second, 0.35), mixed, atol=1e-9)
    np.testing.assert_allclose(rrf([first, second]), ranked, rtol=1e-12)


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


def test_equal_scores_go_to_the_lower_column():
    scores = np.array([[0.0, 2.0, 0.0, 2.0, -0.0]])
    assert rank(scores).tolist() == [[1, 3, 0, 2, 4]]
    assert rank(scores[0]).tolist() == [1, 3, 0, 2, 4]
    many = np.zeros((1, 1000))  # long enough for an unstable sort to show
    assert rank(many)[0].tolist() == list(range(1000))
    np.testing.assert_array_equal(rrf([many])[0], 1 / (60 + np.arange(1, 1001)))


def test_adaptive_alpha_by_hand():
    # One of four high: z of the top is sqrt(3). Two of four: 1. All alike: nothing.
    clear, unsure, flat = [0.0, 0.0, 4.0, 0.0], [0.1, 0.9, 0.1, 0.9], [2.0] * 4
    lexical, dense = np.array([clear, unsure, clear, flat, flat]), np.array([unsure, clear, flat, clear, flat])
    lead = np.sqrt(3) / (1 + np.sqrt(3))
    np.testing.assert_allclose(adaptive_alpha(lexical, dense), [lead, 1 - lead, 1, 0, 0.5])
    padded = np.pad(lexical, ((0, 0), (0, 2)), constant_values=np.nan)
    mask = np.arange(6) < 4
    np.testing.assert_array_equal(
        adaptive_alpha(padded, np.pad(dense, ((0, 0), (0, 2))), mask), adaptive_alpha(lexical, dense)
    )


def test_adaptive_alpha_does_not_depend_on_scale_and_fits_mix():
    rng = np.random.default_rng(0)
    lexical, dense = rng.gamma(0.5, size=(50, 20)), rng.normal(size=(50, 20))
    alpha = adaptive_alpha(lexical, dense)
    assert alpha.shape == (50,) and ((alpha > 0) & (alpha < 1)).all()
    np.testing.assert_allclose(adaptive_alpha(lexical * 40, dense * 0.01 + 7), alpha)
    np.testing.assert_allclose(adaptive_alpha(dense, lexical), 1 - alpha)
    fused = mix(lexical, dense, alpha)
    np.testing.assert_allclose(fused[7], mix(lexical[7:8], dense[7:8], float(alpha[7]))[0])


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


def test_settings_that_tie_go_to_the_lowest_column_in_any_order_of_the_questions():
    values = np.array([[0.3, 0.1], [0.2, 0.2], [0.1, 0.3], [0.0, 0.0]])  # added in turn: .6 and .6000000000000001
    groups = ["a", "a", "a", "b"]
    assert leave_one_group_out(values, groups)[1] == {"a": 0, "b": 0}
    assert leave_one_group_out(values[[2, 1, 0, 3]], groups)[1] == {"a": 0, "b": 0}
    assert leave_one_group_out(values + np.array([0, 1e-9]), groups)[1] == {"a": 1, "b": 1}


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
        (lambda: mix(np.ones((2, 3)), np.ones((2, 3)), np.ones(3)), r"alpha has shape \(3,\), scores \(2, 3\)"),
        (lambda: mix(np.ones((2, 3)), np.ones((2, 3)), "x"), "alpha of type <U1 .'x'.; give numbers"),
        (lambda: mix(np.ones((2, 3)), np.ones((2, 3)), None), "alpha of type object"),
        (lambda: mix([[1, 2], [3]], np.ones((2, 2)), 0.5), "rows of different lengths"),
        (lambda: zscore([["a", "b"]]), "scores of type <U1"),
        (lambda: zscore(3.0), "scores is one number"),
        (lambda: rank([None, 1.0]), "scores of type object"),
        (lambda: rrf([np.ones((1, 2))], k="60"), "k of type <U2"),
        (lambda: leave_one_group_out(np.ones((2, 3)), ["a", ["b"]]), r"group 1 is \['b'\], which cannot be hashed"),
        (lambda: adaptive_alpha(np.ones((2, 3)), np.ones((2, 4))), "must score the same candidates"),
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
