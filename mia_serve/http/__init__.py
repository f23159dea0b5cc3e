"""The inference server: embeddings, collections, search, rerank and answers over HTTP."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {"ServerConfig": "config", "create_app": "app", "run": "app"}

if TYPE_CHECKING:
    from mia_serve.http.app import create_app, run
    from mia_serve.http.config import ServerConfig

__all__ = ["ServerConfig", "create_app", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mia_serve.http' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mia_serve.http.{_HOME[name]}"), name)
