"""The chat-memory study: training-free lexical-dense fusion for ranking the sessions of a conversation.

Protocol of arXiv 2606.04194: BM25 over sessions, late interaction over turns, a mix of z-scores whose one weight is
chosen on other conversations than the one it is applied to, intervals over whole conversations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mia_serve import fusion
from mia_serve.core.errors import MiaError
from mia_serve.eval.conversations import ConversationBenchmark
from mia_serve.eval.study_report import Study
from mia_serve.eval.study_scores import (
    ANALYZER,
    BETA,
    K1,
    NO_VECTOR,
    TOPK,
    B,
    DenseScores,
    Layout,
    Part,
    TextEncoder,
    TextVectors,
    dense_scores,
    lexical_scores,
    texts_of,
)
from mia_serve.eval.study_summary import ALL_PARTS, Method, summarise
from mia_serve.eval.versions import package_versions

if TYPE_CHECKING:
    from mia_serve.rerank import Reranker

#: The weight and depth of the study's re-ranking experiment, fixed beforehand.
RERANK_ALPHA, RERANK_TOP, RERANK_TOKENS = 0.6, 10, 256

#: Label of a dense pooling, in the order of the tables.
_DENSE = {
    "early": "early, mean vector",
    "max": "late, max",
    "top3": "late, top-3 mean",
    "lme10": "late, log-mean-exp 10",
    "lse10": "late, log-sum-exp 10 *",
}
#: Sessions indexed by what a language model wrote as well: lexical parts, dense parts (None: no dense side).
_SUMMARY_ROWS: tuple[tuple[tuple[Part, ...], tuple[Part, ...] | None], ...] = (
    (("turns",), None),
    (("turns", "summary"), None),
    (("turns", "summary", "facts"), None),
    (("turns",), ("turns",)),
    (("turns",), ("turns", "facts")),
    (("turns", "summary"), ("turns",)),
    (("turns", "summary"), ("turns", "facts")),
    (("turns", "summary", "facts"), ("turns", "facts", "summary")),
)
#: What the lexical side calls the turns, which it reads as one text.
_LEXICAL_NAMES = {"turns": "text", "summary": "summary", "facts": "facts"}


def run_study(
    benchmark: ConversationBenchmark,
    encoder: TextEncoder | None = None,
    *,
    full: bool = False,
    reranker: Reranker | None = None,
    models: dict[str, Any] | None = None,
    device: str = "cpu",
    folds: int = 5,
    n_boot: int = 4000,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Study:
    """Rank the sessions of every question's conversation by every method, and summarise.

    Args:
        benchmark: Conversations and questions.
        encoder: Encoder of texts; None: BM25 alone.
        full: The whole study: all poolings and their fusions, early fusion, length dilution, trivial baselines, and,
            where the benchmark has them, summaries as index text. Otherwise BM25, late interaction, RRF and fusion.
        reranker: Cross-encoder for the study's re-ranking experiment; needs ``encoder``.
        models: What the report says of encoder and re-ranker.
        device: Where to search.
        folds: Parts of the questions for the choice of alpha where every question has its own conversation.
        n_boot: Resamples for intervals.
        seed: Of resamples and folds.
        progress: Called with a line at each step.

    Raises:
        MiaError: There is no second conversation (or question) to choose alpha on, or the parts do.
    """
    started = time.perf_counter()
    say = progress or (lambda line: None)
    layout = Layout.of(benchmark)
    groups = fusion_groups(benchmark, folds, seed)
    if encoder is not None:
        _check_groups(benchmark, groups, layout)
    say("BM25")
    lexical = lexical_scores(benchmark, layout)
    methods = [Method("bm25", "BM25", "single", lexical)]
    vectors = None
    if encoder is not None:
        vectors = _vectors(benchmark, encoder, full)
        say("dense scores")
        poolings = tuple(_DENSE) if full else ("max",)
        dense = dense_scores(
            benchmark, layout, *vectors, poolings=poolings, best_turns=reranker is not None, device=device
        )
        methods += [Method(name, _DENSE[name], "single", dense.by_pooling[name]) for name in poolings]
        for name in poolings:
            label = f"BM25 ⊕ {_DENSE[name]}"
            methods.append(fuse(f"bm25+{name}", label, "fused", lexical, dense.by_pooling[name], layout, groups))
        methods += _without_choice(lexical, dense.by_pooling["max"], layout)
        if reranker is not None:
            say("re-ranking")
            methods += _reranked(benchmark, layout, lexical, dense, reranker)
    if full:
        if _written_about(benchmark):
            say("summaries as index text")
            methods += _summaries(benchmark, layout, vectors, groups, device)
        methods.append(Method("turns", "longest session first", "trivial", layout.turns.astype(np.float64)))
    say("metrics and intervals")
    settings = _settings(benchmark, full, len(set(groups)), n_boot, seed, reranker is not None)
    return summarise(
        benchmark,
        layout,
        methods,
        settings=settings,
        models=models or {},
        versions=package_versions(),
        started=started,
    )


def fusion_groups(benchmark: ConversationBenchmark, folds: int = 5, seed: int = 0) -> list[str]:
    """Return the group of each question within which alpha is never chosen: its conversation, or its fold.

    Where every question has a conversation of its own, the questions are dealt to ``folds`` parts at random.
    """
    groups = [question.group for question in benchmark.questions]
    if len(set(groups)) < len(groups):
        return groups
    count = min(folds, len(groups))
    part = np.empty(len(groups), np.int64)
    part[np.random.default_rng(seed).permutation(len(groups))] = np.arange(len(groups)) % count
    return [f"fold {number + 1}" for number in part]


def _check_groups(benchmark: ConversationBenchmark, groups: Sequence[str], layout: Layout) -> None:
    """Refuse a benchmark that leaves no questions to choose alpha on, before its texts are encoded."""
    if len({group for group, valued in zip(groups, layout.valued, strict=True) if valued}) < 2:
        raise MiaError(
            f"{benchmark.name}, {benchmark.reading.get('data', 'as given')}: alpha is chosen on other conversations "
            "than it is used on, so at least two of two or more sessions must have questions; give a file with more, "
            "or no --encoder for BM25 alone"
        )


def fuse(
    key: str,
    label: str,
    section: str,
    lexical: np.ndarray,
    dense: np.ndarray,
    layout: Layout,
    groups: Sequence[str],
) -> Method:
    """Mix two sides with the alpha that has the best Hit@1 on the questions of all other groups.

    Args:
        key: Of the row.
        label: Of the row.
        section: Table of the row.
        lexical: (Q, S) scores.
        dense: (Q, S) scores.
        layout: Where sessions and gold are.
        groups: Group of each question, see ``fusion_groups``.
    """
    mixed = [fusion.mix(lexical, dense, alpha, layout.present) for alpha in fusion.ALPHAS]
    hits = np.stack([hit_at_1(scores, layout) for scores in mixed], axis=1)
    chosen, by_group = fusion.leave_one_group_out(hits, groups)
    scores = np.stack(mixed)[chosen, np.arange(len(chosen))]
    alphas = np.array(fusion.ALPHAS)
    chosen_for = {group: float(alphas[by_group[group]]) for group in sorted(set(groups))}
    return Method(key, label, section, scores, alphas[chosen], chosen_for, hits)


def by_query(key: str, label: str, section: str, lexical: np.ndarray, dense: np.ndarray, layout: Layout) -> Method:
    """Mix two sides with a weight that each question's own scores give (``fusion.adaptive_alpha``): no labels."""
    alpha = fusion.adaptive_alpha(lexical, dense, layout.present)
    return Method(key, label, section, fusion.mix(lexical, dense, alpha, layout.present), alpha)


