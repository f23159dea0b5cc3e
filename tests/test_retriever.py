"""The path q → E1 → pool → σ → E2 on a word-hashing encoder, and once on the real MiniLM."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from mia_serve.core import Encoder
from mia_serve.mindscape import Book, Mindscape
from mia_serve.retriever import Retriever
from mia_serve.signature import Signature, select_signature


class WordEncoder:
    """Bag of hashed words with Encoder's surface; a signature adds its words with weight alpha. Counts its calls."""

    def __init__(self, name: str = "words", dim: int = 64) -> None:
        self.name, self.dim = name, dim
        self.documents: list[str] = []
        self.query_calls = 0
        self.last_signatures: list[list[str]] | None = None
        self.last_alpha: float | None = None

    @property
    def spec_hash(self) -> str:
        return f"hash-{self.name}"

    def _vector(self, text: str) -> np.ndarray:
        total = np.zeros(self.dim)
        for word in re.findall(r"\w+", text.lower()):
            seed = int.from_bytes(hashlib.sha256(f"{self.name} {word}".encode()).digest()[:4], "big")
            total += np.random.default_rng(seed).standard_normal(self.dim)
        return total / np.linalg.norm(total)

    def encode_documents(self, texts, out=None) -> np.ndarray:
        self.documents += texts
        return np.stack([self._vector(text) for text in texts]).astype(np.float32)

    def encode_queries(self, texts, signatures=None, alpha=None, truncate=False) -> np.ndarray:
        self.query_calls += 1
        self.last_signatures, self.last_alpha = signatures, alpha
        rows = []
        for i, text in enumerate(texts):
            row = self._vector(text)
            if signatures is not None and signatures[i]:
                share = 0.5 if alpha is None else alpha
                row = (1 - share) * row + share * self._vector(" ".join([text, *signatures[i]]))
            rows.append(row / np.linalg.norm(row))
        return np.stack(rows).astype(np.float32)


BOOKS = [
    Book("sea", ("the boat left at night", "a lamp on the quay", "she hid the oars", "the boat came back wet"),
         summaries=("the boat and the lamp", "oars hidden and the boat returns")),
    Book("hill", ("a fox ran up the hill", "the fox met a crow", "crow and cheese", "the fox ate the cheese"),
         summaries=("a fox on the hill", "the crow loses her cheese")),
    Book("mill", ("the miller ground corn", "his cat slept", "the cat wore boots", "the king met the cat"),
         summaries=("a miller and his cat", "the cat in boots before the king")),
]  # fmt: skip
QUERIES = ["who took the boat", "what did the fox eat", "which cat met the king", "the lamp"]


@pytest.fixture
def mindscape() -> Mindscape:
    return Mindscape.from_books(BOOKS, window=2)


def naive_pool(mindscape: Mindscape, encoder: WordEncoder, query: str, k0: int) -> tuple[list[int], list[int]]:
    """Rows of the k0 best chunks and their sessions, each once."""
    scores = encoder.encode_documents([c.text for c in mindscape.chunks]) @ encoder.encode_queries([query])[0]
    ids = [c.id for c in mindscape.chunks]
    rows = sorted(range(len(ids)), key=lambda i: (-scores[i], ids[i]))[:k0]
    return rows, list(dict.fromkeys(int(mindscape.session_of[i]) for i in rows))


@pytest.mark.parametrize("k0", [1, 4, 100])
def test_pools_are_sessions_of_the_best_chunks_in_rank_order(mindscape: Mindscape, k0: int) -> None:
    encoder = WordEncoder()
    pools = Retriever(mindscape, encoder, k0=k0).pools(QUERIES)
    for query, pool in zip(QUERIES, pools, strict=True):
        rows, sessions = naive_pool(mindscape, encoder, query, k0)
        assert pool.rows.tolist() == rows and pool.sessions.tolist() == sessions
        assert (np.diff(pool.scores) <= 0).all()


