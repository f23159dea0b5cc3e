"""What the commands that take ``--sweep`` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mia_serve.cli.common import check_output, check_outside, emit, write_file
from mia_serve.core.errors import MiaError

if TYPE_CHECKING:
    from mia_serve.eval.sweep import Sweep

SweepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=V,V",
        help="Vary a setting around its default, such as k_sum=1,3,5,auto or alpha=0,.5,1; may be given for several.",
    ),
]
GridOption = Annotated[bool, typer.Option("--grid", help="With --sweep: all combinations, not one at a time.")]
SweepPlotsOption = Annotated[str | None, typer.Option("--plots", metavar="DIR", help="With --sweep: pictures (PNG).")]


def check_sweep_outputs(sweep: list[str] | None, grid: bool, plots: str | None, json_to: str | None) -> None:
    """Refuse outputs that could not be written, before any work.

    Raises:
        ValueError: An option is for a sweep and there is none, or the folder is none or holds the JSON.
    """
    lone = "--grid" if grid else "--plots" if plots is not None else None
    if not sweep and lone is not None:
        raise ValueError(f"{lone} without --sweep: say what to vary, such as --sweep k_sum=1,3,5")
    if plots is None:
        return
    if plots.strip() in ("", "-"):
        raise MiaError(f"--plots {plots!r} is no folder; give one")
    if Path(plots).exists() and not Path(plots).is_dir():
        raise MiaError(f"--plots {plots!r} is a file; give a folder")
    if not Path(plots).is_dir():
        check_output(plots, "--plots")
    check_outside({"--json": json_to}, {"--plots": Path(plots)})
    from mia_serve.eval.study_plots import check_matplotlib

    check_matplotlib()


def write_sweep(study: Sweep, plots: str | None, json_to: str | None, more: dict[str, Any]) -> None:
    """Print a study, and write its pictures and JSON where they were asked for.

    Args:
        study: The study.
        plots: The ``--plots`` option.
        json_to: The ``--json`` option.
        more: Facts to add to the record's ``facts``.
    """
    if plots is not None:
        from mia_serve.eval.sweep_plots import sweep_plots

        drawn = sweep_plots(study)
        Path(plots).mkdir(exist_ok=True)
        for name, picture in drawn.items():
            write_file(Path(plots) / name, picture)
    record = study.to_dict()
    record["facts"] |= more
    emit(study.to_text(), record, json_to)
