"""From ranked chunks to the pool of their sessions, for a batch of queries at once."""

from __future__ import annotations

import torch

from mia_serve.core.errors import MiaError
from mia_serve.signature.objective import check_k


def unique_in_order(sessions: torch.Tensor) -> torch.Tensor:
    """Drop repeats from each row and keep first occurrences in their order.

    Applied to the sessions of the best chunks this is the pool H₀(q) in E1 rank order.

    Args:
        sessions: Session indices, (B, C) integers, -1 where padded.

    Returns:
        (B, H) int64 padded with -1, H the largest number of distinct sessions of a row.

    Raises:
        MiaError: If the tensor is not two-dimensional and integer.
    """
    if sessions.ndim != 2 or sessions.is_floating_point() or sessions.dtype == torch.bool:
        raise MiaError(f"sessions {tuple(sessions.shape)} {sessions.dtype}: expected (B, C) integers padded with -1")
    if sessions.shape[1] == 0:
        return sessions.to(torch.int64)
    ordered, position = sessions.to(torch.int64).sort(dim=1, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first &= ordered >= 0
    keep = torch.zeros_like(first).scatter_(1, position, first)
    # A stable sort of "dropped" moves the kept entries to the front without changing their order.
    front = (~keep).to(torch.uint8).argsort(dim=1, stable=True)
    packed = torch.where(keep, sessions.to(torch.int64), -1).gather(1, front)
    width = int(keep.sum(dim=1).max()) if len(keep) else 0
    return packed[:, :width]


def first_k(sessions: torch.Tensor, k: int) -> torch.Tensor:
    """Take the first k distinct sessions of each row: the First-K signature.

    Args:
        sessions: Sessions of the retrieved chunks (or a pool) in E1 rank order, (B, C) integers, -1 where padded.
        k: Signature size K_sum.

    Returns:
        (B, k) int64 padded with -1.
    """
    check_k(k)
    pool = unique_in_order(sessions)[:, :k]
    return torch.nn.functional.pad(pool, (0, k - pool.shape[1]), value=-1)
