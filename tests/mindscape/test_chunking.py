from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from mia_serve.core import MiaError
from mia_serve.mindscape import chunk_text
from mia_serve.mindscape.chunking import OpenText, chunk_open


def words(text: str) -> list[tuple[int, int]]:
    return [m.span() for m in re.finditer(r"\S+", text)]


def test_hard_cuts_with_overlap():
    text = " ".join(f"w{i}" for i in range(10))  # one sentence longer than a chunk
    chunks = chunk_text(text, words, size=4, overlap=1)
    assert [c.text for c in chunks] == ["w0 w1 w2 w3", "w3 w4 w5 w6", "w6 w7 w8 w9"]
    assert [c.tokens for c in chunks] == [4, 4, 4]
    assert [c.text for c in chunk_text(text, words, size=4, overlap=0)] == ["w0 w1 w2 w3", "w4 w5 w6 w7", "w8 w9"]


def test_paragraphs_then_sentences_are_kept_whole():
    text = "A a a.\n\nB b b b.\n\nC c. D d d d d. E e e e e e e e."
    # 3 and 4 tokens fit together; the third paragraph (15) fits no chunk, its sentences (2, 5, 8) do.
    assert [c.text for c in chunk_text(text, words, size=8, overlap=0)] == [
        "A a a.\n\nB b b b.",
        "C c. D d d d d.",
        "E e e e e e e e.",
    ]
    # A paragraph that fits is not begun in the room left by the one before.
    assert [c.text for c in chunk_text("a b c\n\nd e f g", words, size=5, overlap=0)] == ["a b c", "d e f g"]


@pytest.mark.parametrize(("size", "overlap"), [(7, 0), (7, 3), (7, 6), (1, 0), (1200, 100)])
def test_offsets_are_exact_and_nothing_is_lost(size, overlap):
    rng = random.Random(3)
    text = "\n" + "".join(
        rng.choice(["word ", "Yes. ", "好。", "\n\n", "long-word, ", "\u3000", "No! "]) for _ in range(400)
    )
    chunks = chunk_text(text, words, size, overlap)
    covered = set()
    for chunk in chunks:
        assert text[chunk.start : chunk.end] == chunk.text == chunk.text.strip()
        assert len(words(chunk.text)) == chunk.tokens <= size
        covered.update(range(chunk.start, chunk.end))
    assert all(i in covered for i, char in enumerate(text) if not char.isspace())
    for before, after in pairwise(chunks):
        assert before.start < after.start
        shared = len(words(text[after.start : before.end])) if before.end > after.start else 0
        assert shared == min(overlap, before.tokens - 1 if before.tokens <= overlap else overlap)


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level tokenizer without merges: a Chinese character is three tokens with one and the same span."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_a_character_is_never_cut(byte_level):
    text = "武松打虎" * 5
    chunks = chunk_text(text, byte_level, size=10, overlap=0)
    assert [c.text for c in chunks][:2] == ["武松打", "虎武松"]
    assert "".join(c.text for c in chunks) == text


def test_a_tokenizer_that_truncates_is_not_changed_and_not_obeyed(byte_level):
    byte_level.enable_truncation(5)
    try:
        assert chunk_text("abcdefghij", byte_level, size=4, overlap=0)[-1].end == 10
        assert byte_level.truncation["max_length"] == 5
    finally:
        byte_level.no_truncation()


def test_real_tokenizer(minilm_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    text = "The tide came in. It took the boat! " * 100
    chunks = chunk_text(text, tokenizer, size=200, overlap=0)  # longer than MiniLM's own limit: the text is not cut
    assert chunks[-1].end == len(text.strip())
    for chunk in chunks:
        assert chunk.text.endswith((".", "!")) and chunk.tokens <= 200
        assert len(tokenizer(chunk.text, add_special_tokens=False)["input_ids"]) == chunk.tokens
        assert text[chunk.start : chunk.end] == chunk.text


def test_bad_input():
    for size, overlap in ((0, 0), (5, 5), (5, -1)):
        with pytest.raises(MiaError, match="overlap"):
            chunk_text("text", words, size, overlap)
    with pytest.raises(MiaError, match="empty"):
        chunk_text(" \n", words)
    with pytest.raises(MiaError, match="no character offsets"):
        chunk_text("text", object())


def test_tokens_of_white_space_make_no_empty_chunk():
    def characters(text: str) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(len(text))]

    text = "The lamp." + "\n" * 30 + "It burns." + "\n" * 30
    chunks = [c.text for c in chunk_text(text, characters, size=9, overlap=0)]
    assert all(chunks) and "".join("".join(chunks).split()) == "Thelamp.Itburns."
    with pytest.raises(MiaError, match="empty"):
        chunk_text("\n \n", characters, size=9, overlap=0)


def story(seed: int, n: int = 700) -> str:
    """English, Chinese and white space of all kinds, with and without blank lines."""
    rng = random.Random(seed)
    pieces = [
        "word ",
        "Yes. ",
        "“No!” ",
        "好。",
        "上山打虎",
        "\n\n",
        "\n",
        "long-word, ",
        "\u3000",
        " \n \n ",
        "Mr. X ",
        "…",
        "  ",
    ]
    if seed % 4 == 0:
        pieces = [piece for piece in pieces if piece.count("\n") < 2]
    return "start" + "".join(rng.choice(pieces) for _ in range(n))


@pytest.mark.parametrize(("size", "overlap"), [(9, 0), (60, 5), (7, 6)])
@pytest.mark.parametrize("tokens", ["words", "bert", "xlmr", "qwen3"])
def test_a_text_in_pieces_has_the_chunks_of_the_whole(tokens, size, overlap, request):
    if tokens == "words":
        tokenizer = words
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue(f"tiny_{tokens}"))
    for seed in range(12):
        rng, text = random.Random(seed), story(seed)
        cuts = sorted(rng.sample(range(1, len(text)), rng.choice([1, 4, 40])))
        kept, chunks, tail, longest = [], [], OpenText(), 0
        for piece in map(text.__getitem__, map(slice, [0, *cuts], [*cuts, len(text)])):
            chunks, closed, tail = chunk_open(tail, piece, tokenizer, size, overlap)
            everything = kept + [chunk.text for chunk in chunks]
            kept += [chunk.text for chunk in chunks[:closed]]
            longest = max(longest, len(tail.text))
        assert everything == [chunk.text for chunk in chunk_text(text, tokenizer, size, overlap)]
        assert seed % 4 == 0 or size == 60 or longest < len(text)
