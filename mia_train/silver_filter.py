"""The language model's part in silver evidence: which candidates support the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from mia_serve.llm import ChatClient, Message, ask_json
from mia_serve.llm.neutral import keep_open
from mia_train.silver_input import Question, Unit

_CHUNKS = (
    "You are an expert reader of narrative texts. You decide which passages of a text support the known answer to a "
    "question about it.",
    """\
Keep a passage if it does at least one of these:
- it states the answer, or part of it;
- it gives background or shows how a character develops, and the answer cannot be understood without that;
- it tells of the events that the question or the answer is about;
- it holds dialogue that informs the answer.
The evidence may be spread over several passages: keep every part of it. Where the question asks for a motive or for how
people stand to each other, keep the passages that illustrate it as well. Leave out passages that only share words or
names with the question.""",
)
_NODES = (
    "You are an expert reader of narrative texts. You decide which entities of a text (people, places, things, events, "
    "each with a description) matter for the known answer to a question about it.",
    """\
Keep an entity if it does at least one of these:
- it is the answer, or part of it;
- it is closely related to what the question or the answer is about;
- it gives background that the answer rests on;
- it links other entities of the question and the answer, as a step between them.
Leave out entities that only share words or names with the question.""",
)
_REPLY = """\
Reply with a JSON array of the indexes to keep and nothing else, such as [0, 3]. If none is to be kept, reply [-1]."""

#: Changes with the wording, so that a run is not resumed with decisions made under another one.
PROMPT_HASH = hashlib.sha256(repr((_CHUNKS, _NODES, _REPLY)).encode()).hexdigest()[:16]


def filter_messages(question: Question, candidates: Sequence[Unit], nodes: bool = False) -> list[Message]:
    """Return the chat that asks for the candidates to keep (MiA-RAG's chunk and node filters, in our words).

    Args:
        question: With its answer.
        candidates: Chunks or nodes; their places in the list are their indexes.
        nodes: Whether they are nodes.
    """
    role, rules = _NODES if nodes else _CHUNKS
    name = "entity" if nodes else "passage"
    texts = [keep_open(unit.text, (name,)) for unit in candidates]
    listed = "\n".join(f'<{name} index="{i}">\n{text}\n</{name}>' for i, text in enumerate(texts))
    asked = f"Question: {question.text}\nAnswer: {question.answer}\n\n{listed}\n\n{rules}\n\n{_REPLY}"
    return [{"role": "system", "content": role}, {"role": "user", "content": asked}]


async def keep(
    client: ChatClient, question: Question, candidates: Sequence[Unit], nodes: bool = False, max_tokens: int = 512
) -> list[str]:
    """Ask which candidates to keep.

    Returns:
        Ids, in the order of the candidates; none where the model says [-1].

    Raises:
        LlmFailed: There was no reply, or ("bad reply") one with other indexes than those given, twice.
    """
    last = len(candidates) - 1

    def check(chosen: list[int]) -> list[int]:
        wrong = [i for i in chosen if not 0 <= i <= last]
        if wrong and chosen != [-1]:
            raise ValueError(f"{wrong[0]} is not an index from 0 to {last}, nor is the array [-1] alone")
        return chosen

    shape: Any = Annotated[list[Annotated[int, Field(strict=True)]], AfterValidator(check)]
    chosen: list[int] = await ask_json(client, filter_messages(question, candidates, nodes), shape, max_tokens)
    return [unit.id for i, unit in enumerate(candidates) if i in chosen]
