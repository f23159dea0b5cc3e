"""Write a segment's files front to back, and copy the live rows of old segments into a new one.

Nothing is held but the block in hand; checksums are taken while writing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.core.storage import sync
from mia_serve.index.manifest import (
    IDS,
    METADATA,
    OFFSETS,
    ROWS,
    SESSION_OF,
    SESSIONS,
    VECTORS,
    FileEntry,
    SegmentEntry,
)
from mia_serve.index.store import check_digest, open_checked, read_entries, segment_file, split_ids
from mia_serve.index.vectors import DTYPES

_COPY_BYTES = 1 << 23  # of vectors that a copy holds at once
_NULL = b"null"
_METADATA_DEPTH = 100  # objects and lists within one another: what is written must be read, on any stack


class HashedFile:
    """A new file, written from front to back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "xb")  # noqa: SIM115
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | np.ndarray) -> None:
        """Append bytes, or an array's in C order."""
        if isinstance(data, np.ndarray):
            flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
            self._put(flat, flat.nbytes)
        else:
            self._put(data, len(data))

    def finish(self) -> FileEntry:
        """Flush to the disk and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(self._path.name, self._size, self._digest.hexdigest())

    def discard(self) -> None:
        """Close a file that is not wanted, whatever the disk says."""
        with suppress(OSError):
            self._file.close()

    def _put(self, data: bytes | memoryview, size: int) -> None:
        if size:
            self._file.write(data)
            self._digest.update(data)
            self._size += size


def write_file(path: Path, content: bytes | np.ndarray) -> FileEntry:
    """Write a whole new file and flush it to the disk."""
    file = HashedFile(path)
    try:
        file.write(content)
        return file.finish()
    finally:
        file.discard()


class SegmentWriter:
    """A segment on its way to the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._files: dict[str, HashedFile] = {}
        self._codes: dict[str, int] = {}
        self._rows: list[np.ndarray] = []
        self._count = 0  # rows that have ids
        self._end = 0  # bytes of ids
        try:
            for name in (VECTORS, IDS, OFFSETS, SESSION_OF, ROWS):
                self._files[name] = HashedFile(folder / name)
            self._files[OFFSETS].write(np.zeros(1, "<i8"))
        except BaseException:
            self.discard()
            raise

    def write_entries(
        self, ids: Sequence[str], sessions: Iterable[str], rows: np.ndarray, metadata: Sequence[bytes] | None
    ) -> None:
        """Append all but the vectors of m rows.

        Args:
            ids: m ids.
            sessions: m session ids.
            rows: (m,) ascending numbers above those before.
            metadata: m JSON values in a line each, without its end; None: there is none.
        """
        encoded = [chunk_id.encode() for chunk_id in ids]
        ends = np.fromiter(map(len, encoded), "<i8", len(encoded)).cumsum() + self._end
        codes = self._codes
        places = [codes.setdefault(session, len(codes)) for session in sessions]
        self._write_metadata(metadata, len(encoded))
        self._files[IDS].write(b"".join(encoded))
        self._files[OFFSETS].write(ends.astype("<i8"))
        self._files[SESSION_OF].write(np.array(places, "<u4"))
        self._files[ROWS].write(rows.astype("<i8"))
        self._rows.append(rows)
        self._count += len(encoded)
        self._end = int(ends[-1]) if len(ends) else self._end

    def write_vectors(self, data: np.ndarray) -> None:
        """Append vectors (m, d) as stored."""
        self._files[VECTORS].write(data)

    def finish(self) -> tuple[SegmentEntry, np.ndarray]:
        """Flush everything to the disk; returns what the manifest says of it, and the row numbers."""
        names = self._files[SESSIONS] = HashedFile(self.folder / SESSIONS)
        names.write(json.dumps(list(self._codes)).encode())
        files = tuple(file.finish() for file in self._files.values())
        sync(self.folder)
        rows = np.concatenate([np.empty(0, np.int64), *self._rows])
        return SegmentEntry(self.folder.name, self._count, files, None), rows

    def discard(self) -> None:
        """Close the files; the folder is left to the sweep."""
        for file in self._files.values():
            file.discard()

    def _write_metadata(self, metadata: Sequence[bytes] | None, count: int) -> None:
        if metadata is None and METADATA not in self._files:
            return
        if METADATA not in self._files:
            self._files[METADATA] = HashedFile(self.folder / METADATA)
            self._files[METADATA].write((_NULL + b"\n") * self._count)
        lines = [_NULL] * count if metadata is None else metadata
        self._files[METADATA].write(b"".join(line + b"\n" for line in lines))


