"""A service on Ray Serve: replicas of the encoders, shards of the collections, and fronts that speak HTTP."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from mia_serve.core.errors import MiaError
from mia_serve.http.config import LOCAL_HOSTS, EncoderConfig, ServerConfig
from mia_serve.http.ray_cluster import connected
from mia_serve.http.ray_replicas import APP, EncoderReplica, RayPlan, Refusal, ShardReplica
from mia_serve.http.ray_shards import split_books

_STOPPING_S = 30.0
_QUEUED = 4096  # requests that one replica takes at a time; the encoders' own queue bounds the work


def find_collections(data: Path) -> dict[str, tuple[Path, int]]:
    """Return folder and version of every mindscape in a server's data folder: its collections, and bare mindscapes.

    Raises:
        MiaError: There are none.
    """
    found: dict[str, tuple[Path, int]] = {}
    for folder in sorted(data.iterdir()) if data.is_dir() else []:
        if (folder / "collection.json").is_file():
            facts = json.loads((folder / "collection.json").read_text(encoding="utf-8"))
            if facts.get("checkpoint"):
                found[folder.name] = (folder / facts["checkpoint"], int(facts["version"]))
        elif (folder / "manifest.json").is_file():
            found[folder.name] = (folder, 0)
    if not found:
        raise MiaError(f"{data} holds no collection with anything in it: fill one with `mia-serve serve`, stop that")
    return found


def plan_service(config: ServerConfig, shards: int, encoders: int, copies: int, fronts: int, cpus: float) -> RayPlan:
    """Part the collections of a configuration's data folder.

    Raises:
        MiaError: There are none, or the configuration asks for what is not offered on Ray.
    """
    if not config.port:
        raise MiaError("port 0: on Ray give the port that all fronts listen on")
    for role, encoder in (("e1", config.e1), ("e2", config.e2)):
        if encoder is not None and encoder.backend != "torch":
            raise MiaError(f"{role}.backend is {encoder.backend!r}: on Ray encoders are replicas of 'torch'")
    found = find_collections(config.data)
    spans = {name: split_books(folder, shards) for name, (folder, _) in found.items()}
    return RayPlan(config, spans, {name: v for name, (_, v) in found.items()}, encoders, copies, fronts, cpus)


def application(plan: RayPlan, gpus: float = 0) -> Any:
    """Return the Ray Serve application; gpus: what the cluster has."""
    from ray import serve

    deployment: Any = serve.deployment  # whose type says that it is a decorator only

    def on_gpu(encoder: EncoderConfig) -> int:
        return int(encoder.device.startswith("cuda") or (encoder.device == "auto" and gpus > 0))

    parts = []
    for name, encoder in (("e1", plan.config.e1), ("e2", plan.config.e2)):
        if encoder is not None:
            options: dict[str, Any] = {"num_cpus": plan.cpus, "num_gpus": on_gpu(encoder)}
            deployed = deployment(EncoderReplica, name=name).options(
                num_replicas=plan.encoders, ray_actor_options=options, max_ongoing_requests=_QUEUED
            )
            parts.append(deployed.bind(encoder, plan.config))
    for i in range(plan.shards):
        spans = {name: spans[i] for name, spans in plan.collections.items() if i < len(spans)}
        deployed = deployment(ShardReplica, name=f"shard-{i}").options(
            num_replicas=plan.copies, ray_actor_options={"num_cpus": plan.cpus}, max_ongoing_requests=_QUEUED
        )
        parts.append(deployed.bind(spans))

    def build() -> Any:
        from mia_serve.http.ray_front import create_front  # which the other replicas need not import

        return create_front(plan)

    front = deployment(serve.ingress(build)(), name="front").options(
        num_replicas=plan.fronts, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_QUEUED
    )
    return front.bind(*parts)


def start(plan: RayPlan) -> None:
    """Start the service on the cluster that this process is connected to, and wait until every part answers.

    Raises:
        MiaError: A collection keeps no vectors of an encoder.
        RuntimeError: A part could not be started.
    """
    import ray
    from ray import serve

    config = plan.config
    where = "HeadOnly" if config.host in LOCAL_HOSTS else "EveryNode"
    serve.start(proxy_location=where, http_options={"host": config.host, "port": config.port})
    try:
        try:
            serve.run(application(plan, ray.cluster_resources().get("GPU", 0)), name=APP, route_prefix="/")
        except RuntimeError as error:
            raise RuntimeError(f"Ray Serve could not start the service: {_why() or error}") from error
        roles = ["e1"] if config.e2 is None else ["e1", "e2"]
        handles = {name: serve.get_deployment_handle(name, app_name=APP) for name in roles}
        hashes = [handle.facts.remote().result().spec_hash for handle in handles.values()]
        for name, spans in plan.collections.items():
            shards = [serve.get_deployment_handle(f"shard-{i}", app_name=APP) for i in range(len(spans))]
            for answer in [shard.ask.remote(name, "warm", hashes) for shard in shards]:
                found = answer.result()
                if isinstance(found, Refusal):
                    raise MiaError(found.message)
    except BaseException:
        with contextlib.suppress(Exception):
            serve.delete(APP)
        raise


def run(plan: RayPlan, address: str) -> None:
    """Serve until SIGTERM or Ctrl-C, then take the service down; the cluster stays, unless it is of "local".

    Raises:
        MiaError: Ray is not installed, no cluster is there, or a collection keeps no vectors of an encoder.
        RuntimeError: A part could not be started.
    """
    # CPUs are only counted here: on this machine alone all parts must have room, however few it has.
    room = {"num_cpus": max(os.cpu_count() or 1, math.ceil(plan.reserved))} if address == "local" else {}
    over = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            _start(plan)
        except BaseException as error:
            failed.append(error)
            over.set()

    with connected(address, **room):
        from ray import serve

        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has set its own
            signal.signal(number, lambda *_: over.set())
        # In a thread, since starting may wait for nodes for hours and Ray's calls are not to be interrupted.
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        over.wait()
        error = failed[0] if failed else None
        with contextlib.suppress(Exception):
            serve.delete(APP)
            if address == "local":
                serve.shutdown()
        worker.join(_STOPPING_S)  # its calls fail now; Ray is not to be let go of while one is under way
        if error is not None:
            raise error


def _start(plan: RayPlan) -> None:
    import ray

    there = ray.cluster_resources().get("CPU", 0)
    if plan.reserved > there:
        _say(f"{plan.reserved:g} CPUs are asked for, {there:g} are there: waiting for nodes (see --cpus)")
    start(plan)
    counts = f"{plan.shards} shards x {plan.copies}, encoders x {plan.encoders}, fronts x {plan.fronts}"
    where = f"http://{plan.config.host}:{plan.config.port}"
    _say(f"serving {', '.join(sorted(plan.collections))} on {where} ({counts})")


def _why() -> str:
    """Return the last line of what Ray Serve says of each part that failed."""
    from ray import serve

    app = serve.status().applications.get(APP)
    parts = {} if app is None else app.deployments
    said = {name: part.message.strip().splitlines() for name, part in parts.items() if part.message}
    return "; ".join(f"{name}: {lines[-1]}" for name, lines in said.items() if "FAILED" in str(parts[name].status))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
