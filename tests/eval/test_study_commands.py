"""The commands of the chat-memory study, and its published figures on LoCoMo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mia_serve.eval.conversations import load_locomo
from mia_serve.eval.metrics import SESSION_METRICS
from mia_serve.eval.study import run_study

from ..conftest import MINILM
from .test_conversations import lme_row, locomo_sample, needs_data


@pytest.fixture
def locomo_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    samples = []
    for name in ("c1", "c2"):
        sample: dict[str, Any] = locomo_sample() | {"sample_id": name}
        sample["session_summary"] = {f"session_{i}_summary": f"about {i}" for i in (1, 2, 10)}
        samples.append(sample)
    (tmp_path / "data" / "locomo").mkdir(parents=True)
    (tmp_path / "data" / "locomo" / "locomo10.json").write_text(json.dumps(samples))
    monkeypatch.setenv("MIA_DATA", str(tmp_path / "data"))
    return tmp_path


def test_command_locomo_writes_everything(run, locomo_files: Path, tiny_bert: Path) -> None:
    out = {name: locomo_files / name for name in ("o.json", "q.jsonl", "trec", "plots", "cache")}
    command = ("locomo", "--encoder", tiny_bert, "--study", "--n-boot", 20, "--cache", out["cache"])
    files = ("--json", out["o.json"], "--per-query", out["q.jsonl"], "--trec", out["trec"], "--plots", out["plots"])
    code, table, err = run("eval", *command, *files, "--query-prefix", "query: ")
    assert code == 0, err
    assert "BM25 ⊕ late, max" in table and "query prefix 'query: '" in table
    record = json.loads(out["o.json"].read_text())
    assert record["models"]["encoder"]["query_prefix"] == "query: "
    assert record["models"]["encoder"]["document_prefix"] == ""
    assert len(record["models"]["encoder"]["weights_sha256"]["model.safetensors"]) == 64
    assert record["settings"]["reading"] == {
        "data": "locomo/locomo10.json", "evidence": "strict", "speaker": True, "captions": False,
    }  # fmt: skip
    assert record["texts"]["encoded"] > 0 and record["versions"]["numpy"]
    lines = [json.loads(line) for line in out["q.jsonl"].read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"{c}:q{i}" for c in ("c1", "c2") for i in (0, 2, 4)]
    assert set(lines[0]["scores"]["bm25"]) == set(SESSION_METRICS)
    assert (out["trec"] / "bm25+max.run").is_file() and (out["plots"] / "alpha.png").is_file()
    # The vectors are known now; those of an encoder with other prefixes are not.
    code, table, _ = run("eval", *command, "--query-prefix", "query: ", "--json", "-")
    assert code == 0 and json.loads(table)["texts"]["encoded"] == 0
    code, table, _ = run("eval", *command, "--json", "-")
    again = json.loads(table)
    assert again["texts"]["encoded"] == record["texts"]["encoded"]
    assert again["models"]["encoder"]["spec_hash"] != record["models"]["encoder"]["spec_hash"]


def test_command_locomo_re_ranks(run, locomo_files: Path, tiny_bert: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = locomo_files / "cross"
    config = BertConfig.from_pretrained(tiny_bert, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(folder)
    code, out, err = run("eval", "locomo", "--encoder", tiny_bert, "--reranker", folder, "--n-boot", 20, "--json", "-")
    assert code == 0, err
    record = json.loads(out)
    assert {"fixed", "reranked"} <= {row["key"] for row in record["rows"]}
    assert record["models"]["reranker"]["max_length"] == 128  # as far as the model's positions reach
    assert "Re-ranked by a cross-encoder" in err  # the table, with --json -


def test_command_longmemeval(run, tmp_path: Path, tiny_bert: Path) -> None:
    rows = [lme_row(i, ["x", "y", "z", f"answer_{i}"], [f"answer_{i}"]) for i in range(6)]
    data = tmp_path / "lme.json"
    data.write_text(json.dumps(rows))
    code, table, err = run(
        "eval",
        "longmemeval", "--data", data, "--encoder", tiny_bert, "--sample", 5, "--folds", 2, "--n-boot", 20,
        "--cache", "off", "--json", "-",
    )  # fmt: skip
    assert code == 0, err
    record = json.loads(table)
    assert record["benchmark"]["questions"] == 5 and record["benchmark"]["dropped"] == {"not in the sample": 1}
    assert set(next(r for r in record["rows"] if r["key"] == "bm25+max")["chosen"]) == {"fold 1", "fold 2"}
    assert record["texts"]["encoded"] < 5 * 8  # x, y and z are in every question's haystack
    assert run("eval", "longmemeval", "--data", data, "--json", data)[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("locomo", "--evidence", "loose"), "loose"),
        (("locomo", "--reranker", "x"), "--reranker without --encoder"),
        (("locomo", "--query-prefix", "q: "), "--query-prefix without --encoder"),
        (("locomo", "--per-query", "-"), "give a file"),
        (("locomo", "--json", "/nowhere/x.json"), "its folder does not exist"),
        (("locomo", "--trec", "/nowhere/x/y"), "its folder does not exist"),
        (("locomo", "--plots", __file__), "is a file; give a folder"),
        (("locomo", "--trec", "same", "--plots", "same"), "is the file of"),
        (("locomo", "--trec", "same", "--json", "same/bm25.run"), "its folder does not exist"),
        (("locomo", "--trec", ".", "--json", "bm25.run"), "is in --trec '.'"),
        (("locomo", "--plots", ".", "--per-query", "alpha.png"), "is in --plots '.'"),
        (("locomo", "--trec", "-"), "--trec '-' is no folder"),
        (("locomo", "--plots", ""), "--plots '' is no folder"),
        (("locomo", "--device", "cpu"), "--device without --encoder"),
        (("locomo", "--cache", "off"), "--cache without --encoder"),
        (("longmemeval", "--data", "nothing.json"), "no such file"),
        (("longmemeval", "--sample", "0"), "--sample"),
    ],
)
def test_command_wrong_use(run, options: tuple[str, ...], message: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("eval", *options)
    assert code == 2 and message in err and "Traceback" not in err


def test_commands_never_write_over_what_they_read(run, locomo_files: Path, tiny_bert: Path) -> None:
    data = locomo_files / "data" / "locomo"
    qrels = locomo_files / "qrels.txt"
    qrels.write_text(json.dumps([lme_row(i, ["x", f"answer_{i}"], [f"answer_{i}"]) for i in range(3)]))
    linked = locomo_files / "linked.json"
    linked.symlink_to(data / "locomo10.json")
    for options in (
        ("locomo", "--json", data / "locomo10.json"),
        ("locomo", "--json", linked),
        ("locomo", "--per-query", data / "audit_errors.json"),
        ("locomo", "--encoder", tiny_bert, "--json", tiny_bert / "config.json"),
        ("locomo", "--encoder", tiny_bert, "--plots", tiny_bert),
        ("locomo", "--encoder", locomo_files, "--reranker", tiny_bert, "--json", tiny_bert / "config.json"),
        ("longmemeval", "--data", qrels, "--trec", locomo_files),
    ):
        files = {file: file.read_bytes() for file in (*data.iterdir(), *tiny_bert.iterdir(), qrels)}
        code, _, err = run("eval", *options)
        assert code == 2 and "give " in err and "Traceback" not in err, options
        assert files == {file: file.read_bytes() for file in (*data.iterdir(), *tiny_bert.iterdir(), qrels)}


@needs_data
def test_locomo_bm25_to_four_digits() -> None:
    found = run_study(load_locomo("strict"), full=True, n_boot=20)
    means = {key: value.mean for key, value in found.row("bm25").metrics.items()}
    wanted = {"hit@1": 0.6395, "r@3": 0.7788, "r@5": 0.8325, "mrr": 0.7504, "ndcg@5": 0.7456}
    assert {metric: round(means[metric], 4) for metric in wanted} == wanted
    kinds = {kind: round(value.mean, 3) for kind, value in found.row("bm25").categories.items()}
    assert kinds == {
        "multi-hop": 0.434, "open-domain": 0.371, "single-hop": 0.712, "temporal": 0.583, "adversarial": 0.726,
        "all but adversarial": 0.614,
    }  # fmt: skip
    assert round(found.row("index:text+summary").metrics["hit@1"].mean, 4) == 0.7048
    assert round(found.row("index:text+summary+facts").metrics["hit@1"].mean, 4) == 0.7199
    assert round(found.row("turns").metrics["hit@1"].mean, 3) == 0.074 and round(found.chance["hit@1"], 3) == 0.048


@needs_data
@pytest.mark.parametrize(
    ("reading", "n", "hit"),
    [
        ({"evidence": "all"}, 1982, 0.6382),
        ({"speaker": False}, 1978, 0.6400),
        ({"captions": True}, 1978, 0.6461),
    ],
)
def test_locomo_bm25_by_the_reading_of_the_data(reading: dict[str, Any], n: int, hit: float) -> None:
    value = run_study(load_locomo(**reading), n_boot=10).row("bm25").metrics["hit@1"]
    assert value.n == n and round(value.mean, 4) == hit


#: Hit@1, R@3, R@5, MRR, nDCG@5 of all-MiniLM-L6-v2, n = 1,978.
MINILM_ROWS = {
    "early": (0.3276, 0.5035, 0.6269, 0.4866, 0.4827),
    "max": (0.4115, 0.5765, 0.6759, 0.5549, 0.5503),
    "top3": (0.4226, 0.6005, 0.6879, 0.5682, 0.5636),
    "lse10": (0.3893, 0.5458, 0.6668, 0.5340, 0.5314),
    "lme10": (0.4297, 0.6079, 0.7027, 0.5735, 0.5727),
    "bm25+early": (0.6456, 0.7863, 0.8489, 0.7579, 0.7566),
    "bm25+max": (0.6613, 0.7909, 0.8498, 0.7661, 0.7621),
    "bm25+top3": (0.6618, 0.7963, 0.8564, 0.7697, 0.7675),
    "bm25+lse10": (0.6577, 0.7916, 0.8521, 0.7666, 0.7629),
    "rrf": (0.5748, 0.7295, 0.8091, 0.6993, 0.6991),
}
MINILM_SUMMARY_ROWS = {
    "index:text|turns+facts": (0.7053, 0.7957),
    "index:text+summary|turns": (0.7174, 0.8048),
    "index:text+summary|turns+facts": (0.7462, 0.8265),
    "index:text+summary+facts|turns+facts+summary": (0.7619, 0.8331),
}


@needs_data
@pytest.mark.timeout(900)  # encodes 8,693 texts
def test_locomo_minilm_rows_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run) -> None:
    code, out, err = run("eval", "locomo", "--encoder", MINILM, "--study", "--json", "-")
    assert code == 0, err
    rows = {row["key"]: row for row in json.loads(out)["rows"]}
    for key, wanted in MINILM_ROWS.items():
        found = [rows[key]["metrics"][metric]["mean"] for metric in ("hit@1", "r@3", "r@5", "mrr", "ndcg@5")]
        assert found == pytest.approx(wanted, abs=0.002), key
    for key, wanted in MINILM_SUMMARY_ROWS.items():
        found = [rows[key]["metrics"][metric]["mean"] for metric in ("hit@1", "ndcg@5")]
        assert found == pytest.approx(wanted, abs=0.003), key
    chosen = rows["bm25+max"]["chosen"].values()
    assert (min(chosen), max(chosen)) == (0.5, 0.65)
    record = json.loads(out)
    assert record["alpha_curve"]["best_in_sight_of_the_answers"]["alpha"] == 0.6
    gaps = {one["label"]: one["hit"]["mean"] for one in record["differences"]}
    assert gaps["late - early"] == pytest.approx(0.0839, abs=0.002)
    assert gaps["fusion - late"] == pytest.approx(0.2497, abs=0.002)
    assert gaps["fusion - BM25"] == pytest.approx(0.0217, abs=0.002)
