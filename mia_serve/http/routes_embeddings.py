"""`/v1/embeddings` and `/v1/models`, as OpenAI's clients expect them; and signatures."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from mia_serve.http.errors import HttpError, problems
from mia_serve.http.keys import Caller, require
from mia_serve.http.queued_encoder import QueuedEncoder
from mia_serve.http.services import Services, get_services

router = APIRouter(tags=["embeddings"])

T = TypeVar("T")

_ON_LOOP = 65_536  # bytes of a body, or numbers of an answer, that take the loop no longer than a hop to a thread
_SUMMARIES = 64  # in a signature
_SUMMARY_CHARACTERS = 20_000


class EmbeddingsRequest(BaseModel):
    """Texts to embed; keys that are not known are ignored, since clients send their own."""

    model_config = ConfigDict(extra="ignore")

    input: Any = Field(
        description="A text, a list of texts, the token ids of a text, or a list of such lists. Token ids are those of "
        "the model's own tokenizer, without the special tokens that it puts around a text.",
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    "minItems": 1,
                },
            ]
        },
    )
    model: str = Field(
        min_length=1, max_length=256, description="`e1`, `e2`, or the name that `/v1/models` lists for one of them."
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Numbers, or the base64 of little-endian float32."
    )
    dimensions: StrictInt | None = Field(
        None, ge=1, description="Width of the vectors, one of those that the model was trained for; they stay unit."
    )
    input_type: Literal["query", "document"] = Field(
        "document",
        description="What is searched for, or what is searched in; `query` puts the model's instruction in front.",
    )
    signature: Any = Field(
        None,
        description="For `query`: one string or a list of summaries for all texts, or a list with such a list (or "
        "null) for each text.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {
                    "type": "array",
                    "items": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "string"}}]},
                },
                {"type": "null"},
            ]
        },
    )
    user: str | None = Field(None, max_length=256, description="Ignored.")


class Embedding(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were encoded, those of the template included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """The vectors in the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """An encoder that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "mia"
    dimensions: list[int] = Field(description="Widths that `dimensions` may ask for.")
    max_query_tokens: int
    max_document_tokens: int


class ModelList(BaseModel):
    """All encoders, by every name that they have."""

    object: Literal["list"] = "list"
    data: list[Model]


_EXAMPLES = {
    "texts": {"value": {"model": "e1", "input": ["The ferryman counted the lamps.", "One was missing."]}},
    "a query with its signature": {
        "value": {
            "model": "e2",
            "input": "Who took the ledger?",
            "input_type": "query",
            "signature": ["The ledger is kept under the floor.", "The ferryman counts the lamps along the quay."],
        }
    },
}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": EmbeddingsRequest.model_json_schema(), "examples": _EXAMPLES}},
    }
}


@router.post(
    "/v1/embeddings",
    summary="Embed texts",
    response_model=EmbeddingsResponse,
    responses=problems(404),
    openapi_extra=_BODY,
)
async def embeddings(
    request: Request,
    services: Annotated[Services, Depends(get_services)],
    caller: Annotated[Caller, Depends(require("read"))],
) -> Response:
    """Return one unit vector a text, as OpenAI's endpoint does; `usage` counts exactly what was encoded.

    A text that is longer than the model takes is refused (413), never cut.
    """
    asked, encoder, width, texts = await _read(request, services)
    if asked.input_type == "query":
        encoded = await encoder.encode_queries_async(_strings(texts), _signatures(asked.signature, len(texts)))
    elif asked.signature is not None:
        raise HttpError(400, "signature belongs to queries; say input_type 'query'", "invalid_value", "signature")
    else:
        encoded = await encoder.encode_documents_async(texts, truncate=False)
    tokens = sum(encoded.tokens)
    caller.charge(tokens)

    def answer() -> bytes:
        return _answer(_narrowed(encoded.vectors, width), asked.encoding_format, asked.model, tokens)

    small = encoded.vectors.size <= _ON_LOOP
    return Response(answer() if small else await _aside(services, answer), media_type="application/json")


@router.get(
    "/v1/models",
    summary="List the encoders",
    response_model=ModelList,
    dependencies=[Depends(require("read"))],
)
async def models(services: Annotated[Services, Depends(get_services)]) -> ModelList:
    """Return the encoders under every name that `/v1/embeddings` takes."""
    found = []
    for name, encoder in services.served().items():
        spec = encoder.spec
        found.append(
            Model(
                id=name,
                dimensions=_widths(encoder),
                max_query_tokens=spec.max_query_tokens,
                max_document_tokens=spec.max_document_tokens,
            )
        )
    return ModelList(data=found)


class _Asked(NamedTuple):
    """A request that has been checked."""

    request: EmbeddingsRequest
    encoder: QueuedEncoder
    width: int
    texts: list[str] | list[list[int]]


async def _read(request: Request, services: Services) -> _Asked:
    """Read the body; a long one aside, since millions of numbers would hold up everyone else."""
    body = await request.body()

    def read() -> _Asked:
        asked = _parsed(body)
        encoder = _encoder(services, asked.model)
        texts = _texts(asked.input, services.config.limits.inputs, len(encoder.tokenizer))
        return _Asked(asked, encoder, _width(encoder, asked.dimensions), texts)

    return read() if len(body) <= _ON_LOOP else await _aside(services, read)


async def _aside(services: Services, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(services.threads, work)


def _parsed(body: bytes) -> EmbeddingsRequest:
    try:
        record = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(record, dict):
        raise HttpError(400, "the body must be a JSON object with input and model", "invalid_json")
    try:
        return EmbeddingsRequest.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise HttpError(400, f"{name}: {first['msg']}", "invalid_value", name) from None


def _encoder(services: Services, name: str) -> QueuedEncoder:
    served = services.served()
    if name not in served:
        raise HttpError(
            404, f"there is no model {name!r} here; there are: {', '.join(served)}", "model_not_found", "model"
        )
    return served[name]


def _widths(encoder: QueuedEncoder) -> list[int]:
    return [encoder.dim, *(width for width in encoder.spec.matryoshka if width < encoder.dim)]


def _width(encoder: QueuedEncoder, asked: int | None) -> int:
    allowed = _widths(encoder)
    if asked is not None and asked not in allowed:
        raise HttpError(
            400,
            f"dimensions is {asked}; this model's vectors may have: {', '.join(map(str, allowed))}",
            "invalid_value",
            "dimensions",
        )
    return allowed[0] if asked is None else asked


def _texts(given: Any, most: int, vocabulary: int) -> list[str] | list[list[int]]:
    """Return the texts as a list of one kind; refuse what is neither, or holds nothing."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        raise _wrong("input must be a string, a list of strings, a list of token ids, or a list of such lists")
    if given and all(type(item) in (int, float) for item in given):
        given = [given]
    if not given:
        raise _wrong("input is an empty list; give at least one text")
    if len(given) > most:
        raise _wrong(f"input has {len(given)} texts; at most {most} go into one request")
    kind = type(given[0]) if isinstance(given[0], str | list) else str
    for i, item in enumerate(given):
        if type(item) is not kind:
            wanted = "a string" if kind is str else "a list of token ids"
            raise _wrong(f"input[{i}] is {_kind(item)}; it must be {wanted}, as all of one input are of one kind", i)
        if not item:
            raise _wrong(f"input[{i}] is empty; give a text, or leave it out", i)
        if isinstance(item, list):
            _check_ids(item, i, vocabulary)
        elif "\x00" in item:
            raise _wrong(f"input[{i}] holds a NUL character; remove it", i)
    return given


