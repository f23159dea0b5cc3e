"""What an interrupted, finished or changed run is when it is taken up again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mia_serve.core import Encoder, MiaError
from mia_train import trainer
from mia_train.config import Recipe
from mia_train.logs import MetricsLog

from .test_trainer import LORA, interrupt_at, log_of, stub_evaluation

__all__ = ["stub_evaluation"]  # a fixture
Build = Callable[..., Recipe]


def card(recipe: Recipe) -> str:
    return (Path(recipe.training.output_dir) / "README.md").read_text()


def test_the_card_tells_of_the_whole_run_after_a_resume(
    tiny_bert: Path, make_recipe: Build, stub_evaluation: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_evaluation += [0.9, 0.1, 0.2]
    recipe = make_recipe(
        tiny_bert, data={"eval": "saltmarsh:test"}, training={"eval_steps": 1, "save_steps": 1, "max_steps": 3}
    )
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(recipe)
    result = trainer.run(recipe, resume="auto")
    assert result.metrics["mrr"] == 0.2
    assert "| trained | 0.500 | 0.900 |" in card(recipe)  # of step 1, which was kept
    lines = [line for line in log_of(recipe) if "loss" in line]
    assert [line["total_rows"] for line in lines] == [2, 4, 6]
    assert result.rows_per_second == pytest.approx(6 / result.seconds)
    assert result.seconds > lines[1]["total_seconds"]

    before = card(recipe)
    again = trainer.run(recipe, resume="auto")  # nothing is left to do
    assert (again.steps, again.loss) == (3, pytest.approx(lines[-1]["loss"]))
    assert re.sub(r"\| (speed|peak memory) .*", "", card(recipe)) == re.sub(r"\| (speed|peak memory) .*", "", before)
    assert "| speed | 0.0 rows/s" not in card(recipe)


def test_skipped_steps_are_counted_over_a_resume(
    tiny_bert: Path, make_recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .test_trainer import poison

    recipe = make_recipe(tiny_bert, training={"save_steps": 1})
    with monkeypatch.context() as patch:
        poison(patch, {1})
        interrupt_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(recipe)
    assert trainer.run(recipe, resume="auto").skipped == 1


def test_folders_that_are_no_checkpoints_are_passed_over(tiny_bert: Path, make_recipe: Build) -> None:
    recipe = make_recipe(tiny_bert)
    folder = trainer.run(recipe).folder
    for name in ("checkpoint-best", "checkpoint-9-old", "checkpoint-7"):
        (folder / name).mkdir()
        (folder / name / "trainer_state.json").write_text('{"global_')  # cut short
    assert trainer.run(recipe, resume="auto").steps == 4
    with pytest.raises(MiaError, match=r"holds checkpoint-4 of an earlier run"):
        trainer.run(recipe)


@pytest.mark.parametrize(
    ("first", "then"),
    [({}, {"lora": LORA}), ({"lora": LORA}, {}), ({"lora": LORA}, {"lora": {**LORA, "rank": 3}}),
     ({"lora": LORA}, {"lora": {**LORA, "targets": ["q_proj"]}})],
)  # fmt: skip
def test_a_checkpoint_of_other_weights_is_refused(
    first: dict[str, Any], then: dict[str, Any], tiny_qwen3: Path, make_recipe: Build
) -> None:
    trainer.run(make_recipe(tiny_qwen3, training={"max_steps": 1}, **first))
    with pytest.raises(MiaError, match=r"checkpoint-1: its weights do not fit .*recipe\.yaml"):
        trainer.run(make_recipe(tiny_qwen3, training={"max_steps": 2}, **then), resume="auto")


def test_rows_that_a_resumed_run_does_not_make_anew_are_told(
    tiny_bert: Path, make_recipe: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.run(make_recipe(tiny_bert, training={"max_steps": 1}))
    capsys.readouterr()
    trainer.run(make_recipe(tiny_bert, training={"max_steps": 1}), resume="auto")
    assert "warning" not in capsys.readouterr().err
    trainer.run(make_recipe(tiny_bert, data={"hard_negatives": 2}, training={"max_steps": 2}), resume="auto")
    assert "warning: data.hard_negatives: was 1 up to checkpoint-1 and is 2 now" in capsys.readouterr().err


def test_a_changed_loss_or_schedule_of_a_resumed_run_is_told(
    tiny_bert: Path, make_recipe: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.run(make_recipe(tiny_bert, training={"max_steps": 1}))
    capsys.readouterr()
    harmless = {"max_steps": 1, "mini_batch_tokens": 64, "log_steps": 2, "save_steps": 1}
    trainer.run(make_recipe(tiny_bert, training=harmless), resume="auto")
    assert "warning" not in capsys.readouterr().err
    changed = make_recipe(tiny_bert, loss={"negatives": "in_batch"}, training={"max_steps": 2, "learning_rate": 1e-4})
    trainer.run(changed, resume="auto")
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")] == [
        "warning: loss.negatives: was 'own' up to checkpoint-1 and is 'in_batch' now",
        "warning: training.max_steps: was 1 up to checkpoint-1 and is 2 now",
        "warning: training.learning_rate: was 0.001 up to checkpoint-1 and is 0.0001 now",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"training": {"seed": 1}}, r"training\.seed was 0 and is 1 now, .* trained on twice"),
        ({"data": {"mixture": {"test": 1.0}}}, r"data\.mixture was None and is \{'test': 1\.0\} now"),
    ],
)
def test_rows_in_another_order_are_refused_on_resuming(
    change: dict[str, Any], said: str, tiny_bert: Path, make_recipe: Build
) -> None:
    trainer.run(make_recipe(tiny_bert, training={"max_steps": 1}))
    with pytest.raises(MiaError, match=said):
        trainer.run(make_recipe(tiny_bert, **({"training": {"max_steps": 2}} | change)), resume="auto")


def test_a_log_line_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    log = MetricsLog(tmp_path, start=2)
    log.write(3, {})
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 2, 3]


def test_the_best_step_is_kept_where_saves_are_rarer_than_the_run_is_long(
    tiny_bert: Path, make_recipe: Build, stub_evaluation: list[float]
) -> None:
    stub_evaluation += [0.9, 0.1]
    steps = {"max_steps": 4, "eval_steps": 3, "save_steps": 6}
    recipe = make_recipe(tiny_bert, data={"eval": "saltmarsh:test"}, training=steps)
    folder = trainer.run(recipe).folder
    best = Encoder.load(folder / "checkpoint-3", device="cpu")
    assert Encoder.load(folder, device="cpu").spec_hash == best.spec_hash


def test_a_full_fine_tune_goes_on_from_an_adapter(tiny_bert: Path, make_recipe: Build) -> None:
    adapter = trainer.run(make_recipe(tiny_bert, out="adapter", lora=LORA)).folder
    full = trainer.run(make_recipe(adapter, out="full")).folder
    assert (full / "model.safetensors").is_file()
    assert Encoder.load(full, device="cpu").spec_hash != Encoder.load(full / "checkpoint-2", device="cpu").spec_hash


def test_an_output_dir_that_is_a_file_is_one_line(tiny_bert: Path, make_recipe: Build, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MiaError, match=r"training\.output_dir: .*file cannot be a folder"):
        trainer.run(make_recipe(tiny_bert, out="file"))
