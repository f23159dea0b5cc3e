#!/usr/bin/env python3
"""Measure what signatures add to session retrieval in conversations (LoCoMo, the chat-memory study's 1,978 questions).

    MIA_DATA=FOLDER scripts/measure_chat_signatures.py --e1 runs/e1_minilm_public --e2 runs/e2_minilm_qmsum \
        --json scripts/receipts/chat_signatures.json

A question's signature is chosen by greedy among the sessions of its 50 best turns. It is then used without training, as
a prior on its sessions, as a direction of the query vector, as words added to the query of BM25; and read by an E2.
Every weight is chosen on the other nine conversations. Beside each use stands what tells whether the *choice* mattered:
the signatures of other questions about the same conversation, dealt out at random (a permutation test: it counts in the
chance that comes with choosing a weight, which the interval over conversations does not), the session that holds the
answer (an upper bound), and for the prior the same weights over all sessions of the pool.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mia_serve import Encoder
from mia_serve.core.names import full_name
from mia_serve.core.vector_cache import default_cache, embed_texts
from mia_serve.eval.bootstrap import cluster_bootstrap, paired_bootstrap
from mia_serve.eval.conversations import ConversationBenchmark, load_locomo
from mia_serve.eval.metrics import score_queries
from mia_serve.eval.study import hit_at_1
from mia_serve.eval.study_scores import ANALYZER, Layout, Part, TextVectors, lexical_scores, texts_of
from mia_serve.eval.versions import package_versions
from mia_serve.fusion import ALPHAS, leave_one_group_out, mix, rank, zscore
from mia_serve.lexical import BM25Index, get_analyzer
from mia_serve.retriever import COVER_TEMPERATURE
from mia_serve.signature import DEFAULT_WEIGHTS, select_sessions, session_prior, unique_in_order

K0, K_SUM, K_SUM_READ, WORDS = 50, 5, 3, 10  # an E2 of 224 tokens reads three summaries, as in its training
PRIOR_WEIGHTS = (0.0, 0.025, 0.05, 0.1, 0.2, 0.4)
VECTOR_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
WORD_WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.5)
ALL_TEXTS: tuple[Part, ...] = ("turns", "summary", "facts")
#: How sessions are indexed: by their turns alone, or by what a language model wrote about them as well.
INDEXED: dict[str, tuple[Part, ...]] = {"turns": ("turns",), "turns, summaries, facts": ALL_TEXTS}
#: Weights that go together, and what they give: (Q, S) scores.
Setting = tuple[float, ...]
Score = Callable[..., np.ndarray]


class Chosen(NamedTuple):
    """The signatures of Q questions over the S sessions of their conversations.

    Attributes:
        sessions: Positions in order of selection, (Q, K), -1 padded.
        weights: What `session_prior` gives each, (Q, K), 0 where padded.
    """

    sessions: np.ndarray
    weights: np.ndarray

    def table(self, width: int) -> np.ndarray:
        """Return the weights over all sessions, (Q, S)."""
        table = np.zeros((len(self.sessions), width + 1))
        np.put_along_axis(table, self.sessions, self.weights, axis=1)  # -1 is the last column, which is dropped
        return table[:, :width]


class Bench:
    """LoCoMo, every row measured so far, and the rows that they are compared with."""

    def __init__(self, n_boot: int, deals: int) -> None:
        self.benchmark: ConversationBenchmark = load_locomo("strict")
        self.layout = Layout.of(self.benchmark)
        self.questions = [question.text for question in self.benchmark.questions]
        self.groups = [question.group for question in self.benchmark.questions]
        self.n_boot, self.deals = n_boot, deals
        self.rows: list[dict[str, Any]] = []
        self.hits: dict[str, np.ndarray] = {}
        self.lexical = {name: lexical_scores(self.benchmark, self.layout, parts) for name, parts in INDEXED.items()}

    def members(self) -> list[tuple[int, np.ndarray]]:
        """Return each conversation with the rows of its questions."""
        owner = np.array([question.conversation for question in self.benchmark.questions])
        return [(int(number), np.flatnonzero(owner == number)) for number in np.unique(owner)]

    def add(self, key: str, settings: Sequence[Setting], score: Score, against: str | None) -> None:
        """Add a row whose setting is chosen, for each conversation, on the others.

        Args:
            key: Name of the row.
            settings: What is tried; of equally good ones the first is taken.
            score: Setting -> (Q, S) scores.
            against: Row that it is compared with.
        """
        scores, own, by_group = self._chosen(settings, score)
        self.hits[key] = own
        mean = cluster_bootstrap(own.tolist(), self.groups, n_boot=self.n_boot)
        row = {
            "row": key,
            "hit@1": _rounded(mean.mean, mean.low, mean.high),
            "ndcg@5": round(self._ndcg(scores), 4),
            "setting": Counter(" ".join(f"{value:g}" for value in settings[i]) for i in by_group.values()),
        }
        if against is not None:
            gain = paired_bootstrap(own.tolist(), self.hits[against].tolist(), self.groups, n_boot=self.n_boot)
            row |= {"against": against, "gain": _rounded(gain.mean, gain.low, gain.high), "p": gain.p_text}
        self.rows.append(row)
        print(_line(row), flush=True)

    def add_dealt(
        self,
        key: str,
        settings: Sequence[Setting],
        scorer: Callable[[Chosen], Score],
        chosen: Chosen,
        against: str,
        own: str,
    ) -> None:
        """Add what signatures give that are dealt out at random within each conversation, over many deals.

        Args:
            key: Name of the row.
            settings: As in ``add``; chosen anew for each deal.
            scorer: Signatures -> the score of ``add``.
            chosen: The questions' own signatures.
            against: Row that each deal is compared with.
            own: Row of the questions' own signatures.
        """
        gains = []
        for seed in range(self.deals):
            _, hits, _ = self._chosen(settings, scorer(dealt(self, chosen, seed)))
            gains.append(float((hits - self.hits[against]).mean()))
        reached = sum(gain >= float((self.hits[own] - self.hits[against]).mean()) for gain in gains)
        row = {"row": key, "against": against, "deals": self.deals, "gain": _rounded(np.mean(gains), *_range(gains))}
        self.rows.append(row | {"as_good_as_own": reached, "p": round((reached + 1) / (self.deals + 1), 3)})
        print(_line(self.rows[-1]), flush=True)

    def _chosen(self, settings: Sequence[Setting], score: Score) -> tuple[np.ndarray, np.ndarray, dict[Any, int]]:
        """Return the scores (Q, S) and hits (Q,) under the settings chosen, and the setting of each conversation."""
        hits = np.stack([hit_at_1(score(*setting), self.layout) for setting in settings], axis=1)
        chosen, by_group = leave_one_group_out(hits, self.groups)
        scores = np.empty(self.layout.present.shape)
        for column in np.unique(chosen):
            scores[chosen == column] = score(*settings[column])[chosen == column]
        return scores, hits[np.arange(len(chosen)), chosen], by_group

    def _ndcg(self, scores: np.ndarray) -> float:
        order = rank(np.where(self.layout.present, scores, -np.inf))
        counts = self.layout.present.sum(axis=1)
        ranked = [[str(s) for s in row[:n]] for row, n in zip(order, counts, strict=True)]
        gold = [[str(s) for s in question.gold] for question in self.benchmark.questions]
        found = score_queries(ranked, gold, metrics=("ndcg@5",))
        return float(np.mean([row["ndcg@5"] or 0.0 for row in found]))


class Side:
    """The dense side: an encoder's vectors of all texts and questions, and the signatures that they choose."""

    def __init__(self, bench: Bench, name: str, cache: Path | None) -> None:
        self.bench = bench
        self.encoder = Encoder.load(full_name(name), device="cpu", dtype="float32")
        sessions = [s for conversation in bench.benchmark.conversations for s in conversation.sessions]
        texts = [text for s in sessions for text in (*s.turns, s.summary, *s.facts)]
        self.documents = TextVectors(lambda t: embed_texts(self.encoder, t, "document", cache), texts)
        self.queries = embed_texts(self.encoder, bench.questions, "query", cache)

    def scores(self, indexed: str, queries: np.ndarray | None = None) -> np.ndarray:
        """Score sessions by the best of their texts, (Q, S), for vectors (Q, d) of the questions."""
        vectors = (self.queries if queries is None else queries).astype(np.float64)
        scores = np.zeros(self.bench.layout.present.shape, np.float32)
        for number, rows in self.bench.members():
            for position, session in enumerate(self.bench.benchmark.conversations[number].sessions):
                texts = self.documents.of(texts_of(session, INDEXED[indexed])).astype(np.float64)
                scores[rows, position] = (vectors[rows] @ texts.T).max(axis=1)
        return scores

    def summaries(self, number: int) -> np.ndarray:
        """Return the vectors of a conversation's summaries, (S, d)."""
        return self.documents.of([session.summary for session in self.bench.benchmark.conversations[number].sessions])

    def signatures(self, k: int, everything: bool = False) -> Chosen:
        """Choose a signature of at most k sessions for every question, by greedy among those of its K0 best turns.

        Args:
            k: Sessions in a signature.
            everything: Take all sessions of those turns instead, for the weights that they would have.
        """
        width = self.bench.layout.present.shape[1] if everything else k
        sessions = np.full((len(self.queries), width), -1)
        weights = np.zeros(sessions.shape)
        for number, rows in self.bench.members():
            conversation = self.bench.benchmark.conversations[number]
            owner = np.array([i for i, session in enumerate(conversation.sessions) for _ in session.turns])
            turns = self.documents.of([turn for session in conversation.sessions for turn in session.turns])
            queries, summaries = torch.from_numpy(self.queries[rows]), torch.from_numpy(self.summaries(number))
            scores = queries.numpy() @ turns.T
            best = rank(scores)[:, :K0]
            shares = torch.from_numpy(np.take_along_axis(scores, best, 1)).div(COVER_TEMPERATURE).softmax(dim=1)
            found = torch.from_numpy(owner[best])
            chosen = unique_in_order(found)
            if not everything:
                near = torch.from_numpy(turns[best])
                options: dict[str, Any] = {"k": k, "weights": DEFAULT_WEIGHTS, "cover": "member"}
                chosen = select_sessions(queries, near, summaries, chosen, found, shares, **options).indices
            activation = ((found[:, None, :] == chosen[:, :, None]) * shares[:, None, :]).sum(dim=2)
            relevance = (queries @ summaries.T).gather(1, chosen.clamp(min=0))
            sessions[rows, : chosen.shape[1]] = chosen
            weights[rows, : chosen.shape[1]] = session_prior(activation, relevance, chosen >= 0)
        return Chosen(sessions, weights)

    def towards(self, chosen: Chosen, weight: float) -> np.ndarray:
        """Return the questions' vectors moved towards the mean of their signatures' summaries, unit rows (Q, d)."""
        moved = (1 - weight) * self.queries
        for number, rows in self.bench.members():
            own, there = chosen.sessions[rows], chosen.sessions[rows] >= 0
            mean = (self.summaries(number)[own.clip(min=0)] * there[:, :, None]).sum(axis=1)
            moved[rows] += weight * mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return moved / np.linalg.norm(moved, axis=1, keepdims=True)

    def reads(self, chosen: Chosen) -> np.ndarray:
        """Return what the encoder, an E2, makes of the questions with their signatures, (Q, d)."""
        texts = []
        for question, own in zip(self.bench.benchmark.questions, chosen.sessions, strict=True):
            sessions = self.bench.benchmark.conversations[question.conversation].sessions
            texts.append([sessions[i].summary for i in own if i >= 0])
        return self.encoder.encode_queries(self.bench.questions, texts)


