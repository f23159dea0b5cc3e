"""A run as one HTML page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mia_serve.core import MiaError
from mia_serve.eval.page import build_page, difference, figure
from tests.conftest import Run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def signature(sessions: list[str], **more: Any) -> dict[str, Any]:
    return {
        "session_ids": sessions,
        "texts": ["a"] * len(sessions),
        "gains": [],
        "terms": None,
        "mode": "first_k",
    } | more


def answer(system: str, question: str, **more: Any) -> dict[str, Any]:
    record = {
        "system": system, "id": question, "haystack": "sea", "book": "boat", "task": "free",
        "question": f"谁藏了账本？ {question}", "options": None, "references": ["the ferryman"], "label": "",
        "pair": None,
        "gold": ["boat:1"], "prediction": HOSTILE, "reply": HOSTILE * 100, "failed": None, "mode": "chunks",
        "chunks": ["boat:1", "lamp:0"], "scores": [0.5, 0.25], "e1": [["boat:0", 0.6], ["boat:1", 0.4]],
        "pool": ["boat:w0"], "signature": signature(["lamp:w0", "boat:w0"], gains=[0.5, 0.25],
        pick_terms=[[0.1, 0.2, 0.3], [0.0, 0.1, 0.2]], mode="coverage"),
        "evidence": [], "steps": None, "trimmed": None, "metrics": {"f1": 1.0, "recall@10": 1.0}, "usage": [1, 1],
    }  # fmt: skip
    return record | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    steps = [
        {"step": 0, "query": "who?", "signature": signature(["boat:w0"]), "chunks": ["boat:1"], "scores": [0.5],
         "candidates": ["lamp:w0"], "decision": "REFINE", "next_query": "which ledger?",
         "evidence": [{"text": "The ledger is gone.", "sources": ["boat:1"]}], "failed": None, "usage": [1, 1]},
        {"step": 1, "query": "which ledger?", "signature": signature([], texts=["a free text"]), "chunks": ["lamp:0"],
         "scores": [0.1], "candidates": [], "decision": None, "next_query": "", "evidence": [], "failed": "bad reply",
         "usage": [1, 1]},
    ]  # fmt: skip
    records = [
        answer("e1", "q1", signature=None, metrics={"f1": 0.0, "recall@10": None}),
        answer("agent", "q1", steps=steps),
        answer("e1", "q2", failed="truncated", prediction=None, gold=None),
        answer("e1", "q2", prediction="asked again"),
        answer("dropped row", "q2"),
    ]
    haystack = {
        "id": "sea",
        "books": [{"id": "boat", "title": "The Boat"}, {"id": "lamp", "title": ""}],
        "sessions": [
            {"id": "boat:w0", "book_id": "boat", "title": "The Boat", "date": "", "summary": HOSTILE,
             "chunks": ["boat:0", "boat:1"]},
            {"id": "lamp:w0", "book_id": "lamp", "title": "", "date": "", "summary": "灯", "chunks": ["lamp:0"]},
        ],
    }  # fmt: skip
    share = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 2}
    record = {
        "format": "mia-qa-run", "version": 1,
        "benchmark": {"name": "nocha", "split": "sample", "series": False, "questions": 2, "books": 2},
        "settings": {"k": 10, "weights": [0.3, 0.4, 0.3]}, "encoders": {"e1": {"base": "MiniLM"}, "e2": None},
        "llm": {"model": "a & b", "stats": {"calls": 3}}, "versions": {"python": "3.11"},
        "systems": [
            {"key": "e1", "label": "E1", "metrics": {"f1": share, "recall@10": {"mean": None, "low": None, "high": None,
             "n": 0, "reason": "no gold"}}, "failures": {}},
            {"key": "agent", "label": "MiA-Agent", "metrics": {"f1": share | {"mean": 1.0}},
             "failures": {"truncated": 7}},
        ],
        "pairs": [{"label": "agent - E1", "metrics": {"f1": {"mean": -0.25, "low": -0.5, "high": 0.125}}}],
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(record), "utf-8")
    (run / "haystacks.jsonl").write_text(json.dumps(haystack) + "\n", "utf-8")
    (run / "answers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"cut off', "utf-8")
    (run / "texts.jsonl").write_text(json.dumps({"id": "boat:1", "text": "The ledger."}) + "\n", "utf-8")
    return run


class Elements(HTMLParser):
    """Collects tags with attributes, and the text of scripts by type."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.text = ""
        self._script: str | bool | None = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("type")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = False

    def handle_data(self, data: str) -> None:
        if self._script is not False:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        else:
            self.text += data


def parsed(page: str) -> tuple[Elements, dict[str, Any]]:
    elements = Elements()
    elements.feed(page)
    return elements, json.loads(elements.scripts["application/json"])


