from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from mia_serve.core import MiaError, storage
from mia_serve.mindscape import Book, BookFacts, Mindscape, Node, Tail, store


def vectors(n: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)


def other() -> Mindscape:
    return Mindscape.from_books([Book("new", ("text",), summaries=("s",))])


def test_round_trip_with_vectors(two_books, tmp_path):
    path = tmp_path / "deep" / "m"
    two_books.save(path, {"e1": (vectors(), "abc"), "summaries": (vectors(5).astype(np.float16), "def")})
    loaded = Mindscape.load(path)
    assert (loaded.chunks, loaded.sessions, loaded.summarizer) == (two_books.chunks, two_books.sessions, "given")
    assert loaded.session_of.tolist() == two_books.session_of.tolist()
    e1 = Mindscape.load_vectors(path, "e1", "abc")
    assert isinstance(e1, np.memmap) and not e1.flags.writeable
    np.testing.assert_array_equal(e1, vectors())
    assert Mindscape.load_vectors(path, "summaries", "def").dtype == np.float16
    manifest = store.read_manifest(path)
    assert (manifest["chunks"], manifest["sessions"], manifest["books"], manifest["version"]) == (9, 5, 2, 1)
    assert manifest["vectors"]["e1"] == {"file": "vectors.e1.npy", "spec_hash": "abc", "rows": 9, "dim": 3}
    assert os.listdir(path.parent) == ["m"]


def test_books_nodes_window_and_notes_round_trip(two_books, tmp_path):
    facts = replace(
        two_books,
        books=(BookFacts("red", "The Red Book", "Ann", "Red."), BookFacts("blue", "", "", "蓝")),
        nodes=(Node("red/x", "X", "a sailor", "red", "person", ("red:0", "red:4")), Node("y", "Y", "", "blue")),
        tails=(Tail("red", 3, "red passage 4", 0, 0, 200, 20),),
        notes={"failed": {"red:w0": "timeout"}},
    )
    facts.save(tmp_path / "m")
    loaded = Mindscape.load(tmp_path / "m")
    assert (loaded.books, loaded.nodes, loaded.window, loaded.notes) == (facts.books, facts.nodes, 2, facts.notes)
    assert loaded.tails == facts.tails
    other().save(tmp_path / "m")  # without any: the tables of the old one do not stay behind
    assert Mindscape.load(tmp_path / "m").nodes == () and not (tmp_path / "m" / "nodes.parquet").exists()


def test_a_folder_from_before_there_were_books_opens(two_books, tmp_path):
    replace(two_books, books=(), window=None).save(tmp_path / "m")
    assert sorted(os.listdir(tmp_path / "m")) == ["chunks.parquet", "manifest.json", "sessions.parquet"]
    assert not {"window", "notes"} & store.read_manifest(tmp_path / "m").keys()
    loaded = Mindscape.load(tmp_path / "m")
    assert (loaded.chunks, loaded.books, loaded.nodes, loaded.window) == (two_books.chunks, (), (), None)