def dealt(bench: Bench, chosen: Chosen, seed: int) -> Chosen:
    """Give every question the signature of another question about the same conversation, drawn at random."""
    donor = np.empty(len(chosen.sessions), np.int64)
    random = np.random.default_rng(seed)
    for _, rows in bench.members():
        order = random.permutation(rows)
        donor[order] = np.roll(order, 1)
    return Chosen(chosen.sessions[donor], chosen.weights[donor])


def told(bench: Bench) -> Chosen:
    """Give every question the first session that holds its answer."""
    first = np.array([[question.gold[0]] for question in bench.benchmark.questions])
    return Chosen(first, np.ones(first.shape))


def word_scores(bench: Bench, indexed: str, chosen: Chosen) -> np.ndarray:
    """Score sessions by BM25 for the words that mark a question's signature, (Q, S).

    As in RM3 (Abdul-Jaleel et al., TREC 2004) with summaries as feedback documents: a word weighs its relative
    frequency in them, here times its idf among the summaries; the best that the question lacks are taken.
    """
    analyze = get_analyzer(ANALYZER)
    scores = np.zeros(bench.layout.present.shape)
    for number, rows in bench.members():
        sessions = bench.benchmark.conversations[number].sessions
        terms = [Counter(analyze(session.summary)) for session in sessions]
        spread = Counter(term for counts in terms for term in counts)
        idf = {term: np.log(1 + (len(terms) - n + 0.5) / (n + 0.5)) for term, n in spread.items()}
        queries = []
        for row in rows:
            own, weighed = set(analyze(bench.questions[row])), Counter[str]()
            for session, weight in zip(chosen.sessions[row], chosen.weights[row], strict=True):
                for term, count in terms[session].items() if session >= 0 else ():
                    if term not in own:
                        weighed[term] += weight * count / terms[session].total() * idf[term]
            best = sorted(weighed, key=lambda term: (-weighed[term], term))[:WORDS]
            queries.append(" ".join(best))
        documents = ["\n".join(texts_of(session, INDEXED[indexed])) for session in sessions]
        index = BM25Index([f"{i:04d}" for i in range(len(sessions))], documents, ANALYZER)
        scores[rows, : len(sessions)] = index.scores(queries)
    return scores


