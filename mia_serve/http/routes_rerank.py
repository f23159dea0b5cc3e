"""Rerank documents by the encoders, in the form of Jina's and Cohere's clients."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Body, Depends

from mia_serve.http.errors import HttpError, problems
from mia_serve.http.keys import Caller, require
from mia_serve.http.queued_encoder import QueuedEncoder
from mia_serve.http.routes_collections import GetServices
from mia_serve.http.schemas_search import DocumentText, RerankRequest, RerankResponse, RerankResult, RerankUsage
from mia_serve.http.services import Services

router = APIRouter(prefix="/v1", tags=["rerank"])

T = TypeVar("T")

EXAMPLES: dict[str, Any] = {
    "plain": {
        "summary": "The best of two documents",
        "value": {
            "query": "Who was driving?",
            "documents": ["Daisy took the wheel.", "The party went on until two."],
            "top_n": 1,
            "return_documents": True,
        },
    },
    "signature": {
        "summary": "The query read with a signature (needs an E2)",
        "value": {
            "query": "Who was driving?",
            "documents": [{"text": "Daisy took the wheel."}, {"text": "The party went on until two."}],
            "signature": ["Myrtle is killed on the road by the ash heaps."],
        },
    },
}


@router.post(
    "/rerank",
    summary="Rerank documents",
    responses=problems(400, 401, 403, 413, 429, 503),
    response_model_exclude_none=True,
)
async def rerank(
    body: Annotated[RerankRequest, Body(openapi_examples=EXAMPLES)],
    services: GetServices,
    caller: Annotated[Caller, Depends(require("read"))],
) -> RerankResponse:
    """Score documents against a query, best first, equal scores by index.

    A score is the cosine of two vectors in [-1, 1], not a probability: E2's of (query, signature) and document where
    a signature is given, else E1's. A query or document that is too long for the encoder is refused, not cut; a
    signature that is too long is cut evenly.
    """
    limit = services.config.limits.inputs
    if len(body.documents) > limit:
        raise HttpError(413, f"{len(body.documents)} documents: at most {limit} in a request", "too_many", "documents")
    encoder, model = _encoder(body, services)
    signatures = [body.signature] if body.signature else None
    documents = [item if isinstance(item, str) else item.text for item in body.documents]
    # Each text once: the last digits of a vector depend on its batch, and equal documents must score alike.
    unique = {text: row for row, text in enumerate(dict.fromkeys(documents))}
    query, read = await _both(
        encoder.encode_queries_async([body.query], signatures),
        encoder.encode_documents_async(list(unique), truncate=False),
    )
    rows = [unique[text] for text in documents]
    tokens = sum(query.tokens) + sum(read.tokens[row] for row in rows)
    caller.charge(tokens)
    scores = read.vectors[rows].astype(np.float64) @ query.vectors[0].astype(np.float64)
    order = np.argsort(-scores, kind="stable")[: body.top_n]
    results = [
        RerankResult(
            index=place,
            relevance_score=float(scores[place]),
            document=DocumentText(text=documents[place]) if body.return_documents else None,
        )
        for place in order.tolist()
    ]
    return RerankResponse(
        id=f"rerank-{uuid.uuid4().hex}", model=model, results=results, usage=RerankUsage(total_tokens=tokens)
    )


async def _both(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, T]) -> tuple[T, T]:
    """Await two at once; where one fails, or the client has gone, the other is given up."""
    tasks = [asyncio.create_task(first), asyncio.create_task(second)]
    try:
        done = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return done[0], done[1]


def _encoder(body: RerankRequest, services: Services) -> tuple[QueuedEncoder, str]:
    """Return the encoder that reads what is given, and its name."""
    if not body.signature:
        return services.e1, services.config.e1.served_name
    if services.e2 is None or services.config.e2 is None:
        raise HttpError(
            400, "E1 reads the query alone, and this server has no E2: leave out signature", "no_e2", "signature"
        )
    return services.e2, services.config.e2.served_name
