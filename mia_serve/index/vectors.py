"""Vectors as an index stores them, float32, float16 or int8, and the checks that every vector and id passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from mia_serve.core.errors import MiaError

Storage = Literal["float32", "float16", "int8"]

#: How a file holds the numbers: little-endian on every machine.
DTYPES: dict[str, np.dtype] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "int8": np.dtype("i1")}

_LEVELS = 255  # steps between the least and the greatest of 256 codes
_ENOUGH = 256  # vectors from which the extremes of a single dimension say something about the vectors to come
_FLOAT16_LIMIT = 65520.0  # rounds to infinity; less rounds to at most 65504
_MAX_NORM = 1e15  # longer vectors could overflow a float32 product
_TILE_BYTES = 1 << 23  # float64 bytes that a check holds at once


class Block(NamedTuple):
    """Vectors (n, d) as they are stored.

    Attributes:
        data: (n, d) float32, float16 or int8; may be mapped from a file.
        ranges: For int8 the offset and the step of each dimension, (2, d) float32: value = offset + step · (code +
            128). None otherwise.
    """

    data: np.ndarray
    ranges: np.ndarray | None = None


def decode(block: Block, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
    """Return rows of a block as numbers, (m, d) float32; a slice of a float32 block is a view and not to be written."""
    part = block.data[rows]
    if block.ranges is None:
        return np.asarray(part, dtype=np.float32)
    values = part.astype(np.float32)
    values += np.float32(128)
    values *= block.ranges[1]
    values += block.ranges[0]
    return values


def calibrate(vectors: np.ndarray) -> np.ndarray:
    """Choose int8 ranges from vectors that speak for those to come; made once and kept with the index.

    Codes of vectors that were quantised by different ranges cannot be compared by eye or by product, so ranges are
    never made a block or a worker at a time.

    Args:
        vectors: (n, d) finite, n ≥ 1. From 256 vectors on every dimension gets its own extremes; fewer cannot know
            them, and all dimensions get the range ± the largest magnitude seen.

    Returns:
        Offsets and steps, (2, d) float32; a dimension that never varies says nothing of the vectors to come and gets
        the range of a unit vector around its value, which stays exact.

    Raises:
        MiaError: If there is no vector.
    """
    if not len(vectors):
        raise MiaError("int8 ranges of no vectors: give at least one")
    low, high = vectors.min(axis=0).astype(np.float64), vectors.max(axis=0).astype(np.float64)
    if len(vectors) < _ENOUGH:
        most = max(-low.min(), high.max(), 0.0)
        low, high = np.full_like(low, -most), np.full_like(high, most)
    step = ((high - low) / _LEVELS).astype(np.float32)
    unit = 2 / _LEVELS
    return np.stack([np.where(step > 0, low, low - 128 * unit), np.where(step > 0, step, unit)]).astype(np.float32)


def quantise(vectors: np.ndarray, ranges: np.ndarray) -> tuple[np.ndarray, int]:
    """Round vectors to int8 codes by given ranges.

    Returns:
        Codes (n, d) int8, and how many numbers lay outside the ranges and were clipped.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = (np.asarray(vectors, np.float32) - ranges[0]) / ranges[1]
    np.nan_to_num(codes, copy=False, nan=0.0, posinf=np.inf, neginf=-np.inf)  # 0 / 0 where a dimension never varies
    np.rint(codes, out=codes)
    clipped = int(((codes < 0) | (codes > _LEVELS)).sum())
    np.clip(codes, 0, _LEVELS, out=codes)
    codes -= 128
    return codes.astype(np.int8), clipped


def encode_storage(vectors: np.ndarray, storage: Storage, ranges: np.ndarray | None = None) -> Block:
    """Convert vectors to what is stored.

    Args:
        vectors: (n, d) finite.
        storage: "float32", "float16" or "int8".
        ranges: int8 only: those of the index; None calibrates on these vectors.

    Raises:
        MiaError: If the storage is unknown, or a number does not fit float16.
    """
    check_storage(storage)
    if storage == "float32":
        return Block(np.ascontiguousarray(vectors, DTYPES[storage]))
    if storage == "float16":
        check_float16(vectors, "vectors")
        return Block(np.ascontiguousarray(vectors, DTYPES[storage]))
    ranges = calibrate(vectors) if ranges is None else ranges
    return Block(quantise(vectors, ranges)[0], ranges)


def check_storage(storage: str) -> None:
    """Raise MiaError unless storage is one of the three."""
    if storage not in get_args(Storage):
        raise MiaError(f"storage={storage!r}: allowed are 'float32', 'float16', 'int8'")


def check_float16(vectors: np.ndarray, name: str) -> None:
    """Raise MiaError if a number would become infinite in float16."""
    for start, part in _tiles(vectors):
        bad = (part >= _FLOAT16_LIMIT).any(axis=1) | (part <= -_FLOAT16_LIMIT).any(axis=1)
        if bad.any():
            row = start + int(bad.argmax())
            raise MiaError(
                f"{name}, row {row}: a number does not fit float16 (at most 65504); store as 'float32' or 'int8'"
            )


def check_vectors(vectors: np.ndarray, dim: int, name: str) -> np.ndarray:
    """Return vectors as an array, in the type and the memory that they came in.

    Args:
        vectors: Expected (n, dim), finite.
        dim: d.
        name: What to call them in an error.

    Raises:
        MiaError: If they are not (n, dim) numbers, or one is NaN, infinite or of a norm above 1e15.
    """
    array = np.asarray(vectors)
    if array.ndim != 2 or array.shape[1] != dim or array.dtype.kind not in "fiu":
        raise MiaError(f"{name} {array.shape} {array.dtype}: expected (n, {dim}) numbers")
    for start, part in _tiles(array):
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.einsum("nd,nd->n", part, part, dtype=np.float64))
        bad = ~(norms <= _MAX_NORM)  # True for NaN as well
        if bad.any():
            row = int(bad.argmax())
            raise MiaError(
                f"{name}, row {start + row}: NaN, infinite or huge (norm {norms[row]:g}); give finite vectors"
            )
    return array


def check_strings(values: Sequence[str], name: str) -> list[str]:
    """Return values as a list of non-empty strings that UTF-8 can hold.

    Raises:
        MiaError: If they are not.
    """
    if isinstance(values, str):
        raise MiaError(f"{name} is one string: give a list of strings")
    listed = list(values)
    if not set(map(type, listed)) <= {str} or "" in listed:  # fast: no Python code a row
        for position, value in enumerate(listed):
            if not isinstance(value, str) or not value:
                raise MiaError(f"{name}, position {position}: {value!r} is not a non-empty string; use str(...)")
        listed = [str(value) for value in listed]
    try:
        "".join(listed).encode()
    except UnicodeEncodeError:
        position = next(i for i, value in enumerate(listed) if not value.isascii() and _lone_surrogate(value))
        raise MiaError(
            f"{name}, position {position}: {listed[position]!r} is no valid Unicode (a lone surrogate)"
        ) from None
    return listed


def _lone_surrogate(value: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in value)


def _tiles(array: np.ndarray) -> list[tuple[int, np.ndarray]]:
    tall = max(1, _TILE_BYTES // (8 * max(1, array.shape[1])))
    return [(start, array[start : start + tall]) for start in range(0, len(array), tall)]
