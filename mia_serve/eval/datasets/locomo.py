"""LoCoMo (Maharana et al., ACL 2024): questions on ten long conversations; gold are the evidence turns."""

from __future__ import annotations

import gzip
import json
import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

from mia_serve.core import MiaError
from mia_serve.eval.datasets.base import Benchmark, Query, Source, assemble, check_split, data_file, take_evenly
from mia_serve.mindscape import ConversationSession, Mindscape

logger = logging.getLogger(__name__)

SOURCE = Source("locomo", ("all",), "github.com/snap-research/locomo, data/locomo10.json")
FILE = "locomo/locomo10.json"

#: Names of the category codes, as the paper has them.
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}

# Some evidence strings pack several ids ("D8:6; D9:17"), pad them ("D30:05") or misplace a colon ("D:11:26").
_TURN_ID = re.compile(r"D:?(\d+):(\d+)")


class SampleQuestion(NamedTuple):
    """A question as the file has it; category 5 (adversarial) has no answer."""

    id: str
    text: str
    category: str
    answer: str
    evidence: tuple[str, ...]


class Sample(NamedTuple):
    """One conversation as the file has it.

    Attributes:
        id: Name of the conversation (`conv-26`).
        sessions: In order of their numbers, `S1` …, each turn as `speaker: text`.
        facts: Observations of each session, written by a language model.
        questions: All of them, `conv-26:q0` …, with or without evidence.
    """

    id: str
    sessions: tuple[ConversationSession, ...]
    facts: tuple[tuple[str, ...], ...]
    questions: tuple[SampleQuestion, ...]


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
        MiaError: No such split, a session without a summary, or a file that is not LoCoMo's.
        FileNotFoundError: The file is not there.
    """
    check_split(SOURCE, split)
    mindscapes: dict[str, Mindscape] = {}
    queries: list[Query] = []
    dropped = unknown = 0
    for sample in read_samples(data_dir):
        name = sample.id
        mindscapes[name] = Mindscape.from_conversation(name, sample.sessions, summarizer="locomo")
        order = {chunk.id: row for row, chunk in enumerate(mindscapes[name].chunks)}
        for question in sample.questions:
            named = {f"{name}:{turn}" for turn in turn_ids(question.evidence)}
            gold = sorted(named & order.keys(), key=order.__getitem__)
            unknown += len(named) - len(gold)
            if not gold:
                dropped += 1
                continue
            tags = {"category": question.category}
            queries.append(Query(question.id, question.text, tuple(gold), name, question.answer, tags))
    if dropped or unknown:
        logger.info("locomo: %d questions without evidence dropped, %d evidence ids name no turn", dropped, unknown)
    return assemble(SOURCE, split, series, mindscapes, take_evenly(queries, limit), dropped)


def turn_ids(evidence: list[str] | tuple[str, ...]) -> list[str]:
    """Read every turn id in the evidence strings of a question, as `D{session}:{turn}` without leading zeros."""
    return [f"D{int(session)}:{int(turn)}" for text in evidence for session, turn in _TURN_ID.findall(text)]


def read_samples(data_dir: str | Path | None = None, *, speaker: bool = True, captions: bool = False) -> list[Sample]:
    """Read the conversations of the file.

    Args:
        data_dir: Folder that holds `locomo/`; the one that MIA_DATA names when not given.
        speaker: Begin a turn with its speaker's name.
        captions: End a turn that shows a picture with the picture's generated caption.

    Raises:
        MiaError: The file is not LoCoMo's.
        FileNotFoundError: The file is not there.
    """
    path = data_file(SOURCE, FILE, data_dir)
    try:
        return [_sample(raw, speaker, captions) for raw in read_json(path)]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise MiaError(f"{path} is not LoCoMo's file ({error!r}): get it from {SOURCE.origin}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file, gzipped if its name ends in `.gz`.

    Raises:
        TypeError: It is not JSON, or nested too deeply to be read.
    """
    raw = path.read_bytes()
    try:
        return json.loads(gzip.decompress(raw) if path.name.endswith(".gz") else raw)
    except (ValueError, RecursionError) as error:
        raise TypeError(f"not JSON: {error}") from error


def texts(given: Any, what: str) -> tuple[str, ...]:
    """Return a list of texts as a tuple.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(given, list):
        raise TypeError(f"{what} is {type(given).__name__}, not a list")
    return tuple(_text(one, f"one of {what}") for one in given)


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{what} is {type(given).__name__}, not text")
    return given


def _sample(raw: dict[str, Any], speaker: bool, captions: bool) -> Sample:
    conversation, name = raw["conversation"], _text(raw["sample_id"], "sample_id")
    # Dates are given for more sessions than there are; only keys that hold turns are sessions.
    numbers = sorted(int(key[8:]) for key in conversation if re.fullmatch(r"session_\d+", key) and conversation[key])
    sessions, facts = [], []
    for number in numbers:
        turns, where = conversation[f"session_{number}"], f"{name}, session {number}"
        if numbers.count(number) > 1:
            raise TypeError(f"{where} is there twice")
        sessions.append(
            ConversationSession(
                id=f"S{number}",
                turns=tuple(_turn_text(turn, speaker, captions, where) for turn in turns),
                summary=_text(raw["session_summary"].get(f"session_{number}_summary", ""), f"{where}: its summary"),
                turn_ids=tuple(_text(turn["dia_id"], f"{where}: a dia_id") for turn in turns),
                date=_text(conversation.get(f"session_{number}_date_time", ""), f"{where}: its date"),
            )
        )
        observed = raw.get("observation", {}).get(f"session_{number}_observation", {})
        told = [fact[0] for of_speaker in observed.values() for fact in of_speaker]
        facts.append(texts(told, f"{where}: its observations"))
    questions = tuple(_question(f"{name}:q{i}", row) for i, row in enumerate(raw["qa"]))
    return Sample(name, tuple(sessions), tuple(facts), questions)


def _turn_text(turn: dict[str, Any], speaker: bool, captions: bool, where: str) -> str:
    text = _text(turn["text"], f"{where}: a turn's text")
    if speaker:
        text = f"{_text(turn['speaker'], f'{where}: a speaker')}: {text}"
    return f"{text} [image: {turn['blip_caption']}]" if captions and turn.get("blip_caption") else text


def _question(name: str, row: dict[str, Any]) -> SampleQuestion:
    category = CATEGORIES.get(row["category"])
    if category is None:
        raise MiaError(f"locomo, question {name!r}: category {row['category']} is none of 1 to 5")
    answer = "" if category == "adversarial" else str(row.get("answer", ""))
    evidence = texts(row.get("evidence", []), f"the evidence of question {name!r}")
    return SampleQuestion(name, _text(row["question"], f"question {name!r}"), category, answer, evidence)
