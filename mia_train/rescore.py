"""Teachers: models that score a query's passages better than the encoder that found them, and slower."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from mia_serve.core import MiaError
from mia_serve.core.device import resolve_device
from mia_serve.core.names import resolve_folder
from mia_train.distributed import is_main
from mia_train.embedding import Embedder, in_turns, once

# Queries whose pairs are scored together. What a pair is batched with moves its last bits, so blocks are fixed.
_QUERIES = 16
_PAIRS = 1 << 20  # vectors gathered at once for cosines, counted in numbers: 8 MiB of float64


class Teacher(Protocol):
    """Scores passages for their queries, on any scale on which more is better."""

    def score(self, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return, for each of n queries, (p_i,) float32 scores of its passages; the same on every rank."""
        ...


class CrossEncoderTeacher:
    """A sequence-classification model with one label that reads query and passage together.

    Scores are what ``sentence_transformers.CrossEncoder.predict`` gives: the logit under the activation that the
    model's folder names (a sigmoid where it names none).

    Args:
        name: Folder, hub id or ``package:module/path``.
        device: Where it runs.
        shared: Whether all ranks score together.

    Raises:
        FileNotFoundError: There is no such model.
        MiaError: It has no classification head, or more than one label.
    """

    def __init__(self, name: str, device: str | torch.device = "auto", shared: bool = False) -> None:
        from sentence_transformers import CrossEncoder
        from transformers import AutoConfig

        folder = resolve_folder(name)
        if not (folder / "config.json").is_file():
            raise MiaError(f"cross-encoder {name!r}: no config.json; give a sequence-classification folder")
        config = AutoConfig.from_pretrained(folder)
        kind = next(iter(config.architectures or ()), "none")
        # Without this a plain encoder would load with a new, random head and score at random.
        if not kind.endswith("ForSequenceClassification") or config.num_labels != 1:
            raise MiaError(
                f"cross-encoder {name!r} is {kind} with {config.num_labels} labels; give a model for sequence "
                "classification with one, or a bi-encoder as teacher (--teacher)"
            )
        self.model: Any = CrossEncoder(str(folder), device=str(resolve_device(device)))
        self.name, self.shared = name, shared

    def score(self, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """See :meth:`Teacher.score`.

        Raises:
            MiaError: A score is not a finite number.
        """
        blocks = [range(i, min(i + _QUERIES, len(queries))) for i in range(0, len(queries), _QUERIES)]
        scores: list[np.ndarray] = []
        hidden = (self.shared and not is_main()) or not sys.stderr.isatty()
        with tqdm(total=len(queries), desc="rescore", disable=hidden) as bar:
            for block, found in in_turns(blocks, lambda b: self._block(b, queries, passages), self.shared):
                ends = np.cumsum([len(passages[i]) for i in block])
                scores += np.split(found, ends[:-1])
                bar.update(len(block))
        return scores

    def _block(self, block: range, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> np.ndarray:
        pairs = [(queries[i], text) for i in block for text in passages[i]]
        if not pairs:
            return np.empty(0, np.float32)
        found = np.asarray(self.model.predict(pairs, show_progress_bar=False), np.float32)
        if not np.isfinite(found).all():
            query, text = pairs[int(np.argmin(np.isfinite(found)))]
            raise MiaError(
                f"cross-encoder {self.name!r} gave no finite score for {query[:40]!r} with {text[:40]!r}; "
                "its weights are broken, or too large for their number format"
            )
        return found


class EncoderTeacher:
    """A larger bi-encoder whose cosines are the scores."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def score(self, queries: Sequence[str], passages: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """See :meth:`Teacher.score`."""
        row_of: dict[str, int] = {}
        asked: dict[str, int] = {}
        pairs = [
            (
                asked.setdefault(query, len(asked)),
                np.array([row_of.setdefault(t, len(row_of)) for t in texts], np.int64),
            )
            for query, texts in zip(queries, passages, strict=True)
        ]
        query_vectors = self.embedder.queries(list(asked))
        vectors = self.embedder.documents(list(row_of))
        return once(lambda: [cosines(query_vectors[q], vectors, rows) for q, rows in pairs], self.embedder.shared)


def cosines(query: np.ndarray, vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the cosines of one query and given rows of unit vectors, in float64 and rounded once to float32.

    The index scores so too, hence one pair has one score wherever it is met.

    Args:
        query: (d,) float32.
        vectors: (N, d) float32.
        rows: (p,) int64.

    Returns:
        (p,) float32.
    """
    tall = max(1, _PAIRS // len(query))
    parts = [
        vectors[rows[i : i + tall]].astype(np.float64) @ query.astype(np.float64) for i in range(0, len(rows), tall)
    ]
    return np.concatenate(parts or [np.empty(0)]).astype(np.float32)
