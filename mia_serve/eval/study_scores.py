"""Score every session of its conversation for every question, lexically and densely; nothing is ranked here.

Scores are (Q, S) arrays, Q questions and S sessions of the largest conversation; shorter conversations are padded, and
``present`` says where a session is. Columns are sessions in order, so that "ties to the lower column" is "to the
earlier session".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from mia_serve.eval.conversations import ChatSession, ConversationBenchmark
from mia_serve.index import SessionIndex
from mia_serve.index.pooling import Pooling
from mia_serve.lexical import BM25Index

#: What a session is indexed by: its turns, and what a language model wrote about it.
Part = Literal["turns", "summary", "facts"]

ANALYZER = "study"
K1, B = 1.5, 0.75
TOPK, BETA = 3, 10.0
#: Cosine given to a session that has no vector, below any that a vector can get (the study's convention).
NO_VECTOR = -9.0

#: Poolings of a session's turn scores, as the tables name them -> as the index does. ``lse10`` is made from ``lme10``.
POOLINGS: dict[str, Pooling] = {"early": "early", "max": "max", "top3": "topk", "lme10": "lme"}


class TextEncoder(Protocol):
    """What the study asks of an encoder: unit rows (n, d) float32. ``mia_serve.core.Encoder`` is one."""

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Encode questions."""

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        """Encode turns and what was written about sessions."""


@dataclass(frozen=True)
class Layout:
    """Where the sessions are: ``present`` and ``gold`` are (Q, S) bool, ``turns`` (Q, S) counts."""

    present: np.ndarray
    gold: np.ndarray
    turns: np.ndarray

    @property
    def valued(self) -> np.ndarray:
        """Tell which questions have a Hit@1, (Q,) bool: the first of one session is right by construction."""
        return self.present.sum(axis=1) > 1

    @classmethod
    def of(cls, benchmark: ConversationBenchmark) -> Layout:
        """Lay out a benchmark."""
        widest = max(len(benchmark.conversations[q.conversation].sessions) for q in benchmark.questions)
        shape = (len(benchmark.questions), widest)
        present, gold = np.zeros(shape, bool), np.zeros(shape, bool)
        turns = np.zeros(shape, np.int64)
        for row, question in enumerate(benchmark.questions):
            sessions = benchmark.conversations[question.conversation].sessions
            present[row, : len(sessions)] = True
            gold[row, list(question.gold)] = True
            turns[row, : len(sessions)] = [len(session.turns) for session in sessions]
        return cls(present, gold, turns)


class DenseScores(NamedTuple):
    """Dense scores by pooling, and the position of each session's best turn, (Q, S) int64, -1 where it has none."""

    by_pooling: dict[str, np.ndarray]
    best_turn: np.ndarray


def texts_of(session: ChatSession, parts: Sequence[Part]) -> list[str]:
    """Return the texts of a session that some parts of it are indexed by."""
    known = {"turns": session.turns, "summary": (session.summary,) if session.summary else (), "facts": session.facts}
    return [text for part in parts for text in known[part]]


def lexical_scores(benchmark: ConversationBenchmark, layout: Layout, parts: Sequence[Part] = ("turns",)) -> np.ndarray:
    """Score sessions by BM25, (Q, S): a document is the texts of a session on lines, statistics are its conversation's.

    Args:
        benchmark: Conversations and questions.
        layout: That of the benchmark.
        parts: What the document holds.
    """
    scores = np.zeros(layout.present.shape)
    for rows, conversation in _by_conversation(benchmark):
        sessions = benchmark.conversations[conversation].sessions
        documents = ["\n".join(texts_of(session, parts)) for session in sessions]
        names = [_session_id(position) for position in range(len(sessions))]
        index = BM25Index(names, documents, ANALYZER, K1, B)
        scores[rows, : len(sessions)] = index.scores([benchmark.questions[row].text for row in rows])
    return scores


