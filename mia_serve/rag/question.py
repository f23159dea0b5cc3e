"""What is asked, and what a generator is given to answer it from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mia_serve.rag.prompts import Task

AnswerMode = Literal["chunks", "chunks+sig", "chunks+evi", "chunks+sig+evi"]
"""What the prompt holds beside the question: passages, the signature, the evidence that an agent has gathered."""

ANSWER_MODES: tuple[AnswerMode, ...] = get_args(AnswerMode)


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: Its name, in records.
        text: The question; for a claim the statement.
        task: How it is to be answered, see `build_prompt`.
        options: For the tasks that choose: the options' texts, lettered from A.
    """

    id: str
    text: str
    task: Task = "free"
    options: tuple[str, ...] = ()
