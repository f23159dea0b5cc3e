"""One and two processes over gloo must train alike. Two launches, whose findings all tests here share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_train.rows import write_rows
from tests.train.conftest import make_rows

TIMEOUT = 240


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path, tiny_qwen3: Path) -> dict[int, dict[str, Any]]:
    """Facts by number of processes; see ``worker.py``."""
    out = tmp_path_factory.mktemp("distributed")
    still = out / "still-bert"
    shutil.copytree(tiny_bert, still)
    config = json.loads((still / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "config.json").write_text(json.dumps(config))
    write_rows(out / "rows.jsonl", make_rows(24))
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    found = {}
    for world in (1, 2):
        (out / f"wandb-{world}").mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        command += ["-m", "tests.distributed.worker", str(out), str(still), str(tiny_qwen3)]
        finished = subprocess.run(
            command,
            env=environment | {"WANDB_DIR": str(out / f"wandb-{world}")},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert finished.returncode == 0, finished.stderr[-6000:]
        found[world] = json.loads((out / f"facts-{world}.json").read_text())
        found[world]["wandb"] = [str(p) for p in (out / f"wandb-{world}").glob("wandb/offline-run-*/*.wandb")]
    return found


@pytest.mark.timeout(2 * TIMEOUT)
def test_two_processes_really_ran(facts: dict[int, dict[str, Any]]) -> None:
    assert {n: f["world"] for n, f in facts.items()} == {1: 1, 2: 2}
    assert facts[2]["objects"] == ["rank 0", "rank 1"]


@pytest.mark.parametrize("negatives", ["own", "in_batch"])
def test_TRN_08_gradient_does_not_depend_on_the_number_of_processes(
    negatives: str, facts: dict[int, dict[str, Any]]
) -> None:
    one, two = facts[1][negatives], facts[2][negatives]
    np.testing.assert_allclose(two["gradient"], one["gradient"], atol=1e-6)
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)


def test_TRN_11_duplicates_across_ranks_are_masked_and_positives_never(facts: dict[int, dict[str, Any]]) -> None:
    one, two = facts[1]["in_batch"], facts[2]["in_batch"]
    assert two["masked"] == one["masked"] > 0
    assert two["positive"] == pytest.approx(one["positive"], abs=1e-6)


def test_a_whole_run_does_not_depend_on_the_number_of_processes(facts: dict[int, dict[str, Any]]) -> None:
    logs = {n: [json.loads(line) for line in Path(f["log"]).read_text().splitlines()] for n, f in facts.items()}
    for key, tolerance in (("grad_norm", 1e-4), ("positive_similarity", 1e-4), ("masked_negatives", 0)):
        values = {n: [line[key] for line in lines if "loss" in line] for n, lines in logs.items()}
        assert len(values[1]) == 4
        np.testing.assert_allclose(values[2], values[1], rtol=tolerance, atol=1e-5)


def test_TRN_32_lora_with_checkpointing_under_ddp(facts: dict[int, dict[str, Any]]) -> None:
    for found in facts.values():
        assert (Path(found["lora"]) / "adapter_model.safetensors").is_file()


def test_TRN_35_evaluation_runs_on_rank_0_only(facts: dict[int, dict[str, Any]]) -> None:
    assert facts[1]["evaluations"] == [[0, 0]]
    assert facts[2]["evaluations"] == [[0, 0], []]
    state = json.loads((Path(facts[2]["lora"]) / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_metric"] == pytest.approx(0.2)


def test_TRN_37_one_wandb_run_and_steps_that_never_fall(facts: dict[int, dict[str, Any]]) -> None:
    for found in facts.values():
        assert len(found["wandb"]) == 1
        lines = [json.loads(line) for line in (Path(found["lora"]) / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines]
        assert steps == sorted(steps)
        assert [line["step"] for line in lines if "eval_mrr" in line] == [2, 4]


def test_a_failure_of_rank_0_reaches_every_rank(facts: dict[int, dict[str, Any]]) -> None:
    first, second = facts[2]["failures"]
    assert first.startswith("ZeroDivisionError")
    assert "rank 0: ZeroDivisionError" in second
