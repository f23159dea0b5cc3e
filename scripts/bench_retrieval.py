#!/usr/bin/env python3
"""Time retrieval beside FAISS, NumPy, bm25s and ranx, in one run on this machine; outputs are compared first.

    scripts/bench_retrieval.py --json scripts/receipts/bench_retrieval.json

A row counts only if the outputs agree; the command fails otherwise. Seconds are medians; ratios are medians of the
ratios of runs next to each other, whose order changes from one repeat to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from bench_memory import (
    DIM,
    QUERIES,
    SESSIONS_K,
    TURNS,
    faiss_sessions,
    in_child,
    make_index,
    measure_build,
    numpy_sessions,
    session_data,
    unit_rows,
)
from threadpoolctl import threadpool_info

from mia_serve.eval.versions import package_versions
from mia_serve.index import SessionIndex

REPEATS = 7
CLOSE = 2e-6  # how far float32 scores of unit vectors may lie apart


def timed(runs: dict[str, Callable[[], Any]], repeats: int = REPEATS) -> dict[str, Any]:
    """Run each in turn, in changing order, after one run each that is not timed; the first one is ours."""
    names = list(runs)
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    ours = seconds[names[0]]
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "peer_over_mia": {
            name: statistics.median(peer / own for peer, own in zip(seconds[name], ours, strict=True))
            for name in names[1:]
        },
    }


def agree(ids: list[list[str]], scores: np.ndarray, peer_ids: list[list[str]], peer_scores: np.ndarray) -> bool:
    """Tell whether two rankings are the same but for the order of what float32 cannot tell apart."""
    scores, peer_scores = np.asarray(scores), np.asarray(peer_scores)
    if scores.shape != peer_scores.shape or np.abs(scores - peer_scores).max() > CLOSE:
        return False
    for row, peer_row, values in zip(ids, peer_ids, scores, strict=True):
        place = {name: i for i, name in enumerate(row)}
        for i, name in enumerate(peer_row):
            value = values[place[name]] if name in place else values[-1]  # at the end one may take another's place
            if abs(value - values[i]) > 2 * CLOSE:
                return False
    return True


def bench_sessions() -> dict[str, Any]:
    """Search sessions by their best turn."""
    vectors, queries, starts = session_data()
    index = make_index(vectors, starts)
    flat = faiss.IndexFlatIP(DIM)
    flat.add(vectors)
    session_of = np.repeat(np.arange(len(starts)), np.diff(starts, append=TURNS))
    hits = index.search_sessions(queries, SESSIONS_K)
    sessions, scores = faiss_sessions(flat, queries, session_of, SESSIONS_K)
    same = agree(hits.ids, hits.scores, [[f"session-{s:06}" for s in row] for row in sessions], np.array(scores))
    full = numpy_sessions(vectors, queries, starts)
    best = np.argsort(-full, axis=1, kind="stable")[:, :SESSIONS_K]
    names = [[f"session-{s:06}" for s in row] for row in best.tolist()]
    same &= agree(hits.ids, hits.scores, names, np.take_along_axis(full, best, axis=1))
    return {
        "what": f"{TURNS} turns x {DIM} in {len(starts)} sessions, {QUERIES} queries, {SESSIONS_K} best sessions; "
        "FAISS: IndexFlatIP and group-by; NumPy: maximum.reduceat on the full product, without finding the best",
        "agree": bool(same),
        **timed(
            {
                "mia": lambda: index.search_sessions(queries, SESSIONS_K),
                "faiss": lambda: faiss_sessions(flat, queries, session_of, SESSIONS_K),
                "numpy": lambda: numpy_sessions(vectors, queries, starts),
            }
        ),
        "peak_extra_bytes": {
            name: in_child(f"sessions_{name}")["peak_extra_bytes"] for name in ("mia", "faiss", "numpy")
        },
    }


def bench_chunks(rows: int, dim: int = 1024, k: int = 50) -> dict[str, Any]:
    """Search chunks."""
    random = np.random.default_rng(3)
    vectors, queries = unit_rows(random, rows, dim), unit_rows(random, QUERIES, dim)
    ids = [f"c{i:06}" for i in range(rows)]
    index, flat = SessionIndex(dim, device="cpu"), faiss.IndexFlatIP(dim)
    index.add(ids, vectors, ["s"] * rows)
    flat.add(vectors)

    def by_numpy() -> tuple[np.ndarray, np.ndarray]:
        scores = queries @ vectors.T
        best = np.argpartition(-scores, k, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
        best = np.take_along_axis(best, order, axis=1)
        return np.take_along_axis(scores, best, axis=1), best

    hits = index.search(queries, k)
    same = all(
        agree(hits.ids, hits.scores, [[ids[i] for i in row] for row in places.tolist()], scores)
        for scores, places in (flat.search(queries, k), by_numpy())
    )
    runs = {
        "mia": lambda: index.search(queries, k),
        "faiss": lambda: flat.search(queries, k),
        "numpy": by_numpy,
    }
    return {"what": f"{rows} chunks x {dim}, {QUERIES} queries, {k} best", "agree": same, **timed(runs)}


def bench_deletions(rows: int = 100_000, dim: int = 256, k: int = 10, gone: int = 1000) -> dict[str, Any]:
    """Delete from a saved and loaded index, and search what is left."""
    random = np.random.default_rng(4)
    vectors, queries = unit_rows(random, rows, dim), unit_rows(random, QUERIES, dim)
    made = SessionIndex(dim, device="cpu")
    made.add([f"c{i:06}" for i in range(rows)], vectors, ["s"] * rows)
    flat = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
    flat.add_with_ids(vectors, np.arange(rows))
    seconds: dict[str, list[float]] = {"mia_delete": [], "faiss_delete": [], "mia_search": [], "faiss_search": []}

    def clock(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = run()
        seconds[name].append(time.perf_counter() - start)
        return found

    same = True
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder, "index"))
        index = SessionIndex.load(Path(folder, "index"), device="cpu")
        index.search(queries, k)
        for dead in random.permutation(rows)[: REPEATS * gone].reshape(REPEATS, gone):
            names, selected = [f"c{i:06}" for i in dead], faiss.IDSelectorBatch(dead)
            clock("mia_delete", lambda names=names: index.delete(names))
            clock("faiss_delete", lambda selected=selected: flat.remove_ids(selected))
            hits = clock("mia_search", lambda: index.search(queries, k))
            scores, places = clock("faiss_search", lambda: flat.search(queries, k))
            same &= agree(hits.ids, hits.scores, [[f"c{i:06}" for i in row] for row in places.tolist()], scores)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "what": f"{rows} x {dim}, saved and loaded; {REPEATS} times {gone} deleted, then {QUERIES} queries, {k} best",
        "agree": same,
        "seconds": middle,
        "peer_over_mia": {what: middle[f"faiss_{what}"] / middle[f"mia_{what}"] for what in ("delete", "search")},
    }


def bench_bm25(documents: int = 20_000, length: int = 60, queries: int = 200, k: int = 50) -> dict[str, Any]:
    """Search by BM25."""
    import bm25s

    from mia_serve.lexical.bm25 import BM25Index

    random = np.random.default_rng(5)
    weights = 1 / np.arange(1, 30_001)
    words = np.array([f"w{i}" for i in range(30_000)])
    texts = [" ".join(row) for row in words[random.choice(30_000, (documents, length), p=weights / weights.sum())]]
    asked = [" ".join(row) for row in words[random.choice(30_000, (queries, 8), p=weights / weights.sum())]]
    ours = BM25Index([f"d{i:05}" for i in range(documents)], texts, analyzer="plain")
    peer = bm25s.BM25(method="lucene", k1=ours.k1, b=ours.b)
    peer.index([ours.analyzer(text) for text in texts], show_progress=False)
    tokens = [sorted(set(ours.analyzer(query))) for query in asked]  # cut beforehand: to bm25s's advantage

    def theirs() -> Any:
        return peer.retrieve(tokens, k=k, show_progress=False)

    hits, (_, scores) = ours.search(asked, k), theirs()
    apart = max(
        float(np.abs(np.array(own + [0.0] * (k - len(own))) - row).max())
        for own, row in zip(hits.scores, scores, strict=True)
    )
    return {
        "what": f"{documents} documents of {length} Zipf tokens, {queries} queries of 8, {k} best",
        "agree": apart < 1e-5,
        "largest_difference": apart,
        **timed({"mia": lambda: ours.search(asked, k), "bm25s": theirs}),
    }


def bench_fusion(queries: int = 200, candidates: int = 1000, alpha: float = 0.6) -> dict[str, Any]:
    """Mix the z-scores of two complete lists."""
    import ranx

    from mia_serve.fusion import mix

    random = np.random.default_rng(6)
    first, second = random.gamma(2.0, 3.0, (queries, candidates)), random.normal(0.3, 0.1, (queries, candidates))
    names = [f"s{i:04}" for i in range(candidates)]
    runs = [
        ranx.Run({f"q{i}": dict(zip(names, row.tolist(), strict=True)) for i, row in enumerate(scores)})
        for scores in (first, second)
    ]

    def theirs() -> Any:
        return ranx.fuse(runs, norm="zmuv", method="wsum", params={"weights": (alpha, 1 - alpha)})

    fused, mixed = theirs().to_dict(), mix(first, second, alpha)
    apart = max(
        abs(fused[f"q{i}"][name] - value)
        for i, row in enumerate(mixed.tolist())
        for name, value in zip(names, row, strict=True)
    )
    return {
        "what": f"{queries} queries, {candidates} candidates in both lists; ranx.fuse(norm='zmuv', method='wsum')",
        "agree": apart < 1e-6,
        "largest_difference": apart,
        **timed({"mia": lambda: mix(first, second, alpha), "ranx": theirs}),
    }


def environment() -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "torch_threads": torch.get_num_threads(),
        "pools": {f"{p['prefix']} ({p['internal_api']})": p["num_threads"] for p in threadpool_info()},
        "versions": package_versions(["torch", "numpy", "faiss-cpu", "bm25s", "ranx"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--quick", action="store_true", help="build 100,000 rows and not a million")
    options = parser.parse_args()
    started = environment()
    rows = {
        "sessions": bench_sessions,
        "chunks_10k": lambda: bench_chunks(10_000),
        "chunks_100k": lambda: bench_chunks(100_000),
        "deletions": bench_deletions,
        "bm25": bench_bm25,
        "fusion": bench_fusion,
        "build": lambda: measure_build(100_000 if options.quick else 1_000_000),
    }
    record: dict[str, Any] = {"environment": started}
    for name, bench in rows.items():
        load = os.getloadavg()[0]
        record[name] = {**bench(), "load_average": load}
        print(f"{name}: {json.dumps(record[name], indent=1)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.get("agree", True) for row in record.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
