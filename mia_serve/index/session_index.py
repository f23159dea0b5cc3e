"""Exact search over chunk vectors with string ids and sessions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from mia_serve.core.device import resolve_device
from mia_serve.core.errors import MiaError
from mia_serve.index.exact import by_score_then_rank, exhaustive_top, float32_margin, rescore, score_all
from mia_serve.index.flat import FaissFlat, Flat, TorchFlat, full_float32, import_faiss
from mia_serve.index.results import Hits, SessionHits
from mia_serve.index.segments import best_in_session, mean_in_session, top_mean_in_session
from mia_serve.index.store import StoredIndex, read_index, write_index

Pooling = Literal["max", "topk", "mean"]

_SPARE = 16  # fetched beyond k so that the boundary of k can be proved free of ties
_SESSION_SCORES = 1 << 25  # chunk scores held at once by search_sessions: 128 MiB
_MAX_NORM = 1e15  # longer vectors could overflow a float32 product


class _Ready(NamedTuple):
    """What a search needs; rebuilt after a change."""

    vectors: torch.Tensor  # (N, d) float32 on the device
    flat: Flat
    order: torch.Tensor  # (N,) rows by ascending id
    rank: torch.Tensor  # (N,) inverse of order
    max_norm: float
    session_ids: list[str]  # ascending
    session: torch.Tensor  # (N,) place of each row's session in session_ids
    sizes: torch.Tensor  # (S,) rows of each session


class SessionIndex:
    """Chunk vectors with external string ids, each in a session; exact inner-product search.

    Scores are float64 inner products rounded to float32, the same on every backend. Equal scores are ordered by id,
    compared as strings (code points), ascending. Rows number the chunks in order of insertion; after a deletion they
    close up.

    Args:
        dim: Width d of the vectors.
        backend: "torch", "faiss" (CPU) or "auto", which is torch: for batches of queries its tiled matmul is faster
            than a FAISS flat index, on CPU too, and the results are the same.
        device: "auto" (CUDA where there is one), "cpu", "cuda", …
        spec_hash: Hash of the encoder that made the vectors; kept with them.

    Raises:
        MiaError: If the backend is unknown or not installed, or does not run on the device.
    """

    def __init__(
        self,
        dim: int,
        backend: str = "auto",
        device: str | torch.device = "auto",
        spec_hash: str | None = None,
    ) -> None:
        if dim < 1:
            raise MiaError(f"dim={dim}: give the width of the vectors, at least 1")
        if backend not in ("auto", "torch", "faiss"):
            raise MiaError(f"backend={backend!r}: allowed are 'auto', 'torch', 'faiss'")
        self.dim = dim
        self.backend = "torch" if backend == "auto" else backend
        if self.backend == "faiss":
            import_faiss()
            self.device = torch.device("cpu") if device == "auto" else resolve_device(device)
            if self.device.type != "cpu":
                raise MiaError(f"backend 'faiss' with device {device!r}: FAISS runs on cpu here; use backend='torch'")
        else:
            self.device = resolve_device(device)
        self.spec_hash = spec_hash
        self._ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._sessions: list[str] = []
        self._blocks: list[np.ndarray] = []
        self._ready: _Ready | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._row_of

    @property
    def ids(self) -> tuple[str, ...]:
        """Chunk ids by row."""
        return tuple(self._ids)

    def add(self, ids: Sequence[str], vectors: np.ndarray, sessions: Sequence[str]) -> None:
        """Append chunks; all of them or, on an error, none.

        Args:
            ids: New chunk ids.
            vectors: (n, d) finite numbers, kept as float32. Need not be unit rows: the score is the inner product.
            sessions: Session id of each chunk.

        Raises:
            MiaError: If an id is not a string, is empty, repeated or present, or a vector is not finite or not (n, d).
        """
        names, owners = _strings(ids, "ids"), _strings(sessions, "sessions")
        rows = self._checked(vectors, "vectors")
        if not len(names) == len(owners) == len(rows):
            raise MiaError(f"{len(names)} ids, {len(rows)} vectors, {len(owners)} sessions: give one of each a chunk")
        fresh: dict[str, int] = {}
        for position, name in enumerate(names):
            if name in self._row_of or name in fresh:
                raise MiaError(f"id {name!r} (position {position}) is already in the index: delete it first")
            fresh[name] = len(self._ids) + position
        self._ids += names
        self._sessions += owners
        self._row_of |= fresh
        self._blocks.append(np.array(rows, dtype=np.float32, order="C"))  # a copy: the caller may reuse its array
        self._ready = None

    def delete(self, ids: Sequence[str]) -> None:
        """Remove chunks by id; later rows close up.

        Raises:
            MiaError: If an id is not in the index or is given twice; nothing is removed then.
        """
        names = _strings(ids, "ids")
        gone = set(names)
        unknown = next((name for name in names if name not in self._row_of), None)
        if unknown is not None or len(gone) != len(names):
            what = f"id {unknown!r} is not in the index" if unknown is not None else "an id is given twice"
            raise MiaError(f"{what}: nothing was deleted; give ids of the index once each")
        keep = [row for row, name in enumerate(self._ids) if name not in gone]
        self._blocks = [self._matrix()[keep]]
        self._sessions = [self._sessions[row] for row in keep]
        self._ids = [self._ids[row] for row in keep]
        self._row_of = {name: row for row, name in enumerate(self._ids)}
        self._ready = None

    def search(self, queries: np.ndarray, k: int) -> Hits:
        """Find the min(k, N) chunks of highest inner product for each query.

        Args:
            queries: (n, d) finite numbers.
            k: At least 1.

        Returns:
            Hits with arrays of shape (n, min(k, N)).

        Raises:
            MiaError: If a query is not finite or not (n, d), or k < 1.
        """
        check_count(k, "k")
        given = self._checked(queries, "queries")
        k = min(k, len(self))
        if not k or not len(given):
            return self._hits(np.empty((len(given), k), np.float32), np.empty((len(given), k), np.int64))
        ready = self._prepare()
        with full_float32(self.device):
            batch = self._to_device(given)
            fetch = min(len(self), k + _SPARE)
            rough, rows = ready.flat.top(batch, fetch)
            scores, rows = by_score_then_rank(rescore(batch, ready.vectors, rows), rows, ready.rank)
            scores, rows = scores[:, :k].clone(), rows[:, :k].clone()
            if fetch < len(self):
                # A row that was not fetched scores at most the worst rough score plus rounding. Where that reaches
                # the k-th score, the row might belong into the result or tie with it.
                margin = float32_margin(self.dim) * ready.max_norm * batch.norm(dim=1)
                unsure = (rough.amin(dim=1) + margin >= scores[:, -1]).nonzero()[:, 0]
                if len(unsure):
                    scores[unsure], rows[unsure] = exhaustive_top(batch[unsure], ready.vectors, ready.order, k)
        return self._hits(scores.cpu().numpy(), rows.cpu().numpy())

    def search_within(self, queries: np.ndarray, rows: np.ndarray, k: int, bias: np.ndarray | None = None) -> Hits:
        """Rank given rows only, for each query its own.

        Args:
            queries: (n, d) finite numbers.
            rows: (n, f) rows of the index, distinct for each query, -1 where padded.
            k: At least 1.
            bias: (n, f) finite numbers added to the scores of the rows; None for none.

        Returns:
            Hits with arrays as wide as k, or as the most rows that a query has where these are fewer.

        Raises:
            MiaError: If a query or the bias is not finite or of the wrong shape, k < 1, or a row is not in the index.
        """
        check_count(k, "k")
        given = self._checked(queries, "queries")
        if rows.ndim != 2 or len(rows) != len(given) or not np.issubdtype(rows.dtype, np.integer):
            raise MiaError(f"rows {rows.shape} {rows.dtype}: expected ({len(given)}, f) integers")
        if rows.size and (rows.min() < -1 or rows.max() >= len(self)):
            raise MiaError(f"rows hold {rows.min()}..{rows.max()}: allowed are -1..{len(self) - 1}")
        if bias is not None and (bias.shape != rows.shape or not np.isfinite(bias).all()):
            raise MiaError(f"bias {bias.shape}: expected finite numbers of shape {rows.shape}")
        k = min(k, int((rows >= 0).sum(axis=1).max(initial=0)))
        if not k or not len(given) or not len(self):
            return self._hits(np.full((len(given), k), -np.inf, np.float32), np.full((len(given), k), -1, np.int64))
        ready = self._prepare()
        with full_float32(self.device):
            wanted = torch.from_numpy(rows.astype(np.int64)).to(self.device)
            scores = rescore(self._to_device(given), ready.vectors, wanted)
            if bias is not None:
                scores = scores + torch.from_numpy(bias).to(scores)
            scores, wanted = by_score_then_rank(scores, wanted, ready.rank)
        return self._hits(scores[:, :k].cpu().numpy(), wanted[:, :k].cpu().numpy())

    def search_sessions(self, queries: np.ndarray, k: int, pooling: Pooling = "max", topk: int = 3) -> SessionHits:
        """Find the min(k, S) sessions of highest pooled chunk score for each query.

        Args:
            queries: (n, d) finite numbers.
            k: At least 1.
            pooling: "max" (the best chunk counts: late interaction), "topk" (mean of the topk best chunks) or "mean"
                (mean of all chunk scores). None of them grows with the length of a session by itself.
            topk: Chunks that "topk" averages; a session with fewer chunks averages all it has.

        Returns:
            Sessions, scores (n, min(k, S)) and the best chunk of each session.

        Raises:
            MiaError: If a query is not finite or not (n, d), k or topk < 1, or the pooling is unknown.
        """
        check_count(k, "k")
        check_count(topk, "topk")
        if pooling not in ("max", "topk", "mean"):
            raise MiaError(f"pooling={pooling!r}: allowed are 'max', 'topk', 'mean'")
        given = self._checked(queries, "queries")
        if not len(self) or not len(given):
            empty: list[list[str]] = [[] for _ in given]
            return SessionHits(empty, np.empty((len(given), 0), np.float32), [list(row) for row in empty])
        ready = self._prepare()
        k = min(k, len(ready.session_ids))
        ids: list[list[str]] = []
        chunks: list[list[str]] = []
        found = np.empty((len(given), k), np.float32)
        with full_float32(self.device):
            for part in self._to_device(given).split(max(1, _SESSION_SCORES // len(self))):
                scores = score_all(part, ready.vectors)
                pooled, best = best_in_session(scores, ready.session, ready.rank, len(ready.session_ids))
                if pooling == "mean":
                    pooled = mean_in_session(scores, ready.session, ready.sizes)
                elif pooling == "topk":
                    pooled = top_mean_in_session(scores, ready.session, ready.sizes, topk)
                pooled, place = pooled.sort(dim=1, descending=True, stable=True)  # sessions lie in id order
                place = place[:, :k]
                found[len(ids) : len(ids) + len(part)] = pooled[:, :k].cpu().numpy()
                rows = ready.order[best.gather(1, place)].tolist()
                ids += [[ready.session_ids[i] for i in row] for row in place.tolist()]
                chunks += [[self._ids[i] for i in row] for row in rows]
        return SessionHits(ids, found, chunks)

    def save(self, path: str | Path) -> None:
        """Write the index to a folder, beside it first and then renamed into place.

        Raises:
            MiaError: If path exists and is not an index.
        """
        write_index(path, StoredIndex(self._ids, self._sessions, self._matrix(), self.spec_hash))

    @classmethod
    def load(
        cls,
        path: str | Path,
        expected_spec_hash: str | None = None,
        *,
        backend: str = "auto",
        device: str | torch.device = "auto",
    ) -> SessionIndex:
        """Open a folder written by save, on any backend.

        Args:
            path: The folder.
            expected_spec_hash: Hash of the encoder that will make the queries; None: not checked.
            backend: As in the constructor.
            device: As in the constructor.

        Raises:
            FileNotFoundError: If there is no index.
            MiaError: If its vectors are another encoder's, or its files disagree.
        """
        stored = read_index(path, expected_spec_hash)
        index = cls(stored.vectors.shape[1], backend, device, stored.spec_hash)
        index.add(stored.ids, stored.vectors, stored.sessions)
        return index

    def _checked(self, vectors: np.ndarray, name: str) -> np.ndarray:
        array = np.asarray(vectors)
        if array.ndim != 2 or array.shape[1] != self.dim or array.dtype.kind not in "fiu":
            raise MiaError(f"{name} {array.shape} {array.dtype}: expected (n, {self.dim}) numbers")
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.einsum("nd,nd->n", array, array, dtype=np.float64))
        bad = ~(norms <= _MAX_NORM)  # True for NaN as well
        if bad.any():
            row = int(bad.argmax())
            raise MiaError(f"{name}, row {row}: NaN, infinite or huge (norm {norms[row]:g}); give finite vectors")
        return array

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(self.device)

    def _matrix(self) -> np.ndarray:
        if len(self._blocks) != 1:
            empty = np.empty((0, self.dim), np.float32)
            self._blocks = [np.concatenate(self._blocks) if self._blocks else empty]
        return self._blocks[0]

    def _prepare(self) -> _Ready:
        if self._ready is None:
            matrix = self._matrix()
            vectors = torch.from_numpy(matrix).to(self.device)
            order = sorted(range(len(self)), key=self._ids.__getitem__)
            rank = np.empty(len(self), np.int64)
            rank[order] = np.arange(len(self))
            session_ids = sorted(set(self._sessions))
            place = {name: i for i, name in enumerate(session_ids)}
            session = torch.tensor([place[name] for name in self._sessions], device=self.device)
            self._ready = _Ready(
                vectors=vectors,
                flat=FaissFlat(vectors) if self.backend == "faiss" else TorchFlat(vectors),
                order=torch.tensor(order, device=self.device),
                rank=torch.from_numpy(rank).to(self.device),
                max_norm=float(np.sqrt(np.einsum("nd,nd->n", matrix, matrix).max())),
                session_ids=session_ids,
                session=session,
                sizes=torch.bincount(session, minlength=len(session_ids)),
            )
        return self._ready

    def _hits(self, scores: np.ndarray, rows: np.ndarray) -> Hits:
        return Hits([[self._ids[i] for i in row if i >= 0] for row in rows.tolist()], scores, rows)


def check_count(value: int, name: str) -> None:
    """Raise MiaError unless value is an integer ≥ 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise MiaError(f"{name}={value!r}: give an integer >= 1")


def _strings(values: Sequence[str], name: str) -> list[str]:
    if isinstance(values, str):
        raise MiaError(f"{name} is one string: give a list of strings")
    listed = list(values)
    for position, value in enumerate(listed):
        if not isinstance(value, str) or not value:
            raise MiaError(f"{name}, position {position}: {value!r} is not a non-empty string; use str(...)")
    return listed
