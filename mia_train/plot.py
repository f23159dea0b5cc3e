"""Draw the JSONL logs of runs: one figure of small panels, one colour a run."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mia_serve.core.errors import MiaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_FILE = "metrics.jsonl"  # that of mia_train.logs, which would bring torch in
#: Colours that the colour-blind tell apart (Okabe and Ito, "Color Universal Design", 2008), without the yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DPI = 150
PANEL = (3.4, 2.1)  # inches
COLUMNS = 3
_STYLES: tuple[Any, ...] = ("-", (0, (4, 1.5)))
_INK, _QUIET, _FAINT = "#333333", "#777777", "#BBBBBB"
_LOG_RATIO = 30.0  # a gradient norm that varies by more is drawn on a logarithmic axis
_FEW_POINTS = 40  # lines of at most so many points show them
# Quantities whose zero is no natural reference: a baseline at 0 would flatten what there is to see.
_FLOATING = {"loss", "loss_with_signature", "loss_without_signature", "distill_loss", "positive_similarity"}


class Panel(NamedTuple):
    """What one panel shows.

    Attributes:
        title: Its title, with the unit.
        lines: Key in the log to label, where there are several; the first is drawn solid, the second dashed.
    """

    title: str
    lines: dict[str, str]


PANELS = (
    Panel("loss", {"loss": ""}),
    Panel("InfoNCE, rows that have σ", {"loss_with_signature": "with σ", "loss_without_signature": "without σ"}),
    Panel("distillation loss", {"distill_loss": ""}),
    Panel("gradient norm", {"grad_norm": ""}),
    Panel("learning rate", {"learning_rate": ""}),
    Panel(
        "cosine to the query", {"positive_similarity": "positive", "hardest_negative_similarity": "hardest negative"}
    ),
    Panel("masked false negatives since the last line", {"masked_negatives": ""}),
    Panel("tokens/s", {"tokens_per_s": ""}),
    Panel("rows/s", {"rows_per_s": ""}),
    Panel("padding, share of all tokens", {"padding": ""}),
)


@dataclass(frozen=True)
class RunLog:
    """The log of one run.

    Attributes:
        name: Of its folder.
        lines: As written, each with a step.
    """

    name: str
    lines: tuple[dict[str, Any], ...]

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps (n,) at which a value was logged and the values (n,), NaN where it was null."""
        found = [(line["step"], line[key]) for line in self.lines if key in line]
        steps = np.array([step for step, _ in found], dtype=np.int64)
        return steps, np.array([np.nan if value is None else value for _, value in found], dtype=np.float64)

    def has(self, key: str) -> bool:
        """Return whether the log holds a number under a key."""
        return bool(np.isfinite(self.series(key)[1]).any())


def read_runs(paths: Sequence[str | Path]) -> list[RunLog]:
    """Read the logs of runs, by their folders or the files themselves.

    Raises:
        FileNotFoundError: There is no log.
        MiaError: A log is empty or broken, two runs have one name, or there are more runs than colours.
    """
    if len(paths) > len(COLOURS):
        raise MiaError(f"{len(paths)} runs: at most {len(COLOURS)} can be told apart in one figure; plot fewer")
    runs: list[RunLog] = []
    place: dict[str, str] = {}
    for path in paths:
        run = read_run(path)
        if run.name in place:
            raise MiaError(
                f"{place[run.name]} and {path} are both called {run.name!r}; give each run once, and rename one folder "
                "where two have the same name"
            )
        place[run.name] = str(path)
        runs.append(run)
    return runs


def read_run(path: str | Path) -> RunLog:
    """Read the log of one run; a last line that is still being written is left out.

    Raises:
        FileNotFoundError: There is no log.
        MiaError: It is empty, or a line is not one of a log.
    """
    file = Path(path) / LOG_FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no {LOG_FILE} there; give the training.output_dir of a run")
    try:
        texts = file.read_text("utf-8-sig").splitlines(keepends=True)
    except UnicodeDecodeError:
        raise MiaError(f"{file}: not a training log, which is UTF-8") from None
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            values = [value for value in line.values() if value is not None]
            if not isinstance(line["step"], int) or not all(isinstance(value, int | float) for value in values):
                raise TypeError
            np.int64(line["step"]), [float(value) for value in values]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            if number == len(texts) and not text.endswith("\n"):
                break
            raise MiaError(f"{file}:{number}: not a line of a training log (numbers by name, with a step)") from None
        lines.append(line)
    if not lines:
        raise MiaError(f"{file}: empty; the run has not logged a step yet")
    return RunLog(file.resolve().parent.name, tuple(lines))


