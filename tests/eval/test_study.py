"""The chat-memory study against a slow reference on a small benchmark, and against the published figures on LoCoMo."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import warnings
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval

from mia_serve.core import MiaError
from mia_serve.eval.conversations import ChatSession, Conversation, ConversationBenchmark, Question
from mia_serve.eval.study import fusion_groups, run_study
from mia_serve.eval.study_plots import study_plots
from mia_serve.eval.study_report import Study
from mia_serve.eval.study_tables import study_text
from mia_serve.eval.trec import decreasing, trec_files
from mia_serve.lexical import get_analyzer

WORDS = [
    a + b for a in ("boat", "lamp", "clock", "ferry", "garden", "violin") for b in ("", "s", "man", "yard", "side")
]


class BagEncoder:
    """Unit vectors that are sums of one fixed random vector a word: near texts share words."""

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        return self.encode_documents(texts)

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        rows = [sum((_word(word) for word in text.lower().split()), np.full(12, 1e-3)) for text in texts]
        return np.array([row / np.linalg.norm(row) for row in rows], np.float32).reshape(len(texts), 12)


def _word(word: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(word.encode())).normal(size=12)


def toy(conversations: int = 3, questions: int = 12, seed: int = 1) -> ConversationBenchmark:
    rng = np.random.default_rng(seed)
    talks, asked = [], []
    for c in range(conversations):
        sessions = []
        for s in range(7 + c):
            turns = tuple(f"A: {' '.join(rng.choice(WORDS, 5))}" for _ in range(int(rng.integers(1, 9))))
            facts = tuple(" ".join(rng.choice(WORDS, 3)) for _ in range(2))
            sessions.append(ChatSession(f"S{s}", turns, tuple(map(str, range(len(turns)))), f"{turns[0]} s", facts))
        talks.append(Conversation(f"c{c}", tuple(sessions)))
        for q in range(questions):
            gold = sorted(rng.choice(len(sessions), int(rng.integers(1, 3)), replace=False).tolist())
            turn = sessions[gold[0]].turns[0].split()[1:]
            text = " ".join([*rng.choice(turn, 2), *rng.choice(WORDS, 2)])
            kind = ("single-hop", "temporal", "adversarial")[q % 3]
            asked.append(Question(f"c{c}:q{q}", text, c, tuple(gold), f"c{c}", kind))
    return ConversationBenchmark("toy", tuple(talks), tuple(asked), {}, {})


@pytest.fixture(scope="module")
def study() -> Study:
    return run_study(toy(), BagEncoder(), full=True, n_boot=200, seed=3)


# --- a slow reference: one question, one session, one number at a time


def ref_bm25(sessions: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    cut = get_analyzer("study")
    documents = [cut(text) for text in sessions]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        total = 0.0
        for term in set(cut(query)):
            frequency, df = document.count(term), sum(term in other for other in documents)
            idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
            total += idf * frequency / (frequency + k1 * (1 - b + b * len(document) / mean))
        scores.append(total)
    return scores


def ref_pool(query: np.ndarray, turns: np.ndarray, how: str) -> float:
    cosines = sorted((float(np.dot(query.astype(float), turn.astype(float))) for turn in turns), reverse=True)
    if how == "early":
        mean = turns.astype(float).mean(axis=0)
        return float(np.dot(query.astype(float), mean / np.linalg.norm(mean)))
    if how == "max":
        return cosines[0]
    if how == "top3":
        return sum(cosines[:3]) / len(cosines[:3])
    total = sum(math.exp(10 * cosine) for cosine in cosines)
    return math.log(total if how == "lse10" else total / len(cosines)) / 10


def ref_z(values: list[float]) -> list[float]:
    deviation = statistics.pstdev(values)
    return [0.0 if deviation < 1e-9 else (v - statistics.fmean(values)) / deviation for v in values]


def ref_order(scores: list[float]) -> list[int]:
    # Scores are compared as the product's are stored: float32 sums that should tie may part in the 16th digit.
    return sorted(range(len(scores)), key=lambda i: (-round(scores[i], 6), i))


def ref_metrics(order: list[int], gold: tuple[int, ...]) -> dict[str, float]:
    gains = [1 / math.log2(rank + 2) for rank, i in enumerate(order[:5]) if i in gold]
    ideal = sum(1 / math.log2(rank + 2) for rank in range(min(5, len(gold))))
    found = {f"r@{k}": len(set(order[:k]) & set(gold)) / len(gold) for k in (1, 3, 5)}
    first = min(order.index(i) for i in gold)
    return found | {"hit@1": float(order[0] in gold), "mrr": 1 / (first + 1), "ndcg@5": sum(gains) / ideal}


@pytest.mark.parametrize("pooling", ["early", "max", "top3", "lme10", "lse10"])
def test_study_equals_a_slow_reference(study: Study, pooling: str) -> None:
    benchmark, encoder = toy(), BagEncoder()
    lexical, dense = [], []
    for question in benchmark.questions:
        sessions = benchmark.conversations[question.conversation].sessions
        query = encoder.encode_queries([question.text])[0]
        lexical.append(ref_bm25(["\n".join(s.turns) for s in sessions], question.text))
        dense.append([ref_pool(query, encoder.encode_documents(list(s.turns)), pooling) for s in sessions])
    alphas = [step / 20 for step in range(21)]
    mixed = [
        [[a * x + (1 - a) * y for x, y in zip(ref_z(left), ref_z(right), strict=True)] for a in alphas]
        for left, right in zip(lexical, dense, strict=True)
    ]
    hits = [
        [float(ref_order(scores)[0] in q.gold) for scores in row]
        for row, q in zip(mixed, benchmark.questions, strict=True)
    ]
    row = study.row(f"bm25+{pooling}")
    for number, question in enumerate(benchmark.questions):
        others = [
            hit for hit, q in zip(hits, benchmark.questions, strict=True) if q.conversation != question.conversation
        ]
        means = [sum(column) for column in zip(*others, strict=True)]
        best = means.index(max(means))
        assert row.chosen[question.group] == pytest.approx(alphas[best])
        result = study.questions[number]
        for key, scores in (
            ("bm25", lexical[number]), (pooling, dense[number]), (f"bm25+{pooling}", mixed[number][best]),
        ):  # fmt: skip
            wanted = ref_metrics(ref_order(scores), question.gold)
            assert result.scores[key] == pytest.approx(wanted), (question.id, key)
    assert row.metrics["mrr"].mean == pytest.approx(np.mean([q.scores[row.key]["mrr"] for q in study.questions]))


def test_rrf_equals_a_slow_reference(study: Study) -> None:
    for result in study.questions:
        ranks: dict[str, float] = {}
        for key in ("bm25", "max"):
            for rank, session in enumerate(result.rankings[key], 1):
                ranks[session] = ranks.get(session, 0.0) + 1 / (60 + rank)
        wanted = sorted(ranks, key=lambda session: (-round(ranks[session], 12), int(session[1:])))
        assert result.rankings["rrf"] == wanted


def test_alpha_by_query_is_the_share_of_the_best_z_scores(study: Study) -> None:
    benchmark, encoder = toy(), BagEncoder()
    for question, result in zip(benchmark.questions, study.questions, strict=True):
        sessions = benchmark.conversations[question.conversation].sessions
        query = encoder.encode_queries([question.text])[0]
        lexical = ref_z(ref_bm25(["\n".join(s.turns) for s in sessions], question.text))
        dense = ref_z([ref_pool(query, encoder.encode_documents(list(s.turns)), "max") for s in sessions])
        alpha = max(lexical) / (max(lexical) + max(dense))
        assert result.alphas["adaptive"] == pytest.approx(alpha, abs=1e-5)
        order = ref_order([alpha * x + (1 - alpha) * y for x, y in zip(lexical, dense, strict=True)])
        assert result.rankings["adaptive"] == [f"S{i}" for i in order]
    spread = study.row("adaptive").alpha
    assert spread["min"] < spread["mean"] < spread["max"] and study.row("adaptive").chosen is None


def test_curve_and_lengths_are_those_of_the_rows(study: Study) -> None:
    curve = study.curve
    assert curve is not None and len(curve.alphas) == 21
    assert curve.everywhere[-1] == pytest.approx(study.row("bm25").metrics["hit@1"].mean)
    assert curve.everywhere[0] == pytest.approx(study.row("max").metrics["hit@1"].mean)
    assert curve.best[1] == max(curve.everywhere)
    assert set(curve.by_group) == {"c0", "c1", "c2"}
    assert sum(one.gap.n for one in study.lengths) == 36
    whole = sum(one.gap.mean * one.gap.n for one in study.lengths) / 36
    assert whole == pytest.approx(study.difference("max", "early").hit.mean)


def test_evl_14_alpha_is_never_chosen_on_its_own_conversation(study: Study) -> None:
    # Whatever is gold in conversation c0, its alpha stays; that of the others may not.
    benchmark = toy()
    changed = tuple(replace(q, gold=(0,)) if q.group == "c0" else q for q in benchmark.questions)
    other = run_study(replace(benchmark, questions=changed), BagEncoder(), n_boot=10)
    assert other.row("bm25+max").chosen["c0"] == study.row("bm25+max").chosen["c0"]
    assert other.row("bm25+max").chosen != study.row("bm25+max").chosen


def test_evl_13_intervals_by_conversation_say_how_they_were_made(study: Study) -> None:
    hit = study.row("bm25").metrics["hit@1"]
    assert (hit.clusters, hit.n, hit.n_boot, hit.seed) == (3, 36, 200, 3)
    difference = study.difference("bm25+max", "max").hit
    assert (difference.sides, difference.clusters) == (1, 3)
    record = study.to_dict()
    assert record["settings"]["p_value"] == "one-sided: share of resamples <= 0"
    assert record["settings"]["interval"] == "95 % percentile, whole conversations resampled"
    (shown,) = [one for one in record["differences"] if one["label"] == "fusion - late"]
    assert shown["p"] == ("< 0.005" if difference.p_value == 0 else f"{difference.p_value:.2g}")


def test_evl_10_adversarial_questions_stand_apart(study: Study) -> None:
    row = study.row("bm25+max")
    assert list(row.categories) == ["single-hop", "temporal", "adversarial", "all but adversarial"]
    counts = {kind: value.n for kind, value in row.categories.items()}
    assert counts == {"single-hop": 12, "temporal": 12, "adversarial": 12, "all but adversarial": 24}
    honest = [q.scores["bm25+max"]["hit@1"] for q in study.questions if q.category != "adversarial"]
    assert row.categories["all but adversarial"].mean == pytest.approx(np.mean(honest))
    assert study.row("turns").section == "trivial" and study.chance["hit@1"] > 0


def test_hit_at_1_is_not_recall_at_1(study: Study) -> None:
    several = [q for q in study.questions if len(q.gold) == 2 and q.scores["bm25"]["hit@1"] == 1]
    assert several and all(q.scores["bm25"]["r@1"] == 0.5 for q in several)
    means = study.row("bm25").metrics
    assert means["r@1"].mean < means["hit@1"].mean


def small(sessions: list[tuple[str, ...]], questions: list[tuple[str, tuple[int, ...]]]) -> ConversationBenchmark:
    """Two copies of a conversation, so that there is another one to choose alpha on."""
    talks = tuple(
        Conversation(name, tuple(ChatSession(f"S{i}", turns, ()) for i, turns in enumerate(sessions))) for name in "ab"
    )
    asked = tuple(
        Question(f"{name}{i}", text, number, gold, name, "any")
        for number, name in enumerate("ab")
        for i, (text, gold) in enumerate(questions)
    )
    return ConversationBenchmark("small", talks, asked)


def test_ties_go_to_the_earlier_session_and_an_empty_one_comes_last() -> None:
    benchmark = small([("ferry lamp",), (), ("ferry lamp",), ("boat",)], [("ferry", (2,)), ("boat", (3,))])
    found = run_study(benchmark, BagEncoder(), full=True, n_boot=10)
    ferry = found.questions[0]
    for key in ("bm25", "max", "early", "bm25+max", "rrf"):
        order = ferry.rankings[key]
        assert order.index("S0") < order.index("S2"), key
    assert all(found.questions[0].rankings[key][-1] == "S1" for key in ("early", "max", "top3", "lme10", "lse10"))


def test_a_question_without_a_known_word_is_left_to_the_dense_side() -> None:
    # BM25 is 0 everywhere: its z-scores are zeros and not NaN, and the mix is the dense order.
    benchmark = small([("ferry lamp",), ("boat",), ("clock",)], [("zzz yyy", (1,)), ("boat", (1,))])
    found = run_study(benchmark, BagEncoder(), n_boot=10)
    first = found.questions[0]
    assert first.rankings["bm25"] == ["S0", "S1", "S2"]
    assert first.rankings["bm25+max"] == first.rankings["max"]


def test_log_sum_exp_favours_long_sessions_and_log_mean_exp_does_not() -> None:
    line = ("boat lamp",)
    benchmark = small([line, line * 40, ("clock",)], [("boat", (0,)), ("clock", (2,))])
    found = run_study(benchmark, BagEncoder(), full=True, n_boot=10)
    boat = found.questions[0]
    assert boat.rankings["lse10"][0] == "S1"
    assert boat.ranked_scores["lse10"][0] == pytest.approx(boat.ranked_scores["lme10"][0] + math.log(40) / 10, abs=1e-6)
    assert boat.rankings["lme10"][:2] == ["S0", "S1"]  # a tie
    assert boat.ranked_scores["lme10"][0] == pytest.approx(boat.ranked_scores["lme10"][1], abs=1e-6)


def test_summaries_are_reported_apart_and_are_what_is_indexed(study: Study) -> None:
    rows = [row for row in study.rows if row.section == "summaries"]
    assert len(rows) == 9
    same = {"index:text": "bm25", "index:text|turns": "bm25+max"}
    for apart, plain in same.items():
        assert [q.rankings[apart] for q in study.questions] == [q.rankings[plain] for q in study.questions]
    # The index text of a session decides: a word that only a summary holds finds it.
    benchmark = small([("ferry",), ("boat",), ("clock",)], [("violin", (2,)), ("ferry", (0,))])
    told = tuple(
        replace(c, sessions=(*c.sessions[:2], replace(c.sessions[2], summary="violin", facts=("violin side",))))
        for c in benchmark.conversations
    )
    found = run_study(replace(benchmark, conversations=told), full=True, n_boot=10)
    assert found.questions[0].rankings["bm25"][0] == "S0"
    assert found.questions[0].rankings["index:text+summary"][0] == "S2"
    assert "language model wrote" in study_text(found)


def test_bm25_alone_without_an_encoder() -> None:
    found = run_study(toy(), n_boot=10)
    assert [row.key for row in found.rows] == ["bm25"]
    assert found.curve is None and found.lengths == () and found.differences == ()
    assert "BM25" in study_text(found) and set(study_plots(found)) == {"categories.png"}


class WordCount:
    """A re-ranker that prefers long turns."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []

    def scores(self, pairs: list[tuple[str, str]]) -> np.ndarray:
        self.pairs = list(pairs)
        return np.array([len(turn.split()) for _, turn in pairs], np.float32)


