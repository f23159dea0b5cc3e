"""What the pipeline and the agent tell while they work, and that they stop where they are cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

from mia_serve.rag import AgentSettings, Question, ask, run_agent
from mia_serve.signature import Signature
from tests.llm.server import Pieces, serving
from tests.rag.agent_world import QUESTION, client_of, is_update, reply, scripted, with_searcher, words_retriever


def test_one_shot_tells_signature_passages_and_text_in_order():
    told: list[tuple[str, Any]] = []
    with serving(lambda body: "the boat") as stub:

        async def work(client: Any, searcher: Any) -> Any:
            return await ask(
                client,
                searcher,
                QUESTION,
                k=3,
                on_signature=lambda signature: told.append(("signature", signature)),
                on_passages=lambda passages: told.append(("passages", tuple(passages))),
                on_text=lambda text: told.append(("text", text)),
            )

        answer = asyncio.run(with_searcher(words_retriever(), client_of(stub), work))
    assert told == [
        ("signature", answer.signature), ("passages", answer.passages), ("text", "the"), ("text", " boat"),
    ]  # fmt: skip
    assert len(answer.passages) == 3


def test_a_given_signature_is_searched_with_and_shown():
    given = Signature((), ("The widow signals with a lamp.",))
    with serving(lambda body: "the boat") as stub:

        async def work(client: Any, searcher: Any) -> Any:
            question = Question("q", "captain")
            return await ask(client, searcher, question, k=2, signature=given, mode="chunks+sig", signature_mode="none")

        answer = asyncio.run(with_searcher(words_retriever(), client_of(stub), work))
    assert answer.signature == given and "[S1] The widow signals" in stub.requests[0]["messages"][1]["content"]
    assert "sea:6" in {passage.id for passage in answer.passages}  # the lamp is in the signature alone


def test_the_agent_tells_steps_passages_and_text_as_they_happen():
    told: list[tuple[str, Any]] = []
    updates = [reply("REFINE", "oars"), reply("ANSWER")]
    with serving(scripted(updates)) as stub:

        async def work(client: Any, searcher: Any) -> Any:
            return await run_agent(
                client,
                searcher,
                searcher.mindscape,
                QUESTION,
                AgentSettings(k=2),
                on_step=lambda step: told.append(("step", (step, len(stub.requests)))),
                on_passages=lambda passages: told.append(("passages", tuple(passages))),
                on_text=lambda text: told.append(("text", text)),
            )

        result = asyncio.run(with_searcher(words_retriever(), client_of(stub), work))
    first, second = result.steps
    assert told == [
        ("step", (first, 1)), ("step", (second, 2)), ("passages", result.passages), ("text", "the"), ("text", " boat"),
    ]  # fmt: skip
    assert [request.get("stream", False) for request in stub.requests] == [False, False, True]


def test_a_cancelled_agent_asks_no_more_and_a_cancelled_answer_is_not_written_on():
    async def cancelled(client: Any, searcher: Any, at: str) -> None:
        reached = asyncio.Event()

        def tell(kind: str) -> None:
            if kind == at:
                reached.set()

        task = asyncio.create_task(
            run_agent(
                client,
                searcher,
                searcher.mindscape,
                QUESTION,
                on_step=lambda step: tell("step"),
                on_text=lambda text: tell("text"),
            )
        )
        await reached.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.2)

    def say(body: dict[str, Any]) -> Any:
        return (
            reply("ANSWER" if "Step 2" in str(body) else "REFINE") if is_update(body) else Pieces(["on "] * 300, 0.01)
        )

    with serving(say) as stub:
        asyncio.run(with_searcher(words_retriever(), client_of(stub), lambda c, s: cancelled(c, s, "step")))
        assert len(stub.requests) <= 2 and all(is_update(body) for body in stub.requests)
    with serving(say) as stub:
        asyncio.run(with_searcher(words_retriever(), client_of(stub), lambda c, s: cancelled(c, s, "text")))
        assert stub.given_up.wait(5)
