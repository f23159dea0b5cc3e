"""BM25 against hand-computed values, a slow reference and bm25s itself; ties, empty input, files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections import Counter

import bm25s
import numpy as np
import pytest

from mia_serve.core import MiaError
from mia_serve.lexical import BM25Index, LexicalHits, get_analyzer

TEXTS = ["red car fast", "blue car", "red red house garden tree", "boat"]
IDS = ["a", "b", "c", "d"]


def reference(texts, query, analyzer="plain", k1=1.5, b=0.75, unique_terms=True):
    """The formula, one term and one document at a time."""
    documents = [Counter(get_analyzer(analyzer)(text)) for text in texts]
    terms = get_analyzer(analyzer)(query)
    mean = sum(document.total() for document in documents) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for term in set(terms) if unique_terms else terms:
            if document[term]:
                df = sum(term in other for other in documents)
                idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
                score += idf * document[term] / (document[term] + k1 * (1 - b + b * document.total() / mean))
        scores.append(score)
    return np.array(scores)


def test_scores_by_hand():
    index = BM25Index(IDS, TEXTS, analyzer="plain")
    # 3 + 2 + 5 + 1 terms: mean 2.75. "red" is in 2 of 4: idf ln(1 + 2.5 / 2.5) = ln 2.
    red_in_a = math.log(2) * 1 / (1 + 1.5 * (0.25 + 0.75 * 3 / 2.75))
    red_in_c = math.log(2) * 2 / (2 + 1.5 * (0.25 + 0.75 * 5 / 2.75))
    boat_in_d = math.log(1 + 3.5 / 1.5) * 1 / (1 + 1.5 * (0.25 + 0.75 * 1 / 2.75))
    expected = [[red_in_a, 0, red_in_c, 0], [0, 0, 0, boat_in_d]]
    np.testing.assert_allclose(index.scores(["red", "the boat"]), expected, rtol=1e-6)
    assert index.search(["red"], 10).ids == [["c", "a"]]


def test_EVL_12_repeated_query_terms_once_or_each_time():
    texts = ["new car", "old car", "new new house"]
    once = BM25Index(["a", "b", "c"], texts, analyzer="plain")
    each = BM25Index(["a", "b", "c"], texts, analyzer="plain", unique_terms=False)
    idf = math.log(1 + 1.5 / 2.5)  # "new" and "car": in 2 of 3; mean length 7/3
    new_in_a = car_in_a = idf / (1 + 1.5 * (0.25 + 0.75 * 2 / (7 / 3)))
    np.testing.assert_allclose(once.scores(["new new car"])[0, 0], new_in_a + car_in_a, rtol=1e-6)
    np.testing.assert_allclose(each.scores(["new new car"])[0, 0], 2 * new_in_a + car_in_a, rtol=1e-6)
    for index, unique in ((once, True), (each, False)):
        expected = reference(texts, "new new car", unique_terms=unique)
        np.testing.assert_allclose(index.scores(["new new car"])[0], expected, rtol=1e-6)


@pytest.mark.parametrize("k1", [0.0, 0.9, 1.5])
@pytest.mark.parametrize("b", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("unique", [True, False])
def test_SRV_33_scores_and_order_equal_the_slow_reference_with_empty_texts(k1, b, unique):
    rng = np.random.default_rng(0)
    words = ["ant", "bee", "cat", "dog", "eel"]
    for count in rng.integers(1, 9, size=20):
        texts = [" ".join(rng.choice(words, rng.integers(0, 6))) for _ in range(count)]
        query = " ".join(rng.choice([*words, "fox"], rng.integers(0, 6)))
        ids = [f"d{7 * number % 11}" for number in range(count)]  # not in order
        index = BM25Index(ids, texts, analyzer="plain", k1=k1, b=b, unique_terms=unique)
        expected = np.zeros(count)
        if any(texts):
            expected = reference(texts, query, k1=k1, b=b, unique_terms=unique)
        scores = index.scores([query])[0]
        np.testing.assert_allclose(scores, expected, rtol=1e-6)
        for k in (1, 3, 10):
            best = sorted((-score, name) for name, score in zip(ids, scores.tolist(), strict=True) if score > 0)[:k]
            assert index.search([query], k) == ([[name for _, name in best]], [[-score for score, _ in best]])


def test_scores_equal_bm25s_and_search_is_no_slower():
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 20_001) ** 1.07
    words = np.array([f"w{number:05d}" for number in range(len(share))])
    share /= share.sum()

    def draw(low, high):
        return " ".join(words[rng.choice(len(share), size=rng.integers(low, high), p=share)])

    texts = [draw(20, 60) for _ in range(20_000)]
    queries = [draw(3, 12) for _ in range(200)]
    index = BM25Index([f"d{i:05d}" for i in range(len(texts))], texts)
    peer = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    peer.index([index.analyzer(text) for text in texts], show_progress=False)
    terms = [sorted(set(index.analyzer(query))) for query in queries]
    times = {"ours": [], "bm25s": []}
    for _ in range(5):
        start = time.perf_counter()
        _, scores = peer.retrieve(terms, k=10, show_progress=False)
        times["bm25s"].append(time.perf_counter() - start)
        start = time.perf_counter()
        hits = index.search(queries, 10)
        times["ours"].append(time.perf_counter() - start)
    np.testing.assert_allclose(hits.scores, scores, atol=1e-5)
    np.testing.assert_allclose(index.scores(queries[:3]), [peer.get_scores(term) for term in terms[:3]], atol=1e-5)
    assert min(times["ours"]) < 1.3 * min(times["bm25s"])  # about 0.6 times on a quiet machine


@pytest.mark.parametrize("k", [1, 3, 40, 300])
def test_ties_come_by_ascending_id_for_any_k(k):
    rng = np.random.default_rng(1)
    ids = [f"{number:03d}" for number in rng.permutation(300)]
    texts = ["cat dog" if int(name) % 3 else "cat cat dog" for name in ids]
    expected = sorted(ids, key=lambda name: (int(name) % 3 > 0, name))[:k]
    assert BM25Index(ids, texts).search(["cat"], k).ids == [expected]


def test_sums_do_not_depend_on_word_order_or_process():
    texts = ["one two three four five", "two three four six", "one five six seven", "seven eight nine"]
    index = BM25Index(IDS, texts)
    forward, backward = index.scores(["one two three four five six seven", "seven six five four three two one"])
    assert forward.tolist() == backward.tolist()


def test_SRV_32_k_above_the_corpus_gives_only_what_matches():
    index = BM25Index(["a", "b"], ["red car", "blue boat"])
    assert index.search(["red boat", "red"], 5).ids == [["a", "b"], ["a"]]


def test_empty_and_unknown_queries_have_no_hits():
    index = BM25Index(IDS, TEXTS)
    assert index.search(["", "zebra", "is it"], 3) == LexicalHits([[], [], []], [[], [], []])
    assert not index.scores(["", "zebra"]).any()
    assert index.scores([]).shape == (0, 4)


@pytest.mark.parametrize("texts", [[], [""], ["", "is it"]])
def test_nothing_to_index_is_an_index_without_hits(texts, tmp_path, recwarn):
    index = BM25Index([str(i) for i in range(len(texts))], texts)
    index.save(tmp_path / "bm25")
    for one in (index, BM25Index.load(tmp_path / "bm25")):
        assert one.search(["car"], 3).ids == [[]]
        assert one.scores(["car"]).shape == (1, len(texts))
    assert not recwarn.list


def test_no_progress_bars(capfd):
    BM25Index(IDS, TEXTS).search(["red"], 2)
    assert capfd.readouterr() == ("", "")


def test_many_small_indexes_are_quick():
    rng = np.random.default_rng(0)
    words = [f"w{number:04d}" for number in range(3000)]
    texts = [" ".join(rng.choice(words, 300)) for _ in range(50)]
    start = time.perf_counter()
    for _ in range(20):
        BM25Index([str(i) for i in range(50)], texts)
    assert time.perf_counter() - start < 4  # 0.15 s on a quiet machine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ids": ["a"]}, "1 ids but 4 texts"),
        ({"ids": ["a", "b", "a", "c"]}, "id 'a' comes twice"),
        ({"ids": ["a", "b", 3, "c"]}, "id 2 is 3, not a string"),
        ({"texts": ["a", None, "b", "c"]}, "text 1 is None, not a string"),
        ({"ids": ["a", "b"], "texts": "ab"}, "texts is one string; give a list of texts"),
        ({"ids": "abcd"}, "ids is one string"),
        ({"texts": None}, "texts is None; give a list"),
        ({"k1": "1"}, "k1 is '1'; it must be a number"),
        ({"k1": math.inf}, "k1 is inf"),
        ({"b": None}, "b is None; it must be a number"),
        ({"k1": -1}, "k1 is -1"),
        ({"k1": math.nan}, "k1 is nan"),
        ({"b": 1.5}, "b is 1.5"),
    ],
)
def test_wrong_arguments_are_refused(given, message):
    with pytest.raises(MiaError, match=message):
        BM25Index(**{"ids": IDS, "texts": TEXTS, **given})


@pytest.mark.parametrize("k", [0, -1, 2.0, True])
def test_wrong_k_is_refused(k):
    with pytest.raises(MiaError, match="k is"):
        BM25Index(IDS, TEXTS).search(["red"], k)


@pytest.mark.parametrize(
    ("queries", "message"),
    [("red", "one string; give a list"), (["red", None], "query 1 is None, not a string"), (3, "queries is 3; give a")],
)
def test_queries_that_are_no_list_of_strings_are_refused(queries, message):
    index = BM25Index(IDS, TEXTS)
    for call in (index.scores, lambda queries: index.search(queries, 1)):
        with pytest.raises(MiaError, match=message):
            call(queries)


def test_any_iterable_of_strings_will_do():
    index = BM25Index(iter(IDS), (text for text in TEXTS))
    assert index.scores(iter(["red", "car"])).tolist() == BM25Index(IDS, TEXTS).scores(["red", "car"]).tolist()
    assert index.search((word for word in ["boat"]), 1).ids == [["d"]]


@pytest.fixture
def saved(tmp_path):
    index = BM25Index(
        ["b\ud800", "é", "c", "a"], ["东京 red", "red", "car", ""], analyzer="cjk", k1=1.2, unique_terms=False
    )
    index.save(tmp_path / "bm25")
    return index, tmp_path / "bm25"


def test_a_saved_index_answers_the_same(saved):
    index, path = saved
    again = BM25Index.load(path)
    queries = ["red red car", "东", "none"]
    assert again.search(queries, 3) == index.search(queries, 3)
    assert again.scores(queries).tolist() == index.scores(queries).tolist()
    assert (again.ids, again.analyzer.name, again.k1, again.b, len(again)) == (index.ids, "cjk", 1.2, 0.75, 4)
    assert not [file for file in path.iterdir() if file.suffix not in (".npy", ".json")]


def test_saving_again_gives_the_same_bytes(saved, tmp_path):
    _, path = saved
    BM25Index.load(path).save(tmp_path / "again")
    for file in path.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_same_bytes_from_another_process(tmp_path):
    code = """
