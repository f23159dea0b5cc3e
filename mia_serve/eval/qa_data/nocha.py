"""NoCha (Karpinska et al., EMNLP 2024): pairs of a true and a false claim about a whole novel.

The authors published the four classics that they annotated (63 pairs), not the rest, whose novels are in copyright.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.qa_data.base import Loaded, QaBook, QaQuestion, QaSource
from mia_serve.eval.qa_data.files import find_table, local_folder, missing, name_of, read_rows, read_text, text_of

SOURCE = QaSource(
    "nocha",
    ("all",),
    ("nocha_sample", "nocha"),
    "claims.jsonl (or data_sample.json) of github.com/marzenakrp/nocha and the novels as books.jsonl "
    "{book_title, text} or books/BOOK_TITLE.txt",
    chunk_tokens=200,
    overlap=0,
    mode="chunks+sig+evi",
    series="never",
)
_CLAIMS = ("claims", "data_sample")
_NO_GOLD = "NoCha marks no evidence in the novels"
_HEADER = re.compile(r"\s*title:(?P<title>[^\n]*)\n\s*author:(?P<author>[^\n]*)\n")


def load(split: str, data_dir: str | Path | None = None) -> Loaded:
    """Load NoCha: task ``claim``, label TRUE or FALSE, ``index`` of a book makes the pair.

    Args:
        split: ``all``.
        data_dir: Folder with the files, or with ``nocha_sample/``; the one that MIA_DATA names when not given.

    Raises:
        MiaError: A row is wrong, or a pair has not one true and one false claim.
        FileNotFoundError: The files are not there.
    """
    folder = local_folder(SOURCE, data_dir)
    tables = [table for stem in _CLAIMS if folder for table in find_table(folder, stem)]
    if folder is None or not tables:
        raise missing(SOURCE, "claims.jsonl", folder)
    books = _books(folder)
    questions: list[QaQuestion] = []
    absent = 0
    for where, row in read_rows(tables[0]):
        question = _claim(row, where)
        if question.book in books:
            questions.append(question)
        else:
            absent += 1
    _check_pairs(questions, tables[0])
    dropped = {"the novel is not at hand": absent} if absent else {}
    return Loaded(books, questions, dropped=dropped, no_gold={"": _NO_GOLD})


def _books(folder: Path) -> dict[str, QaBook]:
    tables = find_table(folder, "books")
    if tables:
        rows = [(text_of(row, "book_title", where), text_of(row, "text", where)) for where, row in read_rows(tables[0])]
    else:
        rows = [(path.stem, read_text(path)) for path in sorted((folder / "books").glob("*.txt"))]
    if not rows:
        raise missing(SOURCE, "books.jsonl nor books/*.txt (a pickle is not read: convert it)", folder)
    books = {}
    for name, text in rows:
        found = _HEADER.match(text)
        title, author = (found["title"], found["author"]) if found else (name.replace("_", " "), "")
        books[name] = QaBook(name, title.strip(), author.strip(), text)
    return books


def _claim(row: dict[str, Any], where: str) -> QaQuestion:
    label = str(row.get("type")).upper()
    if label not in ("TRUE", "FALSE"):
        raise MiaError(f"{where}: 'type' is {row.get('type')!r}: it must be true or false")
    book = text_of(row, "book_title", where)
    pair = f"{book}:{name_of(row, 'index', where)}"
    return QaQuestion(
        id=f"{pair}:{label.lower()}",
        text=text_of(row, "claim", where),
        task="claim",
        book=book,
        label=label,
        pair=pair,
        tags={key: row[key] for key in ("genre", "length_group", "length_bucket") if isinstance(row.get(key), str)},
    )


def _check_pairs(questions: list[QaQuestion], path: Path) -> None:
    labels: dict[str | None, list[str]] = {}
    for question in questions:
        labels.setdefault(question.pair, []).append(question.label)
    for pair, found in labels.items():
        if sorted(found) != ["FALSE", "TRUE"]:
            raise MiaError(f"{path}: pair {pair!r} has the claims {', '.join(found)}; a pair is one TRUE and one FALSE")
