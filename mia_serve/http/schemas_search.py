"""What search, signature and rerank take and give."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from mia_serve.http.schemas_collections import StoredChunk, Strict
from mia_serve.http.texts import WHOLE, ChunkText, CollectionId, Query, Summary

MOST_HITS = 1_000
MOST_SUMMARIES = 64
MOST_DOCUMENTS = 10_000

Summaries = Annotated[list[Summary], Field(max_length=MOST_SUMMARIES)]
Terms = tuple[float, float, float]


def _by_type(body: Any) -> str:
    """Tell what a value is meant to be, so that an error speaks of that alone."""
    if isinstance(body, dict | BaseModel):
        return "object"
    return "text" if isinstance(body, str) else "list" if isinstance(body, list) else "other"


Modes = Literal["none", "coverage", "first_k"]
Wanted = Annotated[
    Annotated[Modes, Tag("text")] | Annotated[Summaries, Tag("list")],
    Discriminator(
        _by_type,
        custom_error_type="signature",
        custom_error_message="give 'coverage', 'first_k', 'none', null or a list of summaries",
    ),
]

_QUERY = "Who was driving the yellow car?"


class SearchRequest(Strict):
    """A search in one collection."""

    query: Query
    k: Annotated[int, Field(ge=1, le=MOST_HITS), WHOLE] = Field(
        10, description="Hits wanted; all there are where the collection holds fewer."
    )
    target: Literal["chunks", "sessions"] = Field(
        "chunks", description="What is found. A session counts as much as its best chunk; for BM25 it is one text."
    )
    mode: Literal["dense", "lexical", "fused"] = Field(
        "dense",
        description="By vectors, by BM25 (only what shares a word with the query), or by both: z-scored over all "
        "candidates and mixed with a weight that the query's own scores give.",
    )
    signature: Wanted | None = Field(
        None,
        description="σ: chosen from what the query lights up (`coverage`, `first_k`), given as summaries, or `none`. "
        "null: `coverage` where E2, or a prior of the server, reads it, else `none`. Where E1 searches, a signature "
        "weighs the chunks of its sessions instead. `lexical` reads no signature.",
    )
    encoder: Literal["e1", "e2"] | None = Field(
        None, description="Which encoder searches; null: E2 where the server has one. `lexical` needs none."
    )
    explain: bool = Field(False, description="Add `explanation`; this scores the whole collection several times.")


class SignatureOut(BaseModel):
    """A signature σ: the summaries that a query is searched with."""

    mode: str = Field(description="`coverage`, `first_k` or `given`.")
    summaries: list[str] = Field(description="In the order in which the encoder reads them.")
    session_ids: list[str] = Field(
        description="Their sessions, best first; of given summaries those that are a session's."
    )
    gains: list[float] = Field(description="What each pick adds to the objective; empty where nothing was maximised.")
    terms: list[Terms] = Field(
        description="Each gain's three terms before their weights: relevance, coverage, diversity."
    )


class ChunkHit(StoredChunk):
    """A chunk found."""

    score: float


class SessionHit(BaseModel):
    """A session found."""

    session_id: str
    book_id: str
    title: str
    date: str
    summary: str
    score: float


class PoolSession(BaseModel):
    """A session that the query lights up under E1."""

    session_id: str
    score: float = Field(description="E1 score of its best chunk.")
    chunks: int = Field(description="Chunks of it among the K₀ best.")


class Pick(BaseModel):
    """One pick of the signature."""

    session_id: str
    gain: float
    terms: Terms = Field(description="Marginal relevance, coverage and diversity, before their weights.")


class HitBefore(BaseModel):
    """A hit for the query alone under E1."""

    id: str = Field(description="Of the chunk, or the session where sessions are searched.")
    score: float


class Scores(BaseModel):
    """What each side says of one hit; null where there is no such side."""

    e1: float | None = Field(description="Cosine of E1, for the query alone.")
    e2: float | None = Field(description="Score of E2 for (q, σ).")
    lexical: float = Field(description="BM25; 0 where no word is shared.")
    prior: float = Field(description="What the signature as a prior adds to the dense score.")


class Explanation(BaseModel):
    """How the hits came about."""

    pool: list[PoolSession] = Field(description="In E1's order.")
    picks: list[Pick] = Field(description="In the order of choice; empty where nothing was maximised.")
    hits_before: list[HitBefore] = Field(description="What E1 finds for the query alone.")
    scores: dict[str, Scores] = Field(description="By id, of the hits and of those before.")
    weights: Terms = Field(description="Weights of a gain's three terms.")
    alpha: float | None = Field(description="Weight of the lexical side where both are mixed.")


class SearchResponse(BaseModel):
    """Hits, best first, equal scores by ascending id."""

    version: int = Field(description="Version of the collection that was searched.")
    hits: list[ChunkHit] | list[SessionHit]
    signature: SignatureOut | None = Field(description="What was searched with; null for the query alone.")
    explanation: Explanation | None = None


Size = Annotated[
    Annotated[int, Field(ge=1, le=MOST_SUMMARIES, strict=True), WHOLE, Tag("other")]
    | Annotated[Literal["auto"], Tag("text")],
    Discriminator(_by_type, custom_error_type="size", custom_error_message="give a whole number or 'auto'"),
]


class SignatureRequest(Strict):
    """A query whose signature is to be chosen."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"query": _QUERY, "k_sum": 3}]})
    query: Query
    mode: Literal["coverage", "first_k"] = Field(
        "coverage", description="Greedy on the objective, or the first sessions of E1's ranking."
    )
    k_sum: Size | None = Field(
        None, description="Most sessions; `auto`: as many as the query's activation spreads over. null: the server's."
    )


