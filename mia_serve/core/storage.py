"""Folders that are either whole or not there: written beside their place, flushed, and renamed into it.

Also the lock that keeps writers of one place apart.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mia_serve.core.errors import MiaError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.02
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and the flag, linux/fcntl.h and linux/fs.h


@contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """Give an empty folder to fill; when the block ends it takes the place of ``path``, replacing what was there.

    A writer that raises leaves ``path`` as it was, and so does one that is killed. Where the system can exchange two
    folders, readers find one of them at every moment; elsewhere the old one waits under another name for a moment,
    from where :func:`recover` fetches it back.
    """
    path = Path(path).absolute()
    recover(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    aside.mkdir()
    try:
        yield aside
        for item in (*aside.rglob("*"), aside):
            if not item.is_symlink():
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


def lock_file(path: Path, timeout: float) -> int:
    """Take the lock of a file, made if it is missing; the system drops it when its holder dies.

    Args:
        path: The file; its folder exists.
        timeout: Seconds to wait for another holder.

    Returns:
        A descriptor for :func:`unlock_file`.

    Raises:
        TimeoutError: If somebody else holds it all that time.
        MiaError: If the platform has no such locks.
    """
    if fcntl is None:
        raise MiaError(f"{path}: this platform has no file locks (fcntl), so nothing can be written; reading works")
    deadline = time.monotonic() + timeout
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder may remove the file: then the lock is one of a file that nobody else will open.
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise TimeoutError(
                    f"{path}: another writer holds the lock (waited {timeout:g} s); try again when it is done"
                ) from None
            time.sleep(_POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def unlock_file(descriptor: int) -> None:
    """Drop a lock, in children that inherited it too."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _swap(aside: Path, path: Path) -> None:
    if path.is_dir() and not path.is_symlink() and _exchange(aside, path):
        sync(path.parent)
        return  # the old one lies aside now, where the caller removes it
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


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; False where the system cannot (renameat2, Linux)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")
