"""The vectors of an index: blocks as they came, in memory or mapped from a file, never joined into one array."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from mia_serve.index.vectors import Block

_MERGE_BYTES = 1 << 24  # neighbours of less together are joined, so that many small additions do not slow a search


class Span(NamedTuple):
    """Neighbouring positions: the first one, the block they lie in, and their rows there."""

    start: int
    block: int
    rows: slice


class VectorBlocks:
    """Vectors by position.

    Args:
        dim: Width d.
        device: Where tiles are wanted. A GPU keeps a copy of every block as it is stored, while there is room.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        self.dim, self.device = dim, device
        self.blocks: list[Block] = []
        self._ends = np.empty(0, np.int64)
        self._norms: list[float | None] = []
        self._own: list[bool] = []
        self._resident: dict[int, tuple[torch.Tensor, ...] | None] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def append(self, block: Block, own: bool) -> None:
        """Put a block at the end.

        Args:
            block: Not to be changed any more.
            own: Whether it is in memory and ours; small float32 blocks of that kind are joined with their neighbour.
        """
        if not len(block.data):
            return
        self._put(block, own, None)
        while len(self.blocks) > 1 and self._worth_merging():
            norms = self._norms[-2:]
            last, before = self._pop(), self._pop()
            joined = Block(np.concatenate([before.data, last.data]))
            self._put(joined, True, None if None in norms else max(n for n in norms if n is not None))
        self._ends = np.cumsum([len(b.data) for b in self.blocks])

    def spans(self, tall: int, start: int = 0) -> Iterator[Span]:
        """Cut the positions from start on into spans of at most tall vectors that lie in one block."""
        for number, block in enumerate(self.blocks):
            first = int(self._ends[number]) - len(block.data)
            for row in range(max(0, start - first), len(block.data), tall):
                yield Span(first + row, number, slice(row, min(row + tall, len(block.data))))

    def tile(self, span: Span) -> torch.Tensor:
        """Return the vectors of a span, (t, d) float32 on the device."""
        return self._decoded(span.block, span.rows)

    def tiles(self, tall: int, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first position, vectors) of each span."""
        for span in self.spans(tall, start):
            yield span.start, self.tile(span)

    def take(self, positions: np.ndarray) -> torch.Tensor:
        """Return the vectors at positions, (m, d) float32 on the device."""
        if len(self.blocks) == 1:
            return self._decoded(0, positions)
        taken = torch.empty((len(positions), self.dim), device=self.device)
        on_host = taken.numpy() if self.device.type == "cpu" else None
        number = np.searchsorted(self._ends, positions, side="right")
        for i in np.unique(number).tolist():
            here = np.flatnonzero(number == i)
            first = int(self._ends[i]) - len(self.blocks[i].data)
            found = self._decoded(i, positions[here] - first)
            if on_host is not None:  # few rows at a time: not worth waking torch's threads
                on_host[here] = found.numpy()
            else:
                taken[torch.from_numpy(here).to(self.device)] = found
        return taken

    def max_norm(self) -> float:
        """Return the length of the longest vector, rounded up; each block is read for it once."""
        for number, norm in enumerate(self._norms):
            if norm is None:
                rows = len(self.blocks[number].data)
                tall = max(1, (1 << 20) // self.dim)
                parts = [self._decoded(number, slice(row, row + tall)) for row in range(0, rows, tall)]
                self._norms[number] = 1.001 * max(float(torch.linalg.vector_norm(p, dim=1).max()) for p in parts)
        return max((norm for norm in self._norms if norm is not None), default=0.0)

    def keep(self, kept: np.ndarray) -> None:
        """Drop the positions that are False, a block at a time; a block that loses none stays as it is."""
        old, ends, norms, own = self.blocks, self._ends, self._norms, self._own
        self.blocks, self._norms, self._own, self._resident = [], [], [], {}
        for number in range(len(old)):
            block, old[number] = old[number], Block(np.empty((0, self.dim), np.float32))
            here = kept[ends[number] - len(block.data) : ends[number]]
            if here.all():
                self._put(block, own[number], norms[number])
            elif here.any():
                self._put(Block(block.data[here], block.ranges), True, norms[number])
        self._ends = np.cumsum([len(b.data) for b in self.blocks], dtype=np.int64)

    def _put(self, block: Block, own: bool, norm: float | None) -> None:
        self.blocks.append(block)
        self._own.append(own)
        self._norms.append(norm)

    def _pop(self) -> Block:
        self._own.pop()
        self._norms.pop()
        self._resident.pop(len(self.blocks) - 1, None)
        return self.blocks.pop()

    def _worth_merging(self) -> bool:
        before, last = self.blocks[-2:]
        plain = all(self._own[-2:]) and before.data.dtype == last.data.dtype == np.float32
        # A vector is copied a number of times that grows like the logarithm of the block.
        return (
            plain and before.data.nbytes + last.data.nbytes <= _MERGE_BYTES and len(before.data) <= 2 * len(last.data)
        )

    def _decoded(self, number: int, rows: slice | np.ndarray) -> torch.Tensor:
        block = self.blocks[number]
        if self.device.type != "cpu":
            resident = self._on_device(number)
            if resident is not None:
                where = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.device)
                return decode_tensor(resident[0][where], *resident[1:])
        ranges = None if block.ranges is None else torch.from_numpy(block.ranges)
        return decode_tensor(torch.from_numpy(block.data[rows]), ranges).to(self.device)

    def _on_device(self, number: int) -> tuple[torch.Tensor, ...] | None:
        if number not in self._resident:
            block = self.blocks[number]
            try:
                self._resident[number] = tuple(torch.from_numpy(a).to(self.device) for a in block if a is not None)
            except torch.cuda.OutOfMemoryError:
                self._resident[number] = None  # its tiles are sent over in each search
        return self._resident[number]


def decode_tensor(data: torch.Tensor, ranges: torch.Tensor | None = None) -> torch.Tensor:
    """Do what ``vectors.decode`` does, to the same bits (no step is fused with the next), on any device and faster."""
    values = data.float()
    return values if ranges is None else values.add_(128.0).mul_(ranges[1]).add_(ranges[0])
