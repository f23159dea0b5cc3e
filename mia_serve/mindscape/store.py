"""A mindscape on disk: Parquet tables, vector files, and a manifest that vouches for all of them.

    manifest.json      format, version, counts, summarizer; sha256 and size of every file; encoder hash of all vectors;
                       window and notes where there are any
    chunks.parquet     id, text, session_id, book_id
    sessions.parquet   id, book_id, chunk_ids, summary, title, date
    books.parquet      id, title, author, summary                               (where anything is known of the books)
    nodes.parquet      id, name, description, book_id, kind, chunk_ids          (where there are nodes)
    tails.parquet      book_id, closed, text, start, skip, size, overlap        (where texts of books may go on)
    vectors.NAME.npy   (rows, d), one row a chunk or one row a session

The folder is written beside its place and renamed into it, so that a writer that dies leaves what was there before.
Files are named relative to the folder, which can be moved. What else lies in it, under other names than these, is kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mia_serve.core import MiaError
from mia_serve.core.storage import recover, sha256, write_aside
from mia_serve.mindscape.mindscape import Mindscape
from mia_serve.mindscape.records import BookFacts, Chunk, Node, Session, Tail

FORMAT = "mia-mindscape"
VERSION = 1
MANIFEST = "manifest.json"

_CHUNKS = "chunks.parquet"
_SESSIONS = "sessions.parquet"
_BOOKS = "books.parquet"
_NODES = "nodes.parquet"
_TAILS = "tails.parquet"
_NUMBERS = ("closed", "start", "skip", "size", "overlap")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_FILES = "|".join(map(re.escape, (MANIFEST, _CHUNKS, _SESSIONS, _BOOKS, _NODES, _TAILS)))
_OURS = re.compile(rf"{_FILES}|vectors\.{_NAME.pattern}\.npy")


def save(mindscape: Mindscape, path: str | Path, vectors: Mapping[str, tuple[np.ndarray, str]] | None = None) -> None:
    """Write a mindscape; an older one at the same place is replaced whole, or not at all, other files there are kept.

    Args:
        mindscape: What to write.
        path: The folder; its parents are made.
        vectors: Name -> ((rows, d) float array, one row a chunk or a session; `spec_hash` of the encoder that made it).

    Raises:
        MiaError: `path` holds something that is not a mindscape, or a vector file does not fit the mindscape.
    """
    path = Path(os.path.realpath(path))  # a link stays one, and what it names is replaced
    vectors = dict(vectors or {})
    for name, (array, spec_hash) in vectors.items():
        _check_vectors(mindscape, name, array, spec_hash)
    recover(path)
    check_replaceable(path)
    with write_aside(path) as aside:
        _write(mindscape, aside, vectors)
        if path.is_dir():
            _keep_others(path, aside)


def check_replaceable(path: Path) -> None:
    """Refuse a place that holds something else than a mindscape; a damaged one may be replaced.

    Raises:
        MiaError: It does.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        ours = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    except OSError:
        ours = False
    except (ValueError, RecursionError):
        ours = (path / _CHUNKS).is_file()
    if not ours:
        raise MiaError(f"{path} exists and is not a mindscape: give a new folder, or remove it yourself")


def load(path: str | Path) -> Mindscape:
    """Open a mindscape.

    Raises:
        FileNotFoundError: There is no such folder.
        MiaError: The folder is no mindscape, is incomplete, was altered, or is of a newer format.
    """
    while True:
        before = _identity(path)
        try:
            return _load(path)
        except (MiaError, OSError):
            # Files of two states look damaged; a folder that was replaced meanwhile is read again.
            if before is None or _identity(path) == before:
                raise


