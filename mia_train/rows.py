"""Training rows: a query, its signature, its positives and negatives; reading and writing them.

One JSON object a line, or a Parquet file with the same columns::

    {"query_id": "q1", "query": "…", "signature": ["…", "…"] or null,
     "positives": [{"id": "b:3", "text": "…"}], "negatives": [{"id": "b:9", "text": "…", "kind": "hard"}],
     "nodes": {"positives": [...], "negatives": [...]}, "group": "b", "source": "fairytaleqa"}

A passage may carry ``"score"``, what a teacher (a cross-encoder, a larger retriever) gives it for the query.

``kind`` of a negative is ``hard`` (default), ``signature`` (a hard one from a wrong session of the signature) or
``simple``. ``nodes`` (the joint chunk/node loss), ``group`` and ``source`` may be missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError

KINDS = ("hard", "signature", "simple")
_ROW_KEYS = ("query_id", "query", "signature", "positives", "negatives", "nodes", "group", "source")


@dataclass(frozen=True)
class Passage:
    """One document of a row; ``kind`` says how a negative was found, ``score`` is a teacher's (any scale, or None)."""

    id: str
    text: str
    kind: str = "hard"
    score: float | None = None


@dataclass(frozen=True)
class Nodes:
    """Entity nodes (``"name : description"``) of a row, for the joint chunk/node loss."""

    positives: tuple[Passage, ...]
    negatives: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class Row:
    """One training example. ``signature`` None or empty means that the query has none."""

    query_id: str
    query: str
    positives: tuple[Passage, ...]
    negatives: tuple[Passage, ...] = ()
    signature: tuple[str, ...] | None = None
    nodes: Nodes | None = None
    group: str = ""
    source: str = ""


def _digest(data: bytes) -> int:
    # 0 pads, so no document may own it.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True) or 1


def id_key(identifier: str) -> int:
    """Return a 64-bit key of a document id, from its UTF-8 bytes: the same in every process and version."""
    return _digest(b"id:" + identifier.encode())


@lru_cache(maxsize=65536)
def text_key(text: str) -> int:
    """Return a 64-bit key of a text that ignores letter case, Unicode width and the amount of white space."""
    return _digest(b"text:" + " ".join(unicodedata.normalize("NFKC", text).casefold().split()).encode())


def read_rows(paths: Sequence[str | Path]) -> list[Row]:
    """Read JSONL or Parquet files into rows.

    Raises:
        FileNotFoundError: A file is missing.
        MiaError: A row is wrong; the message names file, line and key.
    """
    rows: list[Row] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file of training rows; give a .jsonl or .parquet file")
        rows.extend(parse_row(raw, f"{path}:{line}") for line, raw in _read_raw(path))
    if not rows:
        raise MiaError(f"{', '.join(map(str, paths))}: no rows; a training file needs at least one")
    return rows


def _read_raw(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as parquet

        try:
            yield from enumerate(parquet.read_table(path).to_pylist(), start=1)
        except pa.ArrowInvalid as error:
            raise MiaError(f"{path}: not a Parquet file that can be read ({' '.join(str(error).split())})") from None
        return
    if path.suffix not in (".jsonl", ".json"):
        raise MiaError(f"{path}: training rows are read from .jsonl or .parquet, not {path.suffix or 'this'}")
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")  # some editors begin a file with a mark
                if line.strip():
                    yield number, json.loads(line)
            except UnicodeDecodeError as error:
                raise MiaError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line); convert it") from None
            except (ValueError, RecursionError) as error:  # beside wrong JSON: too many digits, nested too deeply
                said = getattr(error, "msg", str(error))
                raise MiaError(f"{path}:{number}: not JSON ({said}); write one object a line") from None


