from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_serve.core import MiaError
from mia_train import logs
from mia_train.cli import main
from mia_train.plot import COLOURS, DPI, LOG_FILE, PANEL, draw, panels_of, read_run, read_runs, save_plot

TRAIN = {
    "loss": [6.6, 6.2, None, 5.1],
    "grad_norm": [27.0, 30.5, None, 24.5],
    "learning_rate": [0.0, 4.5e-5, 2e-5, 1e-6],
    "positive_similarity": [0.53, 0.54, 0.55, 0.6],
    "hardest_negative_similarity": [0.57, 0.5, 0.45, 0.4],
    "tokens_per_s": [982.1, 1600.0, 1610.5, 1605.0],
    "rows_per_s": [1.7, 2.5, 2.6, 2.6],
    "padding": [0.07, 0.06, 0.065, 0.07],
    "masked_negatives": [1.0, 56.0, 0.0, 3.0],
    "negatives_per_row": [46.9, 46.7, 46.8, 46.8],
    "skipped_steps": [0, 0, 0, 0],
}
TITLES = ["loss", "gradient norm", "learning rate", "cosine to the query", "masked false negatives since the last line",
          "tokens/s", "rows/s", "padding, share of all tokens"]  # fmt: skip


def write_log(folder: Path, more: dict[str, list[Any]] | None = None, evaluations: list[dict[str, Any]] = []) -> Path:  # noqa: B006
    folder.mkdir(parents=True)
    columns = TRAIN | (more or {})
    lines = [{"step": step} | {k: v[i] for k, v in columns.items()} for i, step in enumerate((1, 10, 20, 30))]
    lines = sorted([*lines, *evaluations], key=lambda line: line["step"])
    lines.append({"step": 30, "train_runtime": 1365.0, "train_loss": 5.5})
    (folder / LOG_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def drawn(figure: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
        for axes in figure.axes
        for line in axes.lines
    }


def png_size(data: bytes) -> tuple[int, int]:
    """Check a PNG's signature, chunks and sums, and return its width and height."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, names, pixels = 8, [], b""
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        name, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0] == zlib.crc32(name + body)
        names.append(name)
        pixels += body if name == b"IDAT" else b""
        place += 12 + length
    assert names[0] == b"IHDR" and names[-1] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    assert len(zlib.decompress(pixels)) == height * (1 + 4 * width)  # RGBA, a filter byte a line
    return width, height


def test_it_reads_the_file_that_runs_write() -> None:
    assert LOG_FILE == logs.LOG_FILE


def test_what_is_drawn_is_what_was_logged_and_nulls_are_gaps(tmp_path: Path) -> None:
    evaluations = [{"step": 20, "eval_mrr": 0.31, "eval_plain_mrr": 0.28}, {"step": 30, "eval_mrr": 0.4}]
    shown: dict[str, list[Any]] = {
        "loss_with_signature": [2, 1.5, 1, 0.5],
        "loss_without_signature": [2.5, 2, None, 1],
    }
    figure = draw(read_runs([write_log(tmp_path / "run", shown, evaluations)]))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["loss", "InfoNCE, rows that have σ", *TITLES[1:], "evaluation: mrr"]
    lines = drawn(figure)
    logged = {
        key: values for key, values in (TRAIN | shown).items() if key not in ("skipped_steps", "negatives_per_row")
    }
    assert lines.keys() == {f"run {key}" for key in (*logged, "eval_mrr", "eval_plain_mrr")}
    for key, values in logged.items():
        expected = [np.nan if value is None else value for value in values]
        np.testing.assert_array_equal(lines[f"run {key}"], ([1, 10, 20, 30], expected))  # NaN equals NaN here
    assert lines["run eval_mrr"] == ([20, 30], [0.31, 0.4])
    assert lines["run eval_plain_mrr"] == ([20], [0.28])


def test_only_what_was_logged_has_a_panel(tmp_path: Path) -> None:
    plain = draw(read_runs([write_log(tmp_path / "plain")]))
    assert [axes.get_title(loc="left") for axes in plain.axes] == TITLES
    skipping = write_log(tmp_path / "skipping", {"skipped_steps": [0, 1, 1, 2], "distill_loss": [None] * 4})
    assert [panel.title for panel in panels_of([read_run(skipping)])] == [*TITLES, "skipped steps so far"]


def test_runs_are_laid_over_each_other_with_their_names_in_one_legend(tmp_path: Path) -> None:
    runs = [write_log(tmp_path / name, {"loss": [1.0 * i, 2, 3, 4]}) for i, name in enumerate(("one", "two", "three"))]
    figure = draw(read_runs(runs))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two", "three"]
    loss = next(axes for axes in figure.axes if axes.get_title(loc="left") == "loss")
    assert [line.get_color() for line in loss.lines] == list(COLOURS[:3])
    assert [float(np.asarray(line.get_ydata())[0]) for line in loss.lines] == [0.0, 1.0, 2.0]
    cosine = next(axes for axes in figure.axes if axes.get_title(loc="left") == "cosine to the query")
    assert [text.get_text() for text in cosine.get_legend().get_texts()] == ["positive", "hardest negative"]
    assert len({line.get_linestyle() for line in cosine.lines}) == 2 and len(cosine.lines) == 6


def test_a_gradient_norm_over_decades_is_on_a_logarithmic_axis(tmp_path: Path) -> None:
    scales = []
    for name, norms in (
        ("flat", [27.0, 30.5, 20, 24.5]),
        ("steep", [900.0, 30.5, None, 2.0]),
        ("zero", [900.0, 0, 1, 2]),
    ):
        figure = draw(read_runs([write_log(tmp_path / name, {"grad_norm": norms})]))
        axes = next(axes for axes in figure.axes if axes.get_title(loc="left") == "gradient norm")
        scales.append(axes.get_yscale())
    assert scales == ["linear", "log", "linear"]


def test_the_picture_is_a_png_of_the_stated_size(tmp_path: Path) -> None:
    out = tmp_path / "plot.png"
    out.write_text("an older picture")
    titles = save_plot([write_log(tmp_path / "run")], out)
    assert titles == TITLES
    assert png_size(out.read_bytes()) == (round(3 * PANEL[0] * DPI), round((3 * PANEL[1] + 0.5) * DPI))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "run"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_log(tmp_path / "a"), write_log(tmp_path / "b")
    out = tmp_path / "plot.png"
    with pytest.raises(SystemExit) as caught:
        main(["plot", str(a), str(b / LOG_FILE), "-o", str(out)])
    assert caught.value.code == 0 and png_size(out.read_bytes())
    assert capsys.readouterr().out.startswith(f"{out}: 2 runs, 8 panels (loss, gradient norm")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no metrics.jsonl there; give the training.output_dir of a run"),
        ("", "empty; the run has not logged a step yet"),
        ('{"step": 1, "loss": 2', "empty; the run has not logged a step yet"),
        ('{"step": 1, "loss": 2}\n{"step": 2, "lo\n{"step": 3}\n', ":2: not a line of a training log"),
        ('{"loss": 2}\n', ":1: not a line of a training log"),
        ('{"step": 1, "loss": "low"}\n', ":1: not a line of a training log"),
        ('{"step": 1, "loss": 1' + "0" * 400 + "}\n", ":1: not a line of a training log"),
        ('{"step": 1' + "0" * 30 + ', "loss": 1}\n', ":1: not a line of a training log"),
        ("[" * 200_000 + "\n", ":1: not a line of a training log"),
        ("\udcff", "not a training log, which is UTF-8"),
        ('{"step": 1, "loss": null}\n', "nothing to draw yet"),
    ],
)
def test_logs_that_cannot_be_drawn(
    tmp_path: Path, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "run" / LOG_FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SystemExit) as caught:
        main(["plot", str(tmp_path / "run"), "-o", str(tmp_path / "plot.png")])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and said in error and error.count("\n") == 1
    assert not (tmp_path / "plot.png").exists()


def test_a_line_still_being_written_is_left_out(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run")
    whole = read_run(folder)
    with (folder / LOG_FILE).open("a") as file:
        file.write('{"step": 40, "lo')
    assert read_run(folder) == whole


def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_log(tmp_path / "x" / "run"), write_log(tmp_path / "y" / "run")
    out = str(tmp_path / "plot.png")
    for arguments, said in (
        ([str(a), str(b), "-o", out], "are both called 'run'"),
        ([str(a), str(a), "-o", out], "are both called 'run'"),
        ([str(a), "-o", str(tmp_path / "plot.jpg")], "written as .png"),
        ([str(a), "-o", str(tmp_path / "none" / "plot.png")], "its folder does not exist"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["plot", *arguments])
        error = capsys.readouterr().err
        assert caught.value.code == 2 and said in error and error.count("\n") == 1
    many = [write_log(tmp_path / f"run{i}") for i in range(len(COLOURS) + 1)]
    with pytest.raises(MiaError, match="8 runs: at most 7"):
        read_runs(many)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = read_runs([write_log(tmp_path / "run")])
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MiaError, match="pip install matplotlib"):
        draw(runs)


def test_reading_logs_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, mia_train.plot; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "set()", done.stderr


def test_a_null_count_of_skipped_steps_and_the_mark_of_an_editor_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOG_FILE).write_text('{"step": 1, "loss": 1, "skipped_steps": null}\r\n', "utf-8-sig")
    assert save_plot([tmp_path / "run"], tmp_path / "plot.png") == ["loss"]
