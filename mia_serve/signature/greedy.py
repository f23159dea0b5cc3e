"""Batched greedy selection of signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mia_serve.signature.objective import (
    DEFAULT_WEIGHTS,
    check_k,
    check_similarities,
    check_weights,
    pair_weight,
    weighted_sum,
)


class Selection(NamedTuple):
    """Signatures chosen for B queries.

    Attributes:
        indices: Chosen units in order of selection, (B, k) int64, padded with -1.
        gains: Marginal gain of F at each pick, (B, k), 0 where padded; they sum to value.
        terms: f_Q, f_C, f_D of the chosen set, (B, 3).
        value: F of the chosen set, (B,).
        pick_terms: Marginal f_Q, f_C, f_D at each pick, unweighted, (B, k, 3), 0 where padded; they sum to terms, and
            with their weights to gains.
    """

    indices: torch.Tensor
    gains: torch.Tensor
    terms: torch.Tensor
    value: torch.Tensor
    pick_terms: torch.Tensor


@torch.no_grad()
def select_signature(
    query_sim: torch.Tensor,
    cover_sim: torch.Tensor,
    unit_sim: torch.Tensor,
    k: int = 5,
    weights: Sequence[float] = DEFAULT_WEIGHTS,
    pool_mask: torch.Tensor | None = None,
    cover_mask: torch.Tensor | None = None,
    cover_weight: torch.Tensor | None = None,
) -> Selection:
    """Choose up to k units a query that greedily maximise F = λ_Q f_Q + λ_C f_C + λ_D f_D.

    F is monotone submodular for up to k units, so the value is at least 1 - 1/e of the best set's (Nemhauser et al.
    1978). Negative cosines count as 0. Among gains that differ by rounding only, the lowest index wins: with the pool
    in E1 rank order that is the session of the best-ranked chunk. Memory is O(B·C·H).

    Args:
        query_sim: cos(q, h) of the pool's units, (B, H).
        cover_sim: cos(c, h) of the retrieved chunks and units, (B, C, H).
        unit_sim: cos(h, h') of the units, (B, H, H).
        k: Signature size K_sum; a pool with fewer units is taken whole.
        weights: λ_Q, λ_C, λ_D, each ≥ 0.
        pool_mask: True where a unit is real, (B, H).
        cover_mask: True where a chunk is real, (B, C).
        cover_weight: Weight ≥ 0 of each chunk in f_C, (B, C), scaled to sum to 1; None: all alike. Any weights keep F
            monotone submodular.

    Returns:
        Indices, gains, terms and values on the inputs' device, float32 or float64.

    Raises:
        MiaError: If shapes disagree or a value is not a cosine.
    """
    check_k(k)
    lambdas = check_weights(weights)
    sims = check_similarities(query_sim, cover_sim, unit_sim, pool_mask, cover_mask, cover_weight)
    batch, chunks, units = sims.cover.shape
    device, dtype = sims.cover.device, sims.cover.dtype
    # Equal units come with cosines that differ in the last bits; without a tolerance those bits would choose.
    tie = 16 * torch.finfo(dtype).eps

    indices = torch.full((batch, k), -1, dtype=torch.int64, device=device)
    gains = torch.zeros((batch, k), dtype=dtype, device=device)
    pick_terms = torch.zeros((batch, k, 3), dtype=dtype, device=device)
    covered = torch.zeros((batch, chunks), dtype=dtype, device=device)  # max over σ of s⁺(c, h)
    overlap = torch.zeros((batch, units), dtype=dtype, device=device)  # sum over σ of s⁺(h, h')
    closed = ~sims.pool_mask
    buffer = torch.empty_like(sims.cover)
    rows = torch.arange(batch, device=device)

    for step in range(min(k, units)):
        torch.sub(sims.cover, covered[:, :, None], out=buffer)
        buffer.relu_().mul_(sims.cover_weight[:, :, None])
        parts = torch.stack([sims.query / k, buffer.sum(dim=1), (1 - overlap * pair_weight(k)) / k], dim=2)
        gain = weighted_sum(parts, lambdas).masked_fill_(closed, -torch.inf)
        best = gain.amax(dim=1, keepdim=True)
        pick = (gain >= best - tie).to(torch.uint8).argmax(dim=1)  # argmax returns the first of equals
        live = ~closed[rows, pick]  # False once a pool is used up
        indices[:, step] = torch.where(live, pick, -1)
        gains[:, step] = torch.where(live, gain[rows, pick], 0)
        pick_terms[:, step] = parts[rows, pick] * live[:, None]
        covered = torch.maximum(covered, sims.cover[rows, :, pick] * live[:, None])
        overlap = overlap + sims.unit[rows, pick] * live[:, None]
        closed[rows, pick] = True
    terms = pick_terms.sum(dim=1)
    return Selection(indices, gains, terms, weighted_sum(terms, lambdas), pick_terms)


def select_sessions(
    queries: torch.Tensor,
    chunks: torch.Tensor,
    summaries: torch.Tensor,
    pools: torch.Tensor,
    sessions: torch.Tensor,
    cover_weight: torch.Tensor,
    *,
    k: int,
    weights: Sequence[float],
    cover: str,
) -> Selection:
    """Choose the signatures of B queries out of their pools, from unit vectors.

    Args:
        queries: (B, d).
        chunks: Vectors of each query's retrieved chunks, (B, C, d).
        summaries: Vectors of all sessions' summaries, (S, d).
        pools: Sessions to choose from, (B, H) rows of ``summaries``, -1 padded.
        sessions: Session of each retrieved chunk, (B, C).
        cover_weight: How each retrieved chunk counts, (B, C).
        k: Signature size K_sum.
        weights: λ_Q, λ_C, λ_D.
        cover: What a session covers: "member", its own chunks fully, or "semantic", all by cosine only.

    Returns:
        As `select_signature`, its indices being rows of ``summaries``.
    """
    units = summaries[pools.clamp(min=0)]
    columns = units.transpose(1, 2)
    cover_sim = torch.bmm(chunks, columns)
    if cover == "member":
        cover_sim = cover_sim.masked_fill_(sessions[:, :, None] == pools[:, None, :], 1.0)
    query_sim, unit_sim = torch.bmm(queries[:, None, :], columns)[:, 0], torch.bmm(units, columns)
    found = select_signature(query_sim, cover_sim, unit_sim, k, weights, pools >= 0, cover_weight=cover_weight)
    rows = torch.where(found.indices >= 0, pools.gather(1, found.indices.clamp(min=0)), -1)
    return found._replace(indices=rows)
