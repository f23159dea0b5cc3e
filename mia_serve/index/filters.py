"""Which chunks have the metadata that a search asks for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from mia_serve.core.errors import MiaError

Value = str | int | float | bool | None
Where = Mapping[str, Value | list[Value]]

_ABSENT, _OTHER = -1, -2  # no such key; a list or an object, which equals nothing that can be asked for


def check_where(where: Where | None) -> None:
    """Check a filter.

    Raises:
        MiaError: If it is not a dict whose keys are strings and whose values are plain, or lists of plain values.
    """
    if where is None:
        return
    if not isinstance(where, Mapping) or not all(isinstance(key, str) for key in where):
        raise MiaError(f"where={where!r}: give a dict, metadata key: value or list of values")
    for key, wanted in where.items():
        for value in wanted if isinstance(wanted, list | tuple | set) else [wanted]:
            if not isinstance(value, str | int | float | bool | None):
                raise MiaError(f"where[{key!r}]: {value!r} is a {type(value).__name__}; give strings, numbers, "
                               "booleans or None, or a list of these")  # fmt: skip


class MetadataFilter:
    """One key's values as small numbers, so that a filter costs no Python a chunk; kept up as chunks are added."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._codes = np.empty(0, np.int32)
        self._code_of: dict[Hashable, int] = {}

    def matches(self, metadata: list[dict[str, Any] | None] | None, count: int, wanted: Any) -> np.ndarray:
        """Return which of count chunks have the key with the value, or with one of the values, (count,) bool."""
        if metadata is None:
            return np.zeros(count, bool)
        codes = self._codes
        if len(codes) < count:
            codes = np.concatenate([codes, np.fromiter(map(self._code, metadata[len(codes) : count]), np.int32)])
            self._codes = codes  # at once: another thread may be here too
        values = wanted if isinstance(wanted, list | tuple | set) else [wanted]
        asked = [self._code_of[_typed(value)] for value in values if _typed(value) in self._code_of]
        return np.isin(codes[:count], asked)

    def _code(self, entry: dict[str, Any] | None) -> int:
        if entry is None or self._key not in entry:
            return _ABSENT
        value = entry[self._key]
        if isinstance(value, list | dict | tuple):
            return _OTHER
        return self._code_of.setdefault(_typed(value), len(self._code_of))


def _typed(value: Any) -> Hashable:
    return (isinstance(value, bool), value)  # True is not 1
