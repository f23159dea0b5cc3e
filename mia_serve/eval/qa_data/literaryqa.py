"""LiteraryQA (Bonomo et al., EMNLP 2025): the novels of NarrativeQA with the questions and answers cleaned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.qa_data.base import Loaded, QaBook, QaQuestion, QaSource
from mia_serve.eval.qa_data.files import find_table, local_folder, missing, name_of, read_rows, text_of, texts_of

SOURCE = QaSource(
    "literaryqa",
    ("test", "validation", "all"),
    ("literaryqa",),
    "test.jsonl and validation.jsonl of github.com/SapienzaNLP/LiteraryQA (data/annotations) and the novels as "
    "novels.jsonl {gutenberg_id, title, text}",
)


def load(split: str, data_dir: str | Path | None = None) -> Loaded:
    """Load LiteraryQA: free questions with one or two answers, and a human summary of each book.

    A book's id is its number at Project Gutenberg. No evidence is marked; silver evidence can be made.

    Args:
        split: ``test``, ``validation`` or ``all`` (both).
        data_dir: Folder with the files, or with ``literaryqa/``; the one that MIA_DATA names when not given.

    Raises:
        MiaError: A row is wrong.
        FileNotFoundError: The files are not there.
    """
    folder = local_folder(SOURCE, data_dir)
    novels = find_table(folder, "novels") if folder else []
    if folder is None or not novels:
        raise missing(SOURCE, "novels.jsonl", folder)
    texts = {}
    for where, row in read_rows(novels[0]):
        texts[name_of(row, "gutenberg_id", where)] = text_of(row, "text", where)
    loaded = Loaded({}, [], no_gold={"": "LiteraryQA marks no evidence; silver evidence can be given"})
    absent = 0
    for part in SOURCE.splits[:2] if split == "all" else (split,):
        tables = find_table(folder, part)
        if not tables:
            raise missing(SOURCE, f"{part}.jsonl", folder)
        for where, row in read_rows(tables[0]):
            book, questions = _document(row, where, texts)
            if not book.text:
                absent += len(questions)
                continue
            if book.id in loaded.books:
                raise MiaError(f"{where}: gutenberg_id {book.id!r} occurs twice; give every book once")
            loaded.books[book.id] = book
            loaded.questions += questions
    if absent:
        loaded.dropped["the novel is not at hand"] = absent
    return loaded


def _document(row: dict[str, Any], where: str, texts: dict[str, str]) -> tuple[QaBook, list[QaQuestion]]:
    name = name_of(row, "gutenberg_id", where)
    metadata = row.get("metadata") or {}
    author = metadata.get("author") if isinstance(metadata, dict) else ""
    book = QaBook(
        name,
        text_of(row, "title", where).strip(),
        author if isinstance(author, str) else "",
        texts.get(name, ""),
        summary=text_of(row, "summary", where, empty=True).strip(),
    )
    pairs = row.get("qas")
    if not isinstance(pairs, list):
        raise MiaError(f"{where}: 'qas' is {type(pairs).__name__}, not a list of questions")
    questions = []
    for i, pair in enumerate(pairs):
        here = f"{where}, question {i}"
        if not isinstance(pair, dict):
            raise MiaError(f"{here}: {type(pair).__name__}, not an object")
        answers = texts_of(pair.get("answers", ()), "answers", here)
        questions.append(QaQuestion(f"{name}:q{i}", text_of(pair, "question", here).strip(), "free", name, answers))
    return book, questions
