"""The loop by scripted replies: when it stops, what it searches with, what it hands to the answer, and its trace."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mia_serve.core import MiaError
from mia_serve.llm import ChatClient, LlmFailed, ReplyCache
from mia_serve.rag.agent import REFUSED, AgentResult, AgentSettings, run_agent, run_agents
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.rag.question import Question
from mia_serve.rag.state import Fact
from mia_serve.retriever import Retriever
from mia_serve.signature import Signature
from tests.llm.server import Stub, serving
from tests.rag.agent_world import (
    QUESTION,
    SUMMARIES,
    client_of,
    is_update,
    reply,
    scripted,
    with_searcher,
    words_retriever,
)

SMALL = AgentSettings(k=3, k_sum=2)


class Watched(AsyncRetriever):
    """Notes what is searched for."""

    def __init__(self, retriever: Retriever) -> None:
        super().__init__(retriever)
        self.searched: list[tuple[str, Signature | None]] = []

    async def search(self, query, k=10, signature=None, encoder=None, prior=None):
        self.searched.append((query, signature))
        return await super().search(query, k, signature, encoder, prior)


def run(
    server: Stub, settings: AgentSettings = SMALL, question: Question = QUESTION, retriever: Retriever | None = None,
    **arguments: Any,
) -> tuple[AgentResult, list[tuple[str, Signature | None]]]:  # fmt: skip
    retriever = retriever or words_retriever()

    async def ask() -> tuple[AgentResult, list]:
        async with client_of(server, **arguments) as client, Watched(retriever) as searcher:
            result = await run_agent(client, searcher, retriever.mindscape, question, settings)
            return result, searcher.searched

    return asyncio.run(ask())


def played(updates: list[Any], settings: AgentSettings = SMALL, answer: Any = "the boat", **rest: Any):
    with serving(scripted(updates, answer)) as server:
        result, searched = run(server, settings, **rest)
    return result, searched, server.requests


def first_k(retriever: Retriever, query: str, k: int) -> tuple[str, ...]:
    retriever = Retriever(retriever.mindscape, retriever.e1, k0=retriever.k0, k_sum=k, device="cpu")
    return retriever.signatures([query], "first_k")[0].session_ids


def test_answer_at_once():
    retriever = words_retriever()
    expected = first_k(retriever, QUESTION.text, 2)
    result, searched, requests = played([reply("ANSWER", "more?", ["S2"], [("The lamp was a signal.", ["P1"])])])
    assert len(requests) == 2 and len(result.steps) == 1
    step = result.steps[0]
    assert step.query == step.next_query == QUESTION.text and step.decision == "ANSWER" and step.failed is None
    assert step.signature is not None and step.signature.session_ids == expected and step.signature.mode == "first_k"
    assert searched == [(QUESTION.text, step.signature)]
    found = retriever.search([QUESTION.text], 3, [step.signature]).hits
    assert list(step.chunks) == found.ids[0] and step.scores == pytest.approx(found.scores[0].tolist())
    sessions = dict.fromkeys(f"sea:w{int(id[4:]) // 2}" for id in step.chunks)
    assert step.candidates == tuple(sessions)
    assert step.evidence == (Fact("The lamp was a signal.", (step.chunks[0],)),)
    assert result.evidence == step.evidence and result.answer.text == "the boat" and result.answer.failed is None
    assert result.signature is not None and result.signature.session_ids == expected[1:]
    assert [passage.id for passage in result.passages] == list(step.chunks)
    assert result.usage == (14, 6)


def test_refine_until_the_last_step_and_answer_the_original_question():
    updates = [
        reply("REFINE", "Where are the oars?", ["S1"], [("A lamp was lit.", ["P1"])]),
        reply("REFINE", "Whose barn is it?", ["H1"], [("", ["E1"]), ("The oars are hidden.", ["P1"])]),
        reply("REFINE", "And then?", ["H1", "S1"], [("", ["E1"]), ("", ["E2"]), ("The miller has a barn.", ["P1"])]),
    ]
    result, searched, requests = played(updates, AgentSettings(k=3, k_sum=2, mode="chunks+sig+evi"))
    assert [query for query, _ in searched] == [QUESTION.text, "Where are the oars?", "Whose barn is it?"]
    assert [step.decision for step in result.steps] == ["REFINE"] * 3 and len(requests) == 4
    # Each step searches with what the one before left, and shows it to the model.
    for before, after in zip(result.steps, result.steps[1:], strict=False):
        assert after.query == before.next_query
    assert [signature for _, signature in searched] == [step.signature for step in result.steps]
    second = requests[1]["messages"][1]["content"]
    assert QUESTION.text in second and "Where are the oars?" in second and "[E1] A lamp was lit." in second
    assert result.steps[1].signature is not None and f"[S1] {result.steps[1].signature.texts[0]}" in second
    assert "Step 3 of 3" in requests[2]["messages"][1]["content"]
    # The answer is to the question, from the last passages, the last signature and all the evidence.
    last = requests[3]["messages"][1]["content"]
    assert QUESTION.text in last and "And then?" not in last and "Whose barn" not in last
    assert result.signature is not None and all(text in last for text in result.signature.texts)
    facts = ["A lamp was lit.", "The oars are hidden.", "The miller has a barn."]
    assert [fact.text for fact in result.evidence] == facts and all(fact in last for fact in facts)
    assert tuple(passage.id for passage in result.passages) == result.steps[-1].chunks
    # A fact found in an earlier step keeps its source, though that passage is shown no more.
    assert result.evidence[0].sources == (result.steps[0].chunks[0],)


def test_the_trace_is_json():
    result, *_ = played([reply("REFINE", "Where are the oars?", ["S1"], [("A fact.", ["P1"])]), reply("ANSWER")])
    record = json.loads(json.dumps(result.to_dict(), ensure_ascii=False))
    assert [step["step"] for step in record["steps"]] == [0, 1]
    step = record["steps"][0]
    assert set(step) == {
        "step", "query", "signature", "chunks", "scores", "candidates", "decision", "next_query", "evidence", "failed",
        "usage",
    }  # fmt: skip
    assert Signature.from_dict(step["signature"]) == result.steps[0].signature
    assert step["evidence"] == [{"text": "A fact.", "sources": [step["chunks"][0]]}] and step["usage"] == [7, 3]
    assert record["answer"]["answer"] == "the boat" and len(step["scores"]) == len(step["chunks"]) == 3


@pytest.mark.parametrize(
    ("bad", "label"),
    [
        ("no JSON at all", "bad reply"),
        ((reply()[:20], "length"), "truncated"),
        (("", "content_filter"), "filtered"),
        (500, "http 500"),
        (b"\xff\xfe\xff", "bad response"),
        ("", "no content"),
    ],
)
def test_SRV_26_a_failed_update_leaves_the_state_and_the_loop_goes_on(bad: Any, label: str):
    good = reply("REFINE", "Where are the oars?", ["S2"], [("A fact.", ["P1"])])

    def say(body: dict[str, Any]) -> Any:
        if not is_update(body):
            return "the boat"
        return bad if "Step 2 of 3" in body["messages"][1]["content"] else good

    with serving(say) as server:
        result, searched = run(server)
    one, two, three = result.steps
    assert [step.failed for step in result.steps] == [None, label, None] and two.decision == "REFINE"
    assert three.query == two.query == two.next_query == "Where are the oars?"
    assert three.signature == two.signature and two.evidence == one.evidence and one.evidence
    # The same pair is not searched again; what it found is shown again.
    assert len(searched) == 2 and three.chunks == two.chunks and three.scores == two.scores
    assert result.answer.text == "the boat"


def test_an_agent_whose_every_update_fails_still_answers():
    result, searched, requests = played(["no"])
    assert [step.failed for step in result.steps] == ["bad reply"] * 3 and len(searched) == 1
    assert len(requests) == 7  # each step is told its number, so each is asked, twice; then the answer
    assert result.evidence == () and result.signature == result.steps[0].signature
    assert result.answer.text == "the boat" and result.passages


def test_a_failed_answer_is_a_typed_one():
    result, *_ = played([reply("ANSWER")], answer=500)
    assert result.answer.failed == "http 500" and result.answer.text is None and len(result.steps) == 1


def test_no_call_can_succeed_ends_it():
    with serving(lambda body: 401) as server, pytest.raises(LlmFailed) as failed:
        run(server)
    assert failed.value.hopeless
    answers: list[Any] = [reply("ANSWER"), 404]
    with serving(lambda body: answers.pop(0)) as server, pytest.raises(LlmFailed):
        run(server)


def test_without_rewriting_every_search_is_the_question():
    settings = AgentSettings(k=3, k_sum=2, rewrite_query=False)
    updates = [reply("REFINE", "Where are the oars?", ["S2"]), reply("REFINE", "x", ["S1"]), reply("ANSWER")]
    result, searched, requests = played(updates, settings)
    assert {query for query, _ in searched} == {QUESTION.text} == {step.next_query for step in result.steps}
    # σ moved once; the third step has the second's pair, which is not searched again.
    assert len(searched) == 2 and len(result.steps) == 3
    assert "next_query" not in requests[0]["messages"][0]["content"]


def test_the_baseline_without_a_signature_searches_by_the_query_alone():
    settings = AgentSettings(k=3, use_signature=False, mode="chunks+sig+evi")
    retriever = words_retriever()
    updates = [reply("REFINE", "Where are the oars?", None, [("A fact.", ["P1"])]), reply("ANSWER")]
    result, searched, requests = played(updates, settings, retriever=retriever)
    assert [signature for _, signature in searched] == [None, None] and result.signature is None
    assert all(step.signature is None for step in result.steps)
    assert list(result.steps[1].chunks) == retriever.search(["Where are the oars?"], 3, "none").hits.ids[0]
    text = json.dumps([request["messages"] for request in requests])
    assert not any(summary in text for summary in SUMMARIES) and "signature" not in text.lower()
    assert result.answer.mode == "chunks+evi" and "A fact." in requests[-1]["messages"][1]["content"]


def test_rewritten_signatures_are_searched_with():
    settings = AgentSettings(k=3, k_sum=2, signature_update="rewrite")
    retriever = words_retriever()
    texts = ["The miller owns the barn where the oars lie."]
    updates = [reply("REFINE", "Whose barn?", texts), reply("ANSWER", "", [])]
    result, searched, _ = played(updates, settings, retriever=retriever)
    expected = Signature((), tuple(texts), mode="update")
    assert searched[1] == ("Whose barn?", expected) and result.signature == expected
    assert list(result.steps[1].chunks) == retriever.search(["Whose barn?"], 3, [expected]).hits.ids[0]
    with pytest.raises(MiaError, match="E2"):
        played(updates, settings, retriever=words_retriever(e2=False))


def test_submodular_signatures_come_from_the_sessions_found_and_kept():
    settings = AgentSettings(k=3, k_sum=2, signature_update="submodular")
    updates = [reply("REFINE", "Whose barn is it?", None, [("A fact.", ["P1"])]), reply("ANSWER", "", None)]
    result, *_ = played(updates, settings)
    for step, after in zip(result.steps, [*(s.signature for s in result.steps[1:]), result.signature], strict=True):
        assert step.signature is not None and after is not None
        assert set(after.session_ids) <= {*step.candidates, *step.signature.session_ids}
        assert len(after.session_ids) == len(after.gains) == 2 and list(after.gains) == sorted(after.gains)[::-1]


def test_without_e2_the_signature_is_a_prior():
    retriever = words_retriever(e2=False)
    result, searched, _ = played([reply("REFINE", "Where are the oars?", ["H1"]), reply("ANSWER")], retriever=retriever)
    for step in result.steps:
        assert step.signature is not None
        found = retriever.search([step.query], 3, [step.signature], prior=0.1).hits
        assert list(step.chunks) == found.ids[0]
    assert len(searched) == 2


def test_the_union_of_all_passages_is_fused_by_rank():
    updates = [reply("REFINE", "Whose barn is it?", ["S1"]), reply("ANSWER")]
    result, *_ = played(updates, AgentSettings(k=3, k_sum=2, passages="union"))
    scores: dict[str, float] = {}
    for step in result.steps:
        for rank, id in enumerate(step.chunks, start=1):
            scores[id] = scores.get(id, 0) + 1 / (60 + rank)
    assert len(scores) > 3 and len(result.passages) == 3
    assert [passage.score for passage in result.passages] == pytest.approx(sorted(scores.values(), reverse=True)[:3])
    assert all(scores[passage.id] == pytest.approx(passage.score) for passage in result.passages)
    # Of two that were found at the same ranks the one of the latest search is first.
    if result.steps[0].chunks[0] != result.steps[1].chunks[0]:
        ids = [passage.id for passage in result.passages]
        tied = [step.chunks[0] for step in reversed(result.steps) if scores[step.chunks[0]] == 1 / 61]
        assert [id for id in ids if id in tied] == tied


def test_a_query_that_the_encoder_refuses_is_not_searched_for(tiny_qwen3: Path):
    from mia_serve.core import Encoder

    encoder = Encoder.load(str(tiny_qwen3), device="cpu")
    retriever = Retriever(words_retriever().mindscape, encoder, encoder, k0=8, device="cpu")
    limited = encoder.spec.max_query_tokens
    long = "谁" * 590
    updates = [reply("REFINE", long, ["S1"], [("A fact.", ["P1"])]), reply("ANSWER", "", ["S1"], [("", ["E1"])])]
    if limited > 1200:
        pytest.skip("the tiny model takes it")
    result, searched, _ = played(updates, retriever=retriever)
    assert [step.failed for step in result.steps] == [None, REFUSED] and len(searched) == 2
    one, two = result.steps
    assert (two.query, two.signature, two.chunks) == (one.query, one.signature, one.chunks)
    assert two.evidence == one.evidence != () and result.answer.text == "the boat"
    # A question of the user's own is told as what it is.
    with pytest.raises(MiaError, match="tokens"):
        played(updates, question=Question("q", "谁" * 3000), retriever=retriever)


def test_EVL_16_a_run_is_replayed_from_its_recording(tmp_path: Path):
    updates = [reply("REFINE", "Where are the oars?", ["H1"], [("A fact.", ["P1"])]), "no", "no", reply("ANSWER")]
    retriever = words_retriever()
    with serving(scripted(updates)) as server:
        recorded, _ = run(server, retriever=retriever, cache=ReplyCache(tmp_path / "replies.jsonl"))
        made = len(server.requests)
    assert made == 5 and [step.failed for step in recorded.steps] == [None, "bad reply", None]

    async def again() -> AgentResult:
        client = ChatClient(None, "m", cache=ReplyCache(tmp_path / "replies.jsonl", "replay"))

        async def ask(client, searcher) -> AgentResult:
            return await run_agent(client, searcher, retriever.mindscape, QUESTION, SMALL)

        result = await with_searcher(retriever, client, ask)
        assert client.stats.calls == 0 and client.stats.cached == made
        return result

    assert asyncio.run(again()).to_dict() == recorded.to_dict()


def test_many_agents_keep_their_order_and_a_bound():
    questions = [
        Question(f"q{i}", f"Who hid the {thing} in year {i}?") for i, thing in enumerate(["lamp", "oars"] * 10)
    ]
    retriever = words_retriever()
    told: list[str] = []
    opened: list[int] = []

    def say(body: dict[str, Any]) -> str:
        return reply("ANSWER") if is_update(body) else body["messages"][1]["content"].partition("in year ")[2][:2]

    def lazily():
        for question in questions:
            opened.append(len(told))
            yield question

    with serving(say) as server:

        async def ask(client, searcher) -> list[AgentResult]:
            note = lambda question, result: told.append(question.id)  # noqa: E731
            return await run_agents(client, searcher, retriever.mindscape, lazily(), SMALL, note)

        results = asyncio.run(with_searcher(retriever, client_of(server, concurrency=2), ask))
        one_call = len(server.requests)
    assert [result.answer.text and result.answer.text.strip(" ?") for result in results] == [str(i) for i in range(20)]
    assert sorted(told) == sorted(q.id for q in questions) and one_call == 40
    # No more than 4 questions for each of the 2 calls are open at a time.
    assert all(place - done < 8 for place, done in enumerate(opened))


def test_many_agents_end_at_the_first_hopeless_call():
    questions = [Question(f"q{i}", f"Who hid the lamp {i}?") for i in range(30)]
    retriever = words_retriever()
    with serving(lambda body: 401) as server:

        async def ask(client, searcher) -> None:
            with pytest.raises(LlmFailed):
                await run_agents(client, searcher, retriever.mindscape, questions, SMALL)
            assert len(asyncio.all_tasks()) <= 2  # this one, and the retriever's if it is still at work

        asyncio.run(with_searcher(retriever, client_of(server, concurrency=2), ask))
        assert len(server.requests) < 30


def test_a_question_whose_options_are_missing_costs_no_call():
    with serving(lambda body: reply("ANSWER")) as server:
        with pytest.raises(MiaError, match="options"):
            run(server, question=Question("q", "Who hid the lamp?", "choice"))
        assert not server.requests


def test_the_same_pair_chosen_in_another_way_is_not_searched_again():
    """σ_0 is First-K; the model that keeps it whole makes it an update, with the same sessions."""
    result, searched, _ = played([reply("REFINE", "", ["S1", "S2"])])
    assert [step.signature.mode for step in result.steps if step.signature] == ["first_k", "update", "update"]
    assert len(searched) == 1 and len(result.steps) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 0},
        {"n_stop": 0},
        {"k_sum": 0},
        {"max_facts": 0},
        {"mode": "all"},
        {"signature_update": "x"},
        {"passages": "x"},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]):
    with pytest.raises(MiaError, match=next(iter(wrong))):
        AgentSettings(**wrong)


def test_the_answer_cites_passages_where_it_is_asked_to():
    result, _, requests = played([reply("ANSWER")], AgentSettings(k=3, k_sum=2, cite=True), "the boat [P2]")
    assert result.answer.text == "the boat" and result.answer.cited
    assert result.answer.citations == (result.steps[-1].chunks[1],)
    assert "[P3] " in requests[-1]["messages"][1]["content"]
    assert not played([reply("ANSWER")], answer="the boat [P2]")[0].answer.cited
