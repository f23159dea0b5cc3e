"""NarrativeQA (Kočiský et al., TACL 2018): free questions about whole books and film scripts, two answers each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.qa_data.base import Loaded, QaBook, QaQuestion, QaSource
from mia_serve.eval.qa_data.files import (
    Row,
    find_table,
    hub_folder,
    local_folder,
    missing,
    read_rows,
    read_text,
    text_of,
    texts_of,
)
from mia_serve.eval.qa_data.story_text import author_of, story_of

SOURCE = QaSource(
    "narrativeqa",
    ("test", "validation", "train"),
    ("narrativeqa",),
    "github.com/google-deepmind/narrativeqa with its stories (download_stories.sh), or the Parquet files of "
    "huggingface.co/datasets/deepmind/narrativeqa",
    hub="deepmind/narrativeqa",
)
_SUMMARIES = "third_party/wikipedia/summaries.csv"
_NO_GOLD = "NarrativeQA marks no evidence; silver evidence can be given"


def load(split: str, data_dir: str | Path | None = None) -> Loaded:
    """Load NarrativeQA from the authors' repository, or in the schema of the hub.

    The authors' repository: ``documents.csv``, ``qaps.csv``, ``third_party/wikipedia/summaries.csv`` and the stories as
    ``tmp/ID.content``. The hub: ``test-*.parquet`` (or ``test.jsonl``), a question with its whole document a row.
    Questions are numbered within their document, in the order of the source. An author is known where the story names
    one as Project Gutenberg does.

    Args:
        split: ``test``, ``validation`` or ``train``.
        data_dir: Folder with the files, or with ``narrativeqa/``; the one that MIA_DATA names when not given. Without
            it the hub's files are downloaded.

    Raises:
        MiaError: A row is wrong.
        FileNotFoundError: The files are not there and cannot be downloaded.
    """
    folder = local_folder(SOURCE, data_dir)
    if folder is not None and (folder / "qaps.csv").is_file():
        return _without_empty(_from_repository(folder, split))
    if folder is None:
        folder = hub_folder(SOURCE, [f"data/{split}-*.parquet"])
    tables = find_table(folder, split) or find_table(folder / "data", split)
    if not tables:
        raise missing(SOURCE, f"qaps.csv nor {split}-*.parquet", folder)
    return _without_empty(_from_hub(item for table in tables for item in read_rows(table)))


def _from_repository(folder: Path, split: str) -> Loaded:
    name = "valid" if split == "validation" else split
    for needed in ("documents.csv", _SUMMARIES):
        if not (folder / needed).is_file():
            raise missing(SOURCE, needed, folder)
    summaries = {
        text_of(row, "document_id", where): text_of(row, "summary", where, empty=True)
        for where, row in read_rows(folder / _SUMMARIES)
    }
    loaded = Loaded({}, [], no_gold={"": _NO_GOLD})
    kinds = {}
    for where, row in read_rows(folder / "documents.csv"):
        document = text_of(row, "document_id", where)
        if text_of(row, "set", where) != name:
            continue
        kinds[document] = text_of(row, "kind", where)
        story = folder / "tmp" / f"{document}.content"
        if story.is_file():
            title = text_of(row, "wiki_title", where)
            loaded.books[document] = _book(document, title, read_text(story), summaries.get(document, ""))
    asked: dict[str, int] = {}
    for where, row in read_rows(folder / "qaps.csv"):
        document = text_of(row, "document_id", where)
        if text_of(row, "set", where) != name:
            continue
        if document not in kinds:
            raise MiaError(f"{where}: document {document!r} is not in documents.csv as one of set {name!r}")
        answers = texts_of([row.get("answer1"), row.get("answer2")], "answer1, answer2", where)
        _add(loaded, document, text_of(row, "question", where), answers, kinds[document], asked)
    return loaded


def _from_hub(rows: Iterator[Row]) -> Loaded:
    loaded = Loaded({}, [], no_gold={"": _NO_GOLD})
    asked: dict[str, int] = {}
    for where, row in rows:
        document = _object(row, "document", where)
        name = text_of(document, "id", where)
        if name not in loaded.books:
            summary = _object(document, "summary", where)
            text = text_of(document, "text", where, empty=True)
            title = text_of(summary, "title", where, empty=True)
            loaded.books[name] = _book(name, title, text, text_of(summary, "text", where, empty=True))
        answers = row.get("answers")
        if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
            raise MiaError(f"{where}: 'answers' is no list of objects")
        texts = texts_of([answer.get("text") for answer in answers], "answers", where)
        question = text_of(_object(row, "question", where), "text", where)
        _add(loaded, name, question, texts, text_of(document, "kind", where), asked)
    return loaded


def _without_empty(loaded: Loaded) -> Loaded:
    loaded.books = {name: book for name, book in loaded.books.items() if book.text}
    return loaded


def _book(name: str, title: str, text: str, summary: str) -> QaBook:
    return QaBook(name, title.strip() or name, author_of(text), story_of(text), summary=summary.strip())


def _add(loaded: Loaded, document: str, text: str, answers: tuple[str, ...], kind: str, asked: dict[str, int]) -> None:
    number = asked[document] = asked.get(document, -1) + 1
    book = loaded.books.get(document)
    if book is None or not book.text:
        reason = "the story is not at hand"
        loaded.dropped[reason] = loaded.dropped.get(reason, 0) + 1
        return
    question = QaQuestion(f"{document}:q{number}", text.strip(), "free", document, answers, tags={"kind": kind})
    loaded.questions.append(question)


def _object(row: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = row.get(key)
    if not isinstance(value, dict):
        raise MiaError(f"{where}: {key!r} is {type(value).__name__}, not an object")
    return value
