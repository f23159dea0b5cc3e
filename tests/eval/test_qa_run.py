"""Runs of all systems over a toy benchmark, against a real server that replies by rules."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mia_serve.core.errors import MiaError
from mia_serve.eval.qa_systems import LABELS, PAIRS, available
from mia_serve.eval.qa_tables import run_text
from tests.eval.qa_toy import (
    E1,
    HEROES,
    THINGS,
    QaEncoders,
    benchmark,
    choice,
    claim,
    claims,
    follow,
    free,
    plan,
    run,
    run_claims,
)
from tests.llm.server import serving

VOLATILE = ("seconds", "spent")


def answers(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "answers.jsonl").read_text("utf-8").splitlines()]
    return {(record["system"], record["id"]): record for record in records}


def stable(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in VOLATILE}


def test_every_system_answers_every_question_and_the_folder_tells_how(tmp_path):
    asked = benchmark([claim(b, t, r) for b in HEROES for t in THINGS[:2] for r in (True, False)])
    with serving(follow) as stub:
        record = run(plan(tmp_path / "run", stub.url, asked))
    assert [system["key"] for system in record["systems"]] == list(LABELS)
    found = answers(tmp_path / "run")
    assert len(found) == len(LABELS) * 12
    by_key = {system["key"]: system for system in record["systems"]}
    for key in ("base", "e1", "sig", "mia_rag", "agent"):
        # The gold chunk is found, so the rule-following model is right about every claim, hence every pair.
        assert by_key[key]["metrics"]["recall@3"]["mean"] == 1, key
        assert by_key[key]["metrics"]["pair_accuracy"]["mean"] == 1, key
        assert by_key[key]["metrics"]["pair_accuracy"]["n"] == 6
        assert by_key[key]["failures"] == {}
    assert "recall@3" not in by_key["summary_only"]["metrics"]
    assert "recall@3" not in by_key["gist"]["metrics"]
    one = found["agent", "tide/lantern/True"]
    assert one["mode"] == "chunks+sig+evi" and len(one["steps"]) == 1 and one["steps"][0]["decision"] == "ANSWER"
    assert one["evidence"][0]["text"] == "It was carried." and one["evidence"][0]["sources"][0] in one["chunks"]
    assert len(one["signature"]["session_ids"]) == 1  # as the model said
    assert found["agent_no_sig", "tide/lantern/True"]["signature"] is None
    assert found["agent_no_sig", "tide/lantern/True"]["mode"] == "chunks+evi"
    static = found["mia_rag", "tide/lantern/True"]
    assert static["mode"] == "chunks+sig" and static["steps"] is None and static["gold"] == ["tide:0"]
    assert "tide:0" in static["chunks"] and len(static["chunks"]) == len(static["scores"]) == 3
    assert len(static["e1"]) == 6 and static["e1"][0][0] == "tide:0"
    assert static["pool"][0] == "tide:w0"
    assert set(static["signature"]["session_ids"]) <= set(static["pool"])
    assert len(static["signature"]["pick_terms"]) == 2
    assert static["usage"] == [7, 3] and one["usage"] == [14, 6]
    haystacks = [json.loads(line) for line in (tmp_path / "run/haystacks.jsonl").read_text("utf-8").splitlines()]
    assert [h["id"] for h in haystacks] == list(HEROES)
    assert [len(s["chunks"]) for s in haystacks[0]["sessions"]] == [4, 4, 3]
    texts = {json.loads(line)["id"] for line in (tmp_path / "run/texts.jsonl").read_text("utf-8").splitlines()}
    assert {chunk for r in found.values() for chunk in r["chunks"]} <= texts
    assert json.loads((tmp_path / "run/run.json").read_text("utf-8")) == record
    assert {(p["first"], p["second"]) for p in record["pairs"]} == set(PAIRS)
    text = run_text(record)
    assert max(map(len, text.splitlines())) <= 100
    assert "always TRUE" in text and "MiA-Agent" in text


def test_scores_of_wrong_unreadable_and_failed_answers_by_hand(tmp_path):
    """Four free questions on two books: right, half right, unreadable in its task, failed."""
    asked = benchmark(
        [free("tide", "lantern"), free("tide", "ledger"), choice("lamp", "anchor"), choice("lamp", "kettle")]
    )

    def reply(body: dict[str, Any]) -> str | int:
        question = body["messages"][-1]["content"]
        if "Who carried the lantern" in question:
            return "Anna"
        if "Who carried the ledger" in question:
            return "Anna and Boris"
        return "no idea" if "Who carried the anchor" in question else 400

    with serving(reply) as stub:
        record = run(plan(tmp_path / "run", stub.url, asked, ["e1"]))
    (system,) = record["systems"]
    means = {name: value["mean"] for name, value in system["metrics"].items()}
    assert means["f1"] == pytest.approx((1 + 0.5) / 2)  # of "anna and boris" one of three words: F1 = 2 * 1 / (3 + 1)
    assert means["em"] == 0.5
    assert means["accuracy"] == 0 and system["metrics"]["accuracy"]["n"] == 2
    assert means["answer_words"] == pytest.approx((1 + 3) / 2)  # of the two that there are
    assert system["failures"] == {"http 400": 1, "unreadable": 1}
    assert "1 http 400, 1 unreadable" in " ".join(run_text(record).split())


def test_EVL_07_EVL_09_recall_is_null_with_its_reason(tmp_path):
    unknown = benchmark([claim("tide", "lantern", True, gold=False), claim("tide", "lantern", False, gold=False)])
    record = run(plan(tmp_path / "unknown", None, unknown, ["e1", "sig"]))
    recall = record["systems"][0]["metrics"]["recall@3"]
    assert recall["mean"] is None and recall["reason"] == "no gold is known" and recall["n"] == 0
    assert "R@3 has no value: no gold is known." in run_text(record)
    small = run(plan(tmp_path / "small", None, claims(), ["e1"], settings={"k": len(THINGS)}))
    recall = small["systems"][0]["metrics"][f"recall@{len(THINGS)}"]
    assert recall["mean"] is None and "no more passages" in recall["reason"]


def test_EVL_18_books_of_a_series_keep_their_chunks_apart(tmp_path):
    asked = claims()
    series = benchmark(asked.questions, series={"all": tuple(HEROES)})
    record = run(plan(tmp_path / "run", None, series, ["e1"], asked={"series": True}))
    assert record["benchmark"]["haystacks"] == 1 and record["benchmark"]["chunks"] == 33
    assert record["benchmark"]["series"] and record["benchmark"]["books"] == 3
    assert record["systems"][0]["metrics"]["recall@3"]["clusters"] == 3
    gold = {record["id"]: record["gold"] for record in answers(tmp_path / "run").values()}
    assert gold["lamp/lantern/True"] == ["lamp:0"] and gold["tide/lantern/True"] == ["tide:0"]


def test_without_a_model_only_passages_and_without_an_E2_sigma_is_a_prior(tmp_path):
    keys = available(tuple(LABELS), base=False, e1=True, e2=False, llm=False)
    assert keys == ("e1", "sig_first_k", "sig")
    record = run(plan(tmp_path / "run", None, claims(), keys, encoders=QaEncoders(None, E1)))  # type: ignore[arg-type]
    assert [set(system["metrics"]) for system in record["systems"]] == [{"recall@3"}] * 3
    assert record["systems"][2]["label"] == "E1 + σ as prior, chunks only" and record["llm"] is None
    assert record["settings"]["uses_prior"]


def test_a_run_goes_on_with_more_systems_and_refuses_other_settings(tmp_path):
    folder = tmp_path / "run"
    with serving(follow) as stub:
        run(plan(folder, stub.url, claims(1), ["e1"]))
        before = len(stub.requests)
        record = run(plan(folder, stub.url, claims(1), ["e1", "sig"]))
        asked_again = [r for r in stub.requests[before:] if r in stub.requests[:before]]
        assert not asked_again
        assert [system["key"] for system in record["systems"]] == ["e1", "sig"]
        with pytest.raises(
            MiaError, match=r"other settings: k_sum 2 \(now 1\); n_stop 2 \(now 3\); give another --out"
        ):
            run(plan(folder, stub.url, claims(1), ["e1"], settings={"k_sum": 1, "n_stop": 3}))
        with pytest.raises(MiaError, match=r"other settings: questions 6 \(now 12\); data"):
            run(plan(folder, stub.url, claims(2), ["e1"]))
        with pytest.raises(MiaError, match="other settings: best_mode"):
            run(plan(folder, stub.url, benchmark(claims(1).questions, mode="chunks"), ["e1"]))
        with pytest.raises(MiaError, match="other settings: data"):  # F1 counts characters of Chinese
            run(plan(folder, stub.url, benchmark(claims(1).questions, language="zh"), ["e1"]))
    with pytest.raises(MiaError, match=r"other settings: llm stub \(now none\)"):
        run(plan(folder, None, claims(1), ["e1"]))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/answers.jsonl").write_text("{}\n")
    with pytest.raises(MiaError, match="answers but no settings"):
        run(plan(tmp_path / "foreign", None, claims(1), ["e1"]))


def test_a_dead_endpoint_stops_the_run_which_then_goes_on(tmp_path):
    folder, calls = tmp_path / "run", 0

    def refuse(body: dict[str, Any]) -> str | int:
        nonlocal calls
        calls += 1
        return follow(body) if calls <= 5 else 401

    with serving(refuse) as stub, pytest.raises(RuntimeError, match="the same command goes on"):
        run(plan(folder, stub.url, claims(), ["e1", "agent"]))
    assert not (folder / "run.json").exists()
    with serving(follow) as stub:
        record = run(plan(folder, stub.url, claims(), ["e1", "agent"]))
        assert len(stub.requests) == 12 + 24 - 5
    with serving(follow) as stub:
        assert stable(run(plan(tmp_path / "whole", stub.url, claims(), ["e1", "agent"]))) == stable(record)


def test_passing_failures_are_asked_again_and_lasting_ones_stand(tmp_path):
    folder = tmp_path / "run"

    def busy(body: dict[str, Any]) -> str | int:
        prompt = body["messages"][-1]["content"]
        return (
            503
            if "Nobody carried the lantern" in prompt
            else 400
            if "Nobody carried the ledger" in prompt
            else follow(body)
        )

    with serving(busy) as stub:
        record = run(plan(folder, stub.url, claims(), ["e1"]))
    assert record["systems"][0]["failures"] == {"http 400": 3, "http 503": 3}
    assert record["systems"][0]["metrics"]["accuracy"]["mean"] == 0.5
    with serving(follow) as stub:
        record = run(plan(folder, stub.url, claims(), ["e1"]))
        assert len(stub.requests) == 3
    assert record["systems"][0]["failures"] == {"http 400": 3}
    assert record["systems"][0]["metrics"]["accuracy"]["mean"] == 0.75


def test_updates_and_pages_that_failed_for_a_passing_reason_are_asked_again(tmp_path):
    systems, folder = ["gist", "agent"], tmp_path / "run"
    with serving(lambda body: 503 if "response_format" in body else follow(body)) as stub:
        record = run(plan(folder, stub.url, claims(1), systems))
    assert [s["failures"] for s in record["systems"]] == [{"no pages chosen: http 503": 6}, {"update http 503": 12}]
    with serving(follow) as stub:
        again = run(plan(folder, stub.url, claims(1), systems))
        assert stable(again) == stable(run(plan(tmp_path / "whole", stub.url, claims(1), systems)))
    assert [s["failures"] for s in again["systems"]] == [{}, {}]


def test_an_endpoint_that_fails_every_time_is_taken_for_down(tmp_path):
    with serving(lambda body: 500) as stub, pytest.raises(RuntimeError, match="in a row"):
        run(plan(tmp_path / "run", stub.url, claims(len(THINGS)), ["e1", "base"]))
    assert not (tmp_path / "run/run.json").exists()


NASTY: tuple[str | bytes | tuple[str | None, str] | int, ...] = (
    "", "null", "[]", "{", '{"decision": 5}', '{"decision": "ANSWER"', "是的，答案是乙。", "x" * 100_000, "[" * 20_000,
    '{"decision": "REFINE", "next_query": "' + "word " * 5000 + '", "signature": [], "evidence": []}',
    '{"decision": "REFINE", "next_query": null, "signature": {"a": 1}, "evidence": "none"}',
    '<think>never ends', "<answer></answer>", '{"answer": ["A", "B"]}', "\x00\ud800".encode("utf-16", "surrogatepass"),
    b"\xff\xfe not utf-8", b'{"choices": 7}', b"{}", (None, "stop"), ("cut", "length"), ("hidden", "content_filter"),
    500, 418,
)  # fmt: skip


def test_no_reply_crashes_a_run_and_all_are_counted(tmp_path):
    draw = random.Random(0)
    asked = benchmark([*claims(2).questions, free("tide", "anchor"), choice("lamp", "kettle")])
    mixed = lambda body: draw.choice((*NASTY, follow(body)))  # noqa: E731
    with serving(mixed) as stub:
        record = run(plan(tmp_path / "run", stub.url, asked))
    for system in record["systems"]:
        wrong = [
            r for (key, _), r in answers(tmp_path / "run").items() if key == system["key"] and r["prediction"] is None
        ]
        counted = sum(n for label, n in system["failures"].items() if not label.startswith(("update", "no pages")))
        assert counted == len(wrong), system["key"]
        assert all(r["metrics"].get("accuracy", r["metrics"].get("f1")) == 0 for r in wrong)
    labels = {label for system in record["systems"] for label in system["failures"]}
    assert any(label.startswith("update") for label in labels) and "unreadable" in labels
    assert max(map(len, run_text(record).splitlines())) <= 100


def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    """SIGKILL at random moments: nothing that was answered is asked again, and the result is that of a whole run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.eval.qa_toy", "openai.resources.chat", "pyarrow.parquet", "pandas"])
    draw, folder = random.Random(os.urandom(4)), tmp_path / "killed"
    with serving(follow, delay=0.03) as stub:
        for _ in range(3):
            seen = len(stub.requests)
            child = context.Process(target=run_claims, args=(str(folder), stub.url))
            child.start()
            while child.is_alive() and len(stub.requests) <= seen:
                time.sleep(0.005)
            child.join(draw.uniform(0, 0.3))
            if child.is_alive():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
            child.join()
        record = run_claims_here(folder, stub.url)
        # A call under way when its process died was never answered to anybody: it may be asked again.
        bodies = [json.dumps(body, sort_keys=True) for body in stub.requests]
        assert len(bodies) - len(set(bodies)) <= 3 * 8
        recorded = [
            json.loads(line)["key"] for line in (folder / "replies.jsonl").read_text().splitlines() if line[-1] == "}"
        ]
        assert len(recorded) == len(set(recorded)), "a reply that was recorded was asked for again"
    with serving(follow) as stub:
        whole = run_claims_here(tmp_path / "whole", stub.url)
    assert stable(record) == stable(whole)
    ours, theirs = answers(folder), answers(tmp_path / "whole")
    assert ours == theirs


