"""Errors as the OpenAI protocol writes them, whatever went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from mia_serve.core.encoder import EncodeFailed
from mia_serve.core.errors import MiaError, TooLong
from mia_serve.http.collection import NoCollection
from mia_serve.http.log import WriteFailed
from mia_serve.http.operations import Conflict
from mia_serve.http.queue import QueueDead, QueueFull
from mia_serve.llm.failures import LlmFailed

# What OpenAI's clients call the kinds of errors; the others of 4xx and 5xx are the first and the last.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# What routing and the reading of a body say of themselves, put better.
_OF_STATUS: dict[int, tuple[str, str | None]] = {
    400: ("the body cannot be read; send JSON in UTF-8, nested not too deeply", "invalid_json"),
    404: ("there is nothing at this address; /openapi.json lists what there is", "not_found"),
    405: ("this address does not take this method; see the header Allow", "method_not_allowed"),
}
_SHOWN = 200  # characters of a message of ours that may hold a client's text


class ProblemDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="What was given, what is allowed, what to do.")
    type: str = Field(description="Kind of error, as OpenAI's clients know them.")
    param: str | None = Field(description="The field of the request that is meant, where one is.")
    code: str | None = Field(description="One word for programs.")


class Problem(BaseModel):
    """The body of every error."""

    error: ProblemDetail


class HttpError(HTTPException):
    """An error with its HTTP status.

    Args:
        status: 4xx or 5xx.
        message: For the client: what was given, what is allowed, what to do.
        code: One word for programs, such as ``no_collection``.
        param: Field of the request.
        headers: Headers of the answer, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def type(self) -> str:
        """Kind of the error in OpenAI's words."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return ``{"error": …}``, JSON-ready."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the answer."""
        # A message may quote half a character of the request, which JSON cannot hold.
        clean = self.message.encode("utf-8", "replace").decode()
        body = orjson.dumps(HttpError(self.status, clean, self.code, self.param).body())
        return Response(body, self.status, self.headers, "application/json")


def retry_after(seconds: float) -> dict[str, str]:
    """Return the header that asks to wait; whole seconds, at least one."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def http_error(error: BaseException) -> HttpError:
    """Say of any error what the client is told; of our own bugs nothing but that there was one."""
    match error:
        case HttpError():
            return error
        case NoCollection():
            return HttpError(404, str(error), "no_collection")
        case Conflict():
            return HttpError(409, str(error), "conflict")
        case TooLong():
            # What it says behind the semicolon is for who calls the encoder from Python.
            return HttpError(413, f"{str(error).partition(';')[0]}; shorten it", "too_long")
        case QueueFull():
            message = "the server is busy: too many tokens wait to be encoded; try again after the time in Retry-After"
            return HttpError(429, message, "busy", headers=retry_after(error.retry_after))
        case QueueDead():
            message = "the encoder has stopped and is being started again; try again in a few seconds"
            return HttpError(503, message, "encoder_down", headers=retry_after(2))
        case EncodeFailed():
            return HttpError(
                503, "the encoder's memory is full; send less, or try again", "memory", headers=retry_after(2)
            )
        case WriteFailed():
            message = "the change could not be written to disk, and is not made; the server's log says why"
            return HttpError(503, message, "write_failed", headers=retry_after(5))
        case LlmFailed():
            return _of_llm(error)
        case MiaError():
            return HttpError(400, str(error), "invalid_value")
        case RequestValidationError():
            return _of_validation(error)
        case HTTPException():
            message, code = _OF_STATUS.get(error.status_code, (str(error.detail), None))
            return HttpError(error.status_code, message, code, headers=error.headers)
        case _:
            return HttpError(
                500, "the server failed; its log says why under the X-Request-ID of this answer", "internal"
            )


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route for FastAPI: these statuses, each with the body of an error."""
    return {status: {"model": Problem, "description": _DESCRIPTIONS[status]} for status in statuses}


_DESCRIPTIONS = {
    400: "The request is wrong; the message says what.",
    401: "No key, or a wrong one.",
    403: "The key's role does not allow it.",
    404: "Not found.",
    409: "It exists already.",
    413: "Too large, or a text too long for the model.",
    422: "The request is wrong; the message says what.",
    429: "Too many requests or tokens; wait as long as Retry-After says.",
    502: "The language model failed.",
    503: "Not ready, or out of work for a moment; try again.",
}


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error that a route raises, or routing itself, in the same form."""

    async def handle(request: Request, error: Exception) -> Response:
        answer = http_error(error)
        request.scope.setdefault("state", {})["failure"] = answer.code or str(answer.status)
        return answer.response()

    for kind in (
        MiaError, NoCollection, QueueFull, QueueDead, LlmFailed, RequestValidationError, HTTPException
    ):  # fmt: skip
        app.add_exception_handler(kind, handle)


def _of_llm(error: LlmFailed) -> HttpError:
    message = f"the language model gave no usable answer ({error.label})"
    if error.hopeless or error.transient:
        return HttpError(503, message, "llm_unavailable", headers=retry_after(5))
    return HttpError(502, message, "llm_failed")


def _of_validation(error: RequestValidationError) -> HttpError:
    """Name the first field that is wrong, and what is allowed; never repeat what was sent at length."""
    if isinstance(error.body, bytes):  # another Content-Type: a form of a foreign page could send that too
        return HttpError(415, "the body was not read: send JSON with Content-Type: application/json", "not_json")
    found = error.errors()
    first = found[0]
    # The first says only where: body, query, path.
    where = _keys_of(first, error.body) if first["loc"][0] == "body" else [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        reason = str((first.get("ctx") or {}).get("error", ""))
        return HttpError(400, f"the body is not valid JSON: {reason[:_SHOWN]}".rstrip(": "), "invalid_json")
    name = ".".join(where)
    reason = str(first["msg"]).removeprefix("Value error, ")
    message = f"{name}: {reason}" if name else reason
    if len(found) > 1:
        message += f" (and {len(found) - 1} more)"
    return HttpError(400, message[: 2 * _SHOWN], "invalid_value", name or None)


def _keys_of(problem: dict[str, Any], body: Any) -> list[str]:
    """Return the way to a wrong field through the body as it was sent: without the names of our models on it."""
    way, here = [], body
    for place, part in enumerate(problem["loc"][1:], 2):
        if isinstance(here, dict):
            if part in here:
                here = here[part]
            elif problem["type"] != "missing" or place < len(problem["loc"]):
                continue  # which of several forms was tried
        elif isinstance(here, list) and isinstance(part, int):
            here = here[part]
        else:
            continue
        way.append(str(part))
    return way
