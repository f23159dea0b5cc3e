"""``mia-serve llm up``: a language model behind the OpenAI protocol, by vLLM."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(help="Run a language model.", no_args_is_help=True, rich_markup_mode=None)


class Place(StrEnum):
    """Where the model runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.callback()
def llm() -> None:
    """Run a language model."""


@app.command()
def up(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id.")],
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="-- ARGUMENT", help="Further arguments of `vllm serve`, behind --."),
    ] = None,
    port: Annotated[Optional[int], typer.Option(min=1, max=65535, help="A free one by default.")] = None,  # noqa: UP045
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Name to serve it by; the folder's name or the hub id by default."),
    ] = None,
    python: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FILE", help="Interpreter that has vLLM; $MIA_VLLM_PYTHON, this one, or that of `vllm` by default."
        ),
    ] = None,
    device: Annotated[Place, typer.Option(help="Where it runs; auto looks for a GPU.")] = Place.auto,
    log: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Add vLLM's output to this file."),
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option("--startup-timeout", min=1, metavar="SECONDS", help="Until it must answer.")
    ] = 600,
) -> None:
    """Serve a model with vLLM on 127.0.0.1, print its address for --llm, and stop with Ctrl-C or SIGTERM.

    vLLM has an environment of its own: pip install vllm 'cuda-bindings<13.5' with a GPU, scripts/setup_vllm_cpu.sh on a
    CPU.
    """
    import signal

    from mia_serve.llm.engine import Engine, EngineFailed, find_python

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's wish stays
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
    ready, python = False, find_python(python)
    typer.echo(f"starting vLLM; {f'its log is {log}' if log else '--log FILE would keep its output'}", err=True)
    try:
        with Engine(
            model,
            python=python,
            port=port,
            name=name,
            arguments=arguments or (),
            log=log,
            startup_timeout=startup_timeout,
            device=device.value,
        ) as engine:
            ready = True
            typer.echo(f"{engine.model} is served at {engine.url} until Ctrl-C", err=True)
            typer.echo(engine.url)
            engine.wait()
    except KeyboardInterrupt:
        typer.echo("stopped" if ready else "stopped before it was ready", err=True)
        raise typer.Exit(0 if ready else 1) from None
    except EngineFailed as failure:
        typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(1) from None
