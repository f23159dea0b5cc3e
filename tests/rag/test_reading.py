"""Answers in replies as models write them: fenced, prefixed, explained, cut off, in other languages, or none at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_serve.rag import TASKS, Task, citations, read_answer


@pytest.mark.parametrize(
    ("reply", "phrase"),
    [
        ("the brass lamp", "the brass lamp"),
        ("  \n\nThe brass lamp.\nIt hung on the quay.", "The brass lamp."),
        ("Answer: the brass lamp", "the brass lamp"),
        ("**Answer:** the brass lamp", "the brass lamp"),
        ("The final answer is: **the brass lamp**", "the brass lamp"),
        ("Answer:\nthe brass lamp", "the brass lamp"),
        ("“the brass lamp”", "the brass lamp"),
        ('"Yes" and "no"', '"Yes" and "no"'),
        ("'s-Hertogenbosch", "'s-Hertogenbosch"),
        ("```\nthe brass lamp\n```", "the brass lamp"),
        ("- the brass lamp", "the brass lamp"),
        ("-5 degrees", "-5 degrees"),
        ("the brass lamp [P3]", "the brass lamp"),
        ("the lamp [sic]", "the lamp [sic]"),
        ('Here: {"answer": "the brass lamp"}', "the brass lamp"),
        ("<answer>the brass lamp</answer>", "the brass lamp"),
        ("<think>\nA rope? No.\n</think>\n\nthe brass lamp", "the brass lamp"),
        ("答案：「那本账」", "那本账"),
        ("码头上的那本账", "码头上的那本账"),
        ("<think>it goes on and", None),
        ("  \n ", None),
        ("```\n```", None),
        ("[P1]", None),
        ('{"answer": "the brass lamp",}', "the brass lamp"),
        ('{"answer": "the brass lamp", "reasoning": "it was cut', "the brass lamp"),
        ('{"answer": 7}', "7"),
        ('{"answer": ["a lamp", "an oar"]}', "a lamp, an oar"),
        ('{"answer": ""}', None),
        ('{"answer": null}', None),
        ("# Answer\nthe brass lamp", "the brass lamp"),
        ("**Final answer**\n\nthe brass lamp", "the brass lamp"),
        ("<explanation>It hung there.</explanation><answer>the brass lamp</answer>", "the brass lamp"),
        ("\\boxed{\\text{the brass lamp}}", "the brass lamp"),
        ("那本账【P3】", "那本账"),
        ("---\nthe brass lamp", "the brass lamp"),
        ("…", None),
    ],
)
def test_a_phrase_is_read_without_what_stands_around_it(reply: str, phrase: str | None) -> None:
    assert read_answer("free", reply) == phrase


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ('{"answer": "B", "reasoning": "A and C were at sea."}', "B"),
        ('Here you are: ```json\n{"reasoning": "Not A.", "answer": "B. A man in grey"}\n```', "B"),
        ('{"answer": "b"}', "B"),
        ('{"Answer": "(B)"}', "B"),
        ('{"answer": ["B"]}', "B"),
        ('{"answer": "Option B"}', "B"),
        ("{'answer': 'B', 'reasoning': 'it isn't A'}", "B"),
        ('{"answer": "B", "reasoning": "he said "not A" and', "B"),
        ('{"answer": "the man in grey", "reasoning": "so it is B"}', "B"),
        ("B", "B"),
        ("b.", "B"),
        ("(B)", "B"),
        ("B [P2]", "B"),
        ("I would say B, but A is near.", "A"),  # the last one that stands alone
        ("The answer is B. A is wrong, and so is C.", "B"),
        ("It was B. A man saw it.", "B"),  # an article is no option
        ("选B。", "B"),
        ("答案是Ｂ，因为甲不在场。", "B"),
        ("<think>A? C?</think>B", "B"),
        ("B. Because A was at sea, and C had left.", "B"),
        ("D. Vitamin C", "D"),
        ("C。因为A不在场", "C"),
        ("A: no. B: no. C: yes.", "C"),
        ("Final answer: \\(\\boxed{B}\\)", "B"),
        ("The answer isn't A. Hence C.", "C"),
        ("The answer is A man in grey (B)", "B"),
        ("Answer: A\nthe oarsman", "A"),
        ("Answer: A or B", None),
        ("Answer: A/B", None),
        ("答案：A、B", None),
        ("A, B", None),
        ("B or C", None),
        ('{"answer": ["A", "B"]}', None),
        ('{"answer": null, "reasoning": "Perhaps C"}', None),
        ('{"answer": "", "reasoning": "It could be C"}', None),
        ("The answer is not B.", None),
        ("neither A nor B", None),
        ("None of A, B, C or D.", None),
        ("A is wrong. B is wrong. C fits. D is wrong.", None),
        ('{"answer": "A or B"}', None),
        ('{"answer": "E"}', None),
        ("E", None),
        ("A man did it.", None),
        ("The answer is a mystery.", None),
        ("None of them.", None),
        ("", None),
    ],
)
def test_SRV_26_an_option_is_read_by_its_field_else_by_its_letter(reply: str, letter: str | None) -> None:
    assert read_answer("choice", reply, 4) == letter
    assert read_answer("letter", reply, 4) == letter


def test_only_options_that_there_are_count() -> None:
    assert read_answer("letter", "C", 2) is None and read_answer("letter", "C", 3) == "C"
    assert read_answer("choice", '{"answer": "J"}', 10) == "J"
    assert read_answer("letter", "B", 0) is None


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("<explanation>She never left.</explanation><answer>FALSE</answer>", "FALSE"),
        ("<explanation>It is TRUE that</explanation>\n<answer> false </answer>", "FALSE"),
        ("<answer>TRUE</answer> No, wait. <answer>FALSE</answer>", "FALSE"),
        ("<explanation>… <answer>**True**.</answer>", "TRUE"),
        ("<explanation>…</explanation><answer>TRUE", "TRUE"),
        ("The statement is FALSE.", "FALSE"),
        ("**True**", "TRUE"),
        ("Answer: true", "TRUE"),
        ("FALSE. She never left the island.", "FALSE"),
        ("<think>TRUE</think>FALSE", "FALSE"),
        ("<answer>[TRUE]</answer>", "TRUE"),
        ("<answer>`False`</answer>", "FALSE"),
        ("\\boxed{FALSE}", "FALSE"),
        ("<answer>TRUE or FALSE</answer>", None),
        ("Is it TRUE or FALSE?", None),
        ("It is not true.", None),
        ("The statement is not entirely true. The entire paragraph is not entirely true.", None),
        ("The statement is not true. The entire context is false. The entire context is false.", None),
        ("She left in May. The statement is false.", "FALSE"),
        ("She left in May.\n\nTRUE", "TRUE"),
        ("最终答案：TRUE", "TRUE"),
        ("True in part, and in part it would be false to say so of her.", None),
        ("这句话是对的。", None),
        ("", None),
    ],
)
def test_a_claim_is_judged_by_the_last_tag_else_by_a_sentence_that_says_nothing_else(
    reply: str, verdict: str | None
) -> None:
    assert read_answer("claim", reply) == verdict


def test_citations_are_marks_of_passages_that_were_shown() -> None:
    ids = ("b:7", "b:2", "c:0")
    assert citations("the lamp [P3], as he says [P1; P3]", ids) == ("c:0", "b:7")
    assert citations("the lamp [p2]\n[P1, P2, P3]", ids) == ("b:2", "b:7", "c:0")
    assert citations("[P1] and [P1]", ids) == ("b:7",)
    assert citations("[P4] [P0] [P99999999] [sic] [3] P1 [P1: see]", ids) == ()
    assert citations("<think>[P1]</think>那本账 [P2、P3]", ids) == ("b:2", "c:0")
    assert citations("那本账【P3】 [P1 and P2]", ids) == ("c:0", "b:7", "b:2")
    assert citations("the lamp [P1-P3]", ids) == citations("the lamp [P1–3]", ids) == ids
    assert citations("[P1-P9999] [P3-P1]", ids) == ("b:7", "c:0")


def test_SRV_27_nothing_in_a_reply_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    code = f"__import__('pathlib').Path({str(target)!r}).touch()"
    for reply in (code, f'{{"answer": {code}}}', f"<answer>{code}</answer>", f"```python\n{code}\n```"):
        for task in TASKS:
            read_answer(task, reply, 4)
    assert not target.exists()


#: What replies are made of, so that fuzzing meets the branches.
PIECES = st.sampled_from(
    ['{"answer":', '"B"', "}", "{", "[", "]", "<answer>", "</answer>", "TRUE", "false", "<think>", "</think>",
     "Answer:", "[P1]", "[P", "A", " ", "\n", "```", '"', "'", "“", "答案：", "**", "\ud800", "\x00", "9" * 5000, "Ｂ",
     "-", "or"]
)  # fmt: skip


@given(st.lists(PIECES | st.text(max_size=8), max_size=30).map("".join), st.sampled_from(TASKS), st.integers(0, 30))
@settings(max_examples=400, deadline=None)
def test_no_reply_makes_reading_fail(reply: str, task: Task, n_options: int) -> None:
    found = read_answer(task, reply, n_options)
    of_task = {"claim": {"TRUE", "FALSE"}, "free": {found} - {""}}
    assert found is None or found in of_task.get(task, set("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:n_options]))
    assert set(citations(reply, ["x"])) <= {"x"}


@pytest.mark.parametrize(
    "unit",
    ['{"a":', "[", "<think>", "P1", "[P1", "[P" + "1" * 70 + "x]", "answer: ", "A ", '"', "** - ", "\n", "{",
     "<answer> ", "- ", ".", "!?", "。", " ", "\\boxed{", '"answer": "', "【P1", "not ", "option "],
)  # fmt: skip
def test_a_reply_of_100_kB_is_read_in_no_time(unit: str) -> None:
    reply = unit * (100_000 // len(unit))
    start = time.process_time()
    for task in TASKS:
        read_answer(task, reply, 4)
    citations(reply, ["x"])
    assert time.process_time() - start < 2
