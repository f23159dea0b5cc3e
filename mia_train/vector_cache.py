"""A folder of vectors that were encoded before, found again by encoder, role and text."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mia_serve.core import Encoder, MiaError
from mia_serve.core.storage import sync

Role = Literal["query", "document"]


def text_digest(text: str) -> bytes:
    """Return the SHA-256 of a text's UTF-8 bytes, the same in every process, version and machine."""
    return hashlib.sha256(text.encode()).digest()


def encoder_facts(encoder: Encoder, role: Role) -> dict[str, Any]:
    """Return all that decides what vector a text gets: the encoder's spec, weights, dtype, tokenizer, and the role."""
    vocabulary = json.loads(encoder.tokenizer.backend_tokenizer.to_str())
    # Calls of the tokenizer leave their padding and truncation behind; MiA's own path reads neither.
    vocabulary["padding"] = vocabulary["truncation"] = None
    return {
        "spec_hash": encoder.spec_hash,  # prompts, template, limits, pooling and a fingerprint of the weights
        "dtype": str(next(encoder.model.parameters()).dtype),
        "tokenizer": hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest(),
        "dim": encoder.dim,
        "role": role,
    }


class VectorCache:
    """Vectors of one encoder in one role, in ``folder/<16 hex digits of the facts>/``.

    Every shard is one ``.npy`` file of records (SHA-256 of the text, vector), written aside, flushed and renamed, so
    that a killed writer leaves whole shards only. Shards are named by what they hold: two writers do not disturb each
    other.

    Args:
        folder: Where caches of all encoders lie; made if it is missing.
        facts: What :func:`encoder_facts` returns.

    Raises:
        MiaError: ``folder`` is a file.
    """

    def __init__(self, folder: str | Path, facts: dict[str, Any]) -> None:
        root = Path(folder)
        if root.exists() and not root.is_dir():
            raise MiaError(f"cache {str(root)!r} is a file; give a folder")
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = root / key
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record = np.dtype([("text", "V32"), ("vector", "<f4", (facts["dim"],))])
        note = self.folder / "encoder.json"
        if not note.is_file():
            self._place(note, json.dumps(facts, indent=2).encode() + b"\n")

    def fill(self, texts: Sequence[str], out: np.ndarray) -> list[int]:
        """Copy what is known into ``out`` (n, d) and return the positions of the texts that are not."""
        wanted = {text_digest(text): i for i, text in enumerate(texts)}
        if len(wanted) != len(texts):
            raise MiaError("texts to look up repeat; give each once")
        missing = set(range(len(texts)))
        for shard in sorted(self.folder.glob("*.npy")):
            try:
                records = np.load(shard, mmap_mode="r", allow_pickle=False)
                if records.dtype != self.record:
                    raise ValueError("other records")
            except (ValueError, OSError, EOFError):
                print(f"{shard}: not a shard that can be read; its texts are encoded again", file=sys.stderr)
                continue
            known = (wanted.get(digest) for digest in records["text"].tolist())
            pairs = [(i, row) for row, i in enumerate(known) if i is not None and i in missing]
            if pairs:
                places, rows = map(list, zip(*pairs, strict=True))
                out[places] = records["vector"][rows]
                missing.difference_update(places)
        return sorted(missing)

    def add(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """Append one shard: n texts and their (n, d) vectors."""
        if not len(texts):
            return
        records = np.empty(len(texts), self.record)
        records["text"] = [text_digest(text) for text in texts]
        records["vector"] = vectors
        name = hashlib.sha256(records["text"].tobytes()).hexdigest()[:24]
        self._place(self.folder / f"{name}.npy", records)

    def _place(self, path: Path, content: np.ndarray | bytes) -> None:
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with aside.open("wb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    np.save(file, content, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            sync(self.folder)
        finally:
            aside.unlink(missing_ok=True)
