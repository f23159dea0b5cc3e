"""One decision about where a model runs and in which number format."""

from __future__ import annotations

import torch

from mia_serve.core.errors import MiaError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device for ``auto`` (CUDA where there is one) or for a name such as ``cpu`` or ``cuda:1``."""
    if isinstance(device, torch.device):
        return device
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MiaError(f"device {device!r} was asked for, but torch sees no CUDA device; use 'cpu' or 'auto'")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise MiaError(f"device {device!r}; allowed: auto, cpu, cuda, cuda:1 … or another that torch knows") from error


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the number format of the weights: ``auto`` is bfloat16 on CUDA and float32 elsewhere."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in _DTYPES:
        raise MiaError(f"dtype {dtype!r}; allowed: auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]