def panels_of(runs: Sequence[RunLog]) -> list[Panel]:
    """Return the panels for what some run has logged: those of training, then one for each evaluation metric."""
    panels = [
        Panel(panel.title, {key: label for key, label in panel.lines.items() if any(run.has(key) for run in runs)})
        for panel in PANELS
    ]
    if any(value > 0 for run in runs for value in run.series("skipped_steps")[1]):
        panels.append(Panel("skipped steps so far", {"skipped_steps": "skipped"}))
    keys = dict.fromkeys(key for run in runs for line in run.lines for key in line if key.startswith("eval_"))
    plain = {key: key.replace("eval_", "eval_plain_", 1) for key in keys}
    for key in keys:
        # With a signature there is each metric of the queries alone as well; both go into one panel.
        if key not in plain.values() and any(run.has(key) for run in runs):
            lines = {key: "with σ", plain[key]: "query alone"} if plain[key] in keys else {key: ""}
            panels.append(Panel(f"evaluation: {key.removeprefix('eval_')}", lines))
    return [panel for panel in panels if panel.lines]


def draw(runs: Sequence[RunLog]) -> Figure:
    """Draw the runs over each other.

    Raises:
        MiaError: matplotlib is not installed, or no run has logged anything that is drawn.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.lines import Line2D
    except ImportError:
        raise MiaError("plots need matplotlib, which is not installed; run `pip install matplotlib`") from None
    panels = panels_of(runs)
    if not panels:
        raise MiaError(f"{', '.join(run.name for run in runs)}: nothing to draw yet; the log has no value of training")
    rows = -(-len(panels) // COLUMNS)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(COLUMNS * PANEL[0], rows * PANEL[1] + 0.5), dpi=DPI, layout=layout)
    end = max(line["step"] for run in runs for line in run.lines)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, COLUMNS, place + 1)
        _draw_panel(axes, panel, runs)
        axes.set_xlim(0, 1.02 * max(end, 1))
        if place + COLUMNS >= len(panels):  # nothing below
            axes.set_xlabel("step", color=_QUIET, fontsize=8)
    lines = [Line2D([], [], color=colour, lw=2.5, label=run.name) for run, colour in zip(runs, COLOURS, strict=False)]
    figure.legend(handles=lines, loc="outside upper left", ncols=COLUMNS, frameon=False, fontsize=10, labelcolor=_INK)
    return figure


def save_plot(paths: Sequence[str | Path], out: str | Path) -> list[str]:
    """Draw the logs of runs into a PNG file, whole or not at all, and return the titles of its panels.

    Raises:
        FileNotFoundError: There is no log.
        MiaError: See `read_runs` and `draw`.
    """
    figure = draw(read_runs(paths))
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    aside = Path(out).with_name(f".{Path(out).name}.tmp")
    aside.write_bytes(picture.getvalue())
    os.replace(aside, out)
    return [axes.get_title(loc="left") for axes in figure.axes]


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[RunLog]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    values = [np.zeros(0)]
    for run, colour in zip(runs, COLOURS, strict=False):
        for key, style in zip(panel.lines, _STYLES, strict=False):
            steps, found = run.series(key)
            marker = "o" if len(steps) <= _FEW_POINTS else ""
            name = f"{run.name} {key}"  # in no legend; says what a line is to whoever has the figure
            axes.plot(steps, found, linestyle=style, color=colour, lw=1.4, marker=marker, ms=2.2, label=name)
            values.append(found[np.isfinite(found)])
    drawn = np.concatenate(values)
    axes.set_title(panel.title, loc="left", fontsize=9, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(which="both", labelsize=8, color=_FAINT, labelcolor=_QUIET)
    axes.grid(axis="y", color="#EEEEEE", lw=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if "grad_norm" in panel.lines and drawn.min() > 0 and drawn.max() > _LOG_RATIO * drawn.min():
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(_number))
        floats = any(key in _FLOATING or key.startswith("eval_") for key in panel.lines)
        if drawn.min() >= 0 and not floats:
            axes.set_ylim(bottom=0)
    if len(panel.lines) > 1:
        kinds = zip(panel.lines.values(), _STYLES, strict=False)
        handles = [Line2D([], [], color=_QUIET, lw=1.4, linestyle=style, label=label) for label, style in kinds]
        axes.legend(handles=handles, loc="best", frameon=False, fontsize=7.5, labelcolor=_QUIET, borderaxespad=0.2)


def _number(value: float, _: int) -> str:
    """Write a tick without an offset elsewhere: 0.00002 as 2e-5."""
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")
