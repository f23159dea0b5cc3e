"""Silver evidence: the vote, the language model's choice, failures, resuming, and the command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_serve.core import Encoder, MiaError
from mia_serve.eval.datasets import load_benchmark
from mia_serve.llm import ChatClient, Journal, LlmFailed
from mia_serve.mindscape import Book, Mindscape
from mia_train.cli import main
from mia_train.rows import Row, parse_row, read_rows, row_to_json
from mia_train.silver import Silver, SilverSettings, make_silver
from mia_train.silver_input import Question, Unit, chunk_units, read_nodes, read_questions
from mia_train.silver_vote import find_candidates, vote
from tests.conftest import MINILM
from tests.llm.server import serving

PEOPLE = ("Anna", "Boris", "Clara", "Dmitri", "Elsa", "Fyodor", "Greta", "Henrik", "Ida", "Jonas", "Karin", "Ludvig")
THINGS = ("brass compass", "fishing net", "church bell", "old violin", "snow globe", "tin soldier", "leather saddle",
          "tea kettle", "chess board", "oil painting", "iron key", "wool blanket")  # fmt: skip
PLACES = {"island": "tower", "valley": "barn"}


def sentence(book: str, i: int) -> str:
    return f"{PEOPLE[i]} hid the {THINGS[i]} in the {PLACES[book]}, and told nobody of it."


@pytest.fixture(scope="module")
def mindscape() -> Mindscape:
    books = [Book(name, tuple(sentence(name, i) for i in range(12)), summaries=("s",)) for name in PLACES]
    return Mindscape.from_books(books)


QUESTIONS = [
    Question(f"q{i}", f"What did {PEOPLE[i]} hide in the tower?", f"the {THINGS[i]}", "island") for i in range(8)
]


def gold(question: Question) -> str:
    return f"island:{question.id[1:]}"


def asked_for(body: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the question of a request, and its candidates by index."""
    prompt = body["messages"][1]["content"]
    (question,) = re.findall(r"^Question: (.*)$", prompt, re.MULTILINE)
    found = re.findall(r'<(?:passage|entity) index="(\d+)">\n(.*?)\n</', prompt, re.DOTALL)
    assert [int(i) for i, _ in found] == list(range(len(found)))
    return question, [text for _, text in found]


def right(body: dict[str, Any]) -> str:
    """A model that knows its way: it keeps what names the person of the question."""
    question, texts = asked_for(body)
    person = question.split()[2]
    return json.dumps([i for i, text in enumerate(texts) if person in text] or [-1])


def with_llm(
    url: str, mindscape: Mindscape, encoder: Encoder, questions: list[Question] | None = None, **more: Any
) -> Silver:
    client = ChatClient(url, "m", max_retries=0, concurrency=more.pop("concurrency", 4))
    settings = SilverSettings(**more.pop("settings", {}))
    units = chunk_units(mindscape)
    return make_silver(questions or QUESTIONS, units, encoder, client=client, settings=settings, **more)


# ---- the vote


def test_the_vote_by_hand():
    lists = [["a", "b", "c"], ["b", "a", "d"], ["b", "e", "c"]]
    # in lists: b 3; a 2 (1 + 1/2), c 2 (1/3 + 1/3); e 1 (1/2), d 1 (1/3)
    assert vote(lists, 10) == ["b", "a", "c", "e", "d"]
    assert vote(lists, 2) == ["b", "a"]
    assert vote([["y", "x"], ["x", "y"], []], 10) == ["x", "y"], "equal votes go by id"
    # Ranks 3, 10, 7 and 10, 7, 3 are equal votes; added left to right in floating point they would differ.
    ranks = {"p": (3, 10, 7), "n": (10, 7, 3)}
    lists = [
        [next((u for u in ranks if ranks[u][i] == rank), f"z{i}{rank}") for rank in range(1, 11)] for i in range(3)
    ]
    assert vote(lists, 2) == ["n", "p"]


