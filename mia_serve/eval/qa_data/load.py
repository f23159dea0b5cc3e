"""Load a question-answering benchmark by name: its files, series of books, silver evidence, a part of its questions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mia_serve.core import MiaError
from mia_serve.eval.qa_data import detectiveqa, fairytaleqa, literaryqa, narrativeqa, nocha, novelhopqa
from mia_serve.eval.qa_data.base import Loaded, QaBenchmark, QaQuestion, QaSource
from mia_serve.eval.qa_data.evidence import apply_evidence, read_evidence
from mia_serve.eval.qa_data.files import read_json

_LOADERS = {m.SOURCE.name: m for m in (narrativeqa, literaryqa, detectiveqa, novelhopqa, nocha, fairytaleqa)}

#: Name -> benchmark: its splits (the first is the default), where its files come from, the papers' settings.
QA_BENCHMARKS: Mapping[str, QaSource] = {name: module.SOURCE for name, module in _LOADERS.items()}

SeriesMap = Mapping[str, Sequence[str]]
#: Line breaks, other control characters and halves of characters: an id with one would break tables and JSON lines.
_NOT_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def load_qa(
    name: str,
    split: str | None = None,
    *,
    series: bool | str | Path | SeriesMap = False,
    data_dir: str | Path | None = None,
    limit: int | None = None,
    evidence: str | Path | None = None,
) -> QaBenchmark:
    """Load a question-answering benchmark.

    Args:
        name: One of `QA_BENCHMARKS`.
        split: Split of the questions; the benchmark's first where None.
        series: Ask all books of a series together. True: the books of one author (of FairytaleQA all stories). A map,
            or a JSON file with one: series -> ids of its books. Questions about books without a series are left out.
        data_dir: Folder with the benchmark's files, or with a folder of its name; the one that MIA_DATA names where
            None.
        limit: Most questions, evenly spread over the books; the claims of a pair stay together.
        evidence: File of silver evidence (`mia-train silver`), which replaces the gold of the questions it has rows of.

    Raises:
        MiaError: Unknown name or split, no question is left, or a file is wrong (named with its line).
        FileNotFoundError: Files are not there.
    """
    if name not in QA_BENCHMARKS:
        raise MiaError(f"no benchmark {name!r}: choose from {', '.join(QA_BENCHMARKS)}")
    source = QA_BENCHMARKS[name]
    split = source.splits[0] if split is None else split
    if split not in source.splits:
        raise MiaError(f"{name} has no split {split!r}: choose from {', '.join(source.splits)}")
    if limit is not None and limit < 1:
        raise MiaError(f"limit is {limit}: it must be at least 1")
    wanted = _series_map(source, series)
    silver = read_evidence(evidence) if evidence is not None else {}
    loaded = _LOADERS[name].load(split, data_dir)
    _check(source, loaded)
    read: Mapping[str, int] = {}
    if evidence is not None:
        loaded.questions, read = apply_evidence(loaded.questions, silver, evidence)
    haystacks = _haystacks(source, loaded, wanted)
    questions = _spread(_by_book(source, loaded, haystacks), limit)
    asked = {question.book for question in questions}
    haystacks = {key: books for key, books in haystacks.items() if asked & set(books)}
    return QaBenchmark(
        name=name,
        split=split,
        language=loaded.language,
        books={book: loaded.books[book] for books in haystacks.values() for book in books},
        questions=tuple(questions),
        series=haystacks,
        chunk_tokens=source.chunk_tokens,
        overlap=source.overlap,
        mode=source.mode,
        dropped=loaded.dropped,
        without_gold=Counter(loaded.no_gold.get(q.id, loaded.no_gold.get("", "")) for q in questions if not q.has_gold),
        evidence=read,
    )


def _series_map(source: QaSource, series: bool | str | Path | SeriesMap) -> bool | SeriesMap:
    """Read the map of a file, and refuse series where the papers ask about single books."""
    if series is not False and source.series == "never":
        raise MiaError(f"{source.name} asks about single novels: leave series out")
    if isinstance(series, bool | Mapping):
        return series
    path = Path(series)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give a JSON object of series: {{name: [ids of books]}}")
    content = read_json(path)
    lists = content.values() if isinstance(content, dict) else ()
    if not lists or not all(isinstance(ids, list) and all(isinstance(i, str) for i in ids) for ids in lists):
        raise MiaError(f"{path}: not a JSON object of series: {{name: [ids of books]}}, ids as texts")
    return content


def _haystacks(source: QaSource, loaded: Loaded, series: bool | SeriesMap) -> dict[str, tuple[str, ...]]:
    """Return haystack -> ids of its books."""
    if series is False:
        return dict(loaded.haystacks or {book: (book,) for book in loaded.books})
    if series is True and source.series == "all":
        # Haystack by haystack, as they come without series.
        return {source.name: tuple(book for books in (loaded.haystacks or {}).values() for book in books)}
    from mia_serve.mindscape.series import group_books

    found = group_books(list(loaded.books.values()), "author" if series is True else series)
    if not found and series is not True:
        raise MiaError(f"{source.name}: the map has no series of two books or more; give {{name: [ids of books]}}")
    if not found:
        named = sum(bool(book.author.strip()) for book in loaded.books.values())
        raise MiaError(
            f"{source.name}: no two of the {len(loaded.books)} books have one author ({named} have any): give a map "
            "of series, a JSON object {name: [ids of books]}"
        )
    return {key: tuple(books) for key, books in found.items()}


def _by_book(source: QaSource, loaded: Loaded, haystacks: Mapping[str, Sequence[str]]) -> list[list[QaQuestion]]:
    """Return the questions whose book is in a haystack, book by book; the claims of a pair are one item."""
    place: dict[str, int] = {}
    for books in haystacks.values():
        for book in books:
            if book in place:
                raise MiaError(f"{source.name}: book {book!r} is in two series; give it one")
            place[book] = len(place)
    units: dict[tuple[str, str], list[QaQuestion]] = {}
    for question in loaded.questions:
        if question.book in place:
            key = ("question", question.id) if question.pair is None else ("pair", question.pair)
            units.setdefault(key, []).append(question)
    left = sum(map(len, units.values()))
    if left < len(loaded.questions):
        loaded.dropped["the book is in no series"] = len(loaded.questions) - left
    if not units:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in loaded.dropped.items()) or "the split is empty"
        raise MiaError(f"{source.name}: no question is left ({reasons})")
    return sorted(units.values(), key=lambda unit: place[unit[0].book])


def _spread(units: Sequence[list[QaQuestion]], limit: int | None) -> list[QaQuestion]:
    """Take at most ``limit`` questions, in whole units evenly spread over all of them."""
    size = max(map(len, units))
    if limit is not None and limit < size:
        raise MiaError(f"limit is {limit}: the {size} claims of a pair stay together, so it must be at least {size}")
    count = len(units) if limit is None else min(len(units), limit // size)
    return [question for i in range(count) for question in units[i * len(units) // count]]


def _check(source: QaSource, loaded: Loaded) -> None:
    """Refuse names that occur twice or cannot stand in a line, and texts that are no text."""
    chunks = [chunk for book in loaded.books.values() for chunk, _ in book.sections]
    questions = [question.id for question in loaded.questions]
    for what, names in (("question", questions), ("chunk", chunks), ("book", list(loaded.books))):
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise MiaError(f"{source.name}: {what} id {twice!r} occurs twice; give every {what} its own")
        wrong = next((name for name in names if not name.strip() or _NOT_IN_NAMES.search(name)), None)
        if wrong is not None:
            raise MiaError(f"{source.name}: {what} id {wrong!r} is empty or holds a control character; rename it")
    for book in loaded.books.values():
        _check_text("\n".join((book.title, book.text, *(text for _, text in book.sections))), source, book.id)
    for question in loaded.questions:
        _check_text("\n".join((question.text, *question.answers, *question.options)), source, question.id)


def _check_text(text: str, source: QaSource, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MiaError(
            f"{source.name}, {name!r}: its text holds {text[error.start]!r}, half a character; write it whole or "
            "remove it"
        ) from None