def test_the_page_needs_nothing_else_and_runs_nothing_of_a_models(folder: Path) -> None:
    elements, _ = parsed(build_page(folder))
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert not [tag for tag, _ in elements.tags if tag in ("link", "img", "iframe", "base")]
    assert not any(name in attributes for _, attributes in elements.tags for name in ("src", "href", "onerror"))
    assert "alert" not in elements.scripts[None]
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", elements.scripts[None])


def test_tables_hold_means_intervals_and_failures(folder: Path) -> None:
    text = " ".join(parsed(build_page(folder))[0].text.split())
    for shown in (
        "E1 .500 .250 – .750",
        "MiA-Agent 1.000",
        "7 truncated",
        "−.250 −.500 to +.125",
        "a & b",
        "2 questions",
    ):
        assert shown in text
    assert (figure(None), figure(-0.5), figure(0.99999), difference(0.0)) == ("–", "-.500", "1.000", "+.000")


def test_questions_carry_sessions_and_chunks_by_place(folder: Path) -> None:
    _, data = parsed(build_page(folder))
    first, second = data["questions"]
    assert (first["id"], second["id"]) == ("q1", "q2")
    assert first["text"] == "谁藏了账本？ q1" and first["gold"] == [1] and first["pool"] == [0]
    assert first["e1"] == [[0, 0.6], [1, 0.4]]
    agent = first["answers"]["agent"]
    assert agent["hits"] == [[1, 0.5], [2, 0.25]]
    assert [(pick["session"], pick["gain"], pick["terms"]) for pick in agent["signature"]["picks"]] == [
        (1, 0.5, [0.1, 0.2, 0.3]),
        (0, 0.25, [0.0, 0.1, 0.2]),
    ]
    assert len(agent["reply"]) < 4100 and agent["prediction"] == HOSTILE
    step, last = agent["steps"]
    assert (step["decision"], step["candidates"], step["evidence"]) == (
        "REFINE", [1], [{"text": "The ledger is gone.", "sources": [1]}],
    )  # fmt: skip
    assert last["failed"] == "bad reply" and last["signature"]["picks"][0]["text"] == "a free text"
    # Of two records of one answer the later one counts; a row that the run's record lacks is left out.
    assert list(second["answers"]) == ["e1"] and second["answers"]["e1"]["prediction"] == "asked again"
    assert data["texts"] == {"0": {"1": "The ledger."}}


def test_chunks_that_were_read_in_no_order_are_shown_and_so_is_the_floor(folder: Path) -> None:
    with (folder / "answers.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(answer("e1", "q2", scores=[])) + "\n")
    record = json.loads((folder / "run.json").read_text("utf-8"))
    record["trivial"] = [{"label": "always 'the ferryman'", "answer": "the ferryman", "metrics": {"f1": 0.125}}]
    (folder / "run.json").write_text(json.dumps(record), "utf-8")
    elements, data = parsed(build_page(folder))
    assert data["questions"][1]["answers"]["e1"]["hits"] == [[1, 0.0], [2, 0.0]]
    assert "always 'the ferryman' .125 –" in " ".join(elements.text.split())


def test_a_run_without_its_answers_is_told(folder: Path) -> None:
    (folder / "answers.jsonl").unlink()
    with pytest.raises(MiaError, match="holds no answer of the run"):
        build_page(folder)


def test_a_limit_is_spread_over_the_run(folder: Path) -> None:
    _, data = parsed(build_page(folder, limit=1))
    assert [question["id"] for question in data["questions"]] == ["q1"]


def test_the_command_writes_a_file_and_refuses_what_is_no_run(run: Run, folder: Path, tmp_path: Path) -> None:
    assert run("report", folder, "--out", tmp_path / "page.html").code == 0
    assert (tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    assert run("report", folder).code == 0 and (folder / "report.html").is_file()
    kept = (folder / "run.json").read_bytes()
    assert "give a file" in run("report", folder, "--out", "-").refusal
    for own in ("run.json", "settings.json", "../run/answers.jsonl"):
        assert "ends in .html" in run("report", folder, "--out", folder / own).refusal
    assert (folder / "run.json").read_bytes() == kept
    assert "no run at" in run("report", tmp_path / "none").refusal
    (folder / "run.json").write_text('{"format": "mia-qa-run", "version": 2}')
    assert "is not a mia-qa-run of version 1" in run("report", folder).refusal
    (folder / "run.json").unlink()
    with pytest.raises(MiaError, match="no finished run"):
        build_page(folder)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")
def test_a_browser_draws_the_map(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(build_page(folder), "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    command = ["chromium", *options, *quiet, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert drawn.count('class="session"') == 6  # two on the map, and two for each of the agent's two steps
    assert drawn.count('class="chosen"') == 3 and drawn.count('class="gold"') == 1
    assert "σ gained a free text" in drawn and "update failed: bad reply" in drawn
    assert "<img" not in drawn and "covers the pool" in drawn