def test_candidates_are_those_of_a_plain_search_within_the_book(minilm: Encoder, mindscape: Mindscape):
    everywhere = [Question(q.id + "x", q.text, q.answer) for q in QUESTIONS]
    questions = [q for pair in zip(QUESTIONS, everywhere, strict=True) for q in pair]
    found = find_candidates(questions, chunk_units(mindscape), minilm, top_k=4, size=5)
    chunks = [(c.id, c.text) for c in mindscape.chunks]
    for question in questions:
        own = [c for c in chunks if question.book in (None, c[0].split(":")[0])]
        vectors = minilm.encode_documents([text for _, text in own]).astype(np.float64)
        votes: dict[str, list[float]] = {}
        for text in (question.text, f"{question.text} {question.answer}", question.answer):
            scores = vectors @ minilm.encode_queries([text])[0]
            for rank, row in enumerate(np.argsort(-scores)[:4], start=1):
                votes.setdefault(own[row][0], []).append(1 / rank)
        order = sorted(votes, key=lambda i: (-len(votes[i]), -sum(votes[i]) / 3, i))
        assert list(found[question.id].chunks) == order[:5]


def test_the_vote_finds_the_gold_passage_of_a_clear_question(minilm: Encoder):
    haystack = next(h for h in load_benchmark("saltmarsh", "train", series=False).haystacks if h.id == "the-tide-table")
    queries = [q for q in haystack.queries if q.tags["kind"] == "direct"]
    questions = [Question(q.id, q.text, q.answer, q.group) for q in queries]
    settings = SilverSettings(filter="none", keep=10)
    made = make_silver(questions, chunk_units(haystack.mindscape), minilm, settings=settings)
    silver = {row.query_id: [p.id for p in row.positives] for row in made.rows}
    # Clear: the question or the answer names what its passage names ("What was Silas Orme's job in Saltmarsh?").
    clear = {"tide-008", "tide-012", "tide-025", "tide-035", "tide-063", "tide-085", "tide-088"}
    gold = {q.id: set(q.gold) for q in queries}
    assert all(silver[i][0] in gold[i] for i in clear)
    assert np.mean([bool(gold[i] & set(silver[i])) for i in gold]) > 0.9


# ---- rows


def check_row(row: Row, question: Question, hard: int, simple: int) -> None:
    assert (row.query_id, row.query, row.group) == (question.id, question.text, "island")
    kinds = [p.kind for p in row.negatives]
    assert kinds == ["hard"] * hard + ["simple"] * simple
    ids = [p.id for p in (*row.positives, *row.negatives)]
    assert len(set(ids)) == len(ids) and all(i.startswith("island:") for i in ids)
    assert parse_row(row_to_json(row), "row") == row


def test_without_a_model_the_vote_is_kept_and_named_so(minilm: Encoder, mindscape: Mindscape):
    settings = SilverSettings(filter="none", keep=3)
    made = make_silver(QUESTIONS, chunk_units(mindscape), minilm, settings=settings)
    votes = find_candidates(QUESTIONS, chunk_units(mindscape), minilm)
    for row, question in zip(made.rows, QUESTIONS, strict=True):
        check_row(row, question, hard=0, simple=5)
        assert row.source == "silver-vote"
        assert tuple(p.id for p in row.positives) == votes[question.id].chunks[:3]
        assert row.positives[0].id == gold(question)
    assert made.report["source"] == "silver-vote" and made.report["silver_per_question"] == 3
    again = make_silver(QUESTIONS[::-1], chunk_units(mindscape), minilm, settings=settings)
    assert again.rows[::-1] == made.rows, "the draws depend on the question alone"
    more = make_silver(QUESTIONS, chunk_units(mindscape), minilm, settings=SilverSettings(filter="none", hard=4))
    for row, question in zip(more.rows, QUESTIONS, strict=True):
        check_row(row, question, hard=4, simple=5)


def test_the_model_chooses_and_what_it_leaves_are_hard_negatives(minilm: Encoder, mindscape: Mindscape):
    with serving(right) as stub:
        made = with_llm(stub.url, mindscape, minilm)
    assert len(stub.requests) == len(QUESTIONS)
    votes = find_candidates(QUESTIONS, chunk_units(mindscape), minilm)
    for row, question in zip(made.rows, QUESTIONS, strict=True):
        check_row(row, question, hard=5, simple=5)
        assert row.source == "silver-llm" and [p.id for p in row.positives] == [gold(question)]
        left = [i for i in votes[question.id].chunks if i != gold(question)]
        assert [p.id for p in row.negatives[:5]] == left[:5]
    assert made.report["kept"] == 8 and made.report["dropped_none"] == made.report["failed"] == 0
    used = made.report["llm"]
    assert (used["calls"], used["cached"], used["prompt_tokens"], used["completion_tokens"]) == (8, 0, 56, 24)


