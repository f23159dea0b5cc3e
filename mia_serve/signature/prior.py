"""A signature as a prior: how probable each of its sessions is, from the scores alone and without training."""

from __future__ import annotations

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
