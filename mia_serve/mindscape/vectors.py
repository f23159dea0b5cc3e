"""Vectors that a mindscape keeps: of its chunks and of its sessions' summaries, for each encoder apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mia_serve.mindscape.mindscape import Mindscape
from mia_serve.mindscape.store import read_manifest

if TYPE_CHECKING:
    from mia_serve.core import Encoder

#: What is embedded of a mindscape: passages, and the summaries of its sessions.
PARTS = ("chunks", "sessions")


def vector_name(part: str, spec_hash: str) -> str:
    """Name a mindscape's vector file: one a part and encoder, so that several encoders live side by side."""
    return f"{part}-{spec_hash}"


def all_vectors(path: Path) -> dict[str, tuple[np.ndarray, str]]:
    """Open every vector file of a mindscape: name -> ((rows, d) array, spec hash)."""
    entries = read_manifest(path)["vectors"]
    return {
        name: (Mindscape.load_vectors(path, name, entry["spec_hash"]), entry["spec_hash"])
        for name, entry in entries.items()
    }


def embed_mindscape(
    mindscape: Mindscape,
    encoder: Encoder,
    have: dict[str, tuple[np.ndarray, str]] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, tuple[np.ndarray, str]]:
    """Encode chunks and summaries, except what is there already.

    Args:
        mindscape: What to encode.
        encoder: What with; a `CachedEncoder` encodes only what is new to its cache.
        have: What `all_vectors` returns.
        progress: Called with a line at each step.

    Returns:
        Vector files as `Mindscape.save` takes them: name -> ((rows, d) array, spec hash).
    """
    texts = {
        "chunks": [chunk.text for chunk in mindscape.chunks],
        "sessions": [session.summary for session in mindscape.sessions],
    }
    spec_hash = encoder.spec_hash
    made = {}
    for part in PARTS:
        name = vector_name(part, spec_hash)
        if have is None or name not in have:
            if progress is not None:
                progress(f"encoding {len(texts[part])} {part}")
            made[name] = (encoder.encode_documents(texts[part]), spec_hash)
    return made


def stored_vectors(path: Path, part: str, encoder: Encoder) -> np.ndarray | None:
    """Open an encoder's vectors of one part of a mindscape, if they were kept."""
    name = vector_name(part, encoder.spec_hash)
    if name not in read_manifest(path)["vectors"]:
        return None
    return Mindscape.load_vectors(path, name, encoder.spec_hash)


def kept_vectors(path: Path, *encoders: Encoder | None) -> dict[str, np.ndarray]:
    """Collect the vectors that a mindscape keeps of these encoders, under the keys that `Retriever` looks for."""
    found: dict[str, np.ndarray] = {}
    for encoder in encoders:
        if encoder is None or encoder.spec_hash in found:
            continue
        for part in PARTS:
            vectors = stored_vectors(path, part, encoder)
            if vectors is not None:
                found[encoder.spec_hash + ("/sessions" if part == "sessions" else "")] = vectors
    return found


def carry_vectors(
    old: Mindscape,
    new: Mindscape,
    encoder: Encoder,
    have: dict[str, tuple[np.ndarray, str]],
    progress: Callable[[str], None] | None = None,
) -> dict[str, tuple[np.ndarray, str]]:
    """Encode what a mindscape has more than before, and take the other vectors over.

    Args:
        old: The mindscape before.
        new: The mindscape now.
        encoder: What with.
        have: What `all_vectors` returns of the old one.
        progress: Called with a line at each step.

    Returns:
        Vector files of this encoder, as `Mindscape.save` takes them.
    """
    made = {}
    for part, before, now in (
        ("chunks", [c.text for c in old.chunks], [c.text for c in new.chunks]),
        ("sessions", [s.summary for s in old.sessions], [s.summary for s in new.sessions]),
    ):
        name = vector_name(part, encoder.spec_hash)
        kept = have.get(name)
        row_of = {text: row for row, text in enumerate(before)} if kept is not None else {}
        texts = [text for text in dict.fromkeys(now) if text not in row_of]
        if progress is not None:
            progress(f"encoding {len(texts)} {part}")
        dtype = np.float32 if kept is None else kept[0].dtype
        vectors = np.empty((len(now), encoder.dim), dtype)
        fresh = dict(zip(texts, encoder.encode_documents(texts), strict=True)) if texts else {}
        for row, text in enumerate(now):
            vectors[row] = kept[0][row_of[text]] if kept is not None and text in row_of else fresh[text]
        made[name] = (vectors, encoder.spec_hash)
    return made


def select_vectors(
    old: Mindscape, new: Mindscape, vectors: dict[str, tuple[np.ndarray, str]]
) -> dict[str, tuple[np.ndarray, str]]:
    """Take the vectors of a part of a mindscape out of those of the whole.

    Args:
        old: The whole.
        new: A part of it (`select_books`).
        vectors: Vector files of the whole, named as by `vector_name`.
    """
    chunk_row = {chunk.id: row for row, chunk in enumerate(old.chunks)}
    session_row = {session.id: row for row, session in enumerate(old.sessions)}
    rows = {"chunks": [chunk_row[c.id] for c in new.chunks], "sessions": [session_row[s.id] for s in new.sessions]}
    return {name: (array[rows[name.partition("-")[0]]], spec) for name, (array, spec) in vectors.items()}