import sys
from mia_serve.lexical import BM25Index
BM25Index(["b", "a"], ["one two three four", "three five"]).save(sys.argv[1])
"""
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code, tmp_path / seed], env={**os.environ, "PYTHONHASHSEED": seed}, check=True
        )
    for file in (tmp_path / "1").iterdir():
        assert (tmp_path / "2" / file.name).read_bytes() == file.read_bytes()


def test_an_analyzer_that_changed_is_refused(saved):
    _, path = saved
    meta = json.loads((path / "mia_bm25.json").read_text())
    (path / "mia_bm25.json").write_text(json.dumps({**meta, "analyzer_version": "0" * 16}))
    with pytest.raises(MiaError, match=r"version 0000000000000000 of the analyzer 'cjk'.*build the index again"):
        BM25Index.load(path)


@pytest.mark.parametrize("name", ["weights.npy", "documents.npy", "ids.json", "mia_bm25.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_folder_is_refused(saved, name, damage):
    _, path = saved
    if damage == "cut":
        (path / name).write_bytes((path / name).read_bytes()[:-4])
    else:
        (path / name).unlink()
    with pytest.raises((MiaError, FileNotFoundError), match=r"is damaged|no BM25 index"):
        BM25Index.load(path)


def test_another_format_is_refused(saved):
    _, path = saved
    (path / "mia_bm25.json").write_text('{"format": 9}')
    with pytest.raises(MiaError, match="has format 9, this version reads 1"):
        BM25Index.load(path)


def test_nothing_there_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="no BM25 index at"):
        BM25Index.load(tmp_path / "none")


def test_only_a_bm25_index_is_replaced(saved, tmp_path):
    index, path = saved
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    for place in (tmp_path / "mine", tmp_path / "mine" / "notes.txt"):
        with pytest.raises(MiaError, match="exists and is no BM25 index"):
            index.save(place)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    (tmp_path / "empty").mkdir()
    for place in (path, tmp_path / "empty"):
        index.save(place)
        assert BM25Index.load(place).ids == index.ids
