"""One-shot RAG against a real HTTP server whose replies are written here, on the real MiniLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from mia_serve.core import Encoder, MiaError
from mia_serve.llm import ChatClient, LlmFailed
from mia_serve.mindscape import Book, Mindscape
from mia_serve.rag import ANSWER_MODES, Passage, Question, answer, ask, choose_mode
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.rag.modes import NEEDED, Signals, measure_signals, signature_need
from mia_serve.retriever import Pool, Retriever
from mia_serve.signature import Signature
from tests.llm.server import Stub, serving

PASSAGES = (
    Passage("b:0", "The brass lamp hung on the quay. " * 40, 0.9, "b:s0"),
    Passage("b:7", "潮水退去以后，他在码头上找到了那本账。", 0.8, "b:s1"),
    Passage("b:3", "She kept the key under the clock. " * 40, 0.7, "b:s0"),
)
SIGMA = Signature(("b:s1", "b:s0"), ("A ledger is found.", "A lamp is lost."), mode="coverage")
QUESTION = Question("q", "What was found on the quay?")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


async def answered(stub: Stub, question: Question = QUESTION, **options: Any) -> Any:
    async with ChatClient(stub.url, "m", max_retries=0) as client:
        return await answer(client, question, PASSAGES, **options)


def shown(stub: Stub, request: int = -1) -> str:
    return stub.requests[request]["messages"][1]["content"]


@pytest.mark.parametrize("mode", ANSWER_MODES)
def test_each_mode_shows_its_blocks_and_no_others(mode: Any) -> None:
    with serving(lambda body: "the ledger") as stub:
        found = run(answered(stub, signature=SIGMA, evidence=["The tide was out."], mode=mode))
    assert found.text == "the ledger" and found.mode == mode and found.signature == SIGMA and not found.failed
    assert ("[S1] A ledger is found.\n[S2] A lamp is lost." in shown(stub)) == ("sig" in mode)
    assert ("[E1] The tide was out." in shown(stub)) == ("evi" in mode)
    assert "码头" in shown(stub) and "[P1]" not in shown(stub)
    assert found.usage == (7, 3)


def test_citations_are_those_of_the_reply_or_else_all_passages_and_say_which() -> None:
    with serving(lambda body: "the ledger [P2]") as stub:
        found = run(answered(stub, cite=True))
        assert found.text == "the ledger" and found.citations == ("b:7",) and found.cited
        assert "[P2] 潮水退去以后" in shown(stub) and "name the passages" in shown(stub)
        plain = run(answered(stub))
        assert plain.citations == ("b:0", "b:7", "b:3") and not plain.cited
    with serving(lambda body: "the ledger [P9]") as stub:
        assert run(answered(stub, cite=True)).citations == ("b:0", "b:7", "b:3")


def test_a_signature_can_stand_where_the_summary_of_the_book_was_in_training() -> None:
    with serving(lambda body: "x") as stub:
        run(answered(stub, signature=SIGMA, mode="chunks+sig", as_summary=True))
    assert shown(stub).startswith("## Book Summary:\nA ledger is found.\nA lamp is lost.\n\n## Relevant")


def test_SRV_60_a_known_context_trims_the_prompt_before_it_is_sent() -> None:
    with serving(lambda body: "x") as stub:
        found = run(answered(stub, max_tokens=100, context_tokens=800))
    assert [p.id for p in found.passages] == ["b:0", "b:7"] == list(found.citations)
    assert found.trimmed.to_dict() == {"passages": 1, "signature": 0, "evidence": 0, "cut": 0}
    assert "key under the clock" not in shown(stub) and QUESTION.text in shown(stub) and len(stub.requests) == 1


def test_SRV_60_an_endpoint_that_finds_it_too_long_is_asked_again_with_three_quarters() -> None:
    def short(body: dict[str, Any]) -> Any:
        size = sum(len(message["content"]) for message in body["messages"])
        return (400, "This model's maximum context length is 99 tokens.") if size > 1500 else "the lamp"

    with serving(short) as stub:
        found = run(answered(stub, cite=True))
    assert found.text == "the lamp" and len(found.passages) == 1 and found.trimmed.passages == 2
    sizes = [len(shown(stub, i)) for i in range(len(stub.requests))]
    assert len(sizes) <= 6 and sizes == sorted(sizes, reverse=True)
    assert all("## Question:\nWhat was found on the quay?" in shown(stub, i) for i in range(len(sizes)))


def test_SRV_60_a_context_that_nothing_fits_is_a_failure_and_no_crash() -> None:
    with serving(lambda body: (400, "maximum context length is 9 tokens")) as stub:
        found = run(answered(stub))
        assert found.failed == "too long" and found.text is None and 1 < len(stub.requests) <= 6
        asked = len(stub.requests)
        found = run(answered(stub, context_tokens=600))
        assert found.failed == "too long" and "'q' needs about" in found.detail and len(stub.requests) == asked


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        (("{", "length"), "truncated"),
        (("no", "content_filter"), "filtered"),
        ((None, "stop"), "no content"),
        (b"<html>", "bad response"),
        (500, "http 500"),
    ],
)
def test_SRV_24_a_reply_that_cannot_be_used_is_a_typed_failure(reply: Any, label: str) -> None:
    with serving(lambda body: reply) as stub:
        found = run(answered(stub))
    assert (found.text, found.reply, found.failed) == (None, "", label) and found.detail
    assert found.to_dict()["failed"] == label


def test_a_reply_without_an_answer_is_none_and_kept() -> None:
    question = Question("q", "Who?", "choice", ("he", "she"))
    with serving(lambda body: "I cannot say.") as stub:
        found = run(answered(stub, question))
    assert found.text is None and found.reply == "I cannot say." and found.failed is None


def test_no_reply_whatever_is_more_than_a_failure() -> None:
    surrogate = b'{"choices": [{"message": {"content": "\\ud800"}}]}'
    junk: list[Any] = ["x" * 100_000, '{"answer":' * 2000, "[P1" * 9000, "\x00", "答案：", "", 418, "B"]
    junk += [b"\xff\xfe{", b"[]", b'{"choices": 3}', surrogate]
    tasks = [Question(f"{i}", "Who?", "letter", ("he", "she")) for i in range(len(junk))]

    with serving(lambda body: "") as stub:
        for question, said in zip(tasks, junk, strict=True):
            stub.answer = lambda body, said=said: said
            found = run(answered(stub, question, signature=SIGMA, cite=True))
            assert found.text == ("B" if said == "B" else None) and found.signature == SIGMA
            assert found.reply or found.failed


def test_what_would_fail_for_every_question_is_raised() -> None:
    with serving(lambda body: 401) as stub, pytest.raises(LlmFailed) as failure:
        run(answered(stub))
    assert failure.value.hopeless


def test_wrong_use_is_refused_before_a_call() -> None:
    with serving(lambda body: "x") as stub:
        with pytest.raises(MiaError, match=r"'chunks\+sig\+evi'"):
            run(answered(stub, mode="all"))
        with pytest.raises(MiaError, match="needs options"):
            run(answered(stub, Question("q", "Who?", "choice")))
        assert not stub.requests


# --- from a mindscape ---

BOOKS = [
    Book(
        "harbour",
        (
            "The ferryman counted the lamps along the quay.",
            "He found that one brass lamp was missing.",
            "The harbour master blamed the fog.",
            "Widow Marsh kept the missing lamp in her cellar.",
        ),
        summaries=("A ferryman misses a lamp on the quay.", "The widow hides the lamp in her cellar."),
    ),
    Book(
        "farm",
        (
            "The farmer's horse would not leave the stable.",
            "A fox had been at the hens.",
            "His daughter rode to the mill.",
            "The miller paid her in flour.",
        ),
        summaries=("A farmer has trouble with horse and hens.", "The daughter trades at the mill."),
    ),
]


@pytest.fixture(scope="module")
def retriever(minilm: Encoder) -> Retriever:
    return Retriever(Mindscape.from_books(BOOKS, window=2), minilm, k_sum=2, k0=4)


async def asked(stub: Stub, retriever: Retriever, question: Question, **options: Any) -> Any:
    async with ChatClient(stub.url, "m", max_retries=0) as client, AsyncRetriever(retriever) as searcher:
        return await ask(client, searcher, question, **options)


def test_a_question_goes_from_mindscape_to_answer(retriever: Retriever) -> None:
    question = Question("q", "Where is the missing brass lamp?")
    with serving(lambda body: "in the cellar [P1]") as stub:
        found = run(asked(stub, retriever, question, k=3, mode="chunks+sig", cite=True))
        signature = retriever.signatures([question.text])[0]
        assert found.signature == signature and len(signature.pick_terms) == 2
        hits = retriever.search([question.text], 3, [signature], prior=0.1).hits
        assert [p.id for p in found.passages] == list(hits.ids[0])
        assert [p.score for p in found.passages] == pytest.approx(hits.scores[0].tolist())
        texts = {chunk.id: chunk for chunk in retriever.mindscape.chunks}
        assert all(p.text == texts[p.id].text and p.session_id == texts[p.id].session_id for p in found.passages)
        assert found.citations == (hits.ids[0][0],) and found.text == "in the cellar"
        assert f"[S1] {signature.texts[0]}\n[S2] {signature.texts[1]}" in shown(stub)

        alone = run(asked(stub, retriever, question, k=3, signature_mode="none"))
        assert alone.signature is None and alone.mode == "chunks"
        assert [p.id for p in alone.passages] == list(retriever.search([question.text], 3, "none").hits.ids[0])


def test_auto_shows_a_claim_the_signature_and_a_phrase_the_passages(retriever: Retriever) -> None:
    with serving(lambda body: "<answer>TRUE</answer>") as stub:
        claim = Question("c", "The widow hid the lamp that the ferryman missed.", "claim")
        assert run(asked(stub, retriever, claim, mode="auto")).mode == "chunks+sig"
        assert run(asked(stub, retriever, claim, mode="auto", evidence=["x"])).mode == "chunks+sig+evi"
        assert run(asked(stub, retriever, Question("f", "Who paid in flour?"), mode="auto")).mode == "chunks"
        assert run(asked(stub, retriever, claim, mode="auto", signature_mode="none")).mode == "chunks"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "all"}, "'auto'"),
        ({"mode": "chunks+sig", "signature_mode": "none"}, "makes none"),
        ({"mode": "chunks+evi"}, "let an agent gather it"),
        ({"signature_mode": "best"}, "'first_k'"),
        ({"k": 0}, "k"),
    ],
)
def test_settings_that_make_no_sense_are_refused(retriever: Retriever, options: dict[str, Any], said: str) -> None:
    with serving(lambda body: "x") as stub, pytest.raises(MiaError, match=said):
        run(asked(stub, retriever, QUESTION, **options))


# --- the choice of a mode ---


def test_signals_by_hand(retriever: Retriever) -> None:
    import numpy as np

    mindscape = retriever.mindscape
    pool = Pool(np.array([0, 1]), np.array([0, 1, 2, 3]), np.full(4, 0.5, np.float32))
    signature = Signature(("harbour:w0", "farm:w0"), ("a", "b"))
    assert {s.id for s in mindscape.sessions} >= set(signature.session_ids)
    found = measure_signals(mindscape, pool, [0, 2], signature)
    assert found == (2, pytest.approx(2.0), 0.5, 0.5)  # two sessions alike; one of σ's shown; chunk 0 is also E1's
    assert signature_need(found) == pytest.approx((1 / 9 + 0.5 + 0.5) / 3)
    assert measure_signals(mindscape, pool, [], None) == (0, pytest.approx(2.0), 1.0, 1.0)


def test_the_wider_a_question_the_more_tasks_see_the_signature() -> None:
    steps = [Signals(2, spread, covered, agreement) for spread, covered, agreement in
             [(1, 1, 1), (4, 0.8, 0.9), (6, 0.5, 0.7), (12, 0.2, 0.2)]]  # fmt: skip
    seen = [{task for task in NEEDED if choose_mode(task, signals) == "chunks+sig"} for signals in steps]
    assert seen == [{"claim"}, {"claim", "choice"}, {"claim", "choice", "letter"}, set(NEEDED)]
    assert choose_mode("claim", Signals(0, 9, 1, 1)) == "chunks"  # no signature to show


@pytest.mark.parametrize(
    ("task", "options", "reply", "text"),
    [
        ("free", (), '{"answer": "the ferryman"}', "the ferryman"),
        ("choice", ("a", "b"), '{"answer": "B", "reasoning": "The answer is A? No."}', "B"),
        ("letter", ("a", "b"), '{"answer": "A"}', "A"),
        ("claim", (), '{"explanation": "It is FALSE that", "answer": "TRUE"}', "TRUE"),
    ],
)
def test_a_guided_reply_is_asked_for_by_a_bounded_schema(
    task: Any, options: tuple[str, ...], reply: str, text: str
) -> None:
    with serving(lambda body: reply) as stub:
        found = run(answered(stub, Question("q", "The ferryman lied.", task, options), guided=True))
    assert found.text == text
    body = stub.requests[-1]
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == list(json.loads(reply)) and schema["additionalProperties"] is False
    for field in schema["properties"].values():
        assert "enum" in field or field["maxLength"] <= 400
    assert "JSON" in body["messages"][-1]["content"]
