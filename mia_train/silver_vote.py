"""Candidates for silver evidence: three queries a question, and a vote over what they retrieve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from mia_serve.core import Encoder
from mia_serve.index import SessionIndex
from mia_train.silver_input import Question, Unit


@dataclass(frozen=True)
class Found:
    """Ids found for one question: chunks and nodes, best first."""

    chunks: tuple[str, ...]
    nodes: tuple[str, ...] = ()


def vote(lists: Sequence[Sequence[str]], size: int) -> list[str]:
    """Return the first ids by (number of lists that hold it, mean reciprocal rank, id)."""
    ranks: dict[str, list[float]] = {}
    for ranked in lists:
        for rank, unit_id in enumerate(ranked, start=1):
            ranks.setdefault(unit_id, []).append(1 / rank)
    # fsum does not depend on the order of the lists, so that ranks 1, 2, 3 and 3, 2, 1 tie.
    order = sorted(ranks, key=lambda unit_id: (-len(ranks[unit_id]), -fsum(ranks[unit_id]), unit_id))
    return order[:size]


def find_candidates(
    questions: Sequence[Question],
    chunks: Sequence[Unit],
    encoder: Encoder,
    *,
    nodes: Sequence[Unit] = (),
    vectors: np.ndarray | None = None,
    top_k: int = 10,
    size: int = 10,
) -> dict[str, Found]:
    """Retrieve with {q, q + a, a} and vote; a question with a book sees that book only.

    All queries of all questions are encoded together, and so are the units.

    Args:
        questions: Questions with answers.
        chunks: All chunks.
        encoder: Makes the vectors.
        nodes: Entity nodes, if any.
        vectors: The encoder's vectors of the chunks, (n_chunks, d); encoded where None.
        top_k: Units that each query retrieves.
        size: Units that the vote keeps.

    Returns:
        Candidates by question id, best first.
    """
    if not questions:
        return {}
    asked = [text for q in questions for text in (q.text, f"{q.text} {q.answer}", q.answer)]
    # The answers ("yes") repeat. They only vote, so one that is too long for the encoder is cut.
    distinct = list(dict.fromkeys(asked))
    place = {text: row for row, text in enumerate(distinct)}
    queries = encoder.encode_queries(distinct, truncate=True)[[place[text] for text in asked]]
    of_chunks = _voted(questions, queries, chunks, vectors, encoder, top_k, size)
    of_nodes = _voted(questions, queries, nodes, None, encoder, top_k, size) if nodes else {}
    return {q.id: Found(of_chunks[q.id], of_nodes.get(q.id, ())) for q in questions}


def _voted(
    questions: Sequence[Question],
    queries: np.ndarray,  # (3 n, d)
    units: Sequence[Unit],
    vectors: np.ndarray | None,
    encoder: Encoder,
    top_k: int,
    size: int,
) -> dict[str, tuple[str, ...]]:
    if vectors is None:
        vectors = encoder.encode_documents([unit.text for unit in units])
    rows_of = rows_of_books(units)
    asking: dict[str | None, list[int]] = {}
    for i, question in enumerate(questions):
        asking.setdefault(question.book, []).append(i)
    found: dict[str, tuple[str, ...]] = {}
    for book, members in asking.items():
        rows = list(range(len(units))) if book is None else rows_of.get(book, []) + rows_of.get(None, [])
        if not rows:
            found |= {questions[i].id: () for i in members}
            continue
        ids = [units[row].id for row in rows]
        index = SessionIndex(encoder.dim, device=encoder.device)
        index.add(ids, vectors[rows], ids)
        hits = index.search(np.concatenate([queries[3 * i : 3 * i + 3] for i in members]), top_k).ids
        for j, i in enumerate(members):
            found[questions[i].id] = tuple(vote(hits[3 * j : 3 * j + 3], size))
    return found


def rows_of_books(units: Sequence[Unit]) -> dict[str | None, list[int]]:
    """Return the rows of each book; None has those of every book."""
    rows_of: dict[str | None, list[int]] = {}
    for row, unit in enumerate(units):
        rows_of.setdefault(unit.book, []).append(row)
    return rows_of
