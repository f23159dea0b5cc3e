"""Chat memory benchmarks: how LoCoMo and LongMemEval are read, on files made by hand and on the real one."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_serve.core import MiaError
from mia_serve.eval.conversations import load_locomo, load_longmemeval, unique_names

needs_data = pytest.mark.skipif(not os.environ.get("MIA_DATA"), reason="MIA_DATA is not set: no benchmark files")


def locomo_sample() -> dict[str, Any]:
    return {
        "sample_id": "c1",
        "conversation": {
            "session_10": [{"speaker": "B", "dia_id": "D10:1", "text": "ten"}],
            "session_1": [
                {"speaker": "A", "dia_id": "D1:1", "text": "hi"},
                {"speaker": "B", "dia_id": "D1:2", "text": "look", "blip_caption": "a red boat"},
            ],
            "session_1_date_time": "8 May",
            "session_2": [{"speaker": "A", "dia_id": "D2:1", "text": "two"}],
            "session_3": [],
            "session_11_date_time": "a date without turns",
        },
        "session_summary": {"session_1_summary": "they met", "session_2_summary": "two", "session_10_summary": "ten"},
        "observation": {"session_1_observation": {"A": [["A said hi.", "D1:1"]], "B": [["B has a boat.", ["D1:2"]]]}},
        "qa": [
            {"question": "one?", "answer": 1, "evidence": ["D10:1", "D1:02", "D1:1"], "category": 4},
            {"question": "packed?", "answer": 1, "evidence": ["D2:1; D1:1"], "category": 1},
            {"question": "half?", "answer": 1, "evidence": ["D2:1", "D:11:26", "D"], "category": 2},
            {"question": "none?", "answer": 1, "evidence": [], "category": 3},
            {"question": "bait?", "adversarial_answer": "x", "evidence": ["D2:9"], "category": 5},
            {"question": "unknown?", "answer": 1, "evidence": ["D7:1"], "category": 4},
        ],
    }


@pytest.fixture
def locomo_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "locomo"
    folder.mkdir()
    (folder / "locomo10.json").write_text(json.dumps([locomo_sample()]))
    audit = [
        {"question_id": "locomo_0_qa0", "correct_evidence": ["D2:1"]},
        {"question_id": "locomo_0_qa2", "correct_evidence": []},
    ]
    (folder / "audit_errors.json").write_text(json.dumps(audit))
    return tmp_path


def test_locomo_sessions_are_in_the_order_of_their_numbers(locomo_dir: Path) -> None:
    (conversation,) = load_locomo(data_dir=locomo_dir).conversations
    assert [s.id for s in conversation.sessions] == ["S1", "S2", "S10"]
    first = conversation.sessions[0]
    assert first.turns == ("A: hi", "B: look") and first.turn_ids == ("D1:1", "D1:2")
    assert (first.summary, first.facts, first.date) == ("they met", ("A said hi.", "B has a boat."), "8 May")
    assert conversation.sessions[2].facts == ()


def test_locomo_strict_evidence_rejects_strings_of_several_ids(locomo_dir: Path) -> None:
    strict = load_locomo("strict", data_dir=locomo_dir)
    assert [(q.text, q.gold, q.category) for q in strict.questions] == [
        ("one?", (0, 2), "single-hop"),  # positions of S1 and S10; a padded id counts, a session counts once
        ("half?", (1,), "temporal"),
        ("bait?", (1,), "adversarial"),  # the session is there, whatever the turn
    ]
    assert {q.group for q in strict.questions} == {"c1"}
    assert strict.dropped == {"without evidence": 1, "whose evidence is no single turn id": 2}
    everything = load_locomo("all", data_dir=locomo_dir)
    assert [(q.text, q.gold) for q in everything.questions] == [
        ("one?", (0, 2)), ("packed?", (0, 1)), ("half?", (1,)), ("bait?", (1,)),
    ]  # fmt: skip
    audited = load_locomo("audit", data_dir=locomo_dir)
    assert [(q.text, q.gold) for q in audited.questions] == [("one?", (1,)), ("packed?", (0, 1)), ("bait?", (1,))]
    assert audited.reading == {
        "data": "locomo/locomo10.json", "evidence": "audit", "speaker": True, "captions": False,
    }  # fmt: skip


def test_locomo_turns_without_speaker_and_with_captions(locomo_dir: Path) -> None:
    (plain,) = load_locomo(speaker=False, data_dir=locomo_dir).conversations
    assert plain.sessions[0].turns == ("hi", "look")
    (shown,) = load_locomo(captions=True, data_dir=locomo_dir).conversations
    assert shown.sessions[0].turns == ("A: hi", "B: look [image: a red boat]")


def test_locomo_bad_files(locomo_dir: Path) -> None:
    with pytest.raises(MiaError, match="evidence is 'loose'; allowed: strict, all, audit"):
        load_locomo("loose", data_dir=locomo_dir)  # type: ignore[arg-type]
    file = locomo_dir / "locomo" / "locomo10.json"
    for content in ("{oops", '{"a": 1}', '[{"sample_id": "c"}]', "[3]", "[" * 100_000, "\xff"):
        file.write_bytes(content.encode("latin-1"))
        with pytest.raises(MiaError, match=r"locomo10\.json is not LoCoMo's file"):
            load_locomo(data_dir=locomo_dir)
    file.write_text(json.dumps([locomo_sample() | {"qa": []}]))
    with pytest.raises(MiaError, match="no question is left"):
        load_locomo(data_dir=locomo_dir)
    with pytest.raises(FileNotFoundError, match=r"get it from github\.com/snap-research/locomo"):
        load_locomo(data_dir=locomo_dir / "locomo")
    (locomo_dir / "locomo" / "audit_errors.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"get it from github\.com/dial481/locomo-audit"):
        load_locomo("audit", data_dir=locomo_dir)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qa", [{"question": "one?", "evidence": [5], "category": 4}], "evidence of question 'c1:q0' is int, not text"),
        ("qa", [{"question": "one?", "evidence": "D1:1", "category": 4}], "is str, not a list"),
        ("qa", [{"question": 7, "evidence": ["D1:1"], "category": 4}], "question 'c1:q0' is int, not text"),
        ("session_summary", {"session_1_summary": ["x"]}, "c1, session 1: its summary is list"),
        ("conversation", {"session_1": [{"speaker": "A", "dia_id": "D1:1", "text": None}]}, "text is NoneType"),
        ("conversation", {"session_1": [3], "session_01": [3]}, "c1, session 1 is there twice"),
    ],
)
def test_locomo_malformed_parts(locomo_dir: Path, part: str, change: Any, message: str) -> None:
    file = locomo_dir / "locomo" / "locomo10.json"
    file.write_text(json.dumps([locomo_sample() | {part: change}]))
    with pytest.raises(MiaError, match=rf"locomo10\.json is not LoCoMo's file .*{message}"):
        load_locomo(data_dir=locomo_dir)


def test_locomo_reads_gzipped_files(locomo_dir: Path) -> None:
    plain = load_locomo("audit", data_dir=locomo_dir)
    for file in list((locomo_dir / "locomo").iterdir()):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert load_locomo("audit", data_dir=locomo_dir) == plain


@needs_data
def test_locomo_counts_of_the_study() -> None:
    benchmark = load_locomo("strict")
    assert len(benchmark.questions) == 1978 and len(load_locomo("all").questions) == 1982
    assert sum(benchmark.dropped.values()) == 8
    sessions = [s for c in benchmark.conversations for s in c.sessions]
    assert (len(benchmark.conversations), len(sessions), sum(len(s.turns) for s in sessions)) == (10, 272, 5882)
    assert Counter(q.category for q in benchmark.questions) == {
        "multi-hop": 281, "temporal": 321, "open-domain": 89, "single-hop": 841, "adversarial": 446,
    }  # fmt: skip
    gold = Counter(min(len(q.gold), 3) for q in benchmark.questions)
    assert (gold[1], gold[2], gold[3], max(len(q.gold) for q in benchmark.questions)) == (1649, 203, 126, 15)
    lengths = [benchmark.longest_gold(q) for q in benchmark.questions]
    assert [sum(lo <= n <= hi for n in lengths) for lo, hi in ((8, 15), (16, 25), (26, 99))] == [186, 1123, 669]


# --- LongMemEval


def lme_row(
    number: int, sessions: list[str], answers: list[str], suffix: str = "", kind: str = "multi-session"
) -> dict:
    return {
        "question_id": f"q{number}{suffix}",
        "question_type": kind,
        "question": f"what is {number}?",
        "answer": "a",
        "question_date": "2023/05/30 (Tue) 23:40",
        "haystack_session_ids": sessions,
        "haystack_dates": [f"2023/05/{i + 1:02d}" for i in range(len(sessions))],
        "haystack_sessions": [
            [{"role": "user", "content": f"about {s}"}, {"role": "assistant", "content": "yes", "has_answer": True}]
            for s in sessions
        ],
        "answer_session_ids": answers,
    }


@pytest.fixture
def lme(tmp_path: Path):
    def write(*rows: Any) -> str:
        path = tmp_path / "lme.json"
        path.write_text(json.dumps(list(rows)))
        return str(path)

    return write


def test_longmemeval_reads_the_original_schema(lme) -> None:
    data = lme(
        lme_row(1, ["a", "b", "answer_1", "b"], ["answer_1", "b"]),
        lme_row(2, ["a", "answer_2"], ["answer_2"], kind="temporal-reasoning"),
    )
    benchmark = load_longmemeval(data)
    one, two = benchmark.conversations
    # The session b is there twice: two places to find it, told apart by name.
    assert [s.id for s in one.sessions] == ["a", "b", "answer_1", "b#2"]
    assert one.sessions[0].turns == ("user: about a", "assistant: yes")
    assert one.sessions[1].date == "2023/05/02"
    assert one.sessions[0].turns is two.sessions[0].turns  # shared, not copied
    assert [(q.id, q.conversation, q.gold, q.group, q.category) for q in benchmark.questions] == [
        ("q1", 0, (1, 2, 3), "q1", "multi-session"),
        ("q2", 1, (1,), "q2", "temporal-reasoning"),
    ]


def test_longmemeval_abstention_challenge_and_sample(lme) -> None:
    rows = [lme_row(i, ["x", "y", f"answer_{i}"], [f"answer_{i}"]) for i in range(8)]
    rows += [lme_row(8, ["x", "answer_abs"], ["answer_abs"], "_abs"), lme_row(9, ["answer_9"], ["answer_9"])]
    rows += [lme_row(10, ["x"], ["answer_10"])]
    data = lme(*rows)
    plain = load_longmemeval(data)
    assert [q.id for q in plain.questions] == [f"q{i}" for i in (*range(8), 9)]
    assert plain.dropped == {
        "that ask for what was never said (abstention)": 1,
        "without a gold session among their sessions": 1,
    }
    assert [q.id for q in load_longmemeval(data, abstention=True).questions][8] == "q8_abs"
    challenge = load_longmemeval(data, challenge=True)
    assert [q.id for q in challenge.questions] == [f"q{i}" for i in range(8)]
    drawn = load_longmemeval(data, challenge=True, sample=3, seed=0)
    wanted = sorted(np.random.default_rng(0).choice(8, 3, replace=False))
    assert [q.id for q in drawn.questions] == [f"q{i}" for i in wanted]
    assert drawn.dropped["not in the sample"] == 5
    assert drawn.reading["sample"] == 3 and drawn.reading["seed"] == 0
    with pytest.raises(MiaError, match="sample is 9; the file leaves 8 questions"):
        load_longmemeval(data, challenge=True, sample=9)


def test_longmemeval_counts_questions_that_lack_some_of_their_gold(lme) -> None:
    rows = [lme_row(i, ["x", f"answer_{i}"], [f"answer_{i}"]) for i in range(3)]
    rows[1]["answer_session_ids"].append("elsewhere")
    benchmark = load_longmemeval(lme(*rows))
    assert benchmark.reading["partial_gold"] == 1 and benchmark.questions[1].gold == (1,)


def test_longmemeval_file_of_s_and_oracle_together(lme) -> None:
    data = lme(lme_row(1, ["x", "answer_1"], ["answer_1"]), lme_row(1, ["answer_1"], ["answer_1"]))
    with pytest.raises(MiaError, match="'q1' occurs twice; in a file of S and oracle together use --challenge"):
        load_longmemeval(data)
    assert len(load_longmemeval(data, challenge=True).questions) == 1


def test_evl_07_longmemeval_oracle_alone_says_nothing(lme) -> None:
    with pytest.raises(MiaError, match="every session is gold"):
        load_longmemeval(lme(lme_row(1, ["answer_1", "b"], ["answer_1", "b"]), lme_row(2, ["answer_2"], ["answer_2"])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, "question 0: field 'question' is NoneType, not str"),
        ({"haystack_session_ids": ["a"]}, "2 sessions, 1 ids, 2 dates"),
        ({"haystack_session_ids": ["a", 3]}, "a session id is no string"),
        ({"haystack_sessions": ["text", []]}, "a session is no list of turns"),
        ({"haystack_sessions": [[{"role": "user"}], []]}, "a session is no list of turns"),
        ({"haystack_sessions": [[{"role": "user", "content": None}], []]}, "role and content, both texts"),
        ({"haystack_dates": 7}, "question 0: field 'haystack_dates' is int, not list"),
        ({"haystack_dates": "ab"}, "'haystack_dates' is str, not list"),
        ({"question": " "}, "'q1' has no text"),
        ({"question": "a\ud800"}, r"question 'q1': its text holds '\\ud800', half a character"),
        (
            {"haystack_sessions": [[], [{"role": "user", "content": "\udfff"}]]},
            r"'q1': text of session 'answer_1' holds",
        ),
        ({"question_id": ""}, "question '': its id '' is empty"),
        ({"question_id": "\ud800"}, r"its id '\\ud800' is empty or holds a control character"),
        ({"question_type": "a\nb"}, r"question 'q1': its kind 'a\\nb'"),
        ({"haystack_session_ids": ["\x1b[31m", "answer_1"]}, r"'q1': session id '\\x1b\[31m'"),
    ],
)
def test_longmemeval_bad_rows(lme, change: dict, message: str) -> None:
    with pytest.raises(MiaError, match=message):
        load_longmemeval(lme(lme_row(1, ["a", "answer_1"], ["answer_1"]) | change))


def test_longmemeval_bad_files(lme, tmp_path: Path) -> None:
    missing = {k: v for k, v in lme_row(1, ["a", "b"], ["b"]).items() if k != "answer_session_ids"}
    with pytest.raises(MiaError, match="field 'answer_session_ids' is missing"):
        load_longmemeval(lme(missing))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(MiaError, match="holds a dict; LongMemEval's file is a list"):
        load_longmemeval(str(tmp_path / "x.json"))
    for content in ("[1", "[" * 100_000):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(MiaError, match="is not JSON"):
            load_longmemeval(str(tmp_path / "x.json"))
    for name in ("no/file.json", "/nowhere/file", "nothing"):
        with pytest.raises(FileNotFoundError, match="no such file; give LongMemEval's JSON file, or a data set"):
            load_longmemeval(name)
    # HF_HUB_OFFLINE is set for all tests: the hub cannot be reached.
    with pytest.raises(FileNotFoundError, match="neither a file here nor a data set of the hub that can be reached"):
        load_longmemeval("someone/no-such-data-set")


def test_unique_names_never_meet() -> None:
    assert unique_names(["x", "x#2", "x", "x", "y"]) == ["x", "x#2", "x#3", "x#4", "y"]
