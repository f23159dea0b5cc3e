"""``mia-serve eval nocha`` and its kin as a user runs them, against a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MINILM, Run
from tests.eval.qa_toy import HEROES, THINGS, follow
from tests.llm.server import serving


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short novels with claims, as NoCha's files have them."""
    folder = tmp_path_factory.mktemp("data") / "nocha"
    folder.mkdir()
    books, claims = [], []
    for number, name in enumerate(("tide", "lamp")):
        hero = HEROES[name]
        lines = [f"{hero} carried the {thing} to the {name} house in the morning, and it rained." for thing in THINGS]
        books.append({"book_title": name, "title": name, "author": "A. Author", "text": "\n\n".join(lines)})
        for index, thing in enumerate(THINGS[:2]):
            for right in (True, False):
                text = f"{hero if right else 'Nobody'} carried the {thing} to the {name} house"
                claims.append({"book_title": name, "claim": text, "type": right, "index": 10 * number + index})
    for file, rows in (("books.jsonl", books), ("claims.jsonl", claims)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder.parent


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIA_DATA", str(data))


def test_the_command_of_the_readme(run: Run, tmp_path: Path):
    """The agent on a few claims, everything else by default; a second time nothing is asked again."""
    with serving(follow) as stub:
        command = ("eval", "nocha", "--llm", stub.url, "--llm-model", "stub", "--agent", "--limit", 4)
        options = ("--chunk-tokens", 24, "--window", 3, "--k", 3, "--n-boot", 100)
        done = run(*command, *options, "--json", "out.json", "--llm-price", "1,2")
        assert done.code == 0, done.err
        calls = len(stub.requests)
        again = run(*command, *options, "--json", "-")
        assert len(stub.requests) == calls
    record = json.loads(Path("out.json").read_text())
    assert record["benchmark"]["questions"] == 4 and record["benchmark"]["pairs"] == 2
    keys = ["base", "sig", "mia_rag", "mia_rag_auto", "summary_only", "agent_no_sig", "agent"]
    assert [system["key"] for system in record["systems"]] == keys  # no E1 and no E2 was given
    agent = record["systems"][-1]
    assert agent["mode"] == "chunks+sig+evi" and agent["label"] == "MiA-Agent, σ as prior on E1"
    assert agent["metrics"]["pair_accuracy"]["mean"] == 1
    assert max(map(len, done.out.splitlines())) <= 100
    assert "always TRUE" in done.out and "LLM: " in done.out and "$" in done.out
    assert "Run: runs/eval-nocha (page: mia-serve report runs/eval-nocha)" in done.out
    folder = tmp_path / "runs/eval-nocha"
    assert {"run.json", "answers.jsonl", "haystacks.jsonl", "texts.jsonl", "replies.jsonl"} <= {
        file.name for file in folder.iterdir()
    }
    volatile = ("seconds", "spent", "texts")
    assert {k: v for k, v in again.record.items() if k not in volatile} == {
        k: v for k, v in record.items() if k not in volatile
    }

    tables = run("eval", "tables", "runs/eval-nocha")
    assert tables.code == 0 and max(map(len, tables.out.splitlines())) <= 100
    ours = next(line for line in tables.out.splitlines() if "ours: Agent, σ prior" in line)
    assert ours.split()[-4:] == ["100.0", "100.0", "–", "–"]
    other = run("eval", "nocha", "--llm", "http://127.0.0.1:9/v1", "--llm-model", "stub", "--limit", 2, *options)
    assert "holds a run with other settings" in other.refusal and "limit 4 (now 2)" in other.refusal
    replayed = run("eval", "nocha", "--replay", "--limit", 4, "--agent", *options, "--json", "-")
    assert replayed.record["systems"] == record["systems"]


def test_replies_are_not_kept_under_the_name_of_another_file_of_the_run(run: Run):
    """``run.json`` is replaced at the end, and ``answers.jsonl`` is added to: replies in them would be lost."""
    options = ("--llm", "http://127.0.0.1:9/v1", "--llm-model", "stub", "--out", "new")
    for name in ("run.json", "../new/answers.jsonl"):
        assert "lies in the run's folder" in run("eval", "nocha", *options, "--llm-cache", f"new/{name}").refusal
    assert not Path("new").exists()


def test_without_a_model_passages_alone_are_measured(run: Run):
    done = run("eval", "nocha", "--chunk-tokens", 24, "--k", 3, "--n-boot", 50, "--out", "plain", "--json", "-")
    assert [system["key"] for system in done.record["systems"]] == ["base", "sig_first_k", "sig"]
    assert done.record["llm"] is None and done.record["benchmark"]["without_gold"] == 8
    recall = done.record["systems"][0]["metrics"]["recall@3"]
    assert recall["mean"] is None and recall["reason"] == "no gold is known"
    swept = run(
        "eval", "nocha", "--chunk-tokens", 24, "--k", 3, "--n-boot", 50, "--out", "plain", "--json", "-", "--sweep",
        "k_sum=1,5",
    )  # fmt: skip
    study = swept.record["sweep"]
    assert study["factors"] == {"k_sum": [1, 5]} and set(study["systems"]) == {"sig_first_k", "sig"}
    assert (Path("plain/sweep.json")).is_file() and (Path("plain/sweep/k_sum=1/run.json")).is_file()
    assert "K_sum" in swept.err  # the table, as stdout is for the JSON
    assert done.record["settings"]["names"] == {"base": "all-MiniLM-L6-v2", "e1": None, "e2": None, "selector": None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--agent",), "--agent needs a language model: give --llm URL"),
        (("--summarizer", "llm"), "--summarizer llm needs a language model"),
        (("--systems", "sig,ours"), "unknown system 'ours'; available: base, e1"),
        (("--systems", "raptor"), "none of the systems raptor can be run"),
        (("--base", "none"), "no first-stage encoder"),
        (("--series", "--series-map", "x.json"), "give one of them"),
        (("--split", "train"), "has no split 'train'"),
        (("--chunk-tokens", "5000"), "base reads 254 tokens of a text"),
        (("--chunk-tokens", "20", "--overlap", "20"), "not below the chunk size"),
        (("--json", "no/such/out.json"), "its folder does not exist"),
        (("--base", "no/such/model"), "no/such/model"),
        (("--llm", "not an address", "--llm-model", "m"), "give one such as"),
        (("--sweep", "width=3"), "unknown setting 'width'"),
        (("--sweep", "alpha=0,1"), "nothing here depends on it"),
        (("--signature-update", "rewrite", "--replay"), "no recorded replies"),
        (("--replay",), "no recorded replies to replay"),
        (("--data", "nowhere"), "nowhere"),
    ],
)
def test_wrong_use_is_one_line(run: Run, arguments: tuple[str, ...], said: str):
    done = run("eval", "nocha", *arguments)
    assert done.code == 2 and said in done.refusal
    assert not Path("runs/eval-nocha/answers.jsonl").exists()


