"""What runs in the replicas of a service on Ray beside its fronts: encoders and shards. Nothing in here needs HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from mia_serve.core.errors import MiaError
from mia_serve.http.config import EncoderConfig, ServerConfig
from mia_serve.http.ray_shards import Shard, Span

APP = "mia"


class Facts(NamedTuple):
    """What the front must know of an encoder."""

    spec: Any
    spec_hash: str
    dim: int
    vocabulary: int


class Refusal(NamedTuple):
    """An error of a replica that a client is to hear of; fields of `HttpError`, which itself does not travel well."""

    status: int
    message: str
    code: str | None
    param: str | None
    headers: Mapping[str, str] | None


class RayPlan(NamedTuple):
    """What is served on Ray, and by how many.

    Attributes:
        config: The server's configuration; paths in it are the same on every node.
        collections: Spans of each collection's shards, by id.
        versions: Version of each collection.
        encoders: Replicas of each encoder.
        copies: Replicas of each shard.
        fronts: Replicas of the HTTP side.
        cpus: CPUs, whole or parts, that every encoder and shard reserves.
    """

    config: ServerConfig
    collections: dict[str, list[Span]]
    versions: dict[str, int]
    encoders: int = 1
    copies: int = 1
    fronts: int = 1
    cpus: float = 1.0

    @property
    def shards(self) -> int:
        """Shards of the collection that has most; the others lie in the first ones."""
        return max(map(len, self.collections.values()), default=0)

    @property
    def reserved(self) -> float:
        """CPUs that all encoders and shards reserve."""
        encoders = self.encoders * (1 if self.config.e2 is None else 2)
        return self.cpus * (encoders + self.shards * self.copies)


class EncoderReplica:
    """An encoder behind its queue, in a process of its own.

    Args:
        config: The encoder.
        server: Limits and batching.
    """

    def __init__(self, config: EncoderConfig, server: ServerConfig) -> None:
        from mia_serve.core import Encoder
        from mia_serve.http.queue import EncodeQueue
        from mia_serve.http.queued_encoder import QueuedEncoder

        plain = Encoder.load(config.model, device=config.device, dtype=config.dtype)
        self.queue = EncodeQueue(
            plain,
            tokens_per_batch=server.queue.tokens_per_batch,
            max_tokens_waiting=server.limits.waiting_tokens,
            metrics=None,
        )
        self.encoder = QueuedEncoder(plain, self.queue)
        self.known = Facts(plain.spec, self.encoder.spec_hash, plain.dim, len(plain.tokenizer))
        self.queue.start()

    async def facts(self) -> Facts:
        """Tell what kind of encoder this is."""
        return self.known

    async def queries(self, texts: list[str], signatures: Any, alpha: float | None, truncate: bool) -> Any:
        """Encode queries; see `QueuedEncoder.encode_queries_async`."""
        try:
            return await self.encoder.encode_queries_async(texts, signatures, alpha, truncate)
        except Exception as error:
            return refusal(error)

    async def documents(self, texts: list[Any], truncate: bool) -> Any:
        """Encode documents; see `QueuedEncoder.encode_documents_async`."""
        try:
            return await self.encoder.encode_documents_async(texts, truncate)
        except Exception as error:
            return refusal(error)

    async def check_health(self) -> None:
        """Tell Ray Serve, which asks again and again, whether to start this replica anew."""
        if not self.queue.alive:
            raise RuntimeError("the encoder's worker is down")


class ShardReplica:
    """One shard of every collection that has so many.

    Args:
        spans: What of each collection is held.
    """

    def __init__(self, spans: dict[str, Span]) -> None:
        self.shards = {name: Shard(span) for name, span in spans.items()}

    async def ask(self, collection: str, method: str, *arguments: Any) -> Any:
        """Call a method of a collection's shard, off the loop."""
        try:
            return await asyncio.to_thread(getattr(self.shards[collection], method), *arguments)
        except MiaError as error:
            return refusal(error)


def refusal(error: Exception) -> Refusal:
    """Return what a client is told of an error; one of our own bugs is raised again."""
    from mia_serve.http.errors import http_error

    answer = http_error(error)
    if answer.status == 500:
        raise error
    return Refusal(answer.status, answer.message, answer.code, answer.param, answer.headers)
