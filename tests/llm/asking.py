"""Short ways to ask the local server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mia_serve.llm import ChatClient, LlmFailed, Message, Reply
from tests.llm.server import Answer, serving


def say(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def echo(body: dict[str, Any]) -> str:
    return f"re: {body['messages'][-1]['content']}"


def ask(url: str | None, *texts: str, max_tokens: int = 50, schema: Any = None, **options: Any) -> list[Reply]:
    async def run() -> list[Reply]:
        async with ChatClient(url, "m", **options) as client:
            return await asyncio.gather(*(client.chat(say(text), schema, max_tokens) for text in texts))

    return asyncio.run(run())


def fail(answer: Answer, **options: Any) -> tuple[LlmFailed, int]:
    """Return how a call failed, and how many requests it made."""
    with serving(answer) as stub, pytest.raises(LlmFailed) as caught:
        ask(stub.url, "hi", **({"max_retries": 1} | options))
    return caught.value, len(stub.requests)
