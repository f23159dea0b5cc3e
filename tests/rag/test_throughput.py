"""Hundreds of questions keep a server of 32 places busy: retrieval and bookkeeping hide behind its replies."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mia_serve.core import Encoder
from mia_serve.llm import ChatClient
from mia_serve.mindscape import Book, Mindscape
from mia_serve.rag.agent import AgentResult, AgentSettings, run_agents
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.rag.question import Question
from mia_serve.retriever import Retriever
from tests.llm.server import serving
from tests.rag.agent_world import is_update, reply

PLACES = 32
PEOPLE = ["ferryman", "miller", "captain", "widow", "clerk", "smith", "abbot"]
THINGS = ["lamp", "ledger", "key", "boat", "clock", "oar", "coat", "letter", "map", "ring", "bell"]


def retriever_of(encoder: Encoder) -> Retriever:
    """A book of 300 chunks in 15 sessions, its vectors made beforehand."""
    chunks = tuple(f"The {PEOPLE[i % 7]} hid the {THINGS[i % 11]} in room {i}." for i in range(300))
    summaries = tuple(f"The {PEOPLE[i % 7]} goes through rooms {20 * i} to {20 * i + 19}." for i in range(15))
    retriever = Retriever(
        Mindscape.from_books([Book("b", chunks, summaries=summaries)]), encoder, encoder, device="cpu"
    )
    retriever.search(["Who hid the lamp?"])
    return retriever


def seconds(retriever: Retriever, n: int, reply_seconds: float) -> tuple[float, list[AgentResult], int]:
    """Ask n questions of two calls each; the server takes so long for a reply and gives PLACES at once."""
    places = threading.Semaphore(PLACES)

    def say(body: dict[str, Any]) -> str:
        with places:
            time.sleep(reply_seconds)
        return reply("ANSWER", "", ["S1"], [("The lamp is hidden.", ["P1"])]) if is_update(body) else "the ferryman"

    who = [f"Who hid the {THINGS[i % 11]} that the {PEOPLE[i % 7]} sought in year {i}?" for i in range(n)]
    questions = [Question(f"q{i}", text) for i, text in enumerate(who)]

    async def run(url: str) -> tuple[float, list[AgentResult]]:
        async with ChatClient(url, "m", concurrency=2 * PLACES) as client, AsyncRetriever(retriever) as searcher:
            start = time.perf_counter()
            results = await run_agents(client, searcher, retriever.mindscape, questions, AgentSettings(k=5))
            return time.perf_counter() - start, results

    with serving(say) as server:
        taken, results = asyncio.run(run(server.url))
        calls = len(server.requests)
    return taken, results, calls


@pytest.mark.parametrize(
    ("n", "reply_seconds", "slack"),
    [(200, 1.0, 1.3), (320, 0.2, 2.5)],
)
def test_agents_keep_the_server_busy(tiny_bert: Path, n: int, reply_seconds: float, slack: float):
    """Ideal: 2 calls a question, 32 at once. With fast replies the two cores of a small machine have a say too."""
    retriever = retriever_of(Encoder.load(str(tiny_bert), device="cpu"))
    ideal = 2 * n * reply_seconds / PLACES
    for _attempt in range(2):  # other work on the machine may spoil one
        taken, results, calls = seconds(retriever, n, reply_seconds)
        print(f"{n} questions of 2 calls, {reply_seconds} s a reply: {taken:.2f} s, {taken / ideal:.3f} x ideal")
        assert calls == 2 * n and len(results) == n
        assert all(result.answer.text == "the ferryman" and result.steps[0].failed is None for result in results)
        if taken < slack * ideal:
            return
    pytest.fail(f"{taken:.2f} s, {taken / ideal:.2f} x the ideal {ideal:.2f} s")
