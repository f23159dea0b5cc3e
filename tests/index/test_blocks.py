"""Vectors stay in the blocks they came in: storage, small additions, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mia_serve.index import SessionIndex, blocks
from mia_serve.index.blocks import VectorBlocks, decode_tensor
from mia_serve.index.vectors import decode, encode_storage
from tests.index.reference import best_chunks, best_sessions, build, unit

GROWTH = """
import resource, sys
import numpy as np
from mia_serve.index import SessionIndex

def memory(what):
    return int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1]) * 1024

rows, dim, step = 200_000, 384, 10_000
rng = np.random.default_rng(0)
block = rng.standard_normal((step, dim), dtype=np.float32)
warm = SessionIndex(dim, device="cpu")  # code, thread pools and scratch space of the libraries
warm.add([str(i) for i in range(step)], block, ["s"] * step)
warm.search_sessions(block[:16], 10), warm.search(block[:16], 10)
del warm
before = memory("VmRSS")
index = SessionIndex(dim, device="cpu")
for start in range(0, rows, step):
    ids = [f"turn-{i:09}" for i in range(start, start + step)]
    index.add(ids, block, [f"session-{i // 22:07}" for i in range(start, start + step)])
index.search(block[:16], 10), index.search_sessions(block[:16], 10)
print((memory("VmHWM") - before) / (rows * dim * 4))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_SRV_50_building_and_searching_takes_little_beside_the_vectors() -> None:
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=250, check=True)
    assert float(run.stdout) < 1.2


def test_many_small_additions_leave_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_MERGE_BYTES", 4 * 3 * 256)  # of 256 vectors
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 2000, 3), unit(rng, 4, 3)
    index = SessionIndex(3, "torch", "cpu")
    for i, vector in enumerate(vectors):
        index.add([f"c{i}"], vector[None], [f"s{i // 7}"])
        if i % 500 == 3:
            index.search(queries, 2)
    held = index._contents.vectors.blocks
    assert len(held) < 2 * 2000 / 128 and max(len(block.data) for block in held) <= 256
    ids = [f"c{i}" for i in range(2000)]
    np.testing.assert_array_equal(index.search(queries, 9).rows, best_chunks(queries, vectors, ids, 9)[1])


def test_large_blocks_are_never_joined() -> None:
    big = np.zeros((6000, 1024), np.float32)
    index = SessionIndex(1024, "torch", "cpu")
    for start in range(0, 18_000, 6000):
        index.add([str(i) for i in range(start, start + 6000)], big, ["s"] * 6000)
    assert [len(block.data) for block in index._contents.vectors.blocks] == [6000] * 3


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_scores_are_those_of_the_vectors_as_stored(storage, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vectors, queries = unit(rng, 500, 12), unit(rng, 6, 12)
    ids, sessions = [f"c{i}" for i in range(500)], [f"s{i // 9}" for i in range(500)]
    build(vectors, ids, sessions).save(tmp_path / "index", storage)
    index = SessionIndex.load(tmp_path / "index", device="cpu")
    later = unit(rng, 3, 12)
    index.add(["d0", "d1", "d2"], later, ["s0", "new", "new"])  # kept as given until it is saved
    stored = np.concatenate([decode(index._contents.vectors.blocks[0]), later])
    np.testing.assert_allclose(stored[:500], vectors, atol={"float32": 0, "float16": 3e-4, "int8": 6e-3}[storage])
    scores, rows = best_chunks(queries, stored, [*ids, "d0", "d1", "d2"], 20)
    for backend in ("torch", "faiss"):
        opened = index
        if backend == "faiss":
            opened = SessionIndex.load(tmp_path / "index", backend="faiss", device="cpu")
            opened.add(["d0", "d1", "d2"], later, ["s0", "new", "new"])
        hits = opened.search(queries, 20)
        np.testing.assert_array_equal(hits.rows, rows)
        np.testing.assert_array_equal(hits.scores, scores)
    found = index.search_sessions(queries, 5)
    expected = best_sessions(queries, stored, [*ids, "d0", "d1", "d2"], [*sessions, "s0", "new", "new"], 5)
    assert found.ids == [[entry[0] for entry in row] for row in expected]


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_a_device_decodes_to_the_same_bits(storage) -> None:
    block = encode_storage(unit(np.random.default_rng(2), 300, 16), storage)
    tensors = [torch.from_numpy(array) for array in block if array is not None]
    np.testing.assert_array_equal(decode_tensor(*tensors).numpy(), decode(block))


def test_take_and_tiles_agree_across_blocks() -> None:
    rng = np.random.default_rng(3)
    parts = [unit(rng, rows, 5) for rows in (7, 1, 30, 4)]
    held = VectorBlocks(5, torch.device("cpu"))
    for part in parts:
        held.append(encode_storage(part, "float32"), own=False)
    whole = np.concatenate(parts)
    where = rng.integers(0, len(whole), 50)
    np.testing.assert_array_equal(held.take(where).numpy(), whole[where])
    for start in (0, 3, 7, 20, 41):
        pieces = list(held.tiles(8, start))
        assert [first for first, _ in pieces] == list(np.cumsum([start] + [len(t) for _, t in pieces])[:-1])
        np.testing.assert_array_equal(np.concatenate([tile.numpy() for _, tile in pieces]), whole[start:])
    kept = rng.integers(0, 2, len(whole)).astype(bool)
    kept[:7] = True
    untouched = held.blocks[0]
    held.keep(kept)
    assert held.blocks[0] is untouched
    np.testing.assert_array_equal(held.take(np.arange(len(held))).numpy(), whole[kept])
