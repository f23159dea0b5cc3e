"""The HTTP side of a service on Ray: the server's own app, with encoders and shards somewhere in the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any, cast

import numpy as np
from fastapi import APIRouter, Body, Depends, FastAPI
from pydantic import BaseModel, Field

from mia_serve import __version__
from mia_serve.http.errors import HttpError, NoCollection, add_error_handlers, problems, retry_after
from mia_serve.http.keys import KeyRing, require
from mia_serve.http.limits import Allowance
from mia_serve.http.llm_service import LlmService
from mia_serve.http.metrics import Metrics
from mia_serve.http.middleware import BodyLimit, Edge, Gate, UntilGone
from mia_serve.http.queued_encoder import Encoded
from mia_serve.http.ray_replicas import APP, Facts, RayPlan, Refusal
from mia_serve.http.ray_retriever import AskShard, ShardedRetriever
from mia_serve.http.routes_collections import GetServices, Id
from mia_serve.http.schemas_search import (
    ChunkHit,
    PoolSession,
    SearchRequest,
    SearchResponse,
    SignatureOfRequest,
    SignatureRequest,
    SignatureResponse,
    signature_out,
)
from mia_serve.http.services import Services
from mia_serve.rag.batching import PRIOR
from mia_serve.signature import DEFAULT_WEIGHTS, Signature

_PATIENCE_S = 60.0  # until what died must be up again elsewhere


def asking(handle: Any, patience_s: float = _PATIENCE_S) -> AskShard:
    """Return a caller of a deployment's replicas that asks again where one has died.

    Everything that is asked of a replica only reads, so that asking twice does no harm.

    Args:
        handle: Of the deployment.
        patience_s: Seconds until a replica must have answered, be it a new one on another node.
    """
    from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError
    from ray.serve.exceptions import ReplicaUnavailableError

    gone = (RayActorError, NodeDiedError, ObjectLostError, WorkerCrashedError, ReplicaUnavailableError)

    async def ask(method: str, *arguments: Any) -> Any:
        until, pause = time.monotonic() + patience_s, 0.05
        while True:
            try:
                found = await getattr(handle, method).remote(*arguments)
            except RayTaskError as error:
                raise error.cause from None
            except gone:
                if time.monotonic() + pause > until:
                    message = "a part of the service is down and is being started again; try again in a few seconds"
                    raise HttpError(503, message, "replica_down", headers=retry_after(5)) from None
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)
                continue
            if isinstance(found, Refusal):
                raise HttpError(*found)
            return found

    return ask


class FarEncoder:
    """Stands for a `QueuedEncoder` whose replicas are anywhere in the cluster.

    Args:
        ask: Calls one of them.
    """

    spec: Any
    spec_hash: str
    dim: int
    tokenizer: range

    def __init__(self, ask: AskShard) -> None:
        self._ask = ask

    async def open(self) -> None:
        """Learn what kind of encoder it is."""
        facts: Facts = await self._ask("facts")
        self.spec, self.spec_hash, self.dim = facts.spec, facts.spec_hash, facts.dim
        self.tokenizer = range(facts.vocabulary)  # routes ask it for its length alone

    async def encode_queries_async(
        self, texts: Sequence[str], signatures: Any = None, alpha: float | None = None, truncate: bool = False
    ) -> Encoded:
        """Encode queries, as `QueuedEncoder.encode_queries_async`."""
        return await self._ask("queries", list(texts), signatures, alpha, truncate)

    async def encode_documents_async(self, texts: Sequence[Any], truncate: bool = False) -> Encoded:
        """Encode documents, as `QueuedEncoder.encode_documents_async`."""
        return await self._ask("documents", list(texts), truncate)

    async def vectors(self, texts: Sequence[str], signatures: Any = None, alpha: float | None = None) -> np.ndarray:
        """Return the vectors of queries alone."""
        return (await self.encode_queries_async(texts, signatures, alpha)).vectors


class ShardedCollections:
    """The collections that are served, each in its shards.

    Args:
        plan: What is served.
        e1: Query-only encoder.
        e2: Encoder of (q, σ) pairs.
        shards: One caller a shard.
    """

    def __init__(self, plan: RayPlan, e1: FarEncoder, e2: FarEncoder | None, shards: Sequence[AskShard]) -> None:
        self.plan, self.e1, self.e2 = plan, e1, e2
        given = plan.config.collections
        settings: dict[str, Any] = {name: getattr(given, name) for name in ("k0", "k_sum", "alpha", "prior")}
        self._retrievers = {
            name: ShardedRetriever([_of(ask, name) for ask in shards[: len(spans)]], e1, e2, **settings)
            for name, spans in plan.collections.items()
        }

    async def open(self) -> None:
        """Wait until the encoders answer."""
        await asyncio.gather(self.e1.open(), *([] if self.e2 is None else [self.e2.open()]))

    async def close(self) -> None:
        """Do nothing: replicas are the cluster's."""

    def get(self, name: str) -> ShardedRetriever:
        """Return a collection.

        Raises:
            NoCollection: There is none of that name.
        """
        if name not in self._retrievers:
            raise NoCollection(f"there is no collection {name!r}")
        return self._retrievers[name]

    def list(self) -> list[str]:
        """Return the ids of all."""
        return sorted(self._retrievers)


class ShardedInfo(BaseModel):
    """A collection that is served in shards."""

    id: str
    version: int = Field(description="As it was when the service started; what is served does not change.")
    chunks: int
    shards: int


class ShardedList(BaseModel):
    """The collections that are served."""

    collections: list[ShardedInfo]


router = APIRouter(prefix="/v1", tags=["search"], dependencies=[Depends(require("read"))])


