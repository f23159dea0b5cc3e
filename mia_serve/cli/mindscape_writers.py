"""What makes the summaries of ``mindscape build`` and ``append``: sentences, keywords, or a language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mia_serve.cli.common import check_apart, notice
from mia_serve.core.errors import MiaError

if TYPE_CHECKING:
    from mia_serve.core.cached_encoder import CachedEncoder
    from mia_serve.llm import ChatClient
    from mia_serve.mindscape import Mindscape, Summarise, Window
    from mia_serve.mindscape.written import LlmSummariser

#: Windows of a mindscape that the words of new ones are weighed against.
_AMONG = 200


class Summarizer(StrEnum):
    """What summaries are made by."""

    extractive = "extractive"
    keywords = "keywords"
    llm = "llm"


@dataclass
class Writers:
    """What makes the summaries.

    Attributes:
        kind: What they are.
        name: What the mindscape says of them.
        windows: Sums up windows of books.
        chats: Sums up sessions of chats.
        plain: Sums up either without a language model.
        encoder: Picks sentences.
        llm: The model, where one is asked.
        failed: Session -> why its summary is a stand-in; `note_failures` fills it.
    """

    kind: Summarizer
    name: str
    windows: Summarise
    chats: Summarise
    plain: Summarise
    encoder: CachedEncoder
    llm: LlmSummariser | None = None
    failed: dict[str, str] = field(default_factory=dict)

    def note_failures(self, mindscape: Mindscape) -> dict[str, str]:
        """Return why summaries are stand-ins, by session, and say how many are."""
        if self.llm is None:
            return {}
        parts: dict[str, list[str]] = {}
        for session in mindscape.sessions:
            parts.setdefault(session.book_id, []).append(session.id)
        self.failed = {parts[book][part - 1]: label for (book, part), label in self.llm.failures.items()}
        if self.failed:
            from mia_serve.mindscape.written import count_labels

            notice(
                f"{len(self.failed)} of {self.llm.windows} summaries are not the model's but extracts "
                f"({count_labels(self.failed)}); run again to ask for them again"
            )
        return self.failed

    def whole_books(self, mindscape: Mindscape, books: Sequence[str]) -> dict[str, str]:
        """Sum up whole books out of the summaries of their sessions; a book of one session has that session's.

        Keywords and chats that a model sums up have none.
        """
        from mia_serve.mindscape import book_summaries

        if self.kind is Summarizer.keywords:
            return {}
        found: dict[str, list[Any]] = {book: [] for book in books}
        for session in mindscape.sessions:
            if session.book_id in found:
                found[session.book_id].append(session)
        made = {book: own[0].summary for book, own in found.items() if len(own) == 1}
        asked = [book for book, own in found.items() if len(own) > 1]
        parts, titles = [[s.summary for s in found[book]] for book in asked], [found[book][0].title for book in asked]
        if self.llm is None:
            texts = book_summaries(parts, titles, self.encoder)
        else:
            texts = self.llm.book_summaries(parts, titles)
            lost = [asked[int(i)] for i, _ in self.llm.book_failures]
            if lost:
                notice(f"no summary of the whole of {', '.join(lost)}; run again to ask for it again")
        return made | dict(zip(asked, texts, strict=True))


@contextmanager
def open_writers(
    kind: Summarizer,
    encoder: CachedEncoder,
    encoder_name: str,
    client: ChatClient | None,
    max_tokens: int,
    grown_from: Mindscape | None = None,
) -> Iterator[Writers]:
    """Open what makes the summaries; a client is closed at the end.

    Args:
        kind: What they are made by.
        encoder: Picks sentences.
        encoder_name: Its name.
        client: The model, for summaries that one writes.
        max_tokens: Most tokens of a reply.
        grown_from: A mindscape that is added to: without a model, words of new windows are weighed against its windows.
    """
    from mia_serve.mindscape import extractive_summaries, keyword_summaries

    others = _windows(grown_from)

    def among(windows: Sequence[Window]) -> list[Window]:
        asked = {(w.book_id, w.part) for w in windows}
        return [w for w in others if (w.book_id, w.part) not in asked]

    def extracts(windows: Sequence[Window]) -> list[str]:
        return extractive_summaries(windows, encoder, among=among(windows))

    def keywords(windows: Sequence[Window]) -> list[str]:
        return keyword_summaries(windows, among=among(windows))

    if kind is Summarizer.keywords:
        yield Writers(kind, "keywords", keywords, keywords, keywords, encoder)
    elif kind is Summarizer.extractive:
        yield Writers(kind, f"extractive({encoder_name})", extracts, extracts, extracts, encoder)
    else:
        from mia_serve.mindscape.written import LlmSummariser

        assert client is not None, "checked with the options"
        with LlmSummariser(client, extracts, max_tokens=max_tokens) as llm:
            yield Writers(kind, f"llm({client.model})", llm, llm.chats, extracts, encoder, llm)


def replies_file(out: Path, cache: Path | None) -> Path:
    """Return where the model's replies are kept: beside the mindscape, where no file is named."""
    if not out.absolute().name:
        raise MiaError(f"{str(out)!r} is no place for a mindscape; give a folder in it")
    return cache if cache is not None else out.absolute().with_name(f"{out.absolute().name}.replies.jsonl")


def llm_given(llm: str | None, model: str | None, cache: Path | None, replay: bool, budget: int | None) -> str:
    """Name the options that were given for a language model, for commands that ask none."""
    options = {"--llm": llm, "--llm-model": model, "--llm-cache": cache, "--replay": replay, "--llm-budget": budget}
    return ", ".join(name for name, value in options.items() if value)


def check_kept(json_to: str | None, source: Path | None, series: str | None = None) -> None:
    """Refuse a ``--json`` that would overwrite what is read: a book or chat, or the map of series.

    Raises:
        MiaError: It does.
    """
    read: dict[str, str | Path | None] = {"SOURCE": source, "--series": None if series == "author" else series}
    if source is not None and source.is_dir():
        kinds = (".txt", ".epub", ".jsonl", ".jsonl.gz")
        read |= {f"{item.name} in SOURCE": item for item in source.iterdir() if item.name.lower().endswith(kinds)}
    check_apart({"--json": json_to}, read)


def _windows(mindscape: Mindscape | None) -> list[Window]:
    """The last windows of a mindscape."""
    if mindscape is None:
        return []
    from mia_serve.mindscape import Window

    texts = {chunk.id: chunk.text for chunk in mindscape.chunks}
    counts: dict[str, int] = {}
    found = []
    for s in mindscape.sessions:
        counts[s.book_id] = counts.get(s.book_id, 0) + 1
        found.append(Window(tuple(texts[i] for i in s.chunk_ids), s.title, s.book_id, counts[s.book_id]))
    return found[-_AMONG:]