def test_the_prompt_asks_for_what_the_paper_asks_for(minilm: Encoder, mindscape: Mindscape):
    with serving(right) as stub:
        with_llm(stub.url, mindscape, minilm, QUESTIONS[:1])
    (request,) = stub.requests
    system, user = (message["content"] for message in request["messages"])
    assert "expert" in system and "narrative" in system
    assert user.startswith(f"Question: {QUESTIONS[0].text}\nAnswer: {QUESTIONS[0].answer}\n")
    assert len(asked_for(request)[1]) == 10 and sentence("island", 0) in asked_for(request)[1]
    for wanted in ("states the answer", "background", "character develops", "events", "dialogue", "several passages",
                   "motive", "JSON array", "nothing else", "[-1]"):  # fmt: skip
        assert wanted in user
    assert request["temperature"] == 0 and request["seed"] == 0


def test_no_evidence_drops_the_question_and_bad_indexes_fail_it(minilm: Encoder, mindscape: Mindscape):
    replies = {
        "Anna": "[-1]",
        "Boris": "[10]",  # ten candidates: 0 to 9
        "Clara": "I keep the first one.",
        "Dmitri": "[0, -1]",
        "Elsa": "[]",
        "Fyodor": "```json\n[0, 0]\n```",
    }
    with serving(lambda body: replies.get(asked_for(body)[0].split()[2]) or right(body)) as stub:
        made = with_llm(stub.url, mindscape, minilm)
    report = made.report
    assert [row.query_id for row in made.rows] == ["q5", "q6", "q7"]
    assert len(made.rows[0].positives) == 1
    assert (report["questions"], report["kept"], report["dropped_none"], report["failed"]) == (8, 3, 2, 3)
    assert report["failed_by_reason"] == {"bad reply": 3}
    assert [f["id"] for f in report["failures"]] == ["q1", "q2", "q3"]
    assert "10 is not an index from 0 to 9" in report["failures"][0]["detail"]
    assert len(stub.requests) == 8 + 3, "one repair each"


def test_a_repaired_reply_counts(minilm: Encoder, mindscape: Mindscape):
    with serving(lambda body: right(body) if len(body["messages"]) == 4 else "[99]") as stub:
        made = with_llm(stub.url, mindscape, minilm)
    assert made.report["kept"] == 8 and len(stub.requests) == 16
    assert "99 is not an index" in stub.requests[-1]["messages"][-1]["content"]


def test_a_copy_of_the_evidence_is_no_negative(minilm: Encoder):
    texts = (sentence("island", 0), sentence("island", 0).upper(), *(sentence("island", i) for i in range(1, 6)))
    mindscape = Mindscape.from_books([Book("island", texts, summaries=("s",))])
    with serving(lambda body: json.dumps([asked_for(body)[1].index(texts[0])])) as stub:
        made = with_llm(stub.url, mindscape, minilm, QUESTIONS[:1])
    row = made.rows[0]
    assert [p.id for p in row.positives] == ["island:0"]
    assert sorted(p.id for p in row.negatives) == [f"island:{i}" for i in range(2, 7)]
    assert made.report["rows_short_of_hard_negatives"] == 0 and made.report["rows_short_of_negatives"] == 1


def test_nodes_go_the_same_way(minilm: Encoder, mindscape: Mindscape, tmp_path: Path):
    file = tmp_path / "nodes.jsonl"
    lines: list[dict[str, str]] = [
        {"name": p, "description": f"{p}, who hid the {t}", "book": "island"}
        for p, t in zip(PEOPLE, THINGS, strict=True)
    ]
    lines.append({"id": "everywhere", "name": "Anna's cat", "description": "Anna saw it in both books"})
    lines.append({"name": "Anna", "description": "Anna of the valley", "book": "valley"})
    file.write_text("\n".join(map(json.dumps, lines)))
    nodes = read_nodes(file, {"island", "valley"})
    assert nodes[0] == Unit("node:island:Anna", "Anna : Anna, who hid the brass compass", "island")
    elsewhere = Question("v", "What did Ida hide in the barn?", "the chess board", "valley")
    with serving(lambda body: "[-1]" if "Clara hide" in asked_for(body)[0] else right(body)) as stub:
        made = with_llm(stub.url, mindscape, minilm, [*QUESTIONS[:3], elsewhere], nodes=nodes)
    first, second, last = made.rows
    assert first.nodes is not None and second.nodes is not None
    assert {p.id for p in first.nodes.positives} == {"node:island:Anna", "everywhere"}
    assert [p.id for p in second.nodes.positives] == ["node:island:Boris"]
    kinds = [p.kind for p in second.nodes.negatives]
    assert kinds == ["hard"] * 5 + ["simple"] * 5 and "node:valley:Anna" not in {p.id for p in second.nodes.negatives}
    assert last.query_id == "v" and last.nodes is None, "no node of its book was kept"
    # Two a question that has chunks and nodes; Clara's has no chunk, so its nodes are not asked about.
    assert len(stub.requests) == 2 + 2 + 1 + 2
    assert "linked" in (user := stub.requests[-1]["messages"][1]["content"]) or "links" in user
    assert made.report["silver_nodes_per_question"] == 1


