"""Checks of what is given to an index."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple, get_args

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.index.pooling import Pooling
from mia_serve.index.segment_writer import metadata_lines
from mia_serve.index.vectors import check_strings, check_vectors

Metadata = Sequence[dict[str, Any] | None] | None

_LEAST_BETA = 1e-6  # below, the differences that the logarithm lives on are lost in rounding


class Chunks(NamedTuple):
    """Chunks that passed all checks but for ids that an index has."""

    ids: list[str]
    vectors: np.ndarray
    sessions: list[str]
    metadata: Metadata


def check_chunks(
    ids: Sequence[str], vectors: np.ndarray, sessions: Sequence[str], metadata: Metadata, dim: int
) -> Chunks:
    """Check chunks to be added.

    Raises:
        MiaError: If an id or a session is no non-empty string, an id is repeated, a vector is not finite or not (n,
            dim), metadata are not objects of JSON values or None, or there is not one of each a chunk.
    """
    names, owners = check_strings(ids, "ids"), check_strings(sessions, "sessions")
    array = check_vectors(vectors, dim, "vectors")
    if not len(names) == len(owners) == len(array):
        raise MiaError(f"{len(names)} ids, {len(array)} vectors, {len(owners)} sessions: give one of each a chunk")
    if len(set(names)) != len(names):
        name = Counter(names).most_common(1)[0][0]
        raise MiaError(f"id {name!r} is given twice: give every id once")
    entries = None if metadata is None else list(metadata)
    return Chunks(names, array, owners, entries if metadata_lines(entries, len(names)) is not None else None)


def check_count(value: int, name: str) -> None:
    """Raise MiaError unless value is an integer ≥ 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise MiaError(f"{name}={value!r}: give an integer >= 1")


def check_pooling(pooling: str, topk: int, beta: float) -> None:
    """Raise MiaError unless the pooling is known, topk an integer ≥ 1 and beta a number ≥ 1e-6."""
    check_count(topk, "topk")
    if pooling not in get_args(Pooling):
        allowed = ", ".join(map(repr, get_args(Pooling)))
        raise MiaError(f"pooling={pooling!r}: allowed are {allowed}")
    if isinstance(beta, bool) or not isinstance(beta, Real) or not _LEAST_BETA <= beta < math.inf:
        raise MiaError(f"beta={beta!r}: give a number of at least {_LEAST_BETA} (towards 0 'lme' becomes 'mean')")


def check_bias(bias: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a bias as an array.

    Raises:
        MiaError: Unless it is of that shape and holds numbers that are finite in float32, in which scores are.
    """
    array = np.asarray(bias)
    limit = float(np.finfo(np.float32).max)
    if array.shape != shape or array.dtype.kind not in "fiu" or not (np.abs(array) <= limit).all():
        raise MiaError(f"bias {array.shape} {array.dtype}: expected finite float32 numbers of shape {shape}")
    return array
