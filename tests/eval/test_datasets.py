from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path

import pytest

from mia_serve.core import MiaError
from mia_serve.eval.datasets import duplicate_texts, load_benchmark, locomo, saltmarsh
from mia_serve.eval.datasets.base import take_evenly
from mia_serve.mindscape import Book, Mindscape

needs_data = pytest.mark.skipif(not os.environ.get("MIA_DATA"), reason="MIA_DATA is not set: no benchmark files")


def queries(benchmark):
    return [query for haystack in benchmark.haystacks for query in haystack.queries]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


# --- Saltmarsh


@pytest.fixture
def marsh(tmp_path: Path) -> Path:
    (tmp_path / "books").mkdir()
    passages = [f"Passage {i} tells of thing-{i}." for i in range(12)]
    passages[3] = "The boat was\nblue, she said."
    (tmp_path / "books" / "tide.txt").write_text("# The Tide\n\n" + "\n\n".join(passages) + "\n", encoding="utf-8")
    (tmp_path / "books" / "灯塔.txt").write_text("# 灯塔\n\n船是蓝的。\n\n他走了。\n", encoding="utf-8")
    write_lines(
        tmp_path / "summaries.en.jsonl", [{"book": "tide", "window": w, "summary": f"part {w}"} for w in (0, 1)]
    )
    write_lines(tmp_path / "summaries.zh.jsonl", [{"book": "灯塔", "window": 0, "summary": "船与人"}])
    question = {"question": "Why blue?", "answer": "paint", "kind": "why", "split": "test"}
    write_lines(
        tmp_path / "questions.en.jsonl",
        [
            {**question, "id": "q1", "book": "tide", "evidence": ["thing-11", "boat was blue"]},
            {**question, "id": "q2", "book": "tide", "evidence": ["thing-0."], "split": "train"},
        ],
    )
    write_lines(tmp_path / "questions.zh.jsonl", [{**question, "id": "z1", "book": "灯塔", "evidence": ["他走了"]}])
    return tmp_path


def test_saltmarsh_gold_windows_and_series(marsh):
    b = saltmarsh.load("test", series=False, folder=marsh)
    assert [(h.id, len(h.mindscape.chunks)) for h in b.haystacks] == [("tide", 12), ("灯塔", 2)]
    q1, z1 = queries(b)
    assert (q1.gold, q1.group, q1.answer, q1.tags) == (
        ("tide:3", "tide:11"), "tide", "paint", {"kind": "why", "language": "en"},
    )  # fmt: skip
    assert z1.gold == ("灯塔:1",)
    tide = b.haystacks[0].mindscape
    assert [(s.summary, len(s.chunk_ids), s.title) for s in tide.sessions] == [
        ("part 0", 10, "The Tide"),
        ("part 1", 2, "The Tide"),
    ]
    series = saltmarsh.load("test", series=True, folder=marsh)
    assert [len(h.mindscape.chunks) for h in series.haystacks] == [14]
    assert [q.id for q in queries(series)] == ["q1", "z1"]
    assert [q.id for q in queries(saltmarsh.load("train", series=False, folder=marsh))] == ["q2"]


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        (["thing-1"], r"'q1': quote 'thing-1' is found 3 times"),
        (["no such words"], r"'q1': quote 'no such words' is found 0 times"),
        ([" "], r"'q1': quote ' ' is found 0 times"),
        ([], r"'q1': it has no evidence quote"),
    ],
)
def test_saltmarsh_a_quote_must_be_found_exactly_once(evidence, message):
    book = Book("b", ("thing-1", "thing-10 thing-11"), summaries=("s",))
    with pytest.raises(MiaError, match=message):
        saltmarsh.find_gold("q1", evidence, Mindscape.from_books([book]))


def test_saltmarsh_bad_files(marsh):
    (marsh / "books" / "tide.txt").write_text("The Tide\n\ntext\n")
    with pytest.raises(MiaError, match="book 'tide': its first line is 'The Tide'"):
        saltmarsh.load("test", series=False, folder=marsh)
    (marsh / "books" / "tide.txt").write_text("# The Tide\n\ntext\n")
    with pytest.raises(MiaError, match=r"1 passages make windows 0 to 0, the summaries are for \[0, 1\]"):
        saltmarsh.load("test", series=False, folder=marsh)
    (marsh / "summaries.en.jsonl").write_text('{"book": 1}\n{oops\n')
    with pytest.raises(MiaError, match=r"summaries\.en\.jsonl, line 2: not JSON"):
        saltmarsh.read_json_lines(marsh / "summaries.en.jsonl")


# --- the others, on files made by hand


