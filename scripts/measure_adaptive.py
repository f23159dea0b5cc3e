#!/usr/bin/env python3
"""Measure the two adaptive rules against the fixed defaults; both parts can be killed and run again.

    MIA_DATA=FOLDER scripts/measure_adaptive.py sizes --e1 runs/e1_minilm_public --e2 qmsum=runs/e2_minilm_qmsum \
        --e2 fairytaleqa=runs/e2_minilm_fairytaleqa --work FILE.jsonl --json scripts/receipts/adaptive.json
    MIA_DATA=FOLDER scripts/measure_adaptive.py modes --llm URL --data fairytaleqa --limit 200 \
        --e1 runs/e1_minilm_public --work FOLDER --json scripts/receipts/adaptive_modes.json

sizes: K_sum by the spread of E1's activation against K_sum = 1, 3, 5 and 8, on questions whose books and conversations
had no part in fixing the rule's constant. What each size scores is measured for every question once, so that every rule
is a choice among these. modes: passages alone, passages and signature, and the automatic choice between them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mia_serve import Encoder, Retriever
from mia_serve.core.cached_encoder import CachedEncoder
from mia_serve.core.vector_cache import default_cache
from mia_serve.eval.bootstrap import Interval, cluster_bootstrap, paired_bootstrap
from mia_serve.eval.datasets import load_benchmark
from mia_serve.eval.metrics import score_queries
from mia_serve.eval.qa import QaSettings, build_haystacks, extractive_summariser
from mia_serve.eval.qa_data import QaBenchmark, QaQuestion, load_qa
from mia_serve.eval.qa_metrics import score_answer
from mia_serve.eval.versions import package_versions
from mia_serve.llm import ChatClient, Journal
from mia_serve.rag import static
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.rag.modes import choose_mode, measure_signals, signature_need
from mia_serve.rag.question import AnswerMode, Question
from mia_serve.signature.spread import K_MOST, activation_spread, spread_sizes

BENCHMARKS = {"fairytaleqa": "val", "qmsum": "val", "locomo": "all"}
SIZES, FIXED = range(1, K_MOST + 1), (1, 3, 5, 8)
SCALES = (0.1, 0.15, 0.2, 0.25, 0.33, 0.5, 0.67, 1.0, 1.5)
METRICS, DEPTH, PRIOR = ("r@10", "mrr"), 100, 0.1
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MODES: tuple[AnswerMode, ...] = ("chunks", "chunks+sig")
THRESHOLDS = tuple(i / 10 for i in range(11))


class Table(NamedTuple):
    """What every size scored on the questions of one benchmark in one system, (sizes, questions, metrics)."""

    benchmark: str
    system: str
    scores: np.ndarray
    spread: np.ndarray
    pool: np.ndarray
    groups: list[str]

    @property
    def rule_half(self) -> np.ndarray:
        """Mark the questions whose groups, every other one in order of their names, fix the rule's constant."""
        half = set(sorted(set(self.groups))[::2])
        return np.array([group in half for group in self.groups])

    def chosen(self, scale: float) -> np.ndarray:
        """Return the size that the rule gives each question."""
        return spread_sizes(torch.from_numpy(self.spread), K_MOST, scale).numpy()

    def of(self, sizes: np.ndarray | int) -> np.ndarray:
        """Return what each question scored with its size, (questions, metrics)."""
        places = np.broadcast_to(np.asarray(sizes) - 1, len(self.groups))
        return self.scores[places, np.arange(len(self.groups))]