@router.get("/collections", summary="List the collections")
async def collections(services: GetServices) -> ShardedList:
    """Return the collections that are served, with their chunks and shards."""
    plan = _sharded(services).plan
    return ShardedList(
        collections=[
            ShardedInfo(id=name, version=plan.versions[name], chunks=spans[-1].stop, shards=len(spans))
            for name, spans in sorted(plan.collections.items())
        ]
    )


@router.post("/collections/{id}/search", summary="Search a collection")
async def search(collection: Id, body: SearchRequest, services: GetServices) -> SearchResponse:
    """Find chunks by vectors, in all shards at once; hits and signature are those of a single machine."""
    for name, value, allowed in (("mode", body.mode, "dense"), ("target", body.target, "chunks")):
        if value != allowed:
            raise HttpError(400, f"{name} {value!r}: shards are searched with {allowed!r} only", "not_sharded", name)
    if body.explain:
        raise HttpError(400, "explain: shards do not explain; ask /signature for pool and gains", "not_sharded")
    retriever = _sharded(services).get(collection)
    encoder = body.encoder or ("e1" if retriever.e2 is None else "e2")
    prior = retriever.prior or (PRIOR if encoder == "e1" else 0.0)
    wanted = body.signature
    if wanted is None:
        read = encoder == "e2" or (retriever.e2 is None and retriever.prior > 0)
        wanted = "coverage" if read else "none"
    asked: Any = wanted or "none"
    if not isinstance(asked, str):
        asked = [await _given(retriever, asked, encoder)]
    found = await retriever.search([body.query], body.k, asked, encoder, 0.0 if asked == "none" else prior)
    chunks = await retriever.chunks(found.hits.rows[0].tolist())
    hits = [
        ChunkHit(id=c.id, text=c.text, session_id=c.session_id, book_id=c.book_id, score=score)
        for c, score in zip(chunks, found.hits.scores[0].tolist(), strict=True)
    ]
    signature = None if found.signatures is None else signature_out(found.signatures[0])
    return SearchResponse(version=_sharded(services).plan.versions[collection], hits=hits, signature=signature)


@router.post("/collections/{id}/signature", summary="Choose a signature")
async def signature_of(collection: Id, body: SignatureRequest, services: GetServices) -> SignatureResponse:
    """Choose the sessions that stand for what a query activates, out of the pool of all shards."""
    retriever = _sharded(services).get(collection)
    chosen, (pool, small) = await asyncio.gather(
        retriever.signatures([body.query], body.mode, body.k_sum), retriever.pool(body.query)
    )
    scores: dict[int, list[float]] = {}
    for row, score in zip(small.session_of[pool.rows].tolist(), pool.scores.tolist(), strict=True):
        scores.setdefault(row, []).append(score)
    return SignatureResponse(
        **signature_out(chosen[0]).model_dump(),
        version=_sharded(services).plan.versions[collection],
        pool=[
            PoolSession(session_id=small.sessions[row].id, score=found[0], chunks=len(found))
            for row, found in scores.items()
        ],
        weights=DEFAULT_WEIGHTS,
    )


@router.post("/signature", summary="Choose a signature, the collection in the body")
async def signature(body: Annotated[SignatureOfRequest, Body()], services: GetServices) -> SignatureResponse:
    """Do what `/v1/collections/{id}/signature` does."""
    return await signature_of(body.collection, body, services)


def create_front(plan: RayPlan) -> FastAPI:
    """Return the app that a front replica runs: embeddings, rerank, search and signatures, health and metrics."""
    from ray import serve

    from mia_serve.http import routes_embeddings, routes_health, routes_rerank

    def far(name: str) -> AskShard:
        return asking(serve.get_deployment_handle(name, app_name=APP))

    config = plan.config
    e1, e2 = FarEncoder(far("e1")), None if config.e2 is None else FarEncoder(far("e2"))
    held = ShardedCollections(plan, e1, e2, [far(f"shard-{i}") for i in range(plan.shards)])
    limits = Allowance(config.limits.requests_per_minute, config.limits.tokens_per_minute)
    keys = None if config.keys is None else KeyRing(config.keys)
    # The server's own routes ask these stand-ins for no more than they have.
    services = Services(
        config, cast(Any, e1), cast(Any, e2), [], cast(Any, held), Metrics(), ThreadPoolExecutor(4), keys, limits,
        LlmService(None),
    )  # fmt: skip

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await services.start()
        yield
        await services.close()

    app = FastAPI(title="MiA on Ray", version=__version__, lifespan=lifespan, redirect_slashes=False, redoc_url=None)
    app.state.services = services
    add_error_handlers(app)
    app.include_router(routes_health.router)
    for part in (routes_embeddings.router, routes_rerank.router, router):
        app.include_router(part, responses=problems(400, 401, 403, 404, 413, 429, 503))
    app.add_middleware(Gate)
    app.add_middleware(BodyLimit, limit=int(config.limits.body_mb * 2**20))
    app.add_middleware(UntilGone)
    app.add_middleware(Edge, log_text=config.log.text)
    return app


def _sharded(services: Services) -> ShardedCollections:
    return cast(ShardedCollections, services.collections)


async def _given(retriever: ShardedRetriever, summaries: list[str], encoder: str) -> Signature:
    given = await retriever.given(summaries)
    if encoder == "e1" and not given.session_ids:
        message = "E1 weighs the sessions of a signature, and none of these summaries is a session's; use an E2"
        raise HttpError(400, message, "unknown_summaries", "signature")
    return given


def _of(ask: AskShard, collection: str) -> AskShard:
    async def of(method: str, *arguments: Any) -> Any:
        return await ask("ask", collection, method, *arguments)

    return of
