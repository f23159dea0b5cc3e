"""``mia-serve mindscape``: sources, series, language models, growth, and runs that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_serve.mindscape import Mindscape, store
from tests.conftest import Ran, Run
from tests.llm.server import serving

ROOT = Path(__file__).parents[1]


def book(name: str, quays: int = 24) -> str:
    return "\n\n".join(
        f"The {name} ferry left quay {i} with the lamp unlit. Nobody asked why the boat had gone." for i in range(quays)
    )


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for name, author in (("north", "Reave, Ada"), ("south", "Ada Reave"), ("east", "Tom Pell")):
        row = {"id": name, "title": f"The {name}", "author": author, "text": book(name)}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def chat_rows(*turns: tuple[str, str]) -> str:
    return "".join(
        json.dumps({"session": s, "role": "user", "content": text, "date": f"{s} May"}) + "\n" for s, text in turns
    )


def one_line(ran: Ran) -> str:
    assert ran.code == 2 and "Traceback" not in ran.err, ran
    return ran.err.splitlines()[-1]


def write(body: dict[str, Any]) -> str:
    """A deterministic model: a summary out of the prompt's own words."""
    prompt = body["messages"][-1]["content"]
    return f"Written of {len(prompt)} characters, {sum(map(ord, prompt))} in all."


def content(folder: Path) -> tuple[object, ...]:
    m = Mindscape.load(folder)
    files = {name: entry["sha256"] for name, entry in store.read_manifest(folder)["files"].items()}
    return m.chunks, m.sessions, m.books, m.nodes, m.tails, m.notes, files


def test_build_says_what_it_skips_and_how_it_cuts(run: Run, books: Path, tiny_bert: Path, tmp_path: Path) -> None:
    (books / "LICENSE.md").write_text("free")
    ran = run("mindscape", "build", books, "--out", tmp_path / "m", "--encoder", tiny_bert, "--json", "-")
    assert ran.code == 0, ran.err
    assert "skipped LICENSE.md: neither .txt, .epub nor .jsonl" in ran.err
    assert f"chunks of 126 tokens, 10 of them shared: {tiny_bert} reads no more (the papers' are 1200/100)" in ran.err
    record = json.loads(ran.out)
    assert (record["books"], record["window"], record["built"]["chunk_tokens"]) == (3, 20, 126)
    m = Mindscape.load(tmp_path / "m")
    assert (m.books[0].id, m.books[0].title, m.books[0].author) == ("east", "The east", "Tom Pell")
    assert all(b.summary for b in m.books)
    shown = run("mindscape", "show", tmp_path / "m").out
    assert "book        north: The north, Reave, Ada, " in shown and "summed up" in shown


def test_series_by_author_and_by_map(run: Run, books: Path, tiny_bert: Path, tmp_path: Path) -> None:
    build = ("mindscape", "build", books, "--encoder", tiny_bert, "--chunk-tokens", 40, "--window", 2)
    ran = run(*build, "-o", tmp_path / "by", "--series", "author")
    assert ran.code == 0 and "left out, in no series of two or more books: east" in ran.err, ran.err
    assert [p.name for p in (tmp_path / "by").iterdir()] == ["ada-reave"]
    m = Mindscape.load(tmp_path / "by" / "ada-reave")
    assert [b.id for b in m.books] == ["north", "south"]
    assert {c.id.split(":")[0] for c in m.chunks} == {"north", "south"}  # EVL-18: ids namespaced by book
    assert run("search", "--mindscape", tmp_path / "by" / "ada-reave", "--query", "Which quay?").code == 0
    (tmp_path / "map.json").write_text(json.dumps({"The coasts": ["south", "east"], "alone": ["north"]}))
    assert run(*build, "-o", tmp_path / "map", "--series", tmp_path / "map.json").code == 0
    assert [b.id for b in Mindscape.load(tmp_path / "map" / "The-coasts").books] == ["south", "east"]
    (tmp_path / "map.json").write_text(json.dumps({"x": ["south", "west"]}))
    assert "names book 'west'" in one_line(run(*build, "-o", tmp_path / "m", "--series", tmp_path / "map.json"))
    assert "is a mindscape; --series" in one_line(
        run(*build, "-o", tmp_path / "by" / "ada-reave", "--series", "author")
    )


