"""The encode path that training and serving share."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mia_serve.core.errors import MiaError

_HOME = {
    "CacheReport": "vector_cache",
    "CachedEncoder": "cached_encoder",
    "EncodeFailed": "encoder",
    "Encoder": "encoder",
    "EncoderSpec": "spec",
    "MIA_INSTRUCTION": "template",
    "QueryViews": "encoder",
    "SPEC_FILE": "spec",
    "Sequence": "pooling",
    "SequenceBatch": "pooling",
    "Template": "template",
    "TextTokeniser": "tokenise",
    "default_cache": "vector_cache",
    "embed_batch": "encoder",
    "embed_texts": "vector_cache",
    "fuse_views": "scoring",
    "normalise": "scoring",
    "pad_sequences": "pooling",
    "pool_spans": "pooling",
}

if TYPE_CHECKING:
    from mia_serve.core.cached_encoder import CachedEncoder
    from mia_serve.core.encoder import EncodeFailed, Encoder, QueryViews, embed_batch
    from mia_serve.core.pooling import Sequence, SequenceBatch, pad_sequences, pool_spans
    from mia_serve.core.scoring import fuse_views, normalise
    from mia_serve.core.spec import SPEC_FILE, EncoderSpec
    from mia_serve.core.template import MIA_INSTRUCTION, Template
    from mia_serve.core.tokenise import TextTokeniser
    from mia_serve.core.vector_cache import CacheReport, default_cache, embed_texts

__all__ = [
    "MIA_INSTRUCTION",
    "SPEC_FILE",
    "CacheReport",
    "CachedEncoder",
    "EncodeFailed",
    "Encoder",
    "EncoderSpec",
    "MiaError",
    "QueryViews",
    "Sequence",
    "SequenceBatch",
    "Template",
    "TextTokeniser",
    "default_cache",
    "embed_batch",
    "embed_texts",
    "fuse_views",
    "normalise",
    "pad_sequences",
    "pool_spans",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; a command that only prints help or checks a recipe does not wait for it.
    if name not in _HOME:
        raise AttributeError(f"module 'mia_serve.core' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mia_serve.core.{_HOME[name]}"), name)
