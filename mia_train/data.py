"""Training rows out of a benchmark: hard negatives from E1's ranking, signatures made as they will be served."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from mia_serve.core import Encoder, MiaError
from mia_serve.eval.datasets import Benchmark, Haystack, load_benchmark
from mia_serve.mindscape import Chunk
from mia_serve.retriever import Retriever
from mia_serve.signature import Signature
from mia_train.collate import Collator
from mia_train.rows import Passage, Row, id_key, read_rows, text_key, write_rows
from mia_train.schema import Recipe, is_row_file, parse_benchmark

ROWS_FILE = "rows.jsonl"
# Candidates kept a row for each negative that a step draws, so that passes over the data differ.
SPARE = 4


def prepare_rows(recipe: Recipe, output_dir: Path, device: str, reuse: bool = False) -> Path:
    """Write the rows of all of a recipe's sources to ``output_dir/rows.jsonl`` and return its path.

    Meant for rank 0 alone; the other ranks read the file.

    Args:
        recipe: The recipe; a benchmark's rows are mined with ``data.signature_encoder`` (or the base).
        output_dir: Folder of the run.
        device: Where the mining encoder runs.
        reuse: Keep the file if it is there (a resumed run must see the same rows).
    """
    path = output_dir / ROWS_FILE
    if reuse and path.is_file():
        return path
    data = recipe.data
    rows: list[Row] = []
    encoder: Encoder | None = None
    for source in data.train:
        if is_row_file(source):
            rows.extend(read_rows([source]))
            continue
        if encoder is None and (data.view == "signature" or data.hard_negatives > 0):
            encoder = Encoder.load(data.signature_encoder or recipe.model.base, device=device)
        rows.extend(
            build_rows(
                open_benchmark(source),
                encoder,
                signature_mode=data.signature_mode if data.view == "signature" else None,
                signature_gold=data.signature_gold,
                k_sum=data.k_sum,
                hard_negatives=data.hard_negatives,
                simple_negatives=data.simple_negatives,
                seed=data.seed,
            )
        )
    write_rows(path, rows)
    return path


def open_benchmark(reference: str) -> Benchmark:
    """Load the benchmark that a recipe names as ``name:split`` or ``name:split:series``."""
    name, split, series = parse_benchmark(reference)
    return load_benchmark(name, split, series)


def build_rows(
    benchmark: Benchmark,
    e1: Encoder | None,
    *,
    signature_mode: Literal["coverage", "first_k"] | None = None,
    signature_gold: float = 0.0,
    hard_negatives: int = 5,
    simple_negatives: int = 5,
    seed: int = 0,
    k0: int = 50,
    k_sum: int = 5,
) -> list[Row]:
    """Turn the questions of a benchmark into training rows.

    Negatives come only from books (meetings, conversations) in which some question of this split has its answer: the
    passages kept for evaluation would otherwise be seen as negatives and never as positives. Nothing with the id or the
    normalised text of a gold chunk is a negative.

    Args:
        benchmark: Haystacks and their questions.
        e1: Ranks the chunks and makes the pools, as it will when serving; None where neither hard negatives nor
            signatures are asked for, and nothing needs encoding.
        signature_mode: ``coverage`` or ``first_k``; None leaves the rows without signatures.
        signature_gold: Share of the signatures without a gold session that get one, in place of one of theirs.
        hard_negatives: Hard negatives that a step will draw; more are kept. With signatures half are the best-ranked
            chunks, half those of the signature's wrong sessions.
        simple_negatives: Likewise, drawn evenly from the books of the gold chunks.
        seed: Of the draws; together with the query's id.
        k0: Chunks whose sessions form the pool.
        k_sum: Most sessions in a signature.
    """
    if e1 is None and (hard_negatives > 0 or signature_mode is not None):
        raise MiaError("hard negatives and signatures need an encoder (e1) that ranks the chunks")
    rows: list[Row] = []
    found = total = 0
    for haystack in benchmark.haystacks:
        texts = [query.text for query in haystack.queries]
        ranked: list[list[int]] = [[] for _ in texts]
        signatures: Sequence[Signature | None] = [None] * len(texts)
        if e1 is not None:
            retriever = Retriever(haystack.mindscape, e1, k0=k0, k_sum=k_sum)
            ranked = [[int(r) for r in pool.rows if r >= 0] for pool in retriever.pools(texts)]
            if signature_mode is not None:
                signatures = retriever.signatures(texts, mode=signature_mode)
        miner = _Miner(haystack, hard_negatives, simple_negatives, seed)
        for i, signature in enumerate(signatures):
            if signature is not None:
                total += 1
                found += bool(miner.gold_sessions(i) & set(signature.session_ids))
                signature = miner.with_gold(i, signature, signature_gold)
            rows.append(miner.row(i, ranked[i], signature, benchmark.name))
    if total:
        print(f"{benchmark.name}: the signature holds a gold session for {found} of {total} rows", file=sys.stderr)
    return rows


class _Miner:
    """Draw the negatives of one haystack's questions."""

    def __init__(self, haystack: Haystack, hard: int, simple: int, seed: int) -> None:
        self.queries, self.hard, self.simple, self.seed = haystack.queries, hard, simple, seed
        self.chunks = haystack.mindscape.chunks
        self.row_of = {chunk.id: row for row, chunk in enumerate(self.chunks)}
        self.sessions = {session.id: session.chunk_ids for session in haystack.mindscape.sessions}
        self.summaries = {session.id: session.summary for session in haystack.mindscape.sessions}
        self.by_book: dict[str, list[int]] = {}
        for row, chunk in enumerate(self.chunks):
            self.by_book.setdefault(chunk.book_id, []).append(row)
        gold = {chunk_id for query in haystack.queries for chunk_id in query.gold}
        self.books = {self.chunks[self.row_of[chunk_id]].book_id for chunk_id in gold}

    def gold_sessions(self, i: int) -> set[str]:
        """Return the ids of the sessions that hold a gold chunk of a question."""
        return {self.chunks[self.row_of[chunk_id]].session_id for chunk_id in self.queries[i].gold}

    def with_gold(self, i: int, signature: Signature, share: float) -> Signature:
        """Return the signature with a gold session in place of one of its own, for a share of those that have none."""
        gold = sorted(self.gold_sessions(i))
        random = np.random.default_rng([self.seed, 1, id_key(self.queries[i].id) % 2**63])
        if set(gold) & set(signature.session_ids) or random.random() >= share:
            return signature
        found, place = gold[int(random.integers(len(gold)))], int(random.integers(len(signature.session_ids)))
        ids = (*signature.session_ids[:place], found, *signature.session_ids[place + 1 :])
        return Signature(ids, tuple(self.summaries[session] for session in ids))

    def row(self, i: int, ranked: list[int], signature: Signature | None, source: str) -> Row:
        """Return the training row of question ``i``; ``ranked`` are chunk rows, best first."""
        query = self.queries[i]
        random = np.random.default_rng([self.seed, id_key(query.id) % 2**63])
        gold = [self.chunks[self.row_of[chunk_id]] for chunk_id in query.gold]
        taken_ids, taken_texts = {c.id for c in gold}, {text_key(c.text) for c in gold}

        def take(candidates: Sequence[int], count: int, kind: str) -> list[Passage]:
            chosen: list[Passage] = []
            for row in candidates:
                chunk = self.chunks[row]
                if len(chosen) == count:
                    break
                fresh = chunk.id not in taken_ids and text_key(chunk.text) not in taken_texts
                if fresh and chunk.book_id in self.books:
                    taken_ids.add(chunk.id)
                    taken_texts.add(text_key(chunk.text))
                    chosen.append(Passage(chunk.id, chunk.text, kind))
            return chosen

        keep = SPARE * self.hard
        negatives: list[Passage] = []
        if signature is not None:
            wrong = self._wrong_sessions(signature, self.gold_sessions(i), ranked, random)
            negatives += take(wrong, keep // 2, "signature")
        negatives += take(ranked, keep - len(negatives), "hard")
        same_book = [row for book in sorted({c.book_id for c in gold}) for row in self.by_book[book]]
        negatives += take(_shuffled(same_book, random), SPARE * self.simple, "simple")
        if len(negatives) < self.hard + self.simple:  # a short book: take from the others
            missing = self.hard + self.simple - len(negatives)
            negatives += take(_shuffled(range(len(self.chunks)), random), missing, "simple")
        return Row(
            query_id=query.id,
            query=query.text,
            positives=tuple(_positive(chunk) for chunk in gold),
            negatives=tuple(negatives),
            signature=signature.texts if signature is not None else None,
            group=query.group,
            source=source,
        )

    def _wrong_sessions(
        self, signature: Signature, gold: set[str], ranked: list[int], random: np.random.Generator
    ) -> list[int]:
        """Return chunk rows of the signature's sessions without gold, those that E1 ranked first."""
        wrong = [s for s in signature.session_ids if s not in gold]
        member = {self.row_of[chunk_id] for s in wrong for chunk_id in self.sessions[s]}
        first = [row for row in ranked if row in member]
        return first + _shuffled(sorted(member - set(first)), random)


def _positive(chunk: Chunk) -> Passage:
    return Passage(chunk.id, chunk.text)


def _shuffled(rows: Sequence[int], random: np.random.Generator) -> list[int]:
    return [rows[i] for i in random.permutation(len(rows))]


def check_rows(rows: list[Row], recipe: Recipe, encoder: Encoder, processes: int = 1) -> None:
    """Find before the first step whatever would stop a later one, or let it learn nothing.

    Raises:
        MiaError: A query or signature does not fit, a row lacks the negatives or nodes that the loss needs.
    """
    own = recipe.loss.negatives == "own"
    alone = own or recipe.training.batch_size * processes == 1  # a query meets the documents of its own row only
    bare = [row.query_id for row in rows if recipe.negatives_per_row == 0 or not _has_negative(row)]
    if alone and bare:
        raise MiaError(
            f"row {bare[0]!r} has no negatives (its own positives do not count) and needs at least 2 candidates per "
            "query; mine some, or set loss.negatives: in_batch and training.batch_size above 1"
        )
    if len(bare) == len(rows) and len({text_key(p.text) for row in rows for p in row.positives}) == 1:
        raise MiaError(
            f"row {bare[0]!r} has no negatives and no other row has another positive, but a query needs at least 2 "
            "candidates; mine negatives, or give more rows"
        )
    wanted = recipe.negatives_per_row
    short = sum(len(row.negatives) < wanted for row in rows)
    if short:
        print(
            f"{short} of {len(rows)} rows bring fewer than {wanted} negatives; they train with what they have",
            file=sys.stderr,
        )
    if recipe.loss.beta is not None:
        if not encoder.text.has_node_token:
            raise MiaError(f"loss.beta: {recipe.model.base} has no node token; leave beta out, or take a causal base")
        if not any(row.nodes for row in rows):
            raise MiaError("loss.beta: no row has 'nodes'; leave beta out, or give rows with nodes")
        lacking = next((r.query_id for r in rows if own and r.nodes and not r.nodes.negatives), None)
        if lacking is not None:
            raise MiaError(f"row {lacking!r} has nodes without negatives; give some, or set loss.negatives: in_batch")
    show = recipe.data.view == "signature"
    for row in rows:
        try:
            encoder.tokenise_query(row.query, list(row.signature) if show and row.signature else None)
        except MiaError as error:
            raise MiaError(f"row {row.query_id!r}: {error}") from None
    if show and not any(row.signature for row in rows):
        raise MiaError("data.view: signature, but no row has a signature; take view: query, or rows with signatures")


def _has_negative(row: Row) -> bool:
    """Return whether some negative of a row would not be masked as one of its positives."""
    ids, texts = {p.id for p in row.positives}, {text_key(p.text) for p in row.positives}
    return any(p.id not in ids and text_key(p.text) not in texts for p in row.negatives)


def make_collator(recipe: Recipe, encoder: Encoder, rows: list[Row], groups: int = 4) -> Collator:
    """Return the collator that a recipe describes."""
    data = recipe.data
    return Collator(
        encoder,
        rows,
        hard_negatives=data.hard_negatives,
        simple_negatives=data.simple_negatives,
        use_signatures=data.view == "signature",
        signature_dropout=data.signature_dropout,
        signature_noise=data.signature_noise,
        nodes=recipe.loss.beta is not None,
        groups=groups,
        seed=data.seed,
    )