def test_re_ranking_reorders_the_first_ten_by_their_best_turn() -> None:
    lines = [("boat",) if i < 6 else ("boat", "boat clock " + "lamp " * i) for i in range(14)]
    benchmark = small(lines, [("boat clock lamp", (13,)), ("boat", (1,))])
    model = WordCount()
    found = run_study(benchmark, BagEncoder(), reranker=model, n_boot=10)  # type: ignore[arg-type]
    assert len(model.pairs) == 4 * 10
    first = found.questions[0]
    fused, moved = first.rankings["fixed"], first.rankings["reranked"]
    assert set(moved[:10]) == set(fused[:10]) and moved[10:] == fused[10:]
    read = dict(zip(fused[:10], (turn for _, turn in model.pairs[:10]), strict=True))
    best = BagEncoder()
    query = best.encode_queries(["boat clock lamp"])[0]
    for session, turn in read.items():
        turns = lines[int(session[1:])]
        assert turn == turns[int((best.encode_documents(list(turns)) @ query).argmax())]
    lengths = [len(read[session].split()) for session in moved[:10]]
    assert lengths == sorted(lengths, reverse=True)
    assert found.to_dict()["settings"]["rerank"] == {"alpha": 0.6, "top": 10, "max_length": 256}
    assert found.difference("reranked", "fixed").hit.n == 4


