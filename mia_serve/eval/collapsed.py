"""Baseline: the collapsed tree of RAPTOR (arXiv 2401.18059): chunks and summaries of all levels ranked together.

RAPTOR builds its tree by clustering: softly, by Gaussian mixtures, and again level by level. By default ours has the
mindscape's own levels, which cost no further summaries: chunks, windows in reading order, whole books. With
`CollapsedTree(summarise=…)` its middle levels are clusters by similarity: hard ones, by spherical k-means, each book by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from mia_serve.core.errors import MiaError
from mia_serve.mindscape.mindscape import Summarise, summarised
from mia_serve.mindscape.records import Window
from mia_serve.rag import static
from mia_serve.rag.fitting import estimate_tokens
from mia_serve.rag.question import Question

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.llm import ChatClient
    from mia_serve.mindscape import Mindscape
    from mia_serve.rag.batching import AsyncRetriever
    from mia_serve.retriever import Retriever

Kind = Literal["chunk", "summary", "book"]

_LEAVES = 10  # chunks whose average size is the budget, so that the tree reads as much as a system with ten passages
_ROUNDS = 20  # of k-means at most


class TreeNode(NamedTuple):
    """A node of the tree.

    Attributes:
        id: Id of the chunk; for a session ``summary/`` and its id, for a cluster and a book likewise.
        text: What is ranked and read: the chunk's text or the summary.
        kind: Its level.
        session_id: The chunk's session; "" for summaries.
    """

    id: str
    text: str
    kind: Kind
    session_id: str = ""


class Taken(NamedTuple):
    """Nodes taken for a question, best first, with their scores."""

    nodes: tuple[TreeNode, ...]
    scores: tuple[float, ...]


class CollapsedTree:
    """All nodes of one mindscape's tree in one ranking by the query-only encoder.

    It is built when it is first asked, by the retriever that it is asked with; ask it with no other one.

    Args:
        budget: Most tokens of the nodes that are taken; RAPTOR's is 2,000 with leaves of 100 tokens. None: ten times a
            chunk's average, as much as ten passages.
        summarise: Makes the summaries of clusters; None: the windows of the mindscape are the middle level.
        size: Nodes in a cluster, on average.
        tokens: Counts a text's tokens.

    Raises:
        MiaError: The budget is below 1, or the size below 2.
    """

    def __init__(
        self,
        budget: int | None = None,
        summarise: Summarise | None = None,
        size: int = 10,
        tokens: Callable[[str], int] = estimate_tokens,
    ) -> None:
        if budget is not None and budget < 1:
            raise MiaError(f"budget={budget}: give at least 1 token")
        if size < 2:
            raise MiaError(f"size={size}: a cluster holds at least 2 nodes, or there would be no end of levels")
        self.summarise, self.size, self.tokens = summarise, size, tokens
        self.nodes: tuple[TreeNode, ...] = ()
        self._budget = budget
        self._vectors = np.zeros((0, 0), np.float32)
        self._sizes: list[int] = []

    @property
    def budget(self) -> int:
        """Most tokens taken; 0 before the tree is built where none was given."""
        leaves = [size for size, node in zip(self._sizes, self.nodes, strict=True) if node.kind == "chunk"]
        return self._budget or (round(_LEAVES * sum(leaves) / len(leaves)) if leaves else 0)

    def take(self, retriever: Retriever, queries: Sequence[str]) -> list[Taken]:
        """Rank all nodes for each query and take them from the best on, until one does not fit into the budget.

        The best node is always taken. Of equal scores the lower level wins, then reading order. Hand this function to
        `AsyncRetriever.together` to serve many questions off the event loop.
        """
        if not self.nodes:
            self.nodes, self._vectors = _build(retriever, self.summarise, self.size)
            self._sizes = [self.tokens(node.text) for node in self.nodes]
        vectors, budget = retriever.e1.encode_queries(list(queries)), self.budget
        taken = []
        for scores in vectors @ self._vectors.T:
            order = np.argsort(-scores, kind="stable").tolist()
            kept: list[int] = []
            left = budget
            for row in order:
                left -= self._sizes[row]
                if kept and left < 0:
                    break
                kept.append(row)
            taken.append(Taken(tuple(self.nodes[row] for row in kept), tuple(float(scores[row]) for row in kept)))
        return taken


async def answer(
    client: ChatClient,
    searcher: AsyncRetriever,
    tree: CollapsedTree,
    question: Question,
    *,
    max_tokens: int = static.MAX_TOKENS,
    context_tokens: int | None = None,
    guided: bool = False,
) -> static.Answer:
    """Answer a question from the nodes that the tree yields for it.

    Args:
        client: The model.
        searcher: The haystack's retriever.
        tree: The haystack's tree.
        question: The question; its text is the query.
        max_tokens: Most tokens of the reply.
        guided: See `static.answer`.
        context_tokens: Tokens that prompt and reply may take together; what the endpoint says where None.

    Returns:
        The answer. Its passages are the chunks that were taken and shown, best first: what recall is measured on. The
        summaries that were read beside them are in none of its fields.

    Raises:
        LlmFailed: Any other call would fail too (``hopeless``).
    """
    found = await searcher.together(tree.take, question.text)
    shown = [
        static.Passage(node.id, node.text, score, node.session_id)
        for node, score in zip(found.nodes, found.scores, strict=True)
    ]
    answered = await static.answer(
        client, question, shown, max_tokens=max_tokens, context_tokens=context_tokens, guided=guided
    )
    chunks = tuple(passage for passage in answered.passages if passage.session_id)
    ids = {passage.id for passage in chunks}
    return replace(answered, passages=chunks, citations=tuple(i for i in answered.citations if i in ids))


def _build(retriever: Retriever, summarise: Summarise | None, size: int) -> tuple[tuple[TreeNode, ...], np.ndarray]:
    """Return the nodes, lower levels first, and their vectors, (n, d)."""
    mindscape, e1 = retriever.mindscape, retriever.e1
    nodes = [TreeNode(c.id, c.text, "chunk", c.session_id) for c in mindscape.chunks]
    vectors = [retriever.chunk_vectors(e1)]
    if summarise is not None:
        made, rows = _clusters(mindscape, vectors[0], e1, summarise, size)
        return (*nodes, *made), np.concatenate([*vectors, *rows])
    nodes += [TreeNode(f"summary/{s.id}", s.summary, "summary") for s in mindscape.sessions]
    vectors.append(retriever.session_vectors(e1))
    books = list(dict.fromkeys(s.book_id for s in mindscape.sessions))
    known = {s.summary for s in mindscape.sessions}  # a book of one session has that session's summary
    named = zip(books, (found.text for found in retriever.book_signatures(books)), strict=True)
    tops = [TreeNode(f"book/{book}", text, "book") for book, text in named if text not in known]
    if tops:
        vectors.append(e1.encode_documents([node.text for node in tops]))
    return (*nodes, *tops), np.concatenate(vectors)


def _clusters(
    mindscape: Mindscape, leaves: np.ndarray, encoder: Encoder, summarise: Summarise, size: int
) -> tuple[list[TreeNode], list[np.ndarray]]:
    """Sum up clusters of each book's nodes, and clusters of those, until a book has one node."""
    titles = {session.book_id: session.title for session in mindscape.sessions}
    level: dict[str, tuple[list[str], np.ndarray]] = {}
    for book in titles:
        members = [i for i, chunk in enumerate(mindscape.chunks) if chunk.book_id == book]
        level[book] = [mindscape.chunks[i].text for i in members], leaves[members]
    nodes: list[TreeNode] = []
    vectors: list[np.ndarray] = []
    depth = 0
    while level := {book: (texts, rows) for book, (texts, rows) in level.items() if len(texts) > 1}:
        depth += 1
        windows = []
        for book, (texts, rows) in level.items():
            member = spherical_kmeans(rows, -(-len(texts) // size)).tolist()
            parts = [[texts[i] for i, own in enumerate(member) if own == part] for part in sorted(set(member))]
            windows += [Window(tuple(t), titles[book], book, n, len(parts)) for n, t in enumerate(parts, 1)]
        summaries = summarised(windows, summarise)
        encoded = encoder.encode_documents(summaries)
        for book in level:
            own = [i for i, window in enumerate(windows) if window.book_id == book]
            kind: Kind = "book" if len(own) == 1 else "summary"
            nodes += [TreeNode(f"cluster/{book}/{depth}.{windows[i].part}", summaries[i], kind) for i in own]
            vectors.append(encoded[own])
            level[book] = [summaries[i] for i in own], encoded[own]
    return nodes, vectors


def spherical_kmeans(vectors: np.ndarray, k: int) -> np.ndarray:
    """Part unit vectors into at most k clusters by cosine.

    Deterministic: centres start at vectors that lie far from one another, the first one nearest to the mean of all.

    Args:
        vectors: (n, d) unit rows.
        k: Clusters wanted.

    Returns:
        Cluster of each row, (n,) int64, numbered by first occurrence.
    """
    rows = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
    first = int((rows @ rows.mean(dim=0)).argmax())
    chosen, nearest = [first], rows @ rows[first]
    for _ in range(min(k, len(rows)) - 1):
        chosen.append(int(nearest.argmin()))
        nearest = torch.maximum(nearest, rows @ rows[chosen[-1]])
    centres = rows[chosen]
    member = torch.full((len(rows),), -1)
    for _ in range(_ROUNDS):
        found = (rows @ centres.T).argmax(dim=1)
        if torch.equal(found, member):
            break
        member = found
        sums = torch.zeros_like(centres).index_add_(0, member, rows)
        # A centre that lost all its rows stays where it was.
        empty = torch.bincount(member, minlength=len(centres)) == 0
        centres = torch.where(empty[:, None], centres, torch.nn.functional.normalize(sums, dim=1))
    order: dict[int, int] = {}
    return np.array([order.setdefault(one, len(order)) for one in member.tolist()], np.int64)
