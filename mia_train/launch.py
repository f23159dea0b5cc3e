"""What the launcher started, checked before any weights load.

``accelerate launch --cpu --num_processes 2`` (accelerate 1.15) starts one process and says nothing; the run would then
train with half the batch. The trace it leaves is a rendezvous address without ranks, which is what is looked for here.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from mia_serve.core.errors import MiaError

# mpirun's own names for the number of processes; accelerate reads the same ones.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_TWO_PROCESSES = "accelerate launch --config_file recipes/accelerate/cpu2.yaml -m mia_train run RECIPE"


def process_count(environment: MutableMapping[str, str] | None = None) -> int:
    """Return the number of processes that the launcher says there are (1 without a launcher)."""
    environment = os.environ if environment is None else environment
    for name in ("WORLD_SIZE", *_MPI_SIZES):
        if environment.get(name, "").isdigit():
            return max(int(environment[name]), 1)
    return 1


def process_rank(environment: MutableMapping[str, str] | None = None) -> int:
    """Return this process's rank (0 without a launcher)."""
    environment = os.environ if environment is None else environment
    value = environment.get("RANK", "")
    return int(value) if value.isdigit() else 0


def prepare_launch(environment: MutableMapping[str, str] | None = None) -> int:
    """Refuse a launch that is not what was asked for, and set up the environment for the one that is.

    Call it before transformers is imported: a launch of several processes on a machine without accelerators is sent to
    the CPU backend (which accelerate only does when told), and a run without a launcher is held to one device (which
    ``transformers.Trainer`` would otherwise spread over all GPUs with ``DataParallel``).

    Args:
        environment: Changed in place; None: this process's.

    Returns:
        Number of processes.

    Raises:
        MiaError: Fewer processes than the launcher was asked for, or more than this machine has devices.
    """
    environment = os.environ if environment is None else environment
    count = process_count(environment)
    by_mpi = any(name in environment for name in _MPI_SIZES)
    has_rank = "LOCAL_RANK" in environment and "RANK" in environment
    if count > 1 and not has_rank and not by_mpi:
        raise MiaError(
            f"WORLD_SIZE={count}, but RANK and LOCAL_RANK are not set, so the other processes do not exist; "
            f"use torchrun, or `{_TWO_PROCESSES}`, or unset WORLD_SIZE"
        )
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environment
    if by_accelerate and not has_rank and not by_mpi and {"MASTER_ADDR", "MASTER_PORT"} <= set(environment):
        raise MiaError(
            "accelerate was asked for more than one process but started only this one (so it does with --cpu and with "
            f"distributed_type MULTI_CPU); use `{_TWO_PROCESSES}`, or --num_processes 1, or, if the shell sets "
            "MASTER_ADDR, unset it"
        )
    if count == 1:
        first = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment["CUDA_VISIBLE_DEVICES"] = first
    elif environment.get("ACCELERATE_USE_CPU", "false").lower() not in ("true", "1", "yes"):
        import torch

        local = int(environment.get("LOCAL_WORLD_SIZE", count))
        devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        if devices == 0:
            environment["ACCELERATE_USE_CPU"] = "true"
        elif local > devices:
            raise MiaError(
                f"the launcher started {local} processes on this machine, which has {devices} device(s); "
                f"use --num_processes {devices}, or ACCELERATE_USE_CPU=true to train on CPU"
            )
    _prepare_sharding(environment)
    return count


def _prepare_sharding(environment: MutableMapping[str, str]) -> None:
    """Refuse what the training loop does not do under FSDP, and engage DeepSpeed on the CPU."""
    is_set = lambda name: environment.get(name, "false").lower() in ("true", "1", "yes")  # noqa: E731
    fsdp, deepspeed = is_set("ACCELERATE_USE_FSDP"), is_set("ACCELERATE_USE_DEEPSPEED")
    if fsdp and environment.get("FSDP_VERSION", "1") != "2":
        raise MiaError(
            f"fsdp_config.fsdp_version is {environment.get('FSDP_VERSION', '1')}; allowed: 2; see "
            "recipes/accelerate/fsdp.yaml"
        )
    if fsdp and is_set("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise MiaError(
            "fsdp_config.fsdp_cpu_ram_efficient_loading is true; allowed: false: every process reads the weights itself"
        )
    if deepspeed and is_set("ACCELERATE_USE_CPU"):
        # accelerate engages no DeepSpeed where it is told to use the CPU, but does where it is told the device alone.
        environment.pop("ACCELERATE_USE_CPU")
        environment["ACCELERATE_TORCH_DEVICE"] = environment["DS_ACCELERATOR"] = "cpu"
    if fsdp or deepspeed:  # the recipe's training.bf16 decides, and MiaModel does what it says
        environment["ACCELERATE_MIXED_PRECISION"] = "no"


def check_world(joined: int, environment: MutableMapping[str, str] | None = None) -> None:
    """Refuse to train when fewer processes joined the group than were launched.

    Args:
        joined: World size that the trainer sees, ``TrainingArguments.world_size``.
        environment: As for :func:`prepare_launch`.
    """
    asked = process_count(environment)
    if joined != asked:
        raise MiaError(
            f"{asked} processes were launched but {joined} joined, so each would train alone; "
            f"launch with torchrun or `{_TWO_PROCESSES}`"
        )