def parse_row(raw: Any, where: str) -> Row:
    """Check one decoded row and return it; ``where`` (``file:line``) starts every message."""
    if not isinstance(raw, dict):
        raise MiaError(f"{where}: a row is a JSON object, not {type(raw).__name__}")
    unknown = [key for key in raw if key not in _ROW_KEYS]
    if unknown:
        raise MiaError(f"{where}: unknown key {unknown[0]!r}; allowed: {', '.join(_ROW_KEYS)}")
    signature = raw.get("signature")
    if signature is not None:
        if not isinstance(signature, list) or not all(isinstance(text, str) and text.strip() for text in signature):
            raise MiaError(f"{where}: 'signature' is a list of non-empty summaries, or null")
        signature = tuple(_text(text, f"{where}: 'signature'[{i}]") for i, text in enumerate(signature))
    for key in ("group", "source"):
        if not isinstance(raw.get(key) or "", str):
            raise MiaError(f"{where}: {key!r} is {raw[key]!r}; it must be a string, or left out")
        _whole(raw.get(key) or "", f"{where}: {key!r}")
    positives = _passages(raw.get("positives"), f"{where}: 'positives'")
    if not positives:
        raise MiaError(f"{where}: row without a positive; drop it or give at least one {{'id', 'text'}}")
    nodes = None
    if raw.get("nodes"):
        if not isinstance(raw["nodes"], dict) or not set(raw["nodes"]) <= {"positives", "negatives"}:
            raise MiaError(f"{where}: 'nodes' is an object with the keys 'positives' and 'negatives', or null")
        node_positives = _passages(raw["nodes"].get("positives"), f"{where}: 'nodes.positives'")
        if not node_positives:
            raise MiaError(f"{where}: 'nodes' without a positive; drop 'nodes' or give at least one {{'id', 'text'}}")
        nodes = Nodes(node_positives, _passages(raw["nodes"].get("negatives"), f"{where}: 'nodes.negatives'"))
    return Row(
        query_id=_text(raw.get("query_id"), f"{where}: 'query_id'"),
        query=_text(raw.get("query"), f"{where}: 'query'"),
        positives=positives,
        negatives=_passages(raw.get("negatives"), f"{where}: 'negatives'"),
        signature=signature,
        nodes=nodes,
        group=raw.get("group") or "",
        source=raw.get("source") or "",
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise MiaError(f"{where} is {'empty' if value == '' else repr(value)}; it must be a non-empty string")
    return _whole(value, where)


def _whole(value: str, where: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise MiaError(f"{where} holds half of a surrogate pair, which is no text; clean the file")
    return value


def _passages(raw: Any, where: str) -> tuple[Passage, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise MiaError(f"{where} is a list of {{'id', 'text'}}, not {type(raw).__name__}")
    found = []
    for i, item in enumerate(raw):
        if not isinstance(item, dict) or not {"id", "text"} <= set(item) <= {"id", "text", "kind", "score"}:
            raise MiaError(f"{where}[{i}] must have the keys 'id' and 'text' (and may have 'kind' and 'score')")
        kind = item.get("kind") or "hard"
        if kind not in KINDS:
            raise MiaError(f"{where}[{i}].kind is {kind!r}; allowed: {', '.join(KINDS)}")
        score = item.get("score")
        if score is not None and not _is_number(score):
            raise MiaError(f"{where}[{i}].score is {score!r}; it must be a finite number below 1e30, or left out")
        text = _text(item["text"], f"{where}[{i}].text")
        found.append(Passage(_text(item["id"], f"{where}[{i}].id"), text, kind, score))
    return tuple(found)


def _is_number(value: Any) -> bool:
    # Teacher scores go into float32 and through softmax(score / temperature): far beyond 1e30 that is no number.
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and isfinite(value) and abs(value) < 1e30
    except OverflowError:  # an integer that no float holds
        return False


def _passage_json(passage: Passage, *, negative: bool) -> dict[str, Any]:
    raw: dict[str, Any] = {"id": passage.id, "text": passage.text}
    if negative:
        raw["kind"] = passage.kind
    if passage.score is not None:
        raw["score"] = passage.score
    return raw


def row_to_json(row: Row) -> dict[str, Any]:
    """Return a row as a JSON-ready dictionary that ``parse_row`` reads back to an equal row."""
    raw: dict[str, Any] = {
        "query_id": row.query_id,
        "query": row.query,
        "signature": list(row.signature) if row.signature is not None else None,
        "positives": [_passage_json(p, negative=False) for p in row.positives],
        "negatives": [_passage_json(p, negative=True) for p in row.negatives],
        "group": row.group,
        "source": row.source,
    }
    if row.nodes is not None:
        raw["nodes"] = {
            "positives": [_passage_json(p, negative=False) for p in row.nodes.positives],
            "negatives": [_passage_json(p, negative=True) for p in row.nodes.negatives],
        }
    return raw


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Write rows as JSONL, aside first and then renamed into place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row_to_json(row), ensure_ascii=False) + "\n")
    os.replace(aside, path)