def metadata_lines(metadata: Sequence[dict[str, Any] | None] | None, count: int) -> list[bytes] | None:
    """Write metadata as JSON, a line a row; None if there is none.

    Raises:
        MiaError: If there is not one a row, or one is not an object of JSON values.
    """
    if metadata is None:
        return None
    values = list(metadata)
    if len(values) != count:
        raise MiaError(f"{len(values)} metadata, {count} ids: give one (or None) a chunk")
    if all(value is None for value in values):
        return None
    return [metadata_line(value, f"metadata, position {position}") for position, value in enumerate(values)]


def metadata_line(value: object, what: str) -> bytes:
    """Write one chunk's metadata as JSON.

    Args:
        value: A dict with string keys, or None.
        what: What to call it in an error.

    Raises:
        MiaError: If it is something else, is not JSON, or is nested more than 100 deep.
    """
    if value is not None and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        raise MiaError(f"{what}: {value!r} is not a dict with string keys, nor None")
    try:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        deep = line.count(b"{") + line.count(b"[") > _METADATA_DEPTH and _is_deep(value)
    except RecursionError:
        deep = True
    except (TypeError, ValueError) as error:
        raise MiaError(f"{what}: not JSON ({error}); give finite plain values") from error
    if deep:
        raise MiaError(f"{what}: nested more than {_METADATA_DEPTH} deep; give flatter values")
    return line


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_METADATA_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(value, dict | list | tuple) for value in level)


def copy_rows(
    root: Path, segment: SegmentEntry, alive: np.ndarray, dim: int, storage: str, target: SegmentWriter
) -> None:
    """Append the live rows of a segment to a new one, as they are stored, with their numbers.

    Args:
        root: Folder of the index.
        segment: The old segment.
        alive: (n,) bool; stands for the tombstones on disk.
        dim: d.
        storage: As in the manifest.
        target: The new segment.

    Raises:
        MiaError: If a file is damaged; what was read wrong must not get a new checksum.
    """
    entries = read_entries(root, segment)
    folder, width = root / segment.name, dim * DTYPES[storage].itemsize
    tall = max(1, _COPY_BYTES // width)
    with ExitStack() as stack:

        def reader(entry: FileEntry) -> _CheckedReader:
            return _CheckedReader(folder / entry.name, entry, stack.enter_context(open_checked(folder, entry)))

        vectors = reader(segment_file(root, segment, VECTORS))
        listed = segment.file(METADATA)
        metadata = None if listed is None else reader(listed)
        for start in range(0, segment.rows, tall):
            end = min(start + tall, segment.rows)
            kept = np.flatnonzero(alive[start:end])
            data = vectors.read(width * (end - start))
            lines = None if metadata is None else metadata.lines(end - start)
            offsets = entries.offsets[start : end + 1]
            ids = split_ids(entries.ids[offsets[0] : offsets[-1]], offsets - offsets[0])
            kept_lines = [] if lines is None else [lines[i] for i in kept.tolist()]
            target.write_entries(
                [ids[i] for i in kept.tolist()],
                [entries.sessions[i] for i in entries.session_of[start:end][kept].tolist()],
                entries.rows[start:end][kept],
                kept_lines if any(line != _NULL for line in kept_lines) else None,
            )
            target.write_vectors(np.frombuffer(data, np.uint8).reshape(end - start, width)[kept])
        vectors.check()
        if metadata is not None:
            metadata.check()


class _CheckedReader:
    """Read a file once from front to back and check what was read."""

    def __init__(self, path: Path, entry: FileEntry, file: BinaryIO) -> None:
        self._path, self._entry, self._file = path, entry, file
        self._digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data

    def lines(self, count: int) -> list[bytes]:
        lines = list(islice(self._file, count))
        self._digest.update(b"".join(lines))
        return [line.rstrip(b"\n") for line in lines]

    def check(self) -> None:
        check_digest(self._path, self._entry, self._digest.hexdigest())
