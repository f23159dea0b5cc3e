from __future__ import annotations

import pytest

from mia_serve.mindscape.sentences import (
    count_words,
    first_words,
    is_cjk,
    join_sentences,
    paragraph_spans,
    sentence_spans,
    split_sentences,
    split_terms,
)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("He ran. She fell! Why? 3 did.", ["He ran.", "She fell!", "Why?", "3 did."]),
        ('"Stop!" he said. "Now." So he did.', ['"Stop!" he said.', '"Now."', "So he did."]),
        (
            "Mr. Holmes met Dr. J. Watson. It was I. He left.",
            ["Mr. Holmes met Dr. J. Watson.", "It was I.", "He left."],
        ),
        ("It cost 3.50 at no. 4, e.g. much... or not.", ["It cost 3.50 at no. 4, e.g. much... or not."]),
        ("A heading\n\nThe text\nruns on. End", ["A heading", "The text runs on.", "End"]),
        ("他来了。她走了！为什么？", ["他来了。", "她走了！", "为什么？"]),
        ("“走吧！”他说．“好．”重３．５两．", ["“走吧！”", "他说．", "“好．”", "重３．５两．"]),
        ("“走吧！”他说。“好。”", ["“走吧！”", "他说。", "“好。”"]),
        ("“真的？”，他问。", ["“真的？”，他问。"]),
        ("想了很久……才走。他说：“唉……”然后走了。", ["想了很久……才走。", "他说：“唉……”", "然后走了。"]),
        ("官\n聲好。民安", ["官聲好。", "民安"]),
        ("他说OK!然后走了。", ["他说OK!", "然后走了。"]),
        ("", []),
        (" \n ", []),
    ],
)
def test_split_sentences(text, sentences):
    assert split_sentences(text) == sentences


def test_spans_point_into_the_text():
    text = "  One. \n\n Two is here. 三。四！ "
    assert [text[a:b] for a, b in sentence_spans(text)] == ["One.", "Two is here.", "三。", "四！"]
    assert [text[a:b] for a, b in paragraph_spans(text)] == ["One.", "Two is here. 三。四！"]
    assert [("a\nb\n"[a:b]) for a, b in paragraph_spans("a\nb\n")] == ["a", "b"]


def test_words_and_terms():
    assert count_words("It's a well-known -- fact…") == 4
    assert count_words("第3回，武松打虎") == 7  # 6 characters and the number
    assert count_words("-" * 100_000) == 0
    assert first_words("one, two, three", 2) == "one, two,"
    assert first_words("武松打虎", 2) == "武松"
    assert first_words("one", 5) == "one"
    assert is_cjk("武松 is") and not is_cjk("the 虎 ran off")
    assert split_terms("The Cat-2 武松打") == ["the", "cat", "2", "武松", "松打"]
    assert join_sentences(["好。", "走。", "Yes.", "No."]) == "好。走。 Yes. No."
