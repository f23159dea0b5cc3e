"""Mining: the rules by hand, the same ids as sentence-transformers, the cache, the report, the command."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from mia_serve.core import Encoder
from mia_serve.core.errors import MiaError
from mia_serve.core.vector_cache import text_digest
from mia_serve.mindscape import Book, Mindscape
from mia_train import embedding
from mia_train.candidates import Document
from mia_train.cli import main
from mia_train.corpus import corpus_of_rows, read_corpus
from mia_train.embedding import Embedder
from mia_train.mining import MiningSettings, mine, select
from mia_train.mining_report import format_report
from mia_train.rescore import CrossEncoderTeacher, EncoderTeacher
from mia_train.rows import Passage, Row, read_rows, text_key, write_rows

TALE = "the ferryman counted lamps along quay and found one missing she kept ledger under floor key clock"
WORDS = TALE.split()

# Rows in which no two scores, and no score and limit, come closer than 5e-6: float32 noise decides nothing.
SEED = 47


class Placed:
    """An embedder whose document vectors have the cosine with every query that their text says: ``"name 0.7"``."""

    shared, encoded, hits = False, 0, 0
    encoder = SimpleNamespace(dim=2, device=torch.device("cpu"))

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        return np.tile(np.array([[1.0, 0.0]], np.float32), (len(texts), 1))

    def documents(self, texts: Sequence[str]) -> np.ndarray:
        cosines = [float(text.split()[1]) for text in texts]
        return np.array([[c, math.sqrt(1 - c * c)] for c in cosines], np.float32)


def row(*positives: str, query: str = "q", query_id: str = "q0", group: str = "") -> Row:
    return Row(query_id, query, tuple(Passage(text.split()[0].lower(), text) for text in positives), group=group)


def documents(*texts: str, group: str = "") -> list[Document]:
    return [Document(text.split()[0].lower(), text, group) for text in texts]


def mined(rows: list[Row], corpus: list[Document], **settings: Any) -> tuple[list[list[str]], Any]:
    """Mine with placed vectors; return the ids of the negatives of each row, and the report."""
    rows, report = mine(rows, corpus, Placed(), MiningSettings(**({"simple": 0} | settings)))
    return [[p.id for p in row.negatives] for row in rows], report


CORPUS = documents("a 0.9", "b 0.79", "c 0.7599", "d 0.7", "e 0.3", "f -0.2")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["a", "b", "c", "d", "e"]),
        ({"range_min": 2, "range_max": 7}, ["c", "d", "e", "f"]),
        ({"range_max": 5, "range_min": 3, "negatives": 2}, ["d", "e"]),
        ({"absolute_margin": 0.0}, ["b", "c", "d", "e", "f"]),
        ({"absolute_margin": 0.05}, ["d", "e", "f"]),  # at most 0.75
        ({"relative_margin": 0.05}, ["c", "d", "e", "f"]),  # at most 0.8 - 0.05 * 0.8 = 0.76
        ({"relative_margin": 0.05, "range_min": 1}, ["d", "e", "f"]),  # ranks count what the margin left
        ({"relative_margin": 0.05, "range_max": 5}, ["c", "d", "e"]),  # the window is cut before
        ({"max_score": 0.75}, ["d", "e", "f"]),
        ({"min_score": 0.3}, ["a", "b", "c", "d", "e"]),
        ({"max_score": 0.8, "min_score": 0.5}, ["b", "c", "d"]),
    ],
)
def test_window_and_margins_by_hand(settings: dict[str, Any], expected: list[str]) -> None:
    assert mined([row("p 0.8")], CORPUS, **settings)[0] == [expected]


def test_margins_lie_below_a_negative_positive() -> None:
    corpus = documents("more -0.49", "near -0.51", "far -0.8")
    # 0.05 below -0.5 by magnitude is -0.525; -0.5 * 0.95 = -0.475 would have let "more" through, which beats p
    assert mined([row("p -0.5")], corpus, relative_margin=0.05)[0] == [["far"]]
    assert mined([row("p -0.5")], corpus, relative_margin=0.0)[0] == [["near", "far"]]
    assert mined([row("p -0.5")], corpus, absolute_margin=0.005)[0] == [["near", "far"]]
    assert mined([row("p -0.5")], corpus, absolute_margin=0.1)[0] == [["far"]]


def test_margin_compares_with_the_lowest_positive() -> None:
    ids, report = mined([row("p 0.8", "weak 0.5")], CORPUS, relative_margin=0.0)
    assert ids == [["e", "f"]]  # "b" to "d" beat the weak positive, with which a step may pair them
    assert report.dropped["relative_margin"] == 4


def test_report_counts_the_first_rule_that_drops() -> None:
    rows = [row("p 0.8")]
    corpus = [*CORPUS, *documents("p 0.8", "copy 0.8"), Document("z", "P  0.8")]  # "z" repeats p in other letters
    ids, report = mined(rows, corpus, relative_margin=0.05, max_score=0.75, min_score=0.0, range_min=1, negatives=1)
    assert ids == [["e"]]
    assert report.dropped == {
        "positive_id": 1,
        "positive_text": 0,
        "same_query": 0,
        "relative_margin": 3,  # a, b and the false negative "copy"
        "max_score": 1,  # c
        "min_score": 1,  # f
        "range_min": 1,  # d
    }
    assert report.repeated_texts == 1 and report.candidates == 7
    assert report.hard.found == 1 and report.hard.missing == 0


def test_TRN_15_texts_that_repeat_the_positive_never_come_back() -> None:
    corpus = [
        Document("1", "Paris 0.9"),
        Document("2", "Berlin 0.5"),
        Document("3", "Paris 0.9"),
        Document("4", "  paris  0.9"),
        Document("5", "ＰＡＲＩＳ 0.9"),
    ]
    ids, report = mined([Row("q0", "q", (Passage("1", "Paris 0.9"),))], corpus)
    assert ids == [["2"]] and report.repeated_texts == 3
    ids, report = mined([Row("q0", "q", (Passage("elsewhere", "Paris 0.9"),))], corpus)
    assert ids == [["2"]] and report.dropped["positive_text"] == 1
    # a positive that the corpus knows under its id with another text: both texts are left out
    ids, _ = mined([Row("q0", "q", (Passage("3", "Paris! 0.8"),))], corpus)
    assert ids == [["2"]]
    ids, _ = mined([Row("q0", "q", (Passage("2", "Berlin 0.5"),))], corpus)
    assert ids == [["1"]]  # a text is a negative once


def test_positives_of_the_same_query_are_no_negatives_unless_of_another_group() -> None:
    corpus = documents("p 0.8", "r 0.7", "s 0.6")
    rows = [row("p 0.8"), row("r 0.7", query_id="q1", query=" Q"), row("s 0.6", query_id="q2", group="other")]
    ids, report = mined(rows, corpus)
    assert ids == [["s"], ["s"], ["p", "r"]]
    assert report.dropped["same_query"] == 2


@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_TRN_14_shortfall_is_counted_and_never_an_error(backend: str) -> None:
    corpus = documents("p1 0.9", "p2 0.8", "n 0.1")
    rows, report = mine([row("p1 0.9", "p2 0.8")], corpus, Placed(), MiningSettings(simple=2), backend=backend)
    assert [p.id for p in rows[0].negatives] == ["n"]
    assert (report.hard.wanted, report.hard.found, report.hard.missing, report.hard.short_rows) == (5, 1, 4, 1)
    assert (report.simple.wanted, report.simple.found, report.simple.missing) == (2, 0, 2)
    rows, report = mine(  # nothing at all: kept and counted
        [row("p1 0.9", "p2 0.8", "n 0.1")], corpus, Placed(), MiningSettings(simple=2), backend=backend
    )
    assert rows[0].negatives == () and report.rows_without_negative == 1 and report.negative_scores is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"negatives": 5, "range_min": 8, "range_max": 10}, "leaves 2 candidates"),
        ({"negatives": 1, "range_min": 10, "range_max": 3}, "leaves 0 candidates"),
        ({"negatives": 0, "simple": 0}, "both 0"),
        ({"relative_margin": 5.0}, "from 0 to 1"),
        ({"absolute_margin": -0.1}, "from 0"),
        ({"absolute_margin": float("nan")}, "finite"),
        ({"min_score": 0.5, "max_score": 0.4}, "no score is in between"),
        ({"negatives": -1}, "integers from 0"),
    ],
)
def test_TRN_14_conflicts_are_refused_before_anything_is_encoded(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(MiaError, match=said):
        MiningSettings(**settings)


def test_a_filter_meant_for_logits_is_refused_for_cosines() -> None:
    with pytest.raises(MiaError, match="scores are cosines"):
        mined([row("p 0.8")], CORPUS, min_score=2.0)


def test_groups_bound_simple_negatives_and_hard_ones_where_asked() -> None:
    here, there = documents("p 0.8", "a 0.5", "b 0.2", group="x"), documents("c 0.7", "d 0.6", "e 0.4", group="y")
    rows = [row("p 0.8", query_id=f"q{i}", query=f"q{i}", group="x") for i in range(40)]
    found, _ = mine(rows, here + there, Placed(), MiningSettings(negatives=1, simple=5))
    hard = {p.id for r in found for p in r.negatives if p.kind == "hard"}
    simple = [sorted(p.id for p in r.negatives if p.kind == "simple") for r in found]
    assert hard == {"c"} and simple == [["a", "b"]] * 40
    found, _ = mine(rows, here + there, Placed(), MiningSettings(negatives=1, simple=1, within_group=True))
    assert [[(p.id, p.kind) for p in r.negatives] for r in found] == [[("a", "hard"), ("b", "simple")]] * 40
    found, _ = mine(rows, here + there, Placed(), MiningSettings(negatives=0, simple=1))
    assert {r.negatives[0].id for r in found} == {"a", "b"}  # a draw of its own for each row
    lost = [replace(rows[0], positives=(Passage("?", "unknown 0.1"),), group="z")]
    _, report = mine(lost, here + there, Placed(), MiningSettings(negatives=1, simple=1))
    assert report.rows_without_group == 1 and report.simple.missing == 1
    with pytest.raises(MiaError, match="within_group needs groups"):
        mined(rows, documents("c 0.7"), within_group=True)


def test_a_row_searches_its_own_haystack_only() -> None:
    corpus = [Document(d.id, d.text, "", "one") for d in documents("a 0.9", "p 0.8")]
    corpus += [Document(d.id, d.text, "", "two") for d in documents("b 0.9", "c 0.1")]
    settings = MiningSettings(simple=0)
    rows, _ = mine([row("p 0.8")] * 2, corpus, Placed(), settings, haystacks=["one", "two"])
    assert [[p.id for p in r.negatives] for r in rows] == [["a"], ["b", "c"]]


def test_random_sampling_draws_from_the_window_by_seed_and_query() -> None:
    corpus = documents(*(f"d{i} {0.9 - i / 50}" for i in range(40)))
    rows = [row("p 0.95", query_id=f"q{i}", query=f"q{i}") for i in range(30)]
    settings = {"negatives": 3, "range_min": 2, "range_max": 12, "sampling": "random"}
    first, _ = mined(rows, corpus, **settings)
    assert first == mined(rows, corpus, **settings)[0]
    assert first[::-1] == mined(rows[::-1], corpus, **settings)[0]  # whatever comes before in the file
    assert first != mined(rows, corpus, **settings, seed=1)[0]
    assert {i for ids in first for i in ids} == {f"d{i}" for i in range(2, 12)}
    assert all(ids == sorted(ids, key=lambda i: int(i[1:])) and len(ids) == 3 for ids in first)  # best first


def test_select_settles_equal_scores_by_rank() -> None:
    chosen, _ = select(np.float32([0.5, 0.7, 0.7, 0.5]), np.float32([0.9]), MiningSettings(), np.random.default_rng(0))
    assert chosen == [1, 2, 0, 3]


# Parity with sentence-transformers


def pairs(n: int, seed: int = 7) -> list[Row]:
    """Return rows with different queries and one to three positives each; every text is another run of known words."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        texts = [" ".join(random.choice(WORDS, random.integers(5, 12))) for _ in range(4)]
        positives = [f"{texts[0]} {text}" for text in texts[1 : 2 + (i % 5 == 0) + (i % 10 == 0)]]
        rows.append(Row(f"q{i}", texts[0], tuple(Passage(f"p{i}.{j}", text) for j, text in enumerate(positives))))
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer BERT that knows each word whole: the same one everywhere, so that no score comes near a tie."""
    path = tmp_path_factory.mktemp("words-bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(_config(len(words))).eval().save_pretrained(path)
    fast.save_pretrained(path)
    return path


def _config(words: int, **changes: Any) -> BertConfig:
    return BertConfig(
        vocab_size=words, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, **{"initializer_range": 0.2} | changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Encoder:
    return Encoder.load(folder, device="cpu")


@pytest.fixture(scope="module")
def theirs(tiny: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, list[str]]]:
    """Mine with sentence-transformers; texts of the negatives by query."""
    from datasets import Dataset, disable_progress_bars
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    disable_progress_bars()
    saved = tmp_path_factory.mktemp("saved")
    tiny.save(saved)
    model = SentenceTransformer(str(saved), device="cpu")

    def run(rows: list[Row], **settings: Any) -> dict[str, list[str]]:
        flat = [(r.query, p.text) for r in rows for p in r.positives]
        data = Dataset.from_dict({"query": [q for q, _ in flat], "positive": [p for _, p in flat]})
        out = mine_hard_negatives(data, model, output_format="labeled-list", verbose=False, **settings)
        return {line["query"]: line["positive"][1:] for line in out}

    return run


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"range_min": 3},
        {"relative_margin": 0.05},
        {"range_min": 4, "relative_margin": 0.02, "range_max": 60},
        {"absolute_margin": 0.03},
        {"max_score": 0.9, "min_score": 0.5},
        {"range_min": 2, "absolute_margin": 0.01, "relative_margin": 0.02, "max_score": 0.95},
    ],
    ids=str,
)
def test_same_negatives_as_sentence_transformers(
    settings: dict[str, Any], single: bool, tiny: Encoder, theirs: Callable[..., dict[str, list[str]]]
) -> None:
    rows = [replace(r, positives=r.positives[:1]) for r in pairs(32, SEED)] if single else pairs(32, SEED)
    settings = {"range_max": 100, **settings}
    if not single:
        settings["range_max"] = 400  # their window depends on the most positives of any row, unless it holds all
    expected = theirs(rows, num_negatives=4, **settings)
    found, report = mine(rows, corpus_of_rows(rows), Embedder(tiny), MiningSettings(negatives=4, simple=0, **settings))
    assert {r.query: [p.text for p in r.negatives] for r in found if r.negatives} == expected
    active = [name for name in settings if not name.startswith("range")]
    assert report.hard.found > 30 and (not active or sum(report.dropped[name] for name in active) > 30)


@pytest.fixture(scope="module")
def cross_encoder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cross")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(3)
    model = BertForSequenceClassification(_config(len(tokenizer), initializer_range=0.6, num_labels=1))
    model.eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_cross_encoder_scores_rank_filter_and_are_written(
    cross_encoder: Path, tiny: Encoder, theirs: Callable[..., dict[str, list[str]]]
) -> None:
    from sentence_transformers import CrossEncoder

    rows = pairs(12)
    settings = {"range_max": 100, "absolute_margin": 0.02, "range_min": 1}
    teacher = CrossEncoderTeacher(str(cross_encoder), "cpu")
    found, report = mine(
        rows, corpus_of_rows(rows), Embedder(tiny), MiningSettings(negatives=4, simple=2, **settings), teacher=teacher
    )
    model = CrossEncoder(str(cross_encoder), device="cpu")
    expected = theirs(rows, num_negatives=4, cross_encoder=model, **settings)
    hard = {r.query: [p.text for p in r.negatives if p.kind == "hard"] for r in found}
    assert {query: texts for query, texts in hard.items() if texts} == expected
    for one in found[:5]:
        passages = [*one.positives, *one.negatives]
        scores = model.predict([(one.query, p.text) for p in passages])
        assert [p.score for p in passages] == pytest.approx(scores, abs=1e-5)
    assert report.simple.missing == 0 and report.positive_scores is not None


def test_a_model_that_is_no_cross_encoder_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    # a plain encoder would be given a new head with random weights
    with pytest.raises(MiaError, match=r"BertModel.*give a model for sequence classification"):
        CrossEncoderTeacher(str(tiny_bert), "cpu")
    with pytest.raises(FileNotFoundError):
        CrossEncoderTeacher(str(tmp_path / "no"), "cpu")


def test_a_larger_encoder_teaches_by_its_cosines(tiny: Encoder, tiny_xlmr: Path) -> None:
    rows, large = pairs(10), Encoder.load(tiny_xlmr, device="cpu")
    settings = MiningSettings(negatives=3, simple=1, range_max=40, relative_margin=0.0)
    found, _ = mine(rows, corpus_of_rows(rows), Embedder(tiny), settings, teacher=EncoderTeacher(Embedder(large)))
    assert any(r.negatives for r in found)
    for one in found:
        query = large.encode_queries([one.query])[0].astype(np.float64)
        passages = [*one.positives, *one.negatives]
        cosines = large.encode_documents([p.text for p in passages]).astype(np.float64) @ query
        assert [p.score for p in passages] == pytest.approx(cosines, abs=1e-5)
        lowest = min(p.score for p in one.positives if p.score is not None)
        hard = [p.score for p in one.negatives if p.kind == "hard" and p.score is not None]
        assert hard == sorted(hard, reverse=True) and all(score <= lowest for score in hard)


def test_scores_of_an_older_teacher_do_not_survive(tiny: Encoder) -> None:
    rows = [replace(r, positives=tuple(replace(p, score=3.0) for p in r.positives)) for r in pairs(6)]
    found, _ = mine(rows, corpus_of_rows(rows), Embedder(tiny), MiningSettings())
    assert {p.score for r in found for p in (*r.positives, *r.negatives)} == {None}


# The cache


def test_TRN_39_texts_are_known_by_their_utf8_bytes() -> None:
    assert text_digest("Paris").hex() == "5dd272b4f316b776a7b8e3d0894b37e1e42be3d5d3b204b8a5836cc50597a6b1"
    assert text_digest("潮水") == hashlib.sha256("潮水".encode()).digest()


def test_TRN_13_another_prompt_has_entries_of_its_own(tiny_bert: Path, tmp_path: Path) -> None:
    rows = pairs(10)
    texts = [r.query for r in rows]

    def run(prefix: str) -> tuple[int, int, np.ndarray]:
        encoder = Encoder.load(tiny_bert, device="cpu")
        template = replace(encoder.spec.template, query_prefix=prefix)
        encoder = Encoder(
            encoder.model, encoder.tokenizer, encoder.spec.with_changes(template=template), encoder.device
        )
        embedder = Embedder(encoder, tmp_path)
        mine(rows, corpus_of_rows(rows), embedder, MiningSettings())
        vectors = Embedder(encoder, tmp_path).queries(texts)
        np.testing.assert_allclose(vectors, encoder.encode_queries(texts), atol=1e-5)
        return embedder.encoded, embedder.hits, vectors

    first, second, again = run("the ledger "), run("the boat "), run("the ledger ")
    everything = len(rows) + sum(len(r.positives) for r in rows)
    assert (first[0], second[0], again[0]) == (everything, everything, 0)
    assert (first[1], second[1], again[1]) == (0, 0, everything)
    assert (first[2] == again[2]).all() and abs(first[2] - second[2]).max() > 1e-3


def test_other_weights_and_the_other_role_have_entries_of_their_own(tiny_bert: Path, tmp_path: Path) -> None:
    encoder = Encoder.load(tiny_bert, device="cpu")
    embedder = Embedder(encoder, tmp_path)
    embedder.queries(["the quay", "the boat"])
    embedder.documents(["the quay"])
    assert (embedder.encoded, embedder.hits) == (3, 0)
    embedder.documents(["the boat", "the quay"])
    assert (embedder.encoded, embedder.hits) == (4, 1)
    with torch.no_grad():
        next(encoder.model.parameters()).add_(0.01)
    embedder.documents(["the quay"])
    assert (embedder.encoded, embedder.hits) == (5, 1)


def test_a_killed_run_leaves_whole_shards_and_a_broken_one_is_encoded_again(
    tiny: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedding, "BLOCK", 8)
    monkeypatch.setattr(embedding, "_SHARD", 8)
    texts = [f"the {WORDS[i % 17]} of the {WORDS[i // 17]}" for i in range(40)]
    expected = Embedder(tiny).documents(texts)
    encode, calls = tiny.encode_documents, []

    def dies(part: list[str]) -> np.ndarray:
        calls.append(part)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(part)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tiny, "encode_documents", dies)
        Embedder(tiny, tmp_path).documents(texts)
    shards = sorted(tmp_path.glob("*/*.shard"))
    assert len(shards) == 3
    (shards[0].parent / ".unfinished.shard.1234.tmp").write_bytes(b"MIAVEC1\n")
    shards[0].write_bytes(shards[0].read_bytes()[:200])
    embedder = Embedder(tiny, tmp_path)
    np.testing.assert_allclose(embedder.documents(texts), expected, atol=1e-6)
    assert (embedder.encoded, embedder.hits) == (24, 16)
    assert "encoded again" in capsys.readouterr().err


# The command


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["mine", *map(str, arguments)])
    return int(caught.value.code or 0)


def test_a_second_run_encodes_nothing_and_writes_the_same_bytes(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", pairs(40))
    common = [tmp_path / "rows.jsonl", "--encoder", tiny_bert, "--device", "cpu", "--cache", tmp_path / "cache"]
    common += ["--relative-margin", 0.02, "--sampling", "random", "--range-max", 30]
    reports = []
    for name, backend in (("one", "torch"), ("two", "torch"), ("three", "faiss")):
        out = tmp_path / f"{name}.jsonl"
        assert run(*common, "-o", out, "--backend", backend, "--json", tmp_path / f"{name}.json") == 0
        reports.append(json.loads((tmp_path / f"{name}.json").read_text()))
    texts = {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in ("one", "two", "three")}
    assert texts["one"] == texts["two"] == texts["three"]
    assert [r["encoded"] for r in reports] == [reports[1]["cache_hits"], 0, 0]
    table = capsys.readouterr().out
    assert "dropped by relative_margin 0.02" in table and f"{reports[1]['cache_hits']} vectors from the cache" in table
    rows = read_rows([tmp_path / "one.jsonl"])
    assert [r.query_id for r in rows] == [f"q{i}" for i in range(40)]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_benchmark_is_mined_from_the_books_of_its_split(tiny_bert: Path, tmp_path: Path) -> None:
    from mia_train.data import open_benchmark

    out = tmp_path / "mined.jsonl"
    assert run("saltmarsh:train:series", "--encoder", tiny_bert, "--device", "cpu", "-o", out, "--negatives", 3) == 0
    (haystack,) = open_benchmark("saltmarsh:train:series").haystacks
    book_of = {chunk.id: chunk.book_id for chunk in haystack.mindscape.chunks}
    books = {book_of[g] for query in haystack.queries for g in query.gold}
    rows = read_rows([out])
    assert len(rows) == len(haystack.queries) and all(len(r.negatives) == 8 for r in rows)
    for one in rows:
        own = {book_of[p.id] for p in one.positives}
        assert {book_of[p.id] for p in one.negatives} <= books
        assert {book_of[p.id] for p in one.negatives if p.kind == "simple"} <= own
        assert not {text_key(p.text) for p in one.positives} & {text_key(p.text) for p in one.negatives}
        assert len({p.id for p in one.negatives}) == 8


def test_a_corpus_file_or_a_mindscape_bounds_the_negatives(tiny_bert: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", pairs(5))
    lines = [{"id": f"c{i}", "text": f"the {word} of the quay", "group": "x"} for i, word in enumerate(WORDS)]
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    out = tmp_path / "mined.jsonl"
    assert run(tmp_path / "rows.jsonl", "--encoder", tiny_bert, "--device", "cpu", "--corpus", file, "-o", out) == 0
    assert {p.id[0] for r in read_rows([out]) for p in r.negatives} == {"c"}
    book = Book("b", tuple(line["text"] for line in lines), summaries=("The quay.",))
    Mindscape.from_books([book, replace(book, id="other")]).save(tmp_path / "ms")
    common = ["--encoder", tiny_bert, "--device", "cpu", "--mindscape", tmp_path / "ms", "--within-group"]
    rows = [Row("q0", "which quay", (Passage("b:3", lines[3]["text"]),))]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert run(tmp_path / "rows.jsonl", *common, "-o", out) == 0
    assert {p.id.split(":")[0] for r in read_rows([out]) for p in r.negatives} == {"b"}
    file.write_text('{"id": "a", "text": "one"}\n{"id": "a", "text": "two"}\n')
    with pytest.raises(MiaError, match=r"corpus.jsonl:2: id 'a' has another text"):
        read_corpus(file)
    file.write_text("[" * 200_000)
    with pytest.raises(MiaError, match=r"corpus.jsonl:1: not JSON"):
        read_corpus(file)


def test_rows_whose_positives_are_not_in_the_corpus_are_counted() -> None:
    """A mindscape that was cut anew has the same ids: only the texts tell."""
    rows = [row("A 0.9", query_id="q0"), row("B 0.8", query_id="q1", query="r")]
    corpus = [*documents("B 0.8", "C 0.5", "D 0.4"), Document("a", "recut 0.9")]
    _, report = mine(rows, corpus, Placed(), MiningSettings(negatives=1, simple=0))  # type: ignore[arg-type]
    assert report.rows_without_positive == 1
    assert "rows whose positives are not in the corpus, by text: 1" in format_report(report)
    _, report = mine(rows[1:], corpus, Placed(), MiningSettings(negatives=1, simple=0))  # type: ignore[arg-type]
    assert report.rows_without_positive == 0 and "not in the corpus" not in format_report(report)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--negatives", "9", "--range-max", "8"], "leaves 8 candidates"),
        (["--max-score", "7"], "scores are cosines"),
        (["--teacher", "x", "--cross-encoder", "y"], "give one"),
        (["--corpus", "x", "--mindscape", "y"], "give one"),
        (["-o", "rows.parquet"], "written as .jsonl"),
        (["-o", "no/where.jsonl"], "folder does not exist"),
        (["-o", "rows.jsonl"], "the file of the rows that are read"),
        (["-o", "folder/../rows.jsonl"], "the file of the rows that are read"),
        (["-o", "link.jsonl"], "the file of the rows that are read"),
        (["--json", "rows.jsonl"], "the file of the rows that are read"),
        (["--json", "mined.jsonl"], "the file of --out"),
        (["--corpus", "mined.jsonl"], "the file of --corpus"),
        (["--json", "."], "is a folder"),
    ],
)
def test_wrong_use_exits_2_with_one_line_before_the_encoder_opens(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", pairs(2))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.jsonl").symlink_to("rows.jsonl")
    given = ["rows.jsonl", "--encoder", "./no-such-encoder", "-o", "mined.jsonl", *arguments]
    assert run(*given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_a_benchmark_that_is_not_for_training_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, said in (("saltmarsh:test", "is for training"), ("saltmarch:train", "did you mean 'saltmarsh'?")):
        assert run(source, "--encoder", "./none", "-o", tmp_path / "x.jsonl") == 2
        assert said in capsys.readouterr().err
