"""Batched greedy: the bound, ties, masks, and independence of the batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mia_serve.signature import Selection, select_signature, set_function_value

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(seed: int, batch: int, units: int, chunks: int, dim: int = 8, dtype=torch.float64) -> Inputs:
    """Cosines of random vectors that lean together, as embeddings do; (B, H), (B, C, H), (B, H, H)."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(batch, 1 + chunks + units, dim, generator=generator, dtype=torch.float64) + 0.3
    vectors = torch.nn.functional.normalize(vectors, dim=2).to(dtype)
    query, chunk, unit = vectors[:, :1], vectors[:, 1 : 1 + chunks], vectors[:, 1 + chunks :]
    columns = unit.transpose(1, 2)
    return (query @ columns)[:, 0], chunk @ columns, unit @ columns


def slow_greedy(query, cover, unit, k: int, weights) -> list[int]:
    """The algorithm of spec section 2 on one query, with F evaluated from scratch at each step."""
    chosen: list[int] = []
    for _ in range(min(k, query.shape[1])):
        values = {}
        for h in set(range(query.shape[1])) - set(chosen):
            padded = torch.tensor([[*chosen, h]])
            values[h] = set_function_value(query, cover, unit, padded, k=k, weights=weights).value.item()
        best = max(values.values())
        chosen.append(min(h for h, v in values.items() if v >= best - 1e-12))
    return chosen


WEIGHTS = [(0.3, 0.4, 0.3), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.1, 0.8, 0.1), (0.5, 0, 0.5)]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("units", "k"), [(8, 4), (8, 3), (6, 2), (5, 5), (4, 1), (7, 6)])
def test_SRV_58_greedy_keeps_its_bound_against_brute_force(weights, units: int, k: int) -> None:
    query, cover, unit = make_inputs(units * 10 + k, 6, units, 9)
    found = select_signature(query, cover, unit, k, weights)
    sets = torch.tensor(list(itertools.combinations(range(units), k)))
    for b in range(len(query)):
        repeated = (t[b : b + 1].expand(len(sets), *t.shape[1:]) for t in (query, cover, unit))
        best = set_function_value(*repeated, sets, k=k, weights=weights).value.max().item()
        assert (1 - 1 / math.e) * best - 1e-9 <= found.value[b].item() <= best + 1e-9


