"""One version of a collection, as readers see it: it never changes, whatever is written meanwhile."""

from __future__ import annotations

from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from mia_serve.core import MiaError
from mia_serve.lexical import BM25Index
from mia_serve.mindscape.mindscape import Mindscape
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.retriever import Retriever

if TYPE_CHECKING:
    from mia_serve.core import Encoder


class Snapshot:
    """A version of a collection with all that searches it.

    Hold on to one for the time of a request: all that it answers is of one version. It goes when its last reader does.

    Args:
        version: Number of writes that it holds.
        mindscape: Chunks and sessions; None for none.
        e1: Query-only encoder.
        e2: Encoder of (q, σ) pairs, if there is one.
        vectors: Vectors of the mindscape, as `Retriever` takes them.
        settings: Further arguments of the retriever.
    """

    def __init__(
        self,
        version: int,
        mindscape: Mindscape | None,
        e1: Encoder,
        e2: Encoder | None,
        vectors: dict[str, np.ndarray],
        settings: dict[str, Any],
    ) -> None:
        self.version = version
        self.mindscape = mindscape if mindscape is not None else _empty()
        self.retriever = Retriever(self.mindscape, e1, e2, vectors=vectors, **settings)
        self.searcher = AsyncRetriever(self.retriever)
        self._lock = Lock()
        self._lexical: BM25Index | None = None

    @property
    def empty(self) -> bool:
        """Whether it holds nothing; then there is nothing to search either."""
        return not self.mindscape.chunks

    @property
    def vectors(self) -> dict[str, np.ndarray]:
        """Vectors of the mindscape, as `Retriever` takes them."""
        return self.retriever.vectors

    @property
    def lexical(self) -> BM25Index:
        """BM25 over the texts of the chunks, columns in their order; made when first asked for, which takes a while."""
        with self._lock:  # two searches at once would both build it
            if self._lexical is None:
                chunks = self.mindscape.chunks
                self._lexical = BM25Index([c.id for c in chunks], [c.text for c in chunks])
            return self._lexical

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {chunk.id: row for row, chunk in enumerate(self.mindscape.chunks)}

    def row_of(self, chunk_id: str) -> int:
        """Return the row of a chunk in `mindscape.chunks`.

        Raises:
            MiaError: There is no such chunk.
        """
        row = self._rows.get(chunk_id)
        if row is None:
            raise MiaError(f"there is no chunk {chunk_id!r} in version {self.version} of this collection")
        return row


def _empty() -> Mindscape:
    """Return a mindscape of nothing: none can be made or saved, but a collection that holds nothing can be read."""
    empty = object.__new__(Mindscape)
    fields = {"chunks": (), "sessions": (), "summarizer": "", "books": (), "nodes": (), "window": None, "tails": ()}
    for name, value in (fields | {"notes": {}, "session_of": np.empty(0, np.int64)}).items():
        object.__setattr__(empty, name, value)
    return empty
