"""Reading a stored index: what was written, or an error that says what is wrong; never a mixture of two commits."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from mia_serve.core import MiaError
from mia_serve.index import store
from mia_serve.index.store import read_generation, read_snapshot
from mia_serve.index.vectors import decode
from mia_serve.index.writer import IndexWriter
from tests.index.stored import DIM, chunk_vectors, chunks, contents


def build(path: Path, **options) -> Path:
    """An index that has every kind of file."""
    with IndexWriter(path, DIM, spec_hash="abc123", storage="int8", **options) as writer:
        writer.add(*chunks(0, 30), [{"i": i} for i in range(30)])
        writer.commit()
        writer.delete(["c3"])
    return path


def test_SRV_43_any_string_is_an_id(tmp_path: Path) -> None:
    ids = [
        "s-1",
        "7080030971",
        "18446744073709551616",
        "中文",
        "🙂👩‍👩‍👧",
        "a\nb",
        "a\r\n",
        "nul\0",
        " ",
        '"',
        "é",
        "e\u0301",
        "x" * 5000,
    ]
    with IndexWriter(tmp_path / "i", DIM) as writer:
        writer.add(ids, chunk_vectors(*range(len(ids))), ids[::-1], [{name: name} for name in ids])
    with IndexWriter(tmp_path / "i") as writer:
        assert all(name in writer for name in ids)
        writer.delete(["中文", "nul\0"])
    found = contents(tmp_path / "i")
    assert list(found) == [name for name in ids if name not in ("中文", "nul\0")]
    for name, (row, session, metadata, vector) in found.items():
        assert ids[row] == name and session == ids[::-1][row] and metadata == {name: name}
        assert vector == tuple(chunk_vectors(row)[0])


def test_an_empty_index_is_an_index(tmp_path: Path) -> None:
    with IndexWriter(tmp_path / "i", 7):
        pass
    snapshot = read_snapshot(tmp_path / "i")
    assert (snapshot.dim, snapshot.spec_hash, snapshot.next_row, snapshot.segments) == (7, None, 0, ())


def test_there_is_no_index_where_none_was_finished(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("nowhere", "empty", "file"):
        with pytest.raises(FileNotFoundError, match="no index here"):
            read_snapshot(tmp_path / name)
        with pytest.raises(FileNotFoundError, match="no index here"):
            read_generation(tmp_path / name)


def test_another_encoder_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "i")
    with pytest.raises(MiaError, match=r"encoder abc123 but def456 .* encode the chunks again"):
        read_snapshot(tmp_path / "i", expected_spec_hash="def456")
    with IndexWriter(tmp_path / "unknown", DIM):
        pass
    with pytest.raises(MiaError, match="unknown"):
        read_snapshot(tmp_path / "unknown", expected_spec_hash="def456")


def files_of(path: Path) -> list[Path]:
    return sorted(item for item in path.rglob("*") if item.is_file() and item.name != "lock")


def test_a_byte_changed_in_any_file_is_found(tmp_path: Path) -> None:
    folder = build(tmp_path / "i")
    names = {file.name.split("-")[0] for file in files_of(folder)}
    assert names == {
        "manifest.json", "vectors.bin", "ids.utf8", "ids.offsets", "sessions.json", "session_of.bin", "rows.bin",
        "metadata.jsonl", "tombstones", "ranges",
    }  # fmt: skip
    for file in files_of(folder):
        good = file.read_bytes()
        for place in (0, len(good) // 2, len(good) - 2):
            file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises(MiaError, match=f"{file.name}: (damaged or altered|not readable|kind|format)"):
                read_snapshot(folder)
        file.write_bytes(good[: len(good) * 2 // 3])
        with pytest.raises(MiaError, match=f"{file.name}: (damaged or altered|not readable)"):
            read_snapshot(folder, verify=False)
        file.write_bytes(good + b"\0")
        with pytest.raises(MiaError, match=f"{file.name}: (damaged or altered|not readable)"):
            read_snapshot(folder, verify=False)
        file.unlink()
        with pytest.raises((MiaError, FileNotFoundError), match=r"missing, though|no index here"):
            read_snapshot(folder, verify=False)
        file.write_bytes(good)
    assert len(contents(folder)) == 29


def test_vectors_are_only_summed_on_demand(tmp_path: Path) -> None:
    folder = build(tmp_path / "i")
    [vectors] = folder.glob("segment-*/vectors.bin")
    vectors.write_bytes(bytes(vectors.stat().st_size))
    assert len(read_snapshot(folder, verify=False).segments[0].ids) == 30
    with pytest.raises(MiaError, match=r"vectors.bin: damaged or altered .*: rebuild the index"):
        read_snapshot(folder)
    with pytest.raises(MiaError, match=r"vectors.bin: damaged"), IndexWriter(folder) as writer:
        writer.compact()  # which would have given the damage a checksum


def test_manifests_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "i")
    manifest = folder / "manifest.json"
    value = json.loads(manifest.read_text())
    for text, message in (
        ("{half", "not readable as JSON"),
        ("", "not readable as JSON"),
        ("[]", "expected a JSON object"),
        (json.dumps(value | {"kind": "mindscape"}), "kind 'mindscape', not 'mia-index'"),
        (json.dumps(value | {"format": 2}), "format 2, but this version reads format 3: rebuild the index"),
        (json.dumps(value | {"next_row": 29}), "damaged or altered"),
        (json.dumps({key: value[key] for key in value if key != "dim"}), "damaged or altered"),
    ):
        manifest.write_text(text)
        for read in (read_snapshot, read_generation):
            with pytest.raises(MiaError, match=message):
                read(folder)
        with pytest.raises(MiaError, match=message), IndexWriter(folder):
            pass
    manifest.write_text(json.dumps(value))
    assert len(contents(folder)) == 29


def test_a_folder_may_be_moved_and_copied(tmp_path: Path) -> None:
    before = contents(build(tmp_path / "here"))
    moved = (tmp_path / "here").rename(tmp_path / "there")
    shutil.copytree(moved, tmp_path / "copy")
    assert contents(moved) == before == contents(tmp_path / "copy")


def test_a_snapshot_outlives_what_happens_to_its_files(tmp_path: Path) -> None:
    folder = build(tmp_path / "i")
    snapshot = read_snapshot(folder)
    expected = decode(snapshot.segments[0].vectors).copy()
    with IndexWriter(folder) as writer:
        writer.compact()
    [segment] = snapshot.segments
    np.testing.assert_array_equal(decode(segment.vectors), expected)
    shutil.rmtree(folder)
    np.testing.assert_array_equal(decode(segment.vectors, np.array([2, 29])), expected[[2, 29]])


def test_torch_takes_mapped_vectors_and_the_file_never_changes(tmp_path: Path) -> None:
    with IndexWriter(tmp_path / "i", DIM) as writer:
        writer.add(*chunks(0, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [segment] = read_snapshot(tmp_path / "i").segments
        tensor = torch.from_numpy(segment.vectors.data)
        torch.from_numpy(segment.rows), torch.from_numpy(segment.alive)
    tensor.zero_()
    assert contents(tmp_path / "i")["c4"][3] == tuple(chunk_vectors(4)[0])


def test_a_file_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with open(tmp_path / "sparse", "w+b") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("the file system keeps no file of that size")
        file.seek(size - 4)
        file.write(np.float32(2).tobytes())
        file.flush()
        with open(tmp_path / "sparse", "rb") as reading:
            mapped = store._map(reading, size, np.dtype("<f4"))
        assert mapped[-1] == 2 and mapped[0] == 0


def test_a_reader_starts_again_when_a_commit_removes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, before = build(tmp_path / "i"), 1
    read_ranges, commits = store.read_ranges, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def overtaken(*args):
        if len(commits) < before:
            commits.append(1)
            with IndexWriter(folder) as writer:
                writer.upsert(["c0"], chunk_vectors(len(commits)), ["s"])
                writer.compact()
        return read_ranges(*args)

    monkeypatch.setattr(store, "read_ranges", overtaken)
    snapshot = read_snapshot(folder)
    assert snapshot.generation == 3 and snapshot.segments[0].alive.all() and len(snapshot.segments[0].ids) == 29
    commits.clear()
    before = 1000
    with pytest.raises(RuntimeError, match="commits while it was read: try again"):
        read_snapshot(folder)


def test_metadata_as_deep_as_allowed_comes_back(tmp_path: Path) -> None:
    deep: dict[str, object] = {}
    for _ in range(99):
        deep = {"a": deep}
    wide = {"a": [{} for _ in range(500)], "b": "[{" * 500}
    with IndexWriter(tmp_path / "i", DIM) as writer:
        writer.add(*chunks(0, 2), [deep, wide])
    assert [entry[2] for entry in contents(tmp_path / "i").values()] == [deep, wide]