@pytest.fixture
def fairy(tmp_path: Path) -> Path:
    def story(name: str, origin: str, ids: list[int], sections: list[list[int]]) -> dict:
        return {
            "story": name,
            "origin": origin,
            "sections": [f"Section {k} of the tale {name} begins here." for k in range(len(ids))],
            "section_ids": ids,
            "questions": [
                {"question": f"Who {k}?", "answers": ["", "she"], "sections": s} for k, s in enumerate(sections)
            ],
        }

    folder = tmp_path / "fairytaleqa"
    write_lines(
        folder / "train.jsonl", [story("old-rocket", "red", [1, 2, 2, 3], [[2]]), story("sea", "blue", [1], [[1]])]
    )
    write_lines(folder / "val.jsonl", [story("the-fox", "red", list(range(1, 22)), [[21, 1], [5]])])
    return tmp_path


def test_fairytaleqa_a_haystack_is_the_whole_fairy_book(fairy):
    b = load_benchmark("fairytaleqa", data_dir=fairy)
    assert b.split == "val"
    (red,) = b.haystacks
    assert red.id == "red" and len(red.mindscape.chunks) == 25
    assert [(s.id, len(s.chunk_ids)) for s in red.mindscape.sessions] == [
        ("old-rocket:w0", 4),
        ("the-fox:w0", 20),
        ("the-fox:w1", 1),
    ]
    assert red.mindscape.sessions[0].summary.startswith("old rocket. ")
    assert red.mindscape.summarizer == "keywords"
    first, second = red.queries
    assert (first.id, first.gold, first.group, first.answer) == (
        "the-fox:q0",
        ("the-fox:1", "the-fox:21"),
        "red",
        "she",
    )
    assert second.gold == ("the-fox:5",)
    series = load_benchmark("fairytaleqa", "val", series=True, data_dir=fairy)
    assert [len(h.mindscape.chunks) for h in series.haystacks] == [26]
    # a story's summaries are the same alone and pooled: training and evaluation read the same signatures
    assert {s.summary for s in red.mindscape.sessions} < {s.summary for s in series.haystacks[0].mindscape.sessions}
    assert [q.id for q in queries(series)] == ["the-fox:q0", "the-fox:q1"]


def test_fairytaleqa_sections_numbered_alike_are_both_gold(fairy):
    b = load_benchmark("fairytaleqa", "train", data_dir=fairy)
    assert [q.gold for q in queries(b)] == [("old-rocket:2", "old-rocket:2.2"), ("sea:1",)]