def measure_sizes(arguments: argparse.Namespace) -> None:
    started, journal = time.monotonic(), Journal(arguments.work, exclusive=True)
    known = {(row["benchmark"], row["system"], row["k"]): row for row in journal.read()}
    e2_of = dict(given.split("=", 1) for given in arguments.e2)
    e1 = CachedEncoder(Encoder.load(arguments.e1, device="cpu"), default_cache())
    tables = []
    for name, split in BENCHMARKS.items():
        systems = ["prior", *(["e2"] if name in e2_of else [])]
        missing = [(s, k) for s in systems for k in SIZES if (name, s, k) not in known]
        (haystack,) = load_benchmark(name, split, series=True).haystacks
        # E2 reads pairs that no cache holds; not all questions of the largest benchmark are needed.
        every = -(-len(haystack.queries) // arguments.e2_most)
        queries = {"prior": haystack.queries, "e2": haystack.queries[::every]}
        e2 = CachedEncoder(Encoder.load(e2_of[name], device="cpu"), default_cache()) if name in e2_of else None
        vectors: dict[str, np.ndarray] = {}
        for system, k in missing:
            if time.monotonic() - started > arguments.seconds:
                raise SystemExit("time is up; run it again to go on")
            asked = queries[system]
            retriever = Retriever(haystack.mindscape, e1, e2, k_sum=k, vectors=vectors)
            texts = [query.text for query in asked]
            signatures = retriever.signatures(texts)
            search: dict[str, Any] = {"encoder": "e1", "prior": PRIOR} if system == "prior" else {"encoder": "e2"}
            ids = retriever.search(texts, DEPTH, signatures, **search).hits.ids
            found = score_queries(ids, [query.gold for query in asked], metrics=METRICS)
            scores = [[one[metric] for metric in METRICS] for one in found]
            known[name, system, k] = {"benchmark": name, "system": system, "k": k, "scores": scores}
            journal.append(known[name, system, k])
            print(name, system, k, np.array(scores, float).mean(axis=0).round(4), file=sys.stderr, flush=True)
        for system in systems:
            tables.append(_table(name, system, haystack, e1, vectors, queries[system], known))
    _write(arguments.json, _sizes_record(tables, arguments))


def _table(name: str, system: str, haystack: Any, e1: Any, vectors: Any, queries: Any, known: Any) -> Table:
    pools = Retriever(haystack.mindscape, e1, vectors=vectors).pools([query.text for query in queries])
    sessions = haystack.mindscape.session_of[np.stack([pool.rows for pool in pools])]
    scores = torch.from_numpy(np.stack([pool.scores for pool in pools]))
    return Table(
        name,
        system,
        np.array([known[name, system, k]["scores"] for k in SIZES], float),
        activation_spread(scores, torch.from_numpy(sessions)).numpy(),
        np.array([len(pool.sessions) for pool in pools]),
        [query.group for query in queries],
    )


def _sizes_record(tables: Sequence[Table], arguments: argparse.Namespace) -> dict[str, Any]:
    systems = list(dict.fromkeys(table.system for table in tables))
    return {
        "rule": "K = round(scale * exp(entropy of E1's softmax mass over the pool's sessions)), 1 to 8",
        "fixed_on": "every other group of each benchmark, mean of R@10 and MRR, for each system",
        "measured_on": "the other groups",
        "systems": {name: _fixed([table for table in tables if table.system == name]) for name in systems},
        "e1": arguments.e1,
        "e2": arguments.e2,
        "e2_most": arguments.e2_most,
        "versions": package_versions(),
    }


def _fixed(tables: Sequence[Table]) -> dict[str, Any]:
    """Fix scale and best fixed size of one system on one half of the groups, and measure on the other."""
    scales = {s: float(np.mean([t.of(t.chosen(s))[t.rule_half].mean() for t in tables])) for s in SCALES}
    sizes = {k: float(np.mean([t.of(k)[t.rule_half].mean() for t in tables])) for k in SIZES}
    scale, best = max(scales, key=scales.__getitem__), max(sizes, key=sizes.__getitem__)
    return {
        "scale": scale,
        "best_fixed_k": best,
        "merit_by_scale": {str(s): round(merit, 5) for s, merit in scales.items()},
        "merit_by_fixed_k": {str(k): round(merit, 5) for k, merit in sizes.items()},
        "benchmarks": [_measured(table, scale, best) for table in tables],
    }


def _measured(table: Table, scale: float, best: int) -> dict[str, Any]:
    rest = ~table.rule_half
    groups = [group for group, own in zip(table.groups, rest, strict=True) if own]
    sizes = table.chosen(scale)
    rows = {"auto": table.of(sizes)[rest]} | {f"k_sum={k}": table.of(k)[rest] for k in SIZES}
    alike = min(SIZES, key=lambda k: abs(k - sizes[rest].mean()))
    wanted = dict.fromkeys([*FIXED, best, alike])

    return {
        "benchmark": table.benchmark,
        "questions": int(rest.sum()),
        "groups": len(set(groups)),
        "pool_sessions_mean": round(float(table.pool[rest].mean()), 2),
        "spread_quantiles": {
            str(q): round(float(np.quantile(table.spread, q)), 2) for q in (0.05, 0.25, 0.5, 0.75, 0.95)
        },
        "auto_sizes": {str(k): int((sizes[rest] == k).sum()) for k in SIZES},
        "auto_size_mean": round(float(sizes[rest].mean()), 2),
        "fixed_of_like_size": alike,
        "rows": {
            name: {m: _interval(cluster_bootstrap(values[:, i].tolist(), groups)) for i, m in enumerate(METRICS)}
            for name, values in rows.items()
        },
        "auto_minus": {
            f"k_sum={k}": {
                m: _interval(paired_bootstrap(rows["auto"][:, i].tolist(), rows[f"k_sum={k}"][:, i].tolist(), groups))
                for i, m in enumerate(METRICS)
            }
            for k in wanted
        },
        # With labels: the best size of each question and metric. No rule can be better.
        "upper_bound": {m: round(float(table.scores[:, rest, i].max(axis=0).mean()), 4) for i, m in enumerate(METRICS)},
        # Does the best size grow with the spread at all? Spearman's rank correlation over questions where sizes differ.
        "spread_to_best_size": _correlation(table, rest),
    }


def _correlation(table: Table, rest: np.ndarray) -> dict[str, float | None]:
    from scipy.stats import spearmanr

    found: dict[str, float | None] = {}
    for i, metric in enumerate(METRICS):
        scores = table.scores[:, rest, i]
        differ = scores.max(axis=0) > scores.min(axis=0)
        best = scores.argmax(axis=0)[differ] + 1
        spread = table.spread[rest][differ]
        found[metric] = round(float(spearmanr(spread, best).statistic), 3) if differ.sum() > 2 else None
        found[f"{metric}_questions"] = int(differ.sum())
    return found


def _interval(found: Interval) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in (found.mean, found.low, found.high)]


