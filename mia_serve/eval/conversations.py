"""Chat memory as a retrieval task: rank the sessions of a conversation for a question about it.

LoCoMo asks many questions about each of ten conversations; LongMemEval gives every question a conversation of its own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mia_serve.core import MiaError
from mia_serve.eval.datasets import locomo
from mia_serve.eval.datasets.base import Source, data_file

Evidence = Literal["strict", "all", "audit"]

#: LongMemEval on the hub: the authors' release after the cleaning of 2025-09, and its file of some 50 sessions a
#: question. The study (arXiv 2606.04194) read the mirror LIXINYI33/longmemeval-s, which has a file of that name too.
LONGMEMEVAL_HUB = "xiaowu0162/longmemeval-cleaned"
LONGMEMEVAL_FILE = "longmemeval_s_cleaned.json"
AUDIT_FILE = "locomo/audit_errors.json"
_AUDIT = Source("LoCoMo's audit", (), "github.com/dial481/locomo-audit, where it is errors.json")
_STRICT_ID = re.compile(r"D(\d+):\d+")
#: Line breaks, other control characters and halves of characters: an id with one would break tables and TREC files.
_NOT_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True)
class ChatSession:
    """One session of a conversation.

    Attributes:
        id: Unique in its conversation.
        turns: Text of each turn, with who says it.
        turn_ids: Names of the turns.
        summary: Summary of the session, written by a language model; empty where there is none.
        facts: Observations on the session, written by a language model.
        date: As the source writes it.
    """

    id: str
    turns: tuple[str, ...]
    turn_ids: tuple[str, ...]
    summary: str = ""
    facts: tuple[str, ...] = ()
    date: str = ""


@dataclass(frozen=True)
class Conversation:
    """Sessions in order: what a question's ranking ranks."""

    id: str
    sessions: tuple[ChatSession, ...]


@dataclass(frozen=True)
class Question:
    """A question about a conversation.

    Attributes:
        id: Unique in its benchmark.
        text: The question.
        conversation: Position of its conversation in the benchmark.
        gold: Positions of the sessions that hold evidence, ascending; never empty.
        group: What is resampled for intervals: the conversation, or the question where each has its own.
        category: Kind of question.
    """

    id: str
    text: str
    conversation: int
    gold: tuple[int, ...]
    group: str
    category: str


@dataclass(frozen=True)
class ConversationBenchmark:
    """Conversations and the questions about them.

    Attributes:
        name: Name of the benchmark.
        conversations: What is searched.
        questions: Those with a gold session, conversation by conversation.
        dropped: Reason -> number of questions of the source that are left out.
        reading: Every choice made in reading the source.
    """

    name: str
    conversations: tuple[Conversation, ...]
    questions: tuple[Question, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)
    reading: Mapping[str, Any] = field(default_factory=dict)

    def longest_gold(self, question: Question) -> int:
        """Return the number of turns of a question's longest gold session."""
        sessions = self.conversations[question.conversation].sessions
        return max(len(sessions[position].turns) for position in question.gold)