# ---- failures of the endpoint, resuming


def test_a_question_that_the_endpoint_fails_is_listed_and_asked_again_next_time(
    minilm: Encoder, mindscape: Mindscape, tmp_path: Path
):
    down = True
    with serving(lambda body: 500 if down and "Clara" in asked_for(body)[0] else right(body)) as stub:
        made = with_llm(stub.url, mindscape, minilm, work=tmp_path / "w")
        assert made.report["failed_by_reason"] == {"http 500": 1} and made.report["kept"] == 7
        down = False
        seen = len(stub.requests)
        again = with_llm(stub.url, mindscape, minilm, work=tmp_path / "w")
    assert [asked_for(body)[0] for body in stub.requests[seen:]] == [QUESTIONS[2].text]
    assert again.report["kept"] == 8 and again.report["llm"]["resumed"] == 7
    assert [row for row in again.rows if row.query_id != "q2"] == made.rows


@pytest.mark.parametrize(("status", "requests"), [(401, 1), (404, 1), (503, 10)])
def test_an_endpoint_that_refuses_all_stops_the_run(
    minilm: Encoder, mindscape: Mindscape, tmp_path: Path, status: int, requests: int
):
    questions = [Question(f"{q.id}.{j}", q.text, q.answer, q.book) for q in QUESTIONS for j in range(3)]
    with serving(lambda body: status) as stub:
        with pytest.raises(LlmFailed, match=str(status)):
            with_llm(stub.url, mindscape, minilm, questions, work=tmp_path / "w", concurrency=1)
        assert len(stub.requests) == requests
    with serving(right) as stub:
        assert with_llm(stub.url, mindscape, minilm, questions, work=tmp_path / "w").report["kept"] == 24


def test_what_was_decided_stays_decided_and_other_settings_are_refused(
    minilm: Encoder, mindscape: Mindscape, tmp_path: Path
):
    work = tmp_path / "w"
    with serving(lambda body: "what?" if "Elsa" in asked_for(body)[0] else right(body)) as stub:
        first = with_llm(stub.url, mindscape, minilm, work=work)
        asked = len(stub.requests)
        again = with_llm(stub.url, mindscape, minilm, work=work)
        assert again.rows == first.rows and again.report["failures"] == first.report["failures"]
        fewer = with_llm(stub.url, mindscape, minilm, work=work, settings={"hard": 1, "simple": 0})
        assert [len(row.negatives) for row in fewer.rows] == [1] * 7, "negatives are drawn anew"
        assert len(stub.requests) == asked
        with pytest.raises(MiaError, match=r"other settings: top_k \(10 there, 3 now\); remove it"):
            with_llm(stub.url, mindscape, minilm, work=work, settings={"top_k": 3})
        with pytest.raises(MiaError, match=r"questions \("):
            with_llm(stub.url, mindscape, minilm, QUESTIONS[:5], work=work)
        assert len(stub.requests) == asked
    held = Journal(work, exclusive=True)
    with pytest.raises(MiaError, match="another run is writing it"):
        with_llm(stub.url, mindscape, minilm, work=work)
    held.close()
    work.write_text('{"query_id": "a row"}\n')
    with pytest.raises(MiaError, match="not the work file"):
        with_llm(stub.url, mindscape, minilm, work=work)


# ---- the command