def measure_untrained(bench: Bench, side: Side, name: str) -> None:
    """Measure every use of a signature that needs no training, on either indexing."""
    there = bench.layout.present
    greedy, pool, gold = side.signatures(K_SUM), side.signatures(K_SUM, everything=True), told(bench)
    for indexed in INDEXED:
        lexical, dense = bench.lexical[indexed], side.scores(indexed)
        base = f"{name} | {indexed} | fusion"
        bench.add(base, [(alpha,) for alpha in ALPHAS], lambda a, le=lexical, de=dense: mix(le, de, a, there), None)

        def prior(chosen: Chosen, le: np.ndarray = lexical, de: np.ndarray = dense) -> Score:
            added = zscore(np.where(there, chosen.table(there.shape[1]), 0.0), there)
            return lambda a, w: mix(le, de, a, there) + w * added

        def vector(chosen: Chosen, le: np.ndarray = lexical, indexed: str = indexed) -> Score:
            moved = {weight: side.scores(indexed, side.towards(chosen, weight)) for weight in VECTOR_WEIGHTS}
            return lambda a, w: mix(le, moved[w], a, there)

        def words(chosen: Chosen, le: np.ndarray = lexical, de: np.ndarray = dense, indexed: str = indexed) -> Score:
            added = word_scores(bench, indexed, chosen)
            return lambda a, w: mix(le + w * added, de, a, there)

        uses = {
            "prior": (prior, PRIOR_WEIGHTS, {"signature": greedy, "whole pool": pool}),
            "vector": (vector, VECTOR_WEIGHTS, {"signature": greedy, "gold session": gold}),
            "words": (words, WORD_WEIGHTS, {"signature": greedy, "gold session": gold}),
        }
        for use, (scorer, weights, rows) in uses.items():
            settings = list(product(ALPHAS, weights))
            key = f"{name} | {indexed} | {use}"
            for label, chosen in rows.items():
                bench.add(f"{key} | {label}", settings, scorer(chosen), base)
            bench.add_dealt(f"{key} | dealt at random", settings, scorer, greedy, base, f"{key} | signature")


