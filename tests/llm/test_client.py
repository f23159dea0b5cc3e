"""The chat client against a local server: bounds, retries, typed failures, recording and replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mia_serve.core import MiaError
from mia_serve.llm import ChatClient, LlmFailed, ReplyCache
from tests.llm.asking import ask, echo, fail, say
from tests.llm.server import serving


def test_many_calls_are_under_way_but_no_more_than_allowed():
    with serving(echo, delay=0.1) as stub:
        replies = ask(stub.url, *map(str, range(20)), concurrency=5)
    assert [reply.text for reply in replies] == [f"re: {i}" for i in range(20)]
    assert stub.most_at_once == 5
    assert replies[0].usage == (7, 3) and not replies[0].cached


def test_the_request_is_the_protocols():
    with serving(echo) as stub:
        ask(stub.url, "hi", schema={"type": "object"}, api_key="sk-1", temperature=0.5, seed=3)
    assert stub.keys == ["Bearer sk-1"]
    assert stub.requests == [
        {
            "model": "m",
            "messages": say("hi"),
            "temperature": 0.5,
            "seed": 3,
            "max_tokens": 50,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "reply", "schema": {"type": "object"}},
            },
        }
    ]


def test_a_server_error_is_tried_again():
    replies = iter([500, 429, "fine"])
    with serving(lambda body: next(replies)) as stub:
        (reply,) = ask(stub.url, "hi", max_retries=2)
    assert reply.text == "fine" and len(stub.requests) == 3


@pytest.mark.parametrize(
    ("answer", "label", "requests", "transient", "hopeless"),
    [
        (500, "http 500", 2, True, False),
        (429, "http 429", 2, True, False),
        (400, "http 400", 1, False, False),
        (401, "http 401", 1, False, True),
        (404, "http 404", 1, False, True),
        (("", "stop"), "no content", 1, False, False),
        ((None, "stop"), "no content", 1, False, False),
        (("x", "content_filter"), "filtered", 1, False, False),
        (b"<html>hello</html>", "bad response", 1, True, False),
        (b'{"detail": "not a completion"}', "bad response", 1, True, False),
        (b'{"choices": []}', "bad response", 1, True, False),
        (b'{"choices": {"a": 1}}', "bad response", 1, True, False),
        (b'{"choices": [{"message": "hi"}]}', "bad response", 1, True, False),
        (b'{"choices": [{"message": {"content": ["hi"]}}]}', "bad response", 1, True, False),
        (b"[" * 200_000, "bad response", 1, True, False),
    ],
)
def test_a_failure_has_its_reason(answer: Any, label: str, requests: int, transient: bool, hopeless: bool):
    failure, made = fail(lambda body: answer)
    assert (failure.label, made, failure.transient, failure.hopeless) == (label, requests, transient, hopeless)


def test_no_server_is_unreachable_and_a_slow_one_times_out():
    with serving(echo) as stub:
        closed = stub.url
    with pytest.raises(LlmFailed, match="cannot be reached") as caught:
        ask(closed, "hi", max_retries=0)
    assert caught.value.reason == "unreachable" and caught.value.hopeless
    with serving(echo, delay=0.5) as stub, pytest.raises(LlmFailed, match="in time") as caught:
        ask(stub.url, "hi", max_retries=0, timeout=0.1)
    assert caught.value.reason == "timeout" and not caught.value.hopeless


def test_SRV_24_a_reply_cut_off_is_asked_for_once_more_with_a_larger_limit_and_then_fails():
    with serving(lambda body: ("whole", "stop") if body["max_tokens"] > 8 else ('{"a', "length")) as stub:
        (reply,) = ask(stub.url, "hi", max_tokens=8)
    assert reply.text == "whole" and [r["max_tokens"] for r in stub.requests] == [8, 32]
    failure, made = fail(lambda body: (" " * 9, "length"), max_tokens=8)
    assert failure.reason == "truncated" and made == 2 and "32 tokens" in str(failure)


@pytest.mark.parametrize(
    "url",
    [
        None,
        "",
        "localhost:8000/v1",
        "file:///etc",
        "http://h:x/v1",
        "http://h:99999/v1",
        "http://[::1",
        "http://h/v1\n",
        "http://",
    ],
)
def test_what_is_no_address_is_told_at_once(url: str | None):
    with pytest.raises(MiaError, match="http://localhost:8000/v1"):
        ChatClient(url, "m")


def test_EVL_16_recorded_replies_need_no_server(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    with serving(echo) as stub:
        first = ask(stub.url, "one", "two", cache=ReplyCache(file))
        again = ask(stub.url, "one", "three", cache=ReplyCache(file))
    assert len(stub.requests) == 3
    assert [reply.cached for reply in (*first, *again)] == [False, False, True, False]
    replayed = ask(None, "three", "two", "one", cache=ReplyCache(file, "replay"))
    assert [reply.text for reply in replayed] == ["re: three", "re: two", "re: one"]
    assert replayed[0].usage == (7, 3)
    entry = json.loads(file.read_text().splitlines()[0])
    assert entry["model"] == "m" and entry["seed"] == 0 and len(entry["key"]) == 64


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"temperature": 0.1}, {"max_tokens": 51}, {"schema": {"type": "null"}}]
)
def test_EVL_16_a_reply_is_that_of_its_settings(tmp_path: Path, change: dict[str, Any]):
    file = tmp_path / "c.jsonl"
    with serving(echo) as stub:
        ask(stub.url, "one", cache=ReplyCache(file))
    with pytest.raises(LlmFailed, match=r"'m' for call [0-9a-f]{16}") as caught:
        ask(None, "one", cache=ReplyCache(file, "replay"), **change)
    assert caught.value.reason == "not recorded"


def test_replay_shows_the_failures_too_and_recording_makes_the_call_again(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    with serving(lambda body: 400) as stub, pytest.raises(LlmFailed):
        ask(stub.url, "one", cache=ReplyCache(file))
    with pytest.raises(LlmFailed) as caught:
        ask(None, "one", cache=ReplyCache(file, "replay"))
    assert caught.value.label == "http 400"
    with serving(echo) as stub:
        assert ask(stub.url, "one", cache=ReplyCache(file))[0].text == "re: one"
    assert ask(None, "one", cache=ReplyCache(file, "replay"))[0].text == "re: one"


def test_equal_calls_at_the_same_time_are_one_request(tmp_path: Path):
    with serving(echo, delay=0.1) as stub:
        replies = ask(stub.url, *["same"] * 8, cache=ReplyCache(tmp_path / "c.jsonl"))
    assert len(stub.requests) == 1 and {reply.text for reply in replies} == {"re: same"}
    assert sum(reply.cached for reply in replies) == 7


def test_cache_off_neither_reads_nor_writes(tmp_path: Path):
    with serving(echo) as stub:
        ask(stub.url, "one", cache=ReplyCache(tmp_path / "c.jsonl", "off"))
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_line_is_ignored_and_does_not_spoil_the_next(tmp_path: Path):
    file = tmp_path / "c.jsonl"
    with serving(echo) as stub:
        ask(stub.url, "one", "zwei 潮", cache=ReplyCache(file))
        whole = file.read_bytes()
        last = whole.rindex(b"\n", 0, -1) + 1
        for cut in (last + 5, len(whole) - 2, whole.index("潮".encode()) + 1):
            file.write_bytes(whole[:cut])
            texts = [r.text for r in ask(stub.url, "one", "zwei 潮", "new", cache=ReplyCache(file))]
            assert texts == ["re: one", "re: zwei 潮", "re: new"]
            replayed = ask(None, "one", "zwei 潮", "new", cache=ReplyCache(file, "replay"))
            assert [r.text for r in replayed] == texts


def test_another_file_is_not_taken_for_a_cache(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"query_id": "q1"}\n')
    with pytest.raises(MiaError, match="other records"):
        ReplyCache(rows)
    with pytest.raises(FileNotFoundError, match="record them first"):
        ReplyCache(tmp_path / "none.jsonl", "replay")


@pytest.mark.parametrize("content", ["Chapter 1\n", "a,b\n1,2\n", "1\n", '{\n "rows": 1\n}\n', "\x00\x01"])
def test_a_file_of_something_else_is_not_added_to(tmp_path: Path, content: str):
    file = tmp_path / "book.txt"
    file.write_text(content)
    with pytest.raises(MiaError, match="holds no records of this program"):
        ReplyCache(file)
    assert file.read_text() == content
    file.write_text('{"key": "ab", "te')  # what a killed writer leaves of its first record
    assert ReplyCache(file).get("ab", "m") is None


@pytest.mark.parametrize(
    "entry",
    [
        {"key": "k", "text": "hi"},
        {"key": "k", "text": 5, "finish_reason": "stop", "usage": [1, 2]},
        {"key": "k", "text": "hi", "finish_reason": "stop", "usage": [1, 2, 3]},
        {"key": "k", "failed": "x"},
    ],
)
def test_a_reply_that_was_edited_by_hand_is_refused(tmp_path: Path, entry: dict[str, Any]):
    (tmp_path / "c.jsonl").write_text(json.dumps(entry) + "\n")
    with pytest.raises(MiaError, match="other records"):
        ReplyCache(tmp_path / "c.jsonl", "replay")


def test_half_of_a_surrogate_pair_and_odd_counts_of_tokens_stop_no_run(tmp_path: Path):
    said = {"choices": [{"message": {"content": "hi \ud800"}, "finish_reason": 1}], "usage": {"prompt_tokens": "7"}}
    with serving(lambda body: json.dumps(said).encode()) as stub:
        for _ in range(2):  # the second time out of the cache
            (reply,) = ask(stub.url, "hi", cache=ReplyCache(tmp_path / "c.jsonl"))
            assert (reply.text, reply.finish_reason, reply.usage.prompt_tokens) == ("hi ?", "1", 0)
    assert len(stub.requests) == 1


def test_a_key_out_of_a_file_loses_its_line_break_and_a_broken_one_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MIA_LLM_KEY", "sk-very-secret\n")
    with serving(echo) as stub:
        ask(stub.url, "hi")
    assert stub.keys == ["Bearer sk-very-secret"]
    for key in ("sk-very\nsecret", "sk-very-secr\u00e9t"):
        with pytest.raises(MiaError, match="set it again") as caught:
            ChatClient("http://h/v1", "m", api_key=key)
        assert "sk-" not in str(caught.value)


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level(0)
    file = tmp_path / "c.jsonl"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-open")
    monkeypatch.setenv("MIA_LLM_KEY", "sk-very-secret")
    answers = iter(["fine", 400])  # the stub's error message repeats the key
    with serving(lambda body: next(answers)) as stub:
        ask(stub.url, "hi", cache=ReplyCache(file))
        with pytest.raises(LlmFailed) as caught:
            ask(stub.url, "ho", cache=ReplyCache(file))
    assert stub.keys == ["Bearer sk-very-secret"] * 2
    assert "no, Bearer ***" in str(caught.value)
    seen = file.read_text() + str(caught.value) + caplog.text + "".join(capfd.readouterr())
    assert "very-secret" not in seen and '"failed"' in seen


def test_the_floor_is_light_and_knows_no_other():
    code = (
        "import sys, mia_serve.core, mia_serve.core.encoder\n"
        "assert not [m for m in sys.modules if m.startswith(('mia_serve.llm', 'openai'))]\n"
        "import mia_serve.llm\nassert 'openai' not in sys.modules and 'mia_serve.llm.client' not in sys.modules\n"
        "for name in mia_serve.llm.__all__: getattr(mia_serve.llm, name)\n"
        "floors = {m.split('.')[1] for m in sys.modules if m.startswith('mia_serve.')}\n"
        "assert floors == {'core', 'llm'} and 'openai' not in sys.modules, floors"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], env=os.environ)


def test_without_the_openai_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MiaError, match=r"pip install 'mia-retrieval\[llm\]'"):
        ChatClient("http://localhost:1/v1", "m")
