"""What silver evidence is made from: questions with answers, and entity nodes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.mindscape import Mindscape


@dataclass(frozen=True)
class Question:
    """A question with its answer; ``book`` restricts the search to that book."""

    id: str
    text: str
    answer: str
    book: str | None = None


@dataclass(frozen=True)
class Unit:
    """What is retrieved: a chunk, or a node (an entity); ``book`` None belongs to every book."""

    id: str
    text: str
    book: str | None


def chunk_units(mindscape: Mindscape) -> list[Unit]:
    """Return the chunks of a mindscape as units, in order."""
    return [Unit(chunk.id, chunk.text, chunk.book_id) for chunk in mindscape.chunks]


def read_questions(path: str | Path, books: Collection[str]) -> list[Question]:
    """Read ``{"id", "question", "answer"}`` and optionally ``"book"``, one object a line.

    Args:
        path: JSONL file.
        books: Ids of the mindscape's books.

    Raises:
        FileNotFoundError: There is no such file.
        MiaError: A line is wrong, an id occurs twice or a book is unknown; the message names file and line.
    """
    questions: list[Question] = []
    first_line: dict[str, str] = {}
    for where, raw in _objects(path, ("id", "question", "answer", "book")):
        question = Question(
            _text(raw, "id", where),
            _text(raw, "question", where),
            _text(raw, "answer", where),
            _book(raw, where, books),
        )
        if question.id in first_line:
            raise MiaError(f"{where}: id {question.id!r} is that of {first_line[question.id]} too; give each its own")
        first_line[question.id] = where
        questions.append(question)
    if not questions:
        raise MiaError(f"{path}: no questions; give one {{'id', 'question', 'answer'}} a line")
    return questions


def read_nodes(path: str | Path, books: Collection[str]) -> list[Unit]:
    """Read ``{"name", "description"}`` and optionally ``"id"`` and ``"book"``, one object a line.

    The text of a node is ``name : description``; its id, where none is given, ``node:{book}:{name}`` or
    ``node:{name}``.

    Raises:
        FileNotFoundError: There is no such file.
        MiaError: As in `read_questions`.
    """
    nodes: list[Unit] = []
    first_line: dict[str, str] = {}
    for where, raw in _objects(path, ("id", "name", "description", "book")):
        name, description, book = _text(raw, "name", where), _text(raw, "description", where), _book(raw, where, books)
        default = f"node:{name}" if book is None else f"node:{book}:{name}"
        node = Unit(_text(raw, "id", where) if raw.get("id") is not None else default, f"{name} : {description}", book)
        if node.id in first_line:
            raise MiaError(f"{where}: node {node.id!r} is that of {first_line[node.id]} too; give them different ids")
        first_line[node.id] = where
        nodes.append(node)
    if not nodes:
        raise MiaError(f"{path}: no nodes; give one {{'name', 'description'}} a line, or leave --nodes out")
    return nodes


def _objects(path: str | Path, allowed: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give JSON lines with the keys {', '.join(allowed)}")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                raw = json.loads(text)
            except UnicodeDecodeError as error:
                raise MiaError(f"{where}: not UTF-8 (byte {error.start + 1} of the line); convert it") from None
            except (ValueError, RecursionError) as error:  # beside wrong JSON: too many digits, nested too deeply
                said = getattr(error, "msg", str(error))
                raise MiaError(f"{where}: not JSON ({said}); write one object a line") from None
            if not isinstance(raw, dict):
                raise MiaError(f"{where}: a {type(raw).__name__}; write one object a line")
            unknown = [key for key in raw if key not in allowed]
            if unknown:
                raise MiaError(f"{where}: unknown key {unknown[0]!r}; allowed: {', '.join(allowed)}")
            yield where, raw


def _text(raw: dict[str, Any], key: str, where: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not value.strip():
        got = "missing" if key not in raw else "empty" if isinstance(value, str) else repr(value)
        raise MiaError(f"{where}: {key!r} is {got}; it must be a non-empty string")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise MiaError(f"{where}: {key!r} holds half of a surrogate pair, which is no text; clean the file")
    return value


def _book(raw: dict[str, Any], where: str, books: Collection[str]) -> str | None:
    if raw.get("book") is None:
        return None
    book = _text(raw, "book", where)
    if book not in books:
        some = ", ".join(sorted(books)[:5]) + (", …" if len(books) > 5 else "")
        raise MiaError(f"{where}: the mindscape has no book {book!r}; it has {some}")
    return book