def run_claims_here(folder: Path, url: str) -> dict[str, Any]:
    run_claims(str(folder), url)
    return json.loads((folder / "run.json").read_text("utf-8"))


def test_a_choice_of_pages_that_failed_is_counted(tmp_path):
    """The answer is then from the gists alone, which is not what the row is named after."""
    with serving(lambda body: "I would read it all" if "response_format" in body else follow(body)) as stub:
        record = run(plan(tmp_path / "run", stub.url, claims(1), ["gist"]))
    (label,) = (label for label in record["systems"][0]["failures"] if label.startswith("no pages chosen"))
    assert record["systems"][0]["failures"][label] == 6 and label in " ".join(run_text(record).split())
    assert all(r["failed"] is None and r["problem"] == label for r in answers(tmp_path / "run").values())


def test_a_ranking_without_a_chunk_finds_no_gold(tmp_path, monkeypatch):
    """The tree may take summaries alone: the recall of such a question is 0, not unknown."""
    from mia_serve.eval import collapsed

    take = collapsed.CollapsedTree.take

    def summaries(tree, retriever, queries):
        return [
            collapsed.Taken(*zip(*((n, s) for n, s in zip(*found, strict=True) if not n.session_id), strict=True))
            if "Nobody" in query
            else found
            for query, found in zip(queries, take(tree, retriever, queries), strict=True)
        ]

    monkeypatch.setattr(collapsed.CollapsedTree, "take", summaries)
    monkeypatch.setattr(collapsed.CollapsedTree, "budget", 10**6)
    with serving(follow) as stub:
        record = run(plan(tmp_path / "run", stub.url, claims(1), ["raptor", "summary_only"]))
    tree, summary = record["systems"]
    assert tree["metrics"]["recall@3"]["n"] == 6 and tree["metrics"]["recall@3"]["mean"] <= 0.5
    assert "recall@3" not in summary["metrics"]