@pytest.mark.parametrize("weights", WEIGHTS)
def test_agrees_with_naive_greedy_and_set_function(weights) -> None:
    query, cover, unit = make_inputs(3, 5, 8, 10)
    found = select_signature(query, cover, unit, 4, weights)
    for b in range(5):
        one = (query[b : b + 1], cover[b : b + 1], unit[b : b + 1])
        assert found.indices[b].tolist() == slow_greedy(*one, 4, weights)
    again = set_function_value(query, cover, unit, found.indices, k=4, weights=weights)
    torch.testing.assert_close(found.terms, again.terms)
    torch.testing.assert_close(found.value, again.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gains_do_not_increase_and_sum_to_the_value(dtype: torch.dtype) -> None:
    query, cover, unit = make_inputs(4, 16, 20, 30, dtype=dtype)
    found = select_signature(query, cover, unit, 6)
    assert found.gains.dtype == dtype
    assert (found.gains[:, 1:] <= found.gains[:, :-1] + 1e-5).all()
    assert (found.gains >= 0).all()
    torch.testing.assert_close(found.gains.sum(dim=1), found.value)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_terms_of_each_pick_are_those_of_the_growing_set(weights) -> None:
    query, cover, unit = make_inputs(4, 5, 6, 9)
    found = select_signature(query, cover, unit, 8, weights)
    before = torch.zeros(5, 3, dtype=torch.float64)
    for size in range(1, 9):
        terms = set_function_value(query, cover, unit, found.indices[:, :size], k=8, weights=weights).terms
        torch.testing.assert_close(found.pick_terms[:, size - 1], terms - before, atol=1e-12, rtol=0)
        before = terms
    assert not found.pick_terms[:, 6:].any()  # the pool is used up
    torch.testing.assert_close(found.pick_terms.sum(dim=1), found.terms, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.pick_terms @ torch.tensor(weights, dtype=torch.float64), found.gains)


def test_first_picks_by_hand() -> None:
    query = torch.tensor([[0.9, 0.8, 0.1]])
    cover = torch.tensor([[[0.9, 0.9, 0.0], [0.8, 0.8, 0.1], [0.0, 0.0, 0.9]]])
    unit = torch.tensor([[[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    found = select_signature(query, cover, unit, 2)
    # First: .3*.45 + .4*(1.7/3) + .3*.5. Then unit 2 (new ground) beats unit 1 (a copy of unit 0).
    assert found.indices.tolist() == [[0, 2]]
    torch.testing.assert_close(
        found.gains, torch.tensor([[0.135 + 0.4 * 1.7 / 3 + 0.15, 0.015 + 0.4 * 0.9 / 3 + 0.15]])
    )


def _same(found: Selection, rows: slice, single: Selection) -> None:
    assert torch.equal(found.indices[rows], single.indices)
    torch.testing.assert_close(found.gains[rows], single.gains)
    torch.testing.assert_close(found.terms[rows], single.terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_equals_single(dtype: torch.dtype) -> None:
    query, cover, unit = make_inputs(5, 12, 15, 20, dtype=dtype)
    found = select_signature(query, cover, unit, 5)
    for b in range(12):
        rows = slice(b, b + 1)
        _same(found, rows, select_signature(query[rows], cover[rows], unit[rows], 5))


def test_padding_changes_nothing_whatever_it_holds() -> None:
    query, cover, unit = make_inputs(6, 3, 7, 9, dtype=torch.float32)
    wide_query, wide_cover = torch.full((3, 11), torch.nan), torch.full((3, 14, 11), torch.nan)
    wide_unit = torch.full((3, 11, 11), torch.inf)
    wide_query[:, :7], wide_cover[:, :9, :7], wide_unit[:, :7, :7] = query, cover, unit
    pool_mask, cover_mask = torch.arange(11).expand(3, -1) < 7, torch.arange(14).expand(3, -1) < 9
    padded = select_signature(wide_query, wide_cover, wide_unit, 5, pool_mask=pool_mask, cover_mask=cover_mask)
    _same(padded, slice(None), select_signature(query, cover, unit, 5))


def test_permuted_pool_gives_the_same_units() -> None:
    query, cover, unit = make_inputs(7, 4, 10, 12)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    found = select_signature(query, cover, unit, 5)
    moved = select_signature(query[:, order], cover[:, :, order], unit[:, order][:, :, order], 5)
    assert torch.equal(order[moved.indices], found.indices)
    shuffled = select_signature(query, cover[:, torch.randperm(12)], unit, 5)
    assert torch.equal(shuffled.indices, found.indices)


def test_SRV_55_k_beyond_the_pool_takes_the_pool() -> None:
    query, cover, unit = make_inputs(8, 2, 3, 4)
    assert sorted(select_signature(query, cover, unit, 3).indices[0].tolist()) == [0, 1, 2]
    found = select_signature(query, cover, unit, 5)
    assert found.indices.shape == (2, 5)
    assert (found.indices[:, 3:] == -1).all() and (found.gains[:, 3:] == 0).all()
    assert sorted(found.indices[1, :3].tolist()) == [0, 1, 2]


def test_SRV_55_identical_units_lowest_index_wins() -> None:
    query, cover, unit = make_inputs(9, 1, 4, 6, dtype=torch.float32)
    twins = [2, 0, 0, 1, 2, 0]  # positions 1, 2, 5 are one unit; 0 and 4 another
    noise = 1e-7 * torch.randn(1, 6, generator=torch.Generator().manual_seed(1))  # last-bit differences of a matmul
    found = select_signature(query[:, twins] + noise, cover[:, :, twins], unit[:, twins][:, :, twins], 6)
    order = found.indices[0].tolist()
    assert order.index(1) < order.index(2) < order.index(5)
    assert order.index(0) < order.index(4)


def test_SRV_55_all_negative_similarities_are_clamped() -> None:
    found = select_signature(-torch.ones(1, 3), -torch.ones(1, 2, 3), 2 * torch.eye(3)[None] - 1, 3)
    assert found.indices.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(found.terms, torch.tensor([[0.0, 0.0, 1.0]]))


def test_k_of_one() -> None:
    query, cover, unit = make_inputs(10, 3, 5, 6)
    found = select_signature(query, cover, unit, 1)
    expected = 0.3 * query.clamp(0) + 0.4 * cover.clamp(0).mean(dim=1) + 0.3
    assert torch.equal(found.indices[:, 0], expected.argmax(dim=1))
    torch.testing.assert_close(found.value, expected.amax(dim=1))


@pytest.mark.parametrize(("batch", "units", "chunks"), [(0, 4, 3), (2, 0, 3), (2, 3, 0)])
def test_empty_sizes(batch: int, units: int, chunks: int) -> None:
    found = select_signature(
        torch.zeros(batch, units), torch.zeros(batch, chunks, units), torch.zeros(batch, units, units), 2
    )
    assert found.indices.shape == (batch, 2)
    assert (found.terms[:, 1] == 0).all()


def test_empty_pool_among_full_ones() -> None:
    query, cover, unit = make_inputs(11, 2, 4, 5)
    mask = torch.tensor([[True] * 4, [False] * 4])
    found = select_signature(query, cover, unit, 2, pool_mask=mask)
    assert found.indices[1].tolist() == [-1, -1] and found.value[1] == 0
    assert (found.indices[0] >= 0).all()


def test_EVL_01_half_precision_inputs_are_computed_in_float32() -> None:
    query, cover, unit = make_inputs(12, 2, 6, 7, dtype=torch.bfloat16)
    found = select_signature(query, cover, unit, 3)
    assert found.gains.dtype == torch.float32
    exact = select_signature(query.float(), cover.float(), unit.float(), 3)
    assert torch.equal(found.indices, exact.indices) and torch.equal(found.gains, exact.gains)


def test_EVL_01_autocast_changes_nothing() -> None:
    query, cover, unit = make_inputs(13, 4, 9, 12, dtype=torch.float32)
    plain = select_signature(query, cover, unit, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = select_signature(query, cover, unit, 4)
    assert torch.equal(plain.indices, cast.indices) and torch.equal(plain.gains, cast.gains)


class _Operations(TorchDispatchMode):
    """Counts the operations that torch runs."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_SRV_56_no_loop_over_the_batch_and_inputs_left_alone() -> None:
    query, cover, unit = make_inputs(14, 40, 20, 20, dtype=torch.float32)
    copies = [t.clone() for t in (query, cover, unit)]
    pair = query[:2], cover[:2], unit[:2]
    with _Operations() as small:
        select_signature(*pair, 5)
    with _Operations() as large:
        select_signature(query, cover, unit, 5)
    assert small.count == large.count
    assert all(torch.equal(a, b) for a, b in zip(copies, (query, cover, unit), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, c, u: (q.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(torch.nan)), c, u), r"\[1, 2\]"),
        (lambda q, c, u: (q, c * 3, u), "cover_sim"),
        (lambda q, c, u: (q, c, u * torch.inf), "unit_sim"),
        (lambda q, c, u: (q[0], c, u), "expected"),
        (lambda q, c, u: (q[:1], c, u), "must agree"),
        (lambda q, c, u: (q, c.transpose(1, 2), u), "must agree"),
        (lambda q, c, u: (q, c, u.triu()), "symmetric"),
    ],
)
def test_wrong_inputs_are_refused(change, message: str) -> None:
    inputs = [t.float() for t in make_inputs(15, 2, 4, 5)]
    with pytest.raises(ValueError, match=message):
        select_signature(*change(*inputs), 2)


@pytest.mark.parametrize("k", [0, -1, True, 2.0])
def test_wrong_k_is_refused(k) -> None:
    with pytest.raises(ValueError, match="k="):
        select_signature(*make_inputs(16, 1, 3, 3), k)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.3, -0.1, 0.8), (0.3, math.nan, 0.3)])
def test_wrong_weights_are_refused(weights) -> None:
    with pytest.raises(ValueError, match="three finite numbers"):
        select_signature(*make_inputs(16, 1, 3, 3), 2, weights)


def test_wrong_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="pool_mask"):
        select_signature(*make_inputs(16, 1, 3, 3), 2, pool_mask=torch.ones(1, 3))


def test_cover_weight_by_hand_and_the_bound_still_holds() -> None:
    # two chunks, each covered by one unit alone: the heavier chunk's unit comes first
    query, unit = torch.zeros(1, 2), torch.eye(2)[None]
    cover = torch.eye(2)[None]
    light_first = select_signature(query, cover, unit, 1, (0, 1, 0), cover_weight=torch.tensor([[1.0, 3.0]]))
    assert light_first.indices.tolist() == [[1]] and light_first.gains.tolist() == [[0.75]]
    weight = torch.rand(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    query, cover, unit = make_inputs(5, 4, 7, 9)
    found = select_signature(query, cover, unit, 3, cover_weight=weight)
    sets = torch.tensor(list(itertools.combinations(range(7), 3)))
    for b in range(4):
        repeated = (t[b : b + 1].expand(len(sets), *t.shape[1:]) for t in (query, cover, unit))
        weights = weight[b : b + 1].expand(len(sets), -1)
        best = set_function_value(*repeated, sets, k=3, cover_weight=weights).value.max().item()
        assert (1 - 1 / math.e) * best - 1e-9 <= found.value[b].item() <= best + 1e-9
    same = select_signature(query, cover, unit, 3, cover_weight=torch.full((4, 9), 2.0))
    assert torch.equal(same.indices, select_signature(query, cover, unit, 3).indices)
    with pytest.raises(ValueError, match="give weights >= 0"):
        select_signature(query, cover, unit, 3, cover_weight=-weight)
