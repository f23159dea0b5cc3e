"""Assemble the commands, and turn wrong input into one line and an exit code."""

from __future__ import annotations

import sys

import typer

from mia_train.cli import run

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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit 0 done, 1 failed, 2 wrong use with one line on standard error."""
    try:
        app(args=arguments)
    except (ValueError, FileNotFoundError) as error:
        from mia_serve.core.errors import MiaError

        if isinstance(error, ValueError) and not isinstance(error, MiaError):
            raise
        from mia_train.launch import process_count, process_rank

        rank = f"[process {process_rank()}] " if process_count() > 1 else ""
        typer.echo(f"{rank}error: {error}", err=True)
        sys.exit(2)
    except RuntimeError as error:
        if type(error).__name__ != "TrainingDiverged":  # known by name: its module would bring torch in
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
