"""What a question-answering evaluation asks of: settings, and the haystacks of a benchmark as mindscapes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mia_serve.core import MiaError
from mia_serve.eval.qa_data import QaBenchmark, QaBook, QaQuestion, book_gold
from mia_serve.mindscape import Book, Mindscape, chunk_text, extractive_summaries, split_windows
from mia_serve.mindscape.chunking import TextChunk
from mia_serve.mindscape.records import Window
from mia_serve.signature import DEFAULT_WEIGHTS

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.llm import ChatClient

Progress = Callable[[str], None]


class Summaries(NamedTuple):
    """What a summariser wrote.

    Attributes:
        windows: Summaries of the windows, haystack by haystack.
        books: Summaries of the books by id, where it writes such.
        summarizer: Who wrote them, for the record.
    """

    windows: list[list[str]]
    books: dict[str, str]
    summarizer: str


#: Makes the summaries of many haystacks at once, so that a language model is kept busy: from the windows of each.
Summariser = Callable[[Sequence[Sequence[Window]]], Awaitable[Summaries]]


@dataclass(frozen=True)
class QaSettings:
    """Everything that decides an answer beside benchmark, encoders and language model; a run resumes only with equals.

    Attributes:
        k: Passages that an answer is written from, and of recall@k.
        k0: E1's best chunks whose sessions form the pool.
        k_sum: Sessions in a signature; ``auto``: as many as the activation spreads over, and 5 in the agent's updates.
        alpha: Weight of the signature view; E2's own where None.
        prior: β of the signature as a prior on E1, where there is no E2.
        mode: Answer mode of the rows that show σ or evidence; None: chunks+sig for MiA-RAG, and for the agent what the
            paper found best on the benchmark; ``auto``: chosen for each question.
        n_stop: Most steps of the agent.
        rewrite_query: Whether the agent may rewrite its query.
        signature_update: How the agent's σ changes: ``select``, ``rewrite`` or ``submodular``.
        window: Chunks in a session.
        chunk_tokens: Most tokens of a chunk; 0 where the books come in chunks.
        overlap: Tokens that neighbouring chunks share.
        summarizer: Who writes the session summaries: ``extractive`` or ``llm``.
        max_tokens: Most tokens of a reply.
        guided: Whether the endpoint is to keep answers to JSON.
        context_tokens: Most tokens that prompt and reply may have together; None: prompts are not trimmed.
    """

    k: int = 10
    k0: int = 50
    k_sum: int | Literal["auto"] = 5
    alpha: float | None = None
    prior: float = 0.1
    mode: str | None = None
    n_stop: int = 3
    rewrite_query: bool = True
    signature_update: str = "select"
    window: int = 20
    chunk_tokens: int = 200
    overlap: int = 0
    summarizer: str = "extractive"
    max_tokens: int = 512
    guided: bool = False
    context_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, with the weights of the signature's terms, ready for JSON."""
        return asdict(self) | {"weights": list(DEFAULT_WEIGHTS)}


@dataclass(frozen=True)
class QaHaystack:
    """A mindscape and the questions that are asked of all of it.

    Attributes:
        id: Name of the haystack: a book or a series.
        mindscape: Its chunks and sessions.
        books: Its books, in order.
        questions: The questions.
        gold: Question -> ids of its gold chunks, None where they are unknown.
    """

    id: str
    mindscape: Mindscape
    books: tuple[QaBook, ...]
    questions: tuple[QaQuestion, ...]
    gold: dict[str, tuple[str, ...] | None]

    def to_dict(self) -> dict[str, Any]:
        """Return what a reader needs of it to draw the map of its books, without the chunks' texts."""
        return {
            "id": self.id,
            "books": [{"id": book.id, "title": book.title, "author": book.author} for book in self.books],
            "sessions": [
                {
                    "id": session.id,
                    "book_id": session.book_id,
                    "title": session.title,
                    "date": session.date,
                    "summary": session.summary,
                    "chunks": list(session.chunk_ids),
                }
                for session in self.mindscape.sessions
            ],
        }


