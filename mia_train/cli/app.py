"""Assemble the commands, and turn wrong input into one line and an exit code."""

from __future__ import annotations

import sys

import typer

from mia_serve.cli.app import exit_code
from mia_train.cli import merge, mine, plot, run, silver
from mia_train.launch import process_count, process_rank

app = typer.Typer(
    name="mia-train",
    help="Train the MiA retrievers E1 (query alone) and E2 (query with signature).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would double the time of --help
)
app.command("run")(run.run)
app.command("check")(run.check)
app.command("plot")(plot.plot)
app.command("merge")(merge.merge)
app.command("silver")(silver.silver)
app.command("mine")(mine.mine)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit 0 done, 1 failed, 2 wrong use with one line on standard error."""
    try:
        app(args=arguments)
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        rank = f"[process {process_rank()}] " if process_count() > 1 else ""
        typer.echo(f"{rank}error: {' '.join(str(error).split())}", err=True)
        sys.exit(code)
