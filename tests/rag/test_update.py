"""What the model is shown and asked for, and what each kind of reply makes of the agent's state."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mia_serve.llm import LlmFailed
from mia_serve.mindscape import Book, Mindscape
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.rag.question import Question
from mia_serve.rag.state import AgentSettings, AgentState, Fact
from mia_serve.rag.update import Update, UpdateFailed, ask_update
from mia_serve.rag.update_prompt import fit_update
from mia_serve.retriever import Retriever
from mia_serve.signature import Signature, set_function_value
from tests.llm.server import Stub, serving
from tests.rag.agent_world import (
    CHUNKS,
    EVIDENCE,
    QUESTION,
    SUMMARIES,
    client_of,
    middle,
    reply,
    with_searcher,
    words_retriever,
)

SELECT = AgentSettings()


def update(server: Stub, rules: AgentSettings = SELECT, retriever: Retriever | None = None, **changes: Any) -> Update:
    retriever = retriever or words_retriever()
    state = changes.pop("state", None) or middle(retriever, **changes)

    async def ask(client, searcher) -> Update:
        return await ask_update(client, searcher, state, rules)

    return asyncio.run(with_searcher(retriever, client_of(server), ask))


def updated(said: Any, rules: AgentSettings = SELECT, **changes: Any) -> Update:
    with serving(lambda body: said) as server:
        return update(server, rules, **changes)


def seen_by_the_model(rules: AgentSettings = SELECT, **changes: Any) -> tuple[str, str, dict[str, Any]]:
    with serving(lambda body: reply(signature=["text"])) as server:
        update(server, rules, **changes)
    body = server.requests[0]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    system, user = (message["content"] for message in body["messages"])
    return system, user, body["response_format"]["json_schema"]["schema"]


def test_the_inputs_come_in_the_papers_order():
    _, user, _ = seen_by_the_model()
    order = [
        QUESTION.text, "who hid the oars", "Step 2 of 3", f"[S1] {SUMMARIES[1]}", f"[S2] {SUMMARIES[3]}",
        f"[H1] {SUMMARIES[0]}", f"[H2] {SUMMARIES[2]}", "[E1] The boat left at night.", "[E2] She hid the oars.",
        "[P1] The boat left the quay", "[P2] The barn belonged", "[P3] The ledger lay",
    ]  # fmt: skip
    places = [user.index(part) for part in order]
    assert places == sorted(places)
    assert "[S3]" not in user and "[H3]" not in user and "last one" not in user
    assert "the last one" in seen_by_the_model(step=2)[1]


def test_options_and_claims_are_shown():
    options = ("the boat", "the widow")
    _, user, _ = seen_by_the_model(question=Question("q", "For whom?", "choice", options))
    assert "A. the boat\nB. the widow" in user and user.index("For whom?") < user.index("A. the boat")
    _, user, _ = seen_by_the_model(question=Question("q", "The lamp was a signal.", "claim"))
    assert "Statement to be judged TRUE or FALSE:\nThe lamp was a signal." in user


def test_numbers_and_texts_of_the_signature_belong_together_in_document_order_too():
    retriever = words_retriever(order="document")
    with serving(lambda body: reply(signature=["S1"])) as server:
        state = middle(retriever, signature=Signature(("sea:w3", "sea:w1"), (SUMMARIES[1], SUMMARIES[3])))
        got = update(server, retriever=retriever, state=state)
    assert f"[S1] {SUMMARIES[3]}" in server.requests[0]["messages"][1]["content"]
    assert got.signature is not None and got.signature.session_ids == ("sea:w3",)


@pytest.mark.parametrize(
    ("rules", "fields"),
    [
        (AgentSettings(), ["decision", "next_query", "signature", "evidence"]),
        (AgentSettings(signature_update="rewrite"), ["decision", "next_query", "signature", "evidence"]),
        (AgentSettings(signature_update="submodular"), ["decision", "next_query", "evidence"]),
        (AgentSettings(use_signature=False), ["decision", "next_query", "evidence"]),
        (AgentSettings(rewrite_query=False), ["decision", "signature", "evidence"]),
    ],
)
def test_SRV_24_every_string_and_list_of_the_schema_is_bounded(rules: AgentSettings, fields: list[str]):
    system, user, schema = seen_by_the_model(rules, **({} if rules.use_signature else {"signature": None}))
    assert list(schema["properties"]) == schema["required"] == fields

    def walk(node: dict[str, Any]) -> None:
        if node["type"] == "string":
            assert "enum" in node or 0 < node["maxLength"] <= 1000
        elif node["type"] == "array":
            assert 0 < node["maxItems"] <= 12
            walk(node["items"])
        else:
            assert node["type"] == "object" and node["additionalProperties"] is False
            for child in node["properties"].values():
                walk(child)

    walk(schema)
    # Prompt and schema ask for the same fields, and a baseline without signature sees none.
    assert all((f'"{name}"' in system) == (name in fields) for name in ("next_query", "signature", "evidence"))
    assert ("[S1]" in user) == rules.use_signature
    sources = schema["properties"]["evidence"]["items"]["properties"]["source"]["items"]["enum"]
    assert sources == ["P1", "P2", "P3", "E1", "E2"]
    if rules.asks_signature and rules.signature_update == "select":
        assert schema["properties"]["signature"]["items"]["enum"] == ["S1", "S2", "H1", "H2"]


def test_a_whole_update():
    said = reply("REFINE", "Whose barn was it?", ["H2", "S1"], [("", ["E2"]), ("The barn was the miller's.", ["P2"])])
    got = updated(said)
    assert got.decision == "REFINE" and got.next_query == "Whose barn was it?"
    assert got.signature is not None and got.signature.mode == "update"
    assert got.signature.session_ids == ("sea:w2", "sea:w1") and got.signature.texts == (SUMMARIES[2], SUMMARIES[1])
    assert got.evidence == (EVIDENCE[1], Fact("The barn was the miller's.", ("sea:3",)))
    assert got.usage == (7, 3)


@pytest.mark.parametrize(
    ("said", "sessions"),
    [
        (["S1", "H9", "P1", "X", "S3", "H2"], ("sea:w1", "sea:w2")),  # unknown ones are dropped
        (["H1", "h1", "[H1]", "S2", "S2"], ("sea:w0", "sea:w3")),  # so are repeats
        ([], ("sea:w1", "sea:w3")),  # nothing: the old one stays
        (["S9", "somewhere"], ("sea:w1", "sea:w3")),
        (["1", "2"], ("sea:w1", "sea:w3")),  # a bare number may mean S or H
        (["S2", "H1", "S1", "H2"], ("sea:w3", "sea:w0")),  # k_sum 2
    ],
)
def test_SRV_26_signature_ids_are_taken_as_far_as_they_go(said: list[str], sessions: tuple[str, ...]):
    got = updated(reply(signature=said), AgentSettings(k_sum=2))
    assert got.signature is not None and got.signature.session_ids == sessions


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        ([], EVIDENCE),  # nothing to add is no order to forget
        ([("Invented.", []), ("Also.", ["P9"]), ("And.", ["S1"])], EVIDENCE),
        ([("Invented.", []), ("Grounded.", ["P1"])], (Fact("Grounded.", ("sea:0",)),)),
        ([("...", ["P1"]), ("New.", "P3")], (Fact("New.", ("sea:5",)),)),
        ([("New.", ["[p3]", 1, "P3"])], (Fact("New.", ("sea:5", "sea:0")),)),
        # An earlier fact by its number, whatever is written beside it; by its text; in its old place.
        ([("New.", ["P1"]), ("She may have hidden oars", ["E2"])], (EVIDENCE[1], Fact("New.", ("sea:0",)))),
        ([("she hid  the oars", ["P9"]), ("", ["E1"])], EVIDENCE),
        ([("She hid the oars.", ["P2"])], (Fact("She hid the oars.", ("sea:2", "sea:3")),)),
        ([("", ["E1", "E2"])], EVIDENCE),
        # One that sums up two, or adds a passage, has the sources of all.
        ([("At night she hid the oars.", ["E1", "E2"])], (Fact("At night she hid the oars.", ("sea:0", "sea:2")),)),
        ([("She hid them in a barn.", ["E2", "P2"])], (Fact("She hid them in a barn.", ("sea:2", "sea:3")),)),
        ([("Twice.", ["P1"]), ("twice", ["P2"])], (Fact("Twice.", ("sea:0", "sea:3")),)),
        ([("", ["P1"]), ("  \n", ["P1"]), ("One\nline \x00here.", ["P1"])], (Fact("One line here.", ("sea:0",)),)),
        ([("word " * 100, ["P1"])], (Fact(" ".join(["word"] * 40), ("sea:0",)),)),
        ([("字" * 5000, ["P1"])], (Fact("字" * 400, ("sea:0",)),)),
    ],
)
def test_SRV_26_evidence_is_grounded_and_bounded(said: list[Any], facts: tuple[Fact, ...]):
    got = updated(reply(evidence=said))
    assert got.evidence == facts


def test_more_facts_than_the_memory_holds_leave_the_latest():
    said = [("", ["E1"]), *((f"Fact {i}.", ["P1"]) for i in range(5)), ("", ["E2"])]
    got = updated(reply(evidence=said), AgentSettings(max_facts=4))
    assert [fact.text for fact in got.evidence] == [f"Fact {i}." for i in range(1, 5)]


@pytest.mark.parametrize(
    ("said", "query"),
    [
        (reply("REFINE", "Who lit it?"), "Who lit it?"),
        (reply("REFINE", ""), "who hid the oars"),
        (reply("REFINE", " \n "), "who hid the oars"),
        (reply("REFINE", "..."), "who hid the oars"),
        (reply("REFINE", None), "who hid the oars"),
        (reply("ANSWER", "Who lit it?"), "who hid the oars"),  # ignored
        (reply("REFINE", "who\nlit it\ud800?"), "who lit it??"),
        (reply("REFINE", "why " * 1000), " ".join(["why"] * 60)),
        (reply("REFINE", "谁点的灯？"), "谁点的灯？"),
    ],
)
def test_the_next_query(said: str, query: str):
    assert updated(said).next_query == query
    kept = updated(said, AgentSettings(rewrite_query=False), query="Who was the signal for?")
    assert kept.next_query == "Who was the signal for?"


@pytest.mark.parametrize("decision", ["ANSWER", "answer", " Answer.", "REFINE", "refine"])
def test_decisions(decision: str):
    assert updated(reply(decision)).decision == decision.strip(" .").upper()


GOOD = reply("ANSWER", "", ["S1"], [("Grounded.", ["P1"])])


@pytest.mark.parametrize(
    "bad",
    [
        "I would search on.",
        "[1, 2]",
        '{"decision": "ANSWER", "signature": ["S1"], "evi',
        reply("MAYBE"),
        reply(None),  # type: ignore[arg-type]
        reply(signature=None),
        reply(signature=["S1"]).replace('"evidence": []', '"evidence": "none"'),
        reply(signature="S1"),
        reply(signature=[["S1"]]),
        '{"decision": true, "signature": [], "evidence": []}',
        "\ud83d" * 100,
        "__import__('os').system('false')",
    ],
)
def test_SRV_26_a_bad_reply_is_asked_for_once_more_and_then_fails_typed(bad: str):
    replies = [bad, GOOD]
    with serving(lambda body: replies.pop(0)) as server:
        got = update(server)
    assert got.decision == "ANSWER" and got.usage == (14, 6) and len(server.requests) == 2
    assert server.requests[1]["messages"][-1]["content"].startswith("That reply cannot be used")

    retriever = words_retriever()
    state = middle(retriever)
    before = repr(state)
    with serving(lambda body: bad) as server, pytest.raises(UpdateFailed) as failed:
        update(server, retriever=retriever, state=state)
    assert failed.value.label == "bad reply" and len(server.requests) == 2 and failed.value.usage == (14, 6)
    assert repr(state) == before


@pytest.mark.parametrize(
    ("said", "label", "calls"),
    [
        ((GOOD[:30], "length"), "truncated", 2),
        (("", "content_filter"), "filtered", 1),
        ((None, "stop"), "no content", 1),
        ("   ", "no content", 1),
        (500, "http 500", 1),
        (400, "http 400", 1),
        (b"\xff\xfe no JSON", "bad response", 1),
    ],
)
def test_SRV_24_failed_calls_are_update_failures(said: Any, label: str, calls: int):
    with serving(lambda body: said) as server, pytest.raises(UpdateFailed) as failed:
        update(server)
    assert failed.value.label == label and len(server.requests) == calls
    if label == "truncated":
        assert [body["max_tokens"] for body in server.requests] == [1024, 4096]


def test_a_refused_key_ends_all():
    with serving(lambda body: 401) as server, pytest.raises(LlmFailed) as failed:
        update(server)
    assert failed.value.hopeless and not isinstance(failed.value, UpdateFailed)


def test_rewritten_signatures():
    rules = AgentSettings(signature_update="rewrite", k_sum=2)
    got = updated(reply(signature=["The widow  signals.", "", "The widow signals.", "w " * 500, "third"]), rules)
    assert got.signature == Signature((), ("The widow signals.", " ".join(["w"] * 100)), mode="update")
    assert updated(reply(signature=[" "]), rules).signature == middle(words_retriever()).signature
    _, user, _ = seen_by_the_model(rules, signature=got.signature)
    assert "[S1] The widow signals." in user and f"[H1] {SUMMARIES[0]}" in user and "[H3]" in user


def test_the_baseline_without_a_signature():
    rules = AgentSettings(use_signature=False)
    got = updated(reply("REFINE", "Who lit it?", None, [("New.", ["P1"])]), rules, signature=None)
    assert got.signature is None and got.next_query == "Who lit it?" and got.evidence == (Fact("New.", ("sea:0",)),)
    # A signature that it was not asked for does not matter.
    assert updated(reply(signature=["S1"]), rules, signature=None).signature is None


class Axes:
    """An encoder whose vectors a test writes down."""

    spec_hash, dim = "axes", 3

    def __init__(self, vectors: dict[str, tuple[float, ...]]) -> None:
        self.vectors = vectors

    def _rows(self, texts) -> np.ndarray:
        rows = np.array([self.vectors[text] for text in texts], np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def encode_documents(self, texts, out=None) -> np.ndarray:
        return self._rows(texts)

    def encode_queries(self, texts, signatures=None, alpha=None, truncate=False) -> np.ndarray:
        return self._rows(texts)


def axes_retriever(**arguments: Any) -> Retriever:
    vectors = {
        "c0": (1, 0, 0), "c1": (1, 0, 0), "c2": (0, 1, 0), "c3": (0, 0, 1),
        "boat": (1, 0, 0), "barn": (0, 1, 0), "lamp": (0, 0, 1),
        "q?": (1, 0, 0), "fact of the barn": (0, 1, 0), "fact of both": (0, 0.6, 0.8),
    }  # fmt: skip
    parts = [(("c0", "c1"), "b", "boat"), (("c2",), "d", "barn"), (("c3",), "e", "lamp")]
    books = [Book(name, texts, summaries=(summary,), chunk_ids=texts) for texts, name, summary in parts]
    encoder = Axes(vectors)
    return Retriever(Mindscape.from_books(books, window=2), encoder, encoder, device="cpu", **arguments)  # type: ignore[arg-type]


def axes_state(evidence: tuple[Fact, ...], signature: tuple[str, ...]) -> AgentState:
    known = Signature(signature, tuple({"b:w0": "boat", "d:w0": "barn", "e:w0": "lamp"}[i] for i in signature))
    seen = {"c0": 0, "c1": 1, "c2": 2, "c3": 3}
    return AgentState(Question("q", "q?"), 0, "q?", known, evidence, (0, 1), (0.5, 0.5), (0,), seen)


def test_SRV_55_submodular_update_by_hand():
    """Passages c0, c1 (both of boat), candidates σ = lamp, then boat; K = 2, λ = .3, .4, .3."""
    rules = AgentSettings(signature_update="submodular", k_sum=2)
    retriever = axes_retriever(cover="semantic", cover_weight="uniform")
    fact = Fact("fact of both", ("c3",))
    with serving(lambda body: reply(signature=None, evidence=[("", ["E1"])])) as server:
        got = update(server, rules, retriever, state=axes_state((fact,), ("e:w0",)))
    # Coverage: each passage counts 1/4, the fact 1/2. boat: .3·1/2 + .4·(1/2) + .3·1/2 = .5;
    # lamp: 0 + .4·.8/2 + .3·1/2 = .31. Then lamp adds .31 (boat and lamp are orthogonal).
    assert got.signature is not None and got.signature.session_ids == ("b:w0", "e:w0")
    assert got.signature.gains == pytest.approx((0.5, 0.31), abs=1e-6) and got.signature.mode == "update"
    assert got.signature.terms == pytest.approx(
        {"relevance": 0.5, "coverage": 0.9, "diversity": 1.0, "value": 0.81}, abs=1e-6
    )
    assert np.allclose(got.signature.pick_terms, [(0.5, 0.5, 0.5), (0.0, 0.4, 0.5)], atol=1e-6)
    # The fact's own session covers it fully where sessions cover their members: .4·1/2 + .15.
    member = axes_retriever(cover="member", cover_weight="uniform")
    with serving(lambda body: reply(signature=None)) as server:
        got = update(server, rules, member, state=axes_state((fact,), ("e:w0",)))
    assert got.signature is not None and got.signature.gains == pytest.approx((0.5, 0.35), abs=1e-6)


def test_submodular_keeps_what_the_evidence_needs_and_drops_what_it_does_not():
    """One place: the fact of the barn keeps the barn although the search has moved to the boat."""
    rules = AgentSettings(signature_update="submodular", k_sum=1)
    said = reply(signature=["nonsense"], evidence=[("", ["E1"])])
    rivals = ("d:w0", "e:w0")
    for weights, facts, kept in (
        ((0, 1, 0), (Fact("fact of the barn", ("c2",)),), "d:w0"),  # the fact counts half; c0 and c1, a quarter each
        ((0, 1, 0), (), "b:w0"),
    ):
        retriever = axes_retriever(cover="semantic", cover_weight="uniform", weights=weights)
        with serving(lambda body: said) as server:
            got = update(server, rules, retriever, state=axes_state(facts, rivals))
        assert got.signature is not None and got.signature.session_ids == (kept,)


def test_submodular_updates_asked_together_equal_those_asked_alone():
    retriever = words_retriever()
    states = [
        middle(retriever),
        middle(retriever, evidence=(), rows=(1, 2), scores=(0.5, 0.4), sessions=(0, 1)),
        middle(retriever, rows=(7,), scores=(0.3,), sessions=(3,)),
    ]
    rules = [AgentSettings(signature_update="submodular", k_sum=k) for k in (1, 2, 3)]
    with serving(lambda body: reply(signature=None)) as server:

        async def ask(client, searcher) -> list[Update]:
            asked = [ask_update(client, searcher, state, one) for state in states for one in rules]
            return await asyncio.gather(*asked)

        together = asyncio.run(with_searcher(retriever, client_of(server), ask))
        alone = [update(server, one, retriever, state=state) for state in states for one in rules]
    for first, second in zip(together, alone, strict=True):
        assert first.signature is not None and second.signature is not None
        assert first.signature.session_ids == second.signature.session_ids
        assert first.signature.gains == pytest.approx(second.signature.gains, abs=1e-6)


def test_a_submodular_choice_is_as_good_as_the_best_set_nearly():
    """Greedy reaches 1 - 1/e of the best pair by brute force, on the objective with facts."""
    retriever = words_retriever(cover="semantic", cover_weight="uniform")
    state = middle(retriever)
    with serving(lambda body: reply(signature=None)) as server:
        got = update(server, AgentSettings(signature_update="submodular", k_sum=2), retriever, state=state)
    assert got.signature is not None and got.signature.terms is not None
    encoder = retriever.selector
    units = torch.from_numpy(retriever.session_vectors(encoder))
    facts = encoder.encode_documents([fact.text for fact in EVIDENCE])
    covered = torch.from_numpy(np.concatenate([retriever.chunk_vectors(encoder)[[0, 3, 5]], facts]))
    query = torch.from_numpy(encoder.encode_queries([QUESTION.text]))
    weight = torch.tensor([[1 / 6] * 3 + [1 / 4] * 2])
    pairs = [(i, j) for i in range(4) for j in range(i)]
    n = len(pairs)
    values = set_function_value(
        (query @ units.T).repeat(n, 1), (covered @ units.T).repeat(n, 1, 1), (units @ units.T).repeat(n, 1, 1),
        torch.tensor(pairs), 2, cover_weight=weight.repeat(n, 1),
    ).value  # fmt: skip
    assert (1 - 1 / np.e) * float(values.max()) <= got.signature.terms["value"] <= float(values.max()) + 1e-6


def test_a_prompt_that_is_too_long_loses_passages_then_candidates_then_the_oldest_facts():
    retriever = words_retriever()
    searcher, state = AsyncRetriever(retriever), middle(retriever)
    whole = fit_update(searcher, state, SELECT, None)
    seen: list[tuple[int, int, int, int]] = []
    for limit in range(whole.tokens, 0, -1):
        shown, messages, tokens, least = fit_update(searcher, state, SELECT, limit)
        if least:  # the estimate may be wrong, so that the endpoint is asked with what must be said
            assert tokens > limit and QUESTION.text in messages[1]["content"]
            break
        prompt = messages[1]["content"]
        assert tokens <= limit and all(text in prompt for text in (QUESTION.text, state.query, *SUMMARIES[1::2]))
        assert (
            shown.evidence == EVIDENCE[2 - len(shown.evidence) :]
            and shown.candidates == (0, 2)[: len(shown.candidates)]
        )
        seen.append((len(shown.passages), len(shown.candidates), len(shown.evidence), len(shown.passages[0])))
    whole_one = len(whole.shown.passages[0])
    stages = [(3, 2, 2), (2, 2, 2), (1, 2, 2), (1, 1, 2), (1, 0, 2), (1, 0, 1), (1, 0, 0)]
    assert list(dict.fromkeys(seen)) == [(*stage, whole_one) for stage in stages]
    # A passage that is too long by itself is cut, when all else is gone.
    long = Mindscape.from_books([Book("sea", ("The boat left. " * 400, *CHUNKS[1:]), summaries=SUMMARIES)], window=2)
    searcher = AsyncRetriever(Retriever(long, retriever.e1, device="cpu"))
    shown, _, tokens, _ = fit_update(searcher, state, SELECT, whole.tokens)
    assert tokens <= whole.tokens and 200 <= len(shown.passages[0]) < 6000 and shown.candidates == shown.evidence == ()


def test_facts_that_did_not_fit_the_prompt_are_remembered():
    retriever = words_retriever()
    searcher, state = AsyncRetriever(retriever), middle(retriever)
    limits = range(fit_update(searcher, state, SELECT, None).tokens, 0, -1)
    limit = next(n for n in limits if len(fit_update(searcher, state, SELECT, n).shown.evidence) == 1)
    rules = AgentSettings(context_tokens=limit + 100, update_tokens=100)
    with serving(lambda body: reply(evidence=[("New.", ["P1"])])) as server:
        got = update(server, rules, retriever, state=state)
    assert "[E1] She hid the oars." in server.requests[0]["messages"][1]["content"]
    # The model did not see the first one and cannot have meant to drop it; the second one it dropped.
    assert got.evidence == (EVIDENCE[0], Fact("New.", ("sea:0",)))


def test_a_prompt_that_the_endpoint_finds_too_long_is_asked_again_with_less():
    sizes: list[int] = []

    def say(body: dict[str, Any]) -> Any:
        sizes.append(len(body["messages"][1]["content"]))
        return GOOD if len(sizes) == 3 else (400, "the prompt exceeds the context length of 999 tokens")

    texts = tuple(text * 80 for text in CHUNKS)
    long = Mindscape.from_books([Book("sea", texts, summaries=SUMMARIES)], window=2)
    retriever = Retriever(long, words_retriever().e1, device="cpu")
    with serving(say) as server:
        assert update(server, retriever=retriever).decision == "ANSWER"
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < sizes[1] < sizes[0]
    with serving(lambda body: (400, "maximum context length")) as server, pytest.raises(UpdateFailed) as failed:
        update(server)
    assert failed.value.label == "too long" and len(server.requests) <= 4


def test_a_context_that_seems_too_small_is_left_to_the_endpoint():
    with serving(lambda body: GOOD) as server:
        assert update(server, AgentSettings(context_tokens=90)).decision == "ANSWER"
    assert len(server.requests) == 1
    with serving(lambda body: (400, "maximum context length")) as server, pytest.raises(UpdateFailed) as failed:
        update(server, AgentSettings(context_tokens=90))
    assert failed.value.label == "too long" and len(server.requests) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
WORDS = st.text(max_size=60) | st.sampled_from(
    ["谁点了灯？", "Кто зажёг лампу?", "من أشعل المصباح", "\ud800", "x" * 100_000]
)
LABELS = st.sampled_from(["S1", "S2", "H1", "H2", "H99", "P1", "E1", "p2", "", "0"]) | WORDS
FACTS = st.fixed_dictionaries(
    {}, optional={"fact": WORDS | JSON, "source": st.lists(LABELS, max_size=4) | JSON, "more": JSON}
)
REPLIES = st.fixed_dictionaries(
    {},
    optional={
        "decision": st.sampled_from(["ANSWER", "REFINE", "答", "answer"]) | JSON,
        "next_query": WORDS | JSON,
        "signature": st.lists(LABELS, max_size=8) | JSON,
        "evidence": st.lists(FACTS, max_size=20) | JSON,
        "thoughts": JSON,
    },
)


@st.composite
def said(draw: st.DrawFn) -> str | bytes | tuple[str, str]:
    """A reply near to a good one, cut, dressed up, or not even HTTP with JSON."""
    text = json.dumps(draw(REPLIES), ensure_ascii=draw(st.booleans()))
    kind = draw(st.sampled_from(["whole", "whole", "cut", "dressed", "noise", "bytes", "length"]))
    if kind == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if kind == "dressed":
        return draw(WORDS) + "```json\n" + text + "\n```" + draw(WORDS)
    if kind == "noise":
        return draw(WORDS) * draw(st.integers(1, 3))
    if kind == "bytes":
        return draw(st.binary(max_size=200)) if draw(st.booleans()) else text.encode("utf-8", "surrogatepass")[:-3]
    return (text, "length") if kind == "length" else text


@settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(said(), st.sampled_from(["select", "rewrite", "submodular", "none"]))
def test_SRV_26_SRV_27_whatever_is_replied_the_state_is_valid_or_unchanged(reply_: Any, how: str):
    rules = AgentSettings(signature_update="select" if how == "none" else how, use_signature=how != "none", k_sum=2)  # type: ignore[arg-type]
    _FUZZ["say"] = reply_
    retriever = _FUZZ["retriever"]
    state = middle(retriever, **({} if rules.use_signature else {"signature": None}))
    before = repr(state)
    try:
        got = _FUZZ["ask"](state, rules)
    except UpdateFailed as failure:
        assert failure.label and repr(state) == before
        return
    assert repr(state) == before
    assert got.decision in ("ANSWER", "REFINE") and got.next_query.strip() and len(got.next_query) <= 600
    assert len(got.evidence) <= 12 and all(fact.text and set(fact.sources) <= set(state.seen) for fact in got.evidence)
    assert all(fact.sources and len(fact.text) <= 400 for fact in got.evidence)
    if rules.use_signature:
        assert got.signature is not None and 1 <= len(got.signature.texts) <= 2
        known = {session.id for session in retriever.mindscape.sessions}
        assert set(got.signature.session_ids) <= known
    json.dumps([got.next_query, [fact.to_dict() for fact in got.evidence]], ensure_ascii=False).encode()


_FUZZ: dict[str, Any] = {}


@pytest.fixture(autouse=True, scope="module")
def fuzz_server():
    """One server and one client for all examples: hundreds of them would take minutes to start."""
    retriever = words_retriever()
    loop = asyncio.new_event_loop()
    with serving(lambda body: _FUZZ["say"]) as server:
        client, searcher = client_of(server), AsyncRetriever(retriever)
        _FUZZ["retriever"] = retriever
        _FUZZ["ask"] = lambda state, rules: loop.run_until_complete(ask_update(client, searcher, state, rules))
        yield
        loop.run_until_complete(searcher.close())
        loop.run_until_complete(client.close())
    loop.close()
