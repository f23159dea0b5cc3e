"""The vector cache: no text goes through a model twice, whoever encoded it, and a cache never costs a result."""

from __future__ import annotations

import math
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mia_serve.core import Encoder, MiaError
from mia_serve.core.cached_encoder import CachedEncoder
from mia_serve.core.encoder import EncodeFailed
from mia_serve.core.vector_cache import CacheReport, VectorCache, default_cache, embed_texts

ROOT = Path(__file__).parents[2]
WORDS = ["ferryman", "lamps", "quay", "ledger", "floor", "key", "clock", "village", "boat", "night"]
TEXTS = [f"the {a} of the {b}" for a in WORDS for b in WORDS]
FACTS = {"dim": 4, "role": "document"}

# A process that adds shards and imports no torch. A text's vector can be told from the text.
WRITER = """
import sys
import numpy as np
from mia_serve.core.vector_cache import VectorCache
folder, start, stop, step, width = sys.argv[1], *map(int, sys.argv[2:])
cache = VectorCache(folder, {"dim": 4, "role": "document"})
print("go", flush=True)
for first in range(start, stop, step):
    numbers = range(first, first + width)
    cache.add([f"text {i}" for i in numbers], np.array([[i, -i, 2 * i, 1] for i in numbers], np.float32))
"""


def numbered(numbers: range) -> np.ndarray:
    return np.array([[i, -i, 2 * i, 1] for i in numbers], np.float32)


def writer(folder: Path, *numbers: int, code: str = WRITER) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(folder), *map(str, numbers)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def known(folder: Path, numbers: range) -> tuple[list[int], np.ndarray]:
    """Return which of the numbered texts a fresh reader finds, and their vectors."""
    out = np.full((len(numbers), 4), np.nan, np.float32)
    missing = set(VectorCache(folder, FACTS).fill([f"text {i}" for i in numbers], out))
    found = [i for i in range(len(numbers)) if i not in missing]
    return [numbers[i] for i in found], out[found]


@contextmanager
def forwards(encoder: Encoder) -> Iterator[list[int]]:
    """Collect the number of rows of every forward pass of the model."""
    rows: list[int] = []
    hook = encoder.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    yield rows
    hook.remove()


@pytest.fixture(scope="module")
def tiny(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert, device="cpu")


def test_repeated_texts_are_encoded_once_and_come_back_in_order(tiny: Encoder, tmp_path: Path) -> None:
    texts = [TEXTS[i] for i in (5, 0, 5, 99, 0, 5)]
    report = CacheReport()
    for role, encode in (("document", tiny.encode_documents), ("query", tiny.encode_queries)):
        with forwards(tiny) as rows:
            found = embed_texts(tiny, texts, role, tmp_path, report)
        assert sum(rows) == 3
        np.testing.assert_allclose(found, encode(texts), atol=1e-5)
    assert (report.encoded, report.known, report.repeated) == (6, 0, 6)
    again = CacheReport()
    with forwards(tiny) as rows:
        both = embed_texts(tiny, [texts[1], "the boat", texts[0]], "query", tmp_path, again)
    assert (both[[0, 2]] == found[:2][::-1]).all()
    assert (sum(rows), again.to_text()) == (1, "encoded 1 text, 2 known")
    with forwards(tiny) as rows:
        assert embed_texts(tiny, texts, "query", None).shape == (6, 32)
    assert sum(rows) == 3  # without a cache too
    assert embed_texts(tiny, [], "document", tmp_path).shape == (0, 32)


def test_sessions_that_haystacks_share_are_encoded_once(tiny: Encoder, tmp_path: Path) -> None:
    """LongMemEval: every question has a haystack of its own, which shares most of its sessions with the others'."""
    turns = {f"s{s}": [f"{TEXTS[s]} {WORDS[t]} {t}" for t in range(6)] for s in range(12)}
    haystacks = [[f"s{s}" for s in range(10)], [f"s{s}" for s in range(2, 12)]]
    reports, passes, vectors = [], [], []
    for _ in range(2):
        for haystack in haystacks:
            reports.append(CacheReport())
            texts = [turn for session in haystack for turn in turns[session]]
            with forwards(tiny) as rows:
                vectors.append(embed_texts(tiny, texts, "document", tmp_path, reports[-1]))
            passes.append(sum(rows))
    assert passes == [60, 12, 0, 0]
    assert [(report.encoded, report.known) for report in reports] == [(60, 0), (12, 48), (0, 60), (0, 60)]
    assert (vectors[0] == vectors[2]).all() and (vectors[1] == vectors[3]).all()
    assert (vectors[0][12:] == vectors[1][:48]).all()


