"""Signatures of training rows: chosen as they will be when serving, with a gold session put in where a recipe asks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from mia_serve.core import Encoder, MiaError
from mia_serve.mindscape import Mindscape
from mia_serve.mindscape.vectors import kept_vectors
from mia_serve.retriever import Retriever
from mia_serve.signature import Signature
from mia_train.rows import Row, id_key, text_key

SignatureMode = Literal["coverage", "first_k", "global_summary"]


class Asked(NamedTuple):
    """A training query: its id, its text and the ids of its positives."""

    id: str
    text: str
    positives: tuple[str, ...]


class Chosen(NamedTuple):
    """A signature, the sessions of the positives, and whether it held one before one was put in."""

    signature: Signature
    gold: frozenset[str]
    found: bool


def choose_signatures(
    retriever: Retriever, asked: Sequence[Asked], mode: SignatureMode, gold_share: float = 0.0, seed: int = 0
) -> list[Chosen]:
    """Choose the signature of each training query.

    ``coverage`` and ``first_k`` are what serving will choose for the query. The global summary is that of the first
    positive's book; serving, which knows no positives, takes the book of E1's best chunk.

    Args:
        retriever: Of the mindscape that the positives are in.
        asked: The queries.
        mode: How signatures are chosen.
        gold_share: Share of the signatures without a session of a positive that get one, in place of one of theirs.
        seed: Of the draws; together with the query's id.

    Raises:
        MiaError: ``global_summary``, and a query has no positive in the mindscape.
    """
    session_of = {chunk.id: chunk.session_id for chunk in retriever.mindscape.chunks}
    summaries = {session.id: session.summary for session in retriever.mindscape.sessions}
    if mode == "global_summary":
        book_of = {chunk.id: chunk.book_id for chunk in retriever.mindscape.chunks}
        books = [next((book_of[i] for i in query.positives if i in book_of), None) for query in asked]
        signatures = retriever.book_signatures([_known(query, book) for query, book in zip(asked, books, strict=True)])
    else:
        signatures = retriever.signatures([query.text for query in asked], mode=mode)
    chosen = []
    for query, signature in zip(asked, signatures, strict=True):
        gold = frozenset(session_of[i] for i in query.positives if i in session_of)
        found = bool(gold & set(signature.session_ids))
        if gold and not found:
            random = np.random.default_rng([seed, 1, id_key(query.id) % 2**63])
            if random.random() < gold_share:
                signature = _with_gold(signature, sorted(gold), summaries, random)
        chosen.append(Chosen(signature, gold, found))
    return chosen


def _known(query: Asked, book: str | None) -> str:
    if book is None:
        raise MiaError(f"no positive of row {query.id!r} is in the mindscape, so it has no book to sum up")
    return book


def _with_gold(
    signature: Signature, gold: Sequence[str], summaries: Mapping[str, str], random: np.random.Generator
) -> Signature:
    """Put a random gold session into a random place."""
    found, place = gold[int(random.integers(len(gold)))], int(random.integers(len(signature.session_ids)))
    ids = (*signature.session_ids[:place], found, *signature.session_ids[place + 1 :])
    return Signature(ids, tuple(summaries[session] for session in ids))


def sign_rows(
    rows: Sequence[Row],
    folder: str | Path,
    e1: Encoder,
    *,
    mode: SignatureMode = "coverage",
    gold_share: float = 0.0,
    seed: int = 0,
    k0: int = 50,
    k_sum: int = 5,
) -> list[Row]:
    """Give the rows that have no signature one out of a mindscape; the others stay as they are.

    The whole mindscape is searched, all its books, as it will be when serving.

    Args:
        rows: Training rows; the ids of their positives are chunk ids of the mindscape.
        folder: The mindscape. Vectors that it keeps of ``e1`` are used.
        e1: Makes the pools and chooses.
        mode: As in `choose_signatures`.
        gold_share: Likewise.
        seed: Likewise.
        k0: Chunks whose sessions form the pool.
        k_sum: Most sessions in a signature.

    Raises:
        FileNotFoundError: There is no such folder.
        MiaError: It is no mindscape, or positives are not in it, by id and text, though ``mode`` or ``gold_share`` need
            them.
    """
    bare = [i for i, row in enumerate(rows) if not row.signature]
    if not bare:
        return list(rows)
    mindscape = Mindscape.load(folder)
    asked = [Asked(rows[i].query_id, rows[i].query, tuple(p.id for p in rows[i].positives)) for i in bare]
    _check_positives([rows[i] for i in bare], mindscape, folder, needed=mode == "global_summary" or gold_share > 0)
    retriever = Retriever(mindscape, e1, k0=k0, k_sum=k_sum, vectors=kept_vectors(Path(folder), e1))
    chosen = choose_signatures(retriever, asked, mode, gold_share, seed)
    say_found(Path(folder).name, chosen)
    signed = list(rows)
    for i, choice in zip(bare, chosen, strict=True):
        signed[i] = replace(rows[i], signature=choice.signature.texts)
    return signed


def _check_positives(rows: Sequence[Row], mindscape: Mindscape, folder: str | Path, needed: bool) -> None:
    """Refuse rows without a positive in the mindscape where one is needed, and say how many there are elsewhere."""
    known = {chunk.id: text_key(chunk.text) for chunk in mindscape.chunks}
    # Books that are cut anew have the same ids (book:0, book:1, ...): only the text tells that it is another chunk.
    foreign = [row for row in rows if all(known.get(p.id) != text_key(p.text) for p in row.positives)]
    if not foreign:
        return
    first = foreign[0].positives[0]
    lack = f"another text for chunk {first.id!r}" if first.id in known else f"no chunk {first.id!r}"
    count = f"{len(foreign)} of {len(rows)} rows"
    if needed:
        raise MiaError(
            f"data.mindscape: {folder} has {lack}, a positive of row {foreign[0].query_id!r}; so it is with {count}. "
            "Give the mindscape that the rows were made from, or set data.signature_gold: 0 and a data.signature_mode "
            "other than global_summary"
        )
    print(f"data.mindscape: the positives of {count} are not in {folder}; is it theirs?", file=sys.stderr)


def say_found(name: str, chosen: Sequence[Chosen]) -> None:
    """Say on standard error how often signatures held a gold session before any was put in."""
    found = sum(choice.found for choice in chosen)
    print(f"{name}: the signature holds a gold session for {found} of {len(chosen)} rows", file=sys.stderr)