def load_locomo(
    evidence: Evidence = "strict",
    *,
    speaker: bool = True,
    captions: bool = False,
    data_dir: str | Path | None = None,
) -> ConversationBenchmark:
    """Load LoCoMo as a session retrieval task.

    Args:
        evidence: ``strict`` takes an evidence string only if it is one turn id, as the study does: of 1,986 questions
            1,978 keep a gold session. ``all`` reads every id in it (1,982). ``audit`` also puts right what
            dial481/locomo-audit found wrong.
        speaker: Begin a turn with its speaker's name, as the study does.
        captions: End a turn that shows a picture with the picture's generated caption.
        data_dir: Folder that holds ``locomo/``; the one that MIA_DATA names when not given.

    Raises:
        MiaError: Unknown ``evidence``, or a file that is not LoCoMo's.
        FileNotFoundError: A file is not there.
    """
    if evidence not in ("strict", "all", "audit"):
        raise MiaError(f"evidence is {evidence!r}; allowed: strict, all, audit")
    samples = locomo.read_samples(data_dir, speaker=speaker, captions=captions)
    corrected = _audit(data_dir) if evidence == "audit" else {}
    conversations, questions, dropped = [], [], Counter[str]()
    for number, sample in enumerate(samples):
        sessions = tuple(
            ChatSession(s.id, s.turns, s.turn_ids or (), s.summary, facts, s.date)
            for s, facts in zip(sample.sessions, sample.facts, strict=True)
        )
        conversations.append(Conversation(sample.id, sessions))
        position = {session.id: i for i, session in enumerate(sessions)}
        for i, row in enumerate(sample.questions):
            cited = corrected.get((number, i), row.evidence)
            named = (
                _strict_sessions(cited) if evidence == "strict" else [t.split(":")[0] for t in locomo.turn_ids(cited)]
            )
            gold = sorted({position[f"S{name[1:]}"] for name in named if f"S{name[1:]}" in position})
            if gold:
                questions.append(Question(row.id, row.text, number, tuple(gold), sample.id, row.category))
            else:
                dropped["without evidence" if not cited else "whose evidence is no single turn id"] += 1
    reading = {"data": locomo.FILE, "evidence": evidence, "speaker": speaker, "captions": captions}
    return _checked(ConversationBenchmark("LoCoMo", tuple(conversations), tuple(questions), dropped, reading))


def load_longmemeval(
    data: str,
    *,
    abstention: bool = False,
    challenge: bool = False,
    sample: int | None = None,
    seed: int = 0,
) -> ConversationBenchmark:
    """Load LongMemEval (Wu et al., ICLR 2025) in its original schema; every question has its own sessions.

    Gold are the sessions of ``answer_session_ids`` that are among the question's own; ``partial_gold`` in ``reading``
    counts the questions that name others too. A turn is ``role: content``.

    Args:
        data: A JSON file, or a data set of the hub (``owner/name``, or ``owner/name:FILE`` for another file than
            ``LONGMEMEVAL_FILE``), which is downloaded.
        abstention: Keep the questions that have no answer (ids with ``_abs``). The benchmark's own retrieval
            evaluation leaves them out, the study keeps them.
        challenge: Keep only questions with more sessions than gold ones, as the study does to take the oracle's rows
            out of a file that mixes both.
        sample: Draw so many of the questions, without replacement and kept in order; None: all.
        seed: Of the draw (``numpy.random.default_rng``).

    Raises:
        MiaError: The file is not LongMemEval's, or holds fewer questions than ``sample``.
        FileNotFoundError: Neither a file nor a data set that can be reached.
    """
    path = _longmemeval_path(data)
    dropped = Counter[str]()
    kept = []
    for number, row in enumerate(_rows(path)):
        where = f"{path}, question {number}"
        row = _row(row, where)
        if "_abs" in row["question_id"] and not abstention:
            dropped["that ask for what was never said (abstention)"] += 1
        elif not set(row["answer_session_ids"]) & set(row["haystack_session_ids"]):
            dropped["without a gold session among their sessions"] += 1
        elif challenge and len(row["haystack_session_ids"]) <= len(row["answer_session_ids"]):
            dropped["with no more sessions than gold ones"] += 1
        else:
            kept.append(row)
    if sample is not None:
        if not 1 <= sample <= len(kept):
            raise MiaError(f"sample is {sample}; the file leaves {len(kept)} questions to draw from")
        drawn = sorted(np.random.default_rng(seed).choice(len(kept), sample, replace=False).tolist())
        dropped["not in the sample"] += len(kept) - sample
        kept = [kept[i] for i in drawn]
    twice = _first_repeat([row["question_id"] for row in kept])
    if twice is not None:
        raise MiaError(f"{path}: question {twice!r} occurs twice; in a file of S and oracle together use --challenge")
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    conversations = tuple(_longmemeval_conversation(row, known) for row in kept)
    questions = tuple(
        Question(
            id=row["question_id"],
            text=row["question"],
            conversation=i,
            gold=tuple(j for j, name in enumerate(row["haystack_session_ids"]) if name in row["answer_session_ids"]),
            group=row["question_id"],
            category=row["question_type"],
        )
        for i, row in enumerate(kept)
    )
    reading = {
        "data": data,
        "abstention": abstention,
        "challenge": challenge,
        "sample": sample,
        "seed": seed,
        "partial_gold": sum(not set(row["answer_session_ids"]) <= set(row["haystack_session_ids"]) for row in kept),
    }
    return _checked(ConversationBenchmark("LongMemEval", conversations, questions, dropped, reading))


