"""Changes to a stored index: rows keep their numbers, wrong input changes nothing, memory and disk stay small."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from mia_serve.cli.app import FAILED, exit_code
from mia_serve.core import MiaError, storage
from mia_serve.index.store import read_generation, read_snapshot
from mia_serve.index.vectors import Block, calibrate, decode, encode_storage
from mia_serve.index.writer import IndexWriter
from tests.index.stored import DIM, chunk_vectors, chunks, contents, leftovers

FORK = multiprocessing.get_context("fork")


def build(path: Path, count: int = 6, **options) -> None:
    with IndexWriter(path, DIM, **options) as writer:
        writer.add(*chunks(0, count))


def segments(path: Path) -> list[int]:
    return [len(segment.ids) for segment in read_snapshot(path).segments]


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_chunks_come_back_as_they_were_given(tmp_path: Path, kind) -> None:
    ranges = np.array([[-6.0] * DIM, [0.05] * DIM]) if kind == "int8" else None
    with IndexWriter(tmp_path / "deep" / "index", DIM, spec_hash="abc", storage=kind, ranges=ranges) as writer:
        writer.add(*chunks(0, 4))
        writer.add(*chunks(4, 6), [{"lang": "中文", "n": [1, None, 2.5]}, None])
        writer.add([], np.empty((0, DIM)), [])
        assert len(writer) == 6 and "c5" in writer and "c6" not in writer and writer.next_row == 6
    snapshot = read_snapshot(tmp_path / "deep" / "index", expected_spec_hash="abc")
    assert (snapshot.dim, snapshot.storage, snapshot.spec_hash) == (DIM, kind, "abc")
    assert (snapshot.generation, snapshot.next_row, len(snapshot.segments)) == (1, 6, 1)
    found = contents(tmp_path / "deep" / "index")
    assert list(found) == [f"c{i}" for i in range(6)] and [row for row, *_ in found.values()] == list(range(6))
    assert [entry[1] for entry in found.values()] == ["s0", "s0", "s0", "s1", "s1", "s1"]
    assert [entry[2] for entry in found.values()] == [None] * 4 + [{"lang": "中文", "n": [1, None, 2.5]}, None]
    step = 0.05 if kind == "int8" else 0
    np.testing.assert_allclose([entry[3] for entry in found.values()], chunk_vectors(*range(6)), atol=0.51 * step)


def test_no_row_number_is_given_twice_nor_changed(tmp_path: Path) -> None:
    build(tmp_path / "i")
    with IndexWriter(tmp_path / "i") as writer:
        writer.delete(["c5", "c1"])
    with IndexWriter(tmp_path / "i") as writer:
        writer.upsert(["c2", "new"], chunk_vectors(70, 71), ["other", "other"], [{"a": 1}, None])
        writer.add(["c5"], chunk_vectors(72), ["s"])
    rows = {name: row for name, (row, *_) in contents(tmp_path / "i").items()}
    assert rows == {"c0": 0, "c3": 3, "c4": 4, "c2": 6, "new": 7, "c5": 8}
    before = contents(tmp_path / "i")
    assert before["c2"] == (6, "other", {"a": 1}, tuple(chunk_vectors(70)[0]))
    with IndexWriter(tmp_path / "i") as writer:
        writer.compact()
    assert contents(tmp_path / "i") == before and segments(tmp_path / "i") == [6]
    with IndexWriter(tmp_path / "i") as writer:
        writer.delete(list(before))
    assert contents(tmp_path / "i") == {} and segments(tmp_path / "i") == []
    with IndexWriter(tmp_path / "i") as writer:
        writer.add(["c0"], chunk_vectors(1), ["s"])
    assert contents(tmp_path / "i")["c0"][0] == 9
    with IndexWriter(tmp_path / "i", DIM, replace=True) as writer:
        writer.add(["z"], chunk_vectors(1), ["s"])
    assert {name: row for name, (row, *_) in contents(tmp_path / "i").items()} == {"z": 0}
    assert read_generation(tmp_path / "i") == 7 and leftovers(tmp_path / "i") == set()


def test_changes_within_one_commit(tmp_path: Path) -> None:
    with IndexWriter(tmp_path / "i", DIM) as writer:
        writer.add(*chunks(0, 4))
        writer.upsert(["c1", "c9"], chunk_vectors(50, 51), ["t", "t"])
        writer.upsert(["c1"], chunk_vectors(52), ["u"])
        writer.delete(["c0"])
        writer.compact()
        writer.delete(["c2"])
        writer.add(["c0"], chunk_vectors(53), ["u"])
        assert len(writer) == 4 and "c2" not in writer
        assert writer.commit() == 1
        assert writer.commit() == 1  # nothing new
        writer.add(["c2"], chunk_vectors(54), ["u"])
    rows = {name: row for name, (row, *_) in contents(tmp_path / "i").items()}
    assert rows == {"c3": 3, "c9": 5, "c1": 6, "c0": 7, "c2": 8}
    assert contents(tmp_path / "i")["c1"][3] == tuple(chunk_vectors(52)[0])
    assert read_generation(tmp_path / "i") == 2 and leftovers(tmp_path / "i") == set()


def test_a_copy_may_keep_its_row_numbers(tmp_path: Path) -> None:
    with IndexWriter(tmp_path / "i", DIM) as writer:
        writer.add(*chunks(0, 3), rows=np.array([2, 5, 11]))
        with pytest.raises(MiaError, match="ascending numbers from 12 on"):
            writer.add(*chunks(3, 4), rows=np.array([11]))
        writer.delete(["c1"])
        writer.skip_rows(20)
        writer.add(*chunks(3, 4))
    assert [row for row, *_ in contents(tmp_path / "i").values()] == [2, 11, 20]
    assert read_snapshot(tmp_path / "i").next_row == 21


def test_more_dead_rows_than_live_ones_are_compacted(tmp_path: Path) -> None:
    build(tmp_path / "i", 10)
    with IndexWriter(tmp_path / "i") as writer:
        writer.delete([f"c{i}" for i in range(5)])
    assert segments(tmp_path / "i") == [10]
    with IndexWriter(tmp_path / "i") as writer:
        writer.delete(["c5"])
    assert segments(tmp_path / "i") == [4]
    assert [row for row, *_ in contents(tmp_path / "i").values()] == [6, 7, 8, 9]


def test_many_small_commits_are_merged_and_a_large_segment_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a second of waiting for the disk
    build(tmp_path / "i", 3000)
    large = [item for item in (tmp_path / "i").iterdir() if item.name.startswith("segment")]
    for i in range(3000, 3070):
        with IndexWriter(tmp_path / "i") as writer:
            writer.add(*chunks(i, i + 1), [{"i": i} if i % 2 else None])
        assert len(segments(tmp_path / "i")) <= 32
    assert large[0].exists()
    found = contents(tmp_path / "i")
    assert [row for row, *_ in found.values()] == list(range(3070)) and list(found) == [f"c{i}" for i in range(3070)]
    assert found["c3055"][1:3] == ("s1018", {"i": 3055}) and found["c3056"][2] is None


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


WRONG = {
    "an id that is there": (lambda w: w.add(["c0"], chunk_vectors(1), ["s"]), "'c0' .* already in the index"),
    "an id twice": (lambda w: w.add(["x", "x"], chunk_vectors(1, 2), ["s", "s"]), "'x' is given twice"),
    "an id twice in upsert": (lambda w: w.upsert(["c0", "c0"], chunk_vectors(1, 2), ["s", "s"]), "'c0' is given twice"),
    "a number for an id": (lambda w: w.add([7080030971], chunk_vectors(1), ["s"]), "7080030971 is not a non-empty str"),
    "an empty id": (lambda w: w.add([""], chunk_vectors(1), ["s"]), "position 0: '' is not a non-empty string"),
    "half a character": (lambda w: w.add(["x\ud800"], chunk_vectors(1), ["s"]), "no valid Unicode"),
    "an empty session": (lambda w: w.add(["x"], chunk_vectors(1), [""]), "sessions, position 0"),
    "one string for a list": (lambda w: w.add("xy", chunk_vectors(1, 2), ["s", "s"]), "ids is one string"),
    "another width": (lambda w: w.add(["x"], np.ones((1, 5)), ["s"]), r"\(1, 5\) float64: expected \(n, 4\)"),
    "NaN": (lambda w: w.add(["x", "y"], chunk_vectors(1, 2) * [[1], [np.nan]], ["s", "s"]), "row 1: NaN, infinite"),
    "infinity in upsert": (lambda w: w.upsert(["c0"], np.full((1, 4), np.inf), ["s"]), "row 0: NaN, infinite"),
    "fewer sessions": (lambda w: w.add(["x", "y"], chunk_vectors(1, 2), ["s"]), "2 ids, 2 vectors, 1 sessions"),
    "fewer metadata": (lambda w: w.add(["x"], chunk_vectors(1), ["s"], []), "0 metadata, 1 ids"),
    "metadata of no object": (lambda w: w.add(["x"], chunk_vectors(1), ["s"], [[1]]), "not a dict with string keys"),
    "metadata of no JSON": (lambda w: w.upsert(["c0"], chunk_vectors(1), ["s"], [{"a": {1}}]), "position 0: not JSON"),
    "metadata of NaN": (lambda w: w.add(["x"], chunk_vectors(1), ["s"], [{"a": np.nan}]), "not JSON"),
    "metadata that is too deep": (lambda w: w.add(["x"], chunk_vectors(1), ["s"], [nested(101)]), "more than 100 deep"),
    "metadata that never ends": (lambda w: w.upsert(["x"], chunk_vectors(1), ["s"], [nested(99_999)]), "than 100 deep"),
    "an unknown id to delete": (lambda w: w.delete(["c0", "x"]), "'x' is not in the index: nothing was deleted"),
    "an id to delete twice": (lambda w: w.delete(["c1", "c0", "c0"]), "'c0' is given twice: nothing was deleted"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_changes_nothing(tmp_path: Path, wrong: str) -> None:
    build(tmp_path / "i")
    before = contents(tmp_path / "i")
    call, message = WRONG[wrong]
    with pytest.raises(MiaError, match=message), IndexWriter(tmp_path / "i") as writer:
        writer.add(*chunks(6, 9))
        call(writer)
    assert contents(tmp_path / "i") == before and read_generation(tmp_path / "i") == 1
    with IndexWriter(tmp_path / "i") as writer:  # and who goes on after the error loses nothing
        with pytest.raises(MiaError, match=message):
            call(writer)
        writer.add(*chunks(6, 9))
    assert [row for row, *_ in contents(tmp_path / "i").values()] == list(range(9))
    assert leftovers(tmp_path / "i") == set()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_block_that_raises_leaves_the_index_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), IndexWriter(tmp_path / "new", DIM) as writer:
        writer.add(*chunks(0, 5))
        raise error
    assert not (tmp_path / "new").exists()
    build(tmp_path / "i")
    before = contents(tmp_path / "i")
    with pytest.raises(error), IndexWriter(tmp_path / "i", DIM, replace=True) as writer:
        writer.add(*chunks(0, 5))
        raise error
    assert contents(tmp_path / "i") == before and leftovers(tmp_path / "i") == set()


def test_arguments_must_agree_with_the_index(tmp_path: Path) -> None:
    build(tmp_path / "i", spec_hash="abc")
    for options, message in (
        ({"dim": 5}, "dim=5, but the index has 4"),
        ({"storage": "int8"}, "storage='int8', but the index has 'float32'"),
        ({"spec_hash": "def"}, "encoder abc but def"),
    ):
        with pytest.raises(MiaError, match=message), IndexWriter(tmp_path / "i", **options):
            pass
    with pytest.raises(MiaError, match="needs dim"), IndexWriter(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    with pytest.raises(MiaError, match="storage='int4': allowed are"):
        IndexWriter(tmp_path / "new", 4, storage="int4")
    with pytest.raises(MiaError, match="outside its block"):
        IndexWriter(tmp_path / "i").add(*chunks(6, 7))


def test_other_folders_and_files_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"kind": "mindscape"}')
    (tmp_path / "file").write_text("x")
    for name, message in (("precious", "is no index"), ("other", "no index of vectors"), ("file", "is a file")):
        with pytest.raises(MiaError, match=message), IndexWriter(tmp_path / name, DIM, replace=True):
            pass
    assert [item.name for item in (tmp_path / "precious").iterdir()] == ["file"]
    build(tmp_path / "i")
    (tmp_path / "i" / "notes.txt").write_text("mine")
    with IndexWriter(tmp_path / "i", DIM, replace=True):
        pass
    assert (tmp_path / "i" / "notes.txt").read_text() == "mine" and contents(tmp_path / "i") == {}


@pytest.mark.parametrize("damage", ["{half", "", "[]", '{"kind": "mia-index", "format": 3}'])
def test_an_index_with_a_damaged_manifest_is_replaced_at_the_commit(tmp_path: Path, damage: str) -> None:
    build(tmp_path / "i")
    with IndexWriter(tmp_path / "empty", DIM):
        pass
    for built in (tmp_path / "i", tmp_path / "empty"):
        (built / "manifest.json").write_text(damage)
        before = sorted(built.rglob("*"))
        with pytest.raises(KeyError), IndexWriter(built, DIM, replace=True) as writer:
            writer.add(*chunks(6, 9))
            raise KeyError
        assert set(before) <= set(built.rglob("*"))  # what a repair may still need
        with IndexWriter(built, DIM, replace=True) as writer:
            writer.add(*chunks(6, 9))
        assert list(contents(built)) == ["c6", "c7", "c8"] and leftovers(built) == set()


def test_a_foreign_folder_with_a_broken_manifest_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{half")
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(MiaError, match="not readable as JSON"), IndexWriter(tmp_path, DIM, replace=True):
        pass
    assert (tmp_path / "manifest.json").read_text() == "{half"


def hold_lock(path: Path, ready) -> None:
    with IndexWriter(path, DIM) as writer:
        writer.add(*chunks(100, 110))
        ready.set()
        time.sleep(60)


def test_a_second_writer_is_told_of_the_lock_and_works_once_the_first_is_dead(tmp_path: Path) -> None:
    build(tmp_path / "i")
    before, ready = contents(tmp_path / "i"), FORK.Event()
    child = FORK.Process(target=hold_lock, args=(tmp_path / "i", ready))
    child.start()
    assert ready.wait(30)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"lock: another writer holds the lock \(waited 0.3 s\)") as caught:
        IndexWriter(tmp_path / "i", timeout=0.3).__enter__()
    assert 0.3 <= time.monotonic() - start < 5 and exit_code(caught.value) == FAILED
    assert contents(tmp_path / "i") == before  # readers do not wait
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert contents(tmp_path / "i") == before and leftovers(tmp_path / "i")
    with IndexWriter(tmp_path / "i") as writer:
        assert leftovers(tmp_path / "i") == set() and len(writer) == 6
        with pytest.raises(TimeoutError, match="another writer"):
            IndexWriter(tmp_path / "i").__enter__()


def test_a_waiting_writer_gets_its_turn(tmp_path: Path) -> None:
    def add(start: int) -> None:
        for i in range(start, start + 5):
            with IndexWriter(tmp_path / "i", DIM, timeout=60) as writer:
                writer.add(*chunks(i, i + 1))

    children = [FORK.Process(target=add, args=(start,)) for start in (0, 10, 20)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert sorted(row for row, *_ in contents(tmp_path / "i").values()) == list(range(15))


def test_platforms_without_file_locks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "i")
    monkeypatch.setattr(storage, "fcntl", None)
    with pytest.raises(MiaError, match="this platform has no file locks"), IndexWriter(tmp_path / "i"):
        pass
    assert len(contents(tmp_path / "i")) == 6


def test_SRV_11_int8_ranges_are_calibrated_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((300, DIM)), 0.01 * rng.standard_normal((300, DIM))
    with IndexWriter(tmp_path / "i", DIM, storage="int8") as writer:
        writer.add([f"a{i}" for i in range(300)], first, ["s"] * 300)
    with IndexWriter(tmp_path / "i") as writer:  # another worker, whose own extremes are a hundredth
        writer.add([f"b{i}" for i in range(300)], second, ["s"] * 300)
    one, two = read_snapshot(tmp_path / "i").segments
    np.testing.assert_array_equal(one.vectors.ranges, two.vectors.ranges)
    step = (first.max(axis=0) - first.min(axis=0)) / 255
    np.testing.assert_allclose(one.vectors.ranges[1], step, rtol=1e-6)
    assert (np.abs(decode(one.vectors) - first) <= 0.51 * step).all()
    assert (np.abs(decode(two.vectors) - second) <= 0.51 * step).all()
    assert np.unique(two.vectors.data[:, 0]).size < 10  # of codes of its own it would have had 200


def test_SRV_11_numbers_out_of_range_are_clipped_and_counted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.uniform(-1, 1, (1000, DIM))
    with IndexWriter(tmp_path / "i", DIM, storage="int8") as writer:
        writer.add([f"a{i}" for i in range(1000)], vectors, ["s"] * 1000)
    with (
        pytest.warns(UserWarning, match="3 of 8 numbers lie outside the index's int8 ranges"),
        IndexWriter(tmp_path / "i") as writer,
    ):
        writer.add(["x", "y"], [[0, 0, 9, 0], [-9, 0, 0, 2]], ["s", "s"])
    found = contents(tmp_path / "i")
    np.testing.assert_allclose(found["x"][3], [0, 0, 1, 0], atol=0.01)
    np.testing.assert_allclose(found["y"][3], [-1, 0, 0, 1], atol=0.01)


def test_int8_begins_well_with_a_single_vector(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    units = rng.standard_normal((50, 32))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with IndexWriter(tmp_path / "i", 32, storage="int8") as writer:
            writer.add(["first"], np.eye(32)[:1], ["s"])
            writer.add([f"c{i}" for i in range(50)], units, ["s"] * 50)
    stored = np.array([entry[3] for entry in contents(tmp_path / "i").values()])
    assert np.abs(stored[1:] - units).max() < 0.005


@pytest.mark.parametrize("first", [np.zeros((1, 8)), np.zeros((300, 8)), np.full((300, 8), 0.25)])
def test_int8_tells_vectors_apart_though_the_first_ones_are_all_alike(tmp_path: Path, first: np.ndarray) -> None:
    later = np.eye(8) - 0.5
    with IndexWriter(tmp_path / "i", 8, storage="int8") as writer:
        writer.add([f"a{i}" for i in range(len(first))], first, ["s"] * len(first))
        writer.add([f"b{i}" for i in range(8)], later, ["s"] * 8)
    stored = np.array([entry[3] for entry in contents(tmp_path / "i").values()])
    np.testing.assert_allclose(stored[: len(first)], first, atol=1e-6)
    np.testing.assert_allclose(stored[len(first) :], later, atol=0.005)


def test_int8_vectors_survive_being_stored_again() -> None:
    vectors = np.random.default_rng(0).standard_normal((500, 16)).astype(np.float32)
    vectors[:, 3] = 0.25  # a dimension that never varies
    ranges = calibrate(vectors)
    block = encode_storage(vectors, "int8", ranges)
    assert decode(block)[:, 3] == pytest.approx(0.25)
    np.testing.assert_array_equal(encode_storage(decode(block), "int8", ranges).data, block.data)
    # offset and step by hand: code -128 is the offset, each code above it one step more
    by_hand = Block(np.array([[-128, 127], [0, -127]], np.int8), np.array([[-1, 2], [0.5, 0.25]], np.float32))
    np.testing.assert_array_equal(decode(by_hand), [[-1, 65.75], [63, 2.25]])


def test_float16_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with IndexWriter(tmp_path / "i", DIM, storage="float16") as writer:
        with pytest.raises(MiaError, match="row 1: a number does not fit float16"):
            writer.add(["a", "b"], [[1, 2, 3, 4], [0, 0, -65520, 0]], ["s", "s"])
        writer.add(["a"], [[1, 65504, 65519, 0.1]], ["s"])
    assert contents(tmp_path / "i")["a"][3] == (1, 65504, 65504, float(np.float16(0.1)))


def write_until_full(path: Path, limit: int, report) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        with IndexWriter(path, DIM, replace=True) as writer:
            for start in range(0, 100_000, 1000):
                writer.add(*chunks(start, start + 1000))
    except OSError as error:
        report.put((str(error), exit_code(error)))


def test_a_full_disk_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    build(tmp_path / "i")
    before, report = contents(tmp_path / "i"), FORK.SimpleQueue()
    for path in (tmp_path / "i", tmp_path / "new"):
        child = FORK.Process(target=write_until_full, args=(path, 200_000, report))
        child.start()
        child.join()
        message, code = report.get()
        assert "the index is what its last commit left" in message and str(path) in message and code == FAILED
    assert contents(tmp_path / "i") == before and leftovers(tmp_path / "i") == set()
    assert not (tmp_path / "new").exists()


def test_nothing_is_committed_after_a_write_that_failed(tmp_path: Path) -> None:
    build(tmp_path / "i")
    before = contents(tmp_path / "i")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            pytest.raises(RuntimeError, match="an earlier change failed halfway"),
            IndexWriter(tmp_path / "i") as writer,
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
            with pytest.raises(OSError, match="given up"):
                writer.upsert(*chunks(0, 20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path / "i") == before and leftovers(tmp_path / "i") == set()


MEMORY = """
import re, sys
import numpy as np
from mia_serve.index.store import read_snapshot
from mia_serve.index.writer import IndexWriter

