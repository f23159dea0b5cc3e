"""``mia-serve llm up``, and the options of the commands that ask a language model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from mia_serve.cli.llm_options import (
    BudgetOption,
    ConcurrencyOption,
    LlmCacheOption,
    LlmModelOption,
    LlmOption,
    MaxTokens,
    Price,
    PriceOption,
    ReplayOption,
    cost_text,
    open_client,
)
from mia_serve.core import MiaError
from mia_serve.llm import LlmFailed, Reply, ReplyCache, Stats, Usage
from tests.conftest import Run
from tests.llm.fake_vllm import FakeVllm, gone, running
from tests.llm.server import serving


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(tmp_path, monkeypatch)


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mia_serve", "llm", "up", "--device", "cpu", *arguments]
    environment = os.environ | {"MIA_VLLM_PYTHON": sys.executable}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_up_prints_the_address_and_stops_the_tree_when_asked(fake: FakeVllm, end: signal.Signals):
    command = start("org/model", "--name", "small", "--", "--max-model-len", "77")
    assert command.stdout is not None
    url = command.stdout.readline().strip()
    pids = fake.pids()
    assert url.startswith("http://127.0.0.1:") and url.endswith("/v1") and all(map(running, pids))
    assert fake.seen()["argv"][-2:] == ["--max-model-len", "77"]
    command.send_signal(end)
    out, err = command.communicate(timeout=30)
    assert command.returncode == 0 and out == "" and err.endswith("stopped\n") and "small is served at" in err
    assert not any(map(running, pids))


def test_up_stopped_while_it_starts_leaves_nothing(fake: FakeVllm):
    fake.set(warm=60)
    command = start("org/model")
    pids = fake.pids()
    command.terminate()
    out, err = command.communicate(timeout=30)
    assert command.returncode == 1 and out == "" and err.endswith("stopped before it was ready\n")
    assert gone(pids, 0)


def test_up_that_fails_shows_why(fake: FakeVllm, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setenv("MIA_VLLM_PYTHON", sys.executable)
    fake.set(die=True)
    ran = run("llm", "up", "org/model", "--log", tmp_path / "log", "--device", "cpu")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert ran.code == 1 and ran.out == "" and "Traceback" not in ran.err.partition("error: ")[0]
    assert f"its log, {tmp_path / 'log'}, ends with\n" in ran.err and "before that: ValueError: the cause" in ran.err
    monkeypatch.setenv("MIA_VLLM_PYTHON", "nothing")
    assert "MIA_VLLM_PYTHON='nothing' is no program" in run("llm", "up", "org/model").refusal
    assert run("llm", "up", "org/model", "--port", "0").code == 2


def called(*arguments: str) -> dict[str, Any]:
    """Return what a command with all of the options gets."""
    got: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    def command(
        llm: LlmOption = None,
        llm_model: LlmModelOption = None,
        llm_cache: LlmCacheOption = None,
        replay: ReplayOption = False,
        concurrency: ConcurrencyOption = 64,
        budget: BudgetOption = None,
        price: PriceOption = None,
        max_tokens: MaxTokens = 512,
    ) -> None:
        got.update(locals())

    app(list(arguments), standalone_mode=False)
    return got


def test_the_options_say_what_they_are_called():
    got = called("--llm", "u", "--llm-model", "m", "--llm-cache", "f", "--replay", "--concurrency", "3",
                 "--llm-budget", "1000", "--llm-price", "0.15, 0.6", "--llm-max-tokens", "99")  # fmt: skip
    assert (got["llm"], got["llm_model"], got["llm_cache"], got["replay"]) == ("u", "m", Path("f"), True)
    assert (got["concurrency"], got["budget"], got["max_tokens"]) == (3, 1000, 99)
    assert got["price"] == Price(0.15, 0.6)
    for wrong in ("1", "1,x", "1,-2", "nan,1", "1,2,3"):
        with pytest.raises(Exception, match=r"give two numbers|0 or more"):
            called("--llm-price", wrong)


def test_the_client_is_checked_before_anything_is_loaded(tmp_path: Path):
    file = tmp_path / "replies.jsonl"
    for options, message in (
        ((None, "m", None, False), "give --llm URL"),
        (("http://localhost:1/v1", "m", None, True), "--replay needs --llm-cache"),
        (("localhost:1", "m", None, False), "give one such as http://localhost:8000/v1"),
    ):
        with pytest.raises(MiaError, match=message):
            open_client(*options)
    with pytest.raises(FileNotFoundError, match="record them first"):
        open_client(None, "m", file, True)
    with pytest.raises(LlmFailed, match="cannot be reached"):
        open_client("http://127.0.0.1:1/v1", None, None, False)
    with pytest.raises(MiaError, match="max_tokens=0"):
        open_client("http://localhost:1/v1", "m", None, False, budget=0)


def test_without_a_name_it_is_the_only_model_served_or_recorded(tmp_path: Path):
    with serving(lambda body: "x", models=["small"]) as stub:
        client = open_client(stub.url, None, None, False, concurrency=7, budget=9)
        assert (client.model, client.concurrency, client.budget.max_tokens) == ("small", 7, 9)
    for names in ([], ["a", "b"]):
        with serving(lambda body: "x", models=names) as stub, pytest.raises(MiaError, match="--llm-model NAME"):
            open_client(stub.url, None, None, False)
    cache = ReplyCache(tmp_path / "replies.jsonl")
    cache.put("k1", "small", 0, Reply("x", "stop", Usage()))
    assert open_client(None, None, cache.path, True).model == "small"
    cache.put("k2", "large", 0, Reply("x", "stop", Usage()))
    with pytest.raises(MiaError, match=r"has 2 models \(small, large\)"):
        open_client(None, None, cache.path, True)


def test_the_cost_line():
    stats = Stats(calls=3, cached=2, failed=1, prompt_tokens=2_000_000, completion_tokens=500_000, seconds=10)
    line = cost_text(stats, Price(0.15, 0.6))
    assert line.endswith(", $0.6000\n") and "3 calls" in line and "50000 new tokens/s" in line
    assert cost_text(stats, Price(2, 8)).endswith(", $8.00\n")
    assert "$" not in cost_text(stats) and cost_text(Stats()) == "LLM: 0 calls, 0 recorded replies used, 0 + 0 tokens\n"


def test_the_options_load_no_client():
    code = "import sys; from mia_serve.cli import llm, llm_options; sys.exit('openai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
