"""What a client may spend, what it counts, and what fits a model's context."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mia_serve.core import MiaError
from mia_serve.llm import Budget, ChatClient, LlmFailed, ReplyCache, ServedModel, Stats, served_models
from tests.llm.asking import ask, echo, fail, say
from tests.llm.server import Answer, serving


def test_a_budget_of_calls_is_kept_and_recorded_replies_are_free(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    budget = Budget(max_calls=3)
    with serving(echo, delay=0.05) as stub:

        async def run() -> list[Any]:
            async with ChatClient(stub.url, "m", cache=ReplyCache(file), budget=budget, concurrency=8) as client:
                asked = (client.chat(say(str(i)), max_tokens=50) for i in range(9))
                return [await asyncio.gather(*asked, return_exceptions=True), client.stats]

        replies, stats = asyncio.run(run())
        assert len(stub.requests) == 3 and budget.calls == 3
        spent = [reply for reply in replies if isinstance(reply, LlmFailed)]
        assert len(spent) == 6 and {failure.label for failure in spent} == {"budget"} and spent[0].hopeless
        assert "budget of 3 calls is used up" in str(spent[0])
        assert (stats.calls, stats.failed, stats.prompt_tokens) == (3, 6, 21)
        # What the budget refused is not recorded: with a new one, only that is asked.
        again = ask(stub.url, *map(str, range(9)), cache=ReplyCache(file), budget=Budget(max_calls=6))
        assert [reply.cached for reply in again].count(True) == 3 and len(stub.requests) == 9
        assert len(ask(stub.url, *map(str, range(9)), cache=ReplyCache(file), budget=Budget(max_calls=1))) == 9


def test_a_budget_of_tokens_is_passed_by_no_more_than_what_is_under_way():
    with serving(echo, delay=0.05) as stub:  # 10 tokens a call

        async def run(budget: Budget, concurrency: int) -> int:
            before = len(stub.requests)
            async with ChatClient(stub.url, "m", budget=budget, concurrency=concurrency) as client:
                asked = (client.chat(say(str(i))) for i in range(30))
                await asyncio.gather(*asked, return_exceptions=True)
            return len(stub.requests) - before

        assert asyncio.run(run(Budget(max_tokens=45), 1)) == 5
        budget = Budget(max_tokens=45)
        assert 5 <= asyncio.run(run(budget, 4)) <= 5 + 3
        assert asyncio.run(run(budget, 4)) == 0, "shared: the second client finds it spent"
        assert asyncio.run(run(Budget(), 30)) == 30


def test_an_endpoint_that_counts_no_tokens_does_not_make_the_budget_endless():
    uncounted = json.dumps({"choices": [{"message": {"content": "x" * 300}}]}).encode()
    with serving(lambda body: uncounted) as stub, pytest.raises(LlmFailed, match="budget of 500 tokens"):
        ask(stub.url, *map(str, range(20)), concurrency=1, budget=Budget(max_tokens=500))
    assert 2 <= len(stub.requests) <= 5
    for wrong in ({"max_calls": 0}, {"max_tokens": -1}):
        with pytest.raises(MiaError, match="give at least 1"):
            Budget(**wrong)


def test_counts_and_seconds_of_a_client_and_of_each_call(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    with serving(lambda body: 400 if body["messages"][0]["content"] == "wrong" else "fine", delay=0.2) as stub:
        ask(stub.url, "warm up")

        async def run() -> Stats:
            async with ChatClient(stub.url, "m", cache=ReplyCache(file), max_retries=0) as client:
                await asyncio.gather(*(client.chat(say(str(i))) for i in range(12)))
                await asyncio.sleep(1.5)  # not the endpoint's time
                with pytest.raises(LlmFailed):
                    await client.chat(say("wrong"))
                await client.chat(say("1"))
                return client.stats

        stats = asyncio.run(run())
    assert (stats.calls, stats.cached, stats.failed, stats.completion_tokens) == (13, 1, 1, 36)
    assert 0.4 <= stats.seconds < 1.5, "calls at the same time count once, pauses not at all"
    assert stats.to_dict()["failed"] == 1 and "1 without a usable reply" in stats.to_text()
    first, *_, failed = (json.loads(line) for line in file.read_text().splitlines())
    assert 0.2 <= first["seconds"] < 1.5 and first["usage"] == [7, 3] and "seconds" not in failed
    # a file of an older version, which has no seconds
    del first["seconds"]
    file.write_text(json.dumps(first) + "\n")
    recorded = ReplyCache(file, "replay").get(first["key"], "m")
    assert recorded is not None and recorded.cached and recorded.seconds == 0


# --- models and their context


def test_served_models():
    with serving(echo, models=["a", "b"], context=2048) as stub:
        assert asyncio.run(served_models(stub.url, "sk-1")) == [("a", 2048), ("b", 2048)]
    for body in (b'{"data": [{"id": "x"}]}', b'{"data": [{"id": "x", "max_model_len": "long", "permission": null}]}'):
        with serving(echo, models=body) as stub:
            assert asyncio.run(served_models(stub.url)) == [ServedModel("x", None)]
    for body in (b"<html>", b"[]", b'{"data": 3}', b'{"data": [{"name": "x"}]}', b"\xff", b"[" * 100_000):
        with serving(echo, models=body) as stub, pytest.raises(LlmFailed) as caught:
            asyncio.run(served_models(stub.url))
        assert caught.value.reason == "bad response"
    with serving(echo) as stub, pytest.raises(LlmFailed) as caught:
        asyncio.run(served_models(stub.url))
    assert caught.value.label == "http 404"
    with pytest.raises(LlmFailed, match="cannot be reached"):
        asyncio.run(served_models(stub.url))
    with pytest.raises(MiaError, match="http://localhost:8000/v1"):
        asyncio.run(served_models("localhost:8000"))


TOO_LONG = [
    "This model's maximum context length is 8192 tokens. However, your prompt contains at least 8193 input tokens",
    "max_tokens=9000 cannot be greater than max_model_len=8192. Please request fewer output tokens.",
    "Input length (300) exceeds model's maximum context length (256).",
    "Requested token count exceeds the model's maximum context length of 4096 tokens.",
    "the request exceeds the available context size, try increasing it",
    "max_tokens is too large: 100000. This model supports at most 16384 completion tokens",
]


def refusal(message: str, status: int = 400) -> Answer:
    body = json.dumps({"error": {"message": message, "type": "BadRequestError"}}).encode()
    return lambda _: (status, body)


@pytest.mark.parametrize("message", TOO_LONG)
def test_a_prompt_that_does_not_fit_is_too_long(message: str):
    failure, made = fail(refusal(message))
    assert (failure.label, made, failure.transient, failure.hopeless) == ("too long", 1, False, False)
    assert message[:40] in str(failure) and "shorten the prompt" in str(failure)


@pytest.mark.parametrize("message", ["temperature must be >= 0", "unknown field `seed`", "schema is invalid"])
def test_other_refusals_are_not(message: str):
    assert fail(refusal(message))[0].label == "http 400"
    assert fail(refusal(TOO_LONG[0], 500))[0].label == "http 500"


@pytest.mark.parametrize(
    ("context", "asked"),
    [
        (None, [100, 400]),  # not told
        (2048, [100, 400]),
        (307, [100, 300]),  # 7 are the prompt's
        (107, [100]),  # full: no use in asking again
    ],
)
def test_SRV_24_the_second_limit_is_what_the_context_has_room_for(
    tmp_path: Path, context: int | None, asked: list[int]
):
    file = tmp_path / "c.jsonl"
    cut = lambda body: ("whole", "stop") if body["max_tokens"] > 100 else ("cu", "length")  # noqa: E731
    with serving(cut, models=["other", "m"], context=context) as stub:
        results = []
        for mode in ("record", "replay"):
            try:
                results.append(ask(stub.url, "hi", max_tokens=100, cache=ReplyCache(file, mode))[0].text)
            except LlmFailed as failure:
                results.append(f"{failure.label}: {failure}")
    assert [request["max_tokens"] for request in stub.requests] == asked
    expected = "whole" if len(asked) == 2 else "truncated: the reply of 'm' was cut off at 100 tokens"
    assert results == [expected, expected], "replay is the same, without knowing the server"


def test_SRV_24_a_refused_second_limit_is_a_reply_cut_off():
    def answer(body: dict[str, Any]) -> Any:
        return ("cu", "length") if body["max_tokens"] == 8 else refusal(TOO_LONG[1])(body)

    failure, made = fail(answer, max_tokens=8)
    assert failure.label == "truncated" and made == 2 and "8 tokens" in str(failure)


def test_the_context_is_asked_for_once_and_recorded(tmp_path: Path):
    async def run(url: str | None, cache: ReplyCache | None) -> list[int | None]:
        async with ChatClient(url, "m", cache=cache) as client:
            return await asyncio.gather(client.context_tokens(), client.context_tokens())

    file = tmp_path / "c.jsonl"
    with serving(echo, models=["m"], context=512) as stub:
        assert asyncio.run(run(stub.url, ReplyCache(file))) == [512, 512]
        assert asyncio.run(run(stub.url, None)) == [512, 512]
    assert asyncio.run(run(None, ReplyCache(file, "replay"))) == [512, 512]
    with serving(echo) as stub:
        assert asyncio.run(run(stub.url, None)) == [None, None]
    (tmp_path / "none.jsonl").touch()
    assert asyncio.run(run(None, ReplyCache(tmp_path / "none.jsonl", "replay"))) == [None, None]
