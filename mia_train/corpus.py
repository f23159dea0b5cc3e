"""Where mined negatives come from: the rows themselves, a file, a mindscape, or a benchmark's haystacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mia_serve.core import MiaError
from mia_serve.eval.datasets import Benchmark
from mia_serve.mindscape import Mindscape
from mia_train.candidates import Document
from mia_train.data import build_rows
from mia_train.rows import Row, text_key

_KEYS = {"id", "text", "group"}


class Source(NamedTuple):
    """Rows to mine for, the corpus they search, and the haystack of each row."""

    rows: list[Row]
    corpus: list[Document]
    haystacks: list[str]


def corpus_of_rows(rows: Sequence[Row]) -> list[Document]:
    """Return all passages of the rows, positives first, each with the group of the first row that holds it.

    Raises:
        MiaError: Two passages have one id and different texts.
    """
    found: dict[str, Document] = {}
    for row, passages in [(row, row.positives) for row in rows] + [(row, row.negatives) for row in rows]:
        for passage in passages:
            document = Document(passage.id, passage.text, row.group)
            _same_text(found.setdefault(passage.id, document), document, f"row {row.query_id!r}")
    return list(found.values())


def corpus_of_mindscape(mindscape: Mindscape) -> list[Document]:
    """Return the chunks of a mindscape; the group is the book."""
    return [Document(chunk.id, chunk.text, chunk.book_id) for chunk in mindscape.chunks]


def read_corpus(path: str | Path) -> list[Document]:
    """Read a JSONL file with ``{"id", "text"}`` and, where there are groups, ``"group"`` a line.

    Raises:
        FileNotFoundError: There is no such file.
        MiaError: A line is wrong, or an id has two texts; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"corpus {str(path)!r}: no such file; give a .jsonl file")
    found: dict[str, Document] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                raw = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")) if line.strip() else None
            except (ValueError, RecursionError):
                raise MiaError(f"{where}: not JSON in UTF-8; write one object a line") from None
            if raw is None:
                continue
            document = _document(raw, where)
            _same_text(found.setdefault(document.id, document), document, where)
    if not found:
        raise MiaError(f"{path}: no documents; a corpus needs at least one")
    return list(found.values())


def source_of_benchmark(benchmark: Benchmark) -> Source:
    """Return a benchmark's questions as rows, with the passages that they may have as negatives.

    Only books (meetings, conversations) in which some question of the split has its answer take part: the passages
    kept for evaluation would otherwise be seen as negatives and never as positives.
    """
    corpus: list[Document] = []
    haystacks: list[str] = []
    for haystack in benchmark.haystacks:
        name = haystack.id if len(benchmark.haystacks) > 1 else ""
        gold = {chunk_id for query in haystack.queries for chunk_id in query.gold}
        chunks = haystack.mindscape.chunks
        books = {chunk.book_id for chunk in chunks if chunk.id in gold}
        corpus += [Document(c.id, c.text, c.book_id, name) for c in chunks if c.book_id in books]
        haystacks += [name] * len(haystack.queries)
    return Source(build_rows(benchmark, None, hard_negatives=0, simple_negatives=0), corpus, haystacks)


def _document(raw: object, where: str) -> Document:
    if not isinstance(raw, dict) or not {"id", "text"} <= set(raw) <= _KEYS:
        raise MiaError(f"{where}: a document is an object with 'id' and 'text' (and may have 'group')")
    values = [raw["id"], raw["text"], raw.get("group") or ""]
    for key, value in zip(("id", "text", "group"), values, strict=True):
        if not isinstance(value, str) or (key != "group" and not value.strip()):
            raise MiaError(f"{where}: {key!r} is {value!r}; it must be a non-empty string")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise MiaError(f"{where}: {key!r} holds half of a surrogate pair, which is no text; clean the file")
    return Document(*values)


def _same_text(first: Document, other: Document, where: str) -> None:
    if first.text != other.text and text_key(first.text) != text_key(other.text):
        raise MiaError(f"{where}: id {other.id!r} has another text than before; give every passage its own id")