def memory(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

path, rng = sys.argv[1], np.random.default_rng(0)
open("/proc/self/clear_refs", "w").write("5")  # the peak of the imports does not count
base = memory("VmRSS")
with IndexWriter(path, 64) as writer:
    for start in range(0, 200_000, 5_000):
        numbers = range(start, start + 5_000)
        block = rng.standard_normal((5_000, 64), dtype=np.float32)
        writer.add([f"chunk-{i}" for i in numbers], block, [f"session-{i // 20}" for i in numbers])
print(memory("VmHWM") - base)
del writer
with IndexWriter(path) as writer:
    writer.delete([f"chunk-{i}" for i in range(0, 200_000, 3)])
    writer.compact()
print(memory("VmHWM") - base)
snapshot = read_snapshot(path)
assert sum(segment.alive.sum() for segment in snapshot.segments) == 133_333
print(memory("VmHWM") - base)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux tells it")
def test_SRV_50_build_compaction_and_load_need_less_memory_than_the_vectors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "i")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    build_peak, compact_peak, load_peak = map(float, done.stdout.split())
    vectors = 200_000 * 64 * 4 / 2**20  # 48.8 MiB
    assert build_peak < 1.2 * vectors and compact_peak < 2 * vectors and load_peak < 2 * vectors


def test_SRV_41_C14_deletes_agree_with_faiss_id_map(tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((2000, 32), dtype=np.float32)
    with IndexWriter(tmp_path / "i", 32) as writer:
        writer.add([f"c{i}" for i in range(2000)], vectors, ["s"] * 2000)
    peer = faiss.IndexIDMap2(faiss.IndexFlatIP(32))
    peer.add_with_ids(vectors, np.arange(2000))
    for gone in (rng.choice(2000, 3, replace=False), rng.choice(2000, 1200, replace=False)):
        here = contents(tmp_path / "i")
        gone = [i for i in gone.tolist() if f"c{i}" in here]
        peer.remove_ids(np.array(gone))
        with IndexWriter(tmp_path / "i") as writer:
            writer.delete([f"c{i}" for i in gone])
        found = contents(tmp_path / "i")
        assert len(found) == peer.ntotal
        for name, (row, _, _, vector) in found.items():
            assert name == f"c{row}"
            np.testing.assert_array_equal(peer.reconstruct(row), np.float32(vector))