def test_wrong_use_is_one_line(run: Run, books: Path, tiny_bert: Path, tmp_path: Path) -> None:
    build = ("mindscape", "build", "-o", tmp_path / "m", "--encoder", tiny_bert)
    (tmp_path / "old").mkdir()
    cases = {
        build: "either SOURCE, a folder or file, or --data NAME",
        (*build, books, "--data", "saltmarsh"): "give the texts once",
        (*build, tmp_path / "none"): "no such file or folder",
        (*build, tmp_path / "old"): "holds no book and no chat",
        (*build, books, "--summarizer", "llm"): "give --llm URL",
        (*build, books, "--llm", "http://localhost:1/v1"): "are for --summarizer llm",
        (*build, books, "--entities"): "are for --summarizer llm",
        (*build, "--data", "saltmarsh", "--summarizer", "keywords"): "saltmarsh brings its own",
        (*build, books, "--chunk-tokens", 40, "--overlap", 40): "--overlap 40 is not below the chunk size 40",
        (*build, books, "--json", tmp_path / "m" / "x.json"): "its folder does not exist",
        (*build, books, "--replay", "--llm-cache", tmp_path / "x"): "--llm-cache, --replay and the like are for",
        (*build, "--data", "saltmarsh", "--chunk-tokens", 40): "saltmarsh is cut already",
        ("mindscape", "build", books, "-o", "/"): "'/' is no place for a mindscape",
        (*build, books, "--series", tmp_path / "none.json"): "none.json",
        ("mindscape", "append", tmp_path / "none", books): "no such folder",
        ("mindscape", "append", tmp_path / "old", books): "is not a mindscape",
    }
    for arguments, message in cases.items():
        assert message in one_line(run(*arguments)), arguments
    assert not (tmp_path / "m").exists()


def test_json_never_replaces_what_is_read(run: Run, books: Path, tiny_bert: Path, tmp_path: Path) -> None:
    out, one, series = tmp_path / "m", books / "north.jsonl", tmp_path / "series.json"
    series.write_text(json.dumps({"coasts": ["north", "south"]}))
    kept = {path: path.read_text() for path in (one, series)}
    build = ("mindscape", "build", "-o", out, "--encoder", tiny_bert)
    for arguments in ((one, "--json", one), (books, "--json", one), (books, "--series", series, "--json", series)):
        assert "so that neither is lost" in one_line(run(*build, *arguments)), arguments
    assert not out.exists() and run(*build, one).code == 0
    for source in (one, books):
        assert "so that neither is lost" in one_line(run("mindscape", "append", out, source, "--json", one))
    assert {path: path.read_text() for path in kept} == kept


def test_sessions_without_an_id_are_new_ones(run: Run, tiny_bert: Path, tmp_path: Path) -> None:
    whole, part, out = tmp_path / "whole", tmp_path / "us.jsonl", tmp_path / "m"
    whole.mkdir()
    rows = [json.dumps({"messages": [{"role": "user", "content": f"I ask {i} of lamp {i}"}]}) + "\n" for i in range(4)]
    (whole / "us.jsonl").write_text("".join(rows))
    options = ("--encoder", tiny_bert, "--summarizer", "keywords")
    assert run("mindscape", "build", whole, "-o", tmp_path / "one", *options).code == 0
    for a, b in ((0, 1), (1, 3), (3, 4)):
        part.write_text("".join(rows[a:b]))
        command = ("append", out, part) if a else ("build", part, "-o", out, *options)
        assert run("mindscape", *command).code == 0
    one, grown = Mindscape.load(tmp_path / "one"), Mindscape.load(out)
    assert one.chunks == grown.chunks and [s.id for s in grown.sessions] == ["us:s1", "us:s2", "us:s3", "us:s4"]
    assert "--llm-model: the summaries of" in one_line(run("mindscape", "append", out, part, "--llm-model", "m"))


@pytest.mark.parametrize("summarizer", ["extractive", "keywords"])
def test_append_is_build_at_once(run: Run, tiny_bert: Path, tmp_path: Path, summarizer: str) -> None:
    whole, source, out = tmp_path / "whole", tmp_path / "in", tmp_path / "out"
    whole.mkdir(), source.mkdir()
    text, turns = book("north", 40), [(f"s{i // 4}", f"I say {i} about lamp {i}") for i in range(14)]
    options = ("--encoder", tiny_bert, "--chunk-tokens", 40, "--window", 4, "--summarizer", summarizer)
    (whole / "north.txt").write_text(text)
    (whole / "us.jsonl").write_text(chat_rows(*turns))
    assert run("mindscape", "build", whole, "-o", tmp_path / "m", *options).code == 0
    middle, later = text.index("asked why the boat", 900), text.index("The north", 1500)
    for step, (a, b, x, y) in enumerate([(0, middle, 0, 3), (middle, later, 3, 9), (later, None, 9, 14)]):
        (source / "north.txt").write_text(text[a:b])
        (source / "us.jsonl").write_text(chat_rows(*turns[x:y]))
        command = ("build", source, "-o", out, *options) if step == 0 else ("append", out, source)
        ran = run("mindscape", *command)
        assert ran.code == 0 and (not step or ran.out.startswith("added ")), ran.err
    one, grown = Mindscape.load(tmp_path / "m"), Mindscape.load(out)
    assert (grown.chunks, grown.tails, grown.window) == (one.chunks, one.tails, one.window)
    assert [(s.id, s.chunk_ids, s.title, s.date) for s in grown.sessions] == [
        (s.id, s.chunk_ids, s.title, s.date) for s in one.sessions
    ]
    assert [bool(b.summary) for b in grown.books] == [summarizer == "extractive"] * 2
    from mia_serve.core import Encoder
    from mia_serve.mindscape.vectors import kept_vectors

    encoder = Encoder.load(tiny_bert)
    kept = kept_vectors(out, encoder)

    np.testing.assert_allclose(
        kept[encoder.spec_hash], encoder.encode_documents([c.text for c in grown.chunks]), atol=1e-5
    )
    summaries = encoder.encode_documents([s.summary for s in grown.sessions])
    np.testing.assert_allclose(kept[f"{encoder.spec_hash}/sessions"], summaries, atol=1e-5)
    assert run("search", "--mindscape", out, "--query", "Which quay?").code == 0


