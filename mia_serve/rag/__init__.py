"""From passages to answers: what a generator is shown, how its reply is read, the static pipeline and the agent."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "AgentResult": "agent",
    "AgentSettings": "state",
    "AsyncRetriever": "batching",
    "ANSWER_MODES": "question",
    "Answer": "static",
    "AnswerMode": "question",
    "Passage": "static",
    "Question": "question",
    "TASKS": "prompts",
    "Task": "prompts",
    "answer": "static",
    "ask": "static",
    "build_prompt": "prompts",
    "choose_mode": "modes",
    "citations": "reading",
    "read_answer": "reading",
    "run_agent": "agent",
    "run_agents": "agent",
}

if TYPE_CHECKING:
    from mia_serve.rag.agent import AgentResult, run_agent, run_agents
    from mia_serve.rag.batching import AsyncRetriever
    from mia_serve.rag.modes import choose_mode
    from mia_serve.rag.prompts import TASKS, Task, build_prompt
    from mia_serve.rag.question import ANSWER_MODES, AnswerMode, Question
    from mia_serve.rag.reading import citations, read_answer
    from mia_serve.rag.state import AgentSettings
    from mia_serve.rag.static import Answer, Passage, answer, ask

__all__ = [
    "ANSWER_MODES",
    "TASKS",
    "AgentResult",
    "AgentSettings",
    "Answer",
    "AnswerMode",
    "AsyncRetriever",
    "Passage",
    "Question",
    "Task",
    "answer",
    "ask",
    "build_prompt",
    "choose_mode",
    "citations",
    "read_answer",
    "run_agent",
    "run_agents",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mia_serve.rag' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mia_serve.rag.{_HOME[name]}"), name)