def hit_at_1(scores: np.ndarray, layout: Layout) -> np.ndarray:
    """Return 1 where the first session is gold, (Q,); of equal scores the earlier session is first."""
    best = np.where(layout.present, scores, -np.inf).argmax(axis=1)
    return layout.gold[np.arange(len(best)), best].astype(np.float64)


def _vectors(benchmark: ConversationBenchmark, encoder: TextEncoder, full: bool) -> tuple[TextVectors, TextVectors]:
    """Encode questions and all texts that some row will need."""
    parts: tuple[Part, ...] = ("turns", "summary", "facts") if full else ("turns",)
    sessions = [session for conversation in benchmark.conversations for session in conversation.sessions]
    texts = [text for session in sessions for text in texts_of(session, parts)]
    queries = TextVectors(encoder.encode_queries, [question.text for question in benchmark.questions])
    return queries, TextVectors(encoder.encode_documents, texts)


def _without_choice(lexical: np.ndarray, dense: np.ndarray, layout: Layout) -> list[Method]:
    """Fuse without a weight that was chosen on other questions."""
    fused = fusion.rrf([lexical, dense], present=[layout.present, layout.present])
    return [
        by_query("adaptive", "BM25 ⊕ late, max, alpha by query", "fused", lexical, dense, layout),
        Method("rrf", f"RRF {fusion.RRF_K}, BM25 and late max", "fused", fused),
    ]


