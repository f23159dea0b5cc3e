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
