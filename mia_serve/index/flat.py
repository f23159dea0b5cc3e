"""Inner products in real float32, on torch or FAISS: the fast first stage, and how far off it can be."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mia_serve.core.errors import MiaError

# What torch.compile calls for a linear layer: oneDNN, which uses AVX-512 on every CPU that has it, where the BLAS
# behind torch's own product uses AVX2 unless the CPU is Intel's; twice as fast there, the same elsewhere.
_ONEDNN: Any = getattr(getattr(torch.ops, "mkldnn", None), "_linear_pointwise", None)

_threads_used_in: int | None = None  # process that searched with several threads
_lock = threading.Lock()
_users: dict[str, int] = {}  # searches under way, by kind of device
_before: dict[str, str] = {}  # setting to put back after the last of them


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Keep matrix products in real float32, whatever autocast, TF32 or bf16 settings the caller runs under.

    The precision is a setting of the process; it is put back when the last thread that is in here leaves.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    backends: Any = torch.backends.cuda if kind == "cuda" else torch.backends.mkldnn
    with _lock:
        if not _users.get(kind):
            _before[kind] = backends.matmul.fp32_precision
        _users[kind] = _users.get(kind, 0) + 1
        backends.matmul.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False), torch.inference_mode():
            yield
    finally:
        with _lock:
            _users[kind] -= 1
            if not _users[kind]:
                backends.matmul.fp32_precision = _before[kind]


def product(queries: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Multiply (n, d) by the transpose of (t, d), both float32, within ``full_float32``; (n, t) float32."""
    if _ONEDNN is not None and queries.device.type == "cpu" and torch.backends.mkldnn.is_available():
        return _ONEDNN(queries, vectors, None, "none", [], "")
    return queries @ vectors.T


def margin(queries: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Bound how far ``product`` is from the true inner product with a vector of at most max_norm, (n,) float32.

    γ_d · ‖q‖ · ‖x‖ with γ_d = d·u / (1 − d·u) and u = 2⁻²⁴ holds for any order of the sum, with and without fused
    multiply-add (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §3.1), and 2⁻¹²⁶ a term for what
    underflows. Four terms more and one per cent cover the float32 sums that a caller makes of scores and margins.
    """
    terms = queries.shape[1] + 4
    gamma = terms * 2.0**-24 / (1 - terms * 2.0**-24)
    norms = np.linalg.norm(queries.cpu().numpy().astype(np.float64), axis=1)
    bound = 1.01 * (gamma * max_norm * norms + terms * 2.0**-126)
    return torch.from_numpy(bound.astype(np.float32)).to(queries.device)


def check_process() -> None:
    """Refuse what would hang: several threads in a process forked off one that has searched with several.

    Raises:
        MiaError: In such a process.
    """
    global _threads_used_in
    if torch.get_num_threads() == 1:
        return
    if _threads_used_in not in (None, os.getpid()):
        raise MiaError(
            "this process was forked after a search, and the OpenMP threads of its parent do not exist here: start "
            "processes by 'spawn' or 'forkserver', or call torch.set_num_threads(1) first"
        )
    _threads_used_in = os.getpid()


def import_faiss() -> Any:
    """Import FAISS on demand.

    Raises:
        MiaError: If it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise MiaError(
            "backend 'faiss' needs the package faiss-cpu (or faiss-gpu): pip install faiss-cpu, or backend='torch'"
        ) from error
    return faiss