def test_TRN_13_whatever_changes_a_vector_has_entries_of_its_own(tiny_bert: Path, tmp_path: Path) -> None:
    texts = ["the quay", "the quay and the boat and the ledger under the floor"]

    def encoder(dtype: str = "float32", **changes: object) -> Encoder:
        made = Encoder.load(tiny_bert, device="cpu", dtype=dtype)
        return Encoder(made.model, made.tokenizer, made.spec.with_changes(**changes), made.device)

    plain = encoder()
    prompt = encoder(template=replace(plain.spec.template, document_prefix="the ledger "))
    short, half, trained = encoder(max_document_tokens=6), encoder("bfloat16"), encoder()
    with torch.no_grad():
        next(trained.model.parameters()).add_(0.01)
    for one in (plain, prompt, short, half, trained):
        for expected in (2, 0):
            report = CacheReport()
            found = embed_texts(one, texts, "document", tmp_path, report)
            assert report.encoded == expected
            np.testing.assert_allclose(found, one.encode_documents(texts), atol=1e-2 if one is half else 1e-5)
    assert len(list(tmp_path.iterdir())) == 5


def test_a_writer_that_is_killed_leaves_whole_shards_only(tmp_path: Path) -> None:
    start = 0
    for round_ in range(6):
        child = writer(tmp_path, start, start + 10**6, 7, 7)
        assert child.stdout is not None and child.stdout.readline() == "go\n"
        time.sleep(0.03 + 0.02 * round_)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        numbers = range(start, start + 7000)
        found, vectors = known(tmp_path, numbers)
        assert found == list(range(start, start + len(found))) and len(found) % 7 == 0
        assert (vectors == numbered(range(start, start + len(found)))).all()
        start += len(found)
    assert start  # something was written, all of it was found
    assert known(tmp_path, range(start))[0] == list(range(start))


def test_two_writers_and_a_reader_at_once(tmp_path: Path) -> None:
    # Overlapping texts, in far more shards than are left unmerged.
    children = [writer(tmp_path, 0, 900, 3, 3), writer(tmp_path, 300, 1200, 3, 5)]
    while any(child.poll() is None for child in children):
        found, vectors = known(tmp_path, range(1205))
        assert (vectors[:, 0] == found).all()
    assert [child.communicate()[1] for child in children] == ["", ""]
    found, vectors = known(tmp_path, range(1202))
    assert found == list(range(1202)) and (vectors == numbered(range(1202))).all()
    assert len(list(tmp_path.glob("*/*.shard"))) <= 2 * 33
    assert not list(tmp_path.glob("*/.*.tmp"))


def test_many_small_shards_become_one_and_a_dead_writers_file_goes(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path, FACTS)
    left, fresh = (cache.folder / f".{name}.shard.0.tmp" for name in ("left", "fresh"))
    for file, age in ((left, 3 * 86400), (fresh, 0)):
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age,) * 2)
    for i in range(40):
        cache.add([f"text {i}"], numbered(range(i, i + 1)))
    assert len(list(cache.folder.glob("*.shard"))) < 10
    assert known(tmp_path, range(40))[0] == list(range(40))
    assert fresh.exists() and not left.exists()
    out = np.zeros((2, 4), np.float32)
    assert cache.fill(["text 41", "text 3"], out) == [0]  # the writer itself has followed
    assert (out[1] == [3, -3, 6, 1]).all()


def test_a_file_that_another_writer_renames_meanwhile_stops_no_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = VectorCache(tmp_path, FACTS)
    (cache.folder / ".gone.shard.0.tmp").symlink_to("renamed")  # listed, and not there when it is looked at
    for i in range(40):
        cache.add([f"text {i}"], numbered(range(i, i + 1)))
    assert not capsys.readouterr().err
    assert len(list(cache.folder.glob("*.shard"))) < 10
    assert known(tmp_path, range(40))[0] == list(range(40))