def test_append_encodes_only_what_is_new(
    run: Run, books: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, more = tmp_path / "m", tmp_path / "us.jsonl"
    more.write_text(chat_rows(("s1", "The lamp is lit."), ("s1", "Who lit it?")))
    options = ("--encoder", tiny_bert, "--summarizer", "keywords", "--cache", "off")
    assert run("mindscape", "build", books, "-o", out, *options).code == 0
    from mia_serve.core import Encoder

    encoded: list[str] = []
    encode = Encoder.encode_documents
    monkeypatch.setattr(Encoder, "encode_documents", lambda self, t, *a: (encoded.extend(t), encode(self, t, *a))[1])
    assert run("mindscape", "append", out, more, "--cache", "off").code == 0
    assert encoded == ["user: The lamp is lit.", "user: Who lit it?", Mindscape.load(out).sessions[-1].summary]
    more.write_text(chat_rows(("s1", "again"), ("s0", "x"), ("s1", "y")))
    assert "session 's1' had ended" in one_line(run("mindscape", "append", out, more))


def test_two_writers_of_one_mindscape(run: Run, books: Path, tiny_bert: Path, tmp_path: Path) -> None:
    from mia_serve.core.storage import lock_file, unlock_file

    out = tmp_path / "m"
    assert run("mindscape", "build", books, "-o", out, "--encoder", tiny_bert).code == 0
    held = lock_file(tmp_path / ".m.lock", 0)
    try:
        for command in (("append", out, books), ("build", books, "-o", out, "--encoder", tiny_bert)):
            assert "is being written by another command" in one_line(run("mindscape", *command))
    finally:
        unlock_file(held)


def llm_options(url: str, tiny_bert: Path) -> tuple[Any, ...]:
    return ("--summarizer", "llm", "--llm", url, "--llm-model", "m", "--encoder", tiny_bert, "--chunk-tokens", 40,
            "--window", 2, "--concurrency", 3)  # fmt: skip


def test_a_model_writes_and_its_failures_are_asked_again(
    run: Run, books: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    out, broken = tmp_path / "m", [True]

    def answer(body: dict[str, Any]) -> str | int:
        return 400 if broken[0] and "quay 3 " in json.dumps(body) else write(body)

    with serving(answer) as stub:
        build = ("mindscape", "build", books, "-o", out, *llm_options(stub.url, tiny_bert), "--llm-price", "1,2")
        ran = run(*build, "--json", "-")
        assert ran.code == 0, ran.err
        record = json.loads(ran.out)
        assert {s.split(":")[0] for s in record["failed"]} == {"north", "south", "east"}
        assert f"{len(record['failed'])} of {record['sessions']} summaries are not the model's" in ran.err
        assert "http 400" in run("mindscape", "show", out).out
        m = Mindscape.load(out)
        for session in m.sessions:
            assert session.summary.startswith("Written of") == (session.id not in record["failed"])
        assert m.summarizer == "llm(m)"
        asked, broken[0] = len(stub.requests), False
        again = run(*build, "--json", "-")
        mended = json.loads(again.out)
        # The stand-ins, and the books that are summed up out of them.
        assert mended["failed"] == {} and len(stub.requests) - asked == len(record["failed"]) + 3
        m = Mindscape.load(out)
        assert all(record.summary.startswith("Written of") for record in (*m.sessions, *m.books))
        asked = len(stub.requests)
        assert json.loads(run(*build, "--json", "-").out)["llm"]["stats"]["calls"] == 0 and len(stub.requests) == asked


def test_what_is_still_open_gets_extracts_until_it_ends(run: Run, tiny_bert: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "m", tmp_path / "us.jsonl"
    more.write_text(chat_rows(("s1", "The lamp is lit tonight.")))
    with serving(write) as stub:
        assert run("mindscape", "build", more, "-o", out, *llm_options(stub.url, tiny_bert)).code == 0
        asked = len(stub.requests)
        more.write_text(chat_rows(("s1", "Who lit the lamp of the quay?")))
        ran = run("mindscape", "append", out, more, "--llm", stub.url)
        assert ran.code == 0 and len(stub.requests) == asked, ran.err
        assert "open        us:s1 (summed up for now)" in ran.out
        more.write_text(chat_rows(("s2", "Nobody did, said the miller.")))
        assert run("mindscape", "append", out, more, "--llm", stub.url).code == 0
        assert len(stub.requests) == asked + 1  # s1, now that it has ended
        assert [s.summary.startswith("Written") for s in Mindscape.load(out).sessions] == [True, False]
        more.write_text(chat_rows(("s2", "Good night.")))
        assert run("mindscape", "append", out, more, "--llm", stub.url, "--open", "llm").code == 0
        assert [s.summary.startswith("Written") for s in Mindscape.load(out).sessions] == [True, True]
        assert "open" not in Mindscape.load(out).notes


def test_an_endpoint_that_is_down_is_exit_1(run: Run, books: Path, tiny_bert: Path, tmp_path: Path) -> None:
    ran = run("mindscape", "build", books, "-o", tmp_path / "m", *llm_options("http://127.0.0.1:9/v1", tiny_bert))
    assert ran.code == 1 and "cannot be reached" in ran.err and "Traceback" not in ran.err
    assert not (tmp_path / "m").exists() and not (tmp_path / ".m.lock").exists()


def test_killed_at_any_moment_a_build_goes_on_where_it_was(
    run: Run, books: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    out, replies = tmp_path / "m", tmp_path / "m.replies.jsonl"
    with serving(write, delay=0.03) as stub:
        reference = ("mindscape", "build", books, "-o", tmp_path / "whole", *llm_options(stub.url, tiny_bert))
        assert run(*reference).code == 0
        total = len(stub.requests)
        command = ["mindscape", "build", books, "-o", out, *llm_options(stub.url, tiny_bert)]
        stub.requests.clear()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            [sys.executable, "-m", "mia_serve", *map(str, command)], env=environment, stdout=subprocess.DEVNULL
        )
        at = random.randrange(1, total - 3)
        while child.poll() is None and not (replies.exists() and replies.read_bytes().count(b"\n") >= at):
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL and not out.exists()
        recorded = replies.read_bytes().count(b"\n")
        assert at <= recorded <= len(stub.requests)
        stub.requests.clear()
        assert run(*command).code == 0
        assert len(stub.requests) == total - recorded
        prompts = [json.dumps(body) for body in stub.requests]
        assert len(set(prompts)) == len(prompts)
    assert content(out) == content(tmp_path / "whole")


def test_entities_are_nodes_and_a_recording_is_enough(run: Run, books: Path, tiny_bert: Path, tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> str | int:
        if "response_format" not in body:
            return write(body)
        if "quay 5 " in json.dumps(body["messages"]):
            return 400
        return json.dumps({"entities": [{"name": "Ferry", "kind": "thing", "description": "A boat of the coast."}]})

    with serving(answer) as stub:
        options = llm_options(stub.url, tiny_bert)
        ran = run("mindscape", "build", books, "-o", tmp_path / "m", *options, "--entities")
    assert ran.code == 0 and "no entities of " in ran.err, ran.err
    shown = run("mindscape", "show", tmp_path / "m")
    assert "node        Ferry (north): A boat of the coast." in shown.out and "no entities east:" in shown.out
    m = Mindscape.load(tmp_path / "m")
    assert {n.book_id for n in m.nodes} == {"north", "south", "east"} and m.notes["failed_entities"]
    replies = ("--llm-cache", tmp_path / "m.replies.jsonl", "--replay")
    (tmp_path / "map.json").write_text(json.dumps({"coasts": ["north", "south"]}))
    both = ("--entities", "--series", tmp_path / "map.json", *replies)
    assert run("mindscape", "build", books, "-o", tmp_path / "by", *options, *both).code == 0
    missing = Mindscape.load(tmp_path / "by" / "coasts").notes["failed_entities"]
    assert missing and {chunk.split(":")[0] for chunk in missing} == {"north", "south"}
    ran = run("mindscape", "build", books, "-o", tmp_path / "again", *options, "--entities", *replies)
    assert ran.code == 0, ran.err  # the endpoint is gone; what failed then fails again
    assert content(tmp_path / "again") == content(tmp_path / "m")
