"""``mia-serve serve-ray``: replicas of the encoders and shards of the collections, on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve_ray(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="As for serve; the same path on every node.")],
    address: Annotated[
        str, typer.Option(help="HOST:PORT of a Ray cluster, auto: the one that runs here, or local: this machine.")
    ] = "local",
    shards: Annotated[int, typer.Option(min=1, help="Parts of a collection, by whole books.")] = 2,
    encoders: Annotated[int, typer.Option(min=1, help="Replicas of each encoder, each on a GPU where there are.")] = 1,
    copies: Annotated[int, typer.Option(min=1, help="Replicas of each shard.")] = 1,
    fronts: Annotated[int, typer.Option(min=1, help="Replicas of the HTTP side.")] = 1,
    cpus: Annotated[float, typer.Option(min=0.01, help="CPUs that each encoder and shard reserves.")] = 1.0,
) -> None:
    """Serve the collections of a stopped server read-only from many machines, until Ctrl-C or SIGTERM.

    Embeddings, rerank, dense search and signatures give what one machine gives.
    """
    from mia_serve.cli.serve import check_installed
    from mia_serve.http.config import ServerConfig

    settings = ServerConfig.load(config)
    check_installed()
    from mia_serve.http.ray_serve import plan_service, run

    run(plan_service(settings, shards, encoders, copies, fronts, cpus), address)
