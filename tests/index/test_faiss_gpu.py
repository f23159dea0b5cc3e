"""The FAISS GPU adapter on a stand-in: FAISS's own CPU index behind a GPU index's limits, options recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from mia_serve.index import GpuOptions, SessionIndex, faiss_flat
from tests.index.reference import best_chunks, unit


class GpuIndex:
    """Answers as a GPU index does: k at most 2048, no search parameters, half precision where asked for."""

    def __init__(self, log: SimpleNamespace, index: Any, float16: bool) -> None:
        self.log, self.float16, self.ntotal = log, float16, index.ntotal
        vectors = index.reconstruct_n(0, index.ntotal)
        self.index = faiss.IndexFlatIP(index.d)
        self.index.add(self._stored(vectors))

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        assert k <= 2048, "a GPU index refuses this"
        self.log.searches.append(k)
        return self.index.search(self._stored(queries), k)

    def _stored(self, values: np.ndarray) -> np.ndarray:
        return values.astype(np.float16).astype(np.float32) if self.float16 else values


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs that FAISS seems to see; the fixture holds what was asked of them."""
    log = SimpleNamespace(resources=[], cloners=[], searches=[], count=2)

    def resource() -> Any:
        made = SimpleNamespace(temp=None)
        made.setTempMemory = lambda size: setattr(made, "temp", size)
        log.resources.append(made)
        return made

    def clone(resources: list[Any], index: Any, cloner: Any) -> GpuIndex:
        assert resources == log.resources[-log.count :]
        log.cloners.append(cloner)
        return GpuIndex(log, index, cloner.useFloat16)

    module = SimpleNamespace(
        IndexFlatIP=faiss.IndexFlatIP,
        StandardGpuResources=resource,
        GpuMultipleClonerOptions=lambda: SimpleNamespace(useFloat16=False, shard=False),
        get_num_gpus=lambda: log.count,
        index_cpu_to_gpu_multiple_py=clone,
    )
    monkeypatch.setattr(faiss_flat, "import_faiss", lambda: module)
    return log


def make(vectors: np.ndarray, options: GpuOptions | None = None, device: str = "auto") -> SessionIndex:
    index = SessionIndex(vectors.shape[1], "faiss", device, gpu=options)
    index.add([f"c{i:05}" for i in range(len(vectors))], vectors, ["s"] * len(vectors))
    return index


@pytest.mark.parametrize("options", [None, GpuOptions(float16=True), GpuOptions(replicate=True, temp_memory=1 << 28)])
def test_options_reach_every_gpu_and_results_stay_exact(gpus: SimpleNamespace, options: GpuOptions | None) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 3000, 16), unit(rng, 20, 16)
    vectors[:40] = vectors[100] + np.float32(1e-5) * unit(rng, 40, 16)  # closer together than half precision tells
    queries[0] = vectors[100]
    hits = make(vectors, options).search(queries, 10)
    scores, rows = best_chunks(queries, vectors, [f"c{i:05}" for i in range(3000)], 10)
    np.testing.assert_array_equal(hits.rows, rows)
    np.testing.assert_array_equal(hits.scores, scores)
    used = options or GpuOptions()
    assert len(gpus.resources) == 2 and {r.temp for r in gpus.resources} == {used.temp_memory}
    (cloner,) = gpus.cloners
    assert cloner.useFloat16 == used.float16 and cloner.shard == (not used.replicate)
    assert len(gpus.searches) == 1


def test_SRV_39_k_above_the_limit_of_a_gpu_is_searched_by_tiles(gpus: SimpleNamespace) -> None:
    rng = np.random.default_rng(1)
    vectors, queries = unit(rng, 3500, 4), unit(rng, 3, 4)
    index = make(vectors)
    for k in (2000, 3000):
        rows = best_chunks(queries, vectors, [f"c{i:05}" for i in range(3500)], k)[1]
        np.testing.assert_array_equal(index.search(queries, k).rows, rows)
    assert gpus.searches == [2016]  # k = 3000 never reached it


def test_SRV_41_deletions_and_filters_are_masked_on_the_host(gpus: SimpleNamespace) -> None:
    rng = np.random.default_rng(2)
    vectors, queries = unit(rng, 4000, 4), unit(rng, 5, 4)
    index = make(vectors)
    ids = np.array([f"c{i:05}" for i in range(4000)])
    for gone, by_gpu in ((ids[:100], True), (ids[100:2500], False)):  # the second time too many to fetch beside
        index.delete(gone.tolist())
        kept = np.flatnonzero([i in index for i in ids])
        before = len(gpus.searches)
        hits = index.search(queries, 6)
        expected = best_chunks(queries, vectors[kept], ids[kept].tolist(), 6)[1]
        np.testing.assert_array_equal(hits.rows, kept[expected])
        assert (len(gpus.searches) > before) == by_gpu or len(index) * 2 < 4000  # compacted: a new copy is made
    assert index.search(queries, 6, where={"by": "ann"}).ids == [[]] * 5


def test_additions_are_searched(gpus: SimpleNamespace) -> None:
    index = make(np.eye(3, dtype=np.float32))
    assert index.search(np.eye(3), 1).ids == [["c00000"], ["c00001"], ["c00002"]]
    index.add(["new"], 2 * np.eye(1, 3), ["s"])
    assert index.search(np.eye(3), 1).ids == [["new"], ["c00001"], ["c00002"]]
    assert len(gpus.cloners) == 2


def test_numbers_beyond_half_precision_are_still_found(gpus: SimpleNamespace) -> None:
    index = make(np.float32([[1e6, 0], [1, 1]]), GpuOptions(float16=True))
    assert index.search(np.float32([[1, 0], [0, 1e6]]), 2).ids == [["c00000", "c00001"], ["c00001", "c00000"]]


def test_the_cpu_can_be_asked_for_and_missing_gpus_are_told(gpus: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="GPU options"):
        SessionIndex(2, "faiss", "cpu", gpu=GpuOptions())
    assert make(np.eye(2, dtype=np.float32), device="cpu").search(np.eye(2), 1).ids == [["c00000"], ["c00001"]]
    assert not gpus.cloners
    with pytest.raises(ValueError, match="allowed are auto, cpu, cuda"):
        SessionIndex(2, "faiss", "mps")
    gpus.count = 0
    for device, options in (("cuda", None), ("auto", GpuOptions())):
        with pytest.raises(ValueError, match="FAISS sees no GPU"):
            SessionIndex(2, "faiss", device, gpu=options)
    make(np.eye(2, dtype=np.float32)).search(np.eye(2), 1)
    assert not gpus.cloners
