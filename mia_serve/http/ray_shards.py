"""One shard of a collection: whole books in a row, searched alone. Nothing in here knows of Ray."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.index import Hits, SessionIndex
from mia_serve.index.session_index import check_count
from mia_serve.mindscape import Mindscape
from mia_serve.mindscape.records import Chunk, Session
from mia_serve.mindscape.store import read_manifest
from mia_serve.mindscape.vectors import vector_name
from mia_serve.signature.prior import biased_rows

_TABLES = ("chunks.parquet", "sessions.parquet")


class Span(NamedTuple):
    """The chunks of one shard.

    Attributes:
        folder: The mindscape.
        start: First row of `mindscape.chunks`.
        stop: One past the last.
        mark: Checksums of the mindscape's tables, so that no shard ever answers from another state than the others.
    """

    folder: str
    start: int
    stop: int
    mark: str


class Members(NamedTuple):
    """What a signature is chosen from: chunks, their sessions, and the vectors of both, in the collection's order.

    Attributes:
        rows: (c,) int64, ascending rows of the collection's chunks.
        chunks: Their records.
        vectors: (c, d) float32.
        session_rows: (s,) int64, ascending rows of the sessions that they lie in.
        sessions: Their records.
        session_vectors: (s, d) float32, of the summaries.
    """

    rows: np.ndarray
    chunks: list[Chunk]
    vectors: np.ndarray
    session_rows: np.ndarray
    sessions: list[Session]
    session_vectors: np.ndarray


def split_books(folder: str | Path, shards: int) -> list[Span]:
    """Part the books of a mindscape into runs of about as many chunks each.

    Args:
        folder: The mindscape.
        shards: Runs wanted; as many as there are books where that is fewer, since none is split.

    Raises:
        MiaError: The folder is no mindscape, or shards < 1.
        FileNotFoundError: There is no such folder.
    """
    import pyarrow.parquet as pq

    mark = _mark(folder)
    books = pq.read_table(Path(folder) / _TABLES[0], columns=["book_id"]).column("book_id").to_pylist()
    ends = np.cumsum([sum(1 for _ in run) for _, run in groupby(books)])
    check_count(shards, "shards")
    shards = min(shards, len(ends))
    cuts = [0]
    for part in range(1, shards):
        ideal = len(books) * part / shards
        # Books enough must be left for the shards to come, and one at least go to each before.
        free = ends[part - 1 : len(ends) - (shards - part)]
        free = free[free > cuts[-1]]
        cuts.append(int(free[np.abs(free - ideal).argmin()]))
    return [Span(str(folder), a, b, mark) for a, b in zip(cuts, [*cuts[1:], len(books)], strict=True)]


class Shard:
    """Searches the chunks of a span, with vectors that the mindscape keeps; no encoder is needed here.

    Rows, of chunks and of sessions, are the collection's everywhere, not the shard's own.

    Args:
        span: What of the collection is held.

    Raises:
        MiaError: The mindscape is not the one that was split.
    """

    def __init__(self, span: Span) -> None:
        whole = Mindscape.load(span.folder)
        if _mark(span.folder) != span.mark:
            raise MiaError(f"{span.folder} has changed since it was split into shards; start the service again")
        self.span = span
        self.chunks = whole.chunks[span.start : span.stop]
        self.session_of = whole.session_of[span.start : span.stop].copy()
        self.first_session = int(self.session_of[0])
        self.sessions = whole.sessions[self.first_session : int(self.session_of[-1]) + 1]
        self._session_row = {session.id: self.first_session + i for i, session in enumerate(self.sessions)}
        self._indexes: dict[str, SessionIndex] = {}
        self._vectors: dict[str, np.ndarray] = {}

    def search(
        self,
        spec_hash: str,
        queries: np.ndarray,
        k: int,
        sessions: np.ndarray | None = None,
        added: np.ndarray | None = None,
    ) -> Hits:
        """Find the k best chunks of this shard.

        Args:
            spec_hash: Encoder that made the queries.
            queries: (n, d) float32.
            k: Most hits a query.
            sessions: (n, K) int64, -1 padded: sessions of each query's signature, in whatever shard they lie.
            added: (n, K) float64: what each adds to the scores of its chunks.

        Raises:
            MiaError: The mindscape keeps no vectors of that encoder.
        """
        index = self._index(spec_hash)
        found = index.search(queries, k)
        if sessions is not None and added is not None:
            rows, bias = biased_rows(self.session_of, sessions, added, found.rows, closed=False)
            found = index.search_within(queries, rows, k, bias)
        return found._replace(rows=np.where(found.rows >= 0, found.rows + self.span.start, -1))

    def members(self, spec_hash: str, rows: np.ndarray, sessions: np.ndarray) -> Members:
        """Return chunks and sessions with their vectors, of those asked for the ones that lie here.

        Args:
            spec_hash: Encoder whose vectors are wanted.
            rows: Chunks, any int64.
            sessions: Sessions wanted beside those of the chunks; they come with the first chunk of each.
        """
        ours = np.unique(sessions[(sessions >= self.first_session) & (sessions <= self.session_of[-1])])
        local = rows[(rows >= self.span.start) & (rows < self.span.stop)] - self.span.start
        lacking = ours[~np.isin(ours, self.session_of[local])]
        local = np.union1d(local, np.searchsorted(self.session_of, lacking)).astype(np.int64)
        held = np.unique(self.session_of[local])
        return Members(
            local + self.span.start,
            [self.chunks[row] for row in local.tolist()],
            np.asarray(self._open(spec_hash, "chunks")[local + self.span.start], np.float32),
            held,
            [self.sessions[row - self.first_session] for row in held.tolist()],
            np.asarray(self._open(spec_hash, "sessions")[held], np.float32),
        )

    def warm(self, spec_hashes: list[str]) -> int:
        """Read the vectors of these encoders now instead of at the first search; return how many chunks there are.

        Raises:
            MiaError: The mindscape keeps no vectors of one of them.
        """
        for spec_hash in spec_hashes:
            self._index(spec_hash)
            self._open(spec_hash, "sessions")
        return len(self.chunks)

    def texts(self, rows: list[int]) -> dict[int, Chunk]:
        """Return the chunks of those rows that lie here, by row."""
        start, stop = self.span.start, self.span.stop
        return {row: self.chunks[row - start] for row in rows if start <= row < stop}

    def sessions_of(self, summaries: list[str], ids: list[str]) -> tuple[dict[str, str], dict[str, int]]:
        """Look up sessions of this shard: summary -> id of the first session that has it, and id -> row."""
        wanted = set(summaries)
        known: dict[str, str] = {}
        for session in self.sessions:
            if session.summary in wanted:
                known.setdefault(session.summary, session.id)
        rows = {name: self._session_row[name] for name in {*ids, *known.values()} if name in self._session_row}
        return known, rows

    def _open(self, spec_hash: str, part: str) -> np.ndarray:
        name = vector_name(part, spec_hash)
        if name not in self._vectors:
            if name not in read_manifest(self.span.folder)["vectors"]:
                raise MiaError(
                    f"{self.span.folder} keeps no vectors of the encoder with spec hash {spec_hash}: "
                    "run `mia-serve embed` with it, then start the service again"
                )
            self._vectors[name] = Mindscape.load_vectors(self.span.folder, name, spec_hash)
        return self._vectors[name]

    def _index(self, spec_hash: str) -> SessionIndex:
        if spec_hash not in self._indexes:
            vectors = self._open(spec_hash, "chunks")[self.span.start : self.span.stop]
            index = SessionIndex(vectors.shape[1], device="cpu", spec_hash=spec_hash)
            index.add([c.id for c in self.chunks], np.asarray(vectors), [c.session_id for c in self.chunks])
            self._indexes[spec_hash] = index
        return self._indexes[spec_hash]


def _mark(folder: str | Path) -> str:
    files = read_manifest(folder)["files"]
    return " ".join(files[name]["sha256"] for name in _TABLES)
