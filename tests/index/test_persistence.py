"""An index in a folder: what is saved is what is loaded, and readers follow writers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mia_serve.core import MiaError
from mia_serve.index import SessionIndex
from mia_serve.index.writer import IndexWriter
from tests.index.reference import build, unit


def make(seed: int = 0, rows: int = 40) -> SessionIndex:
    vectors = unit(np.random.default_rng(seed), rows, 6)
    metadata = [{"day": i % 5} if i % 2 else None for i in range(rows)]
    index = SessionIndex(6, "torch", "cpu", spec_hash="abc")
    index.add([f"c{i}" for i in range(rows)], vectors, [f"s{i // 4}" for i in range(rows)], metadata)
    return index


def assert_same(a: SessionIndex, b: SessionIndex) -> None:
    queries = unit(np.random.default_rng(9), 5, 6)
    assert a.ids == b.ids and len(a) == len(b)
    for where in (None, {"day": [1, 3]}):
        first, second = a.search(queries, 12, where), b.search(queries, 12, where)
        assert first.ids == second.ids
        np.testing.assert_array_equal(first.scores, second.scores)
        np.testing.assert_array_equal(first.rows, second.rows)
    for pooling in ("max", "lme", "early"):
        assert a.search_sessions(queries, 6, pooling)[0::2] == b.search_sessions(queries, 6, pooling)[0::2]


@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_deletions_rows_and_metadata_survive_save_and_load(backend: str, tmp_path: Path) -> None:
    index = make()
    index.delete([f"c{i}" for i in (0, 7, 8, 39)])
    index.save(tmp_path / "index")
    loaded = SessionIndex.load(tmp_path / "index", "abc", backend=backend, device="cpu")
    assert_same(loaded, index)
    assert loaded.row_of("c9") == 9 and loaded.metadata_of("c9") == {"day": 4} and loaded.session_of("c9") == "s2"
    for opened in (loaded, index):
        opened.add(["new"], np.eye(1, 6), ["s0"])
        assert opened.row_of("new") == 40  # 39 was given before
    loaded.delete([f"c{i}" for i in range(10, 38)])  # more dead than alive: the mapped block gives way to a copy
    index.delete([f"c{i}" for i in range(10, 38)])
    assert_same(loaded, index)
    loaded.save(tmp_path / "index")  # over the files that its vectors were mapped from
    assert_same(SessionIndex.load(tmp_path / "index", device="cpu"), index)


def test_loaded_vectors_are_mapped_and_not_copied(tmp_path: Path) -> None:
    make().save(tmp_path / "index")
    index = SessionIndex.load(tmp_path / "index", device="cpu")
    index.search(np.eye(1, 6), 3)
    (block,) = index._contents.vectors.blocks
    assert not block.data.flags.owndata
    block.data[:] = 0  # never reaches the file
    assert_same(SessionIndex.load(tmp_path / "index", device="cpu"), make())


def test_int8_saved_again_does_not_drift(tmp_path: Path) -> None:
    vectors = unit(np.random.default_rng(0), 400, 6)
    build(vectors).save(tmp_path / "a", "int8")
    first = SessionIndex.load(tmp_path / "a", device="cpu")
    first.save(tmp_path / "b", "int8")
    assert_same(SessionIndex.load(tmp_path / "b", device="cpu"), first)
    assert np.abs(first.search(vectors, 1).scores - 1).max() < 0.02


def test_reload_follows_a_writer(tmp_path: Path) -> None:
    index = make()
    index.save(tmp_path / "index")
    reader = SessionIndex.load(tmp_path / "index", device="cpu")
    assert not reader.reload() and not index.reload()
    with IndexWriter(tmp_path / "index") as writer:
        writer.delete(["c3"])
        writer.add(["new"], np.eye(1, 6), ["t"], [{"day": 1}])
        assert not reader.reload() and "c3" in reader  # not committed yet; and nobody waits for the lock
    assert reader.reload() and index.reload() and not reader.reload()
    assert "c3" not in reader and reader.search(np.eye(1, 6), 1).ids == [["new"]]
    assert reader.row_of("new") == 40 and reader.search_sessions(np.eye(1, 6), 1).ids == [["t"]]
    assert_same(reader, index)


def test_reload_keeps_the_state_when_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no folder"):
        make().reload()
    make().save(tmp_path / "index")
    changed, other = (SessionIndex.load(tmp_path / "index", device="cpu") for _ in range(2))
    changed.delete(["c0"])
    assert not changed.reload()  # nothing newer
    with IndexWriter(tmp_path / "index") as writer:
        writer.delete(["c1"])
    with pytest.raises(ValueError, match="unsaved changes"):
        changed.reload()
    assert len(changed) == 39 and "c1" in changed
    with IndexWriter(tmp_path / "index", 6, spec_hash="xyz", replace=True) as writer:
        writer.add(["x"], np.eye(1, 6), ["s"])
    with pytest.raises(ValueError, match="xyz"):
        other.reload()
    assert len(other) == 40 and other.search(np.eye(1, 6), 1).ids[0][0].startswith("c")
    with IndexWriter(tmp_path / "index", 3, spec_hash="abc", replace=True) as writer:
        writer.add(["x"], np.eye(1, 3), ["s"])
    with pytest.raises(ValueError, match="dim 3"):
        other.reload()
    assert len(other) == 40


def test_an_empty_index_is_saved_and_loaded(tmp_path: Path) -> None:
    SessionIndex(5, "torch", "cpu").save(tmp_path / "index", "int8")
    loaded = SessionIndex.load(tmp_path / "index", device="cpu")
    assert len(loaded) == 0 and loaded.dim == 5 and loaded.search(np.eye(2, 5), 3).ids == [[], []]


def test_saving_never_undoes_what_another_saved_meanwhile(tmp_path: Path) -> None:
    make().save(tmp_path / "i")
    first, second = SessionIndex.load(tmp_path / "i", device="cpu"), SessionIndex.load(tmp_path / "i", device="cpu")
    first.delete(["c0"])
    first.save(tmp_path / "i")
    second.delete(["c1"])
    with pytest.raises(MiaError, match="changed since this index was loaded"):
        second.save(tmp_path / "i")
    second.save(tmp_path / "elsewhere")
    assert "c0" not in SessionIndex.load(tmp_path / "i", device="cpu")
    first.delete(["c2"])
    first.save(tmp_path / "i")  # its own last state


def test_reload_sees_an_index_that_was_built_anew(tmp_path: Path) -> None:
    make().save(tmp_path / "i")
    reader = SessionIndex.load(tmp_path / "i", device="cpu")
    shutil.rmtree(tmp_path / "i")
    make(rows=8).save(tmp_path / "i")
    assert reader.reload() and len(reader) == 8
    shutil.rmtree(tmp_path / "i")
    build(unit(np.random.default_rng(0), 3, 6)).save(tmp_path / "i")  # of no known encoder
    with pytest.raises(MiaError, match="load it anew"):
        reader.reload()
    assert len(reader) == 8
