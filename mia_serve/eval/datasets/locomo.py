"""LoCoMo (Maharana et al., ACL 2024): questions on ten long conversations; gold are the evidence turns."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.datasets.base import Benchmark, Query, Source, assemble, check_split, data_file, take_evenly
from mia_serve.mindscape import ConversationSession, Mindscape

logger = logging.getLogger(__name__)

SOURCE = Source("locomo", ("all",), "github.com/snap-research/locomo, data/locomo10.json")

#: Names of the category codes, as the paper has them.
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}

# Some evidence strings pack several ids ("D8:6; D9:17"), pad them ("D30:05") or misplace a colon ("D:11:26").
_TURN_ID = re.compile(r"D:?(\d+):(\d+)")


def load(split: str, series: bool, data_dir: str | Path | None = None, limit: int | None = None) -> Benchmark:
    """Load LoCoMo: a turn is a chunk, `{conversation}:{turn}` (`conv-26:D1:3`), a dated session a session.

    Evidence ids that name no turn are dropped, and so are questions left without any; both are counted. Category 5
    (adversarial) asks for what was never said: it has no answer, and its evidence is the turn that baits.

    Args:
        split: `all`, the only one.
        series: Pool all conversations.
        data_dir: Folder that holds `locomo/`; the one that MIA_DATA names when not given.
        limit: Most questions.

    Raises:
        MiaError: No such split, or a session without a summary.
        FileNotFoundError: The file is not there.
    """
    check_split(SOURCE, split)
    path = data_file(SOURCE, "locomo/locomo10.json", data_dir)
    mindscapes: dict[str, Mindscape] = {}
    queries: list[Query] = []
    dropped = unknown = 0
    for sample in json.loads(path.read_text(encoding="utf-8")):
        name = sample["sample_id"]
        mindscapes[name] = _mindscape(sample)
        order = {chunk.id: row for row, chunk in enumerate(mindscapes[name].chunks)}
        for i, row in enumerate(sample["qa"]):
            named = {f"{name}:{turn}" for turn in turn_ids(row.get("evidence", []))}
            gold = sorted(named & order.keys(), key=order.__getitem__)
            unknown += len(named) - len(gold)
            if not gold:
                dropped += 1
                continue
            category = CATEGORIES.get(row["category"])
            if category is None:
                raise MiaError(f"locomo, question '{name}:q{i}': category {row['category']} is none of 1 to 5")
            answer = "" if category == "adversarial" else str(row.get("answer", ""))
            queries.append(Query(f"{name}:q{i}", row["question"], tuple(gold), name, answer, {"category": category}))
    if dropped or unknown:
        logger.info("locomo: %d questions without evidence dropped, %d evidence ids name no turn", dropped, unknown)
    return assemble(SOURCE, split, series, mindscapes, take_evenly(queries, limit), dropped)


def turn_ids(evidence: list[str]) -> list[str]:
    """Read every turn id in the evidence strings of a question, as `D{session}:{turn}` without leading zeros."""
    return [f"D{int(session)}:{int(turn)}" for text in evidence for session, turn in _TURN_ID.findall(text)]


def _mindscape(sample: dict[str, Any]) -> Mindscape:
    conversation = sample["conversation"]
    # Dates are given for more sessions than there are; only keys that hold turns are sessions.
    numbers = sorted(int(key[8:]) for key in conversation if re.fullmatch(r"session_\d+", key) and conversation[key])
    sessions = []
    for number in numbers:
        turns = conversation[f"session_{number}"]
        sessions.append(
            ConversationSession(
                id=f"S{number}",
                turns=tuple(f"{turn['speaker']}: {turn['text']}" for turn in turns),
                summary=sample["session_summary"].get(f"session_{number}_summary", ""),
                turn_ids=tuple(turn["dia_id"] for turn in turns),
                date=conversation.get(f"session_{number}_date_time", ""),
            )
        )
    return Mindscape.from_conversation(sample["sample_id"], sessions, summarizer="locomo")
