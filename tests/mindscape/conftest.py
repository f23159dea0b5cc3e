from __future__ import annotations

import numpy as np
import pytest

from mia_serve.mindscape import Book, Mindscape


class WordCounts:
    """A deterministic stand-in for an encoder: one dimension a word (or CJK character), and a record of its calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        from mia_serve.mindscape.sentences import split_terms

        self.calls.append(list(texts))
        words = sorted({w for text in texts for w in split_terms(text)})
        vectors = np.zeros((len(texts), len(words)), dtype=np.float32)
        for row, text in enumerate(texts):
            for w in split_terms(text):
                vectors[row, words.index(w)] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def stub() -> WordCounts:
    return WordCounts()


@pytest.fixture
def two_books() -> Mindscape:
    """Books of 5 and 4 chunks in windows of 2: sessions of 2, 2, 1 and 2, 2 chunks."""
    books = [
        Book("red", tuple(f"red passage {i}" for i in range(5)), "The Red Book", summaries=("r0", "r1", "r2")),
        Book("blue", tuple(f"蓝 passage {i}" for i in range(4)), summaries=("b0", "b1")),
    ]
    return Mindscape.from_books(books, window=2)
