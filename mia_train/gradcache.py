"""The gradient cache: a contrastive batch of any size in small forwards, with the gradient of one large one.

The loss of a contrastive batch needs all vectors at once, the backbone's activations only those of the texts that are
being differentiated. So (Gao et al., 2021) every group of texts is embedded without a graph; the loss is differentiated
with respect to the vectors; then each group is embedded again, with a graph, and the vectors' gradient is sent through.
The random state of every first forward is put back before the second, so dropout masks are the same and the gradient
is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from mia_serve.core import SequenceBatch

Out = TypeVar("Out")
Forward = Callable[[Sequence[SequenceBatch]], Tensor]


def cached_backward(
    forward: Forward,
    groups: Sequence[SequenceBatch],
    loss_of: Callable[[Tensor], tuple[Tensor, Out]],
    *,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    rounds: int | None = None,
) -> Out:
    """Add the gradient of a loss over all groups' vectors to the parameters, holding one group's activations at a time.

    Args:
        forward: Embeds groups: (R_g, d) vectors, readouts of the groups one after the other.
        groups: At least one group; their order is that of ``loss_of``'s rows.
        loss_of: Takes the (R, d) vectors of all groups and returns the scalar to differentiate and whatever else the
            caller wants. Collective operations belong here, not in ``forward``.
        no_sync: Makes a context that holds back the averaging of gradients over the processes; entered for all second
            forwards but the last, so that they are averaged once.
        rounds: Forwards to make, at least ``len(groups)``. With sharded parameters every forward is collective, so all
            processes must make as many: the shortest group is forwarded again, and adds nothing.

    Returns:
        The second value of ``loss_of``.
    """
    device = groups[0].input_ids.device
    spare = [min(groups, key=lambda group: group.input_ids.numel())] * max(0, (rounds or 0) - len(groups))
    states: list[_RandomState] = []
    parts: list[Tensor] = []
    with torch.no_grad(), no_sync():
        for group in spare:
            forward([group])
        for group in groups:
            states.append(_RandomState(device))
            parts.append(forward([group]))
    vectors = torch.cat(parts).requires_grad_()
    loss, out = loss_of(vectors)
    loss.backward()
    assert vectors.grad is not None
    gradients = vectors.grad.split([len(part) for part in parts])
    for group in spare:
        with no_sync():
            (forward([group]).sum() * 0.0).backward()
    for i, (group, state, gradient) in enumerate(zip(groups, states, gradients, strict=True)):
        with nullcontext() if i == len(groups) - 1 else no_sync():
            with state.restored():
                again = forward([group])
            again.backward(gradient)
    return out


class _RandomState:
    """The state of the random generators of the CPU and of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put this state back inside the context, and the present one after it."""
        with torch.random.fork_rng(devices=[self.device] if self.on_device is not None else []):
            torch.set_rng_state(self.cpu)
            if self.on_device is not None:
                torch.cuda.set_rng_state(self.on_device, self.device)
            yield