@pytest.fixture
def folder(mindscape: Mindscape, tmp_path: Path) -> Path:
    mindscape.save(tmp_path / "ms")
    lines = [{"id": q.id, "question": q.text, "answer": q.answer, "book": q.book} for q in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def arguments(folder: Path, out: str, *more: str) -> list[str]:
    paths = ["--mindscape", str(folder / "ms"), "--questions", str(folder / "questions.jsonl")]
    return ["silver", *paths, "--encoder", MINILM, "--device", "cpu", "-o", str(folder / out), *more]


def code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_the_command_writes_rows_and_report_and_replays_them(folder: Path, capsys: pytest.CaptureFixture[str]):
    cache = str(folder / "c.jsonl")
    with serving(right) as stub:
        model = ["--llm", stub.url, "--llm-model", "m", "--llm-cache", cache]
        assert code(arguments(folder, "rows.jsonl", *model, "--json", "-")) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == json.loads((folder / "rows.jsonl.report.json").read_text())
    assert "8 rows (silver-llm) of 8 questions, 1.00 silver chunks each" in output.err and "%|" not in output.err
    rows = read_rows([folder / "rows.jsonl"])
    assert [row.query_id for row in rows] == [q.id for q in QUESTIONS]
    replay = arguments(folder, "again.jsonl", "--llm-model", "m", "--llm-cache", cache, "--replay")
    assert code(replay) == 0
    whole = (folder / "rows.jsonl").read_bytes()
    assert (folder / "again.jsonl").read_bytes() == whole
    assert json.loads((folder / "again.jsonl.report.json").read_text())["llm"]["cached"] == 8
    assert code(arguments(folder, "rows.jsonl", *model)) == 0, "all is decided: the server is not needed"
    assert (folder / "rows.jsonl").read_bytes() == whole
    lacking = arguments(folder, "x.jsonl", "--llm-model", "other", "--llm-cache", cache, "--replay")
    assert code(lacking) == 1
    assert "holds no reply of 'other'" in capsys.readouterr().err and not (folder / "x.jsonl").exists()


def test_a_killed_run_goes_on_and_asks_no_question_twice(folder: Path):
    fourth = threading.Event()

    def answer(body: dict[str, Any]) -> str:
        if len(stub.requests) == 4 and not fourth.is_set():
            fourth.set()
            process.wait(60)  # this one is never answered
        return right(body)

    with serving(answer) as stub:
        command = arguments(folder, "rows.jsonl", "--llm", stub.url, "--llm-model", "m", "--concurrency", "1")
        process = subprocess.Popen([sys.executable, "-m", "mia_train", *command], cwd=Path(__file__).parents[2])
        assert fourth.wait(120)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (folder / "rows.jsonl").exists() and (folder / "rows.jsonl.work").exists()
        assert code(command) == 0
        asked = [asked_for(body)[0] for body in stub.requests]
    assert asked == [q.text for q in (*QUESTIONS[:4], *QUESTIONS[3:])], "only the one in flight was asked again"
    whole = (folder / "rows.jsonl").read_bytes()
    assert json.loads((folder / "rows.jsonl.report.json").read_text())["llm"]["resumed"] == 3
    with serving(right) as stub:
        command = arguments(folder, "straight.jsonl", "--llm", stub.url, "--llm-model", "m")
        assert code(command) == 0
    assert (folder / "straight.jsonl").read_bytes() == whole


def test_nothing_kept_is_a_failure_with_a_report(folder: Path, capsys: pytest.CaptureFixture[str]):
    with serving(lambda body: "[-1]") as stub:
        assert code(arguments(folder, "rows.jsonl", "--llm", stub.url, "--llm-model", "m")) == 1
    assert "of 8 questions 8 have no silver evidence" in capsys.readouterr().err
    assert json.loads((folder / "rows.jsonl.report.json").read_text())["dropped_none"] == 8
    assert not (folder / "rows.jsonl").exists()


def test_an_endpoint_that_refuses_leaves_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]):
    with serving(lambda body: 401) as stub:
        assert code(arguments(folder, "rows.jsonl", "--llm", stub.url, "--llm-model", "m")) == 1
    error = capsys.readouterr().err
    assert "answered 401" in error and "the same command goes on from there" in error
    assert not (folder / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--filter llm needs --llm URL and --llm-model NAME"),
        (["--llm", "http://localhost:1/v1"], "--filter llm needs"),
        (["--llm", "localhost:1", "--llm-model", "m"], "give one such as http://localhost:8000/v1"),
        (["--llm-model", "m", "--replay"], "--replay needs --llm-cache"),
        (["--filter", "none", "--llm-model", "m"], "no use with --filter none"),
        (["--llm", "http://localhost:1/v1", "--llm-model", "m", "--keep", "3"], "--keep is for --filter none"),
        (["--filter", "none", "--json", "nowhere/x.json"], "its folder does not exist"),
        (["--filter", "none", "--json", "."], "is a folder"),
        (["--filter", "none", "--keep", "11"], "the vote leaves 10 candidates"),
        (["--filter", "none", "--json", "{}/rows.jsonl"], "is the file of --out"),
        (["--llm", "http://localhost:1/v1", "--llm-model", "m", "--llm-cache", "{}/rows.jsonl.work"], "the work file"),
        (["--filter", "none", "-o", "{}/none/../questions.jsonl"], "is the file of --questions"),
    ],
)
def test_wrong_use_is_told(folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str):
    assert code(arguments(folder, "rows.jsonl", *(option.format(folder) for option in more))) == 2
    assert message in capsys.readouterr().err