# --- questions with a conversation each (LongMemEval)


def own_haystacks(count: int = 23) -> ConversationBenchmark:
    base = toy(1, count)
    talks = tuple(replace(base.conversations[0], id=f"t{i}") for i in range(count))
    asked = tuple(replace(q, conversation=i, group=q.id) for i, q in enumerate(base.questions))
    return replace(base, name="LongMemEval", conversations=talks, questions=asked)


def test_longmemeval_alpha_by_folds_and_bootstrap_over_questions() -> None:
    benchmark = own_haystacks()
    groups = fusion_groups(benchmark, 5, seed=0)
    assert sorted({groups.count(fold) for fold in groups}) == [4, 5] and len(set(groups)) == 5
    assert groups == fusion_groups(benchmark, 5, seed=0) != fusion_groups(benchmark, 5, seed=1)
    found = run_study(benchmark, BagEncoder(), full=True, n_boot=100)
    assert set(found.row("bm25+max").chosen) == {f"fold {i}" for i in range(1, 6)}
    assert found.row("bm25").metrics["hit@1"].clusters == 23
    record = found.to_dict()
    assert record["settings"]["interval"] == "95 % percentile, questions resampled"
    assert "5-fold cross-validation over questions" in record["settings"]["alpha"]["chosen_by"]
    # One question's own conversation is what is searched: the same scores as in one shared conversation.
    alone = run_study(toy(1, 23), n_boot=10)
    assert [q.rankings["bm25"] for q in alone.questions] == [q.rankings["bm25"] for q in found.questions]


