"""Cluster bootstrap against a slow reference, against scipy, and the EVL probes that concern it."""

from __future__ import annotations

import numpy as np
import pytest

from mia_serve.core.errors import MiaError
from mia_serve.eval.bootstrap import cluster_bootstrap, paired_bootstrap


def _sample(seed: int = 0, clusters: int = 12) -> tuple[list[float], list[str]]:
    rng = np.random.default_rng(seed)
    values, groups = [], []
    for cluster in range(clusters):
        level = rng.normal(0.5, 0.2)
        for _ in range(int(rng.integers(2, 15))):
            values.append(float(level + rng.normal(0, 0.05)))
            groups.append(f"book{cluster}")
    return values, groups


def _slow_interval(values: list[float], groups: list[str], n_boot: int, seed: int) -> tuple[float, float]:
    """Resample one cluster at a time, question by question."""
    rng = np.random.default_rng(seed)
    books = sorted(set(groups))
    members = {book: [v for v, g in zip(values, groups, strict=True) if g == book] for book in books}
    means = []
    for _ in range(n_boot):
        drawn = [books[i] for i in rng.integers(0, len(books), len(books))]
        pooled = [v for book in drawn for v in members[book]]
        means.append(sum(pooled) / len(pooled))
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def test_equals_a_slow_reference_loop() -> None:
    values, groups = _sample()
    interval = cluster_bootstrap(values, groups, n_boot=40_000, seed=3)
    low, high = _slow_interval(values, groups, n_boot=1_500, seed=4)
    width = high - low
    assert interval.mean == pytest.approx(np.mean(values))
    assert interval.low == pytest.approx(low, abs=0.08 * width)
    assert interval.high == pytest.approx(high, abs=0.08 * width)


