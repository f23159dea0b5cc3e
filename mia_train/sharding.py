"""Sharded parameters (FSDP 2, DeepSpeed ZeRO): whole weights out of shards and back, and FSDP on the CPU.

What is trained does not depend on how it is sharded: compute in bfloat16 is entered by :class:`MiaModel` itself, so
neither library is asked for it (accelerate's FSDP policy would round the gradients, and even the unit vectors that the
loss is made of, to bfloat16; DeepSpeed would train bfloat16 copies of the adapters).
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mia_serve.core import Encoder
from mia_serve.core.load import save_parts

PREFIX = "backbone."  # of the encoder's parameters inside MiaModel


def is_fsdp() -> bool:
    """Return whether the launcher asked for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def is_deepspeed() -> bool:
    """Return whether the launcher asked for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def backend_arguments(bf16: bool) -> dict[str, Any]:
    """Return the arguments of ``TrainingArguments`` for device, process group and precision.

    Args:
        bf16: Whether the recipe computes in bfloat16.
    """
    cpu = not torch.cuda.is_available()
    if is_deepspeed():  # never engaged where the Trainer is told to use the CPU, so it is told the backend alone
        return {"bf16": False, "ddp_backend": "gloo" if cpu else None, "dataloader_pin_memory": not cpu}
    return {"bf16": bf16 and not is_fsdp(), "use_cpu": cpu, "dataloader_pin_memory": not cpu}


def shard_on_cpu() -> None:
    """Let FSDP run on processes that talk over gloo; call it after the process group is up.

    accelerate 1.15 turns only its kinds of accelerators into FSDP and would train copies on the CPU without a word.
    Nothing but that list depends on the kind.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState()
    if is_fsdp() and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def gather_weights(model: nn.Module, trained_only: bool) -> dict[str, Tensor]:
    """Return the whole weights of a model under FSDP, on the CPU of rank 0 (empty on the others); collective.

    Args:
        model: The sharded :class:`MiaModel`.
        trained_only: Leave out what is frozen: with adapters, the base is not gathered at every checkpoint.

    Returns:
        By name in ``model``.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_only)
    return cast(dict[str, Tensor], get_model_state_dict(model, options=options))


def scatter_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put rank 0's whole weights into the shards of a model under FSDP; collective.

    Args:
        model: The sharded :class:`MiaModel`.
        weights: By name in the encoder's model; only rank 0's count. What is not named keeps its value.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, {PREFIX + name: weight for name, weight in weights.items()}, options=options)


def save_encoder(encoder: Encoder, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write an encoder folder as :meth:`Encoder.save` does.

    Args:
        encoder: The encoder.
        folder: Where to.
        weights: By name in :class:`MiaModel`, written in place of its own, which are shards; with adapters those alone
            will do.
    """
    if weights is None:
        encoder.save(folder)
        return
    own = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
    backbone: Any = encoder.model
    writer: Any = SimpleNamespace(save_pretrained=lambda path: backbone.save_pretrained(path, state_dict=own))
    save_parts(writer, encoder.tokenizer, encoder.spec, folder)