def test_answers_of_another_wording_are_refused(tmp_path, monkeypatch):
    from mia_serve.eval import qa_prompts
    from mia_serve.rag import prompts, update_prompt

    folder = tmp_path / "run"
    with serving(follow) as stub:
        run(plan(folder, stub.url, claims(1), ["e1"]))
        settings = json.loads((folder / "settings.json").read_text("utf-8"))
        assert settings["prompts"] == qa_prompts.prompts_hash(False) != qa_prompts.prompts_hash(True)
        for module, name in ((prompts, "EVIDENCE_HEADER"), (prompts, "SIGNATURE_HEADER"), (update_prompt, "_DECISION")):
            with monkeypatch.context() as changed:
                changed.setattr(module, name, "Other words:")
                qa_prompts.prompts_hash.cache_clear()
                with pytest.raises(MiaError, match="other settings: prompts"):
                    run(plan(folder, stub.url, claims(1), ["e1"]))
        qa_prompts.prompts_hash.cache_clear()
        calls = len(stub.requests)
        run(plan(folder, stub.url, claims(1), ["e1"]))
        assert len(stub.requests) == calls
    assert run(plan(tmp_path / "plain", None, claims(1), ["e1"]))["llm"] is None
    assert json.loads((tmp_path / "plain/settings.json").read_text("utf-8"))["prompts"] is None