def test_fairytaleqa_needs_its_files(fairy, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no fairytaleqa/test\.jsonl .* get it from github\.com"):
        load_benchmark("fairytaleqa", "test", data_dir=fairy)
    monkeypatch.delenv("MIA_DATA", raising=False)
    with pytest.raises(MiaError, match="set MIA_DATA to the folder that holds fairytaleqa/val"):
        load_benchmark("fairytaleqa")


def test_trn_42_files_are_found_under_the_data_folder_not_the_working_directory(fairy, tmp_path, monkeypatch):
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    monkeypatch.setenv("MIA_DATA", str(fairy))
    assert len(queries(load_benchmark("fairytaleqa"))) == 2


def meeting(name: str, turns: int, spans: list[list[str]]) -> dict:
    return {
        "meeting_id": name,
        "meeting_transcripts": [{"speaker": "A", "content": f"turn {i} of {name}"} for i in range(turns)],
        "general_query_list": [{"query": "Summarize", "answer": f"summary of {name}"}],
        "specific_query_list": [{"query": "What?", "answer": "That.", "relevant_text_span": spans}],
    }


def test_qmsum_windows_of_8_turns_and_inclusive_spans(tmp_path):
    rows = [meeting("m1", 20, [["7", "8"]]), meeting("m2", 16, [["0", "0"], ["15", "15"]])]
    write_lines(tmp_path / "qmsum" / "val.jsonl.gz", rows)
    b = load_benchmark("qmsum", data_dir=tmp_path)
    m1, m2 = (h.mindscape for h in b.haystacks)
    assert [c.id for c in m1.chunks] == ["m1:0", "m1:1", "m1:2"]
    assert m1.chunks[2].text == "\n".join(f"A: turn {i} of m1" for i in range(16, 20))
    assert [s.summary for s in m1.sessions] == ["summary of m1"] and m1.session_of.tolist() == [0, 0, 0]
    assert len(m2.chunks) == 2
    assert [(q.id, q.gold, q.group) for q in queries(b)] == [
        ("m1:q0", ("m1:0", "m1:1"), "m1"),
        ("m2:q0", ("m2:0", "m2:1"), "m2"),
    ]
    series = load_benchmark("qmsum", series=True, data_dir=tmp_path)
    assert series.haystacks[0].mindscape.session_of.tolist() == [0, 0, 0, 1, 1]
    write_lines(tmp_path / "qmsum" / "train.jsonl", [meeting("m1", 8, [["7", "8"]])])
    with pytest.raises(MiaError, match="'m1:q0': span 7-8 is not in its 8 turns"):
        load_benchmark("qmsum", "train", data_dir=tmp_path)


def test_locomo_reads_every_evidence_id_and_counts_what_it_drops(tmp_path, caplog):
    sample = {
        "sample_id": "c1",
        "conversation": {
            "session_1": [{"speaker": "A", "dia_id": f"D1:{i}", "text": "bye"} for i in (1, 2, 3)],
            "session_1_date_time": "8 May",
            "session_10": [{"speaker": "B", "dia_id": "D10:1", "text": "x"}],
            "session_2": [{"speaker": "B", "dia_id": "D2:1", "text": "hi"}],
            "session_11_date_time": "a date without turns",
        },
        "session_summary": {f"session_{i}_summary": f"s{i}" for i in (1, 2, 10)},
        "qa": [
            {"question": "a?", "answer": 5, "evidence": ["D2:1; D1:02", "D:10:1"], "category": 1},
            {"question": "b?", "answer": "b", "evidence": [], "category": 4},
            {"question": "c?", "answer": "c", "evidence": ["D9:9", "D"], "category": 4},
            {"question": "d?", "adversarial_answer": "bait", "evidence": ["D1:1", "D9:9"], "category": 5},
        ],
    }
    (tmp_path / "locomo").mkdir()
    (tmp_path / "locomo" / "locomo10.json").write_text(json.dumps([sample]))
    with caplog.at_level(logging.INFO, logger="mia_serve"):
        b = load_benchmark("locomo", data_dir=tmp_path)
    m = b.haystacks[0].mindscape
    assert [s.id for s in m.sessions] == ["c1:S1", "c1:S2", "c1:S10"]
    assert m.chunks[3].text == "B: hi" and m.sessions[0].date == "8 May" and m.sessions[2].summary == "s10"
    assert [(q.id, q.gold, q.answer, q.tags["category"]) for q in queries(b)] == [
        ("c1:q0", ("c1:D1:2", "c1:D2:1", "c1:D10:1"), "5", "multi-hop"),
        ("c1:q3", ("c1:D1:1",), "", "adversarial"),
    ]
    assert (b.split, b.dropped) == ("all", 2)
    assert "2 questions without evidence dropped, 2 evidence ids name no turn" in caplog.text
    assert locomo.turn_ids(["D9:1 D4:04 D4:6", "D"]) == ["D9:1", "D4:4", "D4:6"]
    # EVL-06: three turns say the same, told once.
    assert duplicate_texts(m) == 2
    assert len([r for r in caplog.records if "2 of 5 chunks repeat the text" in r.message]) == 1


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("saltmarsh", "val", "saltmarsh has no split 'val': choose from train, test"),
        ("locomo", "test", "choose from all"),
        ("qmsum", "dev", "choose from train, val, test"),
        ("narrativeqa", "val", "no benchmark 'narrativeqa': choose from saltmarsh, fairytaleqa, qmsum, locomo"),
    ],
)
def test_unknown_names_and_splits(name, split, message):
    with pytest.raises(MiaError, match=message):
        load_benchmark(name, split, data_dir="/nowhere")


def test_limit_takes_evenly():
    assert take_evenly(list(range(10)), 4) == [0, 2, 5, 7]
    assert take_evenly([1, 2], 5) == [1, 2]
    with pytest.raises(MiaError, match="limit is 0"):
        take_evenly([1, 2], 0)


# --- the real files


def sizes(benchmark) -> tuple[int, int, int, int]:
    mindscapes = [h.mindscape for h in benchmark.haystacks]
    return (
        len(mindscapes),
        sum(len(m.chunks) for m in mindscapes),
        sum(len(m.sessions) for m in mindscapes),
        len(queries(benchmark)),
    )


def test_saltmarsh_as_packaged():
    train, test = (load_benchmark("saltmarsh", split) for split in ("train", "test"))
    assert len(queries(test)) == 120 and not {q.id for q in queries(train)} & {q.id for q in queries(test)}
    assert sizes(load_benchmark("saltmarsh", series=True))[:2] == (1, sizes(test)[1])


@needs_data
def test_real_locomo():
    b = load_benchmark("locomo")
    assert sizes(b) == (10, 5882, 272, 1982) and b.dropped == 4


@needs_data
def test_real_qmsum():
    assert sizes(load_benchmark("qmsum", "val")) == (35, 2533, 35, 237)
    assert sizes(load_benchmark("qmsum", "train", series=True)) == (1, 11113, 162, 1095)


@needs_data
@pytest.mark.skipif(
    bool(os.environ.get("MIA_DATA")) and (Path(os.environ["MIA_DATA"]) / "fairytaleqa" / "test.jsonl").exists(),
    reason="the counts are those of train and val alone",
)
def test_real_fairytaleqa():
    b = load_benchmark("fairytaleqa", "val", series=True)
    assert sizes(b)[:2] == (1, 3730) and len(queries(b)) == 1025
    assert len({q.group for q in queries(b)}) == len(load_benchmark("fairytaleqa", "val").haystacks)
