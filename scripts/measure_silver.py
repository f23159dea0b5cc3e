#!/usr/bin/env python3
"""Check silver evidence of FairytaleQA's training questions against the gold sections that it was made without.

    MIA_DATA=FOLDER scripts/measure_silver.py data/fairytales/silver.jsonl --json FILE

A silver chunk is right if it holds at least half of a gold section, or lies at least half in one.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path


def span(story: str, text: str) -> tuple[int, int]:
    """Return where a text lies in its story, white space aside."""
    start = story.find("".join(text.split()))
    return start, start + len("".join(text.split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    lines = (Path(os.environ["MIA_DATA"]) / "fairytaleqa" / "train.jsonl").read_text("utf-8").splitlines()
    stories = {story["story"]: story for story in map(json.loads, lines)}
    right = chunks = answered = lost = 0
    rows = [json.loads(line) for line in arguments.rows.read_text("utf-8").splitlines()]
    for row in rows:
        name, _, number = row["query_id"].rpartition(":q")
        story = stories[name]
        whole = "".join("".join(section.split()) for section in story["sections"])
        wanted = set(story["questions"][int(number)]["sections"])
        sections = zip(story["section_ids"], story["sections"], strict=True)
        gold = [span(whole, text) for identity, text in sections if identity in wanted]
        hits = 0
        for passage in row["positives"]:
            start, end = span(whole, passage["text"])
            lost += start < 0
            shared = [min(end, b) - max(start, a) for a, b in gold]
            hits += any(s >= 0.5 * min(end - start, b - a) for s, (a, b) in zip(shared, gold, strict=True))
        right, chunks, answered = right + hits, chunks + len(row["positives"]), answered + (hits > 0)
    record = {
        "rows": len(rows),
        "silver_chunks": chunks,
        "right": right,
        "precision": round(right / chunks, 4),
        "questions_with_a_right_chunk": round(answered / len(rows), 4),
        "chunks_not_found_in_their_story": lost,
    }
    Path(arguments.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(record)


if __name__ == "__main__":
    main()
