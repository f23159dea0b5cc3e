"""Saltmarsh: the project's own detective series, three books in English and one in Chinese; packaged."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.datasets.base import Benchmark, Query, Source, assemble, check_split, read_json_lines, take_evenly
from mia_serve.mindscape import Book, Mindscape

SOURCE = Source("saltmarsh", ("train", "test"), "the package itself")

#: The books are short, so their windows are half the papers' 20 passages.
WINDOW = 10

_LANGUAGES = ("en", "zh")


def load(split: str, series: bool, limit: int | None = None, folder: Any = None) -> Benchmark:
    """Load Saltmarsh: a passage is a chunk, `{book}:{i}`; gold are the passages that hold the question's quotes.

    Args:
        split: `train` or `test`.
        series: Pool the four books.
        limit: Most questions.
        folder: Folder to read instead of the packaged one.

    Raises:
        MiaError: A file is not as it should be; the message names the question or book.
    """
    check_split(SOURCE, split)
    folder = folder if folder is not None else files("mia_serve.eval") / "saltmarsh"
    summaries: dict[str, dict[int, str]] = {}
    questions: list[tuple[str, dict[str, Any]]] = []
    for language in _LANGUAGES:
        for row in read_json_lines(folder / f"summaries.{language}.jsonl"):
            summaries.setdefault(row["book"], {})[row["window"]] = row["summary"]
        questions += [(language, row) for row in read_json_lines(folder / f"questions.{language}.jsonl")]
    books = sorted(item for item in (folder / "books").iterdir() if item.name.endswith(".txt"))
    mindscapes = {}
    for item in books:
        book = _read_book(item.name.removesuffix(".txt"), item.read_text(encoding="utf-8"), summaries)
        mindscapes[book.id] = Mindscape.from_books([book], window=WINDOW, summarizer="saltmarsh")
    queries = []
    for language, row in questions:
        if row["split"] not in SOURCE.splits:
            raise MiaError(
                f"saltmarsh, question {row['id']!r}: split {row['split']!r} is none of {', '.join(SOURCE.splits)}"
            )
        if row["split"] != split:
            continue
        if row["book"] not in mindscapes:
            raise MiaError(f"saltmarsh, question {row['id']!r}: no book {row['book']!r} in {', '.join(mindscapes)}")
        gold = find_gold(row["id"], row["evidence"], mindscapes[row["book"]])
        tags = {"kind": row["kind"], "language": language}
        queries.append(Query(row["id"], row["question"], gold, row["book"], row["answer"], tags))
    return assemble(SOURCE, split, series, mindscapes, take_evenly(queries, limit))


def find_gold(question_id: str, quotes: list[str], mindscape: Mindscape) -> tuple[str, ...]:
    """Find the passages that hold a question's quotes; line breaks and runs of spaces do not matter.

    Returns:
        Ids of the passages, in document order.

    Raises:
        MiaError: There is no quote, or one is not found exactly once in the book.
    """
    if not quotes:
        raise MiaError(f"saltmarsh, question {question_id!r}: it has no evidence quote")
    passages = [_one_line(chunk.text) for chunk in mindscape.chunks]
    rows = set()
    for quote in quotes:
        wanted = _one_line(quote)
        counts = [passage.count(wanted) if wanted else 0 for passage in passages]
        if sum(counts) != 1:
            raise MiaError(
                f"saltmarsh, question {question_id!r}: quote {quote!r} is found {sum(counts)} times in its book; "
                "it must occur exactly once, within one passage"
            )
        rows.add(counts.index(1))
    return tuple(mindscape.chunks[row].id for row in sorted(rows))


def _read_book(book_id: str, text: str, summaries: dict[str, dict[int, str]]) -> Book:
    title, _, body = text.lstrip("\ufeff").partition("\n")
    if not title.startswith("# ") or not title[2:].strip():
        raise MiaError(f"saltmarsh, book {book_id!r}: its first line is {title!r}; it must be `# Title`")
    passages = tuple(passage.strip() for passage in re.split(r"\n\s*\n", body) if passage.strip())
    own = summaries.get(book_id, {})
    windows = -(-len(passages) // WINDOW)
    if sorted(own) != list(range(windows)):
        raise MiaError(
            f"saltmarsh, book {book_id!r}: {len(passages)} passages make windows 0 to {windows - 1}, "
            f"the summaries are for {sorted(own)}"
        )
    return Book(book_id, passages, title[2:].strip(), summaries=tuple(own[w] for w in range(windows)))


def _one_line(text: str) -> str:
    return " ".join(text.split())
