"""Indexes on disk: equal after loading, whole or absent, tied to their encoder."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mia_serve.index import SessionIndex, store


def make(seed: int = 0, rows: int = 30) -> SessionIndex:
    rng = np.random.default_rng(seed)
    index = SessionIndex(5, "torch", "cpu", spec_hash="abc123")
    index.add(
        [f"c{seed}-{i}" for i in range(rows)], rng.standard_normal((rows, 5)), [f"s{i // 4}" for i in range(rows)]
    )
    return index


@pytest.mark.parametrize("backend", ["torch", "faiss", "auto"])
def test_loads_equal_on_any_backend(tmp_path, backend: str) -> None:
    index, queries = make(), np.random.default_rng(1).standard_normal((4, 5))
    index.save(tmp_path / "a" / "index")
    loaded = SessionIndex.load(tmp_path / "a" / "index", "abc123", backend=backend)
    assert loaded.spec_hash == "abc123" and loaded.ids == index.ids
    assert loaded.search(queries, 9).ids == index.search(queries, 9).ids
    np.testing.assert_array_equal(loaded.search(queries, 9).scores, index.search(queries, 9).scores)
    sessions, expected = loaded.search_sessions(queries, 3), index.search_sessions(queries, 3)
    assert sessions.ids == expected.ids and sessions.best_chunk == expected.best_chunk


def test_empty_index_round_trips(tmp_path) -> None:
    SessionIndex(5, "torch", "cpu").save(tmp_path / "index")
    loaded = SessionIndex.load(tmp_path / "index")
    assert len(loaded) == 0 and loaded.dim == 5 and loaded.spec_hash is None


def test_another_encoder_is_refused(tmp_path) -> None:
    make().save(tmp_path / "index")
    with pytest.raises(ValueError, match=r"encoder abc123 but def456 .* encode the chunks again"):
        SessionIndex.load(tmp_path / "index", expected_spec_hash="def456")
    unknown = SessionIndex(5, "torch", "cpu")
    unknown.save(tmp_path / "unknown")
    with pytest.raises(ValueError, match="unknown"):
        SessionIndex.load(tmp_path / "unknown", expected_spec_hash="def456")


def test_save_replaces_an_older_index_and_leaves_nothing_else(tmp_path) -> None:
    make(0).save(tmp_path / "index")
    make(1, rows=7).save(tmp_path / "index")
    assert len(SessionIndex.load(tmp_path / "index")) == 7
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_failed_save_keeps_the_older_index(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(0).save(tmp_path / "index")

    def broken(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(store, "_write_json", broken)
    with pytest.raises(OSError, match="disk full"):
        make(1).save(tmp_path / "index")
    assert SessionIndex.load(tmp_path / "index").ids[0] == "c0-0"
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_other_folders_are_never_overwritten(tmp_path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    with pytest.raises(ValueError, match="is no index"):
        make().save(tmp_path / "precious")
    assert (tmp_path / "precious" / "file").read_text() == "x"


def test_unreadable_folders_are_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no index here"):
        SessionIndex.load(tmp_path / "nowhere")
    make().save(tmp_path / "index")
    manifest = tmp_path / "index" / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"rows": 29}))
    with pytest.raises(ValueError, match="manifest says 29 rows"):
        SessionIndex.load(tmp_path / "index")
    manifest.write_text(json.dumps({k: v for k, v in content.items() if k != "spec_hash"}))
    with pytest.raises(ValueError, match="'spec_hash' is missing"):
        SessionIndex.load(tmp_path / "index")
    manifest.write_text(json.dumps(content | {"format": 9}))
    with pytest.raises(ValueError, match="rebuild the index"):
        SessionIndex.load(tmp_path / "index")
    manifest.write_text("{half")
    with pytest.raises(ValueError, match="not readable as JSON"):
        SessionIndex.load(tmp_path / "index")


def test_altered_files_are_refused_and_moved_folders_are_not(tmp_path) -> None:
    make().save(tmp_path / "here")
    folder = (tmp_path / "here").rename(tmp_path / "there")
    assert SessionIndex.load(folder).ids == make().ids
    vectors = np.load(folder / "vectors.npy")
    np.save(folder / "vectors.npy", vectors[::-1])  # as many, as wide, and every one under a wrong id
    with pytest.raises(ValueError, match=r"vectors.npy: damaged or altered .*: rebuild the index"):
        SessionIndex.load(folder)
    (folder / "vectors.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"vectors.npy: damaged or altered"):
        SessionIndex.load(folder)