def _reranked(
    benchmark: ConversationBenchmark, layout: Layout, lexical: np.ndarray, dense: DenseScores, reranker: Reranker
) -> list[Method]:
    """Let a cross-encoder order the first sessions of the fused ranking by each one's best turn."""
    fused = fusion.mix(lexical, dense.by_pooling["max"], RERANK_ALPHA, layout.present)
    order = fusion.rank(fused)
    pairs: list[tuple[str, str]] = []
    places: list[tuple[int, int]] = []
    for row, question in enumerate(benchmark.questions):
        sessions = benchmark.conversations[question.conversation].sessions
        for column in order[row, : min(RERANK_TOP, len(sessions))].tolist():
            turn = dense.best_turn[row, column]
            pairs.append((question.text, sessions[column].turns[turn] if turn >= 0 else ""))
            places.append((row, column))
    found = np.asarray(reranker.scores(pairs), np.float64)
    # Sessions beyond the top keep their order, below all that were read.
    below = np.empty_like(fused)
    np.put_along_axis(below, order, np.broadcast_to(np.arange(fused.shape[1]), fused.shape), axis=1)
    scores = found.min() - 1 - below
    scores[tuple(np.array(places).T)] = found
    weight = np.full(len(fused), RERANK_ALPHA)
    return [
        Method("fixed", f"BM25 ⊕ late, max, alpha {RERANK_ALPHA}", "rerank", fused, weight),
        Method("reranked", f"the same, top {RERANK_TOP} re-ranked", "rerank", scores, weight),
    ]


def _written_about(benchmark: ConversationBenchmark) -> bool:
    """Tell whether sessions come with text that a language model wrote about them."""
    sessions = [session for conversation in benchmark.conversations for session in conversation.sessions]
    return any(session.summary for session in sessions) and any(session.facts for session in sessions)


def _summaries(
    benchmark: ConversationBenchmark,
    layout: Layout,
    vectors: tuple[TextVectors, TextVectors] | None,
    groups: Sequence[str],
    device: str,
) -> list[Method]:
    """Index sessions by their summaries and facts too; a session's dense score is the best of all its texts."""
    lexical: dict[tuple[Part, ...], np.ndarray] = {}
    dense: dict[tuple[Part, ...], np.ndarray] = {}
    methods = []
    for words, texts in _SUMMARY_ROWS:
        if words not in lexical:
            lexical[words] = lexical_scores(benchmark, layout, words)
        names = [_LEXICAL_NAMES[part] for part in words]
        key = "index:" + "+".join(names)
        if texts is None:
            methods.append(Method(key, ", ".join(names), "summaries", lexical[words]))
            continue
        if vectors is None:
            continue
        if texts not in dense:
            dense[texts] = dense_scores(benchmark, layout, *vectors, parts=texts, device=device).by_pooling["max"]
        key, label = f"{key}|{'+'.join(texts)}", f"{', '.join(names)} ⊕ {', '.join(texts)}"
        methods.append(fuse(key, label, "summaries", lexical[words], dense[texts], layout, groups))
        if key == ALL_PARTS:
            methods.append(by_query(f"{key}|adaptive", label, "summaries", lexical[words], dense[texts], layout))
    return methods


def _settings(
    benchmark: ConversationBenchmark, full: bool, folds: int, n_boot: int, seed: int, reranked: bool
) -> dict[str, Any]:
    own = len({question.group for question in benchmark.questions}) == len(benchmark.questions)
    others = f"{folds}-fold cross-validation over questions" if own else "leave one conversation out"
    settings: dict[str, Any] = {
        "study": full,
        "reading": dict(benchmark.reading),
        "bm25": {"analyzer": ANALYZER, "k1": K1, "b": B, "idf": "ln(1 + (N - df + 0.5) / (df + 0.5))"},
        "pooling": {"topk": TOPK, "beta": BETA, "session_without_vector": NO_VECTOR},
        "alpha": {
            "grid": list(fusion.ALPHAS),
            "chosen_by": f"Hit@1, {others}, micro average, ties to the smallest",
            "is_weight_of": "BM25",
        },
        "rrf_k": fusion.RRF_K,
        "ties": "score descending, then the earlier session",
        "seed": seed,
        "n_boot": n_boot,
        "interval": f"95 % percentile, {'questions' if own else 'whole conversations'} resampled",
        "p_value": "one-sided: share of resamples <= 0",
    }
    if reranked:
        settings["rerank"] = {"alpha": RERANK_ALPHA, "top": RERANK_TOP, "max_length": RERANK_TOKENS}
    return settings
