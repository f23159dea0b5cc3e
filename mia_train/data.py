"""Training rows out of a benchmark: hard negatives from E1's ranking, signatures made as they will be served."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mia_serve.core import Encoder, MiaError
from mia_serve.eval.datasets import Benchmark, Haystack, Query, load_benchmark
from mia_serve.mindscape import Chunk
from mia_serve.retriever import Retriever
from mia_train.collate import Collator
from mia_train.rows import Passage, Row, id_key, read_rows, text_key, write_rows
from mia_train.schedule import check_mixture
from mia_train.schema import Recipe, is_row_file, parse_benchmark
from mia_train.signatures import Asked, Chosen, SignatureMode, choose_signatures, say_found, sign_rows

ROWS_FILE = "rows.jsonl"
# Candidates kept a row for each negative that a step draws, so that passes over the data differ.
SPARE = 4


def prepare_rows(recipe: Recipe, output_dir: Path, device: str, reuse: bool = False) -> Path:
    """Write the rows of all of a recipe's sources to ``output_dir/rows.jsonl`` and return its path.

    Meant for rank 0 alone; the other ranks read the file. A row of a file that names no source gets the file's stem.

    Args:
        recipe: The recipe. ``data.signature_encoder`` (or the base) mines the rows of benchmarks, and chooses the
            signatures of rows that bring none: out of the benchmark, or out of ``data.mindscape``.
        output_dir: Folder of the run.
        device: Where the mining encoder runs.
        reuse: Keep the file if it is there (a resumed run must see the same rows).

    Raises:
        MiaError: A file, a row or the mindscape is wrong, or does not fit the others.
    """
    path = output_dir / ROWS_FILE
    if reuse and path.is_file():
        return path
    data = recipe.data
    signs = data.view == "signature"
    loaded: list[Encoder] = []

    def e1() -> Encoder:
        if not loaded:
            loaded.append(Encoder.load(data.signature_encoder or recipe.model.base, device=device))
        return loaded[0]

    rows: list[Row] = []
    for source in data.train:
        if is_row_file(source):
            own = [replace(row, source=row.source or Path(source).stem) for row in read_rows([source])]
            if signs and data.mindscape and not all(row.signature for row in own):
                own = sign_rows(
                    own,
                    data.mindscape,
                    e1(),
                    mode=data.signature_mode,
                    gold_share=data.signature_gold,
                    seed=data.seed,
                    k_sum=data.k_sum,
                )
        else:
            own = build_rows(
                open_benchmark(source),
                e1() if signs or data.hard_negatives > 0 else None,
                signature_mode=data.signature_mode if signs else None,
                signature_gold=data.signature_gold,
                k_sum=data.k_sum,
                hard_negatives=data.hard_negatives,
                simple_negatives=data.simple_negatives,
                seed=data.seed,
            )
        rows.extend(own)
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
    signature_mode: SignatureMode | None = None,
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
        signature_mode: See `choose_signatures`; None leaves the rows without signatures.
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
    signed: list[Chosen] = []
    for haystack in benchmark.haystacks:
        texts = [query.text for query in haystack.queries]
        ranked: list[list[int]] = [[] for _ in texts]
        chosen: Sequence[Chosen | None] = [None] * len(texts)
        if e1 is not None:
            retriever = Retriever(haystack.mindscape, e1, k0=k0, k_sum=k_sum)
            ranked = [[int(r) for r in pool.rows if r >= 0] for pool in retriever.pools(texts)]
            if signature_mode is not None:
                asked = [Asked(query.id, query.text, query.gold) for query in haystack.queries]
                chosen = choose_signatures(retriever, asked, signature_mode, signature_gold, seed)
        miner = _Miner(haystack, hard_negatives, simple_negatives, seed)
        for query, order, choice in zip(haystack.queries, ranked, chosen, strict=True):
            rows.append(miner.row(query, order, choice, benchmark.name))
            signed += [choice] if choice is not None else []
    if signed:
        say_found(benchmark.name, signed)
    return rows


class _Miner:
    """Draw the negatives of one haystack's questions."""

    def __init__(self, haystack: Haystack, hard: int, simple: int, seed: int) -> None:
        self.hard, self.simple, self.seed = hard, simple, seed
        self.chunks = haystack.mindscape.chunks
        self.row_of = {chunk.id: row for row, chunk in enumerate(self.chunks)}
        self.sessions = {session.id: session.chunk_ids for session in haystack.mindscape.sessions}
        self.by_book: dict[str, list[int]] = {}
        for row, chunk in enumerate(self.chunks):
            self.by_book.setdefault(chunk.book_id, []).append(row)
        gold = {chunk_id for query in haystack.queries for chunk_id in query.gold}
        # Some questions of a book are asked twice, with other gold: it is no negative of either.
        self.same: dict[tuple[str, int], list[Chunk]] = {}
        for query in haystack.queries:
            found = self.same.setdefault((query.group, text_key(query.text)), [])
            found += [self.chunks[self.row_of[chunk_id]] for chunk_id in query.gold]
        self.books = {self.chunks[self.row_of[chunk_id]].book_id for chunk_id in gold}

    def row(self, query: Query, ranked: list[int], chosen: Chosen | None, source: str) -> Row:
        """Return the training row of a question; ``ranked`` are chunk rows, best first."""
        random = np.random.default_rng([self.seed, id_key(query.id) % 2**63])
        gold = [self.chunks[self.row_of[chunk_id]] for chunk_id in query.gold]
        known = self.same[query.group, text_key(query.text)]
        taken_ids, taken_texts = {c.id for c in known}, {text_key(c.text) for c in known}

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
        if chosen is not None:
            negatives += take(self._wrong_sessions(chosen, ranked, random), keep // 2, "signature")
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
            signature=chosen.signature.texts if chosen is not None else None,
            group=query.group,
            source=source,
        )

    def _wrong_sessions(self, chosen: Chosen, ranked: list[int], random: np.random.Generator) -> list[int]:
        """Return chunk rows of the signature's sessions without gold, those that E1 ranked first."""
        wrong = [session for session in chosen.signature.session_ids if session not in chosen.gold]
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
    if short == len(rows):
        most = max(len(row.negatives) for row in rows)
        raise MiaError(
            f"data.hard_negatives + data.simple_negatives is {wanted}, but no row brings more than {most} negatives; "
            "lower them to what the rows have, or mine more"
        )
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
    wide = [width for width in recipe.loss.matryoshka if width >= encoder.dim]
    if wide:
        raise MiaError(f"loss.matryoshka: {wide[0]} is not below the {encoder.dim} that {recipe.model.base} is wide")
    if recipe.loss.distill is not None:
        _check_teacher(rows)
    if recipe.data.mixture is not None:
        check_mixture(rows, recipe.data.mixture, recipe.training.batch_size * processes)
    show = recipe.data.view == "signature"
    for row in rows:
        try:
            encoder.tokenise_query(row.query, list(row.signature) if show and row.signature else None)
        except MiaError as error:
            raise MiaError(f"row {row.query_id!r}: {error}") from None
    unsigned = sum(not row.signature for row in rows)
    if show and unsigned == len(rows):
        raise MiaError(
            "data.view: signature, but no row has a signature; name the mindscape that the rows were made from in "
            "data.mindscape, give rows with signatures, or take view: query"
        )
    if show and unsigned:
        print(f"{unsigned} of {len(rows)} rows have no signature and train the query alone", file=sys.stderr)


def _check_teacher(rows: list[Row]) -> None:
    """Refuse distillation without teacher scores, and say how many rows it leaves out."""
    taught = sum(
        any(p.score is not None for p in row.positives) and any(p.score is not None for p in row.negatives)
        for row in rows
    )
    if taught == 0:
        raise MiaError(
            "loss.distill: no row has teacher scores of a positive and a negative; write them with "
            "`mia-train mine --cross-encoder MODEL` or `--teacher ENCODER`, or leave loss.distill out"
        )
    if taught < len(rows):
        print(f"{len(rows) - taught} of {len(rows)} rows have no teacher scores and do not distil", file=sys.stderr)


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
        group_tokens=recipe.training.mini_batch_tokens,
        seed=data.seed,
    )