def test_a_cache_that_cannot_be_written_costs_one_line(
    tiny: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = tiny.encode_documents(TEXTS[:3])
    for place in (Path("/proc/self/vectors"), tmp_path / "file" / "below"):
        (tmp_path / "file").write_text("x")
        for _ in range(2):
            report = CacheReport()
            np.testing.assert_allclose(embed_texts(tiny, TEXTS[:3], "document", place, report), expected, atol=1e-6)
            assert (report.encoded, report.known) == (3, 0)
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(place) in said and "cannot be written" in said
    with pytest.raises(MiaError, match="is a file"):
        embed_texts(tiny, TEXTS[:1], "document", tmp_path / "file")


def test_a_full_disk_leaves_what_was_there_and_nothing_half(tmp_path: Path) -> None:
    VectorCache(tmp_path, FACTS).add(["text 0"], numbered(range(1)))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    child = writer(tmp_path, 1, 20, 5, 5, code=limit + WRITER)
    said = child.communicate()[1]
    assert child.returncode == 0 and said.count("\n") == 1 and "cannot be written" in said
    assert known(tmp_path, range(20))[0] == [0]
    assert not list(tmp_path.glob("*/.*.tmp"))


@pytest.mark.parametrize("damage", ["truncated", "a row short", "foreign", "empty"])
def test_a_shard_that_cannot_be_read_is_named_and_encoded_again(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = VectorCache(tmp_path, FACTS)
    cache.add(["text 0", "text 1"], numbered(range(2)))
    (shard,) = cache.folder.glob("*.shard")
    cache.add(["text 2"], numbered(range(2, 3)))
    content = shard.read_bytes()
    cuts = {
        "truncated": content[:-1],
        "a row short": content[:-52],
        "foreign": b"\x93NUMPY" + content[6:],
        "empty": b"",
    }
    shard.write_bytes(cuts[damage])
    assert known(tmp_path, range(3))[0] == [2]
    said = capsys.readouterr().err
    assert str(shard) in said and "encoded again" in said
    VectorCache(tmp_path, FACTS).add(["text 0", "text 1"], numbered(range(2)))
    assert known(tmp_path, range(3))[0] == [0, 1, 2]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("damage", [struct.pack("<2f", 7, 7), struct.pack("<2f", math.nan, 1), bytes(8)])
def test_a_vector_that_was_overwritten_is_encoded_again(
    damage: bytes, merged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = VectorCache(tmp_path, FACTS)
    cache.add([f"text {i}" for i in range(3)], numbered(range(3)))
    (shard,) = cache.folder.glob("*.shard")
    content = shard.read_bytes()
    at = len(content) - 2 * 16  # the vector of text 1
    shard.write_bytes(content[:at] + damage + content[at + 8 :])
    for _ in range(2):
        found, vectors = known(tmp_path, range(3))
        assert found == [0, 2] and (vectors == numbered(range(3))[[0, 2]]).all()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(shard) in said and "encoded again" in said
    more = 40 if merged else 1
    for i in range(1, 1 + more):  # beside the damaged one, whatever the names of the files
        VectorCache(tmp_path, FACTS).add([f"text {i}"], numbered(range(i, i + 1)))
    found, vectors = known(tmp_path, range(2 + more))
    assert found == list(range(max(3, 1 + more))) and (vectors == numbered(range(len(found)))).all()
    assert capsys.readouterr().err == ""
    assert shard.exists() != merged


def test_vectors_of_two_texts_that_changed_places_are_encoded_again(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path, FACTS)
    cache.add([f"text {i}" for i in range(3)], numbered(range(3)))
    (shard,) = cache.folder.glob("*.shard")
    content = shard.read_bytes()
    shard.write_bytes(content[:-32] + content[-16:] + content[-32:-16])
    assert known(tmp_path, range(3))[0] == [0]


def test_a_shard_of_another_version_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = VectorCache(tmp_path, FACTS)
    cache.add(["text 0"], numbered(range(1)))
    (shard,) = cache.folder.glob("*.shard")
    old = cache.folder / f"{'0' * 24}.shard"
    shard.rename(old)
    old.write_bytes(b"MIAVEC1\n" + old.read_bytes()[8:])
    assert known(tmp_path, range(1))[0] == []
    VectorCache(tmp_path, FACTS).add(["text 0"], numbered(range(1)))
    assert known(tmp_path, range(1))[0] == [0]
    assert old.exists() and capsys.readouterr().err == ""


def test_one_reader_sees_what_others_add(tmp_path: Path) -> None:
    first, second = VectorCache(tmp_path, FACTS), VectorCache(tmp_path, FACTS)
    out = np.zeros((1, 4), np.float32)
    for i in range(5):
        assert first.fill([f"text {i}"], out) == [0]
        second.add([f"text {i}"], numbered(range(i, i + 1)))
        assert first.fill([f"text {i}"], out) == []
        assert out[0, 0] == i


def test_a_large_cache_is_looked_through_without_its_vectors(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path, {"dim": 1024})
    rows = 250_000
    keys = np.random.default_rng(0).integers(0, 256, (rows, 36), np.uint8)
    vectors = np.ones((1, 1024), np.float32)
    cache._write(keys, [vectors])  # header and keys say so; the file is then grown to hold its 1 GB of zeros
    (shard,) = cache.folder.glob("*.shard")
    os.truncate(shard, 64 + rows * (36 + 4096))
    cache.add(["text 0"], vectors * 2)
    os.sync()
    out = np.zeros((2, 1024), np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF)
    assert VectorCache(tmp_path, {"dim": 1024}).fill(["text 0", "text 1"], out) == [1]
    after = resource.getrusage(resource.RUSAGE_SELF)
    faults = after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt
    # The kernel maps at most 16 pages a fault: the keys are 2,200 pages, the vectors 250,000.
    assert faults < 10_000 and (out[0] == 2).all()


def test_texts_that_do_not_fit_into_memory_are_named_and_the_others_kept(tiny: Encoder, tmp_path: Path) -> None:
    long = "the quay and the boat " * 10
    texts = ["the quay", long, "the boat", long]

    def refuse(module: torch.nn.Module, args: tuple[object], kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].shape[1] > 20:
            raise torch.OutOfMemoryError

    budget = tiny.tokens_per_batch
    hook = tiny.model.register_forward_pre_hook(refuse, with_kwargs=True)
    with pytest.raises(EncodeFailed) as caught:
        embed_texts(tiny, texts, "document", tmp_path)
    hook.remove()
    tiny.tokens_per_batch = budget
    assert caught.value.rows == [1, 3]
    assert np.isfinite(caught.value.vectors["document"]).all(axis=1).tolist() == [True, False, True, False]
    report = CacheReport()
    np.testing.assert_allclose(
        embed_texts(tiny, texts, "document", tmp_path, report), tiny.encode_documents(texts), atol=1e-5
    )
    assert (report.encoded, report.known) == (1, 2)


def test_queries_that_are_refused_are_named(tiny: Encoder, tmp_path: Path) -> None:
    for bad, words in (("lamp " * 500, "lamp lamp"), ("  ", "empty"), ("a\udcff", "surrogate")):
        with pytest.raises(MiaError, match=words):
            embed_texts(tiny, ["the quay", bad], "query", tmp_path)
    with pytest.raises(MiaError, match="list of strings"):
        embed_texts(tiny, "the quay", "query", tmp_path)
    with pytest.raises(MiaError, match="list of strings"):
        embed_texts(tiny, ["the quay", 3], "document", tmp_path)  # type: ignore[list-item]


def test_an_encoder_that_remembers_gives_what_the_plain_one_gives(tiny: Encoder, tmp_path: Path) -> None:
    cached = CachedEncoder(tiny, tmp_path)
    queries, signatures = ["the quay", "the boat"], [["the ledger."], None]
    for _ in range(2):
        np.testing.assert_allclose(cached.encode_documents(TEXTS), tiny.encode_documents(TEXTS), atol=1e-5)
        np.testing.assert_allclose(cached.encode_queries(queries), tiny.encode_queries(queries), atol=1e-5)
        paired = tiny.encode_queries(queries, signatures)
        np.testing.assert_allclose(cached.encode_queries(queries, signatures), paired, atol=1e-5)
    assert (cached.spec_hash, cached.dim) == (tiny.spec_hash, 32)
    assert cached.report.to_dict() == {"encoded": 102, "known": 102, "repeated": 0}  # not those with signatures
    out = np.zeros((2, 32), np.float32)
    assert cached.encode_documents(TEXTS[:2], out) is out and out.any()


def test_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MIA_CACHE", "~/vectors")
    assert default_cache() == tmp_path / "vectors"
    for value in ("off", "OFF"):
        monkeypatch.setenv("MIA_CACHE", value)
        assert default_cache() is None
    monkeypatch.delenv("MIA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "mia" / "vectors"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache() == tmp_path / ".cache" / "mia" / "vectors"


def test_the_cache_needs_no_model_library() -> None:
    code = "import sys, mia_serve.core.vector_cache; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
