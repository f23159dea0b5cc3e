"""Assemble the commands, and turn wrong input into one line and an exit code."""

from __future__ import annotations

import dis
import os
import sys
from types import TracebackType

import typer

from mia_serve.cli import ask, embed, env, evaluate, index, llm, mindscape, report, search, serve, serve_ray

#: Exit codes: done, failed, wrong use.
DONE, FAILED, WRONG_USE = 0, 1, 2

app = typer.Typer(
    name="mia-serve",
    help="Build mindscapes, choose signatures, search and evaluate.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help starts twice as fast as the decorated one; plain tracebacks are left to Python.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(mindscape.app, name="mindscape")
app.command("embed")(embed.embed)
app.add_typer(index.app, name="index")
app.command("search")(search.search)
app.command("signature")(search.signature)
app.command("ask")(ask.ask)
app.add_typer(evaluate.app, name="eval")
app.add_typer(llm.app, name="llm")
app.command("serve")(serve.serve)
app.command("serve-ray")(serve_ray.serve_ray)
app.add_typer(serve.app, name="key")
app.command("report")(report.report)
app.command("env")(env.env)


def main() -> None:
    """Run the command line; exits 0 when done, 1 when something failed, 2 on wrong use."""
    if not sys.stderr.isatty():
        # Bars are for people; in a log they are thousands of lines. Both are read when their library is imported.
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing is wrong. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        typer.echo("error: " + " ".join(str(error).split()), err=True)
        sys.exit(code)


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of an error that the user can act on, or None for a bug, which keeps its traceback."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return WRONG_USE
    if isinstance(error, OSError):
        return FAILED
    ours = _raised_by_us(error.__traceback__)
    if isinstance(error, ValueError) and ours:
        return WRONG_USE
    return FAILED if isinstance(error, RuntimeError) and ours else None


def _raised_by_us(trace: TracebackType | None) -> bool:
    """Tell whether a ``raise`` of ours made the error: a ValueError out of a library, or out of ``zip``, is a bug."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    ours = str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("mia_serve", "mia_train")
    return ours and dis.opname[frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
