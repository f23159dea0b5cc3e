"""A small book, a retriever of words over it, and a state in the middle of the agent's work."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mia_serve.llm import ChatClient
from mia_serve.mindscape import Book, Mindscape
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.rag.choose import sessions_signature
from mia_serve.rag.question import Question
from mia_serve.rag.state import AgentState, Fact
from mia_serve.retriever import Retriever
from tests.llm.server import Stub
from tests.test_retriever import WordEncoder

CHUNKS = (
    "The boat left the quay at night.",
    "Nobody saw the ferryman row.",
    "She hid the oars in the barn.",
    "The barn belonged to the miller.",
    "The captain asked for the ledger.",
    "The ledger lay under the floor.",
    "A widow lit the lamp.",
    "The lamp was a signal for the boat.",
)
SUMMARIES = (
    "The boat leaves with the ferryman.",
    "The oars are hidden in the barn of the miller.",
    "The captain looks for the ledger.",
    "The widow signals with a lamp.",
)
QUESTION = Question("q1", "Who was the signal for?")
EVIDENCE = (Fact("The boat left at night.", ("sea:0",)), Fact("She hid the oars.", ("sea:2",)))


def book() -> Mindscape:
    return Mindscape.from_books([Book("sea", CHUNKS, "Sea", summaries=SUMMARIES)], window=2)


def words_retriever(e2: bool = True, **arguments: Any) -> Retriever:
    encoder = WordEncoder()
    return Retriever(book(), encoder, encoder if e2 else None, k0=8, device="cpu", **arguments)  # type: ignore[arg-type]


def middle(retriever: Retriever, **changes: Any) -> AgentState:
    """Shown as [S1] oars, [S2] lamp; [H1] boat, [H2] ledger; [E1], [E2]; [P1] sea:0, [P2] sea:3, [P3] sea:5."""
    state = {
        "question": QUESTION,
        "step": 1,
        "query": "who hid the oars",
        "signature": sessions_signature(retriever, [1, 3], "update"),
        "evidence": EVIDENCE,
        "rows": (0, 3, 5),
        "scores": (0.9, 0.8, 0.7),
        "sessions": (0, 1, 2),
        "seen": {"sea:0": 0, "sea:2": 2, "sea:3": 3, "sea:5": 5},
    }
    return AgentState(**(state | changes))


def reply(decision: str = "REFINE", query: str = "", signature: Any = ("S1",), evidence: Any = (), **extra: Any) -> str:
    """One update as the model would write it; evidence as (fact, source) pairs."""
    facts = [{"fact": fact, "source": source} for fact, source in evidence]
    said = {"decision": decision, "next_query": query, "signature": signature, "evidence": facts}
    return json.dumps({key: value for key, value in (said | extra).items() if value is not None}, ensure_ascii=False)


def is_update(body: dict[str, Any]) -> bool:
    return "evidence" in body["messages"][0]["content"]


def client_of(server: Stub, **arguments: Any) -> ChatClient:
    return ChatClient(server.url, "m", **({"max_retries": 0} | arguments))


def scripted(updates: list[Any], answer: Any = "the boat") -> Callable[[dict[str, Any]], Any]:
    """Give the updates in turn (the last one again and again), and one answer to all else."""
    left = list(updates)

    def say(body: dict[str, Any]) -> Any:
        if not is_update(body):
            return answer
        return left.pop(0) if len(left) > 1 else left[0]

    return say


async def with_searcher(retriever: Retriever, client: ChatClient, work: Callable[..., Any]) -> Any:
    async with client, AsyncRetriever(retriever) as searcher:
        return await work(client, searcher)
