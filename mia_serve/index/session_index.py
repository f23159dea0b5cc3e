"""Exact search over chunk vectors with string ids, sessions and metadata."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mia_serve.core.device import resolve_device
from mia_serve.core.errors import MiaError
from mia_serve.index.arguments import Chunks, Metadata, check_bias, check_chunks, check_count, check_pooling
from mia_serve.index.blocks import VectorBlocks
from mia_serve.index.chunk_search import search_chunks, search_given
from mia_serve.index.contents import Contents
from mia_serve.index.faiss_flat import FaissFlat, GpuOptions, faiss_device
from mia_serve.index.filters import Where, check_where
from mia_serve.index.flat import check_process, full_float32
from mia_serve.index.persistence import read_contents, write_contents
from mia_serve.index.pooling import Pooling
from mia_serve.index.results import Hits, SessionHits, SessionScores
from mia_serve.index.session_search import score_sessions, search_sessions
from mia_serve.index.store import Snapshot, read_commit, read_snapshot
from mia_serve.index.table import ChunkTable
from mia_serve.index.vectors import Block, Storage, check_strings, check_vectors


class SessionIndex:
    """Chunk vectors with external string ids, each in a session; exact inner-product search.

    Scores are float64 inner products of the vectors as they are stored, rounded to float32, the same on every backend.
    Equal scores are ordered by id, compared as strings (code points), ascending. Rows number the chunks in order of
    insertion; a row number is for life and is never given again.

    Additions are copied once and never again: vectors stay in the blocks that they came in, in memory or mapped from
    the files of a saved index. A deletion marks a chunk; when more chunks are dead than alive the index compacts.

    A process that was forked after a search with several threads cannot search: start processes by spawn.

    Args:
        dim: Width d of the vectors.
        backend: "torch", "faiss" or "auto", which is torch: it is faster than a FAISS flat index on the CPU
            (scripts/bench_retrieval.py), needs no second copy of the vectors, and the results are the same. FAISS makes
            the first stage of `search` only; sessions are searched by torch.
        device: "auto" (CUDA where there is one), "cpu", "cuda", … With FAISS "auto" is all GPUs, where it is built for
            them and sees one.
        spec_hash: Hash of the encoder that made the vectors; kept with them.
        gpu: How FAISS uses GPUs.

    Raises:
        MiaError: If the backend is unknown or not installed, or does not run on the device.
    """

    def __init__(
        self,
        dim: int,
        backend: str = "auto",
        device: str | torch.device = "auto",
        spec_hash: str | None = None,
        gpu: GpuOptions | None = None,
    ) -> None:
        check_count(dim, "dim")
        if backend not in ("auto", "torch", "faiss"):
            raise MiaError(f"backend={backend!r}: allowed are 'auto', 'torch', 'faiss'")
        self.dim = dim
        self.spec_hash = spec_hash
        self.backend = "torch" if backend == "auto" else backend
        self._gpu: GpuOptions | None = None
        if self.backend == "faiss":
            self.device, self._gpu = faiss_device(device, gpu)
        else:
            self.device = resolve_device(device)
        self._path: Path | None = None
        self._commit = ""
        self._unsaved = False
        self._contents = self._filled(ChunkTable(), VectorBlocks(dim, self.device))

    def __len__(self) -> int:
        return len(self._contents.table.row_of)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._contents.table.row_of

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the live chunks in order of insertion."""
        table = self._contents.table
        return tuple(table.ids[i] for i in np.flatnonzero(table.alive).tolist())

    def row_of(self, chunk_id: str) -> int:
        """Return a chunk's row number.

        Raises:
            MiaError: If the id is not in the index.
        """
        table = self._contents.table
        return int(table.rows[table.position_of(chunk_id)])

    def session_of(self, chunk_id: str) -> str:
        """Return the id of a chunk's session.

        Raises:
            MiaError: If the id is not in the index.
        """
        table = self._contents.table
        return table.session_names[int(table.session[table.position_of(chunk_id)])]

    def metadata_of(self, chunk_id: str) -> dict[str, Any] | None:
        """Return a chunk's metadata; None if it has none.

        Raises:
            MiaError: If the id is not in the index.
        """
        table = self._contents.table
        position = table.position_of(chunk_id)
        return copy.deepcopy(table.metadata[position]) if table.metadata is not None else None

    def add(self, ids: Sequence[str], vectors: np.ndarray, sessions: Sequence[str], metadata: Metadata = None) -> None:
        """Append chunks; all of them or, on an error, none.

        Args:
            ids: New chunk ids.
            vectors: (n, d) finite numbers, kept as float32. Need not be unit rows: the score is the inner product.
            sessions: Session id of each chunk.
            metadata: An object of JSON values or None a chunk, for filters.

        Raises:
            MiaError: If an id is not a string, is empty, repeated or present, or a vector is not finite or not (n, d).
        """
        chunks = check_chunks(ids, vectors, sessions, metadata, self.dim)
        known = self._contents.table.row_of
        if not known.keys().isdisjoint(chunks.ids):
            position, name = next((i, name) for i, name in enumerate(chunks.ids) if name in known)
            raise MiaError(f"id {name!r} (position {position}) is already in the index: delete it first, or upsert")
        self._append(chunks)

    def upsert(
        self, ids: Sequence[str], vectors: np.ndarray, sessions: Sequence[str], metadata: Metadata = None
    ) -> None:
        """Add chunks, and replace those that are in the index: vector, session, metadata and row number are new.

        Raises:
            MiaError: As in add, but for ids that are in the index; nothing is changed then.
        """
        chunks = check_chunks(ids, vectors, sessions, metadata, self.dim)
        self._append(chunks)
        self._tidy(changed=bool(chunks.ids))

    def delete(self, ids: Sequence[str]) -> None:
        """Remove chunks by id.

        Raises:
            MiaError: If an id is not in the index or is given twice; nothing is removed then.
        """
        names = check_strings(ids, "ids")
        table = self._contents.table
        unknown = next((name for name in names if name not in table.row_of), None)
        if unknown is not None or len(set(names)) != len(names):
            what = f"id {unknown!r} is not in the index" if unknown is not None else "an id is given twice"
            raise MiaError(f"{what}: nothing was deleted; give ids of the index once each")
        table.remove(names)
        self._tidy(changed=bool(names))

    def compact(self) -> None:
        """Close up over deleted chunks; row numbers stay. Done by itself when more chunks are dead than alive."""
        contents = self._contents
        if len(contents.table.row_of) < len(contents.table):
            contents.vectors.keep(contents.table.compact())
            self._contents = self._filled(contents.table, contents.vectors)

    def search(self, queries: np.ndarray, k: int, where: Where | None = None) -> Hits:
        """Find the min(k, N) chunks of highest inner product for each query.

        Args:
            queries: (n, d) finite numbers.
            k: At least 1.
            where: Only chunks whose metadata have, for every key, the value or one of the values.

        Returns:
            Hits with arrays of shape (n, min(k, N)); N counts the chunks that the filter lets through.

        Raises:
            MiaError: If a query is not finite or not (n, d), k < 1, or the filter is no dict of plain values.
        """
        check_count(k, "k")
        check_where(where)
        given, contents = check_vectors(queries, self.dim, "queries"), self._contents
        allowed = contents.table.allowed(where)
        k = min(k, len(contents.table) if allowed is None else int(allowed.sum()))
        if not k or not len(given):
            return _hits(contents.table, np.empty((len(given), k), np.float32), np.empty((len(given), k), np.int64))
        check_process()
        with full_float32(self.device):
            batch = self._to_device(given)
            found = search_chunks(batch, contents.table, contents.vectors, k, allowed, contents.faiss)
        return _hits(contents.table, *found)

    def search_within(self, queries: np.ndarray, rows: np.ndarray, k: int, bias: np.ndarray | None = None) -> Hits:
        """Rank given rows only, for each query its own.

        Args:
            queries: (n, d) finite numbers.
            rows: (n, f) row numbers, distinct for each query, -1 where padded.
            k: At least 1.
            bias: (n, f) finite numbers added to the scores of the rows; None for none.

        Returns:
            Hits with arrays as wide as k, or as the most rows that a query has where these are fewer.

        Raises:
            MiaError: If a query or the bias is not finite or of the wrong shape, k < 1, or a row is not in the index.
        """
        check_count(k, "k")
        given, contents = check_vectors(queries, self.dim, "queries"), self._contents
        positions = self._positions(rows, len(given))
        if bias is not None:
            bias = check_bias(bias, positions.shape)
        k = min(k, int((positions >= 0).sum(axis=1).max(initial=0)))
        if not k:
            shape = (len(given), 0)
            return _hits(contents.table, np.empty(shape, np.float32), np.empty(shape, np.int64))
        check_process()
        with full_float32(self.device):
            batch = self._to_device(given)
            found = search_given(batch, contents.table, contents.vectors, positions, k, bias)
        return _hits(contents.table, *found)

    def search_sessions(
        self,
        queries: np.ndarray,
        k: int,
        pooling: Pooling = "max",
        topk: int = 3,
        beta: float = 10.0,
        where: Where | None = None,
    ) -> SessionHits:
        """Find the min(k, S) sessions of highest pooled chunk score for each query.

        Args:
            queries: (n, d) finite numbers.
            k: At least 1.
            pooling: "max" (the best chunk counts: late interaction), "topk" (mean of the topk best chunks), "mean"
                (mean of all chunk scores), "early" (cosine of the query and the mean of the chunk vectors) or "lme"
                ((1/β) ln mean exp(βs), between mean and max). None of them grows with the length of a session by
                itself.
            topk: Chunks that "topk" averages; a session with fewer chunks averages all it has.
            beta: β of "lme", at least 1e-6.
            where: As in search; sessions consist of the chunks that it lets through.

        Returns:
            Sessions, scores (n, min(k, S)), and the best chunk of each session with its score. S counts the sessions
            that have a chunk.

        Raises:
            MiaError: If a query is not finite or not (n, d), k, topk or beta is too small, or pooling or filter are
                not as above.
        """
        check_count(k, "k")
        check_where(where)
        check_pooling(pooling, topk, beta)
        given, contents = check_vectors(queries, self.dim, "queries"), self._contents
        topk = min(topk, max(1, len(self)))
        view = contents.sessions(where)
        names, table = view.members.names, contents.table
        k = min(k, len(names))
        if not k or not len(given):
            empty: list[list[str]] = [[] for _ in given]
            none = np.empty((len(given), k), np.float32)
            return SessionHits(empty, none, [list(row) for row in empty], none.copy())
        check_process()
        with full_float32(self.device):
            found = search_sessions(self._to_device(given), view, k, pooling, topk, beta)
        ids = [[names[i] for i in row] for row in found.columns.tolist()]
        chunks = [[table.ids[i] for i in row] for row in found.best.tolist()]
        return SessionHits(ids, found.scores, chunks, found.best_scores)

    def score_sessions(
        self, queries: np.ndarray, pooling: Pooling = "max", topk: int = 3, beta: float = 10.0
    ) -> SessionScores:
        """Score every session for each query, to be mixed with other scores; arguments as in search_sessions.

        Returns:
            Session ids, ascending, and scores (n, S).

        Raises:
            MiaError: As in search_sessions.
        """
        check_pooling(pooling, topk, beta)
        given = check_vectors(queries, self.dim, "queries")
        topk = min(topk, max(1, len(self)))
        view = self._contents.sessions(None)
        if not len(given) or not view.members.names:
            return SessionScores(view.members.names, np.empty((len(given), len(view.members.names)), np.float32))
        check_process()
        with full_float32(self.device):
            return SessionScores(
                list(view.members.names), score_sessions(self._to_device(given), view, pooling, topk, beta)
            )

    def save(self, path: str | Path, storage: Storage = "float32") -> None:
        """Write the index to a folder, in place of an index that is there; whole or not at all.

        Args:
            path: The folder.
            storage: "float32"; "float16" or "int8" round the vectors of the saved index, not those of this one.

        Raises:
            MiaError: If path is something else than an index, is where this one was loaded from and was changed
                since, or a number does not fit float16.
            TimeoutError: If a writer is at work there.
        """
        contents, target = self._contents, Path(path)
        known = self._commit if self._path is not None and target.absolute() == self._path else None
        self._commit = write_contents(target, contents.table, contents.vectors, self.spec_hash, storage, known)
        self._path, self._unsaved = target.absolute(), False

    @classmethod
    def load(
        cls,
        path: str | Path,
        expected_spec_hash: str | None = None,
        *,
        backend: str = "auto",
        device: str | torch.device = "auto",
        verify: bool = True,
        gpu: GpuOptions | None = None,
    ) -> SessionIndex:
        """Open a folder written by save or by IndexWriter, on any backend; vectors stay mapped from its files.

        Args:
            path: The folder.
            expected_spec_hash: Hash of the encoder that will make the queries; None: not checked.
            backend: As in the constructor.
            device: As in the constructor.
            verify: Whether to check the vectors' checksums, which reads them once.
            gpu: As in the constructor.

        Raises:
            FileNotFoundError: If there is no index.
            MiaError: If its vectors are another encoder's, or its files are damaged.
        """
        snapshot = read_snapshot(path, expected_spec_hash, verify)
        index = cls(snapshot.dim, backend, device, snapshot.spec_hash, gpu)
        index._take(Path(path), snapshot)
        return index

    def reload(self) -> bool:
        """Take over what was committed to the folder since it was loaded or saved; nothing waits for a writer.

        Returns:
            Whether there was something newer.

        Raises:
            FileNotFoundError: If the folder holds no index any more.
            MiaError: If this index was never loaded or saved, has changes of its own that are not saved, or the
                folder's vectors are now another encoder's.
        """
        if self._path is None:
            raise MiaError("this index has no folder: reload is for an index that was loaded or saved")
        if read_commit(self._path) == self._commit:
            return False
        if self._unsaved:
            raise MiaError(f"{self._path}: has a newer state, but this index has unsaved changes: load it anew")
        snapshot = read_snapshot(self._path, verify=False)
        if (snapshot.dim, snapshot.spec_hash) != (self.dim, self.spec_hash):
            raise MiaError(
                f"{self._path}: now holds vectors of dim {snapshot.dim} and encoder {snapshot.spec_hash}, not of "
                f"{self.dim} and {self.spec_hash}: load it anew"
            )
        self._take(self._path, snapshot)
        return True

    def _take(self, path: Path, snapshot: Snapshot) -> None:
        contents = self._filled(*read_contents(snapshot, self.device))
        self._contents, self._path, self._commit, self._unsaved = contents, path.absolute(), snapshot.commit, False

    def _filled(self, table: ChunkTable, vectors: VectorBlocks) -> Contents:
        return Contents(table, vectors, FaissFlat(self.dim, self._gpu) if self.backend == "faiss" else None)

    def _append(self, chunks: Chunks) -> None:
        if not chunks.ids:
            return
        contents = self._contents
        copied = np.array(chunks.vectors, dtype=np.float32, order="C")  # the caller may reuse its array
        known = contents.table.row_of
        contents.table.remove([name for name in chunks.ids if name in known])
        contents.table.append(chunks.ids, chunks.sessions, chunks.metadata)
        contents.vectors.append(Block(copied), own=True)
        contents.changed()
        self._unsaved = True

    def _tidy(self, changed: bool) -> None:
        if not changed:
            return
        self._contents.changed()
        self._unsaved = True
        if len(self._contents.table) > 2 * len(self):
            self.compact()

    def _positions(self, rows: np.ndarray, count: int) -> np.ndarray:
        table, rows = self._contents.table, np.asarray(rows)
        if rows.ndim != 2 or len(rows) != count or not np.issubdtype(rows.dtype, np.integer):
            raise MiaError(f"rows {rows.shape} {rows.dtype}: expected ({count}, f) integers")
        positions = table.positions(rows.astype(np.int64))
        wrong = rows[(positions < 0) & (rows != -1)]
        if len(wrong):
            raise MiaError(
                f"rows hold {wrong[0]}, which is no chunk of the index: allowed are -1..{table.next_row - 1}, "
                "without those of deleted chunks"
            )
        return positions

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(self.device)


def _hits(table: ChunkTable, scores: np.ndarray, positions: np.ndarray) -> Hits:
    ids = [[table.ids[i] for i in row if i >= 0] for row in positions.tolist()]
    rows = np.where(positions >= 0, table.rows[positions], -1) if len(table) else positions
    return Hits(ids, scores, rows)
