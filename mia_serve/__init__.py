"""MiA: retrieval with mindscapes and signatures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BM25Index": "mia_serve.lexical",
    "Encoder": "mia_serve.core",
    "EncoderSpec": "mia_serve.core",
    "IndexWriter": "mia_serve.index",
    "MiaError": "mia_serve.core",
    "Mindscape": "mia_serve.mindscape",
    "Retriever": "mia_serve.retriever",
    "SessionIndex": "mia_serve.index",
    "select_signature": "mia_serve.signature",
}

if TYPE_CHECKING:
    from mia_serve.core import Encoder, EncoderSpec, MiaError
    from mia_serve.index import IndexWriter, SessionIndex
    from mia_serve.lexical import BM25Index
    from mia_serve.mindscape import Mindscape
    from mia_serve.retriever import Retriever
    from mia_serve.signature import select_signature

__all__ = [
    "BM25Index",
    "Encoder",
    "EncoderSpec",
    "IndexWriter",
    "MiaError",
    "Mindscape",
    "Retriever",
    "SessionIndex",
    "select_signature",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mia_serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
