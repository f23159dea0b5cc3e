"""The segments of an index while a writer changes them: rows come and go, ids are known to the writer alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mia_serve.index.manifest import SegmentEntry
from mia_serve.index.segment_writer import SegmentWriter, copy_rows, write_file

_MAX_SEGMENTS = 32


@dataclass
class _Part:
    """A segment that is on the disk, and what is alive of it."""

    entry: SegmentEntry
    rows: np.ndarray  # (n,) int64
    alive: np.ndarray  # (n,) bool
    changed: bool = False  # rows were deleted that its tombstones do not tell


class SegmentStack:
    """Segments by ascending rows, the newest one perhaps still being written.

    Args:
        root: Folder of the index.
        dim: Width of the vectors.
        storage: As in the manifest.
        generation: Number of the last commit; names of new files carry the next one, so that none is used twice.
    """

    def __init__(self, root: Path, dim: int, storage: str, generation: int) -> None:
        self._root, self._dim, self._storage, self._generation = root, dim, storage, generation
        self._names = 0
        self._parts: list[_Part] = []
        self._open: SegmentWriter | None = None
        self._first = 0  # row of the open segment
        self._dead: set[int] = set()  # rows of the open segment

    def load(self, entry: SegmentEntry, rows: np.ndarray, alive: np.ndarray) -> None:
        """Put a committed segment on the stack."""
        self._parts.append(_Part(entry, rows, alive))

    def append(
        self,
        ids: Sequence[str],
        sessions: Sequence[str],
        rows: np.ndarray,
        metadata: Sequence[bytes] | None,
        vectors: Iterable[np.ndarray],
    ) -> None:
        """Write chunks at the end of the open segment; vectors come in pieces, as they are stored."""
        if self._open is None:
            self._open, self._first = SegmentWriter(self._root / self._new_name("segment")), int(rows[0])
        for piece in vectors:
            self._open.write_vectors(piece)
        self._open.write_entries(ids, sessions, rows, metadata)

    def bury(self, rows: np.ndarray) -> None:
        """Mark live rows as deleted."""
        if self._open is not None:
            self._dead.update(rows[rows >= self._first].tolist())
            rows = rows[rows < self._first]
        place = np.searchsorted([part.rows[0] for part in self._parts], rows, "right") - 1
        for i in np.unique(place).tolist():
            part = self._parts[i]
            part.alive[np.searchsorted(part.rows, rows[place == i])] = False
            part.changed = True

    def close(self) -> None:
        """Flush the open segment; the next chunks begin another."""
        if self._open is None:
            return
        entry, rows = self._open.finish()
        self._open = None
        alive = np.ones(len(rows), bool)
        alive[np.searchsorted(rows, sorted(self._dead))] = False
        self._parts.append(_Part(entry, rows, alive, changed=bool(self._dead)))
        self._dead = set()

    def compact(self) -> bool:
        """Copy all live rows into one segment; returns whether there was anything to do."""
        self.close()
        if len(self._parts) < 2 and all(part.alive.all() for part in self._parts):
            return False
        self._merge(0)
        return True

    def tidy(self) -> None:
        """Compact when more rows are dead than alive; merge the newest segments when there are too many."""
        self.close()
        self._parts = [part for part in self._parts if part.alive.any()]
        sizes = [len(part.rows) for part in self._parts]
        if sum(sizes) > 2 * sum(int(part.alive.sum()) for part in self._parts):
            self._merge(0)
        elif len(sizes) > _MAX_SEGMENTS:
            # A row is copied a number of times that grows like the logarithm of the index.
            start, merged = len(sizes) - 2, sum(sizes[-2:])
            while start and sizes[start - 1] <= 2 * merged:
                start -= 1
                merged += sizes[start]
            self._merge(start)

    def entries(self) -> tuple[SegmentEntry, ...]:
        """Write new tombstones, and return what a manifest says of the segments."""
        for part in self._parts:
            if part.changed:
                path = self._root / f"{self._new_name('tombstones')}.bin"
                part.entry = part.entry._replace(tombstones=write_file(path, part.rows[~part.alive].astype("<i8")))
                part.changed = False
        return tuple(part.entry for part in self._parts)

    def committed(self, generation: int) -> None:
        """Note that what entries returned was committed."""
        self._generation, self._names = generation, 0

    def discard(self) -> None:
        """Close the open segment's files."""
        if self._open is not None:
            self._open.discard()

    def _merge(self, start: int) -> None:
        """Copy the live rows of the segments from start on into one."""
        old = [part for part in self._parts[start:] if part.alive.any()]
        new = []
        if old:
            target = SegmentWriter(self._root / self._new_name("segment"))
            try:
                for part in old:
                    copy_rows(self._root, part.entry, part.alive, self._dim, self._storage, target)
                entry, rows = target.finish()
            finally:
                target.discard()
            new = [_Part(entry, rows, np.ones(len(rows), bool))]
        self._parts[start:] = new

    def _new_name(self, what: str) -> str:
        self._names += 1
        return f"{what}-{self._generation + 1:08d}-{self._names:02d}"