def measure_read(bench: Bench, chooser: Side, side: Side, name: str) -> None:
    """Measure an E2: its query alone, and with the signature that E1 chose, another question's, and the gold one."""
    greedy = chooser.signatures(K_SUM_READ)
    vectors = {"no signature": side.queries, "signature": side.reads(greedy)}
    vectors |= {"another question's": side.reads(dealt(bench, greedy, 0)), "gold session": side.reads(told(bench))}
    for indexed in INDEXED:
        base = f"{name} | {indexed} | read | no signature"
        for label, queries in vectors.items():
            lexical, dense = bench.lexical[indexed], side.scores(indexed, queries)
            key = f"{name} | {indexed} | read | {label}"
            settings = [(alpha,) for alpha in ALPHAS]
            score = lambda a, le=lexical, de=dense: mix(le, de, a, bench.layout.present)  # noqa: E731
            bench.add(key, settings, score, None if key == base else base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2", help="the study's encoder, untrained")
    parser.add_argument("--e1", help="folder of a trained E1, measured like the encoder and choosing for E2")
    parser.add_argument("--e2", help="folder of a trained E2; needs --e1")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the vector cache")
    parser.add_argument("--n-boot", type=int, default=10_000)
    parser.add_argument("--deals", type=int, default=20, help="random deals of the signatures to other questions")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.e2 and not arguments.e1:
        parser.error("--e2 needs --e1, which chooses its signatures")
    started = time.perf_counter()
    bench = Bench(arguments.n_boot, arguments.deals)
    measure_untrained(bench, Side(bench, arguments.encoder, arguments.cache), "MiniLM")
    if arguments.e1:
        chooser = Side(bench, arguments.e1, arguments.cache)
        measure_untrained(bench, chooser, "E1")
        if arguments.e2:
            measure_read(bench, chooser, Side(bench, arguments.e2, arguments.cache), "E2")
    record = {
        "benchmark": "LoCoMo, sessions of a conversation, strict evidence",
        "questions": len(bench.questions),
        "conversations": len(set(bench.groups)),
        "models": {"MiniLM": arguments.encoder, "E1": arguments.e1, "E2": arguments.e2},
        "settings": {
            "k0": K0,
            "k_sum": K_SUM,
            "k_sum_read": K_SUM_READ,
            "words": WORDS,
            "signature_weights": DEFAULT_WEIGHTS,
            "grids": {"alpha": ALPHAS, "prior": PRIOR_WEIGHTS, "vector": VECTOR_WEIGHTS, "words": WORD_WEIGHTS},
            "chosen_by": "Hit@1 of the other nine conversations, micro average, ties to the first of the grid",
            "interval": "95 % percentile, whole conversations resampled; p two-sided",
            "n_boot": arguments.n_boot,
            "deals": "gain is mean, least and greatest over the deals; p = (deals as good as own + 1) / (deals + 1)",
            "seed": 0,
        },
        "rows": bench.rows,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": package_versions(),
    }
    arguments.json.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _rounded(*values: float | None) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _line(row: dict[str, Any]) -> str:
    text = f"{row['row']:62}"
    if "hit@1" in row:
        text += f" Hit@1 {row['hit@1'][0]:.4f}  nDCG@5 {row['ndcg@5']:.4f}"
    if "gain" in row:
        mean, low, high = (100 * value for value in row["gain"])
        text += f"  {mean:+.2f} [{low:+.2f}, {high:+.2f}] p {row['p']}"
    return f"{text}  {dict(row.get('setting', {}))}"


if __name__ == "__main__":
    main()
