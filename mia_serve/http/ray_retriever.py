"""Retrieval from shards: what `Retriever` finds on one machine, found on many. Nothing in here knows of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch

from mia_serve.core import Encoder
from mia_serve.core.errors import MiaError
from mia_serve.http.ray_shards import Members
from mia_serve.index import Hits
from mia_serve.mindscape import Mindscape
from mia_serve.mindscape.records import Chunk
from mia_serve.retriever import COVER_TEMPERATURE, Mode, Pool, Results, Retriever
from mia_serve.signature import Signature, given_signatures, session_prior


class AskShard(Protocol):
    """Calls a method of one `Shard`, wherever that lives."""

    def __call__(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Return what the method returns."""


class RemoteEncoder(Protocol):
    """Encodes queries, wherever it lives."""

    spec_hash: str
    dim: int

    async def vectors(
        self, texts: Sequence[str], signatures: Sequence[Sequence[str]] | None = None, alpha: float | None = None
    ) -> np.ndarray:
        """Return what `Encoder.encode_queries` returns, (n, d)."""


class ShardedRetriever:
    """Searches shards with one query vector and merges what they find, so that results are those of one machine.

    Scores do not depend on which chunks lie together (see `mia_serve.index.exact`), so the k best of all are the k best
    of the shards' k best, ties by id. A signature is chosen from the merged pool: the K₀ chunks and their sessions are
    brought together with their vectors, as a small mindscape, and `Retriever` chooses out of that.

    Args:
        shards: One callable a shard, in the collection's order.
        e1: Query-only encoder; its vectors choose σ too.
        e2: Encoder of (q, σ) pairs; None: E1 alone.
        k0: As in `Retriever`.
        k_sum: As in `Retriever`.
        alpha: As in `Retriever`.
        prior: As in `Retriever`.
    """

    def __init__(
        self,
        shards: Sequence[AskShard],
        e1: RemoteEncoder,
        e2: RemoteEncoder | None = None,
        *,
        k0: int = 50,
        k_sum: Any = 5,
        alpha: float | None = None,
        prior: float = 0.0,
    ) -> None:
        self.shards, self.e1, self.e2 = list(shards), e1, e2
        self.k0, self.k_sum, self.alpha, self.prior = k0, k_sum, alpha, prior

    async def search(
        self,
        queries: Sequence[str],
        k: int = 10,
        signature: Mode | Sequence[Any] | None = None,
        encoder: str | None = None,
        prior: float | None = None,
    ) -> Results:
        """Find the k best chunks for each query, as `Retriever.search` does; the rows are the collection's.

        Raises:
            MiaError: As there; and "global_summary" is not offered.
        """
        prior = self.prior if prior is None else prior
        name = encoder or ("e1" if self.e2 is None else "e2")
        chosen = {"e1": self.e1, "e2": self.e2}.get(name)
        if chosen is None:
            raise MiaError(f"encoder={encoder!r}: this service has {'e1' if self.e2 is None else 'e1 and e2'}")
        mode = signature if signature is not None else ("none" if name == "e1" else "coverage")
        if name == "e1" and mode != "none" and not prior:
            raise MiaError("E1 reads the query alone: give an e2 for the signature, or prior > 0 to weigh its sessions")
        texts = list(queries)
        if mode == "none":
            return Results(await self._search(chosen, await chosen.vectors(texts), k), None)
        asked, first, members = await self._first(texts, pool=prior > 0 or isinstance(mode, str))
        if isinstance(mode, str):
            signatures = await asyncio.to_thread(self._choose, texts, asked, members, mode, self.k_sum)
        else:
            signatures = given_signatures(mode, len(texts))
        shown = [list(s.texts) for s in signatures] if name == "e2" else None
        vectors = asked if shown is None else await chosen.vectors(texts, shown, self.alpha)
        if not prior:
            return Results(await self._search(chosen, vectors, k), signatures)
        rows, weights = await self._prior_weights(signatures, asked, first, members)
        return Results(await self._search(chosen, vectors, k, rows, prior * weights.astype(np.float64)), signatures)

    async def signatures(self, queries: Sequence[str], mode: str, k_sum: Any = None) -> list[Signature]:
        """Choose a signature for each query: "coverage" or "first_k"."""
        asked, _, members = await self._first(list(queries))
        k_sum = self.k_sum if k_sum is None else k_sum
        return await asyncio.to_thread(self._choose, list(queries), asked, members, mode, k_sum)

    async def pool(self, query: str) -> tuple[Pool, Mindscape]:
        """Return the pool of a query, and the small mindscape that its rows number."""
        asked, _, members = await self._first([query])
        local = self._local([query], asked, members)
        return (await asyncio.to_thread(local.pools, [query]))[0], local.mindscape

    async def chunks(self, rows: Sequence[int]) -> list[Chunk]:
        """Return the chunks of rows that a search found, in the order given."""
        found: dict[int, Chunk] = {}
        for part in await self._ask_all("texts", list(rows)):
            found |= part
        return [found[row] for row in rows]

    async def given(self, summaries: Sequence[str]) -> Signature:
        """Wrap given summaries; those that are a session's stand for it, so that they work as a prior too."""
        known: dict[str, str] = {}
        for part, _ in await self._ask_all("sessions_of", list(summaries), []):
            known = part | known
        return Signature(tuple(known[t] for t in dict.fromkeys(summaries) if t in known), tuple(summaries))

    async def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        return list(await asyncio.gather(*(ask(method, *arguments) for ask in self.shards)))

    async def _search(self, encoder: RemoteEncoder, vectors: np.ndarray, k: int, *prior: np.ndarray) -> Hits:
        return merge(await self._ask_all("search", encoder.spec_hash, vectors, k, *prior), k)

    async def _first(self, queries: list[str], pool: bool = True) -> tuple[np.ndarray, Hits, Members]:
        """Return the queries' vectors under E1, its K₀ chunks, and what is needed of them to choose a signature."""
        asked = await self.e1.vectors(queries)
        if not pool:
            return asked, _NO_HITS, _NO_MEMBERS
        first = await self._search(self.e1, asked, self.k0)
        return asked, first, await self._members(np.unique(first.rows), _NOTHING)

    async def _members(self, rows: np.ndarray, sessions: np.ndarray) -> Members:
        parts: list[Members] = await self._ask_all("members", self.e1.spec_hash, rows[rows >= 0], sessions)
        parts = [part for part in parts if len(part.rows)]
        return Members(
            np.concatenate([part.rows for part in parts]),
            [chunk for part in parts for chunk in part.chunks],
            np.concatenate([part.vectors for part in parts]),
            np.concatenate([part.session_rows for part in parts]),
            [session for part in parts for session in part.sessions],
            np.concatenate([part.session_vectors for part in parts]),
        )

    def _local(self, queries: list[str], asked: np.ndarray, members: Members, k_sum: Any = None) -> Retriever:
        """Return a retriever of the pool alone; for these queries its K₀ chunks are those of the whole collection."""
        known = _Known(self.e1.spec_hash, self.e1.dim, {text: asked[i] for i, text in enumerate(queries)})
        of_session: dict[str, list[str]] = {}
        for chunk in members.chunks:
            of_session.setdefault(chunk.session_id, []).append(chunk.id)
        sessions = [replace(session, chunk_ids=tuple(of_session[session.id])) for session in members.sessions]
        vectors = {known.spec_hash: members.vectors, f"{known.spec_hash}/sessions": members.session_vectors}
        mindscape = Mindscape(tuple(members.chunks), tuple(sessions))
        # A retriever asks an encoder for queries, its hash and width, and here it gets what is known already.
        return Retriever(
            mindscape, cast(Encoder, known), k0=self.k0, k_sum=k_sum or self.k_sum, vectors=vectors, device="cpu"
        )

    def _choose(
        self, queries: list[str], asked: np.ndarray, members: Members, mode: str, k_sum: Any
    ) -> list[Signature]:
        if mode not in ("coverage", "first_k"):
            raise MiaError(f"signature mode {mode!r}: shards offer 'coverage', 'first_k' (search: 'none')")
        return self._local(queries, asked, members, k_sum).signatures(queries, cast(Mode, mode))

    async def _prior_weights(
        self, signatures: list[Signature], asked: np.ndarray, first: Hits, members: Members
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the signatures' sessions, (n, K), -1 padded, and `session_prior` of each, (n, K)."""
        ids = list(dict.fromkeys(name for signature in signatures for name in signature.session_ids))
        row_of: dict[str, int] = {}
        for _, part in await self._ask_all("sessions_of", [], ids):
            row_of |= part
        width = max((len(s.session_ids) for s in signatures), default=0)
        sessions = np.full((len(signatures), width), -1, np.int64)
        for i, signature in enumerate(signatures):
            sessions[i, : len(signature.session_ids)] = [row_of.get(name, -1) for name in signature.session_ids]
        wanted = np.unique(sessions[sessions >= 0])
        if not np.isin(wanted, members.session_rows).all():
            members = await self._members(members.rows, wanted)
        place = np.searchsorted(members.rows, first.rows)
        number = {session.id: row for session, row in zip(members.sessions, members.session_rows, strict=True)}
        session_of = np.asarray([number[chunk.session_id] for chunk in members.chunks])[place]  # (n, K₀)
        shares = torch.from_numpy(first.scores).div(COVER_TEMPERATURE).softmax(dim=1).numpy()
        activation = ((session_of[:, None, :] == sessions[:, :, None]) * shares[:, None, :]).sum(axis=2)
        at = np.searchsorted(members.session_rows, sessions).clip(0, len(members.session_rows) - 1)
        relevance = np.einsum("nd,nkd->nk", asked, members.session_vectors[at])
        mask = torch.from_numpy(sessions >= 0)
        return sessions, session_prior(torch.from_numpy(activation), torch.from_numpy(relevance), mask).numpy()


class _Known(NamedTuple):
    """Stands for an encoder whose queries have been encoded elsewhere."""

    spec_hash: str
    dim: int
    queries: dict[str, np.ndarray]

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return np.stack([self.queries[text] for text in texts])


def merge(parts: Sequence[Hits], k: int) -> Hits:
    """Merge the best of each shard into the k best of all, equal scores by ascending id."""
    ids: list[list[str]] = []
    scores: list[list[float]] = []
    rows: list[list[int]] = []
    for query in range(len(parts[0].ids)):
        every = []
        for part in parts:
            names = part.ids[query]  # not padded, as the arrays are
            scored = part.scores[query, : len(names)].tolist()
            numbered = part.rows[query, : len(names)].tolist()
            every += [(-score, name, row) for score, name, row in zip(scored, names, numbered, strict=True)]
        best = sorted(every)[:k]
        ids.append([name for _, name, _ in best])
        scores.append([-score for score, _, _ in best])
        rows.append([row for _, _, row in best])
    width = max(map(len, ids), default=0)
    padded = Hits(ids, np.full((len(ids), width), -np.inf, np.float32), np.full((len(ids), width), -1, np.int64))
    for query, names in enumerate(ids):
        padded.scores[query, : len(names)] = scores[query]
        padded.rows[query, : len(names)] = rows[query]
    return padded


_NOTHING = np.empty(0, np.int64)
_NO_HITS = Hits([], np.empty((0, 0), np.float32), np.empty((0, 0), np.int64))
_NO_MEMBERS = Members(_NOTHING, [], np.empty((0, 0), np.float32), _NOTHING, [], np.empty((0, 0), np.float32))
