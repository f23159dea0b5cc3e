"""Folders that are either whole or not there: written beside their place, flushed, and renamed into it."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """Give an empty folder to fill; when the block ends it takes the place of ``path``, replacing what was there.

    A writer that raises leaves ``path`` as it was. One that is killed does too, once :func:`recover` was called (a
    folder cannot be renamed over another, so for a moment the old one waits under another name).
    """
    path = Path(path).absolute()
    recover(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    aside.mkdir()
    try:
        yield aside
        for item in (*aside.rglob("*"), aside):
            sync(item)
        _swap(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def recover(path: Path) -> None:
    """Put the old folder back if a writer died between the two renames; readers call it before they look."""
    if not path.exists() and _previous(path).is_dir():
        os.rename(_previous(path), path)


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex digits."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(aside: Path, path: Path) -> None:
    previous = _previous(path)
    shutil.rmtree(previous, ignore_errors=True)
    if path.exists():
        os.rename(path, previous)
    try:
        os.rename(aside, path)
    except BaseException:
        recover(path)
        raise
    sync(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")
