"""What each analyzer makes of a text, and that documents and queries are cut alike."""

from __future__ import annotations

import subprocess
import sys
import unicodedata

import pytest

from mia_serve.core import MiaError
from mia_serve.lexical import ANALYZERS, BM25Index, get_analyzer


def test_study_drops_function_words_and_short_terms():
    analyzer = get_analyzer("study")
    assert analyzer("When did Jo's well-known user_7 go to the OLD café?") == [
        "jo's",
        "well-known",
        "user_7",
        "old",
        "caf",
    ]
    assert analyzer("a1 b22 -dash 'quoted' x") == ["b22", "dash", "quoted'"]
    assert analyzer("y" * 40) == ["y" * 31, "y" * 9]  # a letter, then at most thirty
    assert analyzer("所以 what was it?") == []


def test_plain_reads_any_script_with_spaces_and_normalises():
    analyzer = get_analyzer("plain")
    assert analyzer("The Naïve CAFÉ, 10:45") == ["the", "naïve", "café", "10", "45"]
    assert analyzer("cafe\u0301 ＡＢＣ１２３") == ["café", "abc123"]
    assert analyzer("Война и мир") == ["война", "и", "мир"]


@pytest.mark.parametrize("name", ["plain", "cjk", "jieba"])
@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("हिन्दी की, कि कु", ["हिन्दी", "की", "कि", "कु"]),
        ("שָׁלוֹם עֲלֵיכֶם", ["שָׁלוֹם", "עֲלֵיכֶם"]),
        ("مَرْحَبًا بِكُمْ", ["مَرْحَبًا", "بِكُمْ"]),
        ("ที่นี่ น้ำ", ["ที่นี่", "น้ำ"]),
        ("தமிழ் বাংলা", ["தமிழ்", "বাংলা"]),
        ("ශ්\u200dරී ಸಾಫ್ಟ್\u200cವೇರ್ x", ["ශ්රී", "ಸಾಫ್ಟ್ವೇರ್", "x"]),  # joiners only choose a shape
        ("کتاب\u200cها", ["کتاب", "ها"]),  # between letters the non-joiner parts a compound
        ("2\ufe0f\u20e3 ok\u0301 \u0301 ´a", ["2", "ok\u0301", "a"]),  # no word begins with a mark
    ],
)
def test_words_keep_their_vowel_signs_and_points(name, text, terms):
    assert get_analyzer(name)(text) == [unicodedata.normalize("NFKC", term) for term in terms]


def test_one_vowel_sign_makes_another_word():
    index = BM25Index(["a", "b", "c"], ["की", "कि", "कु"], analyzer="plain")
    assert index.search(["की", "कु"], 3).ids == [["a"], ["c"]]


def test_an_ideograph_with_a_variation_selector_is_that_ideograph():
    assert get_analyzer("cjk")("葛\U000e0100城") == ["葛", "城", "葛城"]


def test_cjk_gives_characters_and_pairs_and_keeps_words():
    analyzer = get_analyzer("cjk")
    assert analyzer("旅游 2024年") == ["旅", "游", "旅游", "2024", "年"]
    assert analyzer("東京ﾀﾜｰ") == ["東", "京", "タ", "ワ", "ー", "東京", "京タ", "タワ", "ワー"]
    assert analyzer("서울 Seoul") == ["서", "울", "서울", "seoul"]
    assert analyzer("I'm at Café") == get_analyzer("plain")("I'm at Café")


def test_jieba_cuts_chinese_into_words():
    analyzer = get_analyzer("jieba")
    assert analyzer("旅游景点 in ２０２４") == ["旅游", "景点", "旅游景点", "in", "2024"]
    assert "旅游" in analyzer("华山是一个很好旅游景点")


@pytest.mark.parametrize(
    ("analyzer", "query"), [("cjk", "旅游"), ("jieba", "旅游"), ("cjk", "游"), ("cjk", "华山"), ("jieba", "华山")]
)
def test_SRV_34_chinese_words_are_found_inside_a_clause(analyzer, query):
    index = BM25Index(["a", "b"], ["华山是一个很好旅游景点", "今天天气不错"], analyzer=analyzer)
    assert index.search([query], 2).ids == [["a"]]


@pytest.mark.parametrize("analyzer", ANALYZERS)
@pytest.mark.parametrize("query", ["OvertimeService", "overtimeservice", "OVERTIMESERVICE"])
def test_SRV_35_documents_and_queries_are_cut_alike(analyzer, query):
    index = BM25Index(["a", "b"], ["the OvertimeService was restarted", "nothing here"], analyzer=analyzer)
    assert index.search([query], 2).ids == [["a"]]


def test_unknown_analyzer_is_refused_by_name():
    with pytest.raises(MiaError, match="no analyzer 'porter': choose from study, plain, cjk, jieba"):
        get_analyzer("porter")


def test_missing_jieba_says_what_to_install():
    code = """
import sys
sys.modules["jieba"] = None
from mia_serve.lexical import get_analyzer
assert get_analyzer("cjk")("旅游") == ["旅", "游", "旅游"]
try:
    get_analyzer("jieba")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'mia-retrieval[zh]'" in done.stdout


def test_jieba_is_silent_and_ignores_words_added_to_its_global_dictionary():
    code = """
from mia_serve.lexical import get_analyzer
analyzer = get_analyzer("jieba")
import jieba
jieba.add_word("很好旅游")
print("旅游" in analyzer("华山是一个很好旅游景点"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_versions_differ_by_analyzer_and_not_by_process():
    versions = {name: get_analyzer(name).version for name in ANALYZERS}
    assert len(set(versions.values())) == len(ANALYZERS)
    code = "from mia_serve.lexical import get_analyzer; print(get_analyzer('study').version)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == versions["study"]
