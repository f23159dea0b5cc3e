"""NovelHopQA (Gupta et al., 2025): free questions of one to four hops about novels, with the context they are from."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from mia_serve.core import MiaError
from mia_serve.eval.qa_data.base import Loaded, QaBook, QaQuestion, QaSource
from mia_serve.eval.qa_data.files import (
    find_table,
    hub_folder,
    local_folder,
    missing,
    read_rows,
    read_text,
    text_of,
)
from mia_serve.eval.qa_data.story_text import author_of, story_of, title_of

_HOPS = ("hop_1", "hop_2", "hop_3", "hop_4")
SOURCE = QaSource(
    "novelhopqa",
    ("all", *_HOPS),
    ("novelhopqa",),
    "hop_1.jsonl to hop_4.jsonl of huggingface.co/datasets/abhaygupta1266/novelhopqa and its novels as books/TITLE.txt "
    "or books.jsonl {title, text}",
    hub="abhaygupta1266/novelhopqa",
)
#: Where the hub keeps any data set as Parquet: CONFIG/SPLIT/NUMBER.parquet.
_PARQUET = "refs/convert/parquet"
_NOT_FOUND = "the context is not found in the novel"
_BLANK_LINE = re.compile(r"\n\s*\n")


def load(split: str, data_dir: str | Path | None = None) -> Loaded:
    """Load NovelHopQA: gold is where a question's ``context`` stands in the novel.

    The data set has no novels: they are read from ``books/*.txt`` (called by their title) or ``books.jsonl``. A context
    is looked for as it is, then whatever its white space, then paragraph by paragraph; where a paragraph is not found
    the gold is unknown.

    Args:
        split: ``hop_1`` to ``hop_4``, or ``all``.
        data_dir: Folder with the files, or with ``novelhopqa/``; the one that MIA_DATA names when not given. Questions
            that are not there are downloaded.

    Raises:
        MiaError: A row is wrong.
        FileNotFoundError: There are no novels, or no questions and they cannot be downloaded.
    """
    folder = local_folder(SOURCE, data_dir)
    shelf = Shelf(_novels(folder)) if folder else None
    if folder is None or shelf is None or not shelf.books:
        raise missing(SOURCE, "books/*.txt nor books.jsonl with the novels", folder)
    loaded = Loaded({}, [], no_gold={"": _NOT_FOUND})
    finders: dict[str, Finder] = {}
    dropped: Counter[str] = Counter()
    for hop in _HOPS if split == "all" else (split,):
        tables = find_table(folder, hop)
        if not tables:
            there = hub_folder(SOURCE, [f"*/{hop}/*.parquet"], _PARQUET)
            tables = sorted(there.glob(f"*/{hop}/*.parquet"))
        if not tables:
            raise missing(SOURCE, f"{hop}.jsonl", folder)
        for number, (where, row) in enumerate(item for table in tables for item in read_rows(table)):
            book = shelf.find(text_of(row, "book", where))
            if book is None:
                dropped["the novel is not at hand"] += 1
                continue
            answer = text_of(row, "answer", where, empty=True).strip()
            if not answer:
                dropped["the answer is empty"] += 1
                continue
            loaded.books[book.id] = book
            if book.id not in finders:
                finders[book.id] = Finder(book.text)
            loaded.questions.append(
                QaQuestion(
                    id=f"{hop}:q{number}",
                    text=text_of(row, "question", where).strip(),
                    task="free",
                    book=book.id,
                    answers=(answer,),
                    gold_spans=finders[book.id].spans(text_of(row, "context", where, empty=True)),
                    tags={"hops": int(hop[-1])},
                )
            )
    loaded.dropped = dict(dropped)
    return loaded


class Shelf:
    """Novels by title: as it is written, or without what follows its first ``:``, ``;``, ``,`` or ``(``."""

    def __init__(self, books: list[QaBook]) -> None:
        self.books = {book.id: book for book in books}
        self._short: dict[str, list[QaBook]] = {}
        for book in books:
            self._short.setdefault(_key(_head(book.title)), []).append(book)

    def find(self, title: str) -> QaBook | None:
        """Return the novel with a title; None where none has it, or where only a part of the title fits several."""
        exact = self.books.get(_key(title))
        if exact is not None:
            return exact
        fitting = self._short.get(_key(_head(title)), [])
        return fitting[0] if len(fitting) == 1 else None


class Finder:
    """Finds passages in a text, and where they stand in it."""

    def __init__(self, text: str) -> None:
        self._text = text
        words = list(re.finditer(r"\S+", text))
        self._starts = [word.start() for word in words]
        self._squeezed = " ".join(word[0] for word in words)
        lengths = (len(word[0]) + 1 for word in words)
        self._squeezed_starts = list(accumulate(lengths, initial=0))[:-1]

    def span(self, passage: str) -> tuple[int, int] | None:
        """Return where a passage stands for the first time, whatever its white space; None where it does not."""
        passage = passage.strip()
        start = self._text.find(passage)
        if start >= 0 and passage:
            return start, start + len(passage)
        squeezed = " ".join(passage.split())
        found = self._squeezed.find(squeezed)
        if found < 0 or not squeezed:
            return None
        return self._origin(found), self._origin(found + len(squeezed) - 1) + 1

    def spans(self, context: str) -> tuple[tuple[int, int], ...] | None:
        """Return where a context stands: whole, or paragraph by paragraph; None where a part of it is not found."""
        whole = self.span(context)
        if whole is not None:
            return (whole,)
        parts = [self.span(part) for part in _BLANK_LINE.split(context) if part.strip()]
        found = sorted({part for part in parts if part is not None})
        return tuple(found) if parts and None not in parts else None

    def _origin(self, position: int) -> int:
        """Return where a character of the squeezed text stands in the text."""
        word = bisect_right(self._squeezed_starts, position) - 1
        return self._starts[word] + position - self._squeezed_starts[word]


def _novels(folder: Path) -> list[QaBook]:
    books: dict[str, QaBook] = {}
    for where, title, author, text in _sources(folder):
        name = _key(title)
        if not name:
            raise MiaError(f"{where}: the title {title!r} has no letter or digit")
        if name in books:
            raise MiaError(f"{where}: two novels are called {title!r}; keep one")
        books[name] = QaBook(name, title, author or author_of(text), story_of(text))
    return list(books.values())


def _sources(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Read (where, title, author, text) of all novels."""
    for table in find_table(folder, "books"):
        for where, row in read_rows(table):
            author = text_of(row, "author", where, empty=True) if row.get("author") is not None else ""
            yield where, text_of(row, "title", where), author, text_of(row, "text", where)
    for path in sorted((folder / "books").rglob("*.txt")):
        text = read_text(path)
        yield str(path), title_of(text) or path.stem.replace("_", " "), "", text


def _head(title: str) -> str:
    return re.split(r"[:;,(]", title, maxsplit=1)[0]


def _key(title: str) -> str:
    """Return what a title has in common with other ways to write it; it is the book's id."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", title.casefold()) if not unicodedata.combining(c))
    words = re.findall(r"\w+", re.sub(r"['’]", "", plain).replace("_", " "))
    return "-".join(words[1:] if len(words) > 1 and words[0] in ("the", "a", "an") else words)