def test_evl_07_evl_09_a_cutoff_that_sessions_cannot_hold_has_no_value() -> None:
    benchmark = small([("ferry",), ("boat",), ("clock",)], [("boat", (1,)), ("clock", (2,))])
    found = run_study(benchmark, n_boot=10)
    scores = found.questions[0].scores["bm25"]
    assert scores["r@3"] is None and scores["r@5"] is None and scores["ndcg@5"] is None and scores["hit@1"] == 1.0
    assert found.refused == {"r@3": 4, "r@5": 4, "ndcg@5": 4}
    assert found.row("bm25").metrics["r@5"].mean is None
    text = study_text(found)
    assert "n/a" in text and "R@5 leaves out 4 question(s)" in text
    json.dumps(found.to_dict(), allow_nan=False)


def test_one_session_says_nothing_anywhere() -> None:
    # Its first session is gold whatever the ranking: it enters no mean, no curve, no count.
    base = own_haystacks(12)
    short = replace(base.conversations[0], sessions=(ChatSession("S0", ("A: boat",) * 30, ()),))
    asked = (replace(base.questions[0], gold=(0,), category="lonely"), *base.questions[1:])
    benchmark = replace(base, conversations=(short, *base.conversations[1:]), questions=asked)
    found = run_study(benchmark, BagEncoder(), full=True, n_boot=10)
    assert found.refused["hit@1"] == 1
    assert found.curve.everywhere[-1] == pytest.approx(found.row("bm25").metrics["hit@1"].mean)
    assert found.curve.everywhere[0] == pytest.approx(found.row("max").metrics["hit@1"].mean)
    assert found.row("adaptive").alpha["mean"] == pytest.approx(
        np.mean([q.alphas["adaptive"] for q in found.questions[1:]])
    )
    assert {kind: value.n for kind, value in found.row("bm25").categories.items()} == found.benchmark["categories"]
    assert found.benchmark["categories"]["lonely"] == 0
    (empty,) = [one for one in found.lengths if one.turns == "26+"]
    assert (empty.late, empty.early, empty.gap.n) == (None, None, 0)
    assert re.search(r"26\+ +0 +n/a +n/a +n/a", study_text(found))
    json.dumps(found.to_dict(), allow_nan=False)
    study_plots(found)


