from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from mia_serve.core import MiaError
from mia_train.rows import Row
from mia_train.schedule import Sample, Schedule, interleave

from .conftest import make_rows

Mixture = dict[str, float]


def mixed_rows(**counts: int) -> list[Row]:
    """Rows of several sources, shuffled among each other."""
    names = [name for name, count in counts.items() for _ in range(count)]
    order = np.random.default_rng(0).permutation(len(names))
    return [replace(row, source=names[i]) for row, i in zip(make_rows(len(names)), order, strict=True)]


def batches(schedule: Schedule) -> list[list[Sample]]:
    return [
        [schedule[i] for i in range(start, start + schedule.batch)] for start in range(0, len(schedule), schedule.batch)
    ]


def test_TRN_05_every_pass_holds_every_row_once_in_a_new_order() -> None:
    rows = make_rows(7)
    schedule = Schedule(rows, 21, seed=1)
    passes = [[schedule[i] for i in range(k * 7, k * 7 + 7)] for k in range(3)]
    for k, samples in enumerate(passes):
        assert sorted(s.number for s in samples) == list(range(7))
        assert {s.epoch for s in samples} == {k}
    assert [s.number for s in passes[0]] != [s.number for s in passes[1]]
    assert Schedule(rows, 21, seed=1)[20] == schedule[20]  # whatever was read before
    assert [Schedule(rows, 7, seed=2)[i].number for i in range(7)] != [s.number for s in passes[0]]


def test_the_order_without_a_mixture_is_one_permutation_a_pass() -> None:
    rows = make_rows(5)
    order = [np.random.default_rng([3, 0, epoch]).permutation(5).tolist() for epoch in range(2)]
    assert [Schedule(rows, 10, seed=3, batch=4)[i].number for i in range(10)] == order[0] + order[1]


def test_sources_stay_within_a_batch_of_their_share_all_along() -> None:
    for seed in range(60):
        random = np.random.default_rng(seed)
        weights = random.uniform(0.01, 10, size=2 + seed % 5) if seed % 2 else random.integers(1, 9, size=2 + seed % 5)
        order = interleave(weights.tolist(), 300, seed)
        shares = weights / weights.sum()
        had = np.cumsum(order[:, None] == np.arange(len(weights)), axis=0)
        assert np.abs(had - np.arange(1, 301)[:, None] * shares).max() < 1 - 1e-10
        assert (interleave(weights.tolist(), 120, seed) == order[:120]).all()


def test_ratios_are_exact_wherever_they_can_be() -> None:
    order = interleave([7, 2, 1], 100, seed=5)
    assert [Counter(order[: 10 * n].tolist()) for n in (1, 4, 10)] == [
        {0: 7 * n, 1: 2 * n, 2: n} for n in (1, 4, 10)
    ]  # fmt: skip
    tens = {tuple(order[10 * n : 10 * n + 10]) for n in range(10)}
    assert len(tens) > 3  # and yet no fixed sequence
    assert (interleave([0.7, 0.2, 0.1], 100, seed=5) == order).all()
    assert (interleave([7, 2, 1], 100, seed=6) != order).any()


def test_every_batch_is_of_one_source_and_each_source_passes_over_its_own_rows() -> None:
    rows = mixed_rows(a=23, b=9, c=5)
    mixture = {"a": 3.0, "b": 2.0, "c": 1.0}
    found = batches(Schedule(rows, 4 * 60, seed=2, batch=4, mixture=mixture))
    assert all(len({s.row.source for s in batch}) == 1 for batch in found)
    assert Counter(batch[0].row.source for batch in found) == {"a": 30, "b": 20, "c": 10}
    for name, count in (("a", 23), ("b", 9), ("c", 5)):
        own = [s for batch in found for s in batch if s.row.source == name]
        members = [i for i, row in enumerate(rows) if row.source == name]
        for k in range(len(own) // count):
            part = own[k * count : (k + 1) * count]
            assert sorted(s.number for s in part) == members
            assert {s.epoch for s in part} == {k}
        assert own[:count] != own[count : 2 * count]


@pytest.mark.parametrize("count", [4, 5, 6, 7, 9, 30])
def test_no_row_comes_twice_in_a_batch(count: int) -> None:
    rows = mixed_rows(a=count, b=40)
    for seed in range(5):
        found = batches(Schedule(rows, 4 * 100, seed=seed, batch=4, mixture={"a": 1, "b": 1}))
        assert all(len({s.number for s in batch}) == 4 for batch in found)


def test_process_count_changes_no_global_batch() -> None:
    rows = mixed_rows(a=13, b=20)
    mixture = {"a": 1.0, "b": 2.0}
    alone = Schedule(rows, 80, seed=4, batch=8, mixture=mixture)  # batch_size 8 in one process
    shares = [Schedule(rows, 80, seed=4, batch=8, mixture=mixture) for _ in range(2)]  # 4 in each of two
    for step in range(10):
        taken = [shares[rank][8 * step + 4 * rank + i] for rank in (0, 1) for i in range(4)]
        assert taken == [alone[8 * step + i] for i in range(8)]


def test_a_resumed_run_and_any_order_of_reading_see_the_same() -> None:
    rows = mixed_rows(a=11, b=7)
    mixture = {"a": 0.3, "b": 0.7}
    whole = Schedule(rows, 240, seed=7, batch=6, mixture=mixture)
    samples = [whole[i] for i in range(240)]
    resumed = Schedule(rows, 300, seed=7, batch=6, mixture=dict(reversed(mixture.items())))  # a longer run
    assert [resumed[i] for i in range(120, 240)] == samples[120:]
    assert [whole[i] for i in reversed(range(240))] == samples[::-1]
    assert [Schedule(rows, 240, seed=8, batch=6, mixture=mixture)[i] for i in range(240)] != samples


def test_another_source_does_not_change_the_order_within_one() -> None:
    two, three = mixed_rows(a=9, b=9), mixed_rows(a=9, b=9, c=9)
    three = [*[row for row in two], *[row for row in three if row.source == "c"]]
    orders = []
    for rows, mixture in ((two, {"a": 1, "b": 1}), (three, {"a": 1, "b": 1, "c": 1})):
        found = Schedule(rows, 120, seed=1, batch=3, mixture=mixture)
        orders.append([s.number for s in (found[i] for i in range(120)) if s.row.source == "a"][:36])
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("mixture", "batch", "said"),
    [
        ({"a": 1, "b": 1, "d": 1}, 2, "no row is from 'd'; sources here: 'a' (6 rows), 'b' (3 rows)"),
        ({"a": 1}, 2, "'b' has no weight; give it one, or leave it out of data.train (sources here: 'a' (6 rows)"),
        ({"a": 1, "b": 1}, 4, "'b' has 3 rows, and a batch of one source takes 4"),
        ({}, 1, "'a' has no weight"),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused(mixture: Mixture, batch: int, said: str) -> None:
    with pytest.raises(MiaError) as error:
        Schedule(mixed_rows(a=6, b=3), 12, seed=0, batch=batch, mixture=mixture)
    assert str(error.value).startswith("data.mixture: ") and said in str(error.value)
