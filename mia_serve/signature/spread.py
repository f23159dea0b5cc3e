"""How wide a query's activation is, and the signature size that follows from it."""

from __future__ import annotations

import torch

from mia_serve.core.errors import MiaError
from mia_serve.signature.objective import check_k

#: Most sessions in a signature of adaptive size.
K_MOST = 8

_TEMPERATURE = 0.05  # as the chunks weigh in the coverage term
_ELEMENTS = 1 << 24  # numbers held at once


def activation_spread(scores: torch.Tensor, sessions: torch.Tensor, temperature: float = _TEMPERATURE) -> torch.Tensor:
    """Tell over how many sessions a query's activation spreads: the perplexity of E1's softmax mass.

    The K₀ chunks weigh softmax(score / temperature), a session h the sum m(h) of its chunks, and the spread is
    exp(-Σ m(h) ln m(h)): 1 where all mass lies in one session, n where it lies evenly in n of them.

    Args:
        scores: E1 scores of the K₀ chunks, (B, C).
        sessions: Session of each chunk, (B, C) integers, -1 where padded.
        temperature: Of the softmax; a lead of so much weighs e times as much.

    Returns:
        (B,) float64, from 1 to the number of sessions; 0 for a row without a chunk.

    Raises:
        MiaError: If the shapes differ, the temperature is not above 0 or a score is not finite.
    """
    if scores.shape != sessions.shape or scores.ndim != 2:
        raise MiaError(f"scores {tuple(scores.shape)}, sessions {tuple(sessions.shape)}: expected both (B, C)")
    if not temperature > 0:
        raise MiaError(f"temperature={temperature}: give a number > 0; 0.05 is the coverage term's")
    there = sessions >= 0
    if not bool(torch.isfinite(scores)[there].all()):
        raise MiaError("a score is not finite: give E1's scores of the chunks")
    logits = scores.double().masked_fill(~there, -torch.inf) / temperature
    shares = torch.where(there, logits.softmax(dim=1), 0.0)
    spreads = []
    for row in torch.arange(len(scores), device=scores.device).split(max(1, _ELEMENTS // max(1, scores.shape[1]) ** 2)):
        same = sessions[row][:, :, None] == sessions[row][:, None, :]
        mass = (same * shares[row][:, None, :]).sum(dim=2)  # of each chunk's session
        # Σ over sessions of m ln m, written as a sum over chunks, so that no session needs a place of its own.
        spreads.append(torch.special.xlogy(shares[row], mass).sum(dim=1).neg().exp() * there[row].any(dim=1))
    return torch.cat(spreads) if spreads else shares.sum(dim=1)


def spread_sizes(spread: torch.Tensor, most: int = K_MOST, scale: float = 1.0) -> torch.Tensor:
    """Turn spreads into signature sizes: round(scale · spread), half up, between 1 and ``most``.

    On FairytaleQA, QMSum and LoCoMo such sizes retrieve no better than the papers' fixed 5
    (``scripts/receipts/adaptive.json``); the scale is the one that did best there with the signature as a prior.

    Args:
        spread: What `activation_spread` returns, (B,).
        most: Largest size.
        scale: Sessions for each session's worth of spread.

    Returns:
        (B,) int64. A pool that holds fewer sessions is taken whole, as with a fixed size.

    Raises:
        MiaError: If ``most`` < 1 or the scale is not above 0.
    """
    check_k(most)
    if not 0 < scale < float("inf"):
        raise MiaError(f"scale={scale}: give a number > 0")
    return (scale * spread + 0.5).floor().clamp(1, most).to(torch.int64)