def test_equals_scipy_on_cluster_sums() -> None:
    stats = pytest.importorskip("scipy.stats")
    values, groups = _sample(1)
    books = sorted(set(groups))
    sums = np.array([sum(v for v, g in zip(values, groups, strict=True) if g == book) for book in books])
    sizes = np.array([groups.count(book) for book in books], dtype=float)
    theirs = stats.bootstrap(
        (sums, sizes),
        lambda s, n, axis: s.sum(axis) / n.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=40_000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    ours = cluster_bootstrap(values, groups, n_boot=40_000, seed=0)
    assert ours.low == pytest.approx(theirs.low, abs=0.004)
    assert ours.high == pytest.approx(theirs.high, abs=0.004)


def test_mean_weighs_questions_not_groups() -> None:
    assert cluster_bootstrap([1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"], n_boot=10).mean == 0.75


def test_same_seed_same_interval_other_seed_other() -> None:
    values, groups = _sample(2)
    one = cluster_bootstrap(values, groups, n_boot=500, seed=7)
    assert one == cluster_bootstrap(values, groups, n_boot=500, seed=7)
    assert one != cluster_bootstrap(values, groups, n_boot=500, seed=8)
    assert (one.n_boot, one.seed) == (500, 7)


def test_blocks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    values, groups = _sample(2)
    whole = cluster_bootstrap(values, groups, n_boot=500, seed=7)
    monkeypatch.setattr("mia_serve.eval.bootstrap._BLOCK_CELLS", 12 * 33)
    assert cluster_bootstrap(values, groups, n_boot=500, seed=7) == whole


def test_evl_13_clusters_widen_the_interval() -> None:
    # Two conversations, ten questions each, all the difference between conversations.
    values = [0.9] * 10 + [0.1] * 10
    groups = ["c1"] * 10 + ["c2"] * 10
    clustered = cluster_bootstrap(values, groups, n_boot=4000)
    alone = cluster_bootstrap(values, [str(i) for i in range(20)], n_boot=4000)
    assert (clustered.low, clustered.high) == (pytest.approx(0.1), pytest.approx(0.9))
    assert alone.high - alone.low < 0.5 * (clustered.high - clustered.low)
    assert clustered.clusters == 2


def test_single_cluster_has_no_interval_but_a_reason() -> None:
    interval = cluster_bootstrap([0.0, 1.0], ["a", "a"])
    assert interval.mean == 0.5
    assert interval.low is None and interval.high is None
    assert "one group only" in interval.reason
    assert not interval.excludes_zero


def test_evl_09_missing_values_leave_the_mean_and_are_counted() -> None:
    interval = cluster_bootstrap([1.0, None, 0.0, None], ["a", "a", "b", "c"], n_boot=50)
    assert (interval.mean, interval.n, interval.excluded, interval.clusters) == (0.5, 2, 2, 2)
    nothing = cluster_bootstrap([None], ["a"])
    assert nothing.mean is None and nothing.reason == "no question has a value"


def test_paired_difference_is_tighter_than_two_intervals() -> None:
    base, groups = _sample(3)
    better = [value + 0.03 for value in base]
    pair = paired_bootstrap(better, base, groups, n_boot=2000)
    assert pair.mean == pytest.approx(0.03)
    assert pair.low == pytest.approx(0.03) and pair.high == pytest.approx(0.03)
    assert pair.excludes_zero and pair.p_value == 0.0 and pair.p_text == "< 0.001"


def test_paired_p_value_is_two_sided_and_symmetric() -> None:
    rng = np.random.default_rng(0)
    groups = [f"g{i // 5}" for i in range(100)]
    first, second = list(rng.normal(0.02, 0.2, 100)), [0.0] * 100
    forward = paired_bootstrap(first, second, groups, n_boot=4000, seed=1)
    backward = paired_bootstrap(second, first, groups, n_boot=4000, seed=1)
    assert forward.p_value == backward.p_value
    assert 0.0 < forward.p_value <= 1.0
    assert forward.low == pytest.approx(-backward.high)
    assert paired_bootstrap(first, first, groups).p_value == 1.0


def test_evl_13_one_sided_p_is_the_share_of_resamples_at_or_below_zero() -> None:
    rng = np.random.default_rng(0)
    groups = [f"g{i // 5}" for i in range(100)]
    first, second = list(rng.normal(0.02, 0.2, 100)), [0.0] * 100
    one = paired_bootstrap(first, second, groups, n_boot=4000, seed=1, sides=1)
    two = paired_bootstrap(first, second, groups, n_boot=4000, seed=1)
    assert (one.sides, two.sides) == (1, 2)
    assert one.p_value == pytest.approx(two.p_value / 2)
    # The other way round it is the worse one: nearly every resample is at or below zero.
    assert paired_bootstrap(second, first, groups, n_boot=4000, seed=1, sides=1).p_value == pytest.approx(
        1 - one.p_value
    )
    never = paired_bootstrap([1.0] * 4, [0.0] * 4, ["a", "a", "b", "b"], n_boot=4000, sides=1)
    assert never.p_text == "< 0.00025"
    assert cluster_bootstrap(first, groups, n_boot=10).sides is None


def test_kept_draws_are_those_of_the_seed() -> None:
    values, groups = _sample(2)
    fresh = [cluster_bootstrap(values, groups, n_boot=300, seed=seed) for seed in (1, 2, 3)]
    again = [cluster_bootstrap(values, groups, n_boot=300, seed=seed) for seed in (3, 2, 1)]
    assert fresh == again[::-1]


def test_paired_drops_questions_that_either_row_lacks() -> None:
    pair = paired_bootstrap([1.0, None, 1.0], [0.0, 0.0, None], ["a", "b", "c"], n_boot=10)
    assert (pair.mean, pair.n, pair.excluded) == (1.0, 1, 2)


def test_bad_input() -> None:
    with pytest.raises(MiaError, match="not finite"):
        cluster_bootstrap([float("nan"), 1.0], ["a", "b"])
    with pytest.raises(MiaError, match="2 values but 1 groups"):
        cluster_bootstrap([1.0, 2.0], ["a"])
    with pytest.raises(MiaError, match="n_boot is 0"):
        cluster_bootstrap([1.0, 2.0], ["a", "b"], n_boot=0)
    with pytest.raises(MiaError, match="same questions"):
        paired_bootstrap([1.0], [1.0, 2.0], ["a"])
