"""One search of a collection: the signature, the scores of each side, the ranking, and how it came about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from mia_serve.http.errors import HttpError
from mia_serve.http.schemas_search import (
    ChunkHit,
    Explanation,
    HitBefore,
    Pick,
    PoolSession,
    Scores,
    SearchRequest,
    SearchResponse,
    SessionHit,
    SignatureRequest,
    SignatureResponse,
    signature_out,
)
from mia_serve.http.scoring import (
    Asked,
    Choosing,
    LexicalSessions,
    best,
    choose_signatures,
    dense_scores,
    fuse,
    session_scores,
)
from mia_serve.rag.batching import PRIOR
from mia_serve.signature import Signature

if TYPE_CHECKING:
    from mia_serve.http.snapshot import Snapshot
    from mia_serve.mindscape import Mindscape
    from mia_serve.retriever import Pool

T = TypeVar("T")

_LEXICAL_SESSIONS = LexicalSessions()


class Ranked(NamedTuple):
    """Candidates in order: rows of ``mindscape.chunks`` (or ``.sessions``), scores, and BM25's weight where mixed."""

    places: list[int]
    scores: list[float]
    alpha: float | None = None


async def search(snapshot: Snapshot, request: SearchRequest, threads: Executor) -> SearchResponse:
    """Search one snapshot of a collection.

    Args:
        snapshot: What is searched.
        request: What is asked.
        threads: Where BM25 and ranking run.

    Raises:
        HttpError: The request asks for what this server or collection cannot do.
        MiaError: The query is too long for the encoder.
    """
    encoder = _encoder(snapshot, request)
    if snapshot.empty:
        return SearchResponse(version=snapshot.version, hits=[], signature=None)
    signature = await _signature(snapshot, request, encoder, threads)
    asked = Asked(request.query, signature, encoder, 0.0 if signature is None else _prior(snapshot, encoder))
    if request.mode == "dense" and request.target == "chunks":
        k = min(request.k, len(snapshot.mindscape.chunks))
        found = await snapshot.searcher.search(request.query, k, signature, encoder, asked.prior)
        ranked = Ranked(list(found.rows), list(found.scores))
    else:
        dense = None if request.mode == "lexical" else await snapshot.searcher.together(dense_scores, asked)
        ranked = await _in_thread(threads, _rank, snapshot, request, dense)
    return SearchResponse(
        version=snapshot.version,
        hits=_hits(snapshot.mindscape, request.target, ranked),
        signature=None if signature is None else signature_out(signature),
        explanation=await _explain(snapshot, asked, request, ranked, threads) if request.explain else None,
    )


async def choose(snapshot: Snapshot, request: SignatureRequest) -> SignatureResponse:
    """Choose the signature of a query out of one snapshot of a collection."""
    if snapshot.empty:
        empty = signature_out(Signature((), (), mode=request.mode))
        return SignatureResponse(
            **empty.model_dump(), version=snapshot.version, pool=[], weights=snapshot.retriever.weights
        )
    choosing = Choosing(request.query, request.mode, request.k_sum)
    signature, pool = await asyncio.gather(
        snapshot.searcher.together(choose_signatures, choosing), snapshot.searcher.pool(request.query)
    )
    return SignatureResponse(
        **signature_out(signature).model_dump(),
        version=snapshot.version,
        pool=_pool(snapshot.mindscape, pool),
        weights=snapshot.retriever.weights,
    )


def _encoder(snapshot: Snapshot, request: SearchRequest) -> Literal["e1", "e2"]:
    """Return which encoder searches; E2 where there is one."""
    has_e2 = snapshot.retriever.e2 is not None
    if request.encoder == "e2" and not has_e2:
        raise HttpError(400, "encoder 'e2': this server has no E2; use 'e1' or null", "no_e2", "encoder")
    return request.encoder or ("e2" if has_e2 else "e1")


def _prior(snapshot: Snapshot, encoder: str) -> float:
    """Return β of a signature: E1 cannot read one, so there it needs one."""
    own = snapshot.retriever.prior
    return own or PRIOR if encoder == "e1" else own


async def _signature(snapshot: Snapshot, request: SearchRequest, encoder: str, threads: Executor) -> Signature | None:
    wanted = request.signature
    if request.mode == "lexical":
        return None
    if wanted is None:
        read = encoder == "e2" or (snapshot.retriever.e2 is None and snapshot.retriever.prior > 0)
        wanted = "coverage" if read else "none"
    if wanted == "none" or not wanted:
        return None
    if isinstance(wanted, str):
        return await snapshot.searcher.signature(request.query, wanted)
    given = await _in_thread(threads, _given, snapshot.mindscape, wanted)
    if encoder == "e1" and not given.session_ids:
        raise HttpError(
            400,
            "E1 weighs the sessions of a signature, and none of these summaries is a session's: give summaries as "
            "/map shows them, or use an E2",
            "unknown_summaries",
            "signature",
        )
    return given


def _given(mindscape: Mindscape, summaries: list[str]) -> Signature:
    """Wrap given summaries; those that are a session's stand for it, so that they work as a prior too."""
    wanted = dict.fromkeys(summaries)
    known: dict[str, str] = {}
    for session in mindscape.sessions:
        if session.summary in wanted:
            known.setdefault(session.summary, session.id)
    return Signature(tuple(known[text] for text in wanted if text in known), tuple(summaries), mode="given")


