"""The baselines of the answering evaluation: the collapsed tree, and reading with gists."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mia_serve.core.errors import MiaError
from mia_serve.eval import collapsed, gist
from mia_serve.eval.collapsed import CollapsedTree, spherical_kmeans
from mia_serve.eval.gist import fair_gists
from mia_serve.llm import ChatClient, LlmFailed
from mia_serve.mindscape import Book, Mindscape
from mia_serve.mindscape.records import BookFacts, Window
from mia_serve.rag.batching import AsyncRetriever
from mia_serve.rag.question import Question
from mia_serve.rag.static import Answer
from mia_serve.retriever import Retriever
from tests.eval.test_retrieval import WordEncoder
from tests.llm.server import Stub, serving

E1: Any = WordEncoder("e1")
# Two books of four chunks in windows of two; every chunk has words of its own, summaries those of their windows.
TIDE = Book(
    "tide",
    ("lamp quay", "lamp boat", "ledger clock", "ledger key"),
    "Tide",
    summaries=("lamp harbour", "ledger floor"),
)
FERRY = Book(
    "ferry", ("rope oar", "rope sail", "storm gull", "storm rock"), "Ferry", summaries=("rope craft", "storm coast")
)
MINDSCAPE = Mindscape.from_books([TIDE, FERRY], window=2)


def words(text: str) -> int:
    return len(text.split())


def once(
    work: Callable[[ChatClient], Coroutine[Any, Any, Answer]], reply: Callable[[dict[str, Any]], Any]
) -> tuple[Answer, Stub]:
    async def run(url: str) -> Answer:
        async with ChatClient(url, "m", max_retries=0) as client:
            return await work(client)

    with serving(reply) as stub:
        return asyncio.run(run(stub.url)), stub


def shown(request: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in request["messages"])


def test_all_levels_are_ranked_together() -> None:
    retriever = Retriever(MINDSCAPE, E1)
    tree = CollapsedTree(budget=6, tokens=words)
    (found,) = tree.take(retriever, ["ledger floor"])
    assert [node.kind for node in tree.nodes] == ["chunk"] * 8 + ["summary"] * 4 + ["book"] * 2
    # Slow reference: every node scored by itself, from the best on, while its words fit.
    vector = E1.encode_queries(["ledger floor"])[0]
    ranked = sorted(tree.nodes, key=lambda node: -float(E1.encode_documents([node.text])[0] @ vector))
    kept, left = [], 6
    for node in ranked:
        left -= words(node.text)
        if left < 0:
            break
        kept.append(node)
    assert list(found.nodes) == kept
    assert found.nodes[0].id == "summary/tide:w1" and found.scores[0] == pytest.approx(1.0)
    assert list(found.scores) == sorted(found.scores, reverse=True)


def test_the_budget_is_ten_average_chunks_and_one_node_is_always_taken() -> None:
    retriever = Retriever(MINDSCAPE, E1)
    tree = CollapsedTree(tokens=words)
    (found,) = tree.take(retriever, ["storm"])
    assert tree.budget == 20
    assert sum(words(node.text) for node in found.nodes) <= 20
    (tiny,) = CollapsedTree(budget=1, tokens=words).take(retriever, ["storm"])
    assert len(tiny.nodes) == 1
    with pytest.raises(MiaError, match="budget=0"):
        CollapsedTree(budget=0)


def test_a_book_has_its_stored_summary_and_none_twice() -> None:
    facts = (BookFacts("tide", "Tide", summary="the whole tide"),)
    mindscape = replace(MINDSCAPE, books=facts)
    tree = CollapsedTree()
    tree.take(Retriever(mindscape, E1), ["tide"])
    assert tree.nodes[-2].text == "the whole tide"
    single = Mindscape.from_books([Book("one", ("lamp", "quay"), summaries=("lamp quay",))], window=2)
    tree = CollapsedTree()
    tree.take(Retriever(single, E1), ["lamp"])
    assert [node.kind for node in tree.nodes] == ["chunk", "chunk", "summary"]  # the book's is the session's


def test_clusters_by_similarity() -> None:
    made: list[Window] = []

    def summarise(windows: Sequence[Window]) -> list[str]:
        made.extend(windows)
        return [" ".join(dict.fromkeys(" ".join(window.texts).split())) for window in windows]

    tree = CollapsedTree(summarise=summarise, size=2)
    (found,) = tree.take(Retriever(MINDSCAPE, E1), ["lamp quay boat"])
    # Each book: two pairs that share a word, then those two.
    assert [set(window.texts) for window in made[:2]] == [{"lamp quay", "lamp boat"}, {"ledger clock", "ledger key"}]
    assert [(window.book_id, window.part, window.parts) for window in made] == [
        ("tide", 1, 2), ("tide", 2, 2), ("ferry", 1, 2), ("ferry", 2, 2), ("tide", 1, 1), ("ferry", 1, 1),
    ]  # fmt: skip
    assert [node.kind for node in tree.nodes] == ["chunk"] * 8 + ["summary"] * 4 + ["book"] * 2
    assert found.nodes[0].text == "lamp quay boat"
    with pytest.raises(MiaError, match="size=1"):
        CollapsedTree(summarise=summarise, size=1)


def test_kmeans_finds_what_lies_together_and_ends_on_equal_rows() -> None:
    rng = np.random.default_rng(0)
    centres = np.eye(8)[:4]
    rows = np.repeat(centres, 5, axis=0) + 0.05 * rng.normal(size=(20, 8))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert spherical_kmeans(rows, 4).tolist() == [i // 5 for i in range(20)]
    assert spherical_kmeans(np.ones((5, 1), np.float32), 3).tolist() == [0] * 5
    assert spherical_kmeans(rows, 50).max() < 20


def test_tree_answers_from_what_it_took_and_counts_its_chunks() -> None:
    async def work(client: ChatClient) -> Answer:
        async with AsyncRetriever(Retriever(MINDSCAPE, E1)) as searcher:
            tree = CollapsedTree(budget=12, tokens=words)
            return await collapsed.answer(client, searcher, tree, Question("q", "ledger floor"))

    answered, stub = once(work, lambda request: "under the floor")
    assert answered.text == "under the floor" and answered.failed is None
    assert [passage.id for passage in answered.passages] == ["tide:2", "tide:3"]
    assert [passage.session_id for passage in answered.passages] == ["tide:w1"] * 2
    assert answered.citations == ("tide:2", "tide:3")
    assert "ledger floor\n\n" in shown(stub.requests[0])  # the summary is read, and is no evidence
    assert len(stub.requests) == 1


def test_gists_name_the_pages_and_both_are_read() -> None:
    def reply(request: dict[str, Any]) -> str:
        return '{"pages": [4, 2, 4, 99, 0]}' if "Do not answer yet" in shown(request) else "the rock"

    answered, stub = once(lambda client: gist.answer(client, MINDSCAPE, Question("q", "Where?")), reply)
    first, second = map(shown, stub.requests)
    assert "[1] lamp harbour\n[2] ledger floor\n[3] rope craft\n[4] storm coast" in first
    assert "ledger key" not in first and "at most 5" in first
    assert stub.requests[0]["response_format"]["json_schema"]["schema"]["required"] == ["pages"]
    # As asked, repeats and numbers of no session dropped, chunks in reading order.
    assert [passage.id for passage in answered.passages] == ["ferry:2", "ferry:3", "tide:2", "tide:3"]
    assert "lamp harbour" in second and "storm gull\n\nstorm rock\n\nledger clock" in second
    assert (answered.text, answered.mode, answered.detail) == ("the rock", "chunks+sig", "")
    assert answered.usage == (14, 6)  # of both calls
    assert answered.signature is not None and len(answered.signature.session_ids) == 4


@pytest.mark.parametrize("pages", ['{"pages": []}', '{"pages": [7]}', "[]", "I cannot say.", "", '{"pages": "none"}'])
def test_no_page_leaves_the_gists(pages: str) -> None:
    def reply(request: dict[str, Any]) -> str:
        return pages if "Do not answer yet" in shown(request) else "somewhere"

    answered, stub = once(lambda client: gist.answer(client, MINDSCAPE, Question("q", "Where?")), reply)
    assert (answered.text, answered.failed, answered.passages) == ("somewhere", None, ())
    assert "storm coast" in shown(stub.requests[-1])
    assert bool(answered.detail) == (not pages.startswith(('{"pages": [', "[]")))


@pytest.mark.parametrize(
    "pages", ['{"pages": 3}', '{"pages": ["3"]}', 'Sure: {"pages": ["[3]"]}.', '{"pages": [3, 1, 2]}']
)
def test_pages_are_read_tolerantly_and_bounded(pages: str) -> None:
    def reply(request: dict[str, Any]) -> str:
        return pages if "Do not answer yet" in shown(request) else "A"

    question = Question("q", "Which?", "letter", ("oar", "sail"))
    answered, stub = once(lambda client: gist.answer(client, MINDSCAPE, question, pages=1), reply)
    assert [passage.id for passage in answered.passages] == ["ferry:0", "ferry:1"]
    assert answered.text == "A" and "B. sail" in shown(stub.requests[0])
    with pytest.raises(MiaError, match="pages=0"):
        once(lambda client: gist.answer(client, MINDSCAPE, question, pages=0), reply)


def test_what_would_fail_for_all_ends_the_run() -> None:
    with pytest.raises(LlmFailed) as failure:
        once(lambda client: gist.answer(client, MINDSCAPE, Question("q", "Where?")), lambda request: 401)
    assert failure.value.hopeless


def test_fair_gists_cut_the_longest_alike() -> None:
    gists = ["one two", " ".join(f"a{i}" for i in range(30)), " ".join(f"b{i}" for i in range(50)), "c " * 9]
    assert fair_gists(gists, 1000, words) == gists
    cut = fair_gists(gists, 42, words)
    assert cut is not None
    # 2 and 9 fit below the fair share, so the other two have (42 - 2 - 9) // 2 = 15 each.
    assert [words(text) for text in cut] == [2, 15, 15, 9]
    assert cut[0] == gists[0] and cut[1] == " ".join(f"a{i}" for i in range(15)) and cut[3] == gists[3]
    assert fair_gists(gists, 20, words) is None  # fewer than 8 words each is no memory


def test_a_short_context_shares_gists_and_pages_alike() -> None:
    chunk = " ".join(["tide"] * 50)
    books = [
        Book(f"b{i}", tuple(f"{chunk} {i}.{j}" for j in range(6)), summaries=(" ".join(["gist"] * 60) + f" {i}",) * 1)
        for i in range(4)
    ]
    mindscape = Mindscape.from_books(books, window=6)

    def reply(request: dict[str, Any]) -> str:
        return '{"pages": [3, 1]}' if "Do not answer yet" in shown(request) else "it"

    answered, stub = once(
        lambda client: gist.answer(client, mindscape, Question("q", "Where?"), max_tokens=64, context_tokens=700), reply
    )
    assert answered.failed is None and not answered.trimmed
    pages = [passage.session_id for passage in answered.passages]
    assert pages.count("b2:w0") == pages.count("b0:w0") >= 1
    lengths = [len(line) for line in shown(stub.requests[0]).splitlines() if re.match(r"\[\d\] gist", line)]
    assert len(lengths) == 4 and max(lengths) == min(lengths) < 60 * 5
    assert len(json.dumps(stub.requests[1]["messages"])) < 3 * 700
    small, stub = once(
        lambda client: gist.answer(client, mindscape, Question("q", "Where?"), max_tokens=64, context_tokens=100), reply
    )
    assert (small.failed, small.text, len(stub.requests)) == ("too long", None, 0)
