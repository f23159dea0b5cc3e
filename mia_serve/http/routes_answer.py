"""Answers from a collection by the language model, whole or as they are written."""

from __future__ import annotations

import logging
import traceback
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request

from mia_serve.http.answering import answer, check_room
from mia_serve.http.errors import HttpError, http_error, problems, retry_after
from mia_serve.http.events import Emit, EventStream
from mia_serve.http.keys import require
from mia_serve.http.schemas_answer import EXAMPLES, AnswerRequest, AnswerResponse
from mia_serve.http.services import Services, get_services
from mia_serve.llm import ChatClient

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", tags=["answer"], dependencies=[Depends(require("read"))])

_EVENTS = """\
event: signature
data: {"mode":"coverage","summaries":["Daisy drives home …"],"session_ids":["gatsby/7"],"gains":[0.71],"terms":[[…]]}

event: passages
data: {"passages":[{"id":"gatsby:151","text":"“Was Daisy …","session_id":"gatsby/7","book_id":"gatsby","score":0.6}]}

event: token
data: {"text":"Daisy"}

event: answer
data: {"version":3,"model":"qwen3","answer":"Daisy", …}

event: done
data: {}

"""
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream` its events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EVENTS}},
    }
}


@router.post(
    "/answer",
    summary="Answer a question from a collection",
    response_model=AnswerResponse,
    responses=_STREAMED | problems(400, 401, 403, 404, 413, 429, 502, 503),
)
async def answer_question(
    body: Annotated[AnswerRequest, Body(openapi_examples=EXAMPLES)],
    request: Request,
    services: Annotated[Services, Depends(get_services)],
) -> Any:
    """Have the language model answer from passages that are searched for once, or again and again by an agent.

    With `stream` the answer comes as server-sent events, each as it happens, its data in JSON:

    - `signature`: σ, as in the answer, before it is searched with (static)
    - `step`: one step of the agent, as in the answer's `steps`
    - `passages`: `{"passages": […]}`, what the model is shown or as much of it as fits
    - `token`: `{"text": "…"}`, the next piece of the model's reply, form and all; where the reply had to be asked for
      again, the pieces need not be its beginning
    - `answer`: the same object that comes without `stream`; it is what counts
    - `error`: the body of an error response, instead of `answer`
    - `done`: the last one, always

    After 15 seconds without an event a comment is sent. When the client closes the connection, the work ends.
    """
    client = _language_model(services)
    snapshot = services.collections.get(body.collection).snapshot
    if not snapshot.mindscape.chunks:
        message = f"collection {body.collection!r} holds nothing to answer from: add chunks first"
        raise HttpError(400, message, "empty_collection", "collection")
    check_room(client)
    context = services.config.llm.context_tokens if services.config.llm is not None else None
    if not body.stream:
        return await answer(snapshot, client, body, context, services.threads)

    async def work(emit: Emit) -> None:
        emit("answer", await answer(snapshot, client, body, context, services.threads, emit))

    return EventStream(work, lambda error: _explain(error, request, services))


def _language_model(services: Services) -> ChatClient:
    if services.llm is not None:
        return services.llm
    if services.config.llm is None:
        message = "this server has no language model: searching works, answering needs `llm` in its configuration"
        raise HttpError(503, message, "no_language_model")
    message = services.llm_error or "the language model is not up"
    raise HttpError(503, message, "llm_unavailable", headers=retry_after(5))


def _explain(error: Exception, request: Request, services: Services) -> HttpError:
    """Say of a failure within a stream what the client is told, and count it; its status was sent long before."""
    said = http_error(error)
    services.metrics.failures.labels(said.code or str(said.status)).inc()
    if said.code == "internal":
        frames = "".join(traceback.format_tb(error.__traceback__))  # no message: it may quote a client's text
        logger.error("request %s failed: %s\n%s", request.state.request_id, type(error).__name__, frames)
    return said
