"""Answer questions from retrieved chunks."""

from mia_serve.rag.prompts import TASKS, Task, build_prompt

__all__ = ["TASKS", "Task", "build_prompt"]
