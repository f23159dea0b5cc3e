"""A signature as a prior: how probable each of its sessions is, from the scores alone and without training."""

from __future__ import annotations

import numpy as np
import torch

_FLOOR = 1e-3  # of a session's activation, so that one outside the K₀ chunks is improbable and not impossible
_TEMPERATURE = 0.1  # of the cosine between query and summary


def session_prior(activation: torch.Tensor, relevance: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Weigh the sessions of a signature: softmax(ln(activation + 0.001) + relevance / 0.1) over them.

    The activation says where the query's best chunks lie, the relevance what the session's summary says of the query.
    Both constants were set once, on stories and meetings held out of the training parts of FairytaleQA and QMSum.

    Args:
        activation: Share of E1's softmax over the K₀ chunks that falls to each session, (n, K), 0 to 1.
        relevance: cos(q, summary), (n, K).
        mask: True where there is a session, (n, K).

    Returns:
        Weights (n, K); a row sums to 1, or to 0 where it has no session.
    """
    logits = (activation + _FLOOR).log() + relevance / _TEMPERATURE
    weights = logits.masked_fill(~mask, -torch.inf).softmax(dim=1)
    return torch.where(mask, weights, 0.0)


def biased_rows(
    session_of: np.ndarray, sessions: np.ndarray, bias: np.ndarray, best: np.ndarray, *, closed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each query, chunks among which the best under the prior are, and what the prior adds to each.

    A chunk outside the signature's sessions that is not among the best without the prior is not with it either.

    Args:
        session_of: Session of each chunk, (n_chunks,).
        sessions: Sessions of the signatures, (n, K), -1 padded.
        bias: What each adds to the scores of its chunks, (n, K).
        best: Rows of the best chunks without the prior, (n, f), -1 padded.
        closed: Whether no other rows than those may be found.

    Returns:
        Rows (n, f + g), -1 padded, and their bias, likewise, float64.
    """
    inside = [np.flatnonzero(np.isin(session_of, row[row >= 0])) for row in sessions]
    if closed:
        inside = [np.intersect1d(rows, best[i]) for i, rows in enumerate(inside)]
    width = best.shape[1]
    rows = np.full((len(best), width + max((len(own) for own in inside), default=0)), -1, np.int64)
    added = np.zeros(rows.shape, np.float64)
    for i, own in enumerate(inside):
        outside = (best[i] >= 0) & ~np.isin(session_of[best[i]], sessions[i])
        rows[i, :width] = np.where(outside, best[i], -1)
        rows[i, width : width + len(own)] = own
        bias_of = dict(zip(sessions[i].tolist(), bias[i].tolist(), strict=True))
        added[i, width : width + len(own)] = [bias_of[session] for session in session_of[own].tolist()]
    return rows, added
