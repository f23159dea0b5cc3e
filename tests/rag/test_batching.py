"""Asked one by one or a hundred at once, the retriever answers the same; what fails, fails for who asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mia_serve.core import Encoder, MiaError
from mia_serve.mindscape import Book, Mindscape
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.retriever import Retriever
from mia_serve.signature import Signature
from tests.rag.agent_world import words_retriever

PEOPLE = ["ferryman", "miller", "captain", "widow", "clerk", "smith"]
THINGS = ["lamp", "ledger", "key", "boat", "clock", "oar", "coat", "letter"]


def books(n_chunks: int = 24) -> Mindscape:
    chunks = tuple(f"The {PEOPLE[i % 6]} hid the {THINGS[i % 8]} of room {i}." for i in range(n_chunks))
    summaries = tuple(f"The {PEOPLE[i % 6]} and the {THINGS[i % 8]}." for i in range(0, n_chunks, 4))
    return Mindscape.from_books([Book("quay", chunks, "Quay", summaries=summaries)], window=4)


@pytest.fixture(scope="module")
def tiny(tiny_qwen3) -> Retriever:
    encoder = Encoder.load(str(tiny_qwen3), device="cpu")
    return Retriever(books(), encoder, encoder, k0=8, k_sum=3, device="cpu")


class Counting:
    """A retriever that notes how often, where and with what it is called, and does one call at a time on demand."""

    def __init__(self, retriever: Retriever) -> None:
        self.inner, self.calls, self.threads = retriever, [], set()
        self.gate: threading.Event | None = None
        self.started = threading.Event()
        self.e2, self.prior, self.mindscape = retriever.e2, retriever.prior, retriever.mindscape

    def _note(self, *call) -> None:
        self.started.set()
        if self.gate is not None:
            assert self.gate.wait(20)
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    def search(self, queries: Sequence[str], k, signature, encoder, prior):
        self._note("search", list(queries), k)
        if any("broken" in query for query in queries):
            raise RuntimeError("broken")
        return self.inner.search(queries, k, signature, encoder, prior)

    def signatures(self, queries, mode):
        self._note("signatures", list(queries), mode)
        return self.inner.signatures(queries, mode)

    def pools(self, queries):
        self._note("pools", list(queries))
        return self.inner.pools(queries)


QUERIES = [f"who hid the {thing} of the {person}" for thing in THINGS for person in PEOPLE]


def test_a_hundred_at_once_equal_one_by_one(tiny: Retriever):
    counting = Counting(tiny)
    given = tiny.signatures(QUERIES, "first_k")

    async def ask() -> list:
        async with AsyncRetriever(counting) as searcher:  # type: ignore[arg-type]
            searches = [searcher.search(q, 3 + i % 2, given[i] if i % 3 else None) for i, q in enumerate(QUERIES)]
            rest = [
                searcher.signature(QUERIES[0]),
                searcher.signature(QUERIES[1], "first_k"),
                searcher.pool(QUERIES[2]),
            ]
            return await asyncio.gather(*searches, *rest)

    *found, coverage, first, pool = asyncio.run(ask())
    for i, (query, got) in enumerate(zip(QUERIES, found, strict=True)):
        alone = tiny.search([query], 3 + i % 2, [given[i]] if i % 3 else "none").hits
        assert list(got.ids) == alone.ids[0] and list(got.rows) == alone.rows[0].tolist()
        assert np.allclose(got.scores, alone.scores[0], atol=1e-5)
        assert [tiny.mindscape.chunks[row].id for row in got.rows] == alone.ids[0]
        assert got.signature == (given[i] if i % 3 else None)
    assert coverage.session_ids == tiny.signatures(QUERIES[:1])[0].session_ids
    assert first == tiny.signatures([QUERIES[1]], "first_k")[0]
    assert pool.rows.tolist() == tiny.pools([QUERIES[2]])[0].rows.tolist()
    # 48 searches are 4 kinds (k, with or without a signature), each one call; nothing ran on the loop's thread.
    assert sorted(call[0] for call in counting.calls) == ["pools", *["search"] * 4, *["signatures"] * 2]
    assert len(counting.threads) == 1 and threading.get_ident() not in counting.threads


def test_what_is_asked_during_a_batch_is_the_next_one_and_the_first_does_not_wait(tiny: Retriever):
    counting = Counting(tiny)
    counting.gate = threading.Event()

    async def ask() -> None:
        async with AsyncRetriever(counting) as searcher:  # type: ignore[arg-type]
            first = asyncio.create_task(searcher.search(QUERIES[0]))
            await asyncio.to_thread(counting.started.wait, 20)  # began though nothing else was asked
            others = [asyncio.create_task(searcher.search(query)) for query in QUERIES[1:6]]
            await asyncio.sleep(0)
            counting.gate.set()
            await asyncio.gather(first, *others)

    asyncio.run(ask())
    assert [call[1] for call in counting.calls] == [QUERIES[:1], QUERIES[1:6]]


def test_one_query_that_is_refused_fails_alone(tiny: Retriever):
    long, quiet = "who hid it " * 2000, "   "

    async def ask(retriever) -> list:
        async with AsyncRetriever(retriever) as searcher:
            asked = [searcher.search(query, 2) for query in [QUERIES[0], long, QUERIES[1], quiet, QUERIES[2]]]
            return await asyncio.gather(*asked, return_exceptions=True)

    one, two, three, four, five = asyncio.run(ask(tiny))
    assert isinstance(two, MiaError) and "tokens" in str(two) and isinstance(four, MiaError)
    for query, got in zip(QUERIES, (one, three, five), strict=False):
        assert list(got.ids) == tiny.search([query], 2, "none").hits.ids[0]

    async def broken() -> list:
        async with AsyncRetriever(Counting(tiny)) as searcher:  # type: ignore[arg-type]
            asked = [searcher.search(query) for query in ("broken", QUERIES[0])]
            return await asyncio.gather(*asked, return_exceptions=True)

    failed, fine = asyncio.run(broken())
    assert isinstance(failed, RuntimeError) and len(fine.ids) == 10


def test_giving_up_one_question_disturbs_no_other(tiny: Retriever):
    counting = Counting(tiny)
    counting.gate = threading.Event()

    async def ask() -> list:
        async with AsyncRetriever(counting) as searcher:  # type: ignore[arg-type]
            running = [asyncio.create_task(searcher.search(query)) for query in QUERIES[:2]]
            await asyncio.to_thread(counting.started.wait, 20)
            waiting = [asyncio.create_task(searcher.search(query)) for query in QUERIES[2:5]]
            await asyncio.sleep(0)
            running[0].cancel()
            waiting[1].cancel()
            counting.gate.set()
            return await asyncio.gather(*running, *waiting, return_exceptions=True)

    got = asyncio.run(ask())
    gone = [isinstance(outcome, asyncio.CancelledError) for outcome in got]
    assert gone == [True, False, False, True, False]
    for query, outcome in zip(QUERIES, got, strict=False):
        if not isinstance(outcome, BaseException):
            assert list(outcome.ids) == tiny.search([query], 10, "none").hits.ids[0]
    assert counting.calls[1][1] == [QUERIES[2], QUERIES[4]]  # who has left is not searched for


def test_closing_finishes_what_runs_and_refuses_the_rest(tiny: Retriever):
    counting = Counting(tiny)
    counting.gate = threading.Event()

    async def ask() -> None:
        searcher = AsyncRetriever(counting)  # type: ignore[arg-type]
        running = asyncio.create_task(searcher.search(QUERIES[0]))
        await asyncio.to_thread(counting.started.wait, 20)
        waiting = asyncio.create_task(searcher.search(QUERIES[1]))
        await asyncio.sleep(0)
        closing = asyncio.create_task(searcher.close())
        await asyncio.sleep(0)
        counting.gate.set()
        await closing
        assert len((await running).ids) == 10
        with pytest.raises(MiaError, match="closed"):
            await waiting
        with pytest.raises(MiaError, match="closed"):
            await searcher.pool(QUERIES[0])

    asyncio.run(ask())


def test_without_e2_a_signature_is_a_prior_on_e1(tiny: Retriever):
    alone = Retriever(books(), tiny.e1, k0=8, k_sum=3, device="cpu")
    own = Retriever(books(), tiny.e1, k0=8, k_sum=3, prior=0.7, device="cpu")
    query = QUERIES[5]
    signature = alone.signatures([query])[0]
    texts = Signature.from_texts(["The miller lied."])

    async def ask(retriever: Retriever, **arguments) -> tuple:
        async with AsyncRetriever(retriever) as searcher:
            found = await searcher.search(query, 6, signature, **arguments)
            return found, searcher.uses_prior, await searcher.search(query, 6, texts), await searcher.search(query, 6)

    plain = alone.search([query], 6, "none").hits
    for retriever, arguments, prior in ((alone, {}, 0.1), (own, {}, 0.7), (own, {"prior": 0.3}, 0.3)):
        found, uses_prior, of_texts, of_none = asyncio.run(ask(retriever, **arguments))
        expected = alone.search([query], 6, [signature], "e1", prior).hits
        assert list(found.ids) == expected.ids[0] and np.allclose(found.scores, expected.scores[0], atol=1e-5)
        assert uses_prior and found.signature == signature
        assert list(of_none.ids) == list(of_texts.ids) == plain.ids[0]  # texts of no session weigh none
    found, uses_prior, *_ = asyncio.run(ask(tiny))
    assert not uses_prior and list(found.ids) == tiny.search([query], 6, [signature]).hits.ids[0]
    by_e1 = asyncio.run(ask(tiny, encoder="e1"))[0]
    assert list(by_e1.ids) == tiny.search([query], 6, [signature], "e1", 0.1).hits.ids[0]


def test_other_work_shares_the_worker(tiny: Retriever):
    batches: list[list[int]] = []

    def squares(retriever: Retriever, items: list[int]) -> list[int]:
        assert retriever is tiny
        batches.append(items)
        return [item * item for item in items]

    async def ask() -> list[int]:
        async with AsyncRetriever(tiny) as searcher:
            return await asyncio.gather(*(searcher.together(squares, i) for i in range(100)))

    assert asyncio.run(ask()) == [i * i for i in range(100)]
    assert [len(batch) for batch in batches] == [64, 36]


def test_results_that_are_not_one_an_item_fail_who_asked() -> None:
    async def ask() -> None:
        async with AsyncRetriever(words_retriever()) as searcher:
            with pytest.raises(ValueError):
                await asyncio.wait_for(searcher.together(lambda retriever, items: [], 1), 30)
            assert (await searcher.search("boat", 1)).ids

    asyncio.run(ask())


def test_one_loop_after_the_other_and_closed_from_a_third() -> None:
    searcher = AsyncRetriever(words_retriever())
    first, second = (asyncio.run(searcher.search("boat", 2)) for _ in range(2))
    assert first == second
    asyncio.run(searcher.close())


def test_a_second_loop_at_the_same_time_is_refused() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(retriever: Retriever, items: list[int]) -> list[int]:
        entered.set()
        leave.wait(30)
        return items

    async def ask(item: int) -> int:
        return await searcher.together(slow, item)

    searcher = AsyncRetriever(words_retriever())
    with ThreadPoolExecutor(1) as other:
        first = other.submit(asyncio.run, ask(1))
        assert entered.wait(30)
        with pytest.raises(MiaError, match="another event loop"):
            asyncio.run(ask(2))
        leave.set()
        assert first.result(30) == 1
    asyncio.run(searcher.close())
