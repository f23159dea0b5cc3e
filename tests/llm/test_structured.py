"""JSON out of replies: tolerant to dress, strict about content."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from mia_serve.llm import ChatClient, LlmFailed, ask_json, read_json
from tests.llm.server import serving

Indexes = TypeAdapter(list[Annotated[int, Field(strict=True)]])


class Update(BaseModel):
    event: Literal["continue", "stop"]
    sessions: list[str]


STOP = Update(event="stop", sessions=["b:w1"])
PLAIN = '{"event": "stop", "sessions": ["b:w1"]}'


@pytest.mark.parametrize(
    "reply",
    [
        PLAIN,
        f"Here: ```json {PLAIN}```",
        f"Here you are:\n```json\n{PLAIN}\n```\nAnything else?",
        f"```\n{PLAIN}\n```",
        f"Sure. {PLAIN} I hope {{this}} helps",
        f"[{PLAIN}]",
        f'{{"reply": {PLAIN}}}',
        "{'event': 'stop', 'sessions': ['b:w1',]}",
        f"<think>Either [1] or {{'event': 2}}, so {PLAIN.replace('stop', 'continue')}?</think>\n{PLAIN}",
        f"```json\n{PLAIN}",
        f"{PLAIN}\n{PLAIN}",
        f"\ufeff\n {PLAIN} ",
    ],
)
def test_SRV_26_dressed_up_json_is_found(reply: str):
    assert read_json(reply, Update) == STOP


@pytest.mark.parametrize(
    ("reply", "indexes"),
    [
        ("[0, 3]", [0, 3]),
        ("[-1]", [-1]),
        ("```json\n[2]\n```", [2]),
        ("Answer: [0,3].", [0, 3]),
        ('{"indexes": [0, 3]}', [0, 3]),
        ("[[4, 5]]", [4, 5]),
        ("[]", []),
        ('The passage "x]" says so: [1]', [1]),
        ("(a [sic!] word) [7]", [7]),
    ],
)
def test_SRV_26_arrays(reply: str, indexes: list[int]):
    assert read_json(reply, Indexes) == indexes


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ("", "no JSON"),
        ("I keep the first and the third.", "no JSON"),
        ("[0, 3", "no JSON"),
        ("[true]", "valid integer"),
        ('["0"]', "valid integer"),
        ("[0.5]", "integer"),
        ('{"a": [0], "b": [1]}', "list"),
        ("[0] helps, and so do [1, 2]", "2 different JSON values"),
        ("[" * 100_000, "no JSON"),
        ("[" * 100_000 + "]" * 100_000, "no JSON"),
        ("-" * 100_000 + "1", "no JSON"),
        ("[" + "9" * 5000 + "]", "no JSON"),
    ],
)
def test_SRV_26_what_does_not_fit_is_refused(reply: str, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        read_json(reply, Indexes)


def test_SRV_26_a_missing_key_is_named():
    with pytest.raises(ValueError, match=r"Field required \(at event\)"):
        read_json('{"sessions": []}', Update)


@pytest.mark.parametrize("code", ["__import__('os').system('touch {0}')", "open('{0}', 'w')", "[open('{0}', 'w')]"])
def test_SRV_27_nothing_in_a_reply_is_run(tmp_path: Path, code: str):
    made = tmp_path / "made"
    for reply in (code.format(made), f"```python\n{code.format(made)}\n```", f"Here: {code.format(made)}"):
        with pytest.raises(ValueError, match=r"no JSON|list"):
            read_json(reply, Indexes)
    assert not made.exists()


def run(answers: list[Any], shape: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return the value (or the failure) and the requests."""
    queue = iter(answers)
    with serving(lambda body: next(queue)) as stub:

        async def ask() -> Any:
            async with ChatClient(stub.url, "m", max_retries=0) as client:
                return await ask_json(client, [{"role": "user", "content": "which?"}], shape)

        try:
            return asyncio.run(ask()), stub.requests
        except LlmFailed as failure:
            return failure, stub.requests


def test_SRV_26_a_wrong_reply_is_repaired_once():
    value, requests = run(['{"event": "leap"}', PLAIN], Update)
    assert value == STOP
    roles = [message["role"] for message in requests[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert requests[1]["messages"][1]["content"] == '{"event": "leap"}'
    assert "'continue' or 'stop'" in requests[1]["messages"][2]["content"]
    sent = requests[0]["response_format"]["json_schema"]["schema"]
    assert sent["required"] == ["event", "sessions"] and sent == requests[1]["response_format"]["json_schema"]["schema"]


def test_SRV_26_two_wrong_replies_are_a_typed_failure():
    failure, requests = run(["no", "[0, 1]", PLAIN], Update)
    assert isinstance(failure, LlmFailed) and failure.reason == "bad reply" and len(requests) == 2
    assert "'[0, 1]'" in str(failure) and not failure.transient and not failure.hopeless


def test_an_array_is_asked_for_by_the_prompt_alone():
    value, requests = run(["[1]"], list[int])
    assert value == [1] and "response_format" not in requests[0]