def _strict_sessions(evidence: Iterable[str]) -> list[str]:
    """Read the session of every evidence string that is one turn id: ``D8:6`` gives ``D8``."""
    found = (_STRICT_ID.fullmatch(text) for text in evidence)
    return [f"D{int(match[1])}" for match in found if match]


def _audit(data_dir: str | Path | None) -> dict[tuple[int, int], tuple[str, ...]]:
    """Read the audit's evidence: (number of the conversation, number of the question) -> turn ids."""
    path = data_file(_AUDIT, AUDIT_FILE, data_dir)
    try:
        return {
            (int(found[1]), int(found[2])): locomo.texts(row["correct_evidence"], "correct_evidence")
            for row in locomo.read_json(path)
            if (found := re.fullmatch(r"locomo_(\d+)_qa(\d+)", row["question_id"]))
        }
    except (KeyError, TypeError) as error:
        raise MiaError(
            f"{path} is not the audit's errors.json ({error!r}); get it from dial481/locomo-audit"
        ) from error


def _longmemeval_path(data: str) -> Path:
    path = Path(data)
    if path.is_file():
        return path
    repository, _, file = data.partition(":")
    if repository.count("/") != 1 or repository.startswith((".", "/", "~")) or (path.suffix == ".json" and not file):
        raise FileNotFoundError(
            f"--data {data!r}: no such file; give LongMemEval's JSON file, or a data set of the hub such as "
            f"{LONGMEMEVAL_HUB}"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, file or LONGMEMEVAL_FILE, repo_type="dataset"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"--data {data!r}: neither a file here nor a data set of the hub that can be reached "
            f"({type(error).__name__}); download {file or LONGMEMEVAL_FILE} and give its path"
        ) from error


def _rows(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise MiaError(f"{path} is not JSON ({error}); give LongMemEval's JSON file") from error
    if not isinstance(rows, list):
        raise MiaError(f"{path} holds a {type(rows).__name__}; LongMemEval's file is a list of questions")
    return rows


_TEXTS = ("question_id", "question_type", "question")
_LISTS = ("haystack_session_ids", "haystack_sessions", "answer_session_ids")


def _row(row: Any, where: str) -> dict[str, Any]:
    """Check what is used of a question."""
    if not isinstance(row, dict):
        raise MiaError(f"{where}: {type(row).__name__}; a question is an object")
    for name, kind in (*((name, str) for name in _TEXTS), *((name, list) for name in _LISTS)):
        if not isinstance(row.get(name), kind):
            found = "missing" if name not in row else f"{type(row[name]).__name__}, not {kind.__name__}"
            raise MiaError(f"{where}: field {name!r} is {found}; give the file in LongMemEval's original schema")
    sessions, dates = row["haystack_sessions"], row.get("haystack_dates") or []
    if not isinstance(dates, list):
        raise MiaError(f"{where}: field 'haystack_dates' is {type(dates).__name__}, not list; give one date a session")
    if len(sessions) != len(row["haystack_session_ids"]) or (dates and len(dates) != len(sessions)):
        raise MiaError(
            f"{where}: {len(sessions)} sessions, {len(row['haystack_session_ids'])} ids, {len(dates)} dates; "
            "give one of each a session"
        )
    if not all(isinstance(name, str) for name in (*row["haystack_session_ids"], *row["answer_session_ids"])):
        raise MiaError(f"{where}: a session id is no string; give the file in LongMemEval's original schema")
    for session in sessions:
        turns = session if isinstance(session, list) else [None]
        if not all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in turns
        ):
            raise MiaError(f"{where}: a session is no list of turns with role and content, both texts")
    return row


