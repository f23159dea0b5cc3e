"""The spread of an activation, and the signature size that follows from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mia_serve.core.errors import MiaError
from mia_serve.signature import activation_spread, spread_sizes


def spread(scores: list[float], sessions: list[int], temperature: float = 0.05) -> float:
    return float(activation_spread(torch.tensor([scores]), torch.tensor([sessions]), temperature)[0])


def test_even_mass_counts_its_sessions() -> None:
    assert spread([0.3] * 4, [7, 7, 7, 7]) == pytest.approx(1)
    assert spread([0.3] * 4, [7, 2, 7, 2]) == pytest.approx(2)
    assert spread([0.3] * 4, [7, 2, 5, 0]) == pytest.approx(4)


def test_perplexity_by_hand() -> None:
    # Masses 3/4 and 1/4: exp(-(3/4 ln 3/4 + 1/4 ln 1/4)) = 4 / 27^(1/4).
    assert spread([0.1] * 4, [1, 1, 1, 9]) == pytest.approx(4 / 27**0.25)
    # A lead of one temperature weighs e times as much: masses e/(e+1) and 1/(e+1).
    e = math.e
    shares = [e / (e + 1), 1 / (e + 1)]
    expected = math.exp(-sum(p * math.log(p) for p in shares))
    assert spread([0.55, 0.5], [0, 1]) == pytest.approx(expected, rel=1e-6)
    assert spread([0.6, 0.5], [0, 1], temperature=0.1) == pytest.approx(expected, rel=1e-6)


def test_agrees_with_a_slow_reference_and_ignores_padding() -> None:
    rng = np.random.default_rng(0)
    scores, sessions = rng.uniform(-0.2, 0.9, (30, 20)).astype(np.float32), rng.integers(0, 8, (30, 20))
    expected = []
    for row, own in zip(scores.astype(float), sessions, strict=True):
        weight = np.exp((row - row.max()) / 0.05)
        mass = np.array([weight[own == h].sum() for h in set(own.tolist())]) / weight.sum()
        expected.append(np.exp(-(mass * np.log(mass)).sum()))
    found = activation_spread(torch.from_numpy(scores), torch.from_numpy(sessions))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
    padded = np.pad(sessions, ((0, 0), (0, 3)), constant_values=-1)
    more = np.pad(scores, ((0, 0), (0, 3)), constant_values=np.nan)
    again = activation_spread(torch.from_numpy(more), torch.from_numpy(padded))
    assert torch.equal(found, again)


def test_rows_without_chunks_and_no_rows() -> None:
    assert activation_spread(torch.zeros(2, 3), torch.tensor([[-1, -1, -1], [0, 1, -1]])).tolist() == pytest.approx(
        [0, 2]
    )
    assert activation_spread(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64)).shape == (0,)
    assert activation_spread(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64)).tolist() == [0, 0]


def test_sizes_round_half_up_and_are_clamped() -> None:
    values = torch.tensor([0.0, 0.4, 1.0, 1.5, 2.5, 3.49, 7.5, 300.0], dtype=torch.float64)
    assert spread_sizes(values, most=8, scale=1.0).tolist() == [1, 1, 1, 2, 3, 3, 8, 8]
    assert spread_sizes(values, most=3, scale=0.5).tolist() == [1, 1, 1, 1, 1, 2, 3, 3]
    assert spread_sizes(values, most=1).tolist() == [1] * 8


def test_SRV_55_ties_do_not_depend_on_order() -> None:
    scores, sessions = torch.tensor([[0.4, 0.4, 0.1, 0.4]]), torch.tensor([[3, 1, 2, 3]])
    order = torch.tensor([2, 0, 3, 1])
    assert float(activation_spread(scores, sessions)) == pytest.approx(
        float(activation_spread(scores[:, order], sessions[:, order])), rel=1e-12
    )


def test_wrong_arguments() -> None:
    with pytest.raises(MiaError, match="expected both"):
        activation_spread(torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(MiaError, match="temperature=0"):
        activation_spread(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), 0)
    with pytest.raises(MiaError, match="not finite"):
        activation_spread(torch.tensor([[math.nan]]), torch.tensor([[0]]))
    with pytest.raises(MiaError, match="scale="):
        spread_sizes(torch.ones(1), scale=0)
    with pytest.raises(MiaError, match="k=0"):
        spread_sizes(torch.ones(1), most=0)