def test_trn_42_a_moved_folder_opens_from_any_directory(two_books, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two_books.save("m", {"e1": (vectors(), "abc")})
    (tmp_path / "elsewhere").mkdir()
    os.rename("m", "elsewhere/n")
    monkeypatch.chdir("/")
    assert Mindscape.load(tmp_path / "elsewhere" / "n").chunks == two_books.chunks
    assert Mindscape.load_vectors(tmp_path / "elsewhere" / "n", "e1", "abc").shape == (9, 3)


def test_another_spec_hash_is_refused_with_both_hashes_and_the_fix(two_books, tmp_path):
    two_books.save(tmp_path / "m", {"e1": (vectors(), "abc")})
    with pytest.raises(MiaError, match=r"made by encoder abc, the one given is xyz: use the encoder .* or embed"):
        Mindscape.load_vectors(tmp_path / "m", "e1", "xyz")
    with pytest.raises(MiaError, match=r"no vectors 'e2' \(it has: e1\)"):
        Mindscape.load_vectors(tmp_path / "m", "e2", "abc")


@pytest.mark.parametrize("step", ["_write", "rename to previous", "rename into place"])
def test_srv_51_a_failing_writer_leaves_the_last_good_state(two_books, tmp_path, monkeypatch, step):
    path = tmp_path / "m"
    two_books.save(path, {"e1": (vectors(), "abc")})
    rename, done = os.rename, []

    def failing_rename(source, target):
        done.append(target)
        if len(done) == (1 if step == "rename to previous" else 2):
            raise OSError("disk full")
        rename(source, target)

    if step == "_write":
        monkeypatch.setattr(store, "sha256", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    else:
        monkeypatch.setattr(storage, "_exchange", lambda one, other: False)  # as on a system that cannot
        monkeypatch.setattr(os, "rename", failing_rename)
    with pytest.raises(OSError, match="disk full"):
        other().save(path)
    monkeypatch.undo()
    assert Mindscape.load(path).chunks == two_books.chunks
    assert Mindscape.load_vectors(path, "e1", "abc").shape == (9, 3)
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("when", ["before the manifest", "between the renames"])
def test_srv_51_a_killed_writer_leaves_the_last_good_state(two_books, tmp_path, when):
    path = tmp_path / "m"
    two_books.save(path)
    script = f"""
import os, signal
from mia_serve.core import storage
from mia_serve.mindscape import Book, Mindscape, store
storage._exchange = lambda one, other: False
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
rename = os.rename
if {when!r} == "before the manifest":
    store.sha256 = kill
else:
    os.rename = lambda a, b: (rename(a, b), kill())
Mindscape.from_books([Book("new", ("text",), summaries=("s",))]).save({str(path)!r})
"""
    killed = subprocess.run([sys.executable, "-c", script], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert Mindscape.load(path).chunks == two_books.chunks
    other().save(path)  # and a rerun goes through
    assert Mindscape.load(path).chunks == other().chunks


def test_half_written_or_altered_folders_do_not_open(two_books, tmp_path):
    path = tmp_path / "m"

    def fresh() -> None:
        two_books.save(path, {"e1": (vectors(), "abc")})

    fresh()
    (path / "manifest.json").unlink()
    with pytest.raises(MiaError, match=r"never finished: it has no manifest\.json"):
        Mindscape.load(path)
    for item in path.iterdir():
        item.unlink()
    fresh()
    raw = bytearray((path / "chunks.parquet").read_bytes())
    raw[20] ^= 1
    (path / "chunks.parquet").write_bytes(raw)
    with pytest.raises(MiaError, match=r"chunks\.parquet is incomplete or was altered: its sha256"):
        Mindscape.load(path)
    fresh()
    (path / "vectors.e1.npy").write_bytes((path / "vectors.e1.npy").read_bytes()[:-4])
    with pytest.raises(MiaError, match=r"vectors\.e1\.npy is incomplete or was altered: it has \d+ bytes"):
        Mindscape.load(path)
    fresh()
    np.save(path / "vectors.e1.npy", vectors(seed=1))
    with pytest.raises(MiaError, match=r"vectors\.e1\.npy is incomplete or was altered: its sha256"):
        Mindscape.load_vectors(path, "e1", "abc")
    fresh()
    (path / "sessions.parquet").unlink()
    with pytest.raises(MiaError, match=r"sessions\.parquet is incomplete or was altered: it is missing"):
        Mindscape.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": 8}, "counts 8 chunks and 5 sessions, the tables hold 9 and 5"),
        ({"version": 2}, "version 2: this MiA reads mia-mindscape version 1"),
        ({"format": "other"}, "is other version 1"),
        ({"summarizer": None}, "lacks summarizer"),
    ],
)
def test_altered_manifest(two_books, tmp_path, change, message):
    two_books.save(tmp_path / "m")
    file = tmp_path / "m" / "manifest.json"
    manifest = {k: v for k, v in (json.loads(file.read_text()) | change).items() if v is not None}
    file.write_text(json.dumps(manifest))
    with pytest.raises(MiaError, match=message):
        Mindscape.load(tmp_path / "m")
    file.write_text("{")
    with pytest.raises(MiaError, match="cannot be read"):
        Mindscape.load(tmp_path / "m")


def test_refused_targets_and_vectors(two_books, tmp_path):
    with pytest.raises(FileNotFoundError, match="no mindscape at"):
        Mindscape.load(tmp_path / "none")
    (tmp_path / "mine.txt").write_text("keep me")
    for path in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(MiaError, match="exists and is not a mindscape"):
            two_books.save(path)
    assert (tmp_path / "mine.txt").read_text() == "keep me"
    bad = vectors()
    bad[4, 1] = np.nan
    for name, array, spec_hash, message in [
        ("e1", bad, "abc", "NaN or infinity in row 4"),
        ("e1", vectors(8), "abc", "9 chunks or 5 sessions"),
        ("e1", vectors()[0], "abc", "9 chunks or 5 sessions"),
        ("e1", vectors().astype(int), "abc", "int64"),
        ("../e1", vectors(), "abc", "a name is made of"),
        ("e1", vectors(), "", "without a spec_hash"),
    ]:
        with pytest.raises(MiaError, match=message):
            two_books.save(tmp_path / "m", {name: (array, spec_hash)})
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    "change", [{"files": []}, {"vectors": 3}, {"files": {"chunks.parquet": {}}}, {"vectors": {"e1": {"file": "x"}}}]
)
def test_a_manifest_of_another_shape_is_refused(change, two_books, tmp_path):
    two_books.save(tmp_path / "m")
    file = tmp_path / "m" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(MiaError, match="must each say"):
        Mindscape.load(tmp_path / "m")


