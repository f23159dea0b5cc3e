"""Chunks as JSON lines: what an index is built from where there is no mindscape."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mia_serve.core.errors import MiaError
from mia_serve.index.segment_writer import metadata_line

_FIELDS = ("id", "text", "session")
_FORM = '{"id", "text", "session"} and optionally {"metadata": {...}}'


class ChunkLine(NamedTuple):
    """A chunk with its session and what may be filtered by."""

    id: str
    text: str
    session: str
    metadata: dict[str, Any] | None = None


def read_chunk_lines(path: str | Path) -> Iterator[ChunkLine]:
    """Read ``{"id", "text", "session", "metadata"?}``, one object a line, a line at a time.

    Raises:
        FileNotFoundError: There is no such file.
        MiaError: A line is wrong; the message names file and line.
    """
    for _, chunk in _lines(Path(path)):
        yield chunk


def check_chunk_lines(path: str | Path, taken: Container[str] = ()) -> int:
    """Read a whole file before any work is done on it, and return how many chunks it holds.

    Args:
        path: The file.
        taken: Ids that the chunks must not have.

    Raises:
        FileNotFoundError: There is no such file.
        MiaError: A line is wrong, an id occurs twice or is taken, or there is no chunk; names file and line.
    """
    seen: set[str] = set()
    for where, chunk in _lines(Path(path)):
        if chunk.id in seen:
            raise MiaError(f"{where}: id {chunk.id!r} stood in an earlier line; give every chunk its own id")
        if chunk.id in taken:
            raise MiaError(f"{where}: id {chunk.id!r} is in the index already; --upsert replaces it")
        seen.add(chunk.id)
    if not seen:
        raise MiaError(f"{path}: no chunks; give one {_FORM} a line")
    return len(seen)


def _lines(path: Path) -> Iterator[tuple[str, ChunkLine]]:
    if not path.is_file():
        raise FileNotFoundError(f"chunks {str(path)!r}: no such file; give a .jsonl file")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                raw = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError:
                raise MiaError(f"{where}: not JSON in UTF-8; write one object a line") from None
            except RecursionError:
                raise MiaError(f"{where}: nested too deep; a chunk is {_FORM}") from None
            yield where, _chunk(raw, where)


def _chunk(raw: object, where: str) -> ChunkLine:
    if not isinstance(raw, dict):
        raise MiaError(f"{where}: a {type(raw).__name__}; a chunk is an object, {_FORM}")
    missing = [name for name in _FIELDS if name not in raw]
    if missing:
        raise MiaError(f"{where}: {missing[0]!r} is missing; a chunk is {_FORM}")
    unknown = sorted(set(raw) - {*_FIELDS, "metadata"})
    if unknown:
        raise MiaError(f"{where}: unknown field {unknown[0]!r}; put what is to be filtered by into 'metadata'")
    for name in _FIELDS:
        value = raw[name]
        if not isinstance(value, str) or not value.strip():
            raise MiaError(f"{where}: {name!r} is {value!r}; it must be a non-empty string")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise MiaError(f"{where}: {name!r} holds half of a surrogate pair, which is no text; clean the file")
    metadata = raw.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise MiaError(f"{where}: 'metadata' is a {type(metadata).__name__}; it must be an object")
    metadata_line(metadata, f"{where}: 'metadata'")  # as the index will, but before anything is encoded
    return ChunkLine(raw["id"], raw["text"], raw["session"], metadata)