def test_a_report_tells_folds_that_were_used_and_gold_that_is_missing() -> None:
    benchmark = replace(own_haystacks(12), reading={"partial_gold": 2})
    found = run_study(benchmark, BagEncoder(), folds=50, n_boot=10)
    assert "12-fold" in found.settings["alpha"]["chosen_by"]
    assert "2 question(s) name gold sessions that are not among their sessions" in study_text(found)


class NoEncoder(BagEncoder):
    """An encoder that must not be asked."""

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        raise AssertionError("encoded")


def test_one_conversation_cannot_choose_its_own_alpha() -> None:
    for benchmark in (toy(1), own_haystacks(1)):
        with pytest.raises(MiaError, match=r"lme\.json: alpha is chosen on other .* at least two .* no --encoder"):
            run_study(replace(benchmark, reading={"data": "lme.json"}), NoEncoder(), n_boot=10)
    assert "no interval can be given" in study_text(run_study(toy(1), n_boot=10))


# --- files


def test_evl_02_trec_files_give_the_same_metrics_elsewhere(study: Study, tmp_path: Path) -> None:
    files = trec_files(study)
    assert set(files) == {"qrels.txt", *(f"{k.key.replace(':', '_').replace('|', '_')}.run" for k in study.rows)}
    qrels = pytrec_eval.parse_qrel(files["qrels.txt"].splitlines())
    measures = {"success_1": "hit@1", "recall_1": "r@1", "recall_5": "r@5", "recip_rank": "mrr", "ndcg_cut_5": "ndcg@5"}
    for row in study.rows:
        name = row.key.replace(":", "_").replace("|", "_")
        lines = files[f"{name}.run"].splitlines()
        run = pytrec_eval.parse_run(lines)
        theirs = pytrec_eval.RelevanceEvaluator(qrels, set(measures)).evaluate(run)
        for question in study.questions:
            ours = question.scores[row.key]
            for measure, metric in measures.items():
                assert theirs[question.id][measure] == pytest.approx(ours[metric]), (row.key, question.id)
            scores = [np.float32(line.split()[4]) for line in lines if line.startswith(f"{question.id} ")]
            assert (np.diff(scores) < 0).all(), row.key


