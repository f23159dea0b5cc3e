"""One rule for scaling: the same gradient on 1, 2 and 4 processes and for any mini-batch, to 1e-6 in fp32."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.gradients import BUDGETS, CONFIGS, all_gradients

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> dict[int, Facts]:
    """What every world found; the one of a single process is this one."""
    out = tmp_path_factory.mktemp("gradients")
    still = out / "still-bert"
    shutil.copytree(tiny_bert, still)
    config = json.loads((still / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "config.json").write_text(json.dumps(config))
    found = {1: all_gradients(str(still))}
    for world in (2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        finished = subprocess.run(
            [*command, "-m", "tests.distributed.gradients", str(still), str(out)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert finished.returncode == 0, finished.stderr[-6000:]
        found[world] = torch.load(out / f"gradients-{world}.pt")
    return found


def assert_same(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    assert float(ours["loss"]) == pytest.approx(float(reference["loss"]), abs=1e-5)
    assert ours["gradient"].keys() == reference["gradient"].keys() != set()
    # To 1e-6 of the whole gradient's length, which is what the optimiser and the clipping see.
    flat = [torch.cat([g.flatten() for _, g in sorted(x["gradient"].items())]).double() for x in (ours, reference)]
    assert float(flat[1].norm()) > 0.1
    assert float((flat[0] - flat[1]).norm() / flat[1].norm()) < 1e-6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("world", [2, 4])
def test_TRN_08_gradient_does_not_depend_on_the_number_of_processes(
    world: int, name: str, facts: dict[int, Facts]
) -> None:
    for budget in BUDGETS:
        assert_same(facts[world][f"{name}, {budget}"], facts[1][f"{name}, plain"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CONFIGS)
def test_TRN_07_gradient_does_not_depend_on_the_mini_batch(name: str, facts: dict[int, Facts]) -> None:
    groups = {budget: facts[1][f"{name}, {budget}"]["groups"] for budget in BUDGETS}
    assert groups["all"] == 1 < groups["some"] < groups["alone"]
    for budget in BUDGETS:
        assert_same(facts[1][f"{name}, {budget}"], facts[1][f"{name}, plain"])


@pytest.mark.timeout(600)
def test_the_objectives_really_differ(facts: dict[int, Facts]) -> None:
    losses = [float(facts[1][f"{name}, plain"]["loss"]) for name in CONFIGS]
    assert len({round(loss, 3) for loss in losses}) == len(CONFIGS)