def test_a_refusing_endpoint_fails_with_what_to_do(run: Run):
    with serving(lambda body: 401) as stub:
        done = run(
            "eval", "nocha", "--llm", stub.url, "--llm-model", "m", "--base", MINILM, "--limit", 2,
            "--systems", "base", "--k", 3, "--chunk-tokens", 24,
        )  # fmt: skip
    assert done.code == 1 and "answered 401" in done.refusal and "the same command goes on" in done.refusal
    none = run("eval", "tables", "runs/eval-nocha")
    assert none.code == 2 and "holds no finished run" in none.refusal


def test_summaries_by_the_model_are_asked_for_once(run: Run):
    def reply(body: dict[str, Any]) -> str:
        prompt = body["messages"][-1]["content"]
        return follow(body) if "<statement>" in prompt else "Someone carries things to a house while it rains."

    with serving(reply) as stub:
        command = (
            "eval", "nocha", "--llm", stub.url, "--llm-model", "stub", "--summarizer", "llm", "--systems", "mia_rag",
            "--chunk-tokens", 24, "--window", 3, "--k", 3, "--out", "written",
        )  # fmt: skip
        done = run(*command, "--json", "-")
        calls = len(stub.requests)
        assert done.record["benchmark"]["summarizer"] == ["llm(stub)"]
        # 4 windows of each of 2 books, 2 summaries of books, 8 answers.
        assert calls == 8 + 2 + 8
        run(*command)
        assert len(stub.requests) == calls
    haystack = json.loads(Path("written/haystacks.jsonl").read_text().splitlines()[0])
    assert haystack["sessions"][0]["summary"] == "Someone carries things to a house while it rains."
