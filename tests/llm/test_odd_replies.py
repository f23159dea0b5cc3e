"""Whatever an endpoint sends, the client gives a reply or a typed failure."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

from mia_serve.llm import ChatClient, LlmFailed, Reply, ReplyCache, Stats, ask_json
from tests.llm.asking import say
from tests.llm.server import serving


def odd_values(random: Random, depth: int = 0) -> Any:
    """Return any JSON value, odd ones more often than not."""
    plain = [
        None, True, False, 0, -1, 2**70, 1e308, "", "stop", "length", "\ud800", "\udfff\ud800", "\x00\x1b[2J",
        "潮" * 50, "x" * 100_000, "<think>" * 50, '{"a": [', "```json\n", [], {}, [[]], {"content": {}},
    ]  # fmt: skip
    if depth > 3 or random.random() < 0.5:
        return random.choice(plain)
    if random.random() < 0.5:
        return [odd_values(random, depth + 1) for _ in range(random.randrange(3))]
    names = ["choices", "message", "content", "usage", "finish_reason", "error", "id", "index", "tool_calls"]
    return {name: odd_values(random, depth + 1) for name in random.sample(names, random.randrange(4))}


def odd_body(random: Random) -> bytes:
    """Return a completion with something wrong in it, or bytes that are none."""
    completion: dict[str, Any] = {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
    places: list[tuple[Any, Any]] = [(completion, key) for key in completion]
    places += [(completion["choices"], 0), *((completion["choices"][0], key) for key in ("message", "finish_reason"))]
    places += [(completion["choices"][0]["message"], key) for key in ("role", "content", "refusal", "tool_calls")]
    places += [(completion["usage"], key) for key in completion["usage"]]
    for holder, key in random.sample(places, random.choice([1, 1, 2])):
        holder[key] = odd_values(random)
    raw = json.dumps(odd_values(random) if random.random() < 0.1 else completion).encode()
    spoilt = random.random()
    if spoilt < 0.15:
        at = random.randrange(len(raw))
        raw = raw[:at] + random.choice([b"\xff\xfe", b"\x00", b"\xc3", b"\xed\xa0\x80"]) + raw[at:]
    elif spoilt < 0.25:
        raw = raw[: random.randrange(len(raw))]
    elif spoilt < 0.3:
        raw = b"<!doctype html><title>502</title>" + raw
    return raw


def test_SRV_26_whatever_comes_back_is_a_reply_or_a_typed_failure(tmp_path: Path):
    random = Random(5)
    bodies = [odd_body(random) for _ in range(250)]
    texts = [str(i) for i in range(len(bodies))]
    file = tmp_path / "c.jsonl"

    async def run(url: str | None, cache: ReplyCache) -> tuple[list[Any], Stats]:
        async with ChatClient(url, "m", cache=cache, max_retries=0) as client:
            free = (client.chat(say(text), max_tokens=50) for text in texts)
            typed = (ask_json(client, say(f"json {text}"), dict[str, int], max_tokens=50) for text in texts)
            return await asyncio.gather(*free, *typed, return_exceptions=True), client.stats

    def answer(body: dict[str, Any]) -> bytes:
        return bodies[int(body["messages"][0]["content"].removeprefix("json "))]

    with serving(answer) as stub:
        results, stats = asyncio.run(run(stub.url, ReplyCache(file)))
    odd = {type(result) for result in results} - {Reply, LlmFailed, dict}
    assert not odd, [result for result in results if type(result) in odd][:3]
    failures = [result for result in results[:250] if isinstance(result, LlmFailed)]
    assert 60 < len(failures) < 220 and {"bad response", "no content"} <= {f.reason for f in failures}
    for result in results:
        (result.text if isinstance(result, Reply) else str(result)).encode()
        assert not isinstance(result, LlmFailed) or len(str(result)) < 1000
    assert all(type(n) is int and 0 <= n < 2**80 for n in (stats.prompt_tokens, stats.completion_tokens))
    replayed, _ = asyncio.run(run(None, ReplyCache(file, "replay")))
    shown = [[r.text if isinstance(r, Reply) else str(r) for r in some] for some in (results, replayed)]
    assert shown[0] == shown[1]