def measure_modes(arguments: argparse.Namespace) -> None:
    from mia_serve.cli.llm_options import open_client

    folder = Path(arguments.work)
    folder.mkdir(parents=True, exist_ok=True)
    client = open_client(
        arguments.llm, arguments.llm_model, folder / "replies.jsonl", arguments.replay, 32, arguments.llm_budget
    )
    e1 = CachedEncoder(Encoder.load(arguments.e1, device="cpu"), default_cache())
    benchmark = load_qa(arguments.data, series=arguments.data != "nocha", limit=arguments.limit)
    records = asyncio.run(_answer_all(client, e1, benchmark, folder, arguments))
    _write(arguments.json, _modes_record(records, benchmark, client, arguments))


async def _answer_all(
    client: ChatClient, e1: CachedEncoder, benchmark: QaBenchmark, folder: Path, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    settings = QaSettings(chunk_tokens=benchmark.chunk_tokens or 200, overlap=benchmark.overlap)
    summarise = extractive_summariser(e1, "e1")
    mindscapes = folder / f"mindscapes-{benchmark.name}"
    haystacks = await build_haystacks(benchmark, settings, e1.tokenizer, mindscapes, summarise)
    records: list[dict[str, Any]] = []
    async with client:
        for haystack in haystacks:
            async with AsyncRetriever(Retriever(haystack.mindscape, e1)) as searcher:
                asked = (_both_modes(client, searcher, q, benchmark.language, arguments) for q in haystack.questions)
                records += await asyncio.gather(*asked)
            print(f"{haystack.id}: {len(records)} questions; {client.stats.to_text()}", file=sys.stderr, flush=True)
    return records


async def _both_modes(
    client: ChatClient, searcher: AsyncRetriever, question: QaQuestion, language: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Answer a question with and without the signature in the prompt, from the same passages."""
    signature = await searcher.signature(question.text)
    found = await searcher.search(question.text, arguments.k, signature)
    chunks = searcher.mindscape.chunks
    passages = [
        static.Passage(chunk_id, chunks[row].text, score, chunks[row].session_id)
        for chunk_id, score, row in zip(found.ids, found.scores, found.rows, strict=True)
    ]
    signals = measure_signals(searcher.mindscape, await searcher.pool(question.text), found.rows, signature)
    asked = Question(question.id, question.text, question.task, question.options)
    record: dict[str, Any] = {"id": question.id, "book": question.book, "pair": question.pair, "task": question.task}
    record |= {"need": signature_need(signals), "auto": choose_mode(question.task, signals), "scores": {}, "failed": {}}
    for mode in MODES:
        answered = await static.answer(
            client, asked, passages, signature=signature, mode=mode, max_tokens=arguments.max_tokens,
            context_tokens=arguments.context, guided=True,
        )  # fmt: skip
        scores = score_answer(question, answered.text, language)
        record["scores"][mode] = float(scores["f1" if question.task == "free" else "accuracy"] or 0.0)
        if answered.failed or answered.text is None:
            record["failed"][mode] = answered.failed or "unreadable"
    return record


def _modes_record(
    records: Sequence[dict[str, Any]], benchmark: QaBenchmark, client: ChatClient, arguments: argparse.Namespace
) -> dict[str, Any]:
    books = [record["book"] for record in records]
    rows: dict[str, list[float]] = {mode: [record["scores"][mode] for record in records] for mode in MODES}
    rows["auto"] = [record["scores"][record["auto"]] for record in records]

    def at(threshold: float) -> list[float]:
        """Scores where the signature is shown from this need on."""
        return [r["scores"][MODES[int(r["need"] >= threshold)]] for r in records]

    need = np.array([record["need"] for record in records])
    gain = np.array(rows["chunks+sig"]) - np.array(rows["chunks"])
    return {
        "benchmark": {"name": benchmark.name, "split": benchmark.split, "questions": len(records)},
        "metric": "f1" if records[0]["task"] == "free" else "accuracy",
        "model": client.model,
        "settings": {name: getattr(arguments, name) for name in ("k", "context", "max_tokens", "limit", "e1")},
        "rows": {name: _interval(cluster_bootstrap(values, books)) for name, values in rows.items()},
        "auto_minus": {mode: _interval(paired_bootstrap(rows["auto"], rows[mode], books)) for mode in MODES},
        "pair_accuracy": {name: _pairs(records, values) for name, values in rows.items()},
        "auto_shows_signature": round(float(np.mean([record["auto"] != "chunks" for record in records])), 4),
        "upper_bound": round(float(np.maximum(rows["chunks"], rows["chunks+sig"]).mean()), 4),
        "need_quantiles": {str(q): round(float(np.quantile(need, q)), 3) for q in QUANTILES},
        # Is the signature worth more where the need is larger? Spearman's rank correlation, with a bootstrap by book.
        "need_to_gain": _rank_correlation(need, gain, books),
        "by_threshold": {str(t): round(float(np.mean(at(t))), 4) for t in THRESHOLDS},
        "failed": {mode: dict(Counter(r["failed"][mode] for r in records if mode in r["failed"])) for mode in MODES},
        "questions": [
            {"id": r["id"], "need": round(r["need"], 4), "auto": r["auto"]}
            | {mode: round(r["scores"][mode], 4) for mode in MODES}
            for r in records
        ],
        "versions": package_versions(),
    }


def _pairs(records: Sequence[dict[str, Any]], values: Sequence[float]) -> float | None:
    """Return the share of pairs of claims with both right; None where there are no pairs."""
    worst: dict[str, float] = {}
    for record, value in zip(records, values, strict=True):
        if record["pair"] is not None:
            worst[record["pair"]] = min(value, worst.get(record["pair"], 1.0))
    return round(sum(worst.values()) / len(worst), 4) if worst else None


def _rank_correlation(first: np.ndarray, second: np.ndarray, groups: Sequence[str]) -> list[float | None]:
    """Return Spearman's correlation with its 95 % interval, whole groups resampled."""
    from scipy.stats import spearmanr

    if not np.ptp(first) or not np.ptp(second):
        return [None, None, None]
    names = sorted(set(groups))
    rows_of = [np.flatnonzero(np.asarray(groups) == name) for name in names]
    rng, drawn = np.random.default_rng(0), []
    for _ in range(500):
        rows = np.concatenate([rows_of[i] for i in rng.integers(0, len(names), len(names))])
        if np.ptp(first[rows]) and np.ptp(second[rows]):
            drawn.append(float(spearmanr(first[rows], second[rows]).statistic))
    mean = float(spearmanr(first, second).statistic)
    return [round(float(value), 3) for value in (mean, *np.quantile(drawn, [0.025, 0.975]))]


def _write(path: str, record: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    sizes = parts.add_parser("sizes")
    sizes.add_argument("--e1", required=True)
    sizes.add_argument("--e2", action="append", default=[], metavar="BENCHMARK=FOLDER")
    sizes.add_argument("--e2-most", type=int, default=400, help="questions that E2 answers, spread evenly")
    sizes.add_argument("--work", required=True, help="file of what is measured already")
    sizes.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many, to be run again")
    sizes.add_argument("--json", required=True)
    sizes.set_defaults(run=measure_sizes)
    modes = parts.add_parser("modes")
    modes.add_argument("--llm", metavar="URL")
    modes.add_argument("--llm-model", metavar="NAME")
    modes.add_argument("--llm-budget", type=int, metavar="TOKENS", help="stop when so many are spent")
    modes.add_argument("--replay", action="store_true", help="take all replies from the work folder")
    modes.add_argument("--data", required=True, help="fairytaleqa, nocha or another benchmark of questions")
    modes.add_argument("--limit", type=int)
    modes.add_argument("--e1", required=True)
    modes.add_argument("--k", type=int, default=3, help="passages")
    modes.add_argument("--context", type=int, default=2048, help="tokens of prompt and reply")
    modes.add_argument("--max-tokens", type=int, default=96, help="tokens of a reply")
    modes.add_argument("--work", required=True, help="folder of mindscapes and replies")
    modes.add_argument("--json", required=True)
    modes.set_defaults(run=measure_modes)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
