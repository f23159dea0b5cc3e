"""Pool the float64 scores of a session's chunks into one score; none grows with the length of a session by itself."""

from __future__ import annotations

from typing import Literal

import torch

Pooling = Literal["max", "topk", "mean", "early", "lme"]


def partial_pool(scores: torch.Tensor, pooling: Pooling, topk: int, beta: float) -> torch.Tensor:
    """Reduce a run of chunks of each session to what can be joined with the session's other runs.

    Args:
        scores: (n, S, t) float64, -inf where a session has no chunk.
        pooling: "max", "topk" or "lme"; "mean" and "early" need no scores of single chunks.
        topk: For "topk".
        beta: For "lme".

    Returns:
        (n, S, p): the best score m (p = 1), the best min(topk, t) scores, or m and Σ exp(β(s − m)) (p = 2).
    """
    if pooling == "max":
        return scores.amax(dim=2, keepdim=True)
    if pooling == "topk":
        return scores.topk(min(topk, scores.shape[2]), dim=2).values
    most = scores.amax(dim=2, keepdim=True)
    return torch.cat([most, (beta * (scores - most)).exp().sum(dim=2, keepdim=True)], dim=2)


def join_pools(first: torch.Tensor, second: torch.Tensor, pooling: Pooling, topk: int, beta: float) -> torch.Tensor:
    """Join what partial_pool returned of two runs of the same sessions."""
    if pooling == "max":
        return torch.maximum(first, second)
    if pooling == "topk":
        both = torch.cat([first, second], dim=2)
        return both.topk(min(topk, both.shape[2]), dim=2).values
    most = torch.maximum(first[:, :, 0], second[:, :, 0])
    sums = [part[:, :, 1] * (beta * (part[:, :, 0] - most)).exp() for part in (first, second)]
    return torch.stack([most, sums[0] + sums[1]], dim=2)


def finish_pool(partial: torch.Tensor, sizes: torch.Tensor, pooling: Pooling, topk: int, beta: float) -> torch.Tensor:
    """Return the pooled scores (n, S) float64 of sessions of given sizes (S,).

    "lme" is (1/β) ln ((1/T) Σ exp(βs)), computed as m + (1/β) ln ((1/T) Σ exp(β(s − m))), which is exact where all
    scores are equal. Without the 1/T, a plain log-sum-exp, a session of T equal chunks would gain ln(T)/β, and the
    longest session would win.
    """
    if pooling == "max":
        return partial[:, :, 0]
    if pooling == "topk":
        present = partial > -torch.inf
        return torch.where(present, partial, 0.0).sum(dim=2) / sizes.clamp(max=topk)
    return partial[:, :, 0] + (partial[:, :, 1] / sizes).log() / beta