def test_what_else_lies_in_the_folder_is_kept(two_books, tmp_path):
    path = tmp_path / "m"
    two_books.save(path, {"e1": (vectors(), "abc")})
    (path / "notes.txt").write_text("keep me")
    (path / "index" / "deep").mkdir(parents=True)
    (path / "index" / "deep" / "chunks.parquet").write_bytes(b"mine")
    (path / "link").symlink_to("notes.txt")
    (path / "dangling").symlink_to("nowhere")
    for _ in range(2):
        other().save(path)
        assert Mindscape.load(path).chunks == other().chunks
    assert (path / "notes.txt").read_text() == (path / "link").read_text() == "keep me"
    assert (path / "index" / "deep" / "chunks.parquet").read_bytes() == b"mine"
    assert os.readlink(path / "dangling") == "nowhere" and not (path / "vectors.e1.npy").exists()
    assert os.listdir(tmp_path) == ["m"]


def test_only_a_mindscape_is_replaced_even_a_damaged_one(two_books, tmp_path):
    (tmp_path / "index").mkdir()
    for manifest in ('{"kind": "mia-index", "format": 3}', "[]", "{half"):
        (tmp_path / "index" / "manifest.json").write_text(manifest)
        with pytest.raises(MiaError, match="exists and is not a mindscape"):
            two_books.save(tmp_path / "index")
        assert (tmp_path / "index" / "manifest.json").read_text() == manifest
    two_books.save(tmp_path / "m")
    (tmp_path / "m" / "manifest.json").write_text("{half")
    two_books.save(tmp_path / "m")
    assert Mindscape.load(tmp_path / "m").chunks == two_books.chunks


def test_a_reader_finds_a_whole_mindscape_while_writers_replace_it(two_books, tmp_path):
    path = tmp_path / "m"
    states = [two_books, other()]
    two_books.save(path)
    done = threading.Event()

    def write() -> None:
        for i in range(60):
            states[i % 2].save(path)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(len(Mindscape.load(path).chunks))
        assert path.is_dir()
    writer.join()
    assert seen == {1, 9} and os.listdir(tmp_path) == ["m"]


def test_a_full_disk_is_named_and_loses_nothing(two_books, tmp_path):
    two_books.save(tmp_path / "m", vectors={"v": (np.ones((9, 2), np.float32), "hash")})
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(OSError, match=r"vectors\.v\.npy cannot be written .* is there room on the device"):
            two_books.save(tmp_path / "m", vectors={"v": (np.ones((9, 9000), np.float32), "hash")})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_link_stays_one_and_what_it_names_is_replaced(two_books, tmp_path):
    two_books.save(tmp_path / "m")
    (tmp_path / "now").symlink_to("m")
    replace(two_books, summarizer="other").save(tmp_path / "now")
    assert (tmp_path / "now").is_symlink() and sorted(path.name for path in tmp_path.iterdir()) == ["m", "now"]
    by_name, by_link = Mindscape.load(tmp_path / "m"), Mindscape.load(tmp_path / "now")
    assert by_name.summarizer == by_link.summarizer == "other"
