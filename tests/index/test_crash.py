"""Whatever stops a writer, and whenever: the index is that of a commit, and the next writer works at once."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mia_serve.index.segment_writer import HashedFile
from mia_serve.index.store import read_generation, read_snapshot
from mia_serve.index.writer import IndexWriter
from tests.index.stored import DIM, Contents, chunk_vectors, chunks, contents, leftovers

FORK = multiprocessing.get_context("fork")
RANGES = np.array([[-6.0] * DIM, [0.5] * DIM])


class Trap:
    """Count what a writer does to the disk; at the n-th time do half of it, or nothing, and call ``act``."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.left, self.act = step, act

    def arm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write = HashedFile._put

        def half_write(file: HashedFile, data: bytes | memoryview, size: int) -> None:
            if self.left == 1:
                file._file.write(data[: size // 2])
                file._file.flush()
            self.count()
            write(file, data, size)

        monkeypatch.setattr(HashedFile, "_put", half_write)
        for name in ("mkdir", "replace", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self.counted(os.fsync))

    def counted(self, function: Callable) -> Callable:
        def call(*args, **options):
            self.count()
            return function(*args, **options)

        return call

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()


def build(path: Path) -> None:
    with IndexWriter(path, DIM, storage="int8", ranges=RANGES) as writer:
        writer.add(*chunks(0, 5), [{"i": i} for i in range(5)])
        writer.add(*chunks(5, 8))


def add(path: Path) -> None:
    with IndexWriter(path) as writer:
        writer.add(*chunks(50, 55))


def delete(path: Path) -> None:
    with IndexWriter(path) as writer:
        writer.delete(["c1", "c2"])


def upsert(path: Path) -> None:
    with IndexWriter(path) as writer:
        writer.upsert(["c0", "new"], chunk_vectors(3, 4), ["t", "t"])


def compact(path: Path) -> None:
    with IndexWriter(path) as writer:
        writer.delete(["c0"])
        writer.compact()


def replace(path: Path) -> None:
    with IndexWriter(path, DIM, storage="int8", ranges=RANGES, replace=True) as writer:
        writer.add(*chunks(70, 72))


CHANGES = [build, add, delete, upsert, compact, replace]


def state(path: Path) -> Contents | None:
    try:
        return contents(path)
    except FileNotFoundError:
        return None


@pytest.fixture(params=CHANGES, ids=lambda change: change.__name__)
def change(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A change, an index before it (None: there is none), and both states."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what it does cannot be seen here, only waited for
    template = None
    if request.param is not build:
        template = tmp_path / "template"
        build(template)
        upsert(template)
        delete(template)
        with IndexWriter(template) as writer:
            writer.add(["c1"], chunk_vectors(1), ["s"])
            writer.add(["c2"], chunk_vectors(2), ["s"], [{"again": True}])
    after = tmp_path / "after"
    if template is not None:
        shutil.copytree(template, after)
    request.param(after)
    return request.param, template, state(template) if template else None, state(after)


def trials(template: Path | None, path: Path):
    """Number the steps, with a fresh index for each."""
    for step in range(1, 200):
        shutil.rmtree(path, ignore_errors=True)
        if template is not None:
            shutil.copytree(template, path)
        yield step
    raise AssertionError("a change of 200 steps")


def check(path: Path, before: Contents | None, after: Contents | None) -> None:
    """The index is that of one of two commits, and a new writer works at once and removes what is left."""
    found = state(path)
    assert found in (before, after)
    with IndexWriter(path, DIM, storage="int8") as writer:
        assert len(writer) == len(found or {})
        writer.upsert(["c0"], chunk_vectors(9), ["s"])
    assert state(path).keys() == (found or {}).keys() | {"c0"} and leftovers(path) == set()


def killed_at(step: int, run: Callable[[Path], None], path: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Trap(step, lambda: os.kill(os.getpid(), signal.SIGKILL)).arm(monkeypatch)
        run(path)


def test_SRV_51_kill_9_at_any_step_leaves_a_commit(change, tmp_path: Path) -> None:
    run, template, before, after = change
    seen = []
    for step in trials(template, tmp_path / "i"):
        child = FORK.Process(target=killed_at, args=(step, run, tmp_path / "i"))
        child.start()
        child.join(60)
        assert child.exitcode in (0, -signal.SIGKILL)
        seen.append(state(tmp_path / "i"))
        check(tmp_path / "i", before, after)
        if child.exitcode == 0:
            break
    assert len(seen) > 10 and before in seen and seen[-1] == after
    first = seen.index(after)
    assert all(found == before for found in seen[:first]) and all(found == after for found in seen[first:])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "^C"])
def test_an_error_at_any_step_leaves_a_commit_and_no_garbage(change, tmp_path: Path, error: BaseException) -> None:
    run, template, before, after = change

    def fail() -> None:
        raise error

    for step in trials(template, tmp_path / "i"):
        trap = Trap(step, fail)
        with pytest.MonkeyPatch.context() as monkeypatch:
            trap.arm(monkeypatch)
            try:
                run(tmp_path / "i")
            except type(error):
                assert state(tmp_path / "i") in (before, after)
        check(tmp_path / "i", before, after)
        if trap.left > 0:
            break


def test_everything_is_on_the_disk_before_the_manifest_says_so(change, tmp_path: Path, monkeypatch) -> None:
    run, template, _, _ = change
    path, flushed, commits = tmp_path / "i", set(), []
    if template is not None:
        shutil.copytree(template, path)
        flushed.update(item.stat().st_ino for item in path.rglob("*"))
    replace_file = os.replace

    def noted(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)

    def checked(source: Path, target: Path) -> None:
        missing = [item.name for item in (*path.rglob("*"), path) if item.stat().st_ino not in flushed]
        assert set(missing) <= {"lock"}
        commits.append(target)
        replace_file(source, target)
        flushed.discard(path.stat().st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", checked)
    run(path)
    assert commits and path.stat().st_ino in flushed


def model(generation: int) -> tuple[set[str], int]:
    """Ids and next row after that many commits of ``work``."""
    ids: set[str] = set()
    for number in range(1, generation + 1):
        ids |= {f"c{number}-{i}" for i in range(5)}
        ids -= {f"c{number - 4}-{i}" for i in range(4)}
    return ids, 6 * generation - 1 if generation else 0


def work(path: Path) -> None:
    """Commit without end: add, delete, update, compact."""
    while True:
        with IndexWriter(path, DIM, timeout=30) as writer:
            number = writer.commit() if writer.next_row else 0
            number += 1
            writer.add([f"c{number}-{i}" for i in range(5)], chunk_vectors(*range(5)), ["s"] * 5)
            if number > 4:
                writer.delete([f"c{number - 4}-{i}" for i in range(4)])
            if number > 1:
                writer.upsert([f"c{number - 1}-4"], chunk_vectors(number), ["s"])
            if number % 3 == 0:
                writer.compact()


def test_SRV_51_kill_9_at_random_times_while_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    path, rng, last = tmp_path / "i", random.Random(0), 0
    for _ in range(30):
        child = FORK.Process(target=work, args=(path,))
        child.start()
        end = time.monotonic() + rng.uniform(0.005, 0.1)
        while time.monotonic() < end:
            try:
                snapshot = read_snapshot(path)
            except FileNotFoundError:
                assert last == 0
                continue
            live = {segment.ids[i] for segment in snapshot.segments for i in segment.alive.nonzero()[0].tolist()}
            assert snapshot.generation >= last and (live, snapshot.next_row) == model(snapshot.generation)
            last = snapshot.generation
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
    with IndexWriter(path, DIM) as writer:
        assert set(contents(path)) == model(read_generation(path))[0] and leftovers(path) == set()
        assert len(writer) == len(contents(path))
    assert last > 10
