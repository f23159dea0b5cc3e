"""What a question-answering benchmark is made of: books, questions about them, and what is known of their gold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mia_serve.core import MiaError
from mia_serve.mindscape.chunking import TextChunk
from mia_serve.rag.prompts import Task
from mia_serve.rag.question import AnswerMode


@dataclass(frozen=True)
class QaBook:
    """A book that questions are about.

    Attributes:
        id: Unique in its benchmark; prefix of the ids of its chunks, ``{id}:{i}``.
        title: Title, or the name that the source gives the book.
        author: Author; empty where the source does not say.
        text: The whole text, to be cut into chunks; empty where ``sections`` are given.
        sections: Ready-made chunks, (chunk id, text) each, in reading order.
        summary: Summary of the whole book, written by people; empty where there is none.
    """

    id: str
    title: str
    author: str = ""
    text: str = ""
    sections: tuple[tuple[str, str], ...] = ()
    summary: str = ""


@dataclass(frozen=True)
class QaQuestion:
    """A question about one book.

    Its gold evidence is ``gold_chunks`` where chunk ids are known, else ``gold_spans``, else unknown: its recall is
    then null, never 0. `book_gold` reads it.

    Attributes:
        id: Unique in its benchmark.
        text: The question; for a claim the statement.
        task: How it is asked, see `mia_serve.rag.prompts`.
        book: Id of its book.
        answers: Reference answers of a free question.
        options: Texts of the options of a choice, lettered from A.
        label: Letter of the right option, or TRUE or FALSE.
        pair: Name of the pair that a claim belongs to.
        gold_spans: Character spans [start, end) in the book's text; None where gold is unknown.
        gold_chunks: Ids of the gold chunks.
        gold_texts: Texts of ``gold_chunks``, in their order, where the source of the ids tells them.
        tags: Facts to break results down by.
    """

    id: str
    text: str
    task: Task
    book: str
    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    label: str = ""
    pair: str | None = None
    gold_spans: tuple[tuple[int, int], ...] | None = None
    gold_chunks: tuple[str, ...] = ()
    gold_texts: tuple[str, ...] = ()
    tags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_gold(self) -> bool:
        """Whether its gold evidence is known."""
        return bool(self.gold_chunks or self.gold_spans)


@dataclass(frozen=True)
class QaBenchmark:
    """The books and questions of one split of a benchmark.

    Attributes:
        name: Name of the benchmark.
        split: Split that the questions are from.
        language: ``en`` or ``zh``.
        books: Id -> book: all books of the haystacks, also those that no question is about.
        questions: The questions, book by book; the two claims of a pair are neighbours.
        series: Haystack -> ids of its books: a question is asked of the haystack that holds its book.
        chunk_tokens: Tokens of a chunk in the papers; 0 where the books bring their chunks.
        overlap: Tokens that a chunk shares with the one before, in the papers.
        mode: Answer mode that is best in the paper.
        dropped: Reason -> number of questions of the split that are left out.
        without_gold: Reason -> number of ``questions`` whose gold evidence is unknown.
        evidence: What was read of a file of silver evidence: ``rows``, ``used``, and ``unknown`` (rows of questions
            that the split does not have); empty without such a file.
    """

    name: str
    split: str
    language: str
    books: Mapping[str, QaBook]
    questions: tuple[QaQuestion, ...]
    series: Mapping[str, tuple[str, ...]]
    chunk_tokens: int
    overlap: int
    mode: AnswerMode
    dropped: Mapping[str, int] = field(default_factory=dict)
    without_gold: Mapping[str, int] = field(default_factory=dict)
    evidence: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class QaSource:
    """A benchmark, and where its files come from; told to a user who lacks them.

    Attributes:
        name: Name of the benchmark.
        splits: Its splits; the first is the default.
        folders: Names that its folder may have under MIA_DATA.
        origin: Where to get the files, and what they are called.
        chunk_tokens: See `QaBenchmark`.
        overlap: See `QaBenchmark`.
        mode: See `QaBenchmark`.
        hub: Data set of the hub; empty where there is none.
        series: What pooling does: group the books by ``author``, put ``all`` into one haystack, or ``never``.
    """

    name: str
    splits: tuple[str, ...]
    folders: tuple[str, ...]
    origin: str
    chunk_tokens: int = 1200
    overlap: int = 100
    mode: AnswerMode = "chunks"
    hub: str = ""
    series: Literal["author", "all", "never"] = "author"


@dataclass
class Loaded:
    """What a loader reads; `mia_serve.eval.qa_data.load_qa` makes a `QaBenchmark` of it.

    Attributes:
        books: Id -> book.
        questions: All questions of the split whose book is there.
        language: ``en`` or ``zh``.
        haystacks: Haystack -> book ids where books are asked together even without series; None: each by itself.
        dropped: Reason -> number of questions left out.
        no_gold: Question id -> why its gold is unknown; ``""`` holds the reason of all others.
    """

    books: dict[str, QaBook]
    questions: list[QaQuestion]
    language: str = "en"
    haystacks: Mapping[str, tuple[str, ...]] | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    no_gold: dict[str, str] = field(default_factory=dict)


def gold_chunk_ids(
    spans: Sequence[tuple[int, int]], chunks: Sequence[TextChunk], ids: Sequence[str]
) -> tuple[str, ...]:
    """Return the ids of the chunks that share a character with a span, in document order.

    Chunks may overlap: an evidence paragraph can lie in two of them, and both are then gold.

    Args:
        spans: Character spans [start, end) in the book's text.
        chunks: Chunks of the book, with their offsets in that text.
        ids: One id a chunk.

    Raises:
        MiaError: Not one id a chunk, or a span that is empty or runs backwards.
    """
    if len(ids) != len(chunks):
        raise MiaError(f"{len(ids)} ids for {len(chunks)} chunks: give one id a chunk")
    wrong = next((span for span in spans if not 0 <= span[0] < span[1]), None)
    if wrong is not None:
        raise MiaError(f"gold span {wrong} holds no character: give [start, end) with start < end")
    return tuple(
        chunk_id
        for chunk_id, chunk in zip(ids, chunks, strict=True)
        if any(start < chunk.end and chunk.start < end for start, end in spans)
    )


def book_gold(
    question: QaQuestion, texts: Mapping[str, str], chunks: Sequence[TextChunk] | None = None
) -> tuple[str, ...] | None:
    """Return the ids of a question's gold chunks in a chunked book; None where its gold is unknown.

    Args:
        question: The question.
        texts: Id -> text of the chunks of its book, in reading order.
        chunks: The same chunks with their offsets; needed for a gold that is character spans.

    Raises:
        MiaError: The gold names a chunk that the book does not have, or one with another text: it was made for other
            chunks.
    """
    if question.gold_chunks:
        for i, chunk_id in enumerate(question.gold_chunks):
            text = question.gold_texts[i] if question.gold_texts else texts.get(chunk_id)
            if chunk_id not in texts or text is None or text.split() != texts[chunk_id].split():
                what = "has another text" if chunk_id in texts else "is not in its book"
                raise MiaError(
                    f"question {question.id!r}: gold chunk {chunk_id!r} {what}: the evidence was made with other "
                    "chunks; make it again from this benchmark's mindscape, or chunk the books as it was made"
                )
        return question.gold_chunks
    if not question.gold_spans:
        return None
    if chunks is None:
        raise MiaError(f"question {question.id!r}: its gold is character spans; give the chunks with their offsets")
    return gold_chunk_ids(question.gold_spans, chunks, list(texts)) or None
