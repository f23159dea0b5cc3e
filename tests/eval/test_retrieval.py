"""The evaluation of all rows on a toy series, with encoders that count words."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mia_serve.core.errors import MiaError
from mia_serve.eval.datasets import Benchmark, Haystack, Query
from mia_serve.eval.metrics import METRICS, score_queries
from mia_serve.eval.retrieval import DEPTH, evaluate_retrieval, shuffle_donors
from mia_serve.mindscape import Book, Mindscape
from mia_serve.retriever import Retriever

DIM = 96


@dataclass(frozen=True)
class WordSpec:
    base: str
    alpha: float = 0.5
    pooling: str = "mean"
    max_query_tokens: int = 64
    max_document_tokens: int = 64


class WordEncoder:
    """Sum one fixed random vector a word; the signature is mixed in by alpha, as in an E2 that heeds it."""

    device = torch.device("cpu")
    dim = DIM

    def __init__(self, name: str, seed: int = 0, noise: float = 0.0) -> None:
        self.spec = WordSpec(name)
        self.spec_hash = f"{name}-{seed}"
        self.seed, self.noise = seed, noise

    def _vectors(self, texts: Sequence[str], noise: float = 0.0) -> np.ndarray:
        rows = np.zeros((len(texts), DIM), dtype=np.float32)
        for i, text in enumerate(texts):
            for word in text.lower().split():
                rows[i] += np.random.default_rng(zlib.crc32(word.encode())).normal(size=DIM)
            if noise:
                rows[i] += noise * np.random.default_rng(zlib.crc32(text.encode()) + self.seed).normal(size=DIM)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def encode_documents(self, texts: Sequence[str], out: np.ndarray | None = None) -> np.ndarray:
        return self._vectors(texts)

    def encode_queries(
        self, texts: Sequence[str], signatures: Sequence[Any] | None = None, alpha: float | None = None
    ) -> np.ndarray:
        rows = self._vectors(texts, self.noise)
        share = self.spec.alpha if alpha is None else alpha
        for i, signature in enumerate(signatures or []):
            if signature:
                rows[i] = (1 - share) * rows[i] + share * self._vectors([" ".join(signature)])[0]
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


BASE, E1, E2 = WordEncoder("base", 1, 3.0), WordEncoder("e1", 2, 1.0), WordEncoder("e2", 3, 1.0)


def _book(number: int, chunks: int = 16) -> Book:
    texts = [
        f"lamp boat quay hero{number} scene{number}x{i // 4} detail{i % 4} word{number}y{i}" for i in range(chunks)
    ]
    summaries = [f"hero{number} scene{number}x{w}" for w in range(-(-chunks // 4))]
    return Book(f"b{number}", tuple(texts), summaries=tuple(summaries))


def _queries(number: int, count: int = 6, chunks: int = 16) -> list[Query]:
    picks = np.random.default_rng(number).choice(chunks, size=count, replace=False)
    return [
        Query(f"q{number}-{i}", f"hero{number} detail{i % 4}", (f"b{number}:{i}",), f"b{number}")
        for i in map(int, picks)
    ]


def _benchmark(books: int = 4, series: bool = True) -> Benchmark:
    mindscapes = [Mindscape.from_books([_book(n)], window=4) for n in range(books)]
    queries = [_queries(n) for n in range(books)]
    if series:
        pooled = Haystack("all", Mindscape.concat(mindscapes), tuple(q for own in queries for q in own))
        return Benchmark("toy", "test", True, (pooled,))
    haystacks = tuple(Haystack(f"b{n}", m, tuple(q)) for n, (m, q) in enumerate(zip(mindscapes, queries, strict=True)))
    return Benchmark("toy", "test", False, haystacks)


def _run(benchmark: Benchmark, **options: Any) -> Any:
    settings = {"base": BASE, "e1": E1, "e2": E2, "k0": 8, "k_sum": 2, "n_boot": 200} | options
    return evaluate_retrieval(benchmark, **settings)


ALL = ("base", "e1", "prior", "none", "first_k", "coverage", "coverage_prior", "shuffled", "oracle")


def test_rows_and_pairs() -> None:
    report = _run(_benchmark(), rows=ALL)
    assert [row.key for row in report.rows] == list(ALL)
    assert [row.label for row in report.rows][5] == "E2, coverage signature"
    assert [row.oracle for row in report.rows] == [False] * 8 + [True]
    named = {(pair.first, pair.second) for pair in report.pairs}
    assert named >= {
        ("e1", "base"), ("coverage", "e1"), ("coverage", "none"), ("coverage", "first_k"), ("coverage", "shuffled"),
    }  # fmt: skip
    for pair in report.pairs:
        for metric in METRICS:
            difference = report.row(pair.first).metrics[metric].mean - report.row(pair.second).metrics[metric].mean
            assert pair.metrics[metric].mean == pytest.approx(difference)


def test_rows_without_their_encoder_are_absent() -> None:
    assert [row.key for row in _run(_benchmark(), e2=None).rows] == ["base", "e1", "prior"]
    assert [row.key for row in _run(_benchmark(), e1=None, e2=None).rows] == ["base"]
    without_e1 = [row.key for row in _run(_benchmark(), e1=None).rows]
    assert without_e1 == ["base", "none", "first_k", "coverage", "coverage_prior", "shuffled"]
    assert "oracle" not in [row.key for row in _run(_benchmark()).rows]


def test_means_equal_a_direct_computation() -> None:
    benchmark = _benchmark()
    report = _run(benchmark)
    haystack = benchmark.haystacks[0]
    texts = [query.text for query in haystack.queries]
    ids = np.array([chunk.id for chunk in haystack.mindscape.chunks])
    documents = BASE.encode_documents([chunk.text for chunk in haystack.mindscape.chunks])
    order = np.argsort(-(BASE.encode_queries(texts) @ documents.T), axis=1, kind="stable")
    scores = score_queries([list(ids[row]) for row in order], [query.gold for query in haystack.queries])
    retriever = Retriever(haystack.mindscape, E1, E2, k0=8, k_sum=2)  # type: ignore[arg-type]
    hits = retriever.search(texts, k=DEPTH, signature="coverage").hits
    covered = score_queries(hits.ids, [query.gold for query in haystack.queries])
    for metric in METRICS:
        assert report.row("base").metrics[metric].mean == pytest.approx(np.mean([row[metric] for row in scores]))
        assert report.row("coverage").metrics[metric].mean == pytest.approx(np.mean([row[metric] for row in covered]))


def test_haystacks_apart_equal_their_own_evaluations() -> None:
    benchmark = _benchmark(series=False)
    whole = _run(benchmark, rows=("base", "e1", "none", "coverage"))
    parts = [
        _run(Benchmark("toy", "test", False, (haystack,)), rows=("base", "e1", "none", "coverage"))
        for haystack in benchmark.haystacks
    ]
    for row in whole.rows:
        means = [part.row(row.key).metrics["mrr"].mean for part in parts]
        assert row.metrics["mrr"].mean == pytest.approx(np.mean(means))
        assert row.metrics["mrr"].clusters == 4


def test_shuffled_row_searches_with_the_donors_signature() -> None:
    for series in (True, False):
        benchmark = _benchmark(series=series)
        report = _run(benchmark)
        by_id = {result.id: result for result in report.queries}
        haystacks = {haystack.id: haystack for haystack in benchmark.haystacks}
        summaries = {s.id: s.summary for h in benchmark.haystacks for s in h.mindscape.sessions}
        for result in report.queries:
            donor = by_id[result.donor]
            assert donor.group != result.group
            assert result.signatures["shuffled"] == donor.signatures["coverage"]
            haystack = haystacks[result.haystack]
            text = next(query.text for query in haystack.queries if query.id == result.id)
            given = [summaries[i] for i in sorted(donor.signatures["coverage"])]
            retriever = Retriever(haystack.mindscape, E1, E2)  # type: ignore[arg-type]
            ids = retriever.search([text], k=DEPTH, signature=[given]).hits.ids
            assert score_queries(ids, [result.gold])[0]["mrr"] == pytest.approx(result.scores["shuffled"]["mrr"])
        assert len({result.donor for result in report.queries}) == len(report.queries)


@pytest.mark.parametrize("sizes", [[3, 3], [5, 1, 4], [1] * 9, [7, 2], [6], [2, 2, 2, 2]])
def test_donors_are_a_derangement_that_leaves_the_group_where_it_can(sizes: list[int]) -> None:
    groups = [f"g{g}" for g, size in enumerate(sizes) for _ in range(size)]
    total, largest = len(groups), max(sizes)
    for seed in range(20):
        donors = shuffle_donors(groups, seed)
        assert sorted(donors) == list(range(total))
        assert not (donors == np.arange(total)).any()
        inside = sum(groups[i] == groups[donor] for i, donor in enumerate(donors))
        assert inside == max(0, 2 * largest - total)  # the least that any derangement can have
        assert (donors == shuffle_donors(groups, seed)).all()
    assert shuffle_donors(["only"], 0) is None


def test_one_question_has_no_shuffled_row() -> None:
    one = _benchmark(books=1)
    alone = Benchmark("toy", "test", True, (Haystack("all", one.haystacks[0].mindscape, one.haystacks[0].queries[:1]),))
    report = _run(alone)
    assert "shuffled" not in [row.key for row in report.rows]
    assert report.row("e1").metrics["mrr"].low is None
    assert "One group only" in report.to_text()


def test_gold_session_shares_and_oracle() -> None:
    report = _run(_benchmark(), rows=ALL)
    found = report.coverage
    assert 0 < found["coverage"]["any_gold_session"] <= found["pool"]["any_gold_session"] <= 1
    assert found["coverage"]["mean_sessions"] <= 2
    expected = np.mean([any(s in r.signatures["coverage"] for s in r.signatures["oracle"]) for r in report.queries])
    assert found["coverage"]["any_gold_session"] == pytest.approx(expected)
    low, reached, high = (report.row(key).metrics["mrr"].mean for key in ("e1", "coverage", "oracle"))
    assert high > low
    assert report.gap_share()["mrr"] == pytest.approx((reached - low) / (high - low))


def test_evl_07_haystack_size_and_chance_are_reported_and_small_haystacks_refused() -> None:
    report = _run(_benchmark())
    assert report.benchmark["haystack_sizes"] == {"min": 64, "median": 64.0, "max": 64}
    assert report.chance["r@10"] == pytest.approx(10 / 64)
    small = Mindscape.from_books([_book(9, chunks=8)], window=4)
    few = Haystack("small", small, tuple(_queries(9, 3, 8)))
    with pytest.raises(MiaError, match="largest haystack has 8 chunks"):
        _run(Benchmark("toy", "test", False, (few,)))
    mixed = Benchmark("toy", "test", False, (*_benchmark(2, series=False).haystacks, few))
    report = _run(mixed)
    assert report.refused == {"r@10": 3, "ndcg@10": 3}
    assert (report.row("base").metrics["r@10"].n, report.row("base").metrics["r@10"].excluded) == (12, 3)
    assert report.row("base").metrics["r@5"].n == 15
    assert "R@10 leaves out 3 question(s)" in report.to_text()


def test_evl_09_question_without_gold_is_null_and_counted() -> None:
    benchmark = _benchmark()
    haystack = benchmark.haystacks[0]
    queries = (*haystack.queries, Query("nogold", "hero1", (), "b1"))
    report = _run(Benchmark("toy", "test", True, (Haystack("all", haystack.mindscape, queries),)), rows=ALL)
    assert report.queries[-1].scores["e1"] == dict.fromkeys(METRICS, None)
    assert report.benchmark["queries_without_gold"] == 1
    interval = report.row("e1").metrics["mrr"]
    assert (interval.n, interval.excluded) == (24, 1)
    assert interval.mean == pytest.approx(_run(benchmark).row("e1").metrics["mrr"].mean)


def test_evl_13_output_says_how_intervals_were_made() -> None:
    record = _run(_benchmark(), seed=5).to_dict()
    assert record["settings"]["n_boot"] == 200 and record["settings"]["seed"] == 5
    assert record["settings"]["p_value"] == "two-sided"
    assert record["rows"][0]["metrics"]["mrr"]["clusters"] == 4


def test_evl_15_unknown_row_lists_the_available_ones() -> None:
    with pytest.raises(MiaError, match="unknown row 'e3'; available: base, e1, prior, none"):
        _run(_benchmark(), rows=("e3",))


def test_bad_benchmarks_are_refused() -> None:
    with pytest.raises(MiaError, match="no first-stage encoder"):
        _run(_benchmark(), base=None, e1=None)
    mindscape = _benchmark().haystacks[0].mindscape
    with pytest.raises(MiaError, match="has no question"):
        _run(Benchmark("toy", "test", True, (Haystack("all", mindscape, ()),)))
    with pytest.raises(MiaError, match="gold 'b9:0' of question 'q' is no chunk"):
        _run(Benchmark("toy", "test", True, (Haystack("all", mindscape, (Query("q", "x", ("b9:0",), "g"),)),)))
    with pytest.raises(MiaError, match="question 'q' of haystack 'all' is empty"):
        _run(Benchmark("toy", "test", True, (Haystack("all", mindscape, (Query("q", " ", ("b1:0",), "g"),)),)))


def test_same_seed_same_report_and_valid_json() -> None:
    one, two = (_run(_benchmark(), rows=ALL).to_dict() for _ in range(2))
    one.pop("seconds"), two.pop("seconds")
    assert one == two
    report = _run(_benchmark(), rows=ALL)
    record = json.loads(report.to_json())
    assert record["encoders"]["e2"]["spec_hash"] == "e2-3"
    assert record["encoders"]["selector"]["spec_hash"] == "e1-2"
    assert record["versions"]["torch"]
    lines = [json.loads(line) for line in report.query_lines().splitlines()]
    assert len(lines) == record["benchmark"]["queries"] == 24
    assert set(lines[0]["scores"]) == set(ALL)


def test_table_fits_100_columns_and_cuts_nothing() -> None:
    text = _run(_benchmark(), rows=ALL).to_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    for label in ("base encoder", "E2, gold-session signature*", "coverage - shuffled", "chance", "nDCG@10"):
        assert label in text


def test_settings_reach_the_retriever() -> None:
    report = _run(_benchmark(), candidates="e1_topk", k0=3, alpha=0.0)
    assert report.settings["alpha"] == 0.0 and report.settings["candidates"] == "e1_topk"
    for metric in METRICS:  # alpha 0 is the query alone
        assert report.row("coverage").metrics[metric].mean == report.row("none").metrics[metric].mean


def test_the_papers_coverage_can_be_asked_for() -> None:
    default, paper = _run(_benchmark()), _run(_benchmark(), cover="semantic", cover_weight="uniform")
    assert (default.settings["cover"], paper.settings["cover_weight"]) == ("member", "uniform")
    chosen = [[result.signatures["coverage"] for result in report.queries] for report in (default, paper)]
    assert chosen[0] != chosen[1]


def test_global_summary_row_shows_e2_the_book_of_the_best_chunk() -> None:
    benchmark = _benchmark()
    report = _run(benchmark, rows=("e1", "none", "coverage", "global_summary"))
    assert [row.key for row in report.rows] == ["e1", "none", "coverage", "global_summary"]
    assert ("coverage", "global_summary") in {(pair.first, pair.second) for pair in report.pairs}
    haystack = benchmark.haystacks[0]
    books = {session.id: session.book_id for session in haystack.mindscape.sessions}
    retriever = Retriever(haystack.mindscape, E1, E2, k0=8, k_sum=2)  # type: ignore[arg-type]
    texts = [query.text for query in haystack.queries]
    hits = retriever.search(texts, k=DEPTH, signature="global_summary").hits
    means = score_queries(hits.ids, [query.gold for query in haystack.queries])
    for metric in METRICS:
        assert report.row("global_summary").metrics[metric].mean == pytest.approx(np.mean([m[metric] for m in means]))
    first = retriever.search(texts, k=1, encoder="e1").hits.ids
    for result, (best,) in zip(report.queries, first, strict=True):
        assert {books[session] for session in result.signatures["global_summary"]} == {best.split(":")[0]}
    right = [result.group == best.split(":")[0] for result, (best,) in zip(report.queries, first, strict=True)]
    assert report.coverage["global_summary"]["any_gold_session"] == pytest.approx(np.mean(right))
    assert f"book {np.mean(right):.3f} (of 4.0)" in " ".join(report.to_text().split())
    assert "global_summary" not in [row.key for row in _run(benchmark).rows]


def test_progress_is_told() -> None:
    lines: list[str] = []
    _run(_benchmark(series=False), progress=lines.append)
    assert lines[0] == "b0 (1 of 4): 16 chunks" and lines[-1] == "intervals"
