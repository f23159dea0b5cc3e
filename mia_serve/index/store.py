"""An index on disk: a folder that is either whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.core.storage import recover, sha256, write_aside

MANIFEST = "manifest.json"
_KIND = "mia-index"
_FORMAT = 2
_VECTORS, _ENTRIES = "vectors.npy", "entries.json"


class StoredIndex(NamedTuple):
    """Contents of an index folder: ids and sessions of N rows, vectors (N, d) float32, hash of the encoder."""

    ids: list[str]
    sessions: list[str]
    vectors: np.ndarray
    spec_hash: str | None


def write_index(path: str | Path, stored: StoredIndex) -> None:
    """Write an index, whole or not at all; an older one at the same place is replaced.

    Raises:
        MiaError: If path exists and is not an index, so that nothing else is ever overwritten.
    """
    target = Path(path)
    if target.exists() and not (target / MANIFEST).is_file():
        raise MiaError(f"{target}: exists and is no index (no {MANIFEST}); give a new folder or an index to replace")
    with write_aside(target) as aside:
        np.save(aside / _VECTORS, stored.vectors, allow_pickle=False)
        _write_json(aside / _ENTRIES, {"ids": stored.ids, "sessions": stored.sessions})
        rows, dim = stored.vectors.shape
        manifest = {"kind": _KIND, "format": _FORMAT, "rows": rows, "dim": dim, "spec_hash": stored.spec_hash}
        manifest["sha256"] = {name: sha256(aside / name) for name in (_VECTORS, _ENTRIES)}
        _write_json(aside / MANIFEST, manifest)


def read_index(path: str | Path, expected_spec_hash: str | None = None) -> StoredIndex:
    """Read an index folder.

    Raises:
        FileNotFoundError: If path is not an index folder.
        MiaError: If it was made by another encoder than expected, or a file is damaged or was altered.
    """
    folder = Path(path)
    recover(folder)
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder}: no index here (no {MANIFEST}); make one with SessionIndex.save")
    manifest = _read_json(folder / MANIFEST)
    if manifest.get("kind") != _KIND or manifest.get("format") != _FORMAT:
        found = f"kind {manifest.get('kind')!r}, format {manifest.get('format')!r}"
        raise MiaError(
            f"{folder / MANIFEST}: {found}; this version reads {_KIND!r}, format {_FORMAT}: rebuild the index"
        )
    missing = {"rows", "dim", "spec_hash", "sha256"} - manifest.keys()
    if missing:
        raise MiaError(f"{folder / MANIFEST}: {sorted(missing)[0]!r} is missing: rebuild the index")
    check_spec_hash(str(folder), manifest["spec_hash"], expected_spec_hash)
    for name in (_VECTORS, _ENTRIES):
        if {**manifest["sha256"]}.get(name) != sha256(folder / name):
            raise MiaError(f"{folder / name}: damaged or altered (its sha256 is not the manifest's): rebuild the index")
    entries = _read_json(folder / _ENTRIES)
    # Mapped, not read: the index makes its own copy.
    vectors = np.load(folder / _VECTORS, mmap_mode="r" if manifest["rows"] else None, allow_pickle=False)
    rows, dim = manifest["rows"], manifest["dim"]
    if vectors.shape != (rows, dim) or len(entries["ids"]) != rows or len(entries["sessions"]) != rows:
        held = f"vectors {vectors.shape}, {len(entries['ids'])} ids, {len(entries['sessions'])} sessions"
        raise MiaError(f"{folder}: manifest says {rows} rows of dim {dim} but it holds {held}: rebuild the index")
    return StoredIndex(entries["ids"], entries["sessions"], vectors, manifest["spec_hash"])


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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MiaError(f"{path}: not readable as JSON ({error}): rebuild the index") from error
    if not isinstance(value, dict):
        raise MiaError(f"{path}: expected a JSON object: rebuild the index")
    return value
