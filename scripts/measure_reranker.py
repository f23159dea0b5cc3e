#!/usr/bin/env python3
"""Measure a cross-encoder: does it rank better than what it re-ranks, and what does re-ranking do to chat memory?

    MIA_DATA=FOLDER scripts/measure_reranker.py --json scripts/receipts/reranker.json      # 8 minutes on two cores

1. The ten best passages of BM25 and of a bi-encoder for FairytaleQA's val questions, in the fairy book of the story.
2. LoCoMo, as the chat-memory study re-ranks it: the ten best sessions of BM25 and dense retrieval (alpha 0.6), each
   read by its best turn. Replacing the fused scores of the ten, as the study does, and mixing both (z-scores over the
   ten) with a weight that is chosen on the other nine conversations. The same with sessions indexed by summaries and
   facts as well, where a session is read by its best text. As a control the cross-encoder's scores are dealt out at
   random among the ten.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from mia_serve import Encoder
from mia_serve.core.names import full_name
from mia_serve.core.vector_cache import default_cache, embed_texts
from mia_serve.eval.bootstrap import paired_bootstrap
from mia_serve.eval.conversations import load_locomo
from mia_serve.eval.datasets import load_benchmark
from mia_serve.eval.study import RERANK_ALPHA, RERANK_TOP
from mia_serve.eval.study_scores import Layout, Part, TextVectors, lexical_scores, texts_of
from mia_serve.eval.versions import package_versions
from mia_serve.fusion import ALPHAS, leave_one_group_out, mix, rank
from mia_serve.lexical import BM25Index
from mia_serve.rerank import Reranker, rerank

DEALS = 20
INDEXED: dict[str, tuple[Part, ...]] = {
    "turns": ("turns",),
    "turns, summaries, facts": ("turns", "summary", "facts"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reranker", type=Path, default=Path("runs/reranker_minilm"))
    parser.add_argument("--dense", default="runs/e1_minilm_public", help="bi-encoder of FairytaleQA")
    parser.add_argument("--chat-dense", default="all-MiniLM-L6-v2", help="bi-encoder of LoCoMo")
    parser.add_argument("--limit", type=int, default=200, help="questions of FairytaleQA")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the vector cache")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    model = Reranker.load(arguments.reranker, device="cpu", dtype="float32")
    facts = arguments.reranker / "train_reranker.json"
    record = {
        "reranker": str(arguments.reranker),
        "training": json.loads(facts.read_text("utf-8")) if facts.is_file() else None,
        "max_length": model.max_length,
        "dense": {"fairytaleqa": arguments.dense, "locomo": arguments.chat_dense},
        "fairytaleqa_val": fairytaleqa(model, arguments.dense, arguments.limit),
        "locomo": locomo(model, arguments.chat_dense, arguments.cache),
        "interval": "95 % percentile, whole fairy books or conversations resampled 10,000 times; p two-sided",
        "versions": package_versions(),
    }
    arguments.json.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def fairytaleqa(model: Reranker, dense_name: str, limit: int) -> dict[str, Any]:
    """Re-rank the best passages of BM25 and of a bi-encoder."""
    encoder = Encoder.load(dense_name, device="cpu", dtype="float32")
    groups: list[str] = []
    first: dict[str, list[list[bool]]] = {"BM25": [], "E1": []}
    again: dict[str, list[list[bool]]] = {"BM25": [], "E1": []}
    for haystack in load_benchmark("fairytaleqa", "val", limit=limit).haystacks:
        texts = {chunk.id: chunk.text for chunk in haystack.mindscape.chunks}
        ids, asked = list(texts), [query.text for query in haystack.queries]
        cosines = encoder.encode_queries(asked) @ encoder.encode_documents(list(texts.values())).T
        found = {
            "BM25": BM25Index(ids, list(texts.values())).search(asked, RERANK_TOP).ids,
            "E1": [[ids[i] for i in row[:RERANK_TOP]] for row in rank(cosines)],
        }
        for name, lists in found.items():
            pairs = [(query, texts[i]) for query, own in zip(asked, lists, strict=True) for i in own]
            scores = np.split(model.scores(pairs), np.cumsum([len(own) for own in lists])[:-1])
            for query, own, new in zip(haystack.queries, lists, scores, strict=True):
                hits = [i in query.gold for i in own]
                first[name].append(hits)
                again[name].append([hits[i] for i in rerank(np.arange(len(hits)), new)])
        groups += [query.group for query in haystack.queries]
    rows = {name: _compared(first[name], again[name], groups) for name in first}
    for name, row in rows.items():
        print("FairytaleQA", name, json.dumps(row), flush=True)
    return {"questions": len(groups), "fairy_books": len(set(groups)), "first_stage": rows}


def locomo(model: Reranker, dense_name: str, cache: Path | None) -> dict[str, Any]:
    """Re-rank the best sessions of each question's conversation."""
    benchmark = load_locomo("strict")
    layout, groups = Layout.of(benchmark), [question.group for question in benchmark.questions]
    encoder = Encoder.load(full_name(dense_name), device="cpu", dtype="float32")
    sessions = [session for conversation in benchmark.conversations for session in conversation.sessions]
    texts = [text for session in sessions for text in texts_of(session, INDEXED["turns, summaries, facts"])]
    documents = TextVectors(lambda t: embed_texts(encoder, t, "document", cache), texts)
    queries = embed_texts(encoder, [question.text for question in benchmark.questions], "query", cache)
    rows = {}
    for name, parts in INDEXED.items():
        dense = np.zeros(layout.present.shape, np.float32)
        pairs: list[tuple[str, str]] = []
        best: dict[tuple[int, int], str] = {}
        for row, question in enumerate(benchmark.questions):
            for column, session in enumerate(benchmark.conversations[question.conversation].sessions):
                own = texts_of(session, parts)
                scores = documents.of(own).astype(np.float64) @ queries[row].astype(np.float64)
                dense[row, column], best[row, column] = scores.max(), own[int(scores.argmax())]
        fused = mix(lexical_scores(benchmark, layout, parts), dense, RERANK_ALPHA, layout.present)
        order = rank(fused)
        head = order[:, :RERANK_TOP]  # every conversation has more sessions
        pairs = [
            (question.text, best[row, column])
            for row, question in enumerate(benchmark.questions)
            for column in head[row].tolist()
        ]
        cross = model.scores(pairs).reshape(head.shape).astype(np.float64)
        rows[name] = _reranked(order, np.take_along_axis(fused, head, axis=1), cross, layout.gold, groups)
        print("LoCoMo", name, json.dumps(rows[name]), flush=True)
    settings = {"alpha": RERANK_ALPHA, "top": RERANK_TOP, "weights": ALPHAS, "deals": DEALS}
    return {"questions": len(groups), "settings": settings, "indexed_by": rows}


