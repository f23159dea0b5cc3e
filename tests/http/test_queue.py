"""The queue in front of an encoder: right vectors, fair batches, failures that stay where they belong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_serve.core import Encoder, MiaError
from mia_serve.core.pooling import Sequence as Tokens
from mia_serve.http.queue import EncodeQueue, QueueDead, QueueFull
from mia_serve.http.queued_encoder import QueuedEncoder, TooLong
from mia_serve.llm.failures import LlmFailed


class Recorder:
    """An encoder of numbers that notes its batches; a sequence's vector is its first token id."""

    tokens_per_batch = 64
    pads = True

    def __init__(self, work: Callable[[list[int]], None] = lambda firsts: None) -> None:
        self.batches: list[list[int]] = []  # lengths
        self.firsts: list[int] = []
        self.work = work
        self.gate = threading.Event()
        self.gate.set()

    def embed_sequences(self, sequences: Sequence[Tokens]) -> list[dict[str, np.ndarray] | None]:
        self.gate.wait()
        firsts = [s.ids[0] for s in sequences]
        self.work(firsts)
        self.batches.append([len(s.ids) for s in sequences])
        self.firsts += firsts
        return [{"document": np.array([first], np.float32)} for first in firsts]


class Told:
    """Metrics that are lists."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int]] = []
        self.failures: list[str] = []
        self.alive: list[bool] = []
        self.now = (0, 0)

    def waiting(self, items: int, tokens: int) -> None:
        self.now = (items, tokens)

    def batch(self, items: int, tokens: int, padded: int, budget: int, seconds: float) -> None:
        self.batches.append((items, tokens, padded))

    def waited(self, seconds: float) -> None:
        assert seconds >= 0

    def failed(self, reason: str) -> None:
        self.failures.append(reason)

    def worker(self, alive: bool) -> None:
        self.alive.append(alive)


def tokens(length: int, first: int = 1) -> Tokens:
    return Tokens([first] + [0] * (length - 1), {"document": (0, length)})


@contextmanager
def queue_of(encoder: Any, **options: Any) -> Iterator[EncodeQueue]:
    queue = EncodeQueue(encoder, **options)
    queue.start()
    try:
        yield queue
    finally:
        queue.close(timeout=5.0)


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


def held_up(queue: EncodeQueue, recorder: Recorder) -> Any:
    """Put one sequence in front, and hold the worker in it."""
    recorder.gate.clear()
    first = queue.submit([tokens(1, 999)])
    wait_until(lambda: queue.waiting_tokens == 0)
    return first


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_bert"])
def test_vectors_are_those_of_the_plain_encoder_whoever_else_is_in_the_batch(
    name: str, request: pytest.FixtureRequest
) -> None:
    plain = Encoder.load(request.getfixturevalue(name), device="cpu")
    texts = [("anna walks to the sea " * (1 + i % 5)).strip() for i in range(40)]
    signatures = [["the sea is grey", "anna is old"] if i % 3 == 0 else None for i in range(40)]
    expected = plain.encode_queries(texts, signatures), plain.encode_documents(texts)

    async def ask(encoder: QueuedEncoder) -> tuple[np.ndarray, np.ndarray, list[int]]:
        queries = [encoder.encode_queries_async([t], [s]) for t, s in zip(texts, signatures, strict=True)]
        documents = [encoder.encode_documents_async([t]) for t in texts]
        found = await asyncio.gather(*queries, *documents)
        vectors = np.concatenate([f.vectors for f in found])
        return vectors[:40], vectors[40:], [f.tokens[0] for f in found[40:]]

    with queue_of(plain, tokens_per_batch=200) as queue:
        encoder = QueuedEncoder(plain, queue)
        queries, documents, counted = asyncio.run(ask(encoder))
        from_threads = encoder.encode_documents(texts)
    np.testing.assert_allclose(queries, expected[0], atol=1e-5)
    np.testing.assert_allclose(documents, expected[1], atol=1e-5)
    np.testing.assert_allclose(from_threads, expected[1], atol=1e-5)
    assert counted == [len(plain.tokenise_document(t).ids) for t in texts]
    assert encoder.spec_hash == plain.spec_hash


def test_SRV_16_tokens_are_counted_with_the_template_and_ids_equal_their_text(tiny_qwen3: Path) -> None:
    plain = Encoder.load(tiny_qwen3, device="cpu")
    ids = plain.text._plain.encode("anna walks", add_special_tokens=False).ids
    with queue_of(plain) as queue:
        encoder = QueuedEncoder(plain, queue)

        async def ask() -> tuple[Any, Any, Any]:
            return await asyncio.gather(
                encoder.encode_documents_async(["anna walks"]),
                encoder.encode_documents_async([ids]),
                encoder.encode_queries_async(["anna walks"], [["the sea"]]),
            )

        text, given, query = asyncio.run(ask())
    np.testing.assert_allclose(text.vectors, given.vectors, atol=1e-6)
    assert text.tokens == given.tokens == [len(plain.tokenise_document("anna walks").ids)]
    assert query.tokens == [sum(len(s.ids) for s in plain.tokenise_query("anna walks", ["the sea"]))]


def test_SRV_04_a_text_that_is_too_long_is_refused_by_name_or_cut_and_nothing_is_queued(tiny_bert: Path) -> None:
    plain = Encoder.load(tiny_bert, device="cpu", max_document_tokens=16)
    with queue_of(plain) as queue:
        encoder = QueuedEncoder(plain, queue)
        texts = ["anna", "the sea " * 40]
        with pytest.raises(TooLong, match=r"document 1 has \d+ tokens, 14 fit"):
            asyncio.run(encoder.encode_documents_async(texts))
        assert queue.waiting_tokens == 0
        cut = asyncio.run(encoder.encode_documents_async(texts, truncate=True))
    assert cut.tokens[1] == 16
    np.testing.assert_allclose(cut.vectors, plain.encode_documents(texts), atol=1e-5)


def test_SRV_05_a_sequence_over_the_budget_goes_alone_and_not_never() -> None:
    recorder = Recorder()
    with queue_of(recorder, tokens_per_batch=16, max_tokens_waiting=10) as queue:
        found = queue.submit([tokens(20, 7), tokens(3, 8)]).result(5)
    assert [views["document"][0] for views in found if views] == [7, 8]
    assert sorted(map(len, recorder.batches)) == [1, 1]


def test_batches_hold_neighbours_in_length_and_little_padding() -> None:
    recorder, told = Recorder(), Told()
    with queue_of(recorder, tokens_per_batch=64, metrics=told) as queue:
        first = held_up(queue, recorder)
        jobs = [queue.submit([tokens(n)]) for n in (20, 2, 19, 3, 60, 14, 2, 20, 3)]
        recorder.gate.set()
        for job in [first, *jobs]:
            job.result(5)
    # The oldest (20) with those like it: 3 x 20 fit into 64, 1 is padding. A 3 beside 2 x 2 would make it 2 of 9.
    assert [sorted(lengths) for lengths in recorder.batches[1:]] == [[19, 20, 20], [2, 2], [3, 3], [60], [14]]
    assert (3, 59, 60) in told.batches
    assert told.now == (0, 0)


def test_an_encoder_that_does_not_pad_is_given_all_lengths_at_once() -> None:
    recorder = Recorder()
    recorder.pads = False
    with queue_of(recorder, tokens_per_batch=64) as queue:
        first = held_up(queue, recorder)
        jobs = [queue.submit([tokens(n)]) for n in (9, 2, 5)]
        recorder.gate.set()
        for job in [first, *jobs]:
            job.result(5)
    assert recorder.batches[1:] == [[9, 5, 2]]


def test_forwards_that_take_long_become_smaller_and_no_smaller_than_an_eighth() -> None:
    recorder = Recorder(lambda firsts: time.sleep(0.01 * len(firsts)))  # 10 ms for 4 tokens: 100 of them in 0.25 s
    recorder.tokens_per_batch = 400
    slow = Recorder(lambda firsts: time.sleep(0.04 * len(firsts)))  # 25 tokens in 0.25 s
    slow.tokens_per_batch = 400
    for encoder, most in ((recorder, 25), (slow, 12)):
        with queue_of(encoder) as queue:
            queue.submit([tokens(4)] * 4).result(20)
            queue.submit([tokens(4)] * 40).result(20)
        assert most - 10 < len(encoder.batches[1]) <= most


def test_a_long_text_in_a_flood_of_short_ones_is_not_starved() -> None:
    recorder = Recorder(lambda firsts: time.sleep(0.002))
    with queue_of(recorder) as queue:
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                queue.submit([tokens(2)]).result(5)

        threads = [threading.Thread(target=flood) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        started = len(recorder.batches)
        queue.submit([tokens(60, 5)]).result(5)
        took = len(recorder.batches) - started
        stop.set()
        for thread in threads:
            thread.join()
    assert took <= 5


def test_SRV_07_a_request_that_breaks_the_model_fails_alone() -> None:
    def break_on_666(firsts: list[int]) -> None:
        if 666 in firsts:
            raise ValueError("no such token")

    recorder, told = Recorder(break_on_666), Told()
    with queue_of(recorder, metrics=told) as queue:
        first = held_up(queue, recorder)
        good = [queue.submit([tokens(3, i), tokens(3, i)]) for i in range(5)]
        bad = queue.submit([tokens(3, 1), tokens(3, 666)])
        more = [queue.submit([tokens(3, i)]) for i in range(5, 9)]
        recorder.gate.set()
        first.result(5)
        for i, job in enumerate([*good, *more]):
            assert all(views is not None and views["document"][0] == i for views in job.result(5))
        with pytest.raises(ValueError, match="no such token"):
            bad.result(5)
        assert queue.alive and queue.waiting_tokens == 0
        assert queue.submit([tokens(2, 4)]).result(5)
    assert told.failures == ["encoder"]


def test_SRV_07_a_model_server_that_is_away_is_asked_once_and_not_for_every_text() -> None:
    calls: list[int] = []

    def away(firsts: list[int]) -> None:
        calls.append(len(firsts))
        raise LlmFailed("unreachable", "no connection")

    recorder, told = Recorder(away), Told()
    with queue_of(recorder, tokens_per_batch=64, metrics=told) as queue:
        jobs = [queue.submit([tokens(2), tokens(2)]) for _ in range(8)]
        for job in jobs:
            with pytest.raises(LlmFailed, match="no connection"):
                job.result(5)
        assert queue.waiting_tokens == 0 and told.now == (0, 0)
    assert len(calls) <= 2


def test_SRV_07_a_dead_worker_is_seen_its_requests_fail_and_another_one_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def die_on_13(firsts: list[int]) -> None:
        if 13 in firsts:
            raise SystemExit("gone")

    recorder, told = Recorder(die_on_13), Told()
    with queue_of(recorder, metrics=told) as queue:
        wait_until(lambda: queue.alive)
        dying = queue.submit([tokens(3, 13)])
        with pytest.raises(QueueDead, match="died"):
            dying.result(5)
        wait_until(lambda: not queue.alive)
        waiting = queue.submit([tokens(3, 2)])  # meanwhile
        assert waiting.result(5)[0] is not None
        assert queue.alive
    assert told.alive[:3] == [True, False, True] and "worker" in told.failures
    assert "has died" in caplog.text


def test_what_is_cancelled_is_never_run() -> None:
    recorder = Recorder()
    with queue_of(recorder) as queue:
        first = held_up(queue, recorder)

        async def ask() -> None:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Any] = loop.create_future()
            job = queue.submit_to(future, [tokens(3, 41)])
            future.cancel()
            queue.forget(job)

        asyncio.run(ask())
        cancelled = [queue.submit([tokens(n, 42), tokens(3, 42)]) for n in (3, 4)]
        kept = queue.submit([tokens(3, 43)])
        assert queue.waiting_tokens == 6 + 7 + 3
        assert all(job.cancel() for job in cancelled)
        assert queue.waiting_tokens == 3
        recorder.gate.set()
        first.result(5)
        kept.result(5)
    assert 43 in recorder.firsts and not {41, 42} & set(recorder.firsts)


def test_a_cancelled_request_of_an_encoder_is_dropped(tiny_bert: Path) -> None:
    plain = Encoder.load(tiny_bert, device="cpu")
    recorder = Recorder()
    with queue_of(recorder) as queue:
        first = held_up(queue, recorder)
        encoder = QueuedEncoder(plain, queue)

        async def ask() -> None:
            task = asyncio.create_task(encoder.encode_documents_async(["anna walks"]))
            while not queue.waiting_tokens:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert queue.waiting_tokens == 0

        asyncio.run(ask())
        recorder.gate.set()
        first.result(5)
    assert recorder.firsts == [999]


def test_SRV_06_a_full_queue_refuses_and_says_when_and_bulk_waits_instead() -> None:
    recorder, told = Recorder(), Told()
    with queue_of(recorder, max_tokens_waiting=20, metrics=told) as queue:
        first = held_up(queue, recorder)
        fits = queue.submit([tokens(15)])
        with pytest.raises(QueueFull, match="15 tokens wait") as caught:
            queue.submit([tokens(6)])
        assert 1 <= caught.value.retry_after <= 60
        bulk = queue.submit([tokens(6)] * 50, bulk=True)
        assert queue.waiting_tokens == 15
        recorder.gate.set()
        for job in (first, fits, bulk):
            job.result(5)
        queue.submit([tokens(6)]).result(5)
    assert told.failures == ["full"]


def test_a_full_queue_refuses_before_it_tokenises_and_long_texts_do_not_hold_up_short_ones(tiny_bert: Path) -> None:
    plain = Encoder.load(tiny_bert, device="cpu")
    recorder = Recorder()
    with queue_of(recorder, max_tokens_waiting=4) as queue:
        first = held_up(queue, recorder)
        encoder = QueuedEncoder(plain, queue)
        tokenised, may_go = threading.Event(), threading.Event()

        def hold(texts: Any, truncate: bool = False) -> list[Tokens]:
            tokenised.set()
            if len(texts) > 1:
                may_go.wait(5)
            return [tokens(4, len(texts))]

        encoder.text = type("Text", (), {"documents": staticmethod(hold)})()

        async def ask() -> None:
            long = [asyncio.create_task(encoder.encode_documents_async(["x" * 60_000] * 2)) for _ in range(4)]
            await asyncio.sleep(0.05)
            short = asyncio.create_task(encoder.encode_documents_async(["x"]))
            while not queue.waiting_tokens:  # it has overtaken them
                await asyncio.sleep(0.005)
            tokenised.clear()
            with pytest.raises(QueueFull):
                await encoder.encode_documents_async(["x"])
            assert not tokenised.is_set()
            for task in [*long, short]:
                task.cancel()
            may_go.set()
            await asyncio.gather(*long, short, return_exceptions=True)

        asyncio.run(ask())
        wait_until(lambda: queue.waiting_tokens == 0)
        recorder.gate.set()
        first.result(5)
    assert recorder.firsts == [999]


def test_many_texts_in_one_request_come_back_in_order(tiny_bert: Path) -> None:
    plain = Encoder.load(tiny_bert, device="cpu")
    texts = ["anna " * (1 + i % 7) for i in range(300)]
    with queue_of(plain) as queue:
        found = asyncio.run(QueuedEncoder(plain, queue).encode_documents_async(texts))
    np.testing.assert_allclose(found.vectors, plain.encode_documents(texts), atol=1e-5)
    assert found.tokens == [len(plain.tokenise_document(text).ids) for text in texts]


def test_bulk_work_yields_to_requests_but_moves_on() -> None:
    recorder = Recorder()
    with queue_of(recorder, tokens_per_batch=10) as queue:
        first = held_up(queue, recorder)
        bulk = queue.submit([tokens(10, 7)] * 4, bulk=True)
        jobs = [queue.submit([tokens(10, 1)]) for _ in range(12)]
        recorder.gate.set()
        for job in [first, bulk, *jobs]:
            job.result(5)
    order = recorder.firsts[1:]
    assert order.index(7) >= 2  # not ahead of who came after it
    last_request = len(order) - 1 - order[::-1].index(1)
    assert order[:last_request].count(7) >= 3  # and not behind all of them


def test_SRV_53_closing_finishes_what_waits_and_takes_nothing_new() -> None:
    recorder = Recorder(lambda firsts: time.sleep(0.01))
    queue = EncodeQueue(recorder, tokens_per_batch=4)  # type: ignore[arg-type]
    queue.start()
    jobs = [queue.submit([tokens(4, i)]) for i in range(10)]
    queue.close(drain=True, timeout=10)
    assert all(job.done() and job.exception() is None for job in jobs)
    with pytest.raises(QueueDead, match="stopping"):
        queue.submit([tokens(2)])
    assert not queue.alive


def test_closing_within_a_time_fails_the_rest() -> None:
    recorder = Recorder(lambda firsts: time.sleep(0.2))
    queue = EncodeQueue(recorder, tokens_per_batch=4)  # type: ignore[arg-type]
    queue.start()
    jobs = [queue.submit([tokens(4, i)]) for i in range(10)]
    queue.close(drain=True, timeout=0.3)
    failed = [job for job in jobs if job.exception(5) is not None]
    assert len(failed) >= 6 and isinstance(failed[-1].exception(), QueueDead)


def test_a_blocking_call_on_an_event_loop_is_an_error_and_no_deadlock(tiny_bert: Path) -> None:
    plain = Encoder.load(tiny_bert, device="cpu")
    with queue_of(plain) as queue:
        encoder = QueuedEncoder(plain, queue)

        async def ask() -> None:
            encoder.encode_documents(["anna"])

        with pytest.raises(RuntimeError, match="_async"):
            asyncio.run(ask())


def test_wrong_input_is_told_as_the_plain_encoder_tells_it(tiny_bert: Path) -> None:
    plain = Encoder.load(tiny_bert, device="cpu")
    with queue_of(plain) as queue:
        encoder = QueuedEncoder(plain, queue)
        with pytest.raises(MiaError, match="query 1 is empty"):
            asyncio.run(encoder.encode_queries_async(["anna", " "]))
        with pytest.raises(MiaError, match="alpha is 2"):
            asyncio.run(encoder.encode_queries_async(["anna"], alpha=2.0))
        none = asyncio.run(encoder.encode_documents_async([]))
    assert none.vectors.shape == (0, plain.dim) and none.tokens == []
