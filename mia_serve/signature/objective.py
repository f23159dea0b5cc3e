"""The set function F that a signature maximises: relevance, coverage of the retrieved chunks, bounded redundancy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mia_serve.core.errors import MiaError

DEFAULT_WEIGHTS = (0.3, 0.4, 0.3)
"""λ_Q, λ_C, λ_D of the MiA-Signature paper (arXiv 2605.06416)."""

# Cosines of rounded unit vectors land slightly outside [-1, 1]; anything further out is not a cosine.
_COSINE_SLACK = 1e-2
_SYMMETRY_SLACK = 1e-2


class Similarities(NamedTuple):
    """Checked, clamped inputs of the objective; B queries, C retrieved chunks, H pool units.

    Attributes:
        query: s⁺(q, h), (B, H).
        cover: s⁺(c, h), (B, C, H); rows of masked chunks and columns of masked units are zero.
        unit: s⁺(h, h'), (B, H, H).
        pool_mask: True where a unit may be chosen, (B, H).
        cover_weight: Weight of each chunk in f_C, sums to 1 over the chunks that count, (B, C).
    """

    query: torch.Tensor
    cover: torch.Tensor
    unit: torch.Tensor
    pool_mask: torch.Tensor
    cover_weight: torch.Tensor


class SetValue(NamedTuple):
    """Value of given sets.

    Attributes:
        terms: f_Q, f_C, f_D of each set, (B, 3), each within [0, 1].
        value: λ_Q f_Q + λ_C f_C + λ_D f_D, (B,).
    """

    terms: torch.Tensor
    value: torch.Tensor


def check_weights(weights: Sequence[float]) -> tuple[float, float, float]:
    """Return the three weights as floats.

    Raises:
        MiaError: If there are not three finite weights ≥ 0 (a negative one would make F non-monotone).
    """
    values = tuple(float(w) for w in weights)
    if len(values) != 3 or not all(math.isfinite(w) and w >= 0 for w in values):
        raise MiaError(f"weights={tuple(weights)}: give three finite numbers >= 0 (query, coverage, diversity)")
    return values[0], values[1], values[2]


def check_similarities(
    query_sim: torch.Tensor,
    cover_sim: torch.Tensor,
    unit_sim: torch.Tensor,
    pool_mask: torch.Tensor | None = None,
    cover_mask: torch.Tensor | None = None,
    cover_weight: torch.Tensor | None = None,
) -> Similarities:
    """Check shapes and values, then clamp cosines to s⁺ = max(0, cos) in at least float32.

    What lies under a mask is never read, so padding may hold anything.

    Args:
        query_sim: cos(q, h), (B, H).
        cover_sim: cos(c, h), (B, C, H).
        unit_sim: cos(h, h'), (B, H, H).
        pool_mask: True where a unit is real, (B, H); None: all are.
        cover_mask: True where a chunk is real, (B, C); None: all are.
        cover_weight: Weight ≥ 0 of each chunk, (B, C), scaled here to sum to 1; None: all alike.

    Raises:
        MiaError: If shapes or devices disagree, a weight is negative or not finite, or a value is not a cosine (NaN,
            infinite, outside [-1, 1]).
    """
    shapes = f"query_sim {tuple(query_sim.shape)}, cover_sim {tuple(cover_sim.shape)}, unit_sim {tuple(unit_sim.shape)}"
    if query_sim.ndim != 2 or cover_sim.ndim != 3 or unit_sim.ndim != 3:
        raise MiaError(f"{shapes}: expected (B, H), (B, C, H), (B, H, H)")
    batch, chunks, units = cover_sim.shape
    if query_sim.shape != (batch, units) or unit_sim.shape != (batch, units, units):
        raise MiaError(f"{shapes}: B and H must agree; expected (B, H), (B, C, H), (B, H, H)")
    device = cover_sim.device
    pool = _mask(pool_mask, (batch, units), "pool_mask", device)
    cover = _mask(cover_mask, (batch, chunks), "cover_mask", device)
    if query_sim.device != device or unit_sim.device != device:
        raise MiaError(
            f"query_sim on {query_sim.device}, cover_sim on {device}, unit_sim on {unit_sim.device}: one device"
        )

    # Half precision would turn distinct gains into ties, so the arithmetic is float32 or wider.
    dtype = torch.promote_types(torch.promote_types(query_sim.dtype, cover_sim.dtype), unit_sim.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    hidden = ~pool
    query = query_sim.to(dtype, copy=True).masked_fill_(hidden, 0)
    covering = cover_sim.to(dtype, copy=True).masked_fill_(hidden[:, None, :], 0).masked_fill_(~cover[:, :, None], 0)
    unit = unit_sim.to(dtype, copy=True).masked_fill_(hidden[:, None, :], 0).masked_fill_(hidden[:, :, None], 0)
    for name, values in (("query_sim", query), ("cover_sim", covering), ("unit_sim", unit)):
        _check_cosines(name, values)
    if unit.numel() and float((unit - unit.transpose(1, 2)).abs().max()) > _SYMMETRY_SLACK:
        raise MiaError("unit_sim is not symmetric: give cos(h, h') of one set of units against itself")
    weight = cover.to(dtype)
    if cover_weight is not None:
        given = cover_weight.to(dtype)
        if given.shape != (batch, chunks) or given.device != device:
            raise MiaError(
                f"cover_weight {tuple(given.shape)} on {given.device}: expected {(batch, chunks)} on {device}"
            )
        if not bool((torch.isfinite(given) & (given >= 0) | ~cover).all()):
            raise MiaError("cover_weight holds a negative or non-finite number: give weights >= 0")
        weight = torch.where(cover, given, 0)
    weight = weight / weight.sum(dim=1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    return Similarities(query.clamp_(0, 1), covering.clamp_(0, 1), unit.clamp_(0, 1), pool, weight)


@torch.no_grad()
def set_function_value(
    query_sim: torch.Tensor,
    cover_sim: torch.Tensor,
    unit_sim: torch.Tensor,
    sets: torch.Tensor,
    k: int = 5,
    weights: Sequence[float] = DEFAULT_WEIGHTS,
    pool_mask: torch.Tensor | None = None,
    cover_mask: torch.Tensor | None = None,
    cover_weight: torch.Tensor | None = None,
) -> SetValue:
    """Evaluate F on given sets of units, one set a query.

    f_Q(σ) = (1/K) Σ s⁺(q,h);  f_C(σ) = (1/|C_0|) Σ_c max_h s⁺(c,h);
    f_D(σ) = (1/K) [|σ| - (1/(K-1)) Σ_{i<j} s⁺(h_i,h_j)], and |σ| for K = 1.

    Args:
        query_sim: cos(q, h), (B, H).
        cover_sim: cos(c, h), (B, C, H).
        unit_sim: cos(h, h'), (B, H, H).
        sets: Unit indices of each set, (B, S) int64, padded with -1; order does not matter.
        k: K of the formulas, the size a signature may have; at least the size of every set.
        weights: λ_Q, λ_C, λ_D.
        pool_mask: True where a unit is real, (B, H).
        cover_mask: True where a chunk is real, (B, C).
        cover_weight: Weight of each chunk in f_C, (B, C); None: all alike.

    Returns:
        Terms (B, 3) and values (B,).

    Raises:
        MiaError: If a set repeats a unit, names one outside the pool, or is larger than k.
    """
    check_k(k)
    lambdas = check_weights(weights)
    sims = check_similarities(query_sim, cover_sim, unit_sim, pool_mask, cover_mask, cover_weight)
    batch, units = sims.query.shape
    if sets.ndim != 2 or sets.shape[0] != batch or sets.is_floating_point():
        raise MiaError(f"sets {tuple(sets.shape)} {sets.dtype}: expected ({batch}, S) integers padded with -1")
    chosen = sets >= 0
    if sets.numel() and (int(sets.max()) >= units or int(sets.min()) < -1):
        raise MiaError(f"sets hold indices {int(sets.min())}..{int(sets.max())}: allowed are -1..{units - 1}")
    counts = torch.zeros((batch, units + 1), dtype=torch.int64, device=sims.query.device)
    counts.scatter_add_(1, torch.where(chosen, sets, units).to(torch.int64), chosen.to(torch.int64))
    counts = counts[:, :units]
    if counts.numel() and (int(counts.max()) > 1 or bool((counts.bool() & ~sims.pool_mask).any())):
        raise MiaError("sets repeat a unit or name one that pool_mask hides: give distinct units of the pool")
    size = counts.sum(dim=1)
    if size.numel() and int(size.max()) > k:
        raise MiaError(f"a set has {int(size.max())} units but k={k}: the objective is defined up to k units")

    member = counts.to(sims.query.dtype)
    relevance = (sims.query * member).sum(dim=1) / k
    if units:
        best = (sims.cover * member[:, None, :]).amax(dim=2)
        coverage = (best * sims.cover_weight).sum(dim=1)
    else:
        coverage = torch.zeros_like(relevance)
    pairs = sims.unit * member[:, None, :] * member[:, :, None]
    overlap = torch.triu(pairs, diagonal=1).sum(dim=(1, 2))
    diversity = (size - overlap * pair_weight(k)) / k
    terms = torch.stack([relevance, coverage, diversity], dim=1)
    return SetValue(terms, weighted_sum(terms, lambdas))


def weighted_sum(terms: torch.Tensor, weights: tuple[float, float, float]) -> torch.Tensor:
    """Sum f_Q, f_C, f_D in the last dimension with their weights; no matmul, so autocast cannot lower its precision."""
    return terms[..., 0] * weights[0] + terms[..., 1] * weights[1] + terms[..., 2] * weights[2]


def pair_weight(k: int) -> float:
    """Return 1/(K-1), the scale that keeps f_D monotone up to K units; 0 for K = 1, where no pair exists."""
    return 1.0 / (k - 1) if k > 1 else 0.0


def check_k(k: int) -> None:
    """Raise MiaError unless k is an integer ≥ 1."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise MiaError(f"k={k!r}: give the signature size as an integer >= 1")


def _mask(mask: torch.Tensor | None, shape: tuple[int, int], name: str, device: torch.device) -> torch.Tensor:
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if tuple(mask.shape) != shape or mask.dtype != torch.bool or mask.device != device:
        given = f"{name} {tuple(mask.shape)} {mask.dtype} on {mask.device}"
        raise MiaError(f"{given}: expected {shape} torch.bool on {device}")
    return mask


def _check_cosines(name: str, values: torch.Tensor) -> None:
    if not values.numel():
        return
    low, high = (float(v) for v in values.aminmax())  # both are NaN if any value is
    if low >= -1 - _COSINE_SLACK and high <= 1 + _COSINE_SLACK:
        return
    within = (values >= -1 - _COSINE_SLACK) & (values <= 1 + _COSINE_SLACK)
    place = tuple(int(i) for i in (~within).nonzero()[0])
    raise MiaError(f"{name}{list(place)} is {float(values[place])}: give cosines in [-1, 1] of unit vectors")
