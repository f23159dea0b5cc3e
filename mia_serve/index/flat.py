"""Flat inner-product search in float32: the fast first stage, on torch or FAISS.

Neither backend orders ties, and both round differently; ``exact.py`` settles both, so a backend only has to fetch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from mia_serve.core.errors import MiaError

_QUERY_TILE = 512
_SCORE_TILE = 1 << 24  # scores held at once: 64 MiB of float32


class Flat(Protocol):
    """A searchable copy or view of (N, d) vectors."""

    def top(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 scores and rows of the k ≤ N best vectors, (n, k) each, descending, ties in any order."""
        ...


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Keep matrix products in real float32, whatever autocast, TF32 or bf16 settings the caller runs under.

    The precision is a setting of the process; it is put back on leaving.
    """
    backends: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend = backends.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False), torch.inference_mode():
            yield
    finally:
        backend.fp32_precision = before


class TorchFlat:
    """Tiled matmul with a running top-k; the score matrix never exceeds one tile."""

    def __init__(self, vectors: torch.Tensor) -> None:
        self._vectors = vectors

    def top(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Flat.top."""
        tile = max(k, _SCORE_TILE // _QUERY_TILE)
        parts = [self._top_of_tile(part, k, tile) for part in queries.split(_QUERY_TILE)]
        scores, rows = zip(*parts, strict=True)
        return torch.cat(scores), torch.cat(rows)

    def _top_of_tile(self, queries: torch.Tensor, k: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        best = queries.new_empty((len(queries), 0))
        rows = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
        for start in range(0, len(self._vectors), tile):
            scores = queries @ self._vectors[start : start + tile].T
            scores, columns = scores.topk(min(k, scores.shape[1]))
            best, rows = torch.cat([best, scores], dim=1), torch.cat([rows, columns + start], dim=1)
            if best.shape[1] > k:
                best, kept = best.topk(k)
                rows = rows.gather(1, kept)
        return best, rows


class FaissFlat:
    """FAISS IndexFlatIP on the CPU."""

    def __init__(self, vectors: torch.Tensor) -> None:
        if vectors.device.type != "cpu":
            raise MiaError(
                f"backend 'faiss' with device '{vectors.device}': FAISS runs on cpu here; use backend='torch'"
            )
        self._index: Any = import_faiss().IndexFlatIP(vectors.shape[1])
        self._index.add(vectors.numpy())

    def top(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Flat.top."""
        scores, rows = self._index.search(queries.numpy(), k)
        return torch.from_numpy(scores), torch.from_numpy(rows)


def import_faiss() -> Any:
    """Import FAISS on demand.

    Raises:
        MiaError: If it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise MiaError(
            "backend 'faiss' needs the package faiss-cpu: pip install faiss-cpu, or backend='torch'"
        ) from error
    return faiss
