"""``mia-serve mindscape``: build one from books and chats or a benchmark, add to it, and look at it."""

from __future__ import annotations

import typer

from mia_serve.cli.mindscape_append import append
from mia_serve.cli.mindscape_build import build
from mia_serve.cli.mindscape_show import show

app = typer.Typer(
    help="Build, extend and inspect mindscapes: chunks, sessions and their summaries.", no_args_is_help=True
)
app.command("build")(build)
app.command("append")(append)
app.command("show")(show)
