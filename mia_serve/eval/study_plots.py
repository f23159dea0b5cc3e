"""Pictures of the chat-memory study: the weight of BM25, length dilution, and the categories."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.eval.study_report import Study
from mia_serve.eval.study_tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
#: Okabe and Ito, "Color Universal Design", 2008.
_COLOURS = {"bm25": "#E69F00", "early": "#56B4E9", "max": "#0072B2", "bm25+max": "#D55E00", "rrf": "#CC79A7"}
_LABELS = {"bm25": "BM25", "early": "early mean", "max": "late max", "bm25+max": "BM25 ⊕ late max", "rrf": "RRF"}
_INK, _QUIET, _FAINT = "#333333", "#777777", "#CCCCCC"


def check_matplotlib() -> None:
    """Refuse to go on without matplotlib, before hours of work.

    Raises:
        MiaError: It is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MiaError("plots need matplotlib, which is not installed; run `pip install matplotlib`") from None


def study_plots(study: Study) -> dict[str, bytes]:
    """Draw a study: name of the file -> PNG. What the study did not measure is not drawn.

    Raises:
        MiaError: matplotlib is not installed.
    """
    check_matplotlib()
    figures = {"categories.png": _categories(study)}
    if study.curve is not None:
        figures["alpha.png"] = _alpha(study)
    if study.lengths:
        figures["length.png"] = _length(study)
    return {name: _png(figure) for name, figure in figures.items()}


def _alpha(study: Study) -> Figure:
    """Hit@1 by the weight of BM25: all questions, and each conversation's own; a dot where its weight was chosen."""
    curve = study.curve
    assert curve is not None
    figure, axes = _axes(6.4, 3.8)
    chosen = study.row("bm25+max").chosen or {}
    for name, hits in curve.by_group.items():
        axes.plot(curve.alphas, hits, color=_FAINT, lw=1, label=f"{name}")
        if name in chosen:
            axes.plot(chosen[name], hits[curve.alphas.index(chosen[name])], "o", color=_QUIET, ms=3.5)
    axes.plot(curve.alphas, curve.everywhere, color=_COLOURS["bm25+max"], lw=2.2, label="all")
    handles = [axes.lines[-1]]
    names = ["all questions"]
    if curve.by_group:
        handles = [axes.lines[0], axes.lines[1], *handles]
        names = ["one conversation", "its alpha, chosen on the others", *names]
    axes.legend(handles, names, frameon=False, fontsize=8, labelcolor=_INK, loc="lower right")
    axes.set_xlabel("alpha, weight of BM25 (0: late max alone, 1: BM25 alone)", fontsize=8, color=_QUIET)
    axes.set_xlim(-0.02, 1.02)
    return _titled(figure, axes, study, "Hit@1 by the weight of BM25")


def _length(study: Study) -> Figure:
    figure, axes = _axes(5.2, 3.6)
    places = np.arange(len(study.lengths))
    for side, (key, means) in enumerate(
        (("early", [one.early for one in study.lengths]), ("max", [one.late for one in study.lengths]))
    ):
        heights = np.array(means, float)  # NaN, so no bar, where there is no mean
        bars = axes.bar(places + 0.36 * (side - 0.5), heights, 0.34, color=_COLOURS[key], label=_LABELS[key])
        axes.bar_label(bars, [number(mean, 3) for mean in means], fontsize=7, color=_QUIET)
    axes.set_xticks(places, [f"{one.turns}\n{one.gap.n:,} questions" for one in study.lengths])
    axes.set_xlabel("turns of the longest gold session", fontsize=8, color=_QUIET)
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="upper left")
    axes.margins(y=0.2)
    return _titled(figure, axes, study, "Hit@1 by length of session")


def _categories(study: Study) -> Figure:
    rows = [row for row in study.rows if row.key in _COLOURS]
    kinds = study.benchmark["categories"]
    figure, axes = _axes(max(6.4, 1.6 + 1.2 * len(kinds)), 3.8)  # as wide as the legend
    places, width = np.arange(len(kinds)), 0.8 / len(rows)
    for side, row in enumerate(rows):
        found = [row.categories[kind] for kind in kinds]
        means = np.array([one.mean if one.mean is not None else np.nan for one in found])
        ends = np.array([[one.low, one.high] if one.low is not None else [np.nan, np.nan] for one in found], float)
        error: Any = np.abs(ends.T - means)
        axes.bar(
            places + width * (side - (len(rows) - 1) / 2), means, 0.92 * width, yerr=error, color=_COLOURS[row.key],
            error_kw={"elinewidth": 0.8, "ecolor": _INK}, label=_LABELS[row.key],
        )  # fmt: skip
    shown = [kind if len(kind) <= 28 else f"{kind[:27]}…" for kind in kinds]
    names = [kind.replace("-", "-\n", 1) if len(kind) > 14 else kind for kind in shown]
    axes.set_xticks(places, [f"{name}\n{count:,}" for name, count in zip(names, kinds.values(), strict=True)])
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK, ncols=len(rows), loc="upper left")
    axes.margins(y=0.18)
    return _titled(figure, axes, study, "Hit@1 by category, with 95 % intervals")


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(width, height), dpi=DPI, layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)  # no window, whatever the user's settings say
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(labelsize=8, color=_FAINT, labelcolor=_QUIET)
    axes.grid(axis="y", color="#EEEEEE", lw=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _titled(figure: Figure, axes: Axes, study: Study, title: str) -> Figure:
    encoder = study.models.get("encoder")
    name = f", {encoder['name']}" if encoder else ""
    text = f"{study.benchmark['name']}{name}: {title}"
    axes.set_title(text, loc="left", fontsize=9, color=_INK)
    return figure


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