@pytest.mark.parametrize("cover", ["member", "semantic"])
@pytest.mark.parametrize("weight", ["e1_score", "uniform"])
def test_coverage_signatures_equal_the_objective_on_each_query_alone(
    mindscape: Mindscape, cover: str, weight: str
) -> None:
    e1, selector = WordEncoder("one"), WordEncoder("select", 48)
    signatures = Retriever(
        mindscape, e1, selector=selector, k0=6, k_sum=3, cover=cover, cover_weight=weight
    ).signatures(QUERIES)
    for query, signature in zip(QUERIES, signatures, strict=True):
        rows, pool = naive_pool(mindscape, e1, query, 6)
        q = torch.from_numpy(selector.encode_queries([query]))
        chunks = torch.from_numpy(selector.encode_documents([mindscape.chunks[i].text for i in rows]))
        units = torch.from_numpy(selector.encode_documents([mindscape.sessions[i].summary for i in pool]))
        covered = chunks @ units.T
        if cover == "member":
            for c, row in enumerate(rows):
                covered[c, pool.index(int(mindscape.session_of[row]))] = 1.0
        scores = e1.encode_documents([mindscape.chunks[i].text for i in rows]) @ e1.encode_queries([query])[0]
        weights = torch.from_numpy(np.exp(scores / 0.05))[None] if weight == "e1_score" else None
        found = select_signature(q @ units.T, covered[None], (units @ units.T)[None], 3, cover_weight=weights)
        chosen = [pool[i] for i in found.indices[0].tolist() if i >= 0]
        assert signature.session_ids == tuple(mindscape.sessions[i].id for i in chosen)
        assert signature.texts == tuple(mindscape.sessions[i].summary for i in chosen)
        assert signature.gains == pytest.approx(found.gains[0, : len(chosen)].tolist(), abs=1e-6)
        assert signature.terms is not None
        assert signature.terms["value"] == pytest.approx(sum(signature.gains), abs=1e-6)
        assert len(signature.pick_terms) == len(chosen)
        for gain, terms in zip(signature.gains, signature.pick_terms, strict=True):
            assert gain == pytest.approx(0.3 * terms[0] + 0.4 * terms[1] + 0.3 * terms[2], abs=1e-6)
        assert set(signature.terms) == {"relevance", "coverage", "diversity", "value"}
        assert signature.mode == "coverage"


def test_first_k_signatures(mindscape: Mindscape) -> None:
    e1 = WordEncoder()
    signatures = Retriever(mindscape, e1, k0=8, k_sum=2).signatures(QUERIES, "first_k")
    for query, signature in zip(QUERIES, signatures, strict=True):
        pool = naive_pool(mindscape, e1, query, 8)[1][:2]
        assert signature.session_ids == tuple(mindscape.sessions[i].id for i in pool)
        assert signature.texts == tuple(mindscape.sessions[i].summary for i in pool)
    ordered = Retriever(mindscape, e1, k0=8, k_sum=2, order="document").signatures(QUERIES, "first_k")
    for signature, other in zip(signatures, ordered, strict=True):
        rows = [i for i, session in enumerate(mindscape.sessions) if session.id in signature.session_ids]
        assert other.texts == tuple(mindscape.sessions[i].summary for i in rows)
        assert signature.gains == () and signature.terms is None and signature.mode == "first_k"


def test_global_summary_is_that_of_the_book_of_the_best_chunk(mindscape: Mindscape) -> None:
    from mia_serve.mindscape import book_summaries

    e1, e2 = WordEncoder(), WordEncoder("two")
    retriever = Retriever(mindscape, e1, e2, k0=4)
    results = retriever.search(QUERIES, 5, "global_summary")
    assert results.signatures == retriever.signatures(QUERIES, "global_summary")
    for query, signature in zip(QUERIES, results.signatures or [], strict=True):
        book = mindscape.chunks[naive_pool(mindscape, e1, query, 1)[0][0]].book_id
        sessions = [session for session in mindscape.sessions if session.book_id == book]
        assert signature.session_ids == tuple(session.id for session in sessions)
        assert list(signature.texts) == book_summaries([[s.summary for s in sessions]], [""], e1)
        assert signature.mode == "global_summary"
    assert e2.last_signatures == [list(s.texts) for s in results.signatures or []]
    assert retriever.book_signatures(["hill", "sea", "hill"])[0].session_ids == ("hill:w0", "hill:w1")
    with pytest.raises(ValueError, match="has no book 'moon'"):
        retriever.book_signatures(["moon"])


