"""Slow references: the full product in float64, and loops over sessions."""

from __future__ import annotations

import numpy as np

from mia_serve.index import SessionIndex


def unit(rng: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    """Random unit rows."""
    x = rng.standard_normal((rows, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def build(
    vectors: np.ndarray,
    ids: list[str] | None = None,
    sessions: list[str] | None = None,
    backend: str = "torch",
    metadata=None,
) -> SessionIndex:
    index = SessionIndex(vectors.shape[1], backend, "cpu")
    names = ids if ids is not None else [f"c{i}" for i in range(len(vectors))]
    index.add(names, vectors, sessions if sessions is not None else ["s"] * len(vectors), metadata)
    return index


def products(queries: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return queries.astype(np.float64) @ vectors.astype(np.float64).T


def best_chunks(queries: np.ndarray, vectors: np.ndarray, ids: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and places of the k best by score descending, then id ascending."""
    scores = products(queries, vectors).astype(np.float32) + np.float32(0)
    rank = np.empty(len(ids), int)
    rank[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
    places = np.stack([np.lexsort((rank, -row))[:k] for row in scores])
    return np.take_along_axis(scores, places, axis=1), places


def pool(values: np.ndarray, pooling: str, topk: int, beta: float) -> float:
    """Pool one session's scores (float64), written as the definitions read; not for "early"."""
    if pooling == "max":
        return values.max()
    if pooling == "topk":
        return np.sort(values)[::-1][: min(topk, len(values))].mean()
    if pooling == "lme":
        return np.log(np.exp(beta * values).mean()) / beta
    return values.mean()


def best_sessions(
    queries, vectors, ids, sessions, k: int, pooling: str = "max", topk: int = 3, beta: float = 10.0
) -> list[list[tuple[str, float, str, float]]]:
    """For each query (session, score, best chunk, its score) of the k best sessions, ties by ascending id."""
    scores = products(queries, vectors)
    members: dict[str, list[int]] = {}
    for place, name in enumerate(sessions):
        members.setdefault(name, []).append(place)
    found = []
    for query, row in zip(queries.astype(np.float64), scores, strict=True):
        entries = []
        for name, places in members.items():
            if pooling == "early":
                mean = vectors[places].astype(np.float64).mean(axis=0)
                norms = np.linalg.norm(mean) * np.linalg.norm(query)
                value = mean @ query / norms if norms else 0.0
            else:
                value = pool(row[places], pooling, topk, beta)
            best = min(places, key=lambda place: (-np.float32(row[place]), ids[place]))
            entries.append((name, float(np.float32(value)), ids[best], float(np.float32(row[best]))))
        found.append(sorted(entries, key=lambda entry: (-entry[1], entry[0]))[:k])
    return found
