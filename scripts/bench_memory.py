"""Part of ``bench_retrieval.py``: what searches and a build take in memory, each in a process of its own.

    python scripts/bench_memory.py NAME [ROWS]      one of sessions_mia, sessions_faiss, sessions_numpy, build, open

Prints one JSON object. Growth is the peak resident memory of the measured part less what was resident before it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

TURNS, DIM, QUERIES, SESSIONS_K = 100_000, 384, 100, 10
FAISS_DEPTH = 64  # chunks fetched so that ten sessions are among them
_STEP = 10_000


def in_child(name: str, *arguments: str | int) -> dict[str, Any]:
    """Run one measurement of this file in a fresh process."""
    command = [sys.executable, __file__, name, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def unit_rows(random: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    """Return random unit vectors, made in place."""
    vectors = random.standard_normal((rows, dim), dtype=np.float32)
    for start in range(0, rows, _STEP):
        part = vectors[start : start + _STEP]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return vectors


def session_starts(random: np.random.Generator, turns: int) -> np.ndarray:
    """Return where sessions of 5 to 39 turns, 22 on average, start."""
    starts = np.concatenate([[0], np.cumsum(random.integers(5, 40, turns // 5))])
    return starts[starts < turns]


def session_names(starts: np.ndarray, turns: int) -> list[str]:
    lengths = np.diff(starts, append=turns)
    return [f"session-{i:06}" for i in np.repeat(np.arange(len(starts)), lengths).tolist()]


def session_data(turns: int = TURNS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return turns, queries and the starts of the sessions."""
    random = np.random.default_rng(0)
    return unit_rows(random, turns, DIM), unit_rows(random, QUERIES, DIM), session_starts(random, turns)


def numpy_sessions(vectors: np.ndarray, queries: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Score every session by a full product."""
    return np.maximum.reduceat(queries @ vectors.T, starts, axis=1)


def faiss_sessions(
    index: Any, queries: np.ndarray, session_of: np.ndarray, k: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Fetch chunks and keep the first of each session, until there are k; exact, as chunks come best first."""
    sessions, scores = [], []
    depth = FAISS_DEPTH
    found, rows = index.search(queries, depth)
    for i in range(len(queries)):
        first = dict(zip(session_of[rows[i]][::-1].tolist(), found[i][::-1].tolist(), strict=True))
        while len(first) < k:
            depth *= 4
            deeper, places = index.search(queries[i : i + 1], depth)
            first = dict(zip(session_of[places[0]][::-1].tolist(), deeper[0][::-1].tolist(), strict=True))
        best = sorted(first, key=lambda s: -first[s])[:k]
        sessions.append(best)
        scores.append([first[s] for s in best])
    return sessions, scores


def make_index(vectors: np.ndarray, starts: np.ndarray) -> Any:
    from mia_serve.index import SessionIndex

    index = SessionIndex(vectors.shape[1], device="cpu")
    for start in range(0, len(vectors), _STEP):
        part = slice(start, start + _STEP)
        names = session_names(starts, len(vectors))[part]
        index.add([f"turn-{i:07}" for i in range(start, start + len(names))], vectors[part], names)
    return index


@contextmanager
def growth() -> Iterator[Callable[[], int]]:
    """Give a function that tells the peak resident memory since the block began, less what was resident then."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _memory("VmRSS")
    yield lambda: _memory("VmHWM") - before


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def _sessions(kind: str) -> dict[str, Any]:
    vectors, queries, starts = session_data()
    session_of = np.repeat(np.arange(len(starts)), np.diff(starts, append=TURNS))
    if kind == "mia":
        index = make_index(vectors, starts)
        index.search_sessions(queries[:1], SESSIONS_K)  # sorts ids, reads the lengths of vectors: once

        def search() -> None:
            index.search_sessions(queries, SESSIONS_K)

        small = make_index(vectors[:_STEP], starts[starts < _STEP])

        def warm() -> None:
            small.search_sessions(queries, SESSIONS_K)

    elif kind == "faiss":
        import faiss

        index, small = faiss.IndexFlatIP(DIM), faiss.IndexFlatIP(DIM)
        index.add(vectors)
        small.add(vectors[:_STEP])

        def search() -> None:
            faiss_sessions(index, queries, session_of, SESSIONS_K)

        def warm() -> None:
            faiss_sessions(small, queries, session_of, SESSIONS_K)

    else:

        def search() -> None:
            numpy_sessions(vectors, queries, starts)

        def warm() -> None:
            numpy_sessions(vectors[:_STEP], queries, starts[starts < _STEP])

    warm()  # scratch space and thread pools of the libraries
    with growth() as grown:
        search()
        return {"peak_extra_bytes": grown()}


def _build(folder: Path, rows: int) -> dict[str, Any]:
    from mia_serve.index.writer import IndexWriter

    random = np.random.default_rng(1)
    block, names = unit_rows(random, _STEP, DIM), ["s"] * _STEP
    with IndexWriter(folder / "warm", DIM) as writer:
        writer.add([str(i) for i in range(_STEP)], block, names)
    seconds = 0.0
    with growth() as grown:
        start = time.perf_counter()
        with IndexWriter(folder / "index", DIM) as writer:
            seconds += time.perf_counter() - start
            for first in range(0, rows, _STEP):
                random.standard_normal(out=block, dtype=np.float32)
                ids = [f"turn-{i:07}" for i in range(first, first + _STEP)]
                names = [f"session-{i // 22:06}" for i in range(first, first + _STEP)]
                start = time.perf_counter()
                writer.add(ids, block, names)
                seconds += time.perf_counter() - start
            start = time.perf_counter()
        seconds += time.perf_counter() - start
        return {"seconds": seconds, "peak_over_vectors": grown() / (rows * DIM * 4)}


def _open(folder: Path, rows: int) -> dict[str, Any]:
    from mia_serve.index import SessionIndex

    queries = unit_rows(np.random.default_rng(2), QUERIES, DIM)
    make_index(unit_rows(np.random.default_rng(3), _STEP, DIM), np.array([0])).search_sessions(queries, 1)
    with growth() as grown:
        start = time.perf_counter()
        index = SessionIndex.load(folder / "index", device="cpu", verify=False)
        loaded = time.perf_counter()
        index.search_sessions(queries, SESSIONS_K)
        first = time.perf_counter()
        index.search_sessions(queries, SESSIONS_K)
        return {
            "load_seconds": loaded - start,
            "first_search_seconds": first - loaded,
            "search_seconds": time.perf_counter() - first,
            "peak_over_vectors": grown() / (rows * DIM * 4),  # the pages of the mapped file count too
        }


def measure_build(rows: int) -> dict[str, Any]:
    """Build an index of rows x 384 by streaming, then open and search it; three processes' worth of numbers."""
    with tempfile.TemporaryDirectory() as folder:
        built = in_child("build", rows, folder)
        size = sum(file.stat().st_size for file in Path(folder, "index").rglob("*") if file.is_file())
        return {
            "what": f"IndexWriter, {rows} x {DIM} float32 in blocks of {_STEP}; then load (not verified) and search",
            "vector_bytes": rows * DIM * 4,
            "folder_bytes": size,
            "build": built,
            "open": in_child("open", rows, folder),
        }


def main(name: str, *arguments: str) -> None:
    if name.startswith("sessions_"):
        record = _sessions(name.removeprefix("sessions_"))
    else:
        record = {"build": _build, "open": _open}[name](Path(arguments[1]), int(arguments[0]))
    print(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
