from __future__ import annotations

import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mia_serve.core import Encoder
from mia_serve.mindscape import Book, Mindscape
from mia_serve.mindscape.vectors import all_vectors, embed_mindscape, kept_vectors
from mia_serve.retriever import Retriever

# A cluster with a token, as docs/deploy.md has it; Ray reads these when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

WORDS = [
    "boat", "lamp", "quay", "oar", "night", "fox", "hill", "crow", "cheese", "mill", "corn",
    "cat", "boots", "king", "ledger", "key", "clock", "floor", "village", "ferry", "tide", "rope",
    "bell", "letter", "garden", "snow", "horse", "bread", "river", "bridge",
]  # fmt: skip
QUERIES = [
    "Who took the boat at night?",
    "What did the fox eat?",
    "the lamp on the quay",
    "Which cat met the king?",
    "码头上的账本 and the bell",
]


class Library(NamedTuple):
    """A mindscape on disk with the vectors of two encoders, and the retriever of one machine over it."""

    folder: Path
    mindscape: Mindscape
    e1: Encoder
    e2: Encoder

    def retriever(self, **settings: object) -> Retriever:
        vectors = kept_vectors(self.folder, self.e1, self.e2)
        return Retriever(self.mindscape, self.e1, self.e2, vectors=vectors, **settings)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path, tiny_qwen3: Path) -> Library:
    """Eight books of unlike lengths, some passages word for word the same in several of them."""
    rng = random.Random(4)
    same = [" ".join(rng.choices(WORDS, k=9)) for _ in range(4)]
    books = []
    for number, size in enumerate((3, 21, 8, 1, 14, 30, 5, 11)):
        chunks = [rng.choice(same) if rng.random() < 0.3 else " ".join(rng.choices(WORDS, k=9)) for _ in range(size)]
        summaries = tuple(" ".join(rng.choices(WORDS, k=6)) for _ in range(-(-size // 4)))
        books.append(Book(f"book{number}", tuple(chunks), f"Book {number}", summaries=summaries))
    mindscape = Mindscape.from_books(books, window=4)
    e1, e2 = (Encoder.load(folder, device="cpu") for folder in (tiny_bert, tiny_qwen3))
    folder = tmp_path_factory.mktemp("library") / "books"
    mindscape.save(folder)
    for encoder in (e1, e2):
        mindscape.save(folder, all_vectors(folder) | embed_mindscape(mindscape, encoder))
    return Library(folder, mindscape, e1, e2)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two nodes of one CPU each, on this machine."""
    pytest.importorskip("ray", reason="needs the extra ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # processes that import for nothing
        patch.setenv("OMP_NUM_THREADS", "1")
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=node)
        made.add_node(**node)
        made.wait_for_nodes()
        yield made
        made.shutdown()


@pytest.fixture(scope="session")
def two_nodes(cluster: Any) -> str:
    """Address of the cluster."""
    return cluster.address
