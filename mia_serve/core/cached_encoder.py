"""An encoder that remembers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from mia_serve.core.encoder import Encoder
from mia_serve.core.tokenise import Signature
from mia_serve.core.vector_cache import CacheReport, Role, VectorCache, embed_texts, encoder_facts


class CachedEncoder(Encoder):
    """An encoder whose documents, and queries without signatures, come out of a cache where it has them.

    It shares model and tokenizer with the encoder that it is made of. That must not be trained meanwhile: what decides
    a vector is taken down once.

    Args:
        encoder: Encodes what the cache does not know.
        cache: Folder of the cache; None for none, in which case repeated texts are still encoded only once a call.
        report: Counts are added to it; one of its own by default.
    """

    def __init__(self, encoder: Encoder, cache: str | Path | None, report: CacheReport | None = None) -> None:
        vars(self).update(vars(encoder))  # not super().__init__, which would build the tokenizer's state once more
        self.cache = cache
        self.report = report if report is not None else CacheReport()
        self._plain = encoder
        self._opened: dict[Role, VectorCache] = {}

    @cached_property
    def spec_hash(self) -> str:
        """Return the encoder's hash, which reads all weights, taken once."""
        return self._plain.spec_hash

    def encode_documents(self, texts: Sequence[str], out: np.ndarray | None = None) -> np.ndarray:
        """Encode documents, as :meth:`Encoder.encode_documents`."""
        vectors = self._embed_texts(texts, "document")
        if out is None:
            return vectors
        out[:] = vectors
        return out

    def encode_queries(
        self,
        texts: Sequence[str],
        signatures: Sequence[Signature] | None = None,
        alpha: float | None = None,
        truncate: bool = False,
    ) -> np.ndarray:
        """Encode queries, as :meth:`Encoder.encode_queries`; those with signatures always go through the model."""
        if truncate or (signatures is not None and alpha != 0.0):
            return self._plain.encode_queries(texts, signatures, alpha, truncate)
        return self._embed_texts(texts, "query")

    def _embed_texts(self, texts: Sequence[str], role: Role) -> np.ndarray:
        if self.cache is not None and role not in self._opened:
            self._opened[role] = VectorCache(self.cache, encoder_facts(self, role))
        return embed_texts(self._plain, texts, role, self._opened.get(role), self.report)
