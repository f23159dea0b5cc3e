"""Pictures of a sensitivity study: one a factor, with intervals."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mia_serve.eval.study_plots import check_matplotlib
from mia_serve.eval.sweep import FACTOR_LABELS, Sweep, SweepRow, Value, changed
from mia_serve.eval.sweep_table import setting_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
#: Okabe and Ito, "Color Universal Design", 2008.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_INK, _QUIET, _FAINT = "#333333", "#777777", "#CCCCCC"


def sweep_plots(sweep: Sweep) -> dict[str, bytes]:
    """Draw a study: ``sweep_{factor}.png`` -> PNG, a panel a metric, a line a system with its 95 % interval.

    In a study of a grid a picture shows the settings that differ from the default in its factor alone.

    Raises:
        MiaError: matplotlib is not installed.
    """
    check_matplotlib()
    return {f"sweep_{name}.png": _png(_factor(sweep, name)) for name in sweep.factors}


def _factor(sweep: Sweep, name: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(4.2 * len(sweep.metrics), 3.6), dpi=DPI, layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)  # no window, whatever the user's settings say
    panels: Any = figure.subplots(1, len(sweep.metrics), squeeze=False)[0]
    for axes, (metric, label) in zip(panels, sweep.metrics.items(), strict=True):
        _style(axes)
        _panel(axes, sweep, name, metric)
        axes.set_title(label, loc="left", fontsize=9, color=_INK)
    panels[0].legend(frameon=False, fontsize=8, labelcolor=_INK, loc="best")
    facts = sweep.benchmark
    series = " series" if facts.get("series") else ""
    others = setting_text(replace(sweep.default, **{name: None}))  # type: ignore[arg-type]
    figure.supxlabel(f"{FACTOR_LABELS[name]} ({others})", fontsize=8, color=_QUIET)
    figure.suptitle(f"{facts['name']} {facts['split']}{series}, 95 % intervals", fontsize=9, color=_INK)
    return figure


def _panel(axes: Axes, sweep: Sweep, name: str, metric: str) -> None:
    """Draw one metric by the values of a factor; values stand at equal distances, since most are chosen so."""
    for number, (system, label) in enumerate(sweep.systems.items()):
        found = [(place, _row(sweep, system, name, value)) for place, value in enumerate(sweep.factors[name])]
        rows = [(place, row) for place, row in found if row is not None]
        if len(rows) < 2:
            continue
        places = [place for place, _ in rows]
        means = np.array([row.metrics[metric].mean for _, row in rows], float)  # NaN, so a gap, where there is none
        low = np.array([row.metrics[metric].low for _, row in rows], float)
        high = np.array([row.metrics[metric].high for _, row in rows], float)
        colour = _COLOURS[number % len(_COLOURS)]
        axes.fill_between(places, low, high, color=colour, alpha=0.12, lw=0)
        axes.plot(places, means, "o-", color=colour, lw=2, ms=4, label=label)
    values = sweep.factors[name]
    axes.set_xticks(range(len(values)), [f"{v:g}" if isinstance(v, float) else str(v) for v in values])
    axes.axvline(values.index(getattr(sweep.default, name)), color=_FAINT, lw=1, ls="--", zorder=0)


def _row(sweep: Sweep, system: str, name: str, value: Value) -> SweepRow | None:
    return sweep.row(system, changed(sweep.default, [(name, value)]))


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(labelsize=8, color=_FAINT, labelcolor=_QUIET)
    axes.grid(axis="y", color="#EEEEEE", lw=0.8)
    axes.set_axisbelow(True)


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