def _reranked(
    order: np.ndarray, fused: np.ndarray, cross: np.ndarray, gold: np.ndarray, groups: list[str]
) -> dict[str, Any]:
    """Compare replacing and mixing with leaving the order as it is; ``fused`` and ``cross`` are (Q, 10)."""
    rows = np.arange(len(order))

    def hits(scores: np.ndarray) -> np.ndarray:
        return np.stack(
            [gold[rows, rerank(order, mix(scores, fused, weight))[:, 0]].astype(float) for weight in ALPHAS], axis=1
        )

    def chosen(table: np.ndarray) -> tuple[np.ndarray, list[float]]:
        columns, by_group = leave_one_group_out(table, groups)
        return table[rows, columns], [ALPHAS[column] for column in by_group.values()]

    table = hits(cross)
    mixed, weights = chosen(table)
    random = np.random.default_rng(0)
    dealt = [chosen(hits(random.permuted(cross, axis=1)))[0] for _ in range(DEALS)]
    gains = [float((own - table[:, 0]).mean()) for own in dealt]
    return {
        "fused": round(float(table[:, 0].mean()), 4),
        "replaced": _difference(table[:, -1], table[:, 0], groups),
        "mixed": _difference(mixed, table[:, 0], groups) | {"weights": weights},
        "mixed_with_dealt_scores": [round(gain, 4) for gain in (float(np.mean(gains)), min(gains), max(gains))],
        "curve": [round(float(value), 4) for value in table.mean(axis=0)],
    }


def _compared(before: list[list[bool]], after: list[list[bool]], groups: list[str]) -> dict[str, Any]:
    measures = {
        "hit@1": lambda hits: float(hits[:1] == [True]),
        "mrr@10": lambda hits: 1 / (hits.index(True) + 1) if True in hits else 0.0,
    }
    row: dict[str, Any] = {"gold_among_10": round(float(np.mean([True in hits for hits in before])), 4)}
    for name, measure in measures.items():
        old, new = (np.array([measure(hits) for hits in lists]) for lists in (before, after))
        row[name] = {"first": round(float(old.mean()), 4)} | _difference(new, old, groups)
    return row


def _difference(new: np.ndarray, old: np.ndarray, groups: list[str]) -> dict[str, Any]:
    gain = paired_bootstrap(new.tolist(), old.tolist(), groups)
    values = [None if value is None else round(value, 4) for value in (gain.mean, gain.low, gain.high)]
    return {"value": round(float(new.mean()), 4), "gain": values, "p": gain.p_text}


if __name__ == "__main__":
    main()