def test_a_book_is_summed_up_once(mindscape: Mindscape) -> None:
    e1 = WordEncoder()
    retriever = Retriever(mindscape, e1, k0=4)
    retriever.signatures(QUERIES, "global_summary")
    before = len(e1.documents)
    retriever.signatures(list(reversed(QUERIES)), "global_summary")
    assert len(e1.documents) == before


def test_a_summary_that_the_mindscape_brings_is_the_books(mindscape: Mindscape) -> None:
    books = [replace(b, summary="What the hill is about.") if b.id == "hill" else b for b in mindscape.books]
    e1 = WordEncoder()
    hill, sea = Retriever(replace(mindscape, books=books), e1, k0=4).book_signatures(["hill", "sea"])
    made = Retriever(mindscape, WordEncoder(), k0=4).book_signatures(["sea"])
    assert hill.texts == ("What the hill is about.",) and [sea] == made


def test_batch_equals_single(mindscape: Mindscape) -> None:
    retriever = Retriever(mindscape, WordEncoder("one"), WordEncoder("two"), k0=5, k_sum=3)
    together = retriever.search(QUERIES, 4)
    assert together.signatures is not None
    for i, query in enumerate(QUERIES):
        alone = retriever.search([query], 4)
        assert alone.hits.ids[0] == together.hits.ids[i]
        assert alone.signatures is not None
        assert alone.signatures[0].session_ids == together.signatures[i].session_ids


