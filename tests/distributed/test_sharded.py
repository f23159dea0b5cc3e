"""DDP, FSDP 2 and DeepSpeed ZeRO 2 on two gloo processes train like one process, interrupted or not.

One launch (two where DeepSpeed is installed), whose runs all tests here share; see ``sharded_worker.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from mia_serve.core import Encoder, MiaError
from mia_train import trainer
from mia_train.finish import check_resumable
from mia_train.launch import prepare_launch
from mia_train.rows import write_rows
from tests.distributed.sharded_worker import CASES, ROWS, SAVED, STEPS, STOPPED, recipe_of, watched
from tests.train.conftest import make_rows

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "accelerate"
TIMEOUT = 280
TEXTS = ["where was the quay", "the ferryman counted the lamps"]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
pytestmark = pytest.mark.timeout(TIMEOUT + 20)
KINDS = ["ddp", "fsdp", pytest.param("zero2", marks=needs_deepspeed)]
Facts = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    write_rows(folder / "rows.jsonl", make_rows(ROWS))
    return folder


@pytest.fixture(scope="module")
def one(out: Path, tiny_qwen3: Path) -> dict[str, list[tuple[str, ...]]]:
    """Rows by step of one process that was not interrupted, by case; its runs are ``one-CASE``."""
    rows = {}
    for name, case in CASES.items():
        with watched() as (seen, _):
            trainer.run(recipe_of(out, str(tiny_qwen3), f"one-{name}", 1, case))
        rows[name] = seen
    return rows


@pytest.fixture(scope="module")
def facts(out: Path, tiny_qwen3: Path) -> Facts:
    """Facts by kind of launch; a launch runs when the first test asks for it."""
    done: dict[str, dict[str, Any]] = {}
    launches = {"fsdp": ("fsdp_cpu2", ["fsdp", "ddp"]), "ddp": ("fsdp_cpu2", ["fsdp", "ddp"])}
    launches["zero2"] = ("zero2_cpu2", ["zero2"])

    def of(kind: str) -> dict[str, Any]:
        if kind not in done:
            config, kinds = launches[kind]
            launch(RECIPES / f"{config}.yaml", [str(out), str(tiny_qwen3), *kinds])
            done.update({k: json.loads((out / f"facts-{k}.json").read_text()) for k in kinds})
        return done[kind]

    return of


def launch(config: Path, arguments: list[str]) -> None:
    drop = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU")
    environment = {name: value for name, value in os.environ.items() if name not in drop}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "-m"]
    command += ["tests.distributed.sharded_worker", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-6000:]


def log_of(folder: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if "loss" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_the_trained_state_is_really_shared_out(kind: str, facts: Facts) -> None:
    found = facts(kind)
    assert found["processes"] == 2
    parameters, optimizer = {"ddp": (1, 1), "fsdp": (0.5, 0.5), "zero2": (1, 0.5)}[kind]
    for case in ("full", "lora"):
        assert found[case]["parameters"] == pytest.approx([parameters, parameters], abs=0.02)
        assert found[case]["optimizer"] == pytest.approx([optimizer, optimizer], abs=0.02)


@pytest.mark.parametrize("case", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_TRN_17_TRN_18_TRN_32_resumed_in_the_middle_of_a_pass_it_sees_each_row_as_one_uninterrupted_process_did(
    kind: str, case: str, facts: Facts, one: dict[str, list[tuple[str, ...]]]
) -> None:
    whole = [sorted(rows) for rows in one[case]]
    assert len(whole) == STEPS
    before, after = ([sorted(rows) for rows in facts(kind)[case][part]] for part in ("before", "after"))
    assert before == whole[:STOPPED]
    assert after == whole[SAVED:]  # step three was not saved, so it is done again
    first_pass = [row for rows in whole for row in rows][:ROWS]
    assert len(set(first_pass) | set(before[2])) == ROWS


@pytest.mark.parametrize("case", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_TRN_17_TRN_18_loss_gradient_norm_and_vectors_are_those_of_one_process(
    kind: str, case: str, out: Path, facts: Facts, one: dict[str, Any]
) -> None:
    facts(kind)
    for key in ("loss", "grad_norm", "positive_similarity"):
        mine, theirs = log_of(out / f"{kind}-{case}", key), log_of(out / f"one-{case}", key)
        assert len(mine) == STEPS
        np.testing.assert_allclose(mine, theirs, rtol=1e-4)
    assert log_of(out / f"{kind}-{case}", "total_rows") == [4, 8, 12, 16, 20, 24]
    ours, theirs = (Encoder.load(out / f"{name}-{case}", device="cpu") for name in (kind, "one"))
    assert ours.spec.hash == theirs.spec.hash
    np.testing.assert_allclose(ours.encode_documents(TEXTS), theirs.encode_documents(TEXTS), atol=1e-5)
    np.testing.assert_allclose(ours.encode_queries(TEXTS), theirs.encode_queries(TEXTS), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_run_and_checkpoint_are_ordinary_encoder_folders(
    kind: str, out: Path, facts: Facts, one: dict[str, Any]
) -> None:
    facts(kind)
    for case in ("full", "lora"):
        run, weights = out / f"{kind}-{case}", "adapter_model" if case == "lora" else "model"
        names = {path.name for path in (out / f"one-{case}").iterdir()}
        assert {path.name for path in run.iterdir()} == names >= {"README.md", "mia_run.json", f"{weights}.safetensors"}
        assert "processes 2" in (run / "README.md").read_text()
        last = Encoder.load(run / f"checkpoint-{STEPS}", device="cpu")
        assert last.spec_hash == Encoder.load(run, device="cpu").spec_hash
        assert (run / f"checkpoint-{STEPS}" / "adapter_model.safetensors").is_file() == (case == "lora")
    assert not list((out / "fsdp-full").glob("**/pytorch_model_fsdp*"))  # no second copy of the weights


def test_adapters_under_fsdp_gather_and_save_no_base(out: Path, facts: Facts) -> None:
    facts("fsdp")
    state = torch.load(out / "fsdp-lora" / f"checkpoint-{STEPS}" / "optimizer.bin", weights_only=True)["state"]
    assert state and all("lora_" in name for name in state)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_TRN_25_bfloat16_compute_leaves_adapters_float32(
    kind: str, out: Path, facts: Facts, one: dict[str, Any]
) -> None:
    facts(kind)
    saved = load_file(out / f"{kind}-bf16" / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    # Not rounded copies of bfloat16 ones: some value needs more than 8 bits.
    assert any(bool((weight != weight.bfloat16().float()).any()) for weight in saved.values())
    # Two groups of sequences instead of four: other padding, so other roundings.
    np.testing.assert_allclose(log_of(out / f"{kind}-bf16", "loss"), log_of(out / "one-bf16", "loss"), rtol=0.02)


def test_the_gradient_cache_under_fsdp_is_exact(out: Path, facts: Facts, one: dict[str, Any]) -> None:
    facts("fsdp")
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(log_of(out / "fsdp-cached", key), log_of(out / "one-full", key), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_TRN_28_a_step_that_is_not_finite_on_one_process_is_skipped_by_all(kind: str, out: Path, facts: Facts) -> None:
    assert facts(kind)["skipped"] == 1
    assert log_of(out / f"{kind}-poisoned", "skipped_steps") == [0, 1, 1]
    weights = Encoder.load(out / f"{kind}-poisoned", device="cpu").model.state_dict()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


@needs_deepspeed
def test_TRN_19_the_best_adapters_are_kept_under_zero(out: Path, facts: Facts) -> None:
    facts("zero2")
    run = out / "zero2-best"
    final, best, last = (Encoder.load(folder, device="cpu") for folder in (run, *sorted(run.glob("checkpoint-*"))))
    assert final.spec_hash == best.spec_hash != last.spec_hash


def test_a_checkpoint_of_another_launch_is_refused(out: Path, tiny_qwen3: Path, facts: Facts) -> None:
    facts("ddp")
    recipe = recipe_of(out, str(tiny_qwen3), "fsdp-full", 2, {})
    with pytest.raises(MiaError, match="its optimiser state is FSDP and that of this launch unsharded"):
        trainer.run(recipe, resume="auto")
    checkpoint = out / "ddp-full" / f"checkpoint-{STEPS}"
    check_resumable(checkpoint, recipe, processes=2)
    with pytest.raises(MiaError, match=r"2 process\(es\) with 4 rows a step; this launch is 4 with 8.* twice"):
        check_resumable(checkpoint, recipe, processes=4)
    check_resumable(checkpoint, recipe_of(out, str(tiny_qwen3), "x", 4, {}), processes=4)  # the same rows a step


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, r"fsdp_version is 1; allowed: 2"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "fsdp_cpu_ram_efficient_loading is true; allowed: false",
        ),
    ],
)
def test_what_sharding_does_not_do_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(MiaError, match=message):
        prepare_launch(environment)


def test_deepspeed_is_told_the_device_where_there_is_no_gpu() -> None:
    environment = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert prepare_launch(environment) == 2
    assert "ACCELERATE_USE_CPU" not in environment  # accelerate would quietly train without DeepSpeed
    assert environment["ACCELERATE_TORCH_DEVICE"] == environment["DS_ACCELERATOR"] == "cpu"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"  # DeepSpeed would train bfloat16 adapters


def test_evaluation_under_fsdp_is_refused(out: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(out, str(tiny_qwen3), "refused", 1, {"data": {"eval": "saltmarsh:test"}})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(MiaError, match=r"data\.eval: .* FSDP shards them"):
        trainer.run(recipe)


@pytest.mark.parametrize(
    ("small", "large", "section"), [("fsdp_cpu2", "fsdp", "fsdp"), ("zero2_cpu2", "zero2", "deepspeed")]
)
def test_what_was_run_here_shards_as_the_recipe_for_gpus(small: str, large: str, section: str) -> None:
    ran, recipe = (yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) for name in (small, large))
    assert ran[f"{section}_config"] == recipe[f"{section}_config"]
    assert ran["mixed_precision"] == recipe["mixed_precision"] == "no"
