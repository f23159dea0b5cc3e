"""Retrieval during training: how well the encoder, as it is now, finds the gold chunks of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mia_serve.core import Encoder
from mia_serve.eval.datasets import Benchmark
from mia_serve.eval.metrics import score_queries
from mia_serve.index import SessionIndex
from mia_serve.retriever import Retriever
from mia_serve.signature import Signature
from mia_train.data import open_benchmark
from mia_train.schema import Recipe

DEPTH = 100  # ranks that MRR looks at, as in `mia-serve eval retrieval`


class RetrievalEvaluation:
    """Search a benchmark with the encoder in training; call it again after every so many steps.

    What does not change while training, the signatures that E1 chooses, is computed once.

    Args:
        benchmark: Haystacks and questions.
        encoder: The encoder in training, sharing its weights.
        signatures: One list a haystack, or None to search with the queries alone.
    """

    def __init__(
        self, benchmark: Benchmark, encoder: Encoder, signatures: Sequence[Sequence[Signature]] | None = None
    ) -> None:
        self.benchmark, self.encoder, self.signatures = benchmark, encoder, signatures

    def __call__(self) -> dict[str, float]:
        """Return the mean of every metric over the questions.

        With signatures the plain names are those of (query, signature), and ``plain_*`` of the queries alone.
        """
        values: dict[str, list[float]] = {}
        for i, haystack in enumerate(self.benchmark.haystacks):
            chunks = haystack.mindscape.chunks
            index = SessionIndex(self.encoder.dim, device=self.encoder.device)
            vectors = self.encoder.encode_documents([chunk.text for chunk in chunks])
            index.add([chunk.id for chunk in chunks], vectors, [chunk.session_id for chunk in chunks])
            texts = [query.text for query in haystack.queries]
            gold = [query.gold for query in haystack.queries]
            runs: dict[str, np.ndarray] = {"": self.encoder.encode_queries(texts)}
            if self.signatures is not None:
                shown = [list(signature.texts) for signature in self.signatures[i]]
                runs = {"": self.encoder.encode_queries(texts, shown), "plain_": runs[""]}
            for prefix, queries in runs.items():
                ranked = index.search(queries, min(DEPTH, len(chunks))).ids
                for scores in score_queries(ranked, gold, haystack_size=len(chunks)):
                    for metric, value in scores.items():
                        if value is not None:
                            values.setdefault(prefix + metric, []).append(value)
        return {name: float(np.mean(found)) for name, found in values.items()}


def make_evaluation(recipe: Recipe, encoder: Encoder) -> RetrievalEvaluation | None:
    """Return the evaluation that a recipe asks for, or None; meant for rank 0 alone."""
    data = recipe.data
    if data.eval is None:
        return None
    benchmark = open_benchmark(data.eval)
    if data.view == "query":
        return RetrievalEvaluation(benchmark, encoder)
    e1 = Encoder.load(data.signature_encoder or recipe.model.base, device=encoder.device)
    signatures = [
        Retriever(haystack.mindscape, e1, k_sum=data.k_sum).signatures(
            [q.text for q in haystack.queries], mode=data.signature_mode
        )
        for haystack in benchmark.haystacks
    ]
    return RetrievalEvaluation(benchmark, encoder, signatures)
