"""Language models behind the OpenAI protocol: a bounded client, recorded replies, answers as checked JSON."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Budget": "spending",
    "ChatClient": "client",
    "Engine": "engine",
    "Journal": "journal",
    "LlmFailed": "failures",
    "Message": "client",
    "Metered": "spending",
    "Reply": "cache",
    "ReplyCache": "cache",
    "ServedModel": "endpoint",
    "Stats": "spending",
    "Usage": "cache",
    "ask_json": "structured",
    "read_json": "structured",
    "served_models": "endpoint",
}

if TYPE_CHECKING:
    from mia_serve.llm.cache import Reply, ReplyCache, Usage
    from mia_serve.llm.client import ChatClient, Message
    from mia_serve.llm.endpoint import ServedModel, served_models
    from mia_serve.llm.engine import Engine
    from mia_serve.llm.failures import LlmFailed
    from mia_serve.llm.journal import Journal
    from mia_serve.llm.spending import Budget, Metered, Stats
    from mia_serve.llm.structured import ask_json, read_json

__all__ = [
    "Budget",
    "ChatClient",
    "Engine",
    "Journal",
    "LlmFailed",
    "Message",
    "Metered",
    "Reply",
    "ReplyCache",
    "ServedModel",
    "Stats",
    "Usage",
    "ask_json",
    "read_json",
    "served_models",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mia_serve.llm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mia_serve.llm.{_HOME[name]}"), name)
