"""Every recipe in the repository loads, says how to run it, and is what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mia_train.config import load_recipe, missing_inputs, recipe_warnings

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("e[12]_*.yaml"))  # generators: test_generator.py
LAUNCHES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


def test_the_recipes_are_found() -> None:
    pairs = ("minilm_cpu", "qwen3_embedding_0.6b_lora", "qwen3_embedding_8b_lora", "bge_m3")
    assert {path.stem for path in RECIPES} >= {f"e{n}_{name}" for n in (1, 2) for name in pairs}
    assert {path.stem for path in RECIPES} >= {"e1_minilm_public", "e2_minilm_fairytaleqa", "e2_minilm_qmsum"}
    assert {path.stem for path in LAUNCHES} >= {"cpu", "cpu2", "ddp", "fsdp", "fsdp_cpu2", "zero2", "zero2_cpu2"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_says_how_to_run_it(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe_warnings(recipe) == []
    assert recipe.data.view == ("query" if path.stem.startswith("e1") else "signature")
    assert Path(recipe.training.output_dir).parent == ROOT / "runs"
    command = path.read_text(encoding="utf-8").splitlines()[0]
    assert command.startswith("# ") and "mia" in command and f"run recipes/{path.name}" in command
    for word in command.split():
        assert not word.startswith("recipes/") or (ROOT / word).is_file()


@pytest.mark.parametrize("name", ["e1_minilm_cpu", "e2_minilm_cpu"])
def test_cpu_recipes_need_nothing_but_the_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIA_DATA", raising=False)
    assert missing_inputs(load_recipe(ROOT / "recipes" / f"{name}.yaml")) == []


@pytest.mark.parametrize("size", ["0.6b", "8b"])
@pytest.mark.parametrize("stage", ["e1", "e2"])
def test_qwen3_recipes_hold_the_papers_numbers(stage: str, size: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{stage}_qwen3_embedding_{size}_lora.yaml")
    training, lora = recipe.training, recipe.lora
    assert (training.bf16, training.batch_size, training.max_steps, training.warmup) == (True, 4, 2000, 0.1)
    assert training.learning_rate == 1e-4
    assert lora is not None and (lora.rank, lora.alpha) == (128, 256)
    assert (recipe.loss.temperature, recipe.loss.beta, recipe.loss.negatives) == (0.01, 0.5, "own")
    assert (recipe.model.alpha, recipe.data.hard_negatives, recipe.data.simple_negatives) == (0.5, 5, 5)


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_launch_config_is_read_by_accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    loaded = load_config_from_file(str(path))
    parser = launch_command_parser()
    arguments, _, _ = _validate_launch_command(parser.parse_args(["--config_file", str(path), "-m", "mia_train"]))
    workers = 1 if path.stem == "cpu" else 2 if path.stem.endswith("cpu2") else 8
    assert loaded.num_processes == arguments.num_processes == workers
    # What starts several processes: accelerate's torchrun path, FSDP, or DeepSpeed.
    assert bool(arguments.multi_gpu or arguments.use_fsdp or arguments.use_deepspeed) == (workers > 1)
    if path.stem.startswith("fsdp"):
        assert arguments.use_fsdp and str(arguments.fsdp_version) == "2"
    if path.stem.startswith("zero2"):
        assert arguments.use_deepspeed and arguments.zero_stage == 2
