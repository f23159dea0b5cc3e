"""``mia-train plot``: the logs of runs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Output folders of runs, drawn over each other.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.png", help="Picture to write.")],
) -> None:
    """Draw the logs of one or several runs: losses, gradients, similarities, speed and evaluations by step."""
    from mia_serve.cli.common import check_output
    from mia_serve.core.errors import MiaError
    from mia_train.plot import save_plot

    if out.suffix.lower() != ".png":
        raise MiaError(f"--out {str(out)!r}: pictures are written as .png; give such a name")
    check_output(out, "--out")
    panels = save_plot(runs, out)
    typer.echo(f"{out}: {len(runs)} run{'s' if len(runs) > 1 else ''}, {len(panels)} panels ({', '.join(panels)})")
