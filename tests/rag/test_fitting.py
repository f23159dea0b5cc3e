"""SRV-60: a prompt over the model's context loses what matters least, and never the question."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mia_serve.core import MiaError
from mia_serve.rag import Question
from mia_serve.rag.fitting import Contents, PromptTooLong, Trimmed, estimate_tokens, fit, prompt_tokens

QUESTION = Question("q", "Who took the lamp?", "letter", ("The ferryman", "Nobody at all"))
CONTENTS = Contents(
    passages=tuple(f"{word} " + "lamp " * 199 for word in ("first", "second", "third")),
    signature=("useful " * 20, "less " * 20),
    evidence=("older fact", "newer fact"),
)


def words(text: str) -> int:
    return len(text.split())


def held(limit: int) -> tuple[int, int, int, int]:
    """Words of passages, and summaries and facts left, and what is left out."""
    fitted = fit(QUESTION, CONTENTS, limit, words)
    assert fitted.tokens == prompt_tokens(fitted.messages, words) <= limit
    user = fitted.messages[1]["content"]
    assert "## Question:\nWho took the lamp?" in user and "A. The ferryman\nB. Nobody at all" in user
    assert user.endswith("Reply with its letter, one of A, B, and nothing else.")
    kept = fitted.contents
    assert kept.passages == () or CONTENTS.passages[0].startswith(kept.passages[0]) or len(kept.passages) > 1
    return sum(map(words, kept.passages)), len(kept.passages), len(kept.signature), len(kept.evidence)


def test_SRV_60_the_order_in_which_a_prompt_is_trimmed() -> None:
    whole = prompt_tokens(CONTENTS.prompt(QUESTION), words)
    assert held(whole) == (600, 3, 2, 2)
    assert held(whole - 1) == (400, 2, 2, 2)  # the worst passage goes whole
    assert held(whole - 201) == (200, 1, 2, 2)
    assert held(whole - 401)[1:] == (1, 2, 2) and held(whole - 401)[0] == 199  # then the end of the last one
    assert held(whole - 500) == (100, 1, 2, 2)
    # One more word than the beginning that is kept: a summary goes, and of the passage comes back what has room.
    assert held(whole - 501) == (120, 1, 1, 2)
    assert held(whole - 543)[2:] == (0, 2)
    rest = prompt_tokens(CONTENTS._replace(passages=("lamp " * 100,), signature=()).prompt(QUESTION), words)
    assert held(rest)[2:] == (0, 2)
    assert held(rest - 1)[2:] == (0, 1)
    fitted = fit(QUESTION, CONTENTS, rest - 1, words)
    assert fitted.contents.evidence == ("newer fact",)
    assert fitted.trimmed == Trimmed(2, 2, 1, len(CONTENTS.passages[0]) - len(fitted.contents.passages[0]))
    alone = prompt_tokens(Contents().prompt(QUESTION), words)
    assert held(alone) == (0, 0, 0, 0)
    with pytest.raises(PromptTooLong, match=rf"'q' needs about {alone} tokens .* and {alone - 1} are free"):
        fit(QUESTION, CONTENTS, alone - 1, words)


def test_the_last_pick_of_a_signature_goes_first() -> None:
    contents = CONTENTS._replace(passages=())
    limit = prompt_tokens(contents._replace(signature=contents.signature[:1]).prompt(QUESTION), words)
    assert fit(QUESTION, contents, limit, words).contents.signature == ("useful " * 20,)


def test_without_a_limit_all_is_kept() -> None:
    fitted = fit(QUESTION, CONTENTS)
    assert fitted.contents == CONTENTS and not fitted.trimmed and fitted.trimmed.to_text() == "nothing"


def test_what_was_left_out_is_told() -> None:
    assert Trimmed(1, 2, 0, 30).to_text() == (
        "1 passage, 30 characters of the last passage, 2 summaries of the signature"
    )
    assert Trimmed(evidence=1).to_dict() == {"passages": 0, "signature": 0, "evidence": 1, "cut": 0}
    assert Trimmed(evidence=1) and not Trimmed()


def test_chinese_is_cut_between_characters() -> None:
    question = Question("q", "那本账在哪里？")
    contents = Contents(("潮水退去以后，他在码头上找到了那本账。" * 40,))
    whole = fit(question, contents).tokens
    fitted = fit(question, contents, whole - 300)
    (kept,) = fitted.contents.passages
    assert contents.passages[0].startswith(kept) and len(kept) > 500 and fitted.trimmed.cut == 760 - len(kept)
    assert whole - 303 <= fitted.tokens <= whole - 300


def test_a_question_that_does_not_fit_its_task_is_refused() -> None:
    with pytest.raises(MiaError, match="needs options"):
        fit(Question("q", "Who?", "letter"), CONTENTS, 100)


@given(
    st.lists(st.text(max_size=60), max_size=5),
    st.lists(st.text(max_size=40), max_size=4),
    st.lists(st.text(max_size=20), max_size=4),
    st.integers(0, 400),
)
@settings(max_examples=150, deadline=None)
def test_it_fits_or_says_that_the_question_does_not(
    passages: list[str], signature: list[str], evidence: list[str], limit: int
) -> None:
    contents = Contents(tuple(passages), tuple(signature), tuple(evidence))
    try:
        fitted = fit(QUESTION, contents, limit)
    except PromptTooLong:
        assert prompt_tokens(Contents().prompt(QUESTION)) > limit
        return
    assert prompt_tokens(fitted.messages) == fitted.tokens <= limit
    kept, left_out = fitted.contents, fitted.trimmed
    assert len(kept.passages) + left_out.passages == len(passages)
    assert kept.signature == tuple(signature[: len(kept.signature)])
    assert kept.evidence == tuple(evidence[len(evidence) - len(kept.evidence) :])
    if left_out.signature or left_out.evidence:
        assert len(kept.passages) <= 1
    if left_out.evidence:
        assert not kept.signature


def test_the_estimate_is_above_what_a_real_tokenizer_counts_in_prose(qwen3_tokenizer: Path) -> None:
    tokenizer = Tokenizer.from_file(str(qwen3_tokenizer / "tokenizer.json"))
    for text in (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want.",
        "潮水退去以后，他在码头上找到了那本账。林黛玉笑道：“你既知道，何必问我？”",
        "Все счастливые семьи похожи друг на друга.",
        "Señor, ¿dónde está la lámpara? — À côté de l’œuvre.",
    ):
        counted = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert counted <= estimate_tokens(text) <= 3 * counted
    assert estimate_tokens("") == 0 and estimate_tokens("\ud800") == 1