def test_equal_scores_are_told_apart_in_32_bits_without_reordering() -> None:
    scores = decreasing([1.0, 1.0, 1.0, 1.0 - 1e-9, 0.5, 0.0, 0.0, -1.0])
    assert scores.dtype == np.float32 and (np.diff(scores) < 0).all()
    assert scores[0] == 1.0 and scores[4] == 0.5 and scores[3] > 0.999999
    assert decreasing([]).shape == (0,)


def test_pictures_and_the_hint_without_matplotlib(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = study_plots(study)
    assert set(pictures) == {"alpha.png", "categories.png", "length.png"}
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MiaError, match="pip install matplotlib"):
        study_plots(study)


def test_pictures_of_small_data_are_drawn_without_warnings() -> None:
    benchmark = small([("ferry",), ("boat",), ("clock",)], [("boat", (1,)), ("clock", (2,))])
    benchmark = replace(benchmark, questions=tuple(replace(q, category="kind " * 50) for q in benchmark.questions))
    found = run_study(benchmark, BagEncoder(), full=True, n_boot=10, models={"encoder": {"name": "folder/" * 20}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(study_plots(found)) == {"alpha.png", "categories.png", "length.png"}


def test_the_table_fits_a_terminal(study: Study) -> None:
    text = study_text(study)
    assert max(map(len, text.splitlines())) <= 100
    assert "BM25 ⊕ late, max" in text and "one-sided" in text and "chance" in text
