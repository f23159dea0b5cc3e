"""Folders are whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mia_serve.core import storage
from mia_serve.core.storage import recover, write_aside


def fill(path: Path, text: str) -> None:
    with write_aside(path) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "a.txt").write_text(text)


def read(path: Path) -> str:
    recover(path)
    return (path / "inner" / "a.txt").read_text()


def test_a_new_folder_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path):
    fill(tmp_path / "x", "one")
    fill(tmp_path / "x", "two")
    assert read(tmp_path / "x") == "two" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_writer_that_raises_leaves_the_old_folder(tmp_path: Path):
    fill(tmp_path / "x", "one")
    with pytest.raises(OSError, match="disk full"), write_aside(tmp_path / "x") as aside:
        (aside / "half").write_text("h")
        raise OSError("disk full")
    assert read(tmp_path / "x") == "one" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "_exchange", lambda one, other: False)  # a system that cannot
    fill(tmp_path / "x", "one")
    rename = os.rename

    def second_fails(source: Path, target: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError("busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="busy"):
        fill(tmp_path / "x", "two")
    monkeypatch.undo()
    assert read(tmp_path / "x") == "one"


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_SRV_51_kill_9_at_any_rename_leaves_a_whole_folder(tmp_path: Path, renames: int):
    fill(tmp_path / "x", "one")
    code = f"""
import os, signal
from pathlib import Path
from mia_serve.core import storage
from tests.core.test_storage import fill
storage._exchange = lambda one, other: False
rename, left = os.rename, [{renames}]
def counted(a, b):
    if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    rename(a, b)
os.rename = counted
fill(Path({str(tmp_path / "x")!r}), "two")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60)
    assert done.returncode == (0 if renames == 2 else -signal.SIGKILL)
    assert read(tmp_path / "x") == ("two" if renames == 2 else "one")
    fill(tmp_path / "x", "three")
    assert read(tmp_path / "x") == "three"


@pytest.mark.parametrize("when", ["before", "after"])
def test_SRV_51_kill_9_around_the_exchange_leaves_a_whole_folder(tmp_path: Path, when: str):
    fill(tmp_path / "x", "one")
    code = f"""
import os, signal
from pathlib import Path
from mia_serve.core import storage
from tests.core.test_storage import fill
exchange = storage._exchange
def killed(one, other):
    if {when!r} == "after": assert exchange(one, other)
    os.kill(os.getpid(), signal.SIGKILL)
storage._exchange = killed
fill(Path({str(tmp_path / "x")!r}), "two")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60)
    assert done.returncode == -signal.SIGKILL
    # Nobody has to recover anything: the place is never empty.
    assert (tmp_path / "x" / "inner" / "a.txt").read_text() == ("two" if when == "after" else "one")
    fill(tmp_path / "x", "three")
    assert read(tmp_path / "x") == "three"
