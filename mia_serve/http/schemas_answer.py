"""What `/v1/answer` takes and gives."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mia_serve.http.schemas_collections import StoredChunk, Strict
from mia_serve.http.schemas_search import SignatureOut, Wanted
from mia_serve.http.texts import CollectionId, Query, Summary
from mia_serve.rag import AnswerMode, Task, build_prompt

MOST_PASSAGES = 100
MOST_STEPS = 10
_MOST_OPTIONS = 26  # letters

_QUESTION = "Who was driving the yellow car?"


class AnswerRequest(Strict):
    """A question to be answered from a collection."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"collection": "gatsby", "question": _QUESTION}]},
    )
    collection: CollectionId
    question: Query = Field(description="The question; for a `claim` the statement.")
    task: Task = Field(
        "free",
        description="`free`: a short phrase. `choice`: an option with the reasons. `letter`: an option's letter alone. "
        "`claim`: TRUE or FALSE with an explanation.",
    )
    options: Annotated[list[Summary], Field(max_length=_MOST_OPTIONS)] = Field(
        default_factory=list, description="For `choice` and `letter`: 2 to 26 texts, lettered from A."
    )
    mode: Literal["static", "agent"] = Field(
        "static", description="Search once and answer, or let the model search again until it can answer."
    )
    answer_mode: AnswerMode | Literal["auto"] = Field(
        "auto",
        description="What the model is shown beside the question: passages, signature, the facts that an agent found. "
        "`auto` decides by the question.",
    )
    k: int = Field(10, ge=1, le=MOST_PASSAGES, description="Passages of one search.")
    signature: Wanted | None = Field(
        None,
        description="σ that is searched with: chosen (`coverage`, `first_k`), given as summaries, or `none`. null: "
        "`coverage`. An agent starts with `first_k` and takes null or `none`.",
    )
    steps: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Searches of an agent at most; null: 3. Only with mode `agent`."
    )
    stream: bool = Field(False, description="Send server-sent events as they happen instead of one JSON.")

    @property
    def unsigned(self) -> bool:
        """Whether no signature is wanted."""
        return self.signature is not None and self.signature in ("none", [])

    @model_validator(mode="after")
    def _check(self) -> Self:
        build_prompt(self.task, self.question, (), options=self.options)  # refuses options that do not fit the task
        agent = self.mode == "agent"
        if self.steps is not None and not agent:
            raise ValueError("steps is a setting of mode 'agent': leave it out, or take that mode")
        if agent and self.signature is not None and not self.unsigned:
            raise ValueError("signature: an agent starts with 'first_k'; leave it out, or take 'none'")
        if "evi" in self.answer_mode and not agent:
            raise ValueError(f"answer_mode {self.answer_mode!r} shows the facts of an agent: take mode 'agent'")
        if "sig" in self.answer_mode and self.unsigned:
            raise ValueError(f"answer_mode {self.answer_mode!r} shows a signature: take another signature than none")
        return self


class PassageOut(StoredChunk):
    """A passage that the answer is given from."""

    score: float


class StepChunk(BaseModel):
    """A chunk that a step of the agent found."""

    id: str
    session_id: str
    score: float


class FactOut(BaseModel):
    """A fact that the agent keeps."""

    text: str
    sources: list[str] = Field(description="Ids of the chunks that state it.")


class StepOut(BaseModel):
    """One step of the agent: what it searched for and found, and what the model made of it."""

    step: int = Field(description="Its number, from 1.")
    query: str = Field(description="What was searched for.")
    signature: SignatureOut | None = Field(description="σ that was searched with.")
    chunks: list[StepChunk] = Field(description="What was found, best first.")
    decision: Literal["ANSWER", "REFINE"] = Field(description="Whether the model wants to answer or to search again.")
    next_query: str = Field(description="What it wants to search for next.")
    evidence: list[FactOut] = Field(description="The facts that it keeps, oldest first.")
    failed: str | None = Field(description="Why there was no update of the state, which stays as it was then.")


class LeftOut(BaseModel):
    """What did not fit the context of the model."""

    passages: int = Field(description="Passages, the worst-ranked ones.")
    signature: int = Field(description="Summaries of the signature.")
    evidence: int = Field(description="Facts, the oldest ones.")
    cut: int = Field(description="Characters at the end of the best passage.")


class AnswerUsage(BaseModel):
    """Tokens that the language model read and wrote, as it counts them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerResponse(BaseModel):
    """An answer, and what it is given from."""

    version: int = Field(description="Version of the collection that was searched.")
    model: str = Field(description="The language model.")
    answer: str | None = Field(description="Read out of the reply; null where it holds none.")
    reply: str = Field(description="All that the model wrote.")
    citations: list[str] = Field(description="Ids of the passages that the reply names; of all where it names none.")
    cited: bool = Field(description="Whether the citations are the reply's own.")
    passages: list[PassageOut] = Field(description="Passages that the model was shown, best first.")
    signature: SignatureOut | None = Field(description="σ that was searched with; an agent's last one.")
    answer_mode: AnswerMode = Field(description="What the model was shown.")
    left_out: LeftOut
    steps: list[StepOut] | None = Field(description="An agent's steps.")
    evidence: list[FactOut] | None = Field(description="The facts that an agent found.")
    usage: AnswerUsage


class PassagesEvent(BaseModel):
    """The event `passages`: what the answer is to be given from."""

    passages: list[PassageOut]


class TokenEvent(BaseModel):
    """The event `token`: the next piece of the reply."""

    text: str


EXAMPLES: dict[str, Any] = {
    "static": {
        "summary": "Search once, then answer",
        "value": {"collection": "gatsby", "question": _QUESTION},
    },
    "agent": {
        "summary": "An agent, step by step",
        "value": {"collection": "gatsby", "question": _QUESTION, "mode": "agent", "steps": 3, "stream": True},
    },
    "choice": {
        "summary": "One of several options",
        "value": {"collection": "gatsby", "question": _QUESTION, "task": "letter", "options": ["Gatsby", "Daisy"]},
    },
    "claim": {
        "summary": "TRUE or FALSE, signature shown",
        "value": {
            "collection": "gatsby",
            "question": "Daisy was driving the car that killed Myrtle.",
            "task": "claim",
            "answer_mode": "chunks+sig",
        },
    },
}
