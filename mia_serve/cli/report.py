"""``mia-serve report``: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from mia_serve.cli.common import check_output, write_file


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of `mia-serve eval NAME --out RUN`.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--out", metavar="FILE", help="Page to write.  [default: RUN/report.html]"),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Questions that can be opened, spread evenly over the run; all by default."),
    ] = None,
) -> None:
    """Write one self-contained HTML page: tables with intervals, and the map of the book for each question."""
    target = out if out is not None else run / "report.html"
    from mia_serve.core import MiaError

    if str(out) == "-":
        raise MiaError("--out - : a page is no text for a terminal; give a file")
    if out is not None:
        check_output(out, "--out")
    from mia_serve.eval.page import build_page

    if run.resolve() in target.resolve().parents and target.suffix != ".html":
        raise MiaError(f"--out {str(target)!r} is among the files of the run; give a name that ends in .html")
    page = build_page(run, limit)
    write_file(target, page)
    typer.echo(f"{target}: {len(page.encode()) / 1e6:.1f} MB")
