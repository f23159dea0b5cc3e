"""The few collective operations that training needs beside DDP: a gather with a gradient, and rank-0-only work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mia_serve.core.errors import MiaError

T = TypeVar("T")


def is_distributed() -> bool:
    """Return whether a process group with more than one process is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """Return the number of processes, 1 outside a process group."""
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    """Return this process's rank, 0 outside a process group."""
    return dist.get_rank() if is_distributed() else 0


def is_main() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension whose backward sums the gradient over the ranks.

    ``accelerator.gather`` and plain ``all_gather`` have no gradient, and the gather of ``torch.distributed.nn`` is
    deprecated in torch 2.13 for one that older versions lack; these lines do the same on every version and backend.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return _gather_plain(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total[rank() * ctx.rows : (rank() + 1) * ctx.rows]


def _gather_plain(x: Tensor) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def all_gather(x: Tensor) -> Tensor:
    """Concatenate ``x`` of all ranks along the first dimension, in rank order; differentiable for float tensors.

    A loss that each rank averages over its own rows, differentiated through this gather, gives under DDP's averaging
    the gradient that one process has over the whole batch. No further factor of the world size belongs anywhere.

    Args:
        x: (n, ...) tensor with the same shape on every rank.

    Returns:
        (world_size * n, ...)
    """
    if not is_distributed():
        return x
    if not x.is_floating_point():
        return _gather_plain(x.to(torch.uint8) if x.dtype is torch.bool else x).to(x.dtype)
    return _Gather.apply(x)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of ``x`` over all ranks (no gradient)."""
    if not is_distributed():
        return x
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def max_over_ranks(x: Tensor) -> Tensor:
    """Return the elementwise maximum of ``x`` over all ranks (no gradient)."""
    if not is_distributed():
        return x
    most = x.detach().clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most


def gather_objects(value: T) -> list[T]:
    """Return every rank's picklable value, in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def on_main(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 only and return its result on every rank.

    An exception of rank 0 is raised on every rank, so that none waits for ever in the next collective.
    """
    if not is_distributed():
        return work()
    box: list[Any] = [None]
    failure: BaseException | None = None
    if is_main():
        try:
            box = [(work(), None)]
        except Exception as error:
            failure = error
            user = isinstance(error, MiaError)
            box = [(None, MiaError(str(error)) if user else RuntimeError(f"rank 0: {type(error).__name__}: {error}"))]
    dist.broadcast_object_list(box, src=0)
    result, raised = box[0]
    if failure is not None:
        raise failure
    if raised is not None:
        raise raised
    return result


def barrier() -> None:
    """Wait for all ranks."""
    if is_distributed():
        dist.barrier()
