"""Search and signatures of a collection."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends

from mia_serve.http.charging import charge_query
from mia_serve.http.errors import problems
from mia_serve.http.keys import Caller, require
from mia_serve.http.routes_collections import GetServices, Id
from mia_serve.http.schemas_search import (
    SearchRequest,
    SearchResponse,
    SignatureOfRequest,
    SignatureRequest,
    SignatureResponse,
)
from mia_serve.http.searching import choose, search
from mia_serve.http.services import Services

router = APIRouter(prefix="/v1", tags=["search"])

Reader = Annotated[Caller, Depends(require("read"))]

_PROBLEMS: dict[int | str, dict[str, Any]] = problems(400, 401, 403, 404, 413, 429, 503)
_QUERY = "Who was driving the yellow car?"
EXAMPLES: dict[str, Any] = {
    "plain": {"summary": "The five best chunks", "value": {"query": _QUERY, "k": 5}},
    "explained": {
        "summary": "Vectors and words together, with a chosen signature, explained",
        "value": {"query": _QUERY, "k": 5, "mode": "fused", "signature": "coverage", "explain": True},
    },
    "sessions": {
        "summary": "Sessions, with a given signature",
        "value": {
            "query": _QUERY,
            "target": "sessions",
            "signature": ["Myrtle is killed on the road by the ash heaps.", "Gatsby tells Nick who drove."],
        },
    },
}


@router.post("/collections/{id}/search", summary="Search a collection", responses=_PROBLEMS)
async def search_collection(
    collection: Id,
    body: Annotated[SearchRequest, Body(openapi_examples=EXAMPLES)],
    services: GetServices,
    caller: Reader,
) -> SearchResponse:
    """Find chunks or sessions by vectors, by words or by both, with a signature chosen, given or none.

    A collection that holds nothing gives no hits. Everything in one answer is of one version of the collection.
    """
    found = await search(services.collections.get(collection).snapshot, body, services.threads)
    if body.mode != "lexical":
        encoder = body.encoder or ("e1" if services.e2 is None else "e2")
        summaries = None if found.signature is None else found.signature.summaries
        await charge_query(services, caller, encoder, body.query, summaries)
    return found


@router.post("/collections/{id}/signature", summary="Choose a signature", responses=_PROBLEMS)
async def signature_of_collection(
    collection: Id, body: SignatureRequest, services: GetServices, caller: Reader
) -> SignatureResponse:
    """Choose the sessions that stand for what a query activates, with the gain of each and the pool they are from."""
    return await _choose(services, caller, collection, body)


@router.post("/signature", summary="Choose a signature, the collection in the body", responses=_PROBLEMS)
async def signature(body: SignatureOfRequest, services: GetServices, caller: Reader) -> SignatureResponse:
    """Do what `/v1/collections/{id}/signature` does."""
    return await _choose(services, caller, body.collection, body)


async def _choose(services: Services, caller: Caller, collection_id: str, body: SignatureRequest) -> SignatureResponse:
    chosen = await choose(services.collections.get(collection_id).snapshot, body)
    await charge_query(services, caller, "e1", body.query)
    return chosen
