"""What an index folder consists of, and the one file that says so.

    manifest.json                      which files are the index; replaced by one rename, which is the commit
    segment-<generation>-<n>/          rows that were written together; never changed afterwards
        vectors.bin                    (n, d) little-endian float32, float16 or int8, nothing else
        ids.utf8, ids.offsets          all ids in a row; where each begins and the last ends, (n + 1) int64
        sessions.json, session_of.bin  names of the segment's sessions; place of each row's name, (n,) uint32
        rows.bin                       row numbers, (n,) int64, ascending
        metadata.jsonl                 an object or null a line; only where a row has metadata
    tombstones-<generation>-<n>.bin    row numbers that were deleted from one segment, int64
    ranges-<generation>.bin            int8 only: offset and step of each dimension, (2, d) float32
    lock                               held by the one writer; readers never look at it

Files of these names that the manifest does not list are what a dead writer left; the next writer removes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from mia_serve.core.errors import MiaError
from mia_serve.core.storage import sync

MANIFEST, LOCK = "manifest.json", "lock"
KIND, FORMAT = "mia-index", 3
VECTORS, IDS, OFFSETS = "vectors.bin", "ids.utf8", "ids.offsets"
SESSIONS, SESSION_OF, ROWS, METADATA = "sessions.json", "session_of.bin", "rows.bin", "metadata.jsonl"

_NEW_MANIFEST = "manifest.json.new"
_OURS = re.compile(r"segment-\d+-\d+|tombstones-\d+-\d+\.bin|ranges-\d+\.bin|manifest\.json\.new")


class DamagedManifest(MiaError):
    """A manifest that cannot be read any more, though it may be an index's."""


class FileEntry(NamedTuple):
    """A file: its name within its folder, bytes, SHA-256 in hex digits."""

    name: str
    size: int
    sha256: str


class SegmentEntry(NamedTuple):
    """A segment: folder, rows (deleted ones too), files, and the file of deleted rows if there are any."""

    name: str
    rows: int
    files: tuple[FileEntry, ...]
    tombstones: FileEntry | None

    def file(self, name: str) -> FileEntry | None:
        """Return a file by name, None if the segment has none of it."""
        return next((entry for entry in self.files if entry.name == name), None)


class Manifest(NamedTuple):
    """State of an index at one commit.

    Attributes:
        dim: Width d of the vectors.
        storage: "float32", "float16" or "int8".
        spec_hash: Hash of the encoder that made the vectors; None if unknown.
        generation: Number of the commit, from 1.
        next_row: Least row number that was never given.
        ranges: File of the int8 ranges; None before the first vectors, and for other storages.
        segments: By ascending rows, which do not overlap.
    """

    dim: int
    storage: str
    spec_hash: str | None
    generation: int
    next_row: int
    ranges: FileEntry | None
    segments: tuple[SegmentEntry, ...]


def read_manifest_bytes(folder: Path) -> bytes:
    """Read the manifest file.

    Raises:
        FileNotFoundError: If there is no index.
    """
    try:
        return (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{folder}: no index here (no {MANIFEST}); make one with `mia-serve index build` or IndexWriter"
        ) from None


def parse_manifest(folder: Path, raw: bytes) -> Manifest:
    """Parse a manifest file.

    Raises:
        DamagedManifest: If it is damaged.
        MiaError: If it is of another kind or format.
    """
    where = folder / MANIFEST
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedManifest(f"{where}: not readable as JSON ({error}): rebuild the index") from error
    if not isinstance(value, dict):
        raise DamagedManifest(f"{where}: expected a JSON object: rebuild the index")
    if value.get("kind") != KIND:
        raise MiaError(f"{where}: kind {value.get('kind')!r}, not {KIND!r}: no index of vectors")
    if value.get("format") != FORMAT:
        raise MiaError(
            f"{where}: format {value.get('format')!r}, but this version reads format {FORMAT}: rebuild the index in a "
            "new folder"
        )
    if value.pop("sha256", None) != _digest(value):
        raise DamagedManifest(f"{where}: damaged or altered (its sha256 is not its content's): rebuild the index")
    return Manifest(
        value["dim"],
        value["storage"],
        value["spec_hash"],
        value["generation"],
        value["next_row"],
        _file(value["ranges"]),
        tuple(
            SegmentEntry(
                segment["name"],
                segment["rows"],
                tuple(FileEntry(**entry) for entry in segment["files"]),
                _file(segment["tombstones"]),
            )
            for segment in value["segments"]
        ),
    )


def replace_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a manifest the index's state; what it lists must be on the disk already.

    The rename is the commit: before it the index is what it was, after it what the manifest says.
    """
    value: dict[str, Any] = {"kind": KIND, "format": FORMAT} | manifest._asdict()
    value["ranges"] = manifest.ranges and manifest.ranges._asdict()
    value["segments"] = [
        segment._asdict()
        | {
            "files": [entry._asdict() for entry in segment.files],
            "tombstones": segment.tombstones and segment.tombstones._asdict(),
        }
        for segment in manifest.segments
    ]
    value["sha256"] = _digest(value)
    aside = folder / _NEW_MANIFEST
    with open(aside, "wb") as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, folder / MANIFEST)
    sync(folder)


def holds_only_leftovers(folder: Path) -> bool:
    """Tell whether a folder is empty but for what a dead writer left, so that an index may be made in it."""
    return all(item.name == LOCK or _OURS.fullmatch(item.name) for item in folder.iterdir())


def generation_by_names(folder: Path) -> int | None:
    """Return the greatest generation in the names of an index's files, in place of a manifest that is damaged.

    0 where manifest and lock are all there is, as in an empty index; None where nothing looks like an index's.
    """
    names = [item.name for item in folder.iterdir()]
    found = [int(number) for name in names for number in re.findall(r"-(\d+)", name)[:1] if _OURS.fullmatch(name)]
    return max(found) if found else 0 if set(names) <= {MANIFEST, LOCK} else None


def sweep(folder: Path, manifest: Manifest | None) -> None:
    """Remove what a writer makes and the manifest does not list; only for the holder of the lock."""
    kept: set[str] = set()
    if manifest is not None:
        kept.update(segment.name for segment in manifest.segments)
        kept.update(segment.tombstones.name for segment in manifest.segments if segment.tombstones)
        kept.update([manifest.ranges.name] if manifest.ranges else [])
    for item in folder.iterdir():
        if item.name in kept or not _OURS.fullmatch(item.name):
            continue
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)


def _file(value: dict[str, Any] | None) -> FileEntry | None:
    return None if value is None else FileEntry(**value)


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