GOOD = '{"id": "q1", "question": "Who?", "answer": "Anna", "book": "island"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GOOD, "id 'q1' is that of"),
        (
            '{"id": "q2", "question": "Who?", "answer": "Anna", "book": "islan"}',
            "no book 'islan'; it has island, valley",
        ),
        ('{"id": "q2", "question": "  ", "answer": "Anna"}', "'question' is empty"),
        ('{"id": "q2", "question": "Who?", "answer": ""}', "'answer' is empty"),
        ('{"id": "q2", "question": "Who?"}', "'answer' is missing"),
        ('{"id": 2, "question": "Who?", "answer": "Anna"}', "'id' is 2; it must be"),
        ('{"id": "q2", "question": "Who?", "answer": "Anna", "books": "island"}', "unknown key 'books'; allowed: id"),
        ('{"id": "q2", "question": "Wh\\ud800", "answer": "Anna"}', "surrogate"),
        ('["q2"]', "one object a line"),
        ("[" * 200_000, "not JSON"),
        ('{"id": ' + "9" * 5000 + "}", "not JSON"),
        ('{"id": "q2",', "not JSON"),
    ],
)
def test_a_bad_question_is_named_by_file_and_line_before_anything_is_encoded(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
):
    file = folder / "questions.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n")
    command = arguments(folder, "rows.jsonl", "--filter", "none")
    command[command.index(MINILM)] = str(folder / "no-encoder")
    assert code(command) == 2
    error = capsys.readouterr().err
    assert f"{file}:3: " in error and message in error


def test_nodes_are_checked_too(tmp_path: Path):
    file = tmp_path / "n.jsonl"
    for line, message in (
        ('{"name": "Anna", "description": ""}', r"n\.jsonl:2: 'description' is empty"),
        ('{"name": "Anna", "description": "again"}', r"n\.jsonl:2: node 'node:Anna' is that of .*:1 too"),
    ):
        file.write_text('{"name": "Anna", "description": "a girl"}\n' + line)
        with pytest.raises(MiaError, match=message):
            read_nodes(file, {"island"})
    file.write_text("")
    with pytest.raises(MiaError, match="no questions"):
        read_questions(file, {"island"})


def test_evidence_of_a_question_that_is_asked_twice_is_no_negative_of_either(minilm: Encoder, mindscape: Mindscape):
    """FairytaleQA asks some questions twice, with other answers: each answer has evidence of its own."""
    ask = "What was hidden in the tower?"
    twice = [Question("a", ask, "the brass compass", "island"), Question("b", ask.upper(), "the tea kettle", "island")]

    def by_answer(body: dict[str, Any]) -> str:
        thing = (
            "brass compass" if "brass compass" in body["messages"][1]["content"].split("<passage")[0] else "tea kettle"
        )
        return json.dumps([i for i, text in enumerate(asked_for(body)[1]) if thing in text] or [-1])

    with serving(by_answer) as stub:
        made = with_llm(stub.url, mindscape, minilm, twice, settings={"simple": 12})
    evidence = [{p.id for p in row.positives} for row in made.rows]
    assert evidence == [{"island:0"}, {"island:7"}]
    for row in made.rows:
        assert len(row.negatives) == 10 and not {p.id for p in row.negatives} & set.union(*evidence)
