"""Chunks, vectors, and what searches make of them until the next change."""

from __future__ import annotations

from mia_serve.index.blocks import VectorBlocks
from mia_serve.index.faiss_flat import FaissFlat
from mia_serve.index.filters import Where
from mia_serve.index.session_scores import Members, SessionMeans
from mia_serve.index.session_search import SessionView
from mia_serve.index.table import ChunkTable


class Contents:
    """What an index holds at one time, and what searches made of it; replaced whole by reload."""

    def __init__(self, table: ChunkTable, vectors: VectorBlocks, faiss: FaissFlat | None) -> None:
        self.table, self.vectors, self.faiss = table, vectors, faiss
        self._view: SessionView | None = None

    def changed(self) -> None:
        """Forget what depends on who is alive."""
        self._view = None

    def sessions(self, where: Where | None) -> SessionView:
        """Return the sessions that the allowed chunks make up; without a filter they are made once."""
        if self._view is not None and not where:
            return self._view
        allowed = self.table.allowed(where)
        members = Members(self.table, allowed)
        view = SessionView(self.table, self.vectors, allowed, members, SessionMeans(self.vectors, members))
        if not where:
            self._view = view
        return view
