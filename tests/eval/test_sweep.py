"""The sensitivity study: what it runs, that it encodes once, and that it says what single runs say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_serve.core import Encoder
from mia_serve.core.errors import MiaError
from mia_serve.eval.datasets import Benchmark, Haystack
from mia_serve.eval.sweep import RETRIEVAL_FACTORS, Scores, Setting, SweepRow, parse_sweeps, plan, summarise_sweep
from mia_serve.eval.sweep_plots import sweep_plots
from mia_serve.eval.sweep_retrieval import _EncodesOnce, sweep_retrieval
from mia_serve.mindscape import ConversationSession, Mindscape
from mia_serve.retriever import Retriever
from tests.conftest import Run
from tests.eval.test_retrieval import WordEncoder, _benchmark, _queries
from tests.eval.test_retrieval import _run as evaluate


class CountingEncoder(WordEncoder):
    """Counts every text that reaches the encoder, whatever it is asked for as."""

    def __init__(self, name: str, seed: int = 0, noise: float = 0.0) -> None:
        super().__init__(name, seed, noise)
        self.documents: Counter[str] = Counter()
        self.queries: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def encode_documents(self, texts: Sequence[str], out: np.ndarray | None = None) -> np.ndarray:
        self.documents.update(texts)
        return super().encode_documents(texts)

    def encode_queries(
        self, texts: Sequence[str], signatures: Sequence[Any] | None = None, alpha: float | None = None
    ) -> np.ndarray:
        self.queries.update(zip(texts, (tuple(s or ()) for s in signatures or [()] * len(texts)), strict=True))
        return super().encode_queries(texts, signatures, alpha)


def _pair() -> tuple[Any, Any]:
    return CountingEncoder("e1", 2, 1.0), CountingEncoder("e2", 3, 1.0)


def _mean(row: SweepRow, metric: str) -> float:
    mean = row.metrics[metric].mean
    assert mean is not None
    return mean


SMALL: dict[str, Any] = {"k0": 8, "k_sum": 2, "n_boot": 200}


def test_sweeps_are_read() -> None:
    assert str(parse_sweeps(["prior=-0"])["prior"]) == "(0.0,)"  # it names a folder
    found = parse_sweeps(["k_sum=8,auto,1,3,1", "ALPHA=0,.25, 1", "n-stop=1,2"])
    assert found == {"k_sum": (1, 3, 8, "auto"), "alpha": (0.0, 0.25, 1.0), "n_stop": (1, 2)}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("k_some=1,2", "unknown setting 'k_some'; give NAME=VALUE,VALUE with NAME of k0, k_sum, window, alpha, prior"),
        ("n_stop=1", "'n_stop' cannot be varied here"),
        ("k_sum", "no values"),
        ("k_sum=", "'' is no value of k_sum; give an integer from 1, or auto"),
        ("k_sum=0", "'0' is no value of k_sum"),
        ("k0=2.5", "'2.5' is no value of k0; give an integer from 1"),
        ("k0=auto", "'auto' is no value of k0"),
        ("alpha=1.5", "'1.5' is no value of alpha; give a number from 0 to 1"),
        ("alpha=nan", "'nan' is no value of alpha"),
        ("prior=inf", "'inf' is no value of prior; give a number from 0"),
        ("window=-3", "'-3' is no value of window"),
    ],
)
def test_EVL_15_a_sweep_that_cannot_be_run_says_what_can(option: str, said: str) -> None:
    with pytest.raises(MiaError) as error:
        parse_sweeps([option], RETRIEVAL_FACTORS)
    assert said in str(error.value)


def test_a_factor_given_twice_is_refused() -> None:
    with pytest.raises(MiaError, match="k_sum is given twice"):
        parse_sweeps(["k_sum=1", "k_sum=2"])


def test_one_factor_at_a_time_around_the_default() -> None:
    default = Setting(k0=50, k_sum=5, alpha=0.5)
    found = plan({"k_sum": (1, 5, 8), "alpha": (0.0, 1.0)}, default)
    assert found[0] == default
    assert [(s.k_sum, s.alpha) for s in found] == [(5, 0.5), (1, 0.5), (8, 0.5), (5, 0.0), (5, 1.0)]
    grid = plan({"k_sum": (1, 5, 8), "alpha": (0.0, 1.0)}, default, grid=True)
    assert len(grid) == len(set(grid)) == 3 * 3  # the default's alpha is one of the grid's
    with pytest.raises(MiaError, match="n_stop: nothing here depends on it"):
        plan({"n_stop": (1, 2)}, default)


def test_chunks_and_queries_are_encoded_once_however_long_the_sweep() -> None:
    e1, e2 = _pair()
    benchmark = _benchmark()
    sweeps = parse_sweeps(["k0=4,8,16", "k_sum=1,2,3,auto", "alpha=0,.25,.5,.75,1", "prior=0,.1,.2"])
    sweep_retrieval(benchmark, sweeps, e1=e1, e2=e2, **SMALL)
    (haystack,) = benchmark.haystacks
    chunks = [chunk.text for chunk in haystack.mindscape.chunks]
    summaries = [session.summary for session in haystack.mindscape.sessions]
    assert len(chunks) == 64 and len(summaries) == 16
    assert e1.documents == Counter(chunks) + Counter(summaries)
    assert e2.documents == Counter(chunks)
    texts = {query.text for query in haystack.queries}
    assert e1.queries == Counter((text, ()) for text in texts)
    assert set(e2.queries.values()) == {1}
    assert {text for text, given in e2.queries if not given} == texts


@pytest.mark.parametrize("folder", ["tiny_qwen3", "tiny_bert"])
def test_another_alpha_is_the_encoders_own_without_a_forward(folder: str, request: pytest.FixtureRequest) -> None:
    encoder = Encoder.load(request.getfixturevalue(folder), device="cpu")
    texts = ["Who kept the ledger?", "Where was the boat?", "Which lamp?"]
    given = [["The key was under the clock.", "A lamp is missing."], [], ["The boat had gone."]]
    once: Any = _EncodesOnce(encoder)
    for alpha in (0.5, None, 0.0, 0.25, 1.0):
        expected = encoder.encode_queries(texts, given, alpha=alpha)
        np.testing.assert_allclose(once.encode_queries(texts, given, alpha=alpha), expected, atol=2e-6)
    encoder.encode_queries = None  # type: ignore[assignment,method-assign]
    np.testing.assert_allclose(once.encode_queries(texts[::-1], given[::-1], alpha=1.0), expected[::-1], atol=2e-6)


def test_windows_cost_their_summaries_only() -> None:
    e1, e2 = _pair()
    benchmark = _benchmark(series=False)
    study = sweep_retrieval(benchmark, parse_sweeps(["window=2,8"]), e1=e1, e2=e2, **SMALL)
    for encoder in (e1, e2):
        for haystack in benchmark.haystacks:
            for chunk in haystack.mindscape.chunks:
                # Extractive summaries encode sentences, here whole chunks: once for W = 2, 4 (the default) and 8 each.
                assert encoder.documents[chunk.text] == (1 if encoder is e2 else 1 + 3)
    assert study.factors == {"window": (2, 4, 8)}
    assert any("extractive summaries" in note for note in study.notes)
    sizes = {row.setting.window: row.facts["pool"] for row in study.rows if row.system == "prior"}
    assert sizes[2] > sizes[4] > sizes[8]  # the same chunks lie in fewer, larger sessions


def test_rows_are_what_single_runs_say() -> None:
    e1, e2 = _pair()
    benchmark = _benchmark()
    sweeps = parse_sweeps(["k0=4", "k_sum=1,4", "alpha=0,.25", "prior=.3"])
    study = sweep_retrieval(benchmark, sweeps, e1=e1, e2=e2, **SMALL)
    default = study.default
    assert default == Setting(k0=8, k_sum=2, alpha=0.5, prior=0.1)
    for row in study.rows:
        s = row.setting
        alone = evaluate(benchmark, k0=s.k0, k_sum=s.k_sum, alpha=s.alpha, prior=s.prior, rows=("none", row.system))
        for metric in ("r@10", "mrr"):
            assert row.metrics[metric].mean == pytest.approx(alone.row(row.system).metrics[metric].mean, abs=1e-12)
            assert row.metrics[metric].low == pytest.approx(alone.row(row.system).metrics[metric].low, abs=1e-12)
            if s.alpha == 0:
                assert row.metrics[metric].mean == pytest.approx(alone.row("none").metrics[metric].mean)
            base = study.row(row.system, default)
            assert base is not None and base.differences is None
            if row.differences is not None:
                assert row.differences[metric].mean == pytest.approx(_mean(row, metric) - _mean(base, metric))
    # One default and four settings that concern both, or one of the two.
    assert Counter(row.system for row in study.rows) == {"prior": 1 + 1 + 2 + 1, "coverage": 1 + 1 + 2 + 2}


def test_k_sum_auto_gives_each_question_what_its_size_fixed_would() -> None:
    e1, _ = _pair()
    (haystack,) = _benchmark().haystacks
    texts = [query.text for query in haystack.queries]
    for mode in ("coverage", "first_k"):
        own = Retriever(haystack.mindscape, e1, k0=8, k_sum="auto").signatures(texts, mode=mode)
        sizes = {len(signature.session_ids) for signature in own}
        assert len(sizes) > 1
        for k in sizes:
            fixed = Retriever(haystack.mindscape, e1, k0=8, k_sum=k).signatures(texts, mode=mode)
            same = [i for i, signature in enumerate(own) if len(signature.session_ids) == k]
            assert [own[i] for i in same] == [fixed[i] for i in same]


def test_what_cannot_be_varied_is_refused_before_any_encoding() -> None:
    e1, _ = _pair()
    turns = tuple(f"turn {i} word{i}" for i in range(12))
    sessions = [ConversationSession(f"S{i}", turns[4 * i : 4 * i + 4], f"talk {i}") for i in range(3)]
    talk = Benchmark("talk", "all", True, (Haystack("t", Mindscape.from_conversation("t", sessions), ()),))
    with pytest.raises(MiaError, match="talk:all has no question"):
        sweep_retrieval(talk, {"k0": (1,)}, e1=e1)
    asked = (_queries(0)[0],)
    talk = Benchmark("talk", "all", True, (Haystack("t", talk.haystacks[0].mindscape, asked),))
    with pytest.raises(MiaError, match="the sessions of talk are given"):
        sweep_retrieval(talk, {"window": (2,)}, e1=e1)
    with pytest.raises(MiaError, match="there is no E2; give --encoder"):
        sweep_retrieval(_benchmark(), {"alpha": (0.0,)}, e1=e1)
    assert not e1.documents and not e1.queries


def test_text_json_and_pictures() -> None:
    e1, e2 = _pair()
    sweeps = parse_sweeps(["k_sum=1,2,auto", "alpha=0,1"])
    study = sweep_retrieval(_benchmark(), sweeps, e1=e1, e2=e2, **SMALL)
    text = study.to_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "Default: k0=8, k_sum=2, alpha=0.5, prior=0.1." in text
    assert text.count("E1, signature as prior") == 1  # alpha does not concern it
    assert text.count("E2, coverage signature") == 2
    assert "  2 *" in text and "  auto" in text and "4 groups" in text
    record = json.loads(study.to_json())
    assert record == json.loads(json.dumps(study.to_dict()))
    assert record["factors"] == {"k_sum": [1, 2, "auto"], "alpha": [0.0, 0.5, 1.0]}
    assert record["rows"][0]["differences"] is None
    assert record["rows"][-1]["differences"]["mrr"]["excludes_zero"] in (True, False)
    pictures = sweep_plots(study)
    assert set(pictures) == {"sweep_k_sum.png", "sweep_alpha.png"}
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in pictures.values())
    grid = sweep_retrieval(_benchmark(), sweeps, e1=e1, e2=e2, grid=True, **SMALL)
    assert len({row.setting for row in grid.rows}) == 9
    assert "k_sum alpha" in grid.to_text() and "2/0.5 *" in grid.to_text()
    assert max(map(len, grid.to_text().splitlines())) <= 100


def test_scores_of_an_agent_by_n_stop() -> None:
    default = Setting(n_stop=3)
    sweeps = parse_sweeps(["n_stop=1,3"])
    assert [s.n_stop for s in plan(sweeps, default)] == [3, 1]
    groups = ["a", "a", "b", "b"]
    scores = {
        default: Scores(
            {"agent": {"f1": [1.0, 0.5, 0.5, None], "em": [1, 0, 0, 0], "recall@10": [1.0, None, None, 1.0]}}
        ),
        Setting(n_stop=1): Scores(
            {"agent": {"f1": [0.5, 0.5, 0.0, 0.3], "em": [0, 0, 0, 0], "recall@10": [0.5, None, None, 0.5]}}
        ),
    }
    study = summarise_sweep(
        scores, groups, sweeps, default=default, systems={"agent": "MiA-Agent"},
        metrics={"f1": "F1", "em": "EM", "recall@10": "R@10"}, benchmark={"name": "novel", "split": "test"},
        n_boot=500,
    )  # fmt: skip
    low, high = study.row("agent", Setting(n_stop=1)), study.row("agent", default)
    assert low is not None and high is not None and low.differences is not None
    assert high.metrics["f1"].mean == pytest.approx(2 / 3)
    assert low.differences["f1"].mean == pytest.approx(-1 / 3)  # of the three that have both values
    assert (low.differences["f1"].n, low.differences["f1"].excluded) == (3, 1)
    assert low.differences["recall@10"].mean == -0.5
    text = study.to_text()
    assert max(map(len, text.splitlines())) <= 100 and text.count("N_stop, most searches of the agent") == 2
    assert "recall" not in text and "R@10" in text


def test_command(tiny_bert: Path, tmp_path: Path, run: Run) -> None:
    common = ("eval", "retrieval", "--data", "saltmarsh", "--series", "--e1", tiny_bert, "--base", "none",
              "--limit", 12, "--n-boot", 50, "--device", "cpu")  # fmt: skip
    done = run(*common, "--sweep", "k_sum=1,auto", "--sweep", "window=5", "--plots", tmp_path / "p", "--json", "-")
    assert {row["setting"]["k_sum"] for row in done.record["rows"]} == {1, 5, "auto"}
    assert done.record["factors"]["window"] == [5, 10]
    assert sorted(file.name for file in (tmp_path / "p").iterdir()) == ["sweep_k_sum.png", "sweep_window.png"]
    assert "E1, signature as prior" in done.err
    assert "n_stop" in run(*common, "--sweep", "n_stop=1").refusal
    assert "no E2" in run(*common, "--sweep", "alpha=0").refusal
    assert "--grid without --sweep" in run(*common, "--grid").refusal
    assert "--oracle with --sweep" in run(*common, "--sweep", "k0=5", "--oracle").refusal
    (tmp_path / "file").touch()
    assert "is a file" in run(*common, "--sweep", "k0=5", "--plots", tmp_path / "file").refusal
