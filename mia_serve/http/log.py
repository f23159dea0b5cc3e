"""The write-ahead log of a collection: what is acknowledged is on disk, a record that was torn by a crash is dropped.

A log is one or several files `log-VERSION.jsonl`, named by the first version in them. A line is one record and the
CRC-32 of its bytes, `{"crc":"…","record":{…}}`. Records are appended and flushed to the disk one after the other, so
only the last one can be torn. Files are dropped whole, once what is in them is saved elsewhere.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from mia_serve.core import MiaError
from mia_serve.core.storage import sync

logger = logging.getLogger(__name__)

_HEAD, _MIDDLE, _END = b'{"crc":"', b'","record":', b"}\n"
_BODY = len(_HEAD) + 8 + len(_MIDDLE)


class WriteFailed(RuntimeError):
    """The disk did not take a write: nothing of it was kept, and the next one may succeed."""


class Log:
    """The log of one collection.

    Args:
        folder: Folder of the collection.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()
        self._sizes = {path: path.stat().st_size for path in sorted(folder.glob("log-*.jsonl"))}
        self._versions = dict.fromkeys(self._sizes, -1)  # of the last record in each file
        self._file: int | None = None  # descriptor of the last file
        self._torn = False  # whether the last file ends in bytes that a failed write left

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(list(self._sizes.values()))  # a copy first: files come and go in other threads

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all records in order, and cut off what a crash has torn.

        Raises:
            MiaError: A record is damaged that others follow.
        """
        for path in list(self._sizes):
            good = 0
            with open(path, "rb") as file:
                for line in file:
                    record = _parsed(line)
                    if record is None:
                        if any(_parsed(later) is not None for later in file):
                            raise MiaError(
                                f"{path.name} is damaged at byte {good}, and records follow: the disk has failed, or "
                                "somebody has changed the file; put the collection's folder back from a copy"
                            )
                        break
                    good += len(line)
                    self._versions[path] = record["version"]
                    yield record
            if good < self._sizes[path]:
                logger.warning("%s: dropped %d bytes of a torn record", path.name, self._sizes[path] - good)
                with open(path, "r+b") as file:
                    file.truncate(good)
                    os.fsync(file.fileno())
                self._sizes[path] = good

    def append(self, record: dict[str, Any]) -> None:
        """Write a record; it is on the disk when this returns.

        Args:
            record: An object of JSON values with its `version`.

        Raises:
            WriteFailed: The disk did not take it.
        """
        body = orjson.dumps(record)
        line = b"".join((_HEAD, b"%08x" % zlib.crc32(body), _MIDDLE, body, _END))
        with self._lock:
            try:
                self._open(record["version"])
                self._write(line)
                self._versions[self._last] = record["version"]
            except OSError as error:
                self._repair()
                raise WriteFailed(
                    f"the collection's log cannot be written ({error.strerror or error}): nothing of this write was "
                    "kept; make room on the disk, or give the server the right to write there, and try again"
                ) from error

    def rotate(self) -> None:
        """Let the next record begin a new file."""
        with self._lock:
            if not self._torn:  # nothing may follow a torn record in another file
                self._close()

    def drop(self, version: int) -> None:
        """Remove the files whose records are all of this version or older ones; all must have been read."""
        with self._lock:
            for path in list(self._sizes):
                if self._versions[path] <= version and not (self._file is not None and path == self._last):
                    path.unlink(missing_ok=True)
                    del self._sizes[path], self._versions[path]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _open(self, version: int) -> None:
        if self._torn:
            self._cut()
        if self._file is not None:
            return
        path = self.folder / f"log-{version:012d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        self._sizes.setdefault(path, 0)
        self._versions.setdefault(path, -1)
        sync(self.folder)

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        os.fsync(self._file)
        self._sizes[self._last] += len(line)

    def _repair(self) -> None:
        """Take back what a failed write has left; where even that fails, the next write tries again first."""
        try:
            self._cut()
        except OSError:
            self._torn = True

    def _cut(self) -> None:
        if self._file is not None:
            os.ftruncate(self._file, self._sizes[self._last])
            os.fsync(self._file)
        self._torn = False

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def _last(self) -> Path:
        return next(reversed(self._sizes))


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None where it is not whole."""
    if not (line.startswith(_HEAD) and line.endswith(_END) and line[_BODY - len(_MIDDLE) : _BODY] == _MIDDLE):
        return None
    body = line[_BODY : -len(_END)]
    if line[len(_HEAD) : len(_HEAD) + 8] != b"%08x" % zlib.crc32(body):
        return None
    return orjson.loads(body)
