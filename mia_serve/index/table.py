"""What an index knows of its chunks beside their vectors: ids, row numbers, sessions, metadata, who is alive.

A chunk lies at a position, which is where its vector is; compaction moves it. Its row number is for life.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.index.filters import MetadataFilter, Where

Metadata = dict[str, Any] | None

_FEW = 16  # new ids are searched for in the sorted ones where there are this many times fewer of them


class Column:
    """A number a position; appended to in pieces, joined when they are read."""

    def __init__(self, dtype: type) -> None:
        self._parts: list[np.ndarray] = [np.empty(0, dtype)]

    def append(self, values: np.ndarray) -> None:
        """Add values at the end."""
        self._parts.append(values.astype(self._parts[0].dtype, copy=False))

    @property
    def values(self) -> np.ndarray:
        """All values; may be written to."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def keep(self, kept: np.ndarray) -> None:
        """Drop the positions that are False."""
        self._parts = [self.values[kept]]


class ChunkTable:
    """Chunks by position, deleted ones included until a compaction.

    Attributes:
        ids: Chunk ids.
        row_of: Row numbers of the live chunks by id.
        next_row: Least row number that was never given.
        metadata: An object or None a position; None while no chunk ever had any.
        session_names: Session ids by code; some may have no live chunk.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self.next_row = 0
        self.metadata: list[Metadata] | None = None
        self.session_names: list[str] = []
        self._code_of: dict[str, int] = {}
        self._rows, self._alive, self._session = Column(np.int64), Column(np.bool_), Column(np.int32)
        self._order, self._session_order = np.empty(0, np.int32), np.empty(0, np.int32)
        self._rank, self._session_rank = np.empty(0, np.int32), np.empty(0, np.int32)
        self._filters: dict[str, MetadataFilter] = {}

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.ids)

    @property
    def rows(self) -> np.ndarray:
        """Row numbers by position, (P,) int64, ascending."""
        return self._rows.values

    @property
    def alive(self) -> np.ndarray:
        """Which positions are live, (P,) bool."""
        return self._alive.values

    @property
    def session(self) -> np.ndarray:
        """Session codes by position, (P,) int32."""
        return self._session.values

    def append(
        self,
        ids: Sequence[str],
        sessions: Sequence[str],
        metadata: Sequence[Metadata] | None,
        rows: np.ndarray | None = None,
        alive: np.ndarray | None = None,
    ) -> None:
        """Put checked chunks at the end; their rows are the next ones, or given."""
        start, count = len(self.ids), len(ids)
        rows = np.arange(self.next_row, self.next_row + count) if rows is None else rows
        if alive is None:
            self.row_of.update(zip(ids, rows.tolist(), strict=True))
        else:
            self.row_of.update(zip(compress(ids, alive.tolist()), rows[alive].tolist(), strict=True))
        self.ids += ids
        self._rows.append(rows)
        self._alive.append(np.ones(count, bool) if alive is None else alive)
        for name in sessions:
            if name not in self._code_of:
                self._code_of[name] = len(self.session_names)
                self.session_names.append(name)
        self._session.append(np.fromiter(map(self._code_of.__getitem__, sessions), np.int32, count))
        if metadata is not None and self.metadata is None:
            self.metadata = [None] * start
        if self.metadata is not None:
            self.metadata += [None] * count if metadata is None else [m if m is None else dict(m) for m in metadata]
        if count:
            self.next_row = max(self.next_row, int(rows[-1]) + 1)

    def remove(self, ids: Sequence[str]) -> None:
        """Mark live chunks as deleted."""
        rows = np.fromiter(map(self.row_of.pop, ids), np.int64, len(ids))
        self.alive[np.searchsorted(self.rows, rows)] = False

    def compact(self) -> np.ndarray:
        """Close up over the deleted positions; returns which ones were kept, (P,) bool."""
        kept = self.alive.copy()
        place = np.cumsum(kept) - 1
        order = self.order()
        self._order = place[order[kept[order]]].astype(np.int32)
        self._rank = _inverse(self._order)
        self.ids = list(compress(self.ids, kept))
        if self.metadata is not None:
            self.metadata = list(compress(self.metadata, kept))
        for column in (self._rows, self._alive, self._session):
            column.keep(kept)
        codes, session = np.unique(self.session, return_inverse=True)
        self.session_names = [self.session_names[code] for code in codes.tolist()]
        self._code_of = {name: code for code, name in enumerate(self.session_names)}
        self._session = Column(np.int32)
        self._session.append(session)
        self._session_order = self._session_rank = np.empty(0, np.int32)
        self._filters = {}
        return kept

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Return the positions of row numbers, -1 where there is no live chunk of that number."""
        numbers = self.rows
        if not len(numbers):
            return np.full(rows.shape, -1, np.int64)
        place = np.minimum(np.searchsorted(numbers, rows), len(numbers) - 1)
        return np.where((numbers[place] == rows) & self.alive[place], place, -1)

    def position_of(self, chunk_id: str) -> int:
        """Return the position of a live chunk.

        Raises:
            MiaError: If the id is not in the index.
        """
        if chunk_id not in self.row_of:
            raise MiaError(f"id {chunk_id!r} is not in the index")
        return int(np.searchsorted(self.rows, self.row_of[chunk_id]))

    def order(self) -> np.ndarray:
        """Return all positions by ascending id, (P,) int32; what is sorted already is not sorted again."""
        self._order = _extended(self._order, self.ids)
        return self._order

    def rank(self) -> np.ndarray:
        """Return the place of each position's id among the sorted ids, (P,) int32."""
        if len(self._rank) < len(self.ids):
            self._rank = _inverse(self.order())
        return self._rank

    def session_rank(self) -> np.ndarray:
        """Return the place of each code's session id among the sorted session ids, (C,) int32."""
        if len(self._session_rank) < len(self.session_names):
            self._session_order = _extended(self._session_order, self.session_names)
            self._session_rank = _inverse(self._session_order)
        return self._session_rank

    def allowed(self, where: Where | None) -> np.ndarray | None:
        """Return the live positions whose metadata agree, (P,) bool; None where these are all positions.

        Raises:
            MiaError: If where is not a dict of plain values or lists of them.
        """
        if not where:
            return None if len(self.row_of) == len(self.ids) else self.alive
        found = self.alive.copy()
        for key, wanted in where.items():
            column = self._filters.setdefault(key, MetadataFilter(key))
            found &= column.matches(self.metadata, len(self.ids), wanted)
        return found


def _extended(order: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return all places by ascending name, given those of the first len(order) names."""
    known, get = len(order), names.__getitem__
    fresh = sorted(range(known, len(names)), key=get)
    if not fresh:
        return order
    if len(fresh) * _FEW < known:
        return np.insert(order, [bisect_left(order, get(place), key=get) for place in fresh], fresh)
    return np.array(sorted([*order.tolist(), *fresh], key=get), np.int32)  # two sorted runs, which the sort merges


def _inverse(order: np.ndarray) -> np.ndarray:
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank
