"""A launch is what was asked for, or it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mia_serve.core.errors import MiaError
from mia_train.launch import check_world, prepare_launch, process_count, process_rank

CPU2 = Path(__file__).parents[2] / "recipes" / "accelerate" / "cpu2.yaml"
WORKER = """\
from mia_train.launch import check_world, prepare_launch
asked = prepare_launch()
import torch
from transformers import TrainingArguments
arguments = TrainingArguments("out", report_to=[])
check_world(arguments.world_size)
total = torch.tensor([arguments.process_index + 1.0])
torch.distributed.all_reduce(total)
with open(f"rank{arguments.process_index}", "w") as file:
    backend, device = torch.distributed.get_backend(), arguments.device.type
    file.write(f"{asked} {arguments.world_size} {total.item():.0f} {backend} {device}")
"""
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def _launch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "worker.py").write_text(WORKER)
    drop = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU")
    environment = {name: value for name, value in os.environ.items() if name not in drop}
    environment |= {"PYTHONPATH": str(CPU2.parents[2]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*ACCELERATE, *arguments, "worker.py"]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)


def test_cpu2_config_starts_two_processes_that_talk(tmp_path: Path) -> None:
    done = _launch(tmp_path, "--config_file", str(CPU2))
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text() == "2 2 3 gloo cpu"


def test_launch_that_silently_starts_one_process_is_refused(tmp_path: Path) -> None:
    done = _launch(tmp_path, "--cpu", "--num_processes", "2")
    assert done.returncode != 0 and "started only this one" in done.stderr
    assert not list(tmp_path.glob("rank*"))


def test_no_launcher_is_one_process_on_one_device() -> None:
    environment: dict[str, str] = {}
    assert prepare_launch(environment) == 1
    assert environment == {"CUDA_VISIBLE_DEVICES": "0"}
    environment = {"CUDA_VISIBLE_DEVICES": "3,1"}
    prepare_launch(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    prepare_launch(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_accelerate_with_one_process_is_fine() -> None:
    assert prepare_launch({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}) == 1


def test_world_size_without_ranks_is_refused() -> None:
    with pytest.raises(MiaError, match="RANK and LOCAL_RANK are not set"):
        prepare_launch({"WORLD_SIZE": "2"})


def test_workers_without_a_gpu_are_sent_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    environment = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert prepare_launch(environment) == 2
    assert environment["ACCELERATE_USE_CPU"] == "true"
    assert (process_count(environment), process_rank(environment)) == (2, 1)


def test_more_workers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    environment = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(MiaError, match=r"4 processes on this machine, which has 2 device"):
        prepare_launch(environment)
    assert prepare_launch({**environment, "LOCAL_WORLD_SIZE": "2"}) == 4  # two machines
    assert prepare_launch({**environment, "ACCELERATE_USE_CPU": "true"}) == 4


def test_workers_that_did_not_join_are_refused() -> None:
    check_world(1, {})
    check_world(2, {"WORLD_SIZE": "2"})
    with pytest.raises(MiaError, match="2 processes were launched but 1 joined"):
        check_world(1, {"WORLD_SIZE": "2"})