def _longmemeval_conversation(row: Mapping[str, Any], known: dict[tuple[str, ...], tuple[str, ...]]) -> Conversation:
    """Build a question's sessions; ``known`` keeps one copy of the turns that many questions share."""
    dates = row.get("haystack_dates") or [""] * len(row["haystack_sessions"])
    names = unique_names(row["haystack_session_ids"])
    sessions = []
    for name, session, date in zip(names, row["haystack_sessions"], dates, strict=True):
        turns = tuple(f"{turn['role']}: {turn['content']}" for turn in session)
        turns = known.setdefault(turns, turns)
        sessions.append(ChatSession(name, turns, tuple(map(str, range(1, len(turns) + 1))), date=str(date)))
    return Conversation(row["question_id"], tuple(sessions))


def unique_names(names: Iterable[str]) -> list[str]:
    """Tell repeated names apart: a session that a conversation holds twice is ``x`` and ``x#2``."""
    unique: dict[str, None] = {}
    for name in names:
        own, number = name, 1
        while own in unique:
            number += 1
            own = f"{name}#{number}"
        unique[own] = None
    return list(unique)


def _checked(benchmark: ConversationBenchmark) -> ConversationBenchmark:
    if not benchmark.questions:
        reasons = ", ".join(f"{count} {reason}" for reason, count in benchmark.dropped.items()) or "the file is empty"
        raise MiaError(f"{benchmark.name}: no question is left ({reasons})")
    for what, names in (
        ("question", [q.id for q in benchmark.questions]),
        ("conversation", [c.id for c in benchmark.conversations]),
    ):
        twice = _first_repeat(names)
        if twice is not None:
            raise MiaError(f"{benchmark.name}: {what} id {twice!r} occurs twice; give every {what} its own")
    if all(len(q.gold) == len(benchmark.conversations[q.conversation].sessions) for q in benchmark.questions):
        raise MiaError(f"{benchmark.name}: every session is gold (an oracle file?), so that any ranking is right")
    _check_written(benchmark)
    empty = next((question.id for question in benchmark.questions if not question.text.strip()), None)
    if empty is not None:
        raise MiaError(f"{benchmark.name}: question {empty!r} has no text; drop it or give its text")
    return benchmark


def _check_written(benchmark: ConversationBenchmark) -> None:
    """Refuse names and texts that could not be written to a file, or would break it."""
    for question in benchmark.questions:
        conversation = benchmark.conversations[question.conversation]
        names = {"id": question.id, "conversation": conversation.id, "kind": question.category}
        for what, name in names.items():
            _check_name(name, f"{benchmark.name}, question {question.id!r}: its {what}")
        _check_text(question.text, f"{benchmark.name}, question {question.id!r}: its text")
    for conversation in benchmark.conversations:
        for session in conversation.sessions:
            where = f"{benchmark.name}, {conversation.id!r}"
            _check_name(session.id, f"{where}: session id")
            written = "\n".join((*session.turns, session.summary, *session.facts))
            _check_text(written, f"{where}: text of session {session.id!r}")


def _check_name(name: str, what: str) -> None:
    if not name.strip() or _NOT_IN_NAMES.search(name):
        raise MiaError(f"{what} {name!r} is empty or holds a control character; give one that can stand in a line")


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MiaError(f"{what} holds {text[error.start]!r}, half a character; write it whole or remove it") from None


def _first_repeat(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
