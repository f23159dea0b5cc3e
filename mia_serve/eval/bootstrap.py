"""Confidence intervals that respect clusters: whole books or conversations are resampled, never single questions.

Questions about one book share its difficulty, so resampling questions gives intervals that are too narrow
(Field & Welsh, "Bootstrapping clustered data", 2007).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from mia_serve.core.errors import MiaError

CONFIDENCE = 0.95
#: Resamples drawn at once: bounds the memory of the (block, G) matrix of cluster counts.
_BLOCK_CELLS = 20_000_000
#: Draws of up to so many counts are kept: the rows of a table are resampled alike, and drawing is most of the work.
_KEPT_CELLS = 2_500_000

#: Whether a p-value is for "above 0" (one) or "not 0" (two).
Sides = Literal[1, 2]


@dataclass(frozen=True)
class Interval:
    """Hold a question-weighted mean with its 95 % percentile interval.

    Attributes:
        mean: Mean over the questions that have a value; None if there is none.
        low: Lower end; None where no interval can be given.
        high: Upper end; None where no interval can be given.
        n: Questions that have a value.
        excluded: Questions left out because they have none.
        clusters: Books or conversations among the n.
        n_boot: Resamples drawn.
        seed: Seed of the draws.
        reason: Why mean or interval is None; empty otherwise.
        p_value: For the mean being 0 (differences only, see ``paired_bootstrap``).
        sides: Of the p-value, 1 or 2; None where there is no test.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int
    excluded: int
    clusters: int
    n_boot: int
    seed: int
    reason: str = ""
    p_value: float | None = None
    sides: Sides | None = None

    @property
    def excludes_zero(self) -> bool:
        """Tell whether the whole interval lies on one side of 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def p_text(self) -> str:
        """Write the p-value; one that no resample contradicts is below what ``n_boot`` can resolve."""
        if self.p_value is None or self.sides is None:
            return "n/a"
        return f"< {self.sides / self.n_boot:.2g}" if self.p_value == 0 else f"{self.p_value:.2g}"


def cluster_bootstrap(
    values: Sequence[float | None], groups: Sequence[Hashable], *, n_boot: int = 10_000, seed: int = 0
) -> Interval:
    """Estimate a mean and its interval by resampling whole groups with replacement.

    Each resample draws as many groups as there are and takes the mean over all their questions, so large groups
    weigh more, as they do in the plain mean.

    Args:
        values: One value a question, (n,); None marks a question without one, which is left out and counted.
        groups: Group of each question, (n,).
        n_boot: Number of resamples.
        seed: Seed of ``numpy.random.default_rng``; equal seeds and groups draw equal resamples.

    Raises:
        MiaError: The lengths differ, ``n_boot`` is below 1, or a value is not finite.
    """
    return _summarise(values, groups, n_boot, seed, sides=None)


def paired_bootstrap(
    first: Sequence[float | None],
    second: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    n_boot: int = 10_000,
    seed: int = 0,
    sides: Sides = 2,
) -> Interval:
    """Estimate the mean of ``first - second`` over the same questions, with interval and p-value.

    Args:
        first: One value a question, (n,); None where there is none.
        second: Values of the other row for the same questions, (n,).
        groups: Group of each question, (n,).
        n_boot: Number of resamples.
        seed: Seed of the draws.
        sides: 2, or 1 for the question whether ``first`` is the better one.

    Returns:
        The interval; ``p_value`` is twice the share of resamples on the less frequent side of 0 (at most 1), and
        one-sided the share of resamples at or below 0.

    Raises:
        MiaError: As ``cluster_bootstrap``.
    """
    if len(first) != len(second):
        raise MiaError(f"{len(first)} values against {len(second)}; a paired difference needs the same questions")
    differences = [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]
    return _summarise(differences, groups, n_boot, seed, sides=sides)


def _summarise(
    values: Sequence[float | None], groups: Sequence[Hashable], n_boot: int, seed: int, *, sides: Sides | None
) -> Interval:
    if len(values) != len(groups):
        raise MiaError(f"{len(values)} values but {len(groups)} groups; give the group of every question")
    if n_boot < 1:
        raise MiaError(f"n_boot is {n_boot}; it must be 1 or more")
    kept = [(value, group) for value, group in zip(values, groups, strict=True) if value is not None]
    excluded = len(values) - len(kept)
    if not kept:
        return Interval(None, None, None, 0, excluded, 0, n_boot, seed, reason="no question has a value")
    numbers = np.array([value for value, _ in kept], dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise MiaError(f"value {numbers[~np.isfinite(numbers)][0]} is not finite; mark a missing value with None")
    order: dict[Hashable, int] = {}
    member = np.array([order.setdefault(group, len(order)) for _, group in kept])
    clusters = len(order)
    mean = float(numbers.mean())
    if clusters == 1:
        reason = "one group only: an interval needs at least two books or conversations"
        return Interval(mean, None, None, len(kept), excluded, 1, n_boot, seed, reason=reason)
    sums = np.bincount(member, weights=numbers, minlength=clusters)
    sizes = np.bincount(member, minlength=clusters).astype(np.float64)
    means = _resampled_means(sums, sizes, n_boot, seed)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    p_value = None
    if sides is not None:
        below, above = float(np.mean(means <= 0)), float(np.mean(means >= 0))
        p_value = below if sides == 1 else min(1.0, 2 * min(below, above))
    return Interval(
        mean, float(low), float(high), len(kept), excluded, clusters, n_boot, seed, p_value=p_value, sides=sides
    )


def _resampled_means(sums: np.ndarray, sizes: np.ndarray, n_boot: int, seed: int) -> np.ndarray:
    """Draw the question-weighted means of resampled clusters, (n_boot,), from cluster sums and sizes, (G,)."""
    cells = n_boot * len(sums)
    keep = cells <= min(_KEPT_CELLS, _BLOCK_CELLS)
    blocks = (_kept_counts if keep else _counts)(len(sums), n_boot, seed)
    # The ratio of resampled sums to resampled sizes is two matrix products.
    return np.concatenate([(counts @ sums) / (counts @ sizes) for counts in blocks])


def _counts(clusters: int, n_boot: int, seed: int) -> Iterator[np.ndarray]:
    """Draw how often each cluster is in each resample, in blocks of (b, G)."""
    rng = np.random.default_rng(seed)
    share = np.full(clusters, 1 / clusters)
    block = max(1, _BLOCK_CELLS // clusters)
    for start in range(0, n_boot, block):
        yield rng.multinomial(clusters, share, size=min(block, n_boot - start)).astype(np.float64)


@lru_cache(maxsize=2)
def _kept_counts(clusters: int, n_boot: int, seed: int) -> tuple[np.ndarray, ...]:
    return tuple(_counts(clusters, n_boot, seed))