class SignatureOfRequest(SignatureRequest):
    """A query, and the collection that its signature is to be chosen from."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"collection": "gatsby", "query": _QUERY, "k_sum": 3}]}
    )
    collection: CollectionId


class SignatureResponse(SignatureOut):
    """The signature of a query, and the pool it was chosen from."""

    version: int
    pool: list[PoolSession]
    weights: Terms = Field(description="Weights of a gain's three terms.")


class DocumentText(BaseModel):
    """A document as an object, as some clients send it; other keys are ignored."""

    text: ChunkText


Document = Annotated[
    Annotated[ChunkText, Tag("text")] | Annotated[DocumentText, Tag("object")],
    Discriminator(_by_type, custom_error_type="document", custom_error_message='give a string or {"text": a string}'),
]


class RerankRequest(BaseModel):
    """A query and documents, as Jina's and Cohere's clients send them; keys that are not listed are ignored."""

    model_config = ConfigDict(extra="ignore")
    model: str | None = Field(None, max_length=256, description="Ignored: the server's own encoders score.")
    query: Query
    documents: list[Document] = Field(min_length=1, max_length=MOST_DOCUMENTS)
    top_n: Annotated[int, Field(ge=1, strict=True), WHOLE] | None = Field(
        None, description="Results wanted, best first; null, or more than there are: all."
    )
    return_documents: bool | None = Field(False, strict=True, description="Whether results repeat their documents.")
    signature: Summaries | None = Field(None, description="σ: summaries that the query is read with; needs an E2.")


class RerankResult(BaseModel):
    """One document's score."""

    index: int = Field(description="Place of the document in the request, from 0.")
    relevance_score: float = Field(
        ge=-1.001, le=1.001, description="Cosine of the vectors of (q, σ) and document; equal ones by index."
    )
    document: DocumentText | None = Field(None, description="With `return_documents`.")


class RerankUsage(BaseModel):
    """What was read."""

    total_tokens: int = Field(
        description="Tokens of query and documents as the encoder reads them, special and template ones too."
    )


class RerankResponse(BaseModel):
    """Documents, best first."""

    id: str
    model: str = Field(description="The encoder that scored.")
    results: list[RerankResult]
    usage: RerankUsage


def signature_out(signature: Any) -> SignatureOut:
    """Return a `mia_serve.signature.Signature` as it goes out."""
    return SignatureOut(
        mode=signature.mode,
        summaries=list(signature.texts),
        session_ids=list(signature.session_ids),
        gains=list(signature.gains),
        terms=[tuple(terms) for terms in signature.pick_terms],
    )
