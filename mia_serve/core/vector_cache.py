"""Encode no text twice: vectors are remembered in a folder that all commands and all encoders share."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.core.vector_shards import VectorCache, text_digest

if TYPE_CHECKING:
    from mia_serve.core.encoder import Encoder

__all__ = [
    "CacheReport",
    "Role",
    "VectorCache",
    "default_cache",
    "embed_texts",
    "encode_texts",
    "encoder_facts",
    "text_digest",
]

Role = Literal["query", "document"]

# Texts of like length are encoded together, so many or so many characters: two batches of a large GPU.
_BLOCK, _BLOCK_CHARACTERS = 4096, 1 << 20
_SHARD, _SHARD_SECONDS = 4096, 60.0  # a killed run loses at most so many texts, or so much time


@dataclass
class CacheReport:
    """How many texts were encoded, and how many did not have to be.

    Attributes:
        encoded: Texts that went through the model.
        known: Texts whose vectors the cache had.
        repeated: Texts that stood earlier in the same call.
    """

    encoded: int = 0
    known: int = 0
    repeated: int = 0

    def to_text(self) -> str:
        """Return for example ``encoded 120 texts, 4,880 known``."""
        text = f"encoded {self.encoded:,} text{'' if self.encoded == 1 else 's'}, {self.known:,} known"
        return text + (f", {self.repeated:,} repeated" if self.repeated else "")

    def to_dict(self) -> dict[str, int]:
        """Return the counts, JSON-ready."""
        return asdict(self)


def default_cache() -> Path | None:
    """Return the folder where commands keep vectors: ``$MIA_CACHE``, else ``~/.cache/mia/vectors``.

    ``$XDG_CACHE_HOME`` stands for ``~/.cache`` where it is an absolute path.

    Returns:
        None where ``MIA_CACHE`` is ``off``, or there is no home.
    """
    given = os.environ.get("MIA_CACHE", "")
    if given:
        return None if given.lower() == "off" else Path(given).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification: others are to be ignored
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "mia" / "vectors"


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


def embed_texts(
    encoder: Encoder,
    texts: Sequence[str],
    role: Role,
    cache: VectorCache | str | Path | None,
    report: CacheReport | None = None,
) -> np.ndarray:
    """Encode texts, each different one once, and those that the cache knows not at all.

    What is encoded is written to the cache as the work goes on, so that a run that is killed is not lost.

    Args:
        encoder: What to encode with.
        texts: n texts; queries are encoded without signatures.
        role: ``query`` or ``document``.
        cache: Folder of the cache, such as :func:`default_cache`; or one that is open, of this encoder and role; None
            for none.
        report: Counts are added to it.

    Returns:
        (n, d) float32 unit rows in the order of ``texts``.

    Raises:
        MiaError: A text is not a string, or a query is empty or too long for the encoder.
        EncodeFailed: Texts did not fit into device memory; the others are in it, and in the cache.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise MiaError("texts to encode must be a list of strings")
    place: dict[str, int] = {}
    places = np.fromiter((place.setdefault(text, len(place)) for text in texts), np.int64, len(texts))
    different = list(place)
    if role == "query" and not all(text.strip() for text in different):
        raise MiaError("a query is empty; drop it or give it a text")
    vectors = np.empty((len(different), encoder.dim), np.float32)
    if isinstance(cache, str | Path):
        cache = VectorCache(cache, encoder_facts(encoder, role))
    missing = list(range(len(different))) if cache is None else cache.fill(different, vectors)
    failed = _encode_missing(encoder, different, role, missing, vectors, cache)
    if report is not None:
        report.encoded += len(missing)
        report.known += len(different) - len(missing)
        report.repeated += len(texts) - len(different)
    found = vectors if len(different) == len(texts) else vectors[places]
    if failed:
        from mia_serve.core.encoder import EncodeFailed

        raise EncodeFailed(np.flatnonzero(np.isin(places, failed)).tolist(), {role: found})
    return found


def encode_texts(encoder: Encoder, texts: list[str], role: Role) -> np.ndarray:
    """Encode texts in a role, (n, d); a query that is refused is named by its words.

    Raises:
        MiaError: A query is empty or too long.
    """
    if role == "document":
        return encoder.encode_documents(texts)
    try:
        return encoder.encode_queries(texts)
    except MiaError:
        for text in texts:  # its message counts rows of this block, which says nothing to a reader
            try:
                encoder.tokenise_query(text)
            except MiaError as error:
                raise MiaError(f"query {text[:60]!r}: {str(error).removeprefix('query 0 ')}") from None
        raise


def _encode_missing(
    encoder: Encoder,
    texts: Sequence[str],
    role: Role,
    missing: list[int],
    vectors: np.ndarray,
    cache: VectorCache | None,
) -> list[int]:
    """Encode the missing texts into their rows, the longest first; return those that did not fit into memory."""
    if not missing:
        return []
    from tqdm import tqdm

    from mia_serve.core.encoder import EncodeFailed

    failed: list[int] = []
    waiting: list[int] = []
    written = time.monotonic()
    bar = tqdm(total=len(missing), desc=f"encode, {role}", disable=not sys.stderr.isatty())
    try:
        for block in _blocks(texts, missing):
            done = block
            try:
                vectors[block] = encode_texts(encoder, [texts[i] for i in block], role)
            except EncodeFailed as error:
                vectors[block] = error.vectors[role]
                lost = {block[row] for row in error.rows}
                failed += lost
                done = [i for i in block if i not in lost]
            bar.update(len(block))
            waiting += done
            if cache is not None and (len(waiting) >= _SHARD or time.monotonic() - written > _SHARD_SECONDS):
                cache.add([texts[i] for i in waiting], vectors[waiting])
                waiting, written = [], time.monotonic()
    finally:
        bar.close()
        if cache is not None:
            cache.add([texts[i] for i in waiting], vectors[waiting])
    return sorted(failed)


def _blocks(texts: Sequence[str], rows: list[int]) -> Iterator[list[int]]:
    """Cut the rows of texts, sorted by descending length, into blocks of bounded size."""
    block: list[int] = []
    size = 0
    for i in sorted(rows, key=lambda i: (-len(texts[i]), i)):
        if block and (len(block) == _BLOCK or size + len(texts[i]) > _BLOCK_CHARACTERS):
            yield block
            block, size = [], 0
        block.append(i)
        size += len(texts[i])
    if block:
        yield block