def test_small_selection_batches_change_nothing(mindscape: Mindscape, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = Retriever(mindscape, WordEncoder(), k0=5)
    whole = retriever.signatures(QUERIES)
    monkeypatch.setattr("mia_serve.retriever._ELEMENTS", 1)
    assert [s.session_ids for s in retriever.signatures(QUERIES)] == [s.session_ids for s in whole]


def test_second_search_encodes_pairs_and_searches_all_chunks(mindscape: Mindscape) -> None:
    e1, e2 = WordEncoder("one"), WordEncoder("two", 32)
    retriever = Retriever(mindscape, e1, e2, k0=2, k_sum=2, alpha=0.3)
    results = retriever.search(QUERIES, 5)
    assert e2.last_signatures == [list(s.texts) for s in results.signatures or []] and e2.last_alpha == 0.3
    vectors = e2.encode_queries(QUERIES, e2.last_signatures, 0.3)
    scores = vectors @ e2.encode_documents([c.text for c in mindscape.chunks]).T
    np.testing.assert_array_equal(results.hits.rows, np.argsort(-scores, axis=1)[:, :5])
    assert results.hits.ids[0][0] == mindscape.chunks[results.hits.rows[0, 0]].id


@pytest.mark.parametrize("signature", ["coverage", "none", [["a"], [], ["b", "c"], ["d"]]])
def test_candidates_e1_topk_stay_within_k0(mindscape: Mindscape, signature) -> None:
    retriever = Retriever(mindscape, WordEncoder("one"), WordEncoder("two"), k0=3, candidates="e1_topk")
    hits = retriever.search(QUERIES, 10, signature).hits
    for pool, row in zip(retriever.pools(QUERIES), hits.rows, strict=True):
        assert sorted(pool.rows.tolist()) == sorted(row.tolist())
    assert (np.diff(hits.scores, axis=1) <= 0).all()


def test_defaults_follow_the_encoders(mindscape: Mindscape) -> None:
    e1, e2 = WordEncoder("one"), WordEncoder("two")
    both, only = Retriever(mindscape, e1, e2), Retriever(mindscape, e1)
    assert both.search(QUERIES).signatures is not None
    assert both.search(QUERIES, encoder="e1").signatures is None
    assert only.search(QUERIES).signatures is None
    assert Retriever(mindscape, e1, prior=0.1).search(QUERIES, signature="coverage").signatures is not None
    assert both.search(QUERIES, signature="none").signatures is None
    assert both.search(QUERIES, encoder="e1").hits.ids == only.search(QUERIES).hits.ids
    assert Retriever(mindscape, e1, e1).search(QUERIES).signatures is not None


def test_given_signatures(mindscape: Mindscape) -> None:
    e1, e2 = WordEncoder("one"), WordEncoder("two")
    retriever = Retriever(mindscape, e1, e2)
    chosen = retriever.signatures(QUERIES)
    assert retriever.search(QUERIES, 5, chosen).hits.ids == retriever.search(QUERIES, 5).hits.ids
    mixed = [["corn", "king"], "one text", None, []]
    results = retriever.search(QUERIES, 5, mixed)
    assert e2.last_signatures == [["corn", "king"], ["one text"], [], []]
    assert results.signatures is not None and {s.mode for s in results.signatures} == {"given"}
    none = retriever.search(QUERIES, 5, "none")
    assert results.hits.ids[2:] == none.hits.ids[2:]
    shuffled = retriever.search(QUERIES, 5, chosen[1:] + chosen[:1])
    assert not np.array_equal(shuffled.hits.scores, retriever.search(QUERIES, 5).hits.scores)


def test_equal_encoders_share_vectors_and_nothing_is_encoded_twice(mindscape: Mindscape) -> None:
    e1, e2, selector = WordEncoder("same"), WordEncoder("same"), WordEncoder("same")
    retriever = Retriever(mindscape, e1, e2, selector)
    retriever.search(QUERIES)
    retriever.search(QUERIES)
    encoded = e1.documents + e2.documents + selector.documents
    assert sorted(encoded) == sorted([c.text for c in mindscape.chunks] + [s.summary for s in mindscape.sessions])


def test_nothing_is_encoded_before_it_is_needed(mindscape: Mindscape) -> None:
    e1, e2, selector = WordEncoder("one"), WordEncoder("two"), WordEncoder("three")
    retriever = Retriever(mindscape, e1, e2, selector)
    assert not e1.documents
    retriever.search(QUERIES, encoder="e1")
    assert len(e1.documents) == len(mindscape.chunks) and not e2.documents and not selector.documents
    retriever.search(QUERIES, signature="first_k")
    assert len(e2.documents) == len(mindscape.chunks) and not selector.documents


def test_queries_are_encoded_in_one_call(mindscape: Mindscape) -> None:
    e1, e2, selector = WordEncoder("one"), WordEncoder("two"), WordEncoder("three")
    Retriever(mindscape, e1, e2, selector).search(QUERIES)
    assert (e1.query_calls, e2.query_calls, selector.query_calls) == (1, 1, 1)


def test_the_same_queries_are_encoded_once(mindscape: Mindscape) -> None:
    e1, e2 = WordEncoder("one"), WordEncoder("two")
    retriever = Retriever(mindscape, e1, e2)
    retriever.pools(QUERIES)
    signatures = retriever.signatures(QUERIES)
    retriever.search(QUERIES, encoder="e1", signature=signatures, prior=0.1)
    assert e1.query_calls == 1
    retriever.pools(QUERIES[:2])
    assert e1.query_calls == 2
    assert retriever.pools(QUERIES)[3].rows.tolist() == naive_pool(mindscape, e1, QUERIES[3], 50)[0]


def test_prior_of_one_search_is_that_of_a_retriever_with_it(mindscape: Mindscape) -> None:
    e1 = WordEncoder()
    plain, weighted = Retriever(mindscape, e1, k0=5), Retriever(mindscape, e1, k0=5, prior=0.3)
    expected = weighted.search(QUERIES, 4, "coverage")
    found = plain.search(QUERIES, 4, "coverage", prior=0.3)
    assert found.hits.ids == expected.hits.ids
    np.testing.assert_array_equal(found.hits.scores, expected.hits.scores)
    assert weighted.search(QUERIES, 4, prior=0.0).hits.ids == plain.search(QUERIES, 4).hits.ids
    with pytest.raises(ValueError, match="prior=-1"):
        plain.search(QUERIES, 4, "coverage", prior=-1)


def test_precomputed_vectors_are_used_and_shared(mindscape: Mindscape) -> None:
    cache: dict[str, np.ndarray] = {}
    first = Retriever(mindscape, WordEncoder(), vectors=cache, prior=0.1).search(QUERIES, signature="coverage")
    assert set(cache) == {"hash-words", "hash-words/sessions"}
    for vectors in cache.values():
        vectors.setflags(write=False)  # as a memory map would be
    encoder = WordEncoder()
    again = Retriever(mindscape, encoder, vectors=cache, prior=0.1).search(QUERIES, signature="coverage")
    assert not encoder.documents and again.hits.ids == first.hits.ids
    with pytest.raises(ValueError, match=r"need \(12, 64\)"):
        Retriever(mindscape, WordEncoder(), vectors={"hash-words": np.zeros((3, 64), np.float32)})
    with pytest.raises(ValueError, match=r"sessions need \(6, 64\)"):
        Retriever(mindscape, WordEncoder(), vectors={"hash-words/sessions": np.zeros((6, 8), np.float32)})


def test_backends_agree(mindscape: Mindscape) -> None:
    results = [
        Retriever(mindscape, WordEncoder("one"), WordEncoder("two"), backend=backend).search(QUERIES, 7)
        for backend in ("torch", "faiss")
    ]
    assert results[0].hits.ids == results[1].hits.ids
    np.testing.assert_array_equal(results[0].hits.scores, results[1].hits.scores)


def test_SRV_32_k_beyond_the_mindscape(mindscape: Mindscape) -> None:
    hits = Retriever(mindscape, WordEncoder()).search(QUERIES, 99).hits
    assert all(sorted(row) == sorted(c.id for c in mindscape.chunks) for row in hits.ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["ok", "  "],), "query 1"),
        (([],), "queries is empty"),
        (("a bare string",), "one string"),
        (([None],), "query 0"),
        ((["ok"], 0), "k=0"),
        ((["ok"], 5, "covrage"), "allowed are 'coverage', 'first_k'"),
        ((["ok"], 5, "none", "e3"), "allowed are 'e1', 'e2'"),
        ((["ok"], 5, "none", "e2"), "has no e2"),
        ((["ok"], 5, [["a"], ["b"]]), "2 signatures for 1 queries"),
        ((["ok"], 5, [[1]]), "signature 0"),
    ],
)
def test_wrong_use_is_refused(mindscape: Mindscape, arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retriever(mindscape, WordEncoder()).search(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k0": 0}, "k0=0"),
        ({"k_sum": 0}, "k_sum=0"),
        ({"candidates": "some"}, "allowed are 'all', 'e1_topk'"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"weights": (1, 2)}, "three finite numbers"),
        ({"backend": "hnsw"}, "allowed are 'auto', 'torch', 'faiss'"),
    ],
)
def test_wrong_settings_are_refused(mindscape: Mindscape, settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retriever(mindscape, WordEncoder(), **settings).search(QUERIES)


def test_wrong_signature_mode_is_refused(mindscape: Mindscape) -> None:
    with pytest.raises(ValueError, match="signature mode 'none'"):
        Retriever(mindscape, WordEncoder()).signatures(QUERIES, "none")


def test_real_minilm(minilm: Encoder) -> None:
    books = [
        Book("otter", (
            "Maud rowed out before dawn and sank the skiff below the weir.",
            "She told the constable that the skiff had been stolen by boys.",
            "Her brother was seen that night at the mill with a sack of silver.",
        ), summaries=("At the weir Maud sinks the skiff to protect her brother, and lies about it to the constable.",)),
        Book("garden", (
            "The gardener planted forty tulips along the south wall.",
            "Rain came in May and the tulips rotted in the ground.",
            "He asked his neighbour for seed of the old white roses.",
        ), summaries=("A gardener loses his tulips to the rain and begins again with roses.",)),
    ]  # fmt: skip
    mindscape = Mindscape.from_books(books)
    queries = ["Why did she lie about the boat?", "What grew after the flowers rotted?"]
    retriever = Retriever(mindscape, minilm, minilm, k0=4, k_sum=1, device="cpu")
    results = retriever.search(queries, 3)
    assert results.signatures is not None
    assert [s.session_ids for s in results.signatures] == [("otter:w0",), ("garden:w0",)]
    assert all(hit.startswith("otter") for hit in results.hits.ids[0])
    assert all(hit.startswith("garden") for hit in results.hits.ids[1])
    plain = retriever.search(queries, 3, encoder="e1")
    expected = minilm.encode_queries(queries) @ minilm.encode_documents([c.text for c in mindscape.chunks]).T
    np.testing.assert_array_equal(plain.hits.rows, np.argsort(-expected, axis=1)[:, :3])
    given = retriever.search(queries, 3, [Signature((), s.texts) for s in results.signatures])
    assert given.hits.ids == results.hits.ids


@pytest.mark.parametrize("candidates", ["all", "e1_topk"])
def test_prior_adds_its_weight_to_the_chunks_of_the_signatures_sessions(mindscape: Mindscape, candidates: str) -> None:
    e1 = WordEncoder()
    retriever = Retriever(mindscape, e1, k0=5, k_sum=2, prior=0.2, candidates=candidates)
    found = retriever.search(QUERIES, k=4, signature="coverage", encoder="e1")
    assert found.signatures is not None
    chunk_vectors = e1.encode_documents([c.text for c in mindscape.chunks])
    for i, (query, signature) in enumerate(zip(QUERIES, found.signatures, strict=True)):
        vector = e1.encode_queries([query])[0]
        scores = (chunk_vectors @ vector).astype(np.float64)
        rows, _ = naive_pool(mindscape, e1, query, 5)
        share = np.exp(scores[rows] / 0.05) / np.exp(scores[rows] / 0.05).sum()
        logits = []
        for name in signature.session_ids:
            session = next(s for s in mindscape.sessions if s.id == name)
            activation = sum(w for w, r in zip(share, rows, strict=True) if mindscape.chunks[r].session_id == name)
            logits.append(np.log(activation + 1e-3) + float(e1.encode_documents([session.summary])[0] @ vector) / 0.1)
        weights = np.exp(logits) / np.exp(logits).sum()
        for name, weight in zip(signature.session_ids, weights, strict=True):
            scores[[c.session_id == name for c in mindscape.chunks]] += 0.2 * weight
        among = range(len(scores)) if candidates == "all" else rows
        order = sorted(among, key=lambda r: (-scores[r], mindscape.chunks[r].id))[:4]
        assert found.hits.scores[i] == pytest.approx(scores[order], abs=1e-5)
        assert found.hits.ids[i] == [mindscape.chunks[r].id for r in order]


def test_prior_of_a_foreign_or_text_only_signature_changes_nothing(mindscape: Mindscape) -> None:
    e1 = WordEncoder()
    plain = Retriever(mindscape, e1).search(QUERIES, k=3)
    weighted = Retriever(mindscape, e1, prior=0.5)
    foreign = Signature(("elsewhere:w0",), ("a text",))
    for given in ([foreign] * len(QUERIES), [["only a text"]] * len(QUERIES)):
        found = weighted.search(QUERIES, k=3, signature=given, encoder="e1")
        assert found.hits.ids == plain.hits.ids
    with pytest.raises(ValueError, match="E1 reads the query alone"):
        Retriever(mindscape, e1).search(QUERIES, signature="coverage")
    with pytest.raises(ValueError, match="prior=-1"):
        Retriever(mindscape, e1, prior=-1)
