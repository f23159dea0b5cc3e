"""FairytaleQA (Xu et al., ACL 2022) as question answering: its sections are the chunks, and mark the evidence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.qa_data.base import Loaded, QaBook, QaQuestion, QaSource
from mia_serve.eval.qa_data.files import find_table, local_folder, missing, read_rows, text_of, texts_of

SOURCE = QaSource(
    "fairytaleqa",
    ("val", "train", "test"),
    ("fairytaleqa",),
    "github.com/uci-soe/FairytaleQAData as train.jsonl, val.jsonl and test.jsonl, one story a line: "
    "{story, origin, sections, section_ids, questions}",
    chunk_tokens=0,
    overlap=0,
    series="all",
)


def load(split: str, data_dir: str | Path | None = None) -> Loaded:
    """Load FairytaleQA: a story is a book, and all stories of a fairy book are asked together.

    The stories of the other splits are there too, where their files are: the splits are by story, so a fairy book mixes
    them. Ids of chunks and questions are those of ``mia_serve.eval.datasets``.

    Args:
        split: ``train``, ``val`` or ``test``.
        data_dir: Folder with the files, or with ``fairytaleqa/``; the one that MIA_DATA names when not given.

    Raises:
        MiaError: A row is wrong, or a question's sections are not in its story.
        FileNotFoundError: The file of the split is not there.
    """
    folder = local_folder(SOURCE, data_dir)
    if folder is None or not find_table(folder, split):
        raise missing(SOURCE, f"{split}.jsonl", folder)
    loaded = Loaded({}, [])
    origins: dict[str, list[str]] = {}
    # One order of the stories whatever the split asked for, so that results can be compared.
    for part in ("train", "val", "test"):
        for where, row in (item for table in find_table(folder, part) for item in read_rows(table)):
            book = _story(row, where)
            if book.id in loaded.books:
                raise MiaError(f"{where}: story {book.id!r} occurs twice; give every story once")
            loaded.books[book.id] = book
            origins.setdefault(text_of(row, "origin", where), []).append(book.id)
            if part == split:
                loaded.questions += _questions(row, book, where)
    loaded.haystacks = {origin: tuple(origins[origin]) for origin in sorted(origins)}
    return loaded


def _story(row: dict[str, Any], where: str) -> QaBook:
    story = text_of(row, "story", where)
    sections, numbers = row.get("sections"), row.get("section_ids")
    if not (isinstance(sections, list) and isinstance(numbers, list) and len(sections) == len(numbers) > 0):
        raise MiaError(f"{where}: 'sections' and 'section_ids' are not two lists of one length")
    if not all(isinstance(text, str) and text.strip() for text in sections):
        raise MiaError(f"{where}: a section of 'sections' is no text, or empty")
    seen: Counter[Any] = Counter()
    chunks = []
    for number, text in zip(numbers, sections, strict=True):
        seen[number] += 1
        again = f".{seen[number]}" if seen[number] > 1 else ""
        chunks.append((f"{story}:{number}{again}", text))
    return QaBook(story, story.replace("-", " ").replace("_", " "), sections=tuple(chunks))


def _questions(row: dict[str, Any], book: QaBook, where: str) -> list[QaQuestion]:
    pairs = row.get("questions")
    if not isinstance(pairs, list) or not all(isinstance(pair, dict) for pair in pairs):
        raise MiaError(f"{where}: 'questions' is no list of objects")
    questions = []
    for i, pair in enumerate(pairs):
        here = f"{where}, question {i}"
        sections = pair.get("sections")
        if not isinstance(sections, list) or not sections or not set(sections) <= set(row["section_ids"]):
            raise MiaError(f"{here}: sections {sections} are not in its story")
        ids = (chunk_id for chunk_id, _ in book.sections)
        gold = tuple(i for i, number in zip(ids, row["section_ids"], strict=True) if number in sections)
        tags = {key: pair[key] for key in ("attribute", "explicit") if isinstance(pair.get(key), str)}
        text, answers = text_of(pair, "question", here), texts_of(pair.get("answers", ()), "answers", here)
        questions.append(QaQuestion(f"{book.id}:q{i}", text, "free", book.id, answers, gold_chunks=gold, tags=tags))
    return questions