def _identity(path: str | Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns  # numbers of removed folders are used again


def _load(path: str | Path) -> Mindscape:
    import pyarrow.parquet as pq

    path, manifest = _open(path)

    def rows(name: str) -> list[dict[str, Any]]:
        if name in (_BOOKS, _NODES, _TAILS) and name not in manifest["files"]:
            return []
        content = (path / name).read_bytes()  # once: what was checked is what is read
        facts = manifest["files"].get(name)
        if facts is None or hashlib.sha256(content).hexdigest() != facts["sha256"]:
            raise _altered(path / name, "its sha256 is not the manifest's")
        return pq.read_table(io.BytesIO(content)).to_pylist()

    chunks = tuple(Chunk(**row) for row in rows(_CHUNKS))
    sessions = tuple(Session(**{**row, "chunk_ids": tuple(row["chunk_ids"])}) for row in rows(_SESSIONS))
    if (len(chunks), len(sessions)) != (manifest["chunks"], manifest["sessions"]):
        raise _altered(
            path / MANIFEST,
            f"it counts {manifest['chunks']} chunks and {manifest['sessions']} sessions, "
            f"the tables hold {len(chunks)} and {len(sessions)}",
        )
    return Mindscape(
        chunks,
        sessions,
        manifest["summarizer"],
        tuple(BookFacts(**row) for row in rows(_BOOKS)),
        tuple(Node(**{**row, "chunk_ids": tuple(row["chunk_ids"])}) for row in rows(_NODES)),
        manifest.get("window"),
        tuple(Tail(**row) for row in rows(_TAILS)),
        manifest.get("notes", {}),
    )


def load_vectors(path: str | Path, name: str, spec_hash: str) -> np.ndarray:
    """Memory-map a vector file, read-only.

    Args:
        path: The mindscape's folder.
        name: Name under which the vectors were saved.
        spec_hash: `Encoder.spec_hash` of the encoder that is going to be used with them.

    Returns:
        (rows, d) array as it was saved.

    Raises:
        FileNotFoundError: There is no such folder.
        MiaError: No vectors of that name, made by another encoder, incomplete or altered.
    """
    path, manifest = _open(path)
    found = manifest["vectors"].get(name)
    if found is None:
        have = ", ".join(sorted(manifest["vectors"])) or "none"
        raise MiaError(f"{path} has no vectors {name!r} (it has: {have}): embed the mindscape under that name")
    if found["spec_hash"] != spec_hash:
        raise MiaError(
            f"vectors {name!r} of {path} were made by encoder {found['spec_hash']}, the one given is {spec_hash}: "
            "use the encoder that made them, or embed the mindscape again with this one"
        )
    _verify(path, manifest, found["file"])
    array = np.load(path / found["file"], mmap_mode="r", allow_pickle=False)
    if array.shape != (found["rows"], found["dim"]):
        raise _altered(path / found["file"], f"its shape is {array.shape}, not {(found['rows'], found['dim'])}")
    return array


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read the manifest of a mindscape (counts, summarizer, vector files) without opening its tables.

    Raises:
        FileNotFoundError: There is no such folder.
        MiaError: The folder is no mindscape, is incomplete, or is of a newer format.
    """
    return _open(path)[1]


def _write(mindscape: Mindscape, folder: Path, vectors: Mapping[str, tuple[np.ndarray, str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def table(file: str, rows: Sequence[Any], columns: str) -> None:
        types = {"chunk_ids": pa.list_(pa.string())} | dict.fromkeys(_NUMBERS, pa.int64())
        schema = pa.schema([(column, types.get(column, pa.string())) for column in columns.split()])
        # vars() and not asdict(): no deep copy of every text.
        pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema), folder / file)

    table(_CHUNKS, mindscape.chunks, "id text session_id book_id")
    table(_SESSIONS, mindscape.sessions, "id book_id chunk_ids summary title date")
    if mindscape.books:
        table(_BOOKS, mindscape.books, "id title author summary")
    if mindscape.nodes:
        table(_NODES, mindscape.nodes, "id name description book_id kind chunk_ids")
    if mindscape.tails:
        table(_TAILS, mindscape.tails, "book_id closed text start skip size overlap")
    entries = {}
    for name, (array, spec_hash) in vectors.items():
        file = f"vectors.{name}.npy"
        try:
            np.save(folder / file, array, allow_pickle=False)
        except OSError as error:
            # NumPy says of a full disk only how much of an array was written.
            raise OSError(f"{file} cannot be written ({error}): is there room on the device of {folder}?") from error
        entries[name] = {"file": file, "spec_hash": spec_hash, "rows": array.shape[0], "dim": array.shape[1]}
    files = {}
    for item in sorted(folder.iterdir()):
        files[item.name] = {"sha256": sha256(item), "bytes": item.stat().st_size}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "summarizer": mindscape.summarizer,
        "books": len({c.book_id for c in mindscape.chunks}),
        "sessions": len(mindscape.sessions),
        "chunks": len(mindscape.chunks),
        "vectors": entries,
        "files": files,
    }
    if mindscape.window is not None:
        manifest["window"] = mindscape.window
    if mindscape.notes:
        manifest["notes"] = dict(mindscape.notes)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _keep_others(old: Path, new: Path) -> None:
    """Carry what is not the mindscape's from the old folder into the new one, by hard links where there are any."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    def ours(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if _OURS.fullmatch(name)] if Path(folder) == old else []

    shutil.copytree(old, new, symlinks=True, ignore=ours, copy_function=link, dirs_exist_ok=True)


def _open(path: str | Path) -> tuple[Path, dict[str, Any]]:
    path = Path(os.path.realpath(path))
    recover(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no mindscape at {path}: give the folder that `mia-serve mindscape build` wrote")
    if not (path / MANIFEST).is_file():
        raise MiaError(f"{path} is not a mindscape, or was never finished: it has no {MANIFEST}; build it again")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        name, version = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise _altered(path / MANIFEST, f"it cannot be read ({error.__class__.__name__})") from None
    if name != FORMAT or version != VERSION:
        raise MiaError(f"{path} is {name} version {version}: this MiA reads {FORMAT} version {VERSION}; build it again")
    missing = {"summarizer", "books", "sessions", "chunks", "vectors", "files"} - manifest.keys()
    if missing:
        raise _altered(path / MANIFEST, f"it lacks {', '.join(sorted(missing))}")
    for key, facts in (("vectors", {"file", "spec_hash", "rows", "dim"}), ("files", {"bytes", "sha256"})):
        entries = manifest[key].values() if isinstance(manifest[key], dict) else [None]
        if not all(isinstance(entry, dict) and facts <= entry.keys() for entry in entries):
            raise _altered(path / MANIFEST, f"its {key!r} must each say {', '.join(sorted(facts))}")
    window, notes = manifest.get("window"), manifest.get("notes", {})
    if not isinstance(notes, dict) or not (window is None or (type(window) is int and window >= 1)):
        raise _altered(path / MANIFEST, "its 'window' must be a number of chunks and its 'notes' an object")
    for file, facts in manifest["files"].items():
        if Path(file).name != file or not (path / file).is_file():
            raise _altered(path / file, "it is missing")
        if (path / file).stat().st_size != facts["bytes"]:
            raise _altered(path / file, f"it has {(path / file).stat().st_size} bytes, not {facts['bytes']}")
    return path, manifest


def _verify(path: Path, manifest: dict[str, Any], file: str) -> None:
    facts = manifest["files"].get(file)
    if facts is None or sha256(path / file) != facts["sha256"]:
        raise _altered(path / file, "its sha256 is not the manifest's")


def _altered(file: Path, why: str) -> MiaError:
    return MiaError(f"{file} is incomplete or was altered: {why}; build the mindscape again")


def _check_vectors(mindscape: Mindscape, name: str, array: np.ndarray, spec_hash: str) -> None:
    if not _NAME.fullmatch(name):
        raise MiaError(f"vectors {name!r}: a name is made of letters, digits, - and _")
    if not spec_hash:
        raise MiaError(f"vectors {name!r} come without a spec_hash: give the spec_hash of the encoder that made them")
    allowed = {len(mindscape.chunks), len(mindscape.sessions)}
    if array.ndim != 2 or array.shape[0] not in allowed or array.dtype.kind != "f":
        raise MiaError(
            f"vectors {name!r} are {array.dtype} {array.shape}: give floats of shape (n, d) with "
            f"n = {len(mindscape.chunks)} chunks or {len(mindscape.sessions)} sessions"
        )
    for start in range(0, len(array), 4096):  # in blocks, so that a memmap larger than memory passes
        bad = ~np.isfinite(array[start : start + 4096]).all(axis=1)
        if bad.any():
            raise MiaError(
                f"vectors {name!r} hold NaN or infinity in row {start + int(bad.argmax())}: encode that row again"
            )
