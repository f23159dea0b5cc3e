"""Read an index folder: the state of one commit, checked, vectors mapped and not copied.

Readers take no lock. What a commit leaves is never changed, only removed by a later one; a reader that meets a removed
file finds a newer manifest and starts again from that.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.index.manifest import (
    IDS,
    METADATA,
    OFFSETS,
    ROWS,
    SESSION_OF,
    SESSIONS,
    VECTORS,
    FileEntry,
    Manifest,
    SegmentEntry,
    parse_manifest,
    read_manifest_bytes,
)
from mia_serve.index.vectors import DTYPES, Block, Storage

_TRIES = 20  # a commit between every two of them: then something is wrong
# Python 3.11 has no name for it; the value is that of x86 and ARM.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Segment(NamedTuple):
    """Rows that were written together, deleted ones included.

    Attributes:
        ids: Chunk ids.
        sessions: Session id of each chunk.
        metadata: An object or None a chunk; None if no chunk has any.
        vectors: (n, d) as stored, mapped from the file; changes to it are never written.
        rows: Row numbers, (n,) int64 ascending.
        alive: (n,) bool, False where deleted.
    """

    ids: list[str]
    sessions: list[str]
    metadata: list[dict[str, Any] | None] | None
    vectors: Block
    rows: np.ndarray
    alive: np.ndarray


class Snapshot(NamedTuple):
    """An index at one commit; it stays readable when the index is changed or removed.

    Attributes:
        dim: Width d of the vectors.
        storage: How they are stored.
        spec_hash: Hash of the encoder that made them; None if unknown.
        generation: Number of the commit.
        commit: What `read_commit` gave at that time.
        next_row: Least row number that was never given.
        segments: By ascending rows, which do not overlap.
    """

    dim: int
    storage: Storage
    spec_hash: str | None
    generation: int
    commit: str
    next_row: int
    segments: tuple[Segment, ...]


class Entries(NamedTuple):
    """All of a segment but vectors and metadata; ids are still one run of bytes."""

    ids: bytes
    offsets: np.ndarray  # (n + 1,) int64
    sessions: list[str]  # names
    session_of: np.ndarray  # (n,) places of names
    rows: np.ndarray  # (n,) int64
    alive: np.ndarray  # (n,) bool


def read_snapshot(path: str | Path, expected_spec_hash: str | None = None, verify: bool = True) -> Snapshot:
    """Read the last commit of an index.

    Args:
        path: The folder.
        expected_spec_hash: Hash of the encoder that will make the queries; None: not checked.
        verify: Whether to check the SHA-256 of the vectors, which reads them once. Sizes, and the checksums of all
            other files, are checked in any case.

    Raises:
        FileNotFoundError: If there is no index.
        MiaError: If its vectors are another encoder's, it has another format, or a file is missing, damaged or altered.
    """
    folder = Path(path)
    for _ in range(_TRIES):
        raw = read_manifest_bytes(folder)
        manifest = parse_manifest(folder, raw)
        check_spec_hash(str(folder), manifest.spec_hash, expected_spec_hash)
        try:
            return _read(folder, manifest, hashlib.sha256(raw).hexdigest(), verify)
        except MiaError:
            if read_manifest_bytes(folder) == raw:
                raise
    raise RuntimeError(f"{folder}: {_TRIES} commits while it was read: try again when its writer is less busy")


def read_generation(path: str | Path) -> int:
    """Return the number of the last commit; reads the manifest only.

    Raises:
        FileNotFoundError: If there is no index.
        MiaError: If the manifest is damaged or has another format.
    """
    folder = Path(path)
    return parse_manifest(folder, read_manifest_bytes(folder)).generation


def read_commit(path: str | Path) -> str:
    """Return a digest that tells one commit from any other, also of another index in the same folder.

    Raises:
        FileNotFoundError: If there is no index.
    """
    return hashlib.sha256(read_manifest_bytes(Path(path))).hexdigest()


def check_spec_hash(what: str, found: str | None, expected: str | None) -> None:
    """Refuse vectors of one encoder where those of another are expected; expecting None checks nothing.

    Raises:
        MiaError: Naming both hashes and the fix.
    """
    if expected is not None and found != expected:
        raise MiaError(
            f"{what}: vectors were made by encoder {found or '(unknown)'} but {expected} is asked for; "
            "open the checkpoint that made them, or encode the chunks again with this one"
        )


def read_ranges(folder: Path, manifest: Manifest) -> np.ndarray | None:
    """Read the int8 ranges, (2, d) float32; None if there are none."""
    if manifest.ranges is None:
        return None
    return _array(read_file(folder, manifest.ranges), "<f4").reshape(2, manifest.dim)


def read_entries(folder: Path, segment: SegmentEntry) -> Entries:
    """Read all of a segment but vectors and metadata."""
    inside = folder / segment.name

    def read(name: str) -> bytes:
        return read_file(inside, segment_file(folder, segment, name))

    rows = _array(read(ROWS), "<i8")
    alive = np.ones(segment.rows, bool)
    if segment.tombstones is not None:
        alive[np.searchsorted(rows, _array(read_file(folder, segment.tombstones), "<i8"))] = False
    offsets, session_of = _array(read(OFFSETS), "<i8"), _array(read(SESSION_OF), "<u4")
    return Entries(read(IDS), offsets, json.loads(read(SESSIONS)), session_of, rows, alive)


def segment_file(folder: Path, segment: SegmentEntry, name: str) -> FileEntry:
    """Return a file that every segment has."""
    entry = segment.file(name)
    if entry is None:
        raise MiaError(f"{folder / segment.name}: the manifest lists no {name}: rebuild the index")
    return entry


def split_ids(ids: bytes, offsets: np.ndarray) -> list[str]:
    """Cut n ids out of the bytes that they lie in, between n + 1 offsets."""
    if ids.isascii():  # one decoding instead of n
        text = ids.decode("ascii")
        return [text[start:end] for start, end in pairwise(offsets.tolist())]
    return [ids[start:end].decode() for start, end in pairwise(offsets.tolist())]


def read_file(folder: Path, entry: FileEntry) -> bytes:
    """Read a small file and check it."""
    with open_checked(folder, entry) as file:
        content = file.read()
    check_digest(folder / entry.name, entry, hashlib.sha256(content).hexdigest())
    return content


@contextmanager
def open_checked(folder: Path, entry: FileEntry) -> Iterator[BufferedReader]:
    """Open a listed file for reading; its size is checked.

    Raises:
        MiaError: If it is missing or of another size.
    """
    path = folder / entry.name
    try:
        file = open(path, "rb")  # noqa: SIM115
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise MiaError(f"{path}: missing, though the manifest lists it: rebuild the index") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size != entry.size:
            raise MiaError(
                f"{path}: damaged or altered ({size} bytes where the manifest says {entry.size}): rebuild the index"
            )
        yield file


def check_digest(path: Path, entry: FileEntry, found: str) -> None:
    """Raise MiaError if a file's SHA-256 is not the manifest's."""
    if found != entry.sha256:
        raise MiaError(f"{path}: damaged or altered (its sha256 is not the manifest's): rebuild the index")


def _read(folder: Path, manifest: Manifest, commit: str, verify: bool) -> Snapshot:
    ranges = read_ranges(folder, manifest)
    segments = tuple(_read_segment(folder, manifest, segment, ranges, verify) for segment in manifest.segments)
    storage = cast(Storage, manifest.storage)
    return Snapshot(manifest.dim, storage, manifest.spec_hash, manifest.generation, commit, manifest.next_row, segments)


def _read_segment(
    folder: Path, manifest: Manifest, segment: SegmentEntry, ranges: np.ndarray | None, verify: bool
) -> Segment:
    entries = read_entries(folder, segment)
    metadata = None
    stored = segment.file(METADATA)
    if stored is not None:
        # One parse of one list is much faster than n of an object.
        lines = read_file(folder / segment.name, stored).split(b"\n")[:-1]
        metadata = json.loads(b"[" + b",".join(lines) + b"]")
    entry = segment_file(folder, segment, VECTORS)
    with open_checked(folder / segment.name, entry) as file:
        if verify:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            check_digest(folder / segment.name / VECTORS, entry, digest)
        data = _map(file, entry.size, DTYPES[manifest.storage]).reshape(segment.rows, manifest.dim)
    return Segment(
        split_ids(entries.ids, entries.offsets),
        [entries.sessions[place] for place in entries.session_of.tolist()],
        metadata,
        Block(data, ranges),
        entries.rows,
        entries.alive,
    )


def _map(file: BufferedReader, size: int, dtype: np.dtype) -> np.ndarray:
    if not size:
        return np.empty(0, dtype)
    # Private and writable: torch takes it without a complaint, and nothing that is written reaches the file. Without
    # NORESERVE Linux would refuse to map a file larger than the memory that way.
    if hasattr(mmap, "MAP_PRIVATE"):
        flags, protection = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return np.frombuffer(mmap.mmap(file.fileno(), size, flags=flags, prot=protection), dtype)
    return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype)


def _array(content: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(bytearray(content), dtype)  # a bytearray, so that it may be written to
