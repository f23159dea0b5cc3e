"""Measure what each step of the retrieval path is worth: base, E1, and E2 with different signatures.

All rows rank the same chunks for the same questions, so their differences are paired. E2's controls are the same
E2 with no signature, with the plain First-K signature, and with the coverage signature of another question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.eval.metrics import MAX_CUTOFF, QueryScores, chance_scores, refused_metrics, score_queries
from mia_serve.eval.report import ROW_LABELS, QueryResult, RetrievalReport, encoder_facts, summarise_rows
from mia_serve.eval.versions import package_versions
from mia_serve.retriever import Retriever
from mia_serve.signature import DEFAULT_WEIGHTS, Signature

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.eval.datasets import Benchmark, Haystack, Query

#: Ranks kept of each ranking, hence the depth of MRR.
DEPTH = 100
#: Rows that are run where none are named: the others tell E2 the answer, or are for an E2 of another kind.
DEFAULT_ROWS = tuple(row for row in ROW_LABELS if row not in ("oracle", "global_summary"))

Progress = Callable[[str], None]


@dataclass
class _Pass:
    """One haystack with its retrievers, and what they found for its questions."""

    haystack: Haystack
    retriever: Retriever | None
    base_retriever: Retriever | None
    rankings: dict[str, list[list[str]]] = field(default_factory=dict)
    signatures: dict[str, list[Signature]] = field(default_factory=dict)
    pools: list[frozenset[int]] = field(default_factory=list)


def evaluate_retrieval(
    benchmark: Benchmark,
    *,
    base: Encoder | None,
    e1: Encoder | None = None,
    e2: Encoder | None = None,
    selector: Encoder | None = None,
    k0: int = 50,
    k_sum: int = 5,
    alpha: float | None = None,
    cover: str = "member",
    cover_weight: str = "e1_score",
    prior: float = 0.1,
    candidates: Literal["all", "e1_topk"] = "all",
    backend: str = "auto",
    seed: int = 0,
    rows: Sequence[str] | None = None,
    n_boot: int = 10_000,
    progress: Progress | None = None,
) -> RetrievalReport:
    """Rank every question of a benchmark with every row's retriever and summarise with cluster intervals.

    Args:
        benchmark: Haystacks with their questions; a question's group is the cluster that is resampled.
        base: Untrained encoder; its row is absent when None.
        e1: Query-only retriever; makes the pool (``base`` does where it is None).
        e2: Retriever of (query, signature) pairs; its rows are absent when None.
        selector: Encoder that chooses the signature; the first-stage encoder where None.
        k0: Chunks whose sessions form the pool, K_0.
        k_sum: Sessions in a signature, K_sum.
        alpha: Weight of the signature-aware view; that of E2's spec where None.
        cover: What a session covers, ``member`` or ``semantic`` (see `Retriever`).
        cover_weight: How the pool's chunks count, by ``e1_score`` or ``uniform`` (see `Retriever`).
        prior: β of the rows in which the signature is a prior (see `Retriever`).
        candidates: ``all`` chunks of the haystack, or only E1's K_0 best, ranked by E2.
        backend: Index backend, ``auto``, ``torch`` or ``faiss``.
        seed: Of the shuffled control and of the resamples.
        rows: Keys of ``ROW_LABELS`` to run; None: all but ``global_summary`` (E2 with the summary of the book in which
            E1's best chunk lies) and the ``oracle``, an upper bound that sees the gold session.
        n_boot: Resamples for the intervals.
        progress: Called with a line at each step.

    Raises:
        MiaError: No question, an unknown row, no first-stage encoder, a gold id outside its haystack, or haystacks
            that are all too small for the cutoffs.
    """
    started = time.perf_counter()
    say = progress or (lambda line: None)
    wanted = _wanted_rows(rows, base, e1, e2)
    _check_benchmark(benchmark)
    passes = []
    for number, haystack in enumerate(benchmark.haystacks, 1):
        say(f"{haystack.id} ({number} of {len(benchmark.haystacks)}): {len(haystack.mindscape.chunks)} chunks")
        first = e1 or base
        assert first is not None  # _wanted_rows
        options: dict[str, Any] = {"k0": k0, "k_sum": k_sum, "alpha": alpha, "candidates": candidates}
        options |= {"cover": cover, "cover_weight": cover_weight}
        # FAISS lives on the CPU; everything else stays where the encoder is. Retrievers of a haystack share vectors.
        options |= {"backend": backend, "device": "auto" if backend == "faiss" else first.device, "vectors": {}}
        needs_main = bool(wanted - {"base"}) or e1 is None
        main = Retriever(haystack.mindscape, first, e2, selector, **options) if needs_main else None
        plain = None
        if "base" in wanted and base is not None:
            plain = main if e1 is None else Retriever(haystack.mindscape, base, **options)
        one = _Pass(haystack, main, plain)
        _run_rows(one, wanted, prior)
        passes.append(one)
    donors = None
    if "shuffled" in wanted:
        say("shuffled control")
        donors = shuffle_donors([query.group for query in _questions(passes)], seed)
        _run_shuffled(passes, donors)
        if donors is None:
            wanted = wanted - {"shuffled"}
    results = _score(passes, [row for row in ROW_LABELS if row in wanted], donors)
    say("intervals")
    row_results, pairs = summarise_rows(results, n_boot=n_boot, seed=seed)
    return RetrievalReport(
        benchmark=_benchmark_facts(benchmark, passes),
        settings={
            "k0": k0,
            "k_sum": k_sum,
            "alpha": alpha if alpha is not None or e2 is None else e2.spec.alpha,
            "weights": list(DEFAULT_WEIGHTS),
            "cover": cover,
            "cover_weight": cover_weight,
            "prior": prior,
            "candidates": candidates,
            "backend": backend,
            "depth": DEPTH,
            "seed": seed,
            "n_boot": n_boot,
            "interval": "95 % percentile, clusters resampled by group",
            "p_value": "two-sided",
            "ties": "score descending, then id ascending",
        },
        encoders={
            "base": encoder_facts(base),
            "e1": encoder_facts(e1),
            "e2": encoder_facts(e2),
            "selector": encoder_facts(selector or e1 or base) if wanted - {"base", "e1"} else None,
        },
        rows=row_results,
        pairs=pairs,
        chance=_chance(results),
        coverage=_coverage(passes),
        refused=_refused(passes),
        versions=package_versions(),
        seconds=time.perf_counter() - started,
        queries=tuple(results),
    )


def shuffle_donors(groups: Sequence[str], seed: int) -> np.ndarray | None:
    """Give every question another question whose signature it gets, from another group wherever that is possible.

    The questions are put in random order, group by group, and each takes the one a largest group's length further
    on: a bijection without fixed points, in which no group meets itself unless it holds more than half of them.

    Args:
        groups: Group of each question, (n,).
        seed: Seed of the order.

    Returns:
        (n,) int64 indices into the questions; None for fewer than two.
    """
    count = len(groups)
    if count < 2:
        return None
    rng = np.random.default_rng(seed)
    names, member, sizes = np.unique(np.asarray(groups, dtype=object), return_inverse=True, return_counts=True)
    order = np.lexsort((rng.permutation(count), rng.permutation(len(names))[member]))
    # One group only would come round to the question itself.
    shift = int(sizes.max()) if len(names) > 1 else 1
    donors = np.empty(count, dtype=np.int64)
    donors[order] = np.roll(order, -shift)
    return donors


def _wanted_rows(rows: Sequence[str] | None, base: object, e1: object, e2: object) -> frozenset[str]:
    asked = tuple(rows) if rows is not None else DEFAULT_ROWS
    for row in asked:
        if row not in ROW_LABELS:
            raise MiaError(f"unknown row {row!r}; available: {', '.join(ROW_LABELS)}")
    if base is None and e1 is None:
        raise MiaError("no first-stage encoder: give a base encoder or an E1 (--base, --e1)")
    present = set(asked)
    if base is None:
        present.discard("base")
    if e1 is None:
        present.discard("e1")
    if e1 is None:
        present.discard("prior")
    if e2 is None:
        present &= {"base", "e1", "prior"}
    if not present:
        raise MiaError(f"none of the rows {', '.join(asked)} has its encoder; give --base, --e1 or --encoder")
    return frozenset(present)


def _check_benchmark(benchmark: Benchmark) -> None:
    if not any(haystack.queries for haystack in benchmark.haystacks):
        raise MiaError(f"benchmark {benchmark.name}:{benchmark.split} has no question; check the split and --limit")
    sizes = [len(haystack.mindscape.chunks) for haystack in benchmark.haystacks if haystack.queries]
    if max(sizes) <= MAX_CUTOFF:
        raise MiaError(
            f"the largest haystack has {max(sizes)} chunks; a cutoff of {MAX_CUTOFF} needs more than {MAX_CUTOFF}: "
            "pool the haystacks with --series"
        )
    for haystack in benchmark.haystacks:
        known = {chunk.id for chunk in haystack.mindscape.chunks}
        for query in haystack.queries:
            if not query.text.strip():
                raise MiaError(f"question {query.id!r} of haystack {haystack.id!r} is empty; drop it or give its text")
            missing = next((gold for gold in query.gold if gold not in known), None)
            if missing is not None:
                raise MiaError(f"gold {missing!r} of question {query.id!r} is no chunk of haystack {haystack.id!r}")


def _questions(passes: Sequence[_Pass]) -> list[Query]:
    return [query for one in passes for query in one.haystack.queries]


def _gold_sessions(one: _Pass) -> list[frozenset[int]]:
    mindscape = one.haystack.mindscape
    session_of = {chunk.id: int(mindscape.session_of[row]) for row, chunk in enumerate(mindscape.chunks)}
    return [frozenset(session_of[gold] for gold in query.gold) for query in one.haystack.queries]


def _run_rows(one: _Pass, wanted: frozenset[str], prior: float) -> None:
    """Run every row of a haystack that needs no other haystack, and keep its signatures and pools."""
    texts = [query.text for query in one.haystack.queries]
    if not texts:
        return
    depth = min(DEPTH, len(one.haystack.mindscape.chunks))

    def ranking(retriever: Retriever, **options: Any) -> list[list[str]]:
        return retriever.search(texts, k=depth, **options).hits.ids

    if one.base_retriever is not None:
        one.rankings["base"] = ranking(one.base_retriever, encoder="e1", signature="none")
    if one.retriever is None:
        return
    retriever = one.retriever
    if "e1" in wanted:
        one.rankings["e1"] = ranking(retriever, encoder="e1", signature="none")
    if not wanted - {"base", "e1"}:
        return
    if "none" in wanted:
        one.rankings["none"] = ranking(retriever, signature="none")
    one.pools = [frozenset(int(i) for i in pool.sessions) for pool in retriever.pools(texts)]
    for mode in ("coverage", "first_k"):
        one.signatures[mode] = retriever.signatures(texts, mode=mode)
    if "oracle" in wanted:
        sessions = one.haystack.mindscape.sessions
        one.signatures["oracle"] = [
            Signature(tuple(sessions[i].id for i in sorted(gold)), tuple(sessions[i].summary for i in sorted(gold)))
            for gold in _gold_sessions(one)
        ]
    if "global_summary" in wanted:
        one.signatures["global_summary"] = retriever.signatures(texts, mode="global_summary")
    for mode in ("coverage", "first_k", "global_summary", "oracle"):
        if mode in wanted:
            one.rankings[mode] = ranking(retriever, signature=one.signatures[mode])
    if "prior" in wanted:
        one.rankings["prior"] = ranking(retriever, encoder="e1", signature=one.signatures["coverage"], prior=prior)
    if "coverage_prior" in wanted:
        one.rankings["coverage_prior"] = ranking(retriever, signature=one.signatures["coverage"], prior=prior)


def _run_shuffled(passes: Sequence[_Pass], donors: np.ndarray | None) -> None:
    if donors is None:
        return
    signatures = [signature for one in passes for signature in one.signatures.get("coverage", ())]
    start = 0
    for one in passes:
        texts = [query.text for query in one.haystack.queries]
        if not texts or one.retriever is None:
            continue
        given = [signatures[donor] for donor in donors[start : start + len(texts)]]
        one.signatures["shuffled"] = given
        depth = min(DEPTH, len(one.haystack.mindscape.chunks))
        one.rankings["shuffled"] = one.retriever.search(texts, k=depth, signature=given).hits.ids
        start += len(texts)


def _score(passes: Sequence[_Pass], rows: Sequence[str], donors: np.ndarray | None) -> list[QueryResult]:
    questions = _questions(passes)
    results: list[QueryResult] = []
    for one in passes:
        queries = one.haystack.queries
        size = len(one.haystack.mindscape.chunks)
        gold = [query.gold for query in queries]
        scores: dict[str, list[QueryScores]] = {}
        if queries:
            scores = {row: score_queries(one.rankings[row], gold, haystack_size=size) for row in rows}
        for i, query in enumerate(queries):
            donor = None if donors is None else questions[int(donors[len(results)])].id
            results.append(
                QueryResult(
                    id=query.id,
                    haystack=one.haystack.id,
                    group=query.group,
                    gold=tuple(query.gold),
                    tags=dict(query.tags),
                    scores={row: scores[row][i] for row in rows},
                    chance=chance_scores(size, len(set(query.gold)), DEPTH),
                    signatures={mode: given[i].session_ids for mode, given in one.signatures.items()},
                    donor=donor,
                )
            )
    return results


def _chance(results: Sequence[QueryResult]) -> dict[str, float | None]:
    chance: dict[str, float | None] = {}
    for metric in results[0].chance:
        values = [value for value in (result.chance[metric] for result in results) if value is not None]
        chance[metric] = float(np.mean(values)) if values else None
    return chance


def _coverage(passes: Sequence[_Pass]) -> dict[str, dict[str, float]]:
    """Tell how often the gold sessions are in the pool and in each signature, and how large those are."""
    found: dict[str, list[tuple[bool, bool, int]]] = {}
    for one in passes:
        if not one.pools:
            continue
        index = {session.id: row for row, session in enumerate(one.haystack.mindscape.sessions)}
        sets = {"pool": one.pools}
        for mode in ("coverage", "first_k", "global_summary"):
            if mode in one.signatures:
                sets[mode] = [frozenset(index[i] for i in given.session_ids) for given in one.signatures[mode]]
        for i, gold in enumerate(_gold_sessions(one)):
            for name, members in sets.items():
                if gold:
                    row = (bool(gold & members[i]), gold <= members[i], len(members[i]))
                    found.setdefault(name, []).append(row)
    return {
        name: {
            "any_gold_session": float(np.mean([row[0] for row in rows])),
            "all_gold_sessions": float(np.mean([row[1] for row in rows])),
            "mean_sessions": float(np.mean([row[2] for row in rows])),
        }
        for name, rows in found.items()
    }


def _refused(passes: Sequence[_Pass]) -> dict[str, int]:
    """Count the questions whose haystack is too small for a metric."""
    counts: dict[str, int] = {}
    for one in passes:
        for refusal in refused_metrics(len(one.haystack.mindscape.chunks)):
            if one.haystack.queries:
                counts[refusal.metric] = counts.get(refusal.metric, 0) + len(one.haystack.queries)
    return counts


def _benchmark_facts(benchmark: Benchmark, passes: Sequence[_Pass]) -> dict[str, Any]:
    questions = _questions(passes)
    sizes = {one.haystack.id: len(one.haystack.mindscape.chunks) for one in passes}
    return {
        "name": benchmark.name,
        "split": benchmark.split,
        "series": benchmark.series,
        "haystacks": len(passes),
        "chunks": sum(sizes.values()),
        "sessions": sum(len(one.haystack.mindscape.sessions) for one in passes),
        "queries": len(questions),
        "queries_dropped_by_loader": benchmark.dropped,
        "queries_without_gold": sum(not query.gold for query in questions),
        "groups": len({query.group for query in questions}),
        "haystack_sizes": {
            "min": min(sizes.values()),
            "median": float(np.median(list(sizes.values()))),
            "max": max(sizes.values()),
        },
        "chunks_by_haystack": sizes,
        "summarizer": sorted({one.haystack.mindscape.summarizer for one in passes}),
    }
