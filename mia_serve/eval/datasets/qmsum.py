"""QMSum (Zhong et al., NAACL 2021): questions on meetings; the whole-meeting summary is a ready-made mindscape."""

from __future__ import annotations

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
from mia_serve.mindscape import Book, Mindscape, split_windows

SOURCE = Source(
    "qmsum",
    ("train", "val", "test"),
    "github.com/Yale-LILY/QMSum (data/ALL), one meeting a line with its meeting_id added",
)

#: Turns in one chunk.
TURNS = 8


def load(split: str, series: bool, data_dir: str | Path | None = None, limit: int | None = None) -> Benchmark:
    """Load QMSum: a chunk is 8 turns, `{meeting}:{i}`, the session is the meeting with the answer of its general query.

    Gold are the chunks that a turn span marked as relevant touches.

    Args:
        split: `train`, `val` or `test`.
        series: Pool all meetings of the split.
        data_dir: Folder that holds `qmsum/`; the one that MIA_DATA names when not given.
        limit: Most questions.

    Raises:
        MiaError: No such split, a meeting without a summary, or a span outside its meeting.
        FileNotFoundError: The file is not there.
    """
    check_split(SOURCE, split)
    meetings = read_json_lines(data_file(SOURCE, f"qmsum/{split}.jsonl", data_dir))
    mindscapes: dict[str, Mindscape] = {}
    queries: list[Query] = []
    for meeting in meetings:
        if meeting["meeting_id"] in mindscapes:
            raise MiaError(f"qmsum: meeting {meeting['meeting_id']!r} occurs twice")
        mindscapes[meeting["meeting_id"]] = _mindscape(meeting)
        queries += _queries(meeting)
    return assemble(SOURCE, split, series, mindscapes, take_evenly(queries, limit))


def _mindscape(meeting: dict[str, Any]) -> Mindscape:
    name = meeting["meeting_id"]
    if not meeting["general_query_list"]:
        raise MiaError(f"qmsum: meeting {name!r} has no general query, so no summary")
    lines = [f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"]]
    chunks = tuple("\n".join(window) for window in split_windows(lines, TURNS))
    summary = meeting["general_query_list"][0]["answer"]
    # One window over the whole meeting: its summary is the summary of the meeting.
    return Mindscape.from_books(
        [Book(name, chunks, summaries=(summary,))], window=max(1, len(chunks)), summarizer="qmsum"
    )


def _queries(meeting: dict[str, Any]) -> list[Query]:
    name, turns = meeting["meeting_id"], len(meeting["meeting_transcripts"])
    queries = []
    for i, row in enumerate(meeting["specific_query_list"]):
        windows: set[int] = set()
        for first, last in ((int(first), int(last)) for first, last in row["relevant_text_span"]):
            if not 0 <= first <= last < turns:
                raise MiaError(f"qmsum, question '{name}:q{i}': span {first}-{last} is not in its {turns} turns")
            windows.update(range(first // TURNS, last // TURNS + 1))
        gold = tuple(f"{name}:{w}" for w in sorted(windows))
        queries.append(Query(f"{name}:q{i}", row["query"], gold, name, row["answer"]))
    return queries
