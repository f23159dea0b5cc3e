"""Searching in several threads and in child processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mia_serve.index import SessionIndex, collect, session_scores
from mia_serve.index.threads import share
from tests.index.reference import best_chunks, best_sessions, build, unit


def test_threads_that_search_at_the_same_time_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(0)
    vectors, metadata = unit(rng, 3000, 16), [{"day": i % 5} for i in range(3000)]
    for backend in ("torch", "faiss"):
        index = build(vectors, sessions=[f"s{i // 9}" for i in range(3000)], backend=backend, metadata=metadata)
        scores, rows = best_chunks(vectors[:40], vectors, list(index.ids), 5)
        fridays = index.search(vectors[:40], 5, {"day": 4}).ids
        index.add(["late"], np.zeros((1, 16)), ["s"], [{"day": 4}])  # everything is to be made anew

        def search(i: int, index=index, scores=scores, rows=rows, fridays=fridays) -> None:
            hits = index.search(vectors[i : i + 1], 5)
            np.testing.assert_array_equal(hits.rows[0], rows[i])
            np.testing.assert_array_equal(hits.scores[0], scores[i])
            assert index.search(vectors[i : i + 1], 5, {"day": 4}).ids == [fridays[i]]
            assert index.search_sessions(vectors[i : i + 1], 1).best_chunk == [[f"c{i}"]]

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(search, range(40)))


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_threads_that_share_a_search_find_what_one_finds(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_TALL", 64)
    monkeypatch.setattr(session_scores, "_TALL", 64)
    rng = np.random.default_rng(1)
    vectors, queries = unit(rng, 5000, 8), unit(rng, 6, 8)
    ids, sessions = [f"c{i}" for i in range(5000)], [f"s{i // 9}" for i in range(5000)]
    index = build(vectors, ids, sessions)
    np.testing.assert_array_equal(index.search(queries, 20).rows, best_chunks(queries, vectors, ids, 20)[1])
    for pooling in ("max", "topk", "mean", "early", "lme"):
        hits = index.search_sessions(queries, 8, pooling)
        expected = best_sessions(queries, vectors, ids, sessions, 8, pooling)
        assert hits.ids == [[entry[0] for entry in row] for row in expected]
        assert hits.best_chunk == [[entry[2] for entry in row] for row in expected]
        scores = index.score_sessions(queries, pooling)
        np.testing.assert_allclose(-np.sort(-scores.scores, axis=1)[:, :8], hits.scores, rtol=3e-7)


@pytest.mark.parametrize("workers", [1, 3])
def test_shared_work_is_done_once_each_and_stops_at_an_error(workers: int) -> None:
    done: list[int] = []
    share(done.append, range(50), workers)
    assert sorted(done) == list(range(50))

    def fail(i: int) -> None:
        if i == 4:
            raise KeyError("four")
        time.sleep(0.001)
        done.append(i)

    done.clear()
    with pytest.raises(KeyError, match="four"):
        share(fail, range(1000), workers)
    assert len(done) < 20


def _search(path: str) -> list[list[str]]:
    return SessionIndex.load(path, device="cpu").search(np.eye(2), 1).ids


def test_SRV_48_a_spawned_process_searches_after_its_parent_did(tmp_path) -> None:
    index = build(np.eye(2, dtype=np.float32))
    index.save(tmp_path / "index")
    expected = index.search(np.eye(2), 1).ids
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(_search, [str(tmp_path / "index")]).get(timeout=200) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_SRV_48_a_forked_process_is_told_and_does_not_hang() -> None:
    index, threads = build(np.eye(2, dtype=np.float32)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        index.search(np.eye(2), 1)
        child = os.fork()
        if not child:
            try:
                index.search(np.eye(2), 1)
            except ValueError as error:
                os._exit(7 if "spawn" in str(error) else 8)
            os._exit(9)
        deadline = time.monotonic() + 60
        done, status = os.waitpid(child, os.WNOHANG)
        while not done and time.monotonic() < deadline:
            time.sleep(0.02)
            done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert done and os.waitstatus_to_exitcode(status) == 7
    finally:
        torch.set_num_threads(threads)
