"""What all collections of a server share: encoders, the summariser, how texts are cut and searched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mia_serve.http.changes import Fresh, carried
from mia_serve.http.operations import Cutter
from mia_serve.http.snapshot import Snapshot
from mia_serve.mindscape.mindscape import Mindscape, Summarise
from mia_serve.mindscape.records import Window

if TYPE_CHECKING:
    from mia_serve.core import Encoder

#: Windows, and characters of them, that the words of new ones are weighed against where a summariser asks for some.
_AMONG, _AMONG_CHARACTERS = 16, 200_000


class Embedder(NamedTuple):
    """An encoder that keeps vectors.

    Attributes:
        spec_hash: Its hash, taken once: it reads all weights.
        encoder: What encodes what is written.
        sessions: Whether it keeps vectors of summaries too; those of the selector (E1) are needed.
    """

    spec_hash: str
    encoder: Encoder
    sessions: bool


@dataclass(frozen=True)
class Kit:
    """What all collections share.

    Attributes:
        e1: Query-only encoder, for queries.
        e2: Encoder of (q, σ) pairs, for queries.
        embedders: What encodes chunks and summaries; one where both are the same model.
        summarise: Makes summaries; one that takes `among` is given other windows to weigh words against.
        chats: Makes those of sessions of chats; as the others where None.
        summarizer: Name of the summariser.
        settings: Further arguments of the retriever.
        cutter: How texts are cut.
        window: Chunks in a window of a new book.
        threads: Runs what blocks.
        checkpoint_bytes: Log of so many bytes, or half the size of what is saved, is made a part of it.
    """

    e1: Encoder
    e2: Encoder | None
    embedders: tuple[Embedder, ...]
    summarise: Summarise
    chats: Summarise | None
    summarizer: str
    settings: dict[str, Any]
    cutter: Cutter
    window: int
    threads: Executor
    checkpoint_bytes: int

    def snapshot(self, version: int, mindscape: Mindscape | None, vectors: dict[str, np.ndarray]) -> Snapshot:
        """Return a version of a collection, ready to be searched."""
        return Snapshot(version, mindscape, self.e1, self.e2, vectors, self.settings)

    def summariser(self, base: Mindscape) -> Summarise:
        """Return what makes the summaries of changes to a mindscape."""
        if "among" not in inspect.signature(self.summarise).parameters:
            return self.summarise
        weighed: Callable[..., list[str]] = self.summarise
        return lambda windows: weighed(windows, among=_others(base, windows))

    def embed(self, record: dict[str, Any], base: Snapshot) -> dict[str, Fresh]:
        """Encode what is new in a record; returns vectors by spec hash, in the record's order.

        Raises:
            RuntimeError: An encoder gave what is no number.
        """
        summaries = {s.id: (row, s.summary) for row, s in enumerate(base.mindscape.sessions)}
        found = {}
        for spec_hash, encoder, with_sessions in self.embedders:
            old = base.vectors.get(f"{spec_hash}/sessions")
            sessions: dict[str, np.ndarray | str] = {}
            for name, _, _, summary, *_ in record["sessions"] if with_sessions else ():
                row, before = summaries.get(name, (0, None))
                sessions[name] = old[row] if old is not None and before == summary else summary
            texts = [text for _, text in record["chunks"]] + [s for s in sessions.values() if isinstance(s, str)]
            vectors = encode(encoder, texts)
            found[spec_hash] = Fresh(
                {name: vectors[text] for name, text in record["chunks"]},
                {name: vectors[s] if isinstance(s, str) else s for name, s in sessions.items()},
            )
        return found

    def carry(self, base: Snapshot, new: Mindscape | None, fresh: dict[str, Fresh]) -> dict[str, np.ndarray]:
        """Return the vectors of a mindscape out of those of the version before and fresh ones."""
        if new is None:
            return {}
        rows = {"chunks": {c.id: row for row, c in enumerate(base.mindscape.chunks)}}
        rows["sessions"] = {s.id: row for row, s in enumerate(base.mindscape.sessions)}
        ids = {"chunks": [c.id for c in new.chunks], "sessions": [s.id for s in new.sessions]}
        vectors = {}
        for spec_hash, encoder, with_sessions in self.embedders:
            for part in ("chunks", "sessions") if with_sessions else ("chunks",):
                key = spec_hash + ("/sessions" if part == "sessions" else "")
                own = getattr(fresh[spec_hash], part)
                vectors[key], missing = carried(base.vectors.get(key), rows[part], ids[part], own, encoder.dim)
                assert not missing, "all that is new was encoded"
        return vectors


def encode(encoder: Encoder, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Encode texts, equal ones once.

    Raises:
        RuntimeError: The encoder gave what is no number.
    """
    distinct = list(dict.fromkeys(texts))
    if not distinct:
        return {}
    vectors = encoder.encode_documents(distinct)
    if not np.isfinite(vectors).all():
        raise RuntimeError("the encoder gave NaN or infinity for a text: nothing of it was written")
    return dict(zip(distinct, vectors, strict=True))


def _others(base: Mindscape, windows: Sequence[Window]) -> list[Window]:
    """Return windows of a mindscape, evenly spread, that hold none of the texts of these."""
    own = {text for window in windows for text in window.texts}
    count = len(base.sessions)
    starts = np.concatenate([[0], np.cumsum([len(s.chunk_ids) for s in base.sessions], dtype=np.int64)])
    found: list[Window] = []
    left = _AMONG_CHARACTERS
    for i in np.unique(np.linspace(0, count - 1, min(_AMONG, count)).astype(int)).tolist():
        texts = tuple(chunk.text for chunk in base.chunks[starts[i] : starts[i + 1]])
        left -= sum(map(len, texts))
        if left < 0:
            break
        if own.isdisjoint(texts):
            found.append(Window(texts, base.sessions[i].title, base.sessions[i].book_id))
    return found