def _rank(snapshot: Snapshot, request: SearchRequest, dense: np.ndarray | None) -> Ranked:
    """Rank all chunks or sessions by the dense scores of all chunks, by BM25, or by both."""
    sessions = request.target == "sessions"
    mindscape, alpha = snapshot.mindscape, None
    if dense is not None:
        scores = session_scores(mindscape, dense) if sessions else dense
    if request.mode == "lexical":
        lexical = _lexical(snapshot, request)
        scores = np.where(lexical > 0, lexical, -np.inf)
    elif request.mode == "fused":
        scores, alpha = fuse(_lexical(snapshot, request), scores)
    ids = [item.id for item in (mindscape.sessions if sessions else mindscape.chunks)]
    places = best(ids, scores, request.k)
    return Ranked(places, scores[places].tolist(), alpha)


def _lexical(snapshot: Snapshot, request: SearchRequest) -> np.ndarray:
    """Score all chunks, or all sessions as one text each, by BM25, in the order of the mindscape."""
    index = snapshot.lexical
    if request.target == "sessions":
        index = _LEXICAL_SESSIONS.of(snapshot, snapshot.mindscape, index.analyzer.name)
    return index.scores([request.query])[0]


def _hits(mindscape: Mindscape, target: str, ranked: Ranked) -> list[ChunkHit] | list[SessionHit]:
    found = list(zip(ranked.places, ranked.scores, strict=True))
    if target == "chunks":
        chunks = [(mindscape.chunks[place], score) for place, score in found]
        return [
            ChunkHit(id=c.id, text=c.text, session_id=c.session_id, book_id=c.book_id, score=score)
            for c, score in chunks
        ]
    sessions = [(mindscape.sessions[place], score) for place, score in found]
    return [
        SessionHit(
            session_id=s.id, book_id=s.book_id, title=s.title, date=s.date, summary=s.summary, score=score
        )
        for s, score in sessions
    ]  # fmt: skip


async def _explain(
    snapshot: Snapshot, asked: Asked, request: SearchRequest, ranked: Ranked, threads: Executor
) -> Explanation:
    together = snapshot.searcher.together
    kinds = {"e1": asked._replace(signature=None, encoder="e1", prior=0.0), "biased": asked}
    if snapshot.retriever.e2 is not None:
        kinds["e2"] = asked._replace(encoder="e2", prior=0.0)
    # In one turn, so that the worker takes them as one batch.
    pool, *scored = await asyncio.gather(
        snapshot.searcher.pool(asked.query), *(together(dense_scores, kind) for kind in kinds.values())
    )
    dense = dict(zip(kinds, scored, strict=True))
    before, scores = await _in_thread(threads, _compare, snapshot, asked, request, ranked, dense)
    signature = asked.signature
    picks = [] if signature is None else zip(signature.session_ids, signature.gains, signature.pick_terms, strict=False)
    return Explanation(
        pool=_pool(snapshot.mindscape, pool),
        picks=[Pick(session_id=i, gain=gain, terms=terms) for i, gain, terms in picks],
        hits_before=before,
        scores=scores,
        weights=snapshot.retriever.weights,
        alpha=ranked.alpha,
    )


def _compare(
    snapshot: Snapshot, asked: Asked, request: SearchRequest, ranked: Ranked, dense: dict[str, np.ndarray]
) -> tuple[list[HitBefore], dict[str, Scores]]:
    """Return the hits of E1 alone, and what each side says of them and of the hits; dense: (N,) scores by side."""
    mindscape = snapshot.mindscape
    if request.target == "sessions":
        dense = {side: session_scores(mindscape, scores) for side, scores in dense.items()}
    ids = [item.id for item in (mindscape.sessions if request.target == "sessions" else mindscape.chunks)]
    first = best(ids, dense["e1"], request.k)
    before = [HitBefore(id=ids[place], score=float(dense["e1"][place])) for place in first]
    lexical = _lexical(snapshot, request)
    # A difference of two float32 scores: what is behind the sixth digit is rounding.
    added = (dense["biased"].astype(np.float64) - dense[asked.encoder]).round(6) if asked.prior else np.zeros(len(ids))
    scores = {
        ids[place]: Scores(
            e1=_finite(dense["e1"][place]),
            e2=_finite(dense["e2"][place]) if "e2" in dense else None,
            lexical=float(lexical[place]),
            prior=_finite(added[place]) or 0.0,
        )
        for place in dict.fromkeys([*ranked.places, *first])
    }
    return before, scores


def _pool(mindscape: Mindscape, pool: Pool) -> list[PoolSession]:
    """Return the sessions of a pool in E1's order, each with its best score and its chunks among the K₀."""
    sessions = mindscape.session_of[pool.rows]
    found: dict[int, list[float]] = {row: [] for row in pool.sessions.tolist()}
    for row, score in zip(sessions.tolist(), pool.scores.tolist(), strict=True):
        found[row].append(score)
    return [
        PoolSession(session_id=mindscape.sessions[row].id, score=scores[0], chunks=len(scores))
        for row, scores in found.items()
    ]


def _finite(score: Any) -> float | None:
    return float(score) if np.isfinite(score) else None


async def _in_thread(threads: Executor, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)
