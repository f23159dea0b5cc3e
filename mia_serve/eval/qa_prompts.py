"""The wording of every prompt of a run, as one hash: answers of another wording must not be mixed with new ones."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast, get_args

from mia_serve.eval.gist import gist_prompt
from mia_serve.mindscape import Book, Mindscape
from mia_serve.mindscape.written import PROMPT_HASH
from mia_serve.rag.fitting import Contents
from mia_serve.rag.prompts import TASKS
from mia_serve.rag.question import Question
from mia_serve.rag.state import AgentSettings, AgentState, Fact, SignatureUpdate
from mia_serve.rag.update_prompt import fit_update, update_schema
from mia_serve.signature import Signature

if TYPE_CHECKING:
    from mia_serve.rag.batching import AsyncRetriever

_QUESTION = Question("q", "Who keeps the light?", "free")
_PASSAGES, _SUMMARIES, _FACTS = ("A lamp.", "A boat."), ("The light.", "The sea."), ("It burns.",)


@cache
def prompts_hash(summaries: bool) -> str:
    """Return the SHA-256 of the prompts of all tasks, of the gists and of the agent's updates on fixed inputs.

    Args:
        summaries: Whether a model writes the session summaries: the hash of their prompts is then part of it.
    """
    rendered = [*_answers(), *_updates(), gist_prompt(_QUESTION, _SUMMARIES, 1), PROMPT_HASH if summaries else None]
    return hashlib.sha256(json.dumps(rendered, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def _answers() -> list[Any]:
    """Render each task with and without signature and evidence, in both forms of a reply."""
    shown = Contents(_PASSAGES)
    full = Contents(_PASSAGES, _SUMMARIES, _FACTS)
    kinds = (shown, shown._replace(signature=_SUMMARIES), full, Contents((), _SUMMARIES, as_summary=True))
    rendered = []
    for task in TASKS:
        question = replace(_QUESTION, task=task, options=_PASSAGES if task in ("choice", "letter") else ())
        rendered += [kind._replace(guided=guided).prompt(question) for kind in kinds for guided in (False, True)]
    return rendered


def _updates() -> list[Any]:
    """Render the agent's update for each of its settings that words it, with its schema."""
    book = Book("b", _PASSAGES, "Title", summaries=_SUMMARIES)
    mindscape = Mindscape.from_books([book], 1)
    rows = {session.id: row for row, session in enumerate(mindscape.sessions)}
    searcher = cast("AsyncRetriever", SimpleNamespace(mindscape=mindscape, session_rows=rows))
    signature = Signature((mindscape.sessions[0].id,), _SUMMARIES[:1])
    facts = tuple(Fact(text, (mindscape.chunks[0].id,)) for text in _FACTS)
    state = AgentState(_QUESTION, 0, _QUESTION.text, signature, facts, (0, 1), (1.0, 0.5), (0, 1), {})
    rendered: list[Any] = []
    for update in get_args(SignatureUpdate):
        for rewrite in (True, False):
            settings = AgentSettings(signature_update=update, rewrite_query=rewrite)
            fitted = fit_update(searcher, state, settings, None)
            rendered.append([fitted.messages, update_schema(fitted.shown, settings)])
    plain = AgentSettings(use_signature=False)
    rendered.append(fit_update(searcher, replace(state, signature=None), plain, None).messages)
    return rendered
