"""Pool chunk scores into session scores."""

from __future__ import annotations

import torch


def best_in_session(
    scores: torch.Tensor, session: torch.Tensor, rank: torch.Tensor, n_sessions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the best chunk of every session (max-sim late interaction).

    Args:
        scores: (n, N) float32.
        session: (N,) int64, session of each row.
        rank: (N,) int64, place of each row's id among the sorted ids; the lowest wins among equal scores.
        n_sessions: S; every session has a row.

    Returns:
        Best scores (n, S) float32 and the rank of the chunk that has it (n, S) int64.
    """
    index = session.expand(len(scores), -1)
    best = scores.new_full((len(scores), n_sessions), -torch.inf).scatter_reduce_(1, index, scores, "amax")
    holders = torch.where(scores == best.gather(1, index), rank, len(rank))
    first = holders.new_full((len(scores), n_sessions), len(rank)).scatter_reduce_(1, index, holders, "amin")
    return best, first


def mean_in_session(scores: torch.Tensor, session: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Average the scores of all chunks of every session.

    Args:
        scores: (n, N) float32.
        session: (N,) int64.
        sizes: (S,) int64, chunks in each session.

    Returns:
        (n, S) float32.
    """
    totals = torch.zeros((len(scores), len(sizes)), dtype=torch.float64, device=scores.device)
    totals.index_add_(1, session, scores.double())
    return (totals / sizes).float()


def top_mean_in_session(scores: torch.Tensor, session: torch.Tensor, sizes: torch.Tensor, topk: int) -> torch.Tensor:
    """Average the topk best chunks of every session (all of them where it has fewer).

    Args:
        scores: (n, N) float32.
        session: (N,) int64.
        sizes: (S,) int64, chunks in each session.
        topk: At least 1.

    Returns:
        (n, S) float32.
    """
    ranked, columns = scores.sort(dim=1, descending=True)
    grouped = session[columns].argsort(dim=1, stable=True)
    ranked = ranked.gather(1, grouped)
    # Every query's row now has the same layout: sessions in order, best chunk first.
    layout = torch.repeat_interleave(torch.arange(len(sizes), device=scores.device), sizes)
    place = torch.arange(len(session), device=scores.device) - (sizes.cumsum(0) - sizes)[layout]
    kept = (place < topk).nonzero()[:, 0]
    return mean_in_session(ranked[:, kept], layout[kept], sizes.clamp(max=topk))