def _check_ids(ids: list[Any], i: int, vocabulary: int) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            shown = token if isinstance(token, int | float) else _kind(token)
            raise _wrong(f"input[{i}] holds {shown}; token ids are integers from 0 to {vocabulary - 1}", i)


def _strings(texts: list[str] | list[list[int]]) -> list[str]:
    if not isinstance(texts[0], str):
        raise _wrong("input: token ids are documents; give queries as text, so that the model's template fits")
    return texts


def _signatures(given: Any, n: int) -> list[Any] | None:
    """Return one signature a query: the one that all share, or each its own."""
    if given is None:
        return None
    if isinstance(given, str) or (isinstance(given, list) and all(isinstance(item, str) for item in given)):
        return [_signature(given)] * n
    if not isinstance(given, list) or len(given) != n:
        count = f"{len(given)} entries" if isinstance(given, list) else _kind(given)
        message = f"signature is {count} for {n} texts; give a string, a list of summaries, or one such list a text"
        raise HttpError(400, message, "invalid_value", "signature")
    return [_signature(item) for item in given]


def _signature(given: Any) -> list[str] | str | None:
    parts = [given] if isinstance(given, str) else given
    if parts is None:
        return None
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise HttpError(400, "signature must hold strings, or lists of strings", "invalid_value", "signature")
    if len(parts) > _SUMMARIES or any(len(part) > _SUMMARY_CHARACTERS or "\x00" in part for part in parts):
        message = f"a signature has at most {_SUMMARIES} summaries of {_SUMMARY_CHARACTERS} characters, without NUL"
        raise HttpError(400, message, "invalid_value", "signature")
    return given


def _narrowed(vectors: np.ndarray, width: int) -> np.ndarray:
    """Cut (n, d) unit rows to a width and make them unit again."""
    if width == vectors.shape[1]:
        return vectors
    cut = vectors[:, :width]
    return np.ascontiguousarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12), np.float32)


def _answer(vectors: np.ndarray, form: str, model: str, tokens: int) -> bytes:
    if form == "base64":
        rows: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        rows = list(np.ascontiguousarray(vectors))
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    record = {"object": "list", "data": data, "model": model, "usage": usage}
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)


def _kind(value: Any) -> str:
    return {str: "a string", list: "a list", int: "a number", dict: "an object", bool: "a boolean"}.get(
        type(value), "null" if value is None else "a number"
    )


def _wrong(message: str, index: int | None = None) -> HttpError:
    return HttpError(400, message, "invalid_value", "input" if index is None else f"input[{index}]")