def test_a_sweep_counts_answers_that_failed_for_a_passing_reason(tmp_path):
    import asyncio

    from mia_serve.eval.qa_sweep import sweep_qa
    from mia_serve.eval.sweep import parse_sweeps

    async def work(folder: Path, url: str, systems: list[str], *sweeps: str):
        made = plan(folder, url, claims(1), systems)
        assert made.client is not None
        async with made.client:
            return await sweep_qa(made, parse_sweeps(sweeps))

    def busy(body: dict[str, Any]) -> str | int:
        return 503 if "Nobody carried" in body["messages"][-1]["content"] else follow(body)

    with serving(busy) as stub:
        record, study = asyncio.run(work(tmp_path / "run", stub.url, ["sig"], "k_sum=1"))
    assert record["systems"][0]["failures"] == {"http 503": 3}
    assert study.rows[0].metrics["accuracy"].mean == 0.5
    assert [row.metrics["accuracy"].n for row in study.rows] == [6, 6]
    varied = answers(tmp_path / "run/sweep/k_sum=1").values()
    assert study.rows[1].metrics["accuracy"].mean == sum(r["metrics"]["accuracy"] for r in varied) / 6
    assert sorted(str(r["failed"]) for r in varied) == ["None"] * 3 + ["http 503"] * 3
    with serving(follow) as stub:
        with pytest.raises(MiaError, match="--sweep k_sum: no system of this run depends on it"):
            asyncio.run(work(tmp_path / "none", stub.url, ["summary_only"], "window=2", "k_sum=1"))
        assert not stub.requests  # told before any work


