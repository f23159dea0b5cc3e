"""Which row comes when: the whole run as one list that every process and every resumed run reads alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from mia_serve.core import MiaError
from mia_train.rows import Row, id_key

_ORDER, _MIX = 0, 2  # streams of random numbers under one seed (the collator draws from stream 1)
_ROUNDING = 1e-9


class Sample(NamedTuple):
    """A row at its place in the schedule."""

    row: Row
    number: int  # of the row in the data
    epoch: int  # how often the data (with a mixture: the row's source) was passed before


class Schedule(Dataset[Sample]):
    """The whole run as one list: item i is what the i-th sample of the run is, whoever processes it.

    Each pass over the data is a fresh permutation that holds every row once. Read in order, by one process or by
    several that take every W-th batch, it gives the same global batches. With a mixture every global batch holds rows
    of one source, sources take turns as :func:`interleave` says, and each is passed over on its own.

    Args:
        rows: The training rows.
        length: Samples in the run: steps x accumulation x ``batch``.
        seed: Fixes the order.
        batch: Rows of a global micro-batch: those of a device x processes. Matters with a mixture only.
        mixture: Weight of each ``row.source``; None: all rows alike, shuffled together.

    Raises:
        MiaError: The mixture does not name just the sources there are, or one has fewer rows than a batch.
    """

    def __init__(
        self, rows: list[Row], length: int, seed: int, batch: int = 1, mixture: Mapping[str, float] | None = None
    ) -> None:
        self.rows, self.length = rows, length
        if mixture is None:
            self.batch = length or 1  # one run of batches from one source
            self._passes = [_Passes(np.arange(len(rows)), 1, [seed, _ORDER])]
            weights = [1.0]
        else:
            check_mixture(rows, mixture, batch)
            self.batch = batch
            sources = np.array([row.source for row in rows], dtype=object)
            names = sorted(mixture)  # the order of the recipe's lines changes nothing
            self._passes = [
                _Passes(np.flatnonzero(sources == name), batch, [seed, _ORDER, id_key(name) % 2**63]) for name in names
            ]
            weights = [mixture[name] for name in names]
        self._source = interleave(weights, -(-length // self.batch), seed)
        self._turn = np.zeros_like(self._source)  # how many batches of the same source came before
        for source in range(len(weights)):
            turns = np.flatnonzero(self._source == source)
            self._turn[turns] = np.arange(len(turns))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> Sample:
        number, place = divmod(position, self.batch)
        index, epoch = self._passes[self._source[number]].at(int(self._turn[number]) * self.batch + place)
        return Sample(self.rows[index], index, epoch)


class _Passes:
    """Endless passes over some rows. No row comes twice in a batch, also where a batch spans two passes."""

    def __init__(self, members: np.ndarray, batch: int, seed: list[int]) -> None:
        self.members, self.batch, self.seed = members, batch, seed
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def at(self, place: int) -> tuple[int, int]:
        """Return the row's number and its pass."""
        epoch, rest = divmod(place, len(self.members))
        if epoch < self._epoch:
            self._epoch = -1
        while self._epoch < epoch:
            self._advance()
        return int(self.members[self._order[rest]]), epoch

    def _advance(self) -> None:
        # The beginning of a pass depends on the end of the one before, so passes are made one after the other.
        self._epoch += 1
        count = len(self.members)
        order = np.random.default_rng([*self.seed, self._epoch]).permutation(count)
        started = self._epoch * count % self.batch  # rows of the pass before in the batch that this one completes
        if started:
            fresh = np.flatnonzero(~np.isin(order, self._order[-started:]))[: self.batch - started]
            order = np.concatenate([order[fresh], np.delete(order, fresh)])
        self._order = order


def check_mixture(rows: Sequence[Row], mixture: Mapping[str, float], batch: int) -> None:
    """Refuse a mixture that does not fit the rows.

    Raises:
        MiaError: It names a source that no row has, leaves one out, or a source has fewer rows than a global
            micro-batch.
    """
    counts = Counter(row.source for row in rows)
    here = ", ".join(f"{name!r} ({count} rows)" for name, count in sorted(counts.items()))
    for name in sorted(mixture.keys() - counts.keys()):
        raise MiaError(f"data.mixture: no row is from {name!r}; sources here: {here}")
    for name in sorted(counts.keys() - mixture.keys()):
        raise MiaError(
            f"data.mixture: {name!r} has no weight; give it one, or leave it out of data.train (sources here: {here})"
        )
    for name, count in sorted(counts.items()):
        if count < batch:
            raise MiaError(
                f"data.mixture: {name!r} has {count} rows, and a batch of one source takes {batch} (batch_size x "
                "processes); lower training.batch_size, or join it with another source"
            )


def interleave(weights: Sequence[float], count: int, seed: int) -> np.ndarray:
    """Say which source each batch is from, so that after n batches a source of share w has had ⌊n·w⌋ or ⌈n·w⌉.

    Tijdeman's rule ("The chairman assignment problem", Discrete Mathematics 32, 1980) keeps every source within
    1 − 1/(2k − 2) batches of its share, which is the least that can be promised for k sources. Neighbours are then
    swapped at random where the bound above still holds. The first n do not depend on ``count``.

    Args:
        weights: Positive, one a source; their sum does not matter.
        count: Batches.
        seed: Fixes the swaps.

    Returns:
        (count,) int64 indices into ``weights``.
    """
    if len(weights) == 1:
        return np.zeros(count, np.int64)
    shares = [weight / sum(weights) for weight in weights]
    slack = 1 / (2 * len(shares) - 2)
    order: list[int] = []
    had = [0] * len(shares)
    for n in range(1, count + 2):  # one more, with which the last may be swapped
        lags = [n * share - taken for share, taken in zip(shares, had, strict=True)]
        due = [i for i, lag in enumerate(lags) if lag >= slack - _ROUNDING]
        source = min(due, key=lambda i: (1 - slack - lags[i]) / shares[i])
        order.append(source)
        had[source] += 1
    swaps = np.random.default_rng([seed, _MIX]).random(count) < 0.5
    had = [0] * len(shares)
    for n in range(1, count + 1):
        first, second = order[n - 1], order[n]
        behind = n * shares[first] - had[first]  # how far the two would be off after n batches, once swapped
        ahead = had[second] + 1 - n * shares[second]
        if swaps[n - 1] and first != second and max(behind, ahead) < 1 - _ROUNDING:
            order[n - 1], order[n] = second, first
        had[order[n - 1]] += 1
    return np.array(order[:count], np.int64)
