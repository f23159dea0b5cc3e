"""An index's contents from and to a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mia_serve.core.errors import MiaError
from mia_serve.index.blocks import VectorBlocks
from mia_serve.index.manifest import MANIFEST
from mia_serve.index.store import Snapshot, read_commit
from mia_serve.index.table import ChunkTable
from mia_serve.index.vectors import Storage, calibrate, decode
from mia_serve.index.writer import IndexWriter

_TALL = 1 << 14  # rows written at once


def read_contents(snapshot: Snapshot, device: torch.device) -> tuple[ChunkTable, VectorBlocks]:
    """Make table and vectors of a snapshot; vectors stay mapped from the files."""
    table, vectors = ChunkTable(), VectorBlocks(snapshot.dim, device)
    for segment in snapshot.segments:
        table.append(segment.ids, segment.sessions, segment.metadata, segment.rows, segment.alive)
        vectors.append(segment.vectors, own=False)
    table.next_row = max(table.next_row, snapshot.next_row)
    return table, vectors


def write_contents(
    path: Path, table: ChunkTable, vectors: VectorBlocks, spec_hash: str | None, storage: Storage, known: str | None
) -> str:
    """Write the live chunks, with their row numbers, in place of what is in the folder; returns the commit.

    Args:
        path: The folder.
        table: The chunks.
        vectors: Theirs.
        spec_hash: Hash of the encoder.
        storage: Of the saved vectors.
        known: The commit that may be replaced, if there is one; None: any.

    Raises:
        MiaError: If path is something else than an index, holds another commit than the known one, or a number does
            not fit the storage.
        TimeoutError: If a writer is at work there.
    """
    ranges = _ranges(vectors, table.alive) if storage == "int8" else None
    with IndexWriter(path, vectors.dim, spec_hash=spec_hash, storage=storage, ranges=ranges, replace=True) as writer:
        if known is not None and (path / MANIFEST).is_file() and read_commit(path) != known:
            raise MiaError(
                f"{path}: was changed since this index was loaded or saved, and saving would undo that: load it anew "
                "and make the changes there, or save to another folder"
            )
        first = 0
        for block in vectors.blocks:
            for start in range(0, len(block.data), _TALL):
                part = slice(start, min(start + _TALL, len(block.data)))
                here = first + part.start + np.flatnonzero(table.alive[first + part.start : first + part.stop])
                chosen = here.tolist()
                metadata = None if table.metadata is None else [table.metadata[i] for i in chosen]
                writer.add(
                    [table.ids[i] for i in chosen],
                    decode(block, here - first),
                    [table.session_names[code] for code in table.session[here].tolist()],
                    metadata,
                    table.rows[here],
                )
            first += len(block.data)
        writer.skip_rows(table.next_row)
        writer.commit()
        return read_commit(path)


def _ranges(vectors: VectorBlocks, alive: np.ndarray) -> np.ndarray | None:
    """Return int8 ranges for all live vectors: those that they have, or their extremes."""
    known = [block.ranges for block in vectors.blocks if block.ranges is not None]
    if known and len(known) == len(vectors.blocks) and all(np.array_equal(ranges, known[0]) for ranges in known):
        return known[0]
    low, high, count = np.full(vectors.dim, np.inf, np.float32), np.full(vectors.dim, -np.inf, np.float32), 0
    for start, tile in vectors.tiles(_TALL):
        part = tile.cpu().numpy()[alive[start : start + len(tile)]]
        if len(part):
            low, high, count = np.minimum(low, part.min(0)), np.maximum(high, part.max(0)), count + len(part)
    if not count:
        return None
    # `calibrate` reads extremes only, and trusts those of single dimensions where there are enough vectors.
    return calibrate(np.repeat(np.stack([low, high]), max(1, min(count, 512) // 2), axis=0))