class _Cut(NamedTuple):
    """A book in chunks: ids and texts, and their places in its text where it was cut here."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    places: list[TextChunk] | None


class _Plan(NamedTuple):
    """A haystack before its summaries."""

    id: str
    folder: Path
    books: tuple[QaBook, ...]
    cuts: dict[str, _Cut]
    stored: Mindscape | None


async def build_haystacks(
    benchmark: QaBenchmark,
    settings: QaSettings,
    tokenizer: Any,
    folder: Path,
    summarise: Summariser,
    say: Progress = lambda line: None,
) -> list[QaHaystack]:
    """Build the mindscape of every haystack that a question is asked of, or open it where an earlier run made it.

    Args:
        benchmark: Books and questions.
        settings: Size of chunks and windows.
        tokenizer: Counts tokens, see `chunk_text`.
        folder: Where mindscapes are kept.
        summarise: Writes the summaries that are missing, of all haystacks in one call.
        say: Called with a line at each step.

    Returns:
        The haystacks, each with at least one question, in the order of the benchmark.

    Raises:
        MiaError: A question's book is in no haystack, or its gold chunks are none of the haystack's.
    """
    of_haystack: dict[str, list[QaQuestion]] = {}
    for question in benchmark.questions:
        of_haystack.setdefault(_haystack(benchmark, question), []).append(question)
    plans = []
    for name in (name for name in benchmark.series if name in of_haystack):
        say(f"cutting {name}")
        plans.append(_plan(benchmark, name, settings, tokenizer, folder))
    missing = [plan for plan in plans if plan.stored is None]
    made = Summaries([], {}, "")
    if missing:
        count = sum(len(_windows(plan, settings.window)) for plan in missing)
        say(f"summarising {count} sessions of {len(missing)} haystack(s)")
        made = await summarise([_windows(plan, settings.window) for plan in missing])
    summaries = {plan.id: texts for plan, texts in zip(missing, made.windows, strict=True)}
    haystacks = []
    for plan in plans:
        mindscape = plan.stored
        if mindscape is None:
            mindscape = _assemble(plan, settings.window, summaries[plan.id], made.books, made.summarizer)
            plan.folder.parent.mkdir(parents=True, exist_ok=True)
            mindscape.save(plan.folder)
        questions = tuple(of_haystack[plan.id])
        gold = {question.id: _gold(question, plan) for question in questions}
        haystacks.append(QaHaystack(plan.id, mindscape, plan.books, questions, gold))
    return haystacks


def chunk_size(
    benchmark: QaBenchmark, encoders: Mapping[str, Encoder | None], tokens: int | None, overlap: int | None
) -> tuple[int, int]:
    """Return size and overlap of chunks: the paper's where all encoders read so much, else as much as they do.

    Args:
        benchmark: Tells the paper's.
        encoders: Role -> encoder.
        tokens: ``--chunk-tokens``.
        overlap: ``--overlap``; where None, the paper's in proportion to the size.

    Returns:
        Both 0 where the benchmark brings its books in chunks.

    Raises:
        MiaError: An encoder does not read so much, the overlap is not below the size, or the chunks are given.
    """
    if not benchmark.chunk_tokens:
        if tokens is not None or overlap is not None:
            option = "--chunk-tokens" if tokens is not None else "--overlap"
            raise MiaError(f"{option}: {benchmark.name} brings its books in chunks; leave it out")
        return 0, 0
    rooms = {
        role: encoder.spec.max_document_tokens - len(encoder.spec.template.start) - len(encoder.spec.template.end)
        for role, encoder in encoders.items()
        if encoder is not None
    }
    least = min(rooms, key=lambda role: rooms[role])
    if tokens is not None and tokens > rooms[least]:
        raise MiaError(f"--chunk-tokens {tokens}: {least} reads {rooms[least]} tokens of a text; give at most that")
    size = tokens or min(benchmark.chunk_tokens, rooms[least])
    shared = overlap if overlap is not None else round(benchmark.overlap * size / benchmark.chunk_tokens)
    if shared >= size:
        raise MiaError(f"--overlap {shared} is not below the chunk size {size}; give a smaller one")
    return size, shared


def extractive_summariser(encoder: Encoder, name: str) -> Summariser:
    """Return a summariser that needs no language model; each haystack's windows are weighed against one another.

    Args:
        encoder: Chooses the sentences.
        name: Its name, for the record.
    """

    async def summarise(windows: Sequence[Sequence[Window]]) -> Summaries:
        made = [extractive_summaries(of_haystack, encoder) for of_haystack in windows]
        return Summaries(made, {}, f"extractive({name})")

    return summarise


def llm_summariser(client: ChatClient, encoder: Encoder) -> Summariser:
    """Return a summariser that lets the model write all summaries at once, of sessions and then of whole books.

    Args:
        client: The model.
        encoder: Chooses the sentences of the windows that the model does not sum up.
    """
    from mia_serve.mindscape.written import count_labels, write_book_summaries, write_summaries

    async def summarise(windows: Sequence[Sequence[Window]]) -> Summaries:
        flat = [window for of_haystack in windows for window in of_haystack]
        written = await write_summaries(client, flat, lambda missing: extractive_summaries(missing, encoder))
        rest = list(written.summaries)
        made = [[rest.pop(0) for _ in of_haystack] for of_haystack in windows]
        parts: dict[str, list[str]] = {}
        for window, text in zip(flat, written.summaries, strict=True):
            parts.setdefault(window.book_id, []).append(text)
        titles = {window.book_id: window.title for window in flat}
        books = await write_book_summaries(client, list(parts.values()), [titles[book] for book in parts])
        count = len(written.failures)
        told = f"; {count} of {len(flat)} not: {count_labels(written.failures)}" if count else ""
        return Summaries(made, dict(zip(parts, books.summaries, strict=True)), f"llm({client.model}{told})")

    return summarise


def data_hash(benchmark: QaBenchmark) -> str:
    """Return the SHA-256 of all texts, titles, references and gold of a benchmark: a run resumes only on the same."""
    digest = hashlib.sha256()
    for book in benchmark.books.values():
        digest.update(
            json.dumps([book.id, book.title, book.text, book.sections], ensure_ascii=False).encode("utf-8", "replace")
        )
    for question in benchmark.questions:
        record = [
            question.id, question.text, question.task, question.book, question.answers, question.options,
            question.label, question.pair, question.gold_spans, question.gold_chunks,
        ]  # fmt: skip
        digest.update(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace"))
    digest.update(
        json.dumps([benchmark.language, [[name, list(of)] for name, of in benchmark.series.items()]]).encode()
    )
    return digest.hexdigest()


def _haystack(benchmark: QaBenchmark, question: QaQuestion) -> str:
    for name, books in benchmark.series.items():
        if question.book in books:
            return name
    raise MiaError(f"question {question.id!r}: its book {question.book!r} is in no haystack of {benchmark.name}")


def _plan(benchmark: QaBenchmark, name: str, settings: QaSettings, tokenizer: Any, folder: Path) -> _Plan:
    books = tuple(benchmark.books[book] for book in benchmark.series[name])
    cuts = {book.id: _cut(book, settings, tokenizer) for book in books}
    plan = _Plan(name, folder / _folder_name(name), books, cuts, None)
    if not plan.folder.exists():
        return plan
    stored = Mindscape.load(plan.folder)
    wanted = [(i, text) for cut in cuts.values() for i, text in zip(cut.ids, cut.texts, strict=True)]
    if [(chunk.id, chunk.text) for chunk in stored.chunks] != wanted:
        raise MiaError(f"{plan.folder} is a mindscape of other chunks; give another --out, or remove it")
    return plan._replace(stored=stored)


def _cut(book: QaBook, settings: QaSettings, tokenizer: Any) -> _Cut:
    if book.sections:
        ids, texts = zip(*book.sections, strict=True)
        return _Cut(tuple(ids), tuple(texts), None)
    places = chunk_text(book.text, tokenizer, settings.chunk_tokens, settings.overlap)
    ids = tuple(f"{book.id}:{i}" for i in range(len(places)))
    return _Cut(ids, tuple(place.text for place in places), places)


def _windows(plan: _Plan, size: int) -> list[Window]:
    windows = []
    for book in plan.books:
        parts = split_windows(plan.cuts[book.id].texts, size)
        windows += [
            Window(tuple(texts), book.title, book.id, number, len(parts)) for number, texts in enumerate(parts, 1)
        ]
    return windows


def _assemble(
    plan: _Plan, window: int, summaries: Sequence[str], of_books: dict[str, str], summarizer: str
) -> Mindscape:
    rest, books = list(summaries), []
    for book in plan.books:
        cut = plan.cuts[book.id]
        count = -(-len(cut.texts) // window)
        own, rest = rest[:count], rest[count:]
        books.append(Book(book.id, cut.texts, book.title, cut.ids, tuple(own), book.author))
    mindscape = Mindscape.from_books(books, window, summarizer=summarizer)
    facts = tuple(replace(facts, summary=of_books.get(facts.id, "")) for facts in mindscape.books)
    return replace(mindscape, books=facts)


def _gold(question: QaQuestion, plan: _Plan) -> tuple[str, ...] | None:
    cut = plan.cuts[question.book]
    return book_gold(question, dict(zip(cut.ids, cut.texts, strict=True)), cut.places)


def _folder_name(name: str) -> str:
    slug = re.sub(r"[^\w.-]+", "-", name).strip(".-")[:80]
    return slug if slug == name else f"{slug or 'haystack'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
