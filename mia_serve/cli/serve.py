"""``mia-serve serve`` and ``mia-serve key``: the inference server, and who may use it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(help="Make, list and revoke the keys of a server.", no_args_is_help=True, rich_markup_mode=None)

KeysOption = Annotated[
    Path, typer.Option("--keys", metavar="FILE", help="The file that the server's configuration names under keys.")
]


class Role(StrEnum):
    """What a key may do; each includes the ones before."""

    read = "read"
    write = "write"
    admin = "admin"


def serve(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Such as recipes/serve_cpu.yaml.")],
    host: Annotated[Optional[str], typer.Option(help="Listen here instead.")] = None,  # noqa: UP045
    port: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, max=65535, help="Listen here instead; 0: a free one."),
    ] = None,
) -> None:
    """Serve embeddings, collections, search and answers over HTTP until Ctrl-C or SIGTERM.

    Requests under way are then finished, within the configuration's drain_s seconds.
    """
    from mia_serve.http.config import ServerConfig

    settings = ServerConfig.load(config, host=host, port=port)
    check_installed()
    from mia_serve.http.app import run

    run(settings)


def check_installed() -> None:
    """Refuse to go on without the packages of the server.

    Raises:
        MiaError: They are not installed.
    """
    from importlib.util import find_spec

    from mia_serve.core.errors import MiaError

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client", "limits", "orjson") if not find_spec(name)]
    if missing:
        raise MiaError(f"the server needs {', '.join(missing)}; pip install 'mia-retrieval[serve]'")


@app.callback()
def key() -> None:
    """Make, list and revoke the keys of a server."""


@app.command()
def add(
    keys: KeysOption,
    name: Annotated[str, typer.Option(help="Whose it is.")],
    role: Annotated[Role, typer.Option(help="read: search and embed; write: change collections; admin: all.")],
    requests: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--requests-per-minute", min=1, help="Its own limit; the configuration's by default."),
    ] = None,
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--tokens-per-minute", min=1, help="Its own limit of encoded tokens."),
    ] = None,
) -> None:
    """Make a key and print it; the file keeps its hash alone, so this is the only time that it is shown."""
    check_installed()
    from mia_serve.http.keys import add_key

    made, secret = add_key(keys, name, role.value, requests, tokens)
    typer.echo(f"key {made.id} of {made.name} ({made.role}); keep it, it is not shown again", err=True)
    typer.echo(secret)


@app.command(name="list")
def list_keys(keys: KeysOption) -> None:
    """List the keys: id, role, name, when they were made, and their own limits."""
    check_installed()
    from mia_serve.http.keys import read_keys

    for found in read_keys(keys):
        limits = [
            f"{amount} {what}/min"
            for what, amount in (("requests", found.requests_per_minute), ("tokens", found.tokens_per_minute))
            if amount is not None
        ]
        typer.echo("  ".join([found.id, f"{found.role:<5}", found.created, found.name, *limits]))


@app.command()
def revoke(keys: KeysOption, key_id: Annotated[str, typer.Argument(metavar="ID", help="Of `key list`.")]) -> None:
    """Take a key back; running servers refuse it within two seconds."""
    check_installed()
    from mia_serve.http.keys import revoke_key

    gone = revoke_key(keys, key_id)
    typer.echo(f"key {gone.id} of {gone.name} is revoked", err=True)
