"""What every benchmark is made of, and what its loaders share."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.mindscape import Mindscape

logger = logging.getLogger(__name__)

#: Environment variable that names the folder with the benchmarks' files.
DATA_SETTING = "MIA_DATA"


@dataclass(frozen=True)
class Query:
    """A question with its gold chunks.

    Attributes:
        id: Unique in its benchmark.
        text: The question.
        gold: Ids of the chunks that answer it, in document order; never empty.
        group: Book or conversation; what is resampled for confidence intervals.
        answer: Reference answer, where there is one.
        tags: Facts to break results down by (kind, category, language).
    """

    id: str
    text: str
    gold: tuple[str, ...]
    group: str
    answer: str = ""
    tags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Haystack:
    """A mindscape and the questions that are asked of all of it."""

    id: str
    mindscape: Mindscape
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Benchmark:
    """The haystacks of one split of a benchmark.

    Attributes:
        name: Name of the benchmark.
        split: Split that the questions are from.
        series: Whether all its books are pooled into one haystack.
        haystacks: The haystacks, each with at least one question.
        dropped: Questions of the split left out because no gold chunk is known for them.
    """

    name: str
    split: str
    series: bool
    haystacks: tuple[Haystack, ...]
    dropped: int = 0


@dataclass(frozen=True)
class Source:
    """Where the files of a benchmark come from; told to a user who lacks them."""

    name: str
    splits: tuple[str, ...]
    origin: str


def assemble(
    source: Source,
    split: str,
    series: bool,
    mindscapes: Mapping[str, Mindscape],
    queries: Sequence[Query],
    dropped: int = 0,
) -> Benchmark:
    """Give each group its haystack, or all of them one (series), and check that every gold chunk is in it.

    Args:
        source: The benchmark.
        split: The split loaded.
        series: Pool all mindscapes.
        mindscapes: Group -> mindscape; without series, groups without a question are left out.
        queries: All questions.
        dropped: Questions left out by the loader.

    Raises:
        MiaError: There is no question, a question is empty or occurs twice, or its gold is not in its haystack.
    """
    if not queries:
        raise MiaError(f"{source.name}, split {split!r}: no question with a gold chunk")
    twice = [query_id for query_id, n in Counter(q.id for q in queries).items() if n > 1]
    if twice:
        raise MiaError(f"{source.name}, question {twice[0]!r}: its id occurs twice; give every question its own")
    if series:
        haystacks = [Haystack(source.name, Mindscape.concat(list(mindscapes.values())), tuple(queries))]
    else:
        of_group: dict[str, list[Query]] = {}
        for query in queries:
            of_group.setdefault(query.group, []).append(query)
        haystacks = [Haystack(group, mindscapes[group], tuple(own)) for group, own in of_group.items()]
    for haystack in haystacks:
        known = {chunk.id for chunk in haystack.mindscape.chunks}
        for query in haystack.queries:
            if not query.text.strip():
                raise MiaError(f"{source.name}, question {query.id!r}: its text is empty")
            if not query.gold or not known.issuperset(query.gold):
                raise MiaError(f"{source.name}, question {query.id!r}: gold {query.gold} is not in {haystack.id!r}")
    _audit_duplicates(source.name, haystacks)
    return Benchmark(source.name, split, series, tuple(haystacks), dropped)


def take_evenly(queries: Sequence[Query], limit: int | None) -> list[Query]:
    """At most `limit` queries, evenly spread over all of them so that every book keeps its share."""
    if limit is None or limit >= len(queries):
        return list(queries)
    if limit < 1:
        raise MiaError(f"limit is {limit}: it must be at least 1")
    return [queries[i * len(queries) // limit] for i in range(limit)]


def duplicate_texts(mindscape: Mindscape) -> int:
    """Number of chunks whose text (case and spaces aside) an earlier chunk of the mindscape has already."""
    return len(mindscape.chunks) - len({" ".join(c.text.lower().split()) for c in mindscape.chunks})


def check_split(source: Source, split: str) -> None:
    """Raise `MiaError` unless the benchmark has that split."""
    if split not in source.splits:
        raise MiaError(f"{source.name} has no split {split!r}: choose from {', '.join(source.splits)}")


def data_file(source: Source, relative: str, data_dir: str | Path | None) -> Path:
    """Find a file of a benchmark, plain or as `.gz`, in `data_dir` or the folder that MIA_DATA names.

    Raises:
        MiaError: Neither is given.
        FileNotFoundError: The file is not there.
    """
    root = data_dir or os.environ.get(DATA_SETTING)
    if not root:
        raise MiaError(
            f"{source.name} needs its files: set {DATA_SETTING} to the folder that holds {relative} "
            f"(from {source.origin}); saltmarsh needs none"
        )
    plain = Path(root) / relative
    for path in (plain, plain.with_name(plain.name + ".gz")):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{source.name}: no {relative} (or .gz) in {root}: get it from {source.origin}, "
        f"or set {DATA_SETTING} to its folder"
    )


def read_json_lines(path: Any) -> list[dict[str, Any]]:
    """Read a JSON-lines file, gzipped if its name ends in `.gz`; a bad line is an error that names file and line."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode("utf-8")
    rows = []
    # Not splitlines(): it also splits at characters that JSON strings may hold (U+2028, form feeds).
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise MiaError(f"{path}, line {number}: not JSON ({error})") from None
    return rows


def _audit_duplicates(name: str, haystacks: Sequence[Haystack]) -> None:
    """Warn once: of two chunks with one text only one may be marked gold, and finding the other counts as a miss."""
    counts = [duplicate_texts(haystack.mindscape) for haystack in haystacks]
    if any(counts):
        total = sum(len(haystack.mindscape.chunks) for haystack in haystacks)
        logger.warning(
            "%s: %d of %d chunks repeat the text of another chunk of their haystack (%d of %d haystacks); "
            "only the one marked gold counts as found",
            name,
            sum(counts),
            total,
            sum(1 for count in counts if count),
            len(haystacks),
        )
