"""The encode path that training and serving share."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mia_serve.core.errors import MiaError

_HOME = {
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
    "embed_batch": "encoder",
    "fuse_views": "scoring",
    "normalise": "scoring",
    "pad_sequences": "pooling",
    "pool_spans": "pooling",
}

if TYPE_CHECKING:
    from mia_serve.core.encoder import EncodeFailed, Encoder, QueryViews, embed_batch
    from mia_serve.core.pooling import Sequence, SequenceBatch, pad_sequences, pool_spans
    from mia_serve.core.scoring import fuse_views, normalise
    from mia_serve.core.spec import SPEC_FILE, EncoderSpec
    from mia_serve.core.template import MIA_INSTRUCTION, Template
    from mia_serve.core.tokenise import TextTokeniser

__all__ = [
    "MIA_INSTRUCTION",
    "SPEC_FILE",
    "EncodeFailed",
    "Encoder",
    "EncoderSpec",
    "MiaError",
    "QueryViews",
    "Sequence",
    "SequenceBatch",
    "Template",
    "TextTokeniser",
    "embed_batch",
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
