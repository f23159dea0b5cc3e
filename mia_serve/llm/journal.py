"""An append-only file of JSON objects, one a line, that a killed writer cannot spoil."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mia_serve.core.errors import MiaError


class Journal:
    """Records that are safe on disk as soon as `append` returns, whenever the process is killed.

    A half-written line is skipped by readers, and the next writer starts a line of its own behind it.

    Args:
        path: The file; made by the first `append`, or at once when exclusive.
        exclusive: Hold the file against other writers until `close`.

    Raises:
        MiaError: Another process holds the file.
    """

    def __init__(self, path: str | Path, *, exclusive: bool = False) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        if exclusive:
            try:
                fcntl.flock(self._open(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise MiaError(f"{self.path}: another run is writing it; wait for it, or give another output") from None

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the whole records, oldest first; none where there is no file.

        Raises:
            MiaError: The file is something else, which would be spoilt by what is added.
        """
        if not self.path.is_file():
            return
        found, others, cut = 0, 0, True
        with self.path.open("rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):  # a writer was killed in the middle of it
                    others += bool(line.strip())
                    cut = line.startswith(b"{")
                    continue
                if isinstance(record, dict):
                    found += 1
                    yield record
                else:
                    others, cut = others + 1, False
        if not found and others and not (others == 1 and cut):
            raise MiaError(f"{self.path} holds no records of this program; give another file, which it may add to")

    def append(self, record: dict[str, Any]) -> None:
        """Add one record, in a single write so that lines of several writers do not mix."""
        descriptor = self._descriptor if self._descriptor is not None else self._open()
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        if os.write(descriptor, line) != len(line):
            raise OSError(f"{self.path}: no room left on the device")

    def close(self) -> None:
        """Give the file back; nothing is pending, so forgetting this loses nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")
        return self._descriptor
