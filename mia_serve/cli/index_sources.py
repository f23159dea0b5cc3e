"""Where ``mia-serve index`` takes chunks from: a mindscape, or a file that may be larger than the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mia_serve.cli.common import progress
from mia_serve.core.cached_encoder import CachedEncoder
from mia_serve.index.chunk_lines import ChunkLine, check_chunk_lines, read_chunk_lines
from mia_serve.index.writer import IndexWriter
from mia_serve.mindscape import Chunk, Mindscape
from mia_serve.mindscape.vectors import stored_vectors

#: Chunks, or characters of them, that are read, encoded and written at once: all that is held of texts and vectors.
BLOCK, BLOCK_CHARACTERS = 8192, 1 << 25

C = TypeVar("C", Chunk, ChunkLine)


class Rows(NamedTuple):
    """A block of chunks as `IndexWriter` takes them."""

    ids: list[str]
    vectors: np.ndarray
    sessions: list[str]
    metadata: list[dict[str, Any] | None] | None


class MindscapeSource:
    """Chunks of a mindscape, with the vectors that it keeps of the encoder or else encoded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chunks = Mindscape.load(folder).chunks
        self.count = len(self.chunks)

    def check_new(self, index: IndexWriter) -> None:
        """Refuse chunks that are in the index."""
        taken = next((chunk.id for chunk in self.chunks if chunk.id in index), None)
        if taken is not None:
            raise ValueError(f"{self.folder}: chunk {taken!r} is in the index already; --upsert replaces it")

    def blocks(self, encoder: CachedEncoder) -> Iterator[Rows]:
        """Yield all chunks with their vectors."""
        kept = stored_vectors(self.folder, "chunks", encoder)
        encoder.report.known += 0 if kept is None else len(kept)
        start = 0
        for part in _in_blocks(self.chunks, self.count):
            end = start + len(part)
            vectors = encoder.encode_documents([c.text for c in part]) if kept is None else kept[start:end]
            yield Rows([c.id for c in part], vectors, [c.session_id for c in part], [{"book": c.book_id} for c in part])
            start = end


class FileSource:
    """Chunks of a file, which is never held, and is read once more first: a wrong line is refused before any work."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.count = check_chunk_lines(file)

    def check_new(self, index: IndexWriter) -> None:
        """Refuse chunks that are in the index."""
        check_chunk_lines(self.file, taken=index)

    def blocks(self, encoder: CachedEncoder) -> Iterator[Rows]:
        """Yield all chunks with their vectors."""
        for part in _in_blocks(read_chunk_lines(self.file), self.count):
            metadata = [line.metadata for line in part] if any(line.metadata for line in part) else None
            vectors = encoder.encode_documents([line.text for line in part])
            yield Rows([line.id for line in part], vectors, [line.session for line in part], metadata)


def _in_blocks(chunks: Iterable[C], count: int) -> Iterator[list[C]]:
    """Cut chunks into blocks of bounded size, and say how far the work is."""
    say = progress()
    block: list[C] = []
    size = done = 0
    for chunk in chunks:
        block.append(chunk)
        size += len(chunk.text)
        if len(block) >= BLOCK or size >= BLOCK_CHARACTERS:
            yield block
            done += len(block)
            say(f"{done:,} of {count:,} chunks")
            block, size = [], 0
    if block:
        yield block
