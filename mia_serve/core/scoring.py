"""Unit vectors and the fusion of the two views of a query."""

from __future__ import annotations

import torch
from torch import Tensor


def normalise(x: Tensor) -> Tensor:
    """Return rows of unit length in float32 (a zero row stays zero)."""
    return torch.nn.functional.normalize(x.float(), dim=-1)


def fuse_views(query: Tensor, target: Tensor, alpha: float) -> Tensor:
    """Fuse the query-only and the signature-aware view of a query.

    ``s(c | q, sigma) = (1 - alpha) * cos(h_q, c) + alpha * cos(h_t, c)`` is linear in c, so the search with
    ``u = (1 - alpha) * h_q + alpha * h_t`` of unit parts ranks exactly alike (paper A, score-level fusion).

    Args:
        query: (n, d) unit rows, encoding of the query alone.
        target: (n, d) unit rows, encoding of the query with its signature.
        alpha: Weight of ``target``, 0 to 1.

    Returns:
        (n, d) unit rows. ``alpha`` 0 and 1 give the parts themselves.
    """
    if alpha == 0.0:
        return query
    if alpha == 1.0:
        return target
    return normalise((1.0 - alpha) * query + alpha * target)
