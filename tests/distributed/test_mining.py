"""``mia-train mine`` on two gloo processes writes what it writes on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from mia_train.embedding import BLOCK
from mia_train.rows import Passage, Row, write_rows

TIMEOUT = 240
TALE = "the ferryman counted lamps along quay and found one missing she kept ledger under floor key clock"
WORDS = TALE.split()


def rows(n: int) -> list[Row]:
    """Return rows whose passages are more than one block."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, random.integers(4, 20))) for _ in range(4 * n)]
    return [
        Row(
            f"q{i}",
            texts[4 * i],
            (Passage(f"p{i}", texts[4 * i + 1]),),
            (Passage(f"n{i}", texts[4 * i + 2]), Passage(f"m{i}", texts[4 * i + 3])),
            group=f"g{i % 7}",
        )
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def cross_encoder(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.6, num_labels=1,
    )  # fmt: skip
    BertForSequenceClassification(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def launch(processes: int, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    drop = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in drop}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable]
    if processes > 1:
        environment["ACCELERATE_USE_CPU"] = "true"
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["-m", "mia_train", "mine", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)


@pytest.mark.timeout(3 * TIMEOUT)
def test_two_processes_write_the_same_bytes_as_one(tiny_bert: Path, cross_encoder: Path, tmp_path: Path) -> None:
    given = rows(220)
    assert 3 * len(given) > 2 * BLOCK, "both processes must have a block to encode"
    write_rows(tmp_path / "rows.jsonl", given)
    common = ["rows.jsonl", "--encoder", tiny_bert, "--cross-encoder", cross_encoder, "--absolute-margin", 0.01]
    common += ["--negatives", 2, "--simple", 1, "--range-max", 8, "--device", "cpu"]
    facts = {}
    for processes in (1, 2):
        own = ["-o", f"{processes}.jsonl", "--json", f"{processes}.json", "--cache", f"cache{processes}"]
        done = launch(processes, tmp_path, *common, *own)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("mined with") == 1  # rank 0 alone speaks
        facts[processes] = json.loads((tmp_path / f"{processes}.json").read_text())
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()
    assert [facts[n].pop("processes") for n in (1, 2)] == [1, 2]
    facts[1].pop("rows_file"), facts[2].pop("rows_file")
    assert facts[1] == facts[2] and facts[1]["encoded"] == 880 and facts[1]["hard"]["found"] > 100
    shards = {n: {p.relative_to(tmp_path / f"cache{n}"): p.read_bytes() for p in _files(tmp_path, n)} for n in (1, 2)}
    assert shards[1] == shards[2]


@pytest.mark.timeout(TIMEOUT)
def test_a_failure_on_one_process_ends_both(tiny_bert: Path, tmp_path: Path) -> None:
    # Blocks go by length in characters: the last one, rank 1's, holds a short query of far too many tokens.
    given = [Row(f"q{i}", f"{'x' * 300} {i}", (Passage(f"p{i}", f"lamp {i}"),)) for i in range(BLOCK + 4)]
    given[-1] = Row("bad", "a " * 140, given[-1].positives)
    write_rows(tmp_path / "rows.jsonl", given)
    done = launch(2, tmp_path, "rows.jsonl", "--encoder", tiny_bert, "-o", "out.jsonl", "--device", "cpu")
    assert done.returncode != 0 and not (tmp_path / "out.jsonl").exists()
    assert "[process 0] error: process 1: query 'a a " in done.stderr
    assert "[process 1] error: query 'a a " in done.stderr and "Traceback" not in done.stderr.split("[process")[0]


def _files(folder: Path, n: int) -> list[Path]:
    return sorted((folder / f"cache{n}").rglob("*.*"))
