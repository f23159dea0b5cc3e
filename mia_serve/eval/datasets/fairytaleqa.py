"""FairytaleQA (Xu et al., ACL 2022): questions on stories, asked of the whole fairy book that the story is from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.datasets.base import (
    Benchmark,
    Query,
    Source,
    assemble,
    check_split,
    data_file,
    read_json_lines,
    take_evenly,
)
from mia_serve.mindscape import Book, Mindscape, book_windows, keyword_summaries

SOURCE = Source(
    "fairytaleqa",
    ("train", "val", "test"),
    "github.com/uci-soe/FairytaleQAData, one story a line: {story, origin, sections, section_ids, questions}",
)


def load(
    split: str,
    series: bool,
    data_dir: str | Path | None = None,
    limit: int | None = None,
) -> Benchmark:
    """Load FairytaleQA: a section is a chunk, `{story}:{section}`, and a story is a book of windows of 20.

    A haystack is a fairy book with all its stories, those of the other splits too: the splits are by story, so a fairy
    book mixes them. The data have no summaries; keyword summaries are made, with the story's name as title.

    Args:
        split: `train`, `val` or `test`.
        series: Pool all fairy books.
        data_dir: Folder that holds `fairytaleqa/`; the one that MIA_DATA names when not given.
        limit: Most questions.

    Raises:
        MiaError: No such split, or a question whose sections are not in its story.
        FileNotFoundError: The files are not there.
    """
    check_split(SOURCE, split)
    stories = [(split, row) for row in read_json_lines(data_file(SOURCE, f"fairytaleqa/{split}.jsonl", data_dir))]
    for other in SOURCE.splits:
        if other != split:
            try:
                path = data_file(SOURCE, f"fairytaleqa/{other}.jsonl", data_dir)
            except FileNotFoundError:
                continue
            stories += [(other, row) for row in read_json_lines(path)]
    # One order of the books whatever the split asked for, so that results can be compared.
    stories.sort(key=lambda item: SOURCE.splits.index(item[0]))
    queries = take_evenly([query for of, row in stories if of == split for query in _queries(row)], limit)
    # Words are told apart by how many windows of all fairy books hold them: a summary is the same in either setting.
    books = _summarised([_book(row) for _, row in stories])
    wanted = {row["origin"] for _, row in stories} if series else {query.group for query in queries}
    of_origin: dict[str, list[Book]] = {}
    for (_, row), book in zip(stories, books, strict=True):
        if row["origin"] in wanted:
            of_origin.setdefault(row["origin"], []).append(book)
    mindscapes = {origin: Mindscape.from_books(own, summarizer="keywords") for origin, own in sorted(of_origin.items())}
    return assemble(SOURCE, split, series, mindscapes, queries)


def _queries(row: dict[str, Any]) -> list[Query]:
    ids = _chunk_ids(row)
    queries = []
    for i, question in enumerate(row["questions"]):
        query_id = f"{row['story']}:q{i}"
        sections = set(question["sections"])
        if not sections or not sections.issubset(row["section_ids"]):
            raise MiaError(f"fairytaleqa, question {query_id!r}: sections {question['sections']} are not in its story")
        gold = tuple(chunk_id for chunk_id, section in zip(ids, row["section_ids"], strict=True) if section in sections)
        answers = [answer for answer in question.get("answers", []) if answer]
        tags = {"attribute": question.get("attribute", ""), "explicit": question.get("explicit", "")}
        queries.append(Query(query_id, question["question"], gold, row["origin"], answers[0] if answers else "", tags))
    return queries


def _chunk_ids(row: dict[str, Any]) -> tuple[str, ...]:
    """Ids of a story's sections. One story of the data numbers two sections alike: the second one is `{section}.2`."""
    seen: Counter[int] = Counter()
    ids = []
    for section in row["section_ids"]:
        seen[section] += 1
        ids.append(f"{row['story']}:{section}" + (f".{seen[section]}" if seen[section] > 1 else ""))
    return tuple(ids)


def _book(row: dict[str, Any]) -> Book:
    title = row["story"].replace("-", " ").replace("_", " ")
    return Book(row["story"], tuple(row["sections"]), title, chunk_ids=_chunk_ids(row))


def _summarised(books: list[Book]) -> list[Book]:
    """Give all books their summaries."""
    windows = [book_windows(book.id, book.title, book.chunks) for book in books]
    made = iter(keyword_summaries([window for own in windows for window in own]))
    return [
        Book(book.id, book.chunks, book.title, book.chunk_ids, tuple(next(made) for _ in own))
        for book, own in zip(books, windows, strict=True)
    ]
