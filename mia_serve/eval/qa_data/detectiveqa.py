"""DetectiveQA (Xu et al., 2024): four-way choices about detective novels, in English and in Chinese."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from mia_serve.core import MiaError
from mia_serve.eval.qa_data.base import Loaded, QaBook, QaQuestion, QaSource
from mia_serve.eval.qa_data.files import hub_folder, local_folder, missing, read_json, read_text, text_of

SOURCE = QaSource(
    "detectiveqa",
    ("en", "zh"),
    ("detectiveqa", "DetectiveQA"),
    "anno_data_en/ and novel_data_en/ (or _zh) of huggingface.co/datasets/Phospheneser/DetectiveQA",
    hub="Phospheneser/DetectiveQA",
)
#: How questions were written: by people, or by a model under their eyes.
_ANNOTATIONS = ("human_anno", "AIsup_anno")
_NO_POSITION = "the answer has no paragraph (answer_position is -1)"
_NO_PARAGRAPH = "the answer's paragraph is empty, or not in the novel"
_MARK = re.compile(r"^\[(\d+)\][^\S\n]?", re.MULTILINE)
_LETTERS = ("A", "B", "C", "D")


class Novel(NamedTuple):
    """A novel without its paragraph numbers; ``spans`` are the character spans of its paragraphs in ``text``."""

    text: str
    spans: dict[int, tuple[int, int]]


def load(split: str, data_dir: str | Path | None = None) -> Loaded:
    """Load DetectiveQA: gold are the paragraphs of ``answer_position``; ``clue_position`` is kept in the tags.

    A book's id is the number of the novel; its file is called ``ID-TITLE-AUTHOR.txt``.

    Args:
        split: Language, ``en`` or ``zh``.
        data_dir: Folder with the files, or with ``detectiveqa/``; the one that MIA_DATA names when not given. Without
            it the files are downloaded.

    Raises:
        MiaError: An annotation or a novel is wrong.
        FileNotFoundError: The files are not there and cannot be downloaded.
    """
    folder = local_folder(SOURCE, data_dir)
    if folder is None:
        folder = hub_folder(SOURCE, [f"anno_data_{split}/*", f"novel_data_{split}/*"])
    annotations = sorted(
        (path for kind in _ANNOTATIONS for path in (folder / f"anno_data_{split}" / kind).glob("*.json")),
        key=lambda path: (path.stem.zfill(9), path.parent.name),
    )
    files = {path.name.partition("-")[0]: path for path in sorted((folder / f"novel_data_{split}").glob("*.txt"))}
    if not annotations or not files:
        raise missing(SOURCE, f"anno_data_{split}/*/*.json with novel_data_{split}/*.txt", folder)
    loaded = Loaded({}, [], language=split, no_gold={"": _NO_POSITION})
    novels: dict[str, Novel] = {}
    absent = 0
    for path in annotations:
        name, rows = _annotation(path)
        if name not in files:
            absent += len(rows)
            continue
        if name not in novels:
            novels[name] = read_novel(files[name])
            loaded.books[name] = _book(name, files[name], novels[name])
        for i, row in enumerate(rows):
            question = _question(row, i, name, path, novels[name])
            loaded.questions.append(question)
            if question.tags["answer_position"]:
                loaded.no_gold[question.id] = _NO_PARAGRAPH
    if absent:
        loaded.dropped["the novel is not at hand"] = absent
    return loaded


def read_novel(path: Path) -> Novel:
    """Read a novel of ``[n]``-numbered paragraphs; lines without a number go on with the paragraph before.

    The numbers of paragraphs rise; a smaller one that begins a line is text (of a note).

    Raises:
        MiaError: It has no numbered paragraph.
    """
    raw = read_text(path)
    marks: list[re.Match[str]] = []
    for mark in _MARK.finditer(raw):
        if not marks or int(mark[1]) > int(marks[-1][1]):
            marks.append(mark)
    if not marks:
        raise MiaError(f"{path}, line 1: no paragraph begins with its number, as in '[1] Once'")
    pieces = [raw[: marks[0].start()]]
    length = len(pieces[0])
    spans: dict[int, tuple[int, int]] = {}
    ends = [mark.start() for mark in marks[1:]] + [len(raw)]
    for mark, end in zip(marks, ends, strict=True):
        number, piece = int(mark[1]), raw[mark.end() : end]
        start = length + len(piece) - len(piece.lstrip())
        spans[number] = (start, start + len(piece.strip()))
        pieces.append(piece)
        length += len(piece)
    return Novel("".join(pieces), spans)


def _book(name: str, path: Path, novel: Novel) -> QaBook:
    title, _, author = path.stem.partition("-")[2].rpartition("-")
    return QaBook(name, title or author or name, author if title else "", novel.text)


def _annotation(path: Path) -> tuple[str, list[Any]]:
    """Read an annotation's novel and its questions."""
    content = read_json(path)
    entry = content[0] if isinstance(content, list) and len(content) == 1 else content
    if not isinstance(entry, dict) or not isinstance(entry.get("questions"), list):
        raise MiaError(f"{path}, line 1: not a list of one object with 'questions'")
    name = str(entry.get("novel_id", path.stem))
    if name != path.stem:
        raise MiaError(f"{path}, line 1: 'novel_id' is {name}, the file is called {path.stem}")
    return name, entry["questions"]


def _question(row: Any, number: int, book: str, path: Path, novel: Novel) -> QaQuestion:
    where = f"{path}, question {number}"
    if not isinstance(row, dict):
        raise MiaError(f"{where}: {type(row).__name__}, not an object")
    options = row.get("options")
    if not isinstance(options, dict) or tuple(sorted(options)) != _LETTERS:
        raise MiaError(f"{where}: 'options' is not an object with the keys A, B, C and D")
    label = text_of(row, "answer", where).strip().upper()
    if label not in _LETTERS:
        raise MiaError(f"{where}: 'answer' is {label!r}: it must be A, B, C or D")
    answer = _positions(row, "answer_position", where)
    clues = _positions(row, "clue_position", where)
    spans = tuple(novel.spans.get(i, (0, 0)) for i in answer)
    kind = path.parent.name.partition("_")[0]
    return QaQuestion(
        id=f"{book}:{kind}:q{number}",
        text=text_of(row, "question", where).strip(),
        task="choice",
        book=book,
        options=tuple(text_of(options, letter, f"{where}, options").strip() for letter in _LETTERS),
        label=label,
        gold_spans=spans if spans and all(start < end for start, end in spans) else None,
        tags={"annotation": kind, "answer_position": answer, "clue_position": clues},
    )


def _positions(row: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Read paragraph numbers, one or a list; -1 stands for none."""
    value = row.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise MiaError(f"{where}: {key!r} is {value!r}: it must be paragraph numbers")
    return tuple(dict.fromkeys(i for i in values if i >= 0))