def test_two_runs_do_not_write_one_folder(tmp_path):
    from mia_serve.llm import Journal

    folder = tmp_path / "run"
    folder.mkdir()
    held = Journal(folder / "answers.jsonl", exclusive=True)
    try:
        (folder / "settings.json").write_text("{")
        with pytest.raises(MiaError, match="not of a run"):
            run(plan(folder, None, claims(1), ["e1"]))
        (folder / "settings.json").unlink()
        (folder / "answers.jsonl").unlink()
        held.close()
        held = Journal(folder / "answers.jsonl", exclusive=True)
        with pytest.raises(MiaError):
            run(plan(folder, None, claims(1), ["e1"]))
    finally:
        held.close()


def test_a_sweep_runs_each_setting_once_and_compares_it_to_the_default(tmp_path):
    import asyncio

    from mia_serve.eval.qa_sweep import sweep_qa
    from mia_serve.eval.sweep import parse_sweeps

    sweeps = parse_sweeps(["k_sum=1,2,auto", "n_stop=1", "window=2"])

    def stubborn(body: dict[str, Any]) -> str:
        """Never content: the agent takes all the steps that it may."""
        return follow(body).replace('"ANSWER"', '"REFINE"')

    async def work(folder: Path, url: str):
        made = plan(folder, url, claims(1), ("e1", "sig", "mia_rag", "agent"))
        assert made.client is not None
        async with made.client:
            return await sweep_qa(made, sweeps)

    with serving(stubborn) as stub:
        record, study = asyncio.run(work(tmp_path / "run", stub.url))
        calls = len(stub.requests)
        bodies = [json.dumps(body, sort_keys=True) for body in stub.requests]
        assert len(bodies) == len(set(bodies)), "an equal prompt was asked twice"
        again, _ = asyncio.run(work(tmp_path / "run", stub.url))
        assert len(stub.requests) == calls and stable(again) == stable(record)
    folders = sorted(folder.name for folder in (tmp_path / "run/sweep").iterdir())
    assert folders == ["k_sum=1", "k_sum=auto", "n_stop=1", "window=2"]
    assert study.systems == {"sig": "E2 + σ, chunks only", "mia_rag": "MiA-RAG: σ to both", "agent": "MiA-Agent"}
    changed = [(row.system, row.setting) for row in study.rows if row.setting.n_stop == 1]
    assert [system for system, _ in changed] == ["agent"]  # no other takes steps
    rows = {row.system: row for row in study.rows if row.setting.n_stop == 1}
    steps = {key: len(r["steps"]) for key, r in answers(tmp_path / "run/sweep/n_stop=1").items()}
    assert set(steps.values()) == {1} and rows["agent"].differences is not None
    assert rows["agent"].metrics["pair_accuracy"].n == 3  # pairs, not claims
    sessions = json.loads((tmp_path / "run/sweep/window=2/haystacks.jsonl").read_text("utf-8").splitlines()[0])[
        "sessions"
    ]
    assert len(sessions) == 6 and len(study.to_text()) > 100
    with pytest.raises(MiaError, match="no system of this run depends on it"):
        asyncio.run(sweep_qa(plan(tmp_path / "no", None, claims(1), ("e1",)), parse_sweeps(["k0=5"])))
