"""What the tests of stored indexes share: reading one into a dict, and chunks to put into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mia_serve.index.manifest import LOCK, MANIFEST, parse_manifest
from mia_serve.index.store import read_snapshot
from mia_serve.index.vectors import decode

DIM = 4
Contents = dict[str, tuple[int, str, Any, tuple[float, ...]]]


def contents(path: Path) -> Contents:
    """Live chunks of an index: id -> (row, session, metadata, vector)."""
    found: Contents = {}
    last = -1
    for segment in read_snapshot(path).segments:
        assert segment.rows[0] > last and (np.diff(segment.rows) > 0).all()
        last = segment.rows[-1]
        vectors = decode(segment.vectors)
        assert len(segment.ids) == len(segment.sessions) == len(segment.rows) == len(segment.alive) == len(vectors)
        for i in np.flatnonzero(segment.alive).tolist():
            assert segment.ids[i] not in found
            metadata = segment.metadata[i] if segment.metadata is not None else None
            found[segment.ids[i]] = (int(segment.rows[i]), segment.sessions[i], metadata, tuple(vectors[i].tolist()))
    return found


def chunk_vectors(*numbers: int) -> np.ndarray:
    """A vector a number, exact in float16: (n, 4)."""
    return np.array([[number % 97, number // 97, 1, -number % 5] for number in numbers], np.float32)


def chunks(start: int, end: int) -> tuple[list[str], np.ndarray, list[str]]:
    """Ids, vectors and sessions of chunks c<start> … c<end - 1>."""
    numbers = range(start, end)
    return [f"c{i}" for i in numbers], chunk_vectors(*numbers), [f"s{i // 3}" for i in numbers]


def leftovers(path: Path) -> set[str]:
    """Names in an index's folder that belong to no commit."""
    manifest = parse_manifest(path, (path / MANIFEST).read_bytes())
    named = {MANIFEST, LOCK} | {segment.name for segment in manifest.segments}
    named |= {segment.tombstones.name for segment in manifest.segments if segment.tombstones}
    named |= {manifest.ranges.name} if manifest.ranges else set()
    return {item.name for item in path.iterdir()} - named
