"""``mia-serve env``: what a bug report or a benchmark has to say about the machine."""

from __future__ import annotations

import os
import platform
from typing import Any

from mia_serve.cli.common import JsonOption, emit


def env(json_to: JsonOption = None) -> None:
    """Print versions, devices and thread pools."""
    record = environment()
    lines = [f"{name:<22}{version or 'not installed'}" for name, version in record["versions"].items()]
    lines += [f"{name:<22}{record[name]}" for name in ("system", "cpus")]
    lines += [f"{'device':<22}{device}" for device in record["devices"]]
    lines += [
        f"{'threads':<22}{pool['num_threads']} ({pool['user_api']}, {pool['internal_api']})"
        for pool in record["threads"]
    ]
    emit("\n".join(lines) + "\n", record, json_to)


def environment() -> dict[str, Any]:
    """Collect versions, devices and thread pools, JSON-ready."""
    import threadpoolctl
    import torch

    from mia_serve.eval.versions import package_versions

    devices = ["cpu"]
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        devices.append(f"cuda:{i} {facts.name}, {facts.total_memory / 2**30:.0f} GiB")
    pools = threadpoolctl.threadpool_info()
    return {
        "versions": package_versions(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": devices,
        "threads": [{key: pool[key] for key in ("user_api", "internal_api", "num_threads")} for pool in pools],
    }
