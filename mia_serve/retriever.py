"""The one retrieval path q → E1 → pool → σ → E2, batched over queries.

Search, evaluation, RAG, the server and the making of training signatures all go through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from mia_serve.core.device import resolve_device
from mia_serve.core.errors import MiaError
from mia_serve.index import Hits, SessionIndex
from mia_serve.index.flat import full_float32
from mia_serve.index.session_index import check_count
from mia_serve.mindscape.extractive import book_summaries
from mia_serve.signature import (
    DEFAULT_WEIGHTS,
    Given,
    Signature,
    activation_spread,
    biased_rows,
    first_k,
    given_signatures,
    select_sessions,
    session_prior,
    spread_sizes,
    unique_in_order,
)
from mia_serve.signature.objective import check_weights

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.mindscape import Mindscape, Session

Mode = Literal["coverage", "first_k", "global_summary", "none"]

COVER_TEMPERATURE = 0.05
"""Chunks weigh softmax(E1 score / 0.05) in the coverage term: a lead of 0.05 in cosine weighs e times as much."""

_ELEMENTS = 1 << 24  # numbers gathered at once to choose signatures: 64 MiB of float32


class Pool(NamedTuple):
    """What one query lights up under E1.

    Attributes:
        sessions: Sessions of the best chunks in E1 rank order, each once, (H,) int64, rows of `mindscape.sessions`.
        rows: The best chunks, (K₀,) int64, rows of `mindscape.chunks`.
        scores: Their E1 scores, (K₀,) float32, descending.
    """

    sessions: np.ndarray
    rows: np.ndarray
    scores: np.ndarray


class Results(NamedTuple):
    """Chunks found, and the signatures that were searched with (None: the queries alone)."""

    hits: Hits
    signatures: list[Signature] | None


class Retriever:
    """Retrieves chunks of a mindscape for a query and its signature (MiA-Signature, arXiv 2605.06416).

    E1 finds the K₀ best chunks of a query; their sessions are its pool; the signature σ is chosen out of the pool with
    the selector's vectors; E2 encodes (q, σ) and searches all chunks. Vectors are made when first needed and kept.
    Encoders must not be trained while a retriever holds them.

    Args:
        mindscape: Chunks and sessions.
        e1: Query-only encoder.
        e2: Encoder of (q, σ) pairs; without it a search is E1's.
        selector: Encoder whose vectors choose σ; e1 where None.
        k0: Chunks that E1 hands to the pool.
        k_sum: Most sessions in a signature; "auto": as many as the query's activation spreads over (`spread_sizes`).
        alpha: Weight of the signature view; the encoder's own where None.
        weights: λ_Q, λ_C, λ_D of the signature's objective.
        cover: What a session covers in the coverage term: "member", its own chunks fully and others by their cosine to
            its summary; or "semantic", all by cosine.
        cover_weight: How the K₀ chunks count there: by "e1_score" (softmax) or "uniform". The papers' form is
            "semantic" and "uniform"; in a large collection it loses the right session far more often.
        prior: β of the signature as a prior: a chunk of a session h of the signature gets β · w(h) on top of its score,
            w = `session_prior`. It needs no training and no E2; 0 leaves the papers' score as it is.
        order: How the summaries of a signature are put before E2: in order of "selection", the best session first, or
            of the "document", as the sessions lie in the mindscape.
        candidates: Second search over "all" chunks, or within the K₀ of E1 ("e1_topk", which caps recall there).
        backend: "auto", "torch" or "faiss" (see SessionIndex).
        device: Where vectors lie and signatures are chosen.
        vectors: Vectors by encoder, `{spec_hash: (n_chunks, d)}` and `{f"{spec_hash}/sessions": (n_sessions, d)}`.
            The dict given is also filled with what is encoded, so retrievers of one mindscape can share it.

    Raises:
        MiaError: If a setting is out of range or given vectors do not fit the mindscape.
    """

    def __init__(
        self,
        mindscape: Mindscape,
        e1: Encoder,
        e2: Encoder | None = None,
        selector: Encoder | None = None,
        *,
        k0: int = 50,
        k_sum: int | Literal["auto"] = 5,
        alpha: float | None = None,
        weights: Sequence[float] = DEFAULT_WEIGHTS,
        cover: str = "member",
        cover_weight: str = "e1_score",
        prior: float = 0.0,
        order: str = "selection",
        candidates: str = "all",
        backend: str = "auto",
        device: str | torch.device = "auto",
        vectors: dict[str, np.ndarray] | None = None,
    ) -> None:
        check_count(k0, "k0")
        if k_sum != "auto":
            check_count(k_sum, "k_sum")
        for setting, value, allowed in (
            ("candidates", candidates, ("all", "e1_topk")),
            ("order", order, ("selection", "document")),
            ("cover", cover, ("member", "semantic")),
            ("cover_weight", cover_weight, ("e1_score", "uniform")),
        ):
            if value not in allowed:
                raise MiaError(f"{setting}={value!r}: allowed are {', '.join(map(repr, allowed))}")
        if alpha is not None and not 0 <= alpha <= 1:
            raise MiaError(f"alpha={alpha}: allowed are 0 (query alone) to 1 (signature view alone)")
        self.e1, self.e2, self.selector = e1, e2, selector if selector is not None else e1
        self.k0, self.k_sum, self.alpha, self.candidates = k0, k_sum, alpha, candidates
        self.weights, self.cover, self.cover_weight = check_weights(weights), cover, cover_weight
        self.mindscape, self.prior, self.order, self.backend = mindscape, _checked_prior(prior), order, backend
        self.device = resolve_device("cpu" if backend == "faiss" and device == "auto" else device)
        self.vectors = vectors if vectors is not None else {}
        # A spec hash reads the weights, so it is taken once for each encoder.
        self._hashes = {id(e): e.spec_hash for e in (self.e1, self.e2, self.selector) if e is not None}
        self._indexes: dict[str, SessionIndex] = {}
        self._asked: dict[str, tuple[list[str], np.ndarray]] = {}  # the last queries an encoder was asked for
        self._books: dict[str, Signature] = {}  # global summaries made so far
        for encoder in (e for e in (self.e1, self.e2, self.selector) if e is not None):
            self._check_vectors(encoder, self._hashes[id(encoder)], len(mindscape.chunks), "chunks")
            self._check_vectors(encoder, f"{self._hashes[id(encoder)]}/sessions", len(mindscape.sessions), "sessions")

    def search(
        self,
        queries: Sequence[str],
        k: int = 10,
        signature: Mode | Given | None = None,
        encoder: str | None = None,
        prior: float | None = None,
    ) -> Results:
        """Find the k best chunks for each query.

        Args:
            queries: Non-empty strings.
            k: Chunks for each query; fewer come back where the mindscape (or K₀) holds fewer.
            signature: "coverage" (greedy on the three-term objective), "first_k", "global_summary" (the summary of the
                whole book in which E1's best chunk lies), "none", or one given signature a query (Signature, list of
                texts, one text, or None). None: "coverage" for E2, "none" for E1.
            encoder: "e1" or "e2", which makes the query vectors and searches its own chunk vectors. None: E2 where
                there is one.
            prior: β of this search; the retriever's own where None.

        Returns:
            Hits and the signatures used.

        Raises:
            MiaError: If a query is empty, k < 1, a mode is unknown, signatures are not one a query, or E1, which reads
                the query alone, is given some without a prior.
        """
        check_count(k, "k")
        prior = self.prior if prior is None else _checked_prior(prior)
        texts = _check_queries(queries)
        name, chosen = self._encoder(encoder)
        mode = signature if signature is not None else ("none" if name == "e1" else "coverage")
        first: Hits | None = None
        signatures: list[Signature] | None = None
        if not isinstance(mode, str):
            signatures = given_signatures(mode, len(texts))
        elif mode != "none":
            _check_mode(mode)
            first = self._first_search(texts)
            signatures = self._signatures(texts, first, mode)
        if name == "e1" and signatures is not None and not prior:
            raise MiaError("E1 reads the query alone: give an e2 for the signature, or prior > 0 to weigh its sessions")
        # E1 is the query-only encoder: a signature reaches it as a prior only.
        shown = [list(s.texts) for s in signatures] if signatures is not None and name == "e2" else None
        vectors = chosen.encode_queries(texts, shown, alpha=self.alpha) if shown else self._queries(chosen, texts)
        index = self._index(chosen)
        if prior > 0 and signatures is not None:
            first = first if first is not None else self._first_search(texts)
            sessions = self._session_rows(signatures)
            added = prior * self._prior_weights(texts, sessions, first).astype(np.float64)
            everywhere = self.candidates == "all"
            best = index.search(vectors, k).rows if everywhere else first.rows
            rows, bias = biased_rows(self.mindscape.session_of, sessions, added, best, closed=not everywhere)
            return Results(index.search_within(vectors, rows, k, bias), signatures)
        if self.candidates == "all":
            return Results(index.search(vectors, k), signatures)
        first = first if first is not None else self._first_search(texts)
        return Results(index.search_within(vectors, first.rows, k), signatures)

    def signatures(self, queries: Sequence[str], mode: Mode = "coverage") -> list[Signature]:
        """Choose a signature for each query.

        Args:
            queries: Non-empty strings.
            mode: "coverage", "first_k" or "global_summary" (the book is that of E1's best chunk).

        Raises:
            MiaError: If a query is empty or the mode is unknown.
        """
        _check_mode(mode)
        texts = _check_queries(queries)
        return self._signatures(texts, self._first_search(texts), mode)

    def book_signatures(self, books: Sequence[str]) -> list[Signature]:
        """Return the global summary of each book: the mindscape's, else one made by `book_summaries` with the selector.

        Args:
            books: Book ids of the mindscape.

        Raises:
            MiaError: If the mindscape has no such book.
        """
        asked = [book for book in dict.fromkeys(books) if book not in self._books]
        if asked:
            of_book: dict[str, list[Session]] = {}
            for session in self.mindscape.sessions:
                of_book.setdefault(session.book_id, []).append(session)
            unknown = next((book for book in asked if book not in of_book), None)
            if unknown is not None:
                raise MiaError(f"the mindscape has no book {unknown!r}: give the book_id of a chunk")
            stored = {book.id: [book.summary] for book in self.mindscape.books if book.summary}
            parts = [stored.get(book) or [session.summary for session in of_book[book]] for book in asked]
            texts = book_summaries(parts, [of_book[book][0].title for book in asked], self.selector)
            for book, text in zip(asked, texts, strict=True):
                self._books[book] = Signature(tuple(s.id for s in of_book[book]), (text,), mode="global_summary")
        return [self._books[book] for book in books]

    def pools(self, queries: Sequence[str]) -> list[Pool]:
        """Find the pool of each query: the sessions of its K₀ best chunks under E1.

        Raises:
            MiaError: If a query is empty.
        """
        hits = self._first_search(_check_queries(queries))
        pools = unique_in_order(torch.from_numpy(self.mindscape.session_of[hits.rows])).numpy()
        return [
            Pool(sessions[sessions >= 0], rows, scores)
            for sessions, rows, scores in zip(pools, hits.rows, hits.scores, strict=True)
        ]

    def chunk_vectors(self, encoder: Encoder) -> np.ndarray:
        """Return the encoder's vectors of all chunks, (n_chunks, d), encoding them on first use."""
        key = self._hash(encoder)
        if key not in self.vectors:
            self.vectors[key] = encoder.encode_documents([chunk.text for chunk in self.mindscape.chunks])
        return self.vectors[key]

    def session_vectors(self, encoder: Encoder) -> np.ndarray:
        """Return the encoder's vectors of all session summaries, (n_sessions, d), encoding them on first use."""
        key = f"{self._hash(encoder)}/sessions"
        if key not in self.vectors:
            self.vectors[key] = encoder.encode_documents([session.summary for session in self.mindscape.sessions])
        return self.vectors[key]

    def _first_search(self, queries: list[str]) -> Hits:
        vectors = self._queries(self.e1, queries)  # first: a query that is refused costs no encoding of chunks
        return self._index(self.e1).search(vectors, self.k0)

    def _queries(self, encoder: Encoder, queries: list[str]) -> np.ndarray:
        """Return the vectors of the queries alone; asked for the same ones again, it does not encode them again."""
        key = self._hash(encoder)
        asked = self._asked.get(key)
        if asked is None or asked[0] != queries:
            asked = self._asked[key] = (queries, encoder.encode_queries(queries))
        return asked[1]

    def _signatures(self, queries: list[str], first: Hits, mode: str) -> list[Signature]:
        if mode == "global_summary":
            return self.book_signatures([self.mindscape.chunks[row].book_id for row in first.rows[:, 0].tolist()])
        sessions = torch.from_numpy(self.mindscape.session_of[first.rows])  # (n, K₀)
        sizes = self._sizes(first, sessions)
        if mode == "first_k":
            firsts = zip(first_k(sessions, int(sizes.max())).tolist(), sizes.tolist(), strict=True)
            return [self._record([i for i in row[:k] if i >= 0], mode) for row, k in firsts]
        pools = unique_in_order(sessions).to(self.device)
        sessions = sessions.to(self.device)
        rows = torch.from_numpy(first.rows).to(self.device)
        weights = torch.from_numpy(first.scores).to(self.device).div(COVER_TEMPERATURE).softmax(dim=1)
        if self.cover_weight == "uniform":
            weights = torch.ones_like(weights)
        vectors = self._tensor(self._queries(self.selector, queries))
        chunks = self._tensor(self.chunk_vectors(self.selector))
        summaries = self._tensor(self.session_vectors(self.selector))
        per_query = rows.shape[1] * pools.shape[1] + (rows.shape[1] + pools.shape[1]) * vectors.shape[1]
        records: dict[int, Signature] = {}
        # Queries of one size together: each gets what that size, fixed, would give it.
        alike = [(k, torch.where(sizes == k)[0].to(self.device)) for k in sizes.unique().tolist()]
        for k, part in ((k, part) for k, own in alike for part in own.split(max(1, _ELEMENTS // per_query))):
            with full_float32(self.device):
                found = select_sessions(
                    vectors[part],
                    chunks[rows[part]],
                    summaries,
                    pools[part],
                    sessions[part],
                    weights[part],
                    k=k,
                    weights=self.weights,
                    cover=self.cover,
                )
            columns = [column.tolist() for column in (part, *found)]
            for query, chosen, gains, terms, value, picks in zip(*columns, strict=True):
                size = sum(session >= 0 for session in chosen)
                named = dict(zip(("relevance", "coverage", "diversity"), terms, strict=True)) | {"value": value}
                records[query] = self._record(chosen[:size], "coverage", gains[:size], named, picks[:size])
        return [records[query] for query in range(len(queries))]

    def _sizes(self, first: Hits, sessions: torch.Tensor) -> torch.Tensor:
        """Return how many sessions each query's signature may hold, (n,)."""
        if self.k_sum == "auto":
            return spread_sizes(activation_spread(torch.from_numpy(first.scores), sessions))
        return torch.full((len(sessions),), self.k_sum)

    def _session_rows(self, signatures: list[Signature]) -> np.ndarray:
        """Return the rows of the signatures' sessions, (n, K), -1 for padding and for sessions from elsewhere."""
        row_of = {session.id: row for row, session in enumerate(self.mindscape.sessions)}
        width = max((len(s.session_ids) for s in signatures), default=0)
        sessions = np.full((len(signatures), width), -1, np.int64)
        for i, signature in enumerate(signatures):
            sessions[i, : len(signature.session_ids)] = [row_of.get(s, -1) for s in signature.session_ids]
        return sessions

    def _prior_weights(self, queries: list[str], sessions: np.ndarray, first: Hits) -> np.ndarray:
        """Return `session_prior` of the sessions (n, K), -1 padded, of each query."""
        shares = torch.from_numpy(first.scores).div(COVER_TEMPERATURE).softmax(dim=1).numpy()
        same = self.mindscape.session_of[first.rows][:, None, :] == sessions[:, :, None]  # (n, K, K₀)
        activation = (same * shares[:, None, :]).sum(axis=2)
        vectors = self.session_vectors(self.selector)[sessions.clip(min=0)]
        relevance = np.einsum("nd,nkd->nk", self._queries(self.selector, queries), vectors)
        mask = torch.from_numpy(sessions >= 0)
        return session_prior(torch.from_numpy(activation), torch.from_numpy(relevance), mask).numpy()

    def _record(
        self,
        chosen: list[int],
        mode: str,
        gains: Sequence[float] = (),
        terms: dict[str, float] | None = None,
        picks: Sequence[Sequence[float]] = (),
    ) -> Signature:
        sessions = self.mindscape.sessions
        return Signature(
            session_ids=tuple(sessions[i].id for i in chosen),
            texts=tuple(sessions[i].summary for i in (chosen if self.order == "selection" else sorted(chosen))),
            gains=tuple(gains),
            terms=terms,
            mode=mode,
            pick_terms=tuple((q, c, d) for q, c, d in picks),
        )

    def _index(self, encoder: Encoder) -> SessionIndex:
        key = self._hash(encoder)
        if key not in self._indexes:
            index = SessionIndex(encoder.dim, self.backend, self.device, key)
            chunks = self.mindscape.chunks
            index.add([c.id for c in chunks], self.chunk_vectors(encoder), [c.session_id for c in chunks])
            self._indexes[key] = index
        return self._indexes[key]

    def _encoder(self, name: str | None) -> tuple[str, Encoder]:
        if name not in (None, "e1", "e2"):
            raise MiaError(f"encoder={name!r}: allowed are 'e1', 'e2'")
        if name == "e2" and self.e2 is None:
            raise MiaError("encoder='e2' but this retriever has no e2: give Retriever(..., e2=...) or use encoder='e1'")
        return ("e1", self.e1) if name == "e1" or self.e2 is None else ("e2", self.e2)

    def _hash(self, encoder: Encoder) -> str:
        return self._hashes.get(id(encoder)) or encoder.spec_hash

    def _tensor(self, vectors: np.ndarray) -> torch.Tensor:
        array = np.ascontiguousarray(vectors, dtype=np.float32)
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)

    def _check_vectors(self, encoder: Encoder, key: str, rows: int, what: str) -> None:
        given = self.vectors.get(key)
        if given is not None and given.shape != (rows, encoder.dim):
            raise MiaError(f"vectors[{key!r}] {given.shape}: the mindscape's {what} need ({rows}, {encoder.dim})")


def _checked_prior(prior: float) -> float:
    if not 0 <= prior < math.inf:
        raise MiaError(f"prior={prior}: allowed are 0 (none) and more; 0.1 is a good start")
    return prior


def _check_mode(mode: str) -> None:
    if mode not in ("coverage", "first_k", "global_summary"):
        raise MiaError(f"signature mode {mode!r}: allowed are 'coverage', 'first_k', 'global_summary' (search: 'none')")


def _check_queries(queries: Sequence[str]) -> list[str]:
    if isinstance(queries, str):
        raise MiaError("queries is one string: give a list of strings")
    texts = list(queries)
    if not texts:
        raise MiaError("queries is empty: give at least one")
    for position, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise MiaError(f"query {position} is {text!r}: give a non-empty string")
    return texts
