"""Benchmarks: haystacks (mindscapes) and questions with gold chunks."""

from __future__ import annotations

from pathlib import Path

from mia_serve.core import MiaError
from mia_serve.eval.datasets import fairytaleqa, locomo, qmsum, saltmarsh
from mia_serve.eval.datasets.base import Benchmark, Haystack, Query, duplicate_texts

#: The benchmarks, each with the split used when none is named.
BENCHMARKS = {"saltmarsh": "test", "fairytaleqa": "val", "qmsum": "val", "locomo": "all"}


def load_benchmark(
    name: str,
    split: str | None = None,
    series: bool = False,
    *,
    data_dir: str | Path | None = None,
    limit: int | None = None,
) -> Benchmark:
    """Load a benchmark by name.

    Args:
        name: One of `BENCHMARKS`.
        split: Split of the questions; the one in `BENCHMARKS` when not given.
        series: Pool all books (or meetings, or conversations) into one haystack.
        data_dir: Folder with the benchmarks' files; the one that the setting MIA_DATA names when not given.
            Saltmarsh is part of the package and needs none.
        limit: Most questions, evenly spread over the split.

    Raises:
        MiaError: Unknown name or split, MIA_DATA not set, or bad data.
        FileNotFoundError: The files are not there.
    """
    if name not in BENCHMARKS:
        raise MiaError(f"no benchmark {name!r}: choose from {', '.join(BENCHMARKS)}")
    split = split if split is not None else BENCHMARKS[name]
    if name == "saltmarsh":
        return saltmarsh.load(split, series, limit)
    if name == "fairytaleqa":
        return fairytaleqa.load(split, series, data_dir, limit)
    if name == "qmsum":
        return qmsum.load(split, series, data_dir, limit)
    return locomo.load(split, series, data_dir, limit)


__all__ = ["BENCHMARKS", "Benchmark", "Haystack", "Query", "duplicate_texts", "load_benchmark"]