class TextVectors:
    """Vectors of texts that many sessions may share: each is encoded once."""

    def __init__(self, encode: Callable[[list[str]], np.ndarray], texts: Sequence[str]) -> None:
        unique = list(dict.fromkeys(texts))
        self._rows = {text: row for row, text in enumerate(unique)}
        self._vectors = encode(unique)

    @property
    def dim(self) -> int:
        """Return the width of the vectors."""
        return self._vectors.shape[1]

    def of(self, texts: Sequence[str]) -> np.ndarray:
        """Look texts up, (n, d)."""
        return self._vectors[[self._rows[text] for text in texts]]


def dense_scores(
    benchmark: ConversationBenchmark,
    layout: Layout,
    queries: TextVectors,
    documents: TextVectors,
    *,
    parts: Sequence[Part] = ("turns",),
    poolings: Sequence[str] = ("max",),
    best_turns: bool = False,
    device: str = "cpu",
) -> DenseScores:
    """Score sessions by their vectors.

    Args:
        benchmark: Conversations and questions.
        layout: That of the benchmark.
        queries: Vectors of the questions.
        documents: Vectors of the texts of all ``parts``.
        parts: Which texts of a session have vectors.
        poolings: Names of ``POOLINGS``, or ``lse10``, the study's plain log-sum-exp over a session's turns: it exceeds
            ``lme10`` by ln(T) / beta and so favours long sessions. It is here to be seen, no index offers it.
        best_turns: Find each session's best turn too (parts are the turns then).
        device: Where to search.
    """
    wanted = dict.fromkeys("lme10" if name == "lse10" else name for name in poolings)
    found = {name: np.full(layout.present.shape, NO_VECTOR) for name in wanted}
    best = np.full(layout.present.shape, -1, np.int64)
    for rows, conversation in _by_conversation(benchmark):
        index = _index(benchmark.conversations[conversation].sessions, documents, parts, device)
        if not len(index):
            continue
        vectors = queries.of([benchmark.questions[row].text for row in rows])
        for name in wanted:
            given = index.score_sessions(vectors, pooling=POOLINGS[name], topk=TOPK, beta=BETA)
            found[name][np.ix_(rows, [int(session) for session in given.ids])] = given.scores
        if best_turns:
            hits = index.search_sessions(vectors, len(index), pooling="max")
            for row, sessions, chunks in zip(rows, hits.ids, hits.best_chunk, strict=True):
                best[row, [int(session) for session in sessions]] = [int(chunk.partition(":")[2]) for chunk in chunks]
    if "lse10" in poolings:
        texts = _text_counts(benchmark, layout, parts)
        found["lse10"] = np.where(texts > 0, found["lme10"] + np.log(np.maximum(texts, 1)) / BETA, NO_VECTOR)
    return DenseScores({name: found[name] for name in poolings}, best)


def _index(sessions: Sequence[ChatSession], documents: TextVectors, parts: Sequence[Part], device: str) -> SessionIndex:
    index = SessionIndex(documents.dim, device=device)
    texts = [texts_of(session, parts) for session in sessions]
    chunks = [f"{_session_id(s)}:{t:06d}" for s, own in enumerate(texts) for t in range(len(own))]
    owners = [_session_id(s) for s, own in enumerate(texts) for _ in own]
    if chunks:
        index.add(chunks, documents.of([text for own in texts for text in own]), owners)
    return index


def _text_counts(benchmark: ConversationBenchmark, layout: Layout, parts: Sequence[Part]) -> np.ndarray:
    counts = np.zeros(layout.present.shape)
    for rows, conversation in _by_conversation(benchmark):
        sessions = benchmark.conversations[conversation].sessions
        counts[rows, : len(sessions)] = [len(texts_of(session, parts)) for session in sessions]
    return counts


def _session_id(position: int) -> str:
    """Name a session by its position, so that the order of ids is that of the conversation."""
    return f"{position:06d}"


def _by_conversation(benchmark: ConversationBenchmark) -> list[tuple[list[int], int]]:
    rows: dict[int, list[int]] = {}
    for row, question in enumerate(benchmark.questions):
        rows.setdefault(question.conversation, []).append(row)
    return [(own, conversation) for conversation, own in rows.items()]
