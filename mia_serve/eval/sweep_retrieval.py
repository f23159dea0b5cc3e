"""The sensitivity study of retrieval: the signature as E2's input, and as a prior on E1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mia_serve.core.errors import MiaError
from mia_serve.core.scoring import fuse_views
from mia_serve.eval.metrics import LABELS, score_queries
from mia_serve.eval.report import ROW_LABELS, encoder_facts
from mia_serve.eval.sweep import RETRIEVAL_FACTORS, Scores, Setting, Sweep, Value, plan, summarise_sweep
from mia_serve.eval.versions import package_versions
from mia_serve.mindscape import Book, Mindscape, extractive_summaries, keyword_summaries
from mia_serve.retriever import Retriever

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.eval.datasets import Benchmark, Haystack
    from mia_serve.mindscape.mindscape import Summarise

METRICS = ("r@10", "mrr")
SYSTEMS = ("prior", "coverage")
_DEPTH = 100
#: Systems that a factor concerns; the others concern both.
_CONCERNS = {"alpha": ("coverage",), "prior": ("prior",)}
_FACTS = ("pool", "pool_gold", "signature", "signature_gold")


class _EncodesOnce:
    """An encoder that encodes each query, and each pair of query and signature, once whatever is asked again.

    With the two views kept, another α costs no forward: the fused vector is theirs (`fuse_views`).
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.spec_hash = encoder.spec_hash  # reads all weights: taken once
        self._alone: dict[str, np.ndarray] = {}
        self._paired: dict[tuple[str, tuple[str, ...]], np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode_queries(
        self, texts: Sequence[str], signatures: Sequence[list[str]] | None = None, alpha: float | None = None
    ) -> np.ndarray:
        """Encode queries, as `Encoder.encode_queries`."""
        new = [text for text in dict.fromkeys(texts) if text not in self._alone]
        if new:
            self._alone.update(zip(new, self._encoder.encode_queries(new), strict=True))
        alone = np.stack([self._alone[text] for text in texts])
        alpha = self._encoder.spec.alpha if alpha is None else alpha
        pairs = [(text, tuple(given)) for text, given in zip(texts, signatures or [], strict=bool(signatures))]
        have = [row for row, (_, given) in enumerate(pairs) if given]
        if not have or alpha == 0:
            return alone
        fresh = [pair for pair in dict.fromkeys(pairs[row] for row in have) if pair not in self._paired]
        if fresh:
            shown = [list(given) for _, given in fresh]
            views = self._encoder.encode_queries([text for text, _ in fresh], shown, alpha=1.0)
            self._paired.update(zip(fresh, views, strict=True))
        paired = np.stack([self._paired[pairs[row]] for row in have])
        alone[have] = fuse_views(torch.from_numpy(alone[have]), torch.from_numpy(paired), alpha).numpy()
        return alone


def sweep_retrieval(
    benchmark: Benchmark,
    sweeps: dict[str, tuple[Value, ...]],
    *,
    e1: Encoder,
    e2: Encoder | None = None,
    selector: Encoder | None = None,
    k0: int = 50,
    k_sum: int = 5,
    alpha: float | None = None,
    prior: float = 0.1,
    grid: bool = False,
    n_boot: int = 10_000,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Sweep:
    """Rank every question under every setting: E1 with the signature as a prior, and E2 with it as input.

    Chunks are encoded once, and so are each query, each pair of query and signature, and each window's summaries.

    Args:
        benchmark: Haystacks with their questions.
        sweeps: What `parse_sweeps` returns, of `RETRIEVAL_FACTORS`.
        e1: Query-only encoder.
        e2: Encoder of (query, signature) pairs; without it there is only the prior.
        selector: Encoder that chooses the signature; E1 where None.
        k0: Default of K₀.
        k_sum: Default of K_sum.
        alpha: Default of α; that of E2's spec where None.
        prior: Default of β.
        grid: Run all combinations, not one factor at a time.
        n_boot: Resamples for the intervals.
        seed: Of the resamples.
        progress: Called with a line at each step.
        **options: Further settings of the `Retriever`, the same for all.

    Raises:
        MiaError: No question, α without E2, or windows of a benchmark whose sessions are not windows.
    """
    if not any(haystack.queries for haystack in benchmark.haystacks):
        raise MiaError(f"benchmark {benchmark.name}:{benchmark.split} has no question; check the split and --limit")
    if "alpha" in sweeps and e2 is None:
        raise MiaError("--sweep alpha: α weighs the signature view of E2, and there is no E2; give --encoder")
    window = _window(benchmark) if "window" in sweeps else None
    default_alpha = None if e2 is None else e2.spec.alpha if alpha is None else alpha
    default = Setting(k0=k0, k_sum=k_sum, window=window, alpha=default_alpha, prior=prior)
    settings = plan(sweeps, default, grid)
    shown: list[Any] = [None if encoder is None else _EncodesOnce(encoder) for encoder in (e1, e2, selector)]
    notes, summarise = [], None
    if window is not None:
        summarise, name = _summariser(benchmark, selector or e1)
        notes.append(f"All windows, the default too, have {name} summaries, so that only W differs.")
    parts: dict[Setting, list[Scores]] = {setting: [] for setting in settings}
    for number, haystack in enumerate((h for h in benchmark.haystacks if h.queries), 1):
        if progress is not None:
            progress(f"{haystack.id} ({number} of {len(benchmark.haystacks)}): {len(settings)} settings")
        cut: dict[int | None, tuple[Haystack, dict[str, np.ndarray]]] = {}
        for setting in settings:
            if setting.window not in cut:
                own = haystack if setting.window is None else _windowed(haystack, setting.window, summarise)
                cut[setting.window] = own, _chunk_vectors([vectors for _, vectors in cut.values()])
            systems = [s for s in SYSTEMS if _concerned(s, setting, default, grid) and (s == "prior" or e2 is not None)]
            own, vectors = cut[setting.window]
            parts[setting].append(_measure(own, setting, systems, shown, options | {"vectors": vectors}))
    return summarise_sweep(
        {setting: _joined(found) for setting, found in parts.items()},
        [query.group for haystack in benchmark.haystacks for query in haystack.queries],
        sweeps,
        default=default,
        systems={s: ROW_LABELS[s] for s in SYSTEMS if s == "prior" or e2 is not None},
        metrics={metric: LABELS[metric] for metric in METRICS},
        benchmark={
            "name": benchmark.name,
            "split": benchmark.split,
            "series": benchmark.series,
            "haystacks": len(benchmark.haystacks),
            "chunks": sum(len(haystack.mindscape.chunks) for haystack in benchmark.haystacks),
        },
        grid=grid,
        notes=notes,
        facts={
            "depth": _DEPTH,
            "options": {name: str(value) for name, value in options.items()},
            "encoders": {"e1": encoder_facts(e1), "e2": encoder_facts(e2), "selector": encoder_facts(selector or e1)},
            "versions": package_versions(),
        },
        n_boot=n_boot,
        seed=seed,
    )


def _concerned(system: str, setting: Setting, default: Setting, grid: bool) -> bool:
    """Tell whether a system's score can differ between a setting and the default."""
    varied = [name for name in RETRIEVAL_FACTORS if getattr(setting, name) != getattr(default, name)]
    return grid or not varied or any(system in _CONCERNS.get(name, SYSTEMS) for name in varied)


def _measure(
    haystack: Haystack, setting: Setting, systems: Sequence[str], encoders: Sequence[Any], options: dict[str, Any]
) -> Scores:
    """Score the questions of one haystack under one setting."""
    e1, e2, selector = encoders
    mindscape, texts = haystack.mindscape, [query.text for query in haystack.queries]
    retriever = Retriever(
        mindscape, e1, e2, selector, k0=setting.k0, k_sum=setting.k_sum, alpha=setting.alpha, **options
    )
    signatures = retriever.signatures(texts)
    ranked = {}
    for system in systems:
        search: dict[str, Any] = {"encoder": "e1", "prior": setting.prior} if system == "prior" else {"encoder": "e2"}
        if system == "prior" and not setting.prior:
            search["signature"] = "none"  # E1 with a prior of no weight is E1
        found = retriever.search(texts, k=min(_DEPTH, len(mindscape.chunks)), **{"signature": signatures} | search)
        ranked[system] = found.hits.ids
    gold = [query.gold for query in haystack.queries]
    scores = {
        system: score_queries(ids, gold, haystack_size=len(mindscape.chunks), metrics=METRICS)
        for system, ids in ranked.items()
    }
    session_of = {chunk.id: chunk.session_id for chunk in mindscape.chunks}
    gold_sessions = [{session_of[chunk] for chunk in own} for own in gold]
    pools = [{mindscape.sessions[i].id for i in pool.sessions} for pool in retriever.pools(texts)]
    chosen = [set(signature.session_ids) for signature in signatures]
    counts = dict(zip(_FACTS, (*_shares(pools, gold_sessions), *_shares(chosen, gold_sessions)), strict=True))
    return Scores(
        {system: {metric: [one[metric] for one in found] for metric in METRICS} for system, found in scores.items()},
        dict.fromkeys(systems, counts | {"questions": float(len(texts))}),
    )


def _shares(sets: Sequence[set[str]], gold: Sequence[set[str]]) -> tuple[float, float]:
    """Return the mean size of the sets, and the share that holds a gold session."""
    sizes, held = [len(one) for one in sets], [bool(one & own) for one, own in zip(sets, gold, strict=True) if own]
    return float(np.mean(sizes)), float(np.mean(held)) if held else 0.0


def _joined(parts: Sequence[Scores]) -> Scores:
    """Put what the haystacks scored one after the other; facts are averaged over the questions."""
    systems = list(parts[0].metrics)
    metrics = {s: {m: [v for part in parts for v in part.metrics[s][m]] for m in METRICS} for s in systems}
    facts = {}
    for s in systems:
        sizes = [part.facts[s]["questions"] for part in parts]
        facts[s] = {name: float(np.average([part.facts[s][name] for part in parts], weights=sizes)) for name in _FACTS}
    return Scores(metrics, facts)


def _chunk_vectors(known: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the vectors of the chunks, which another window shares, without those of its sessions."""
    return {name: rows for name, rows in known[0].items() if not name.endswith("/sessions")} if known else {}


def _window(benchmark: Benchmark) -> int:
    windows = {haystack.mindscape.window for haystack in benchmark.haystacks}
    window = next(iter(windows))
    if len(windows) > 1 or window is None:
        raise MiaError(
            f"--sweep window: the sessions of {benchmark.name} are given (meetings, chat sessions), not windows of W "
            "chunks; take a benchmark of books, such as fairytaleqa"
        )
    return window


def _summariser(benchmark: Benchmark, encoder: Encoder) -> tuple[Summarise, str]:
    """Choose how windows are summarised: as the benchmark's are where no one wrote them, else by their sentences."""
    if all(haystack.mindscape.summarizer == "keywords" for haystack in benchmark.haystacks):
        return keyword_summaries, "keyword"
    return lambda windows: extractive_summaries(windows, encoder), "extractive"


def _windowed(haystack: Haystack, window: int, summarise: Summarise | None) -> Haystack:
    """Cut the books of a haystack into windows of another size."""
    titles = {session.book_id: session.title for session in haystack.mindscape.sessions}
    books = []
    for book, run in groupby(haystack.mindscape.chunks, key=lambda chunk: chunk.book_id):
        chunks = list(run)
        books.append(Book(book, tuple(c.text for c in chunks), titles[book], tuple(c.id for c in chunks)))
    return replace(haystack, mindscape=Mindscape.from_books(books, window, summarise))
