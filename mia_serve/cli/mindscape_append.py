"""``mia-serve mindscape append``: a mindscape that grows while it is used."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mia_serve.cli.common import (
    CacheOption,
    DeviceOption,
    Encoders,
    JsonOption,
    cache_folder,
    check_apart,
    check_folder,
    check_output,
    check_outside,
    emit,
    notice,
    progress,
)
from mia_serve.cli.embed import default_encoder
from mia_serve.cli.llm_options import (
    CONCURRENCY,
    BudgetOption,
    ConcurrencyOption,
    LlmCacheOption,
    LlmModelOption,
    LlmOption,
    MaxTokens,
    PriceOption,
    ReplayOption,
    cost_text,
    open_client,
)
from mia_serve.cli.mindscape_build import build_lock, llm_record
from mia_serve.cli.mindscape_show import fact_lines, facts
from mia_serve.cli.mindscape_writers import Summarizer, Writers, check_kept, llm_given, open_writers, replies_file

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.mindscape import Mindscape
    from mia_serve.mindscape.append import Addition
    from mia_serve.mindscape.sources import Sources


class Open(StrEnum):
    """How windows and sessions are summed up that may still grow, where a language model writes the others."""

    extractive = "extractive"
    llm = "llm"


def append(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of `mindscape build`.")],
    source: Annotated[Path, typer.Argument(help="What is new, in the form that `mindscape build` reads.")],
    still_open: Annotated[
        Open,
        typer.Option("--open", help="With an LLM: what sums up a window or session until it is full or has ended."),
    ] = Open.extractive,
    llm: LlmOption = None,
    llm_model: LlmModelOption = None,
    llm_cache: LlmCacheOption = None,
    replay: ReplayOption = False,
    concurrency: ConcurrencyOption = CONCURRENCY,
    llm_budget: BudgetOption = None,
    llm_price: PriceOption = None,
    llm_max_tokens: MaxTokens = 512,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Add text to books, turns to chats, and new books and chats to a mindscape.

    A book or chat of the same id goes on: its text is continued, a session of the same id gets more turns, and a new
    session, or one without an id, ends the one before. Only windows that changed are summed up again, and only what is
    new is encoded. Readers see the mindscape as it was, or as it is then.
    """
    check_output(json_to, "--json")
    check_folder(folder, "mindscape")
    replies = replies_file(folder, llm_cache)
    check_outside({"--json": json_to, "--llm-cache": llm_cache}, {"the mindscape": folder})
    check_apart({"--json": json_to}, {"--llm-cache": replies})
    check_kept(json_to, source)
    with build_lock(folder):
        from mia_serve.mindscape import Mindscape, read_sources

        old = Mindscape.load(folder)
        settings = _settings(folder, old)
        sources = read_sources(source)
        for line in sources.skipped:
            notice(f"skipped {line}")
        kind = Summarizer(settings["summarizer"])
        if kind is not Summarizer.llm:
            given = llm_given(llm, llm_model, llm_cache, replay, llm_budget)
            if given:
                raise ValueError(
                    f"{given}: the summaries of {folder} are {kind.value}, no model is asked; leave it out"
                )
        client = None
        if kind is Summarizer.llm:
            name = llm_model or settings.get("llm")
            client = open_client(llm, name, replies, replay, concurrency, llm_budget)
        encoders = Encoders(device, cache_folder(cache))
        encoder = default_encoder(folder)
        model = encoders.open(encoder)
        with open_writers(kind, model, encoder, client, llm_max_tokens, old) as writers:
            new = _grown(old, sources, model, encoder, writers, settings, still_open)
        _save(folder, old, new, model)
        record = facts(folder, new)
        added = {
            part: record[part] - count for part, count in (("chunks", len(old.chunks)), ("sessions", len(old.sessions)))
        }
        text = f"{'added':<12}{added['chunks']} chunks, {added['sessions']} sessions\n{fact_lines(record)}"
        text += encoders.report.to_text() + "\n"
        record |= {"added": added, "texts": encoders.report.to_dict()}
        if client is not None:
            text += cost_text(client.stats, llm_price)
            record["llm"] = llm_record(client, llm_price)
    emit(text, record, json_to)


def _settings(folder: Path, mindscape: Mindscape) -> dict[str, Any]:
    settings = mindscape.notes.get("build")
    if not isinstance(settings, dict) or settings.get("summarizer") not in list(Summarizer):
        raise ValueError(
            f"{folder} does not say how it was built (of a benchmark, or long ago); build it from a SOURCE"
        )
    return settings


def _grown(
    old: Mindscape,
    sources: Sources,
    model: Encoder,
    encoder: str,
    writers: Writers,
    settings: dict[str, Any],
    still_open: Open,
) -> Mindscape:
    from mia_serve.mindscape.append import FAILED, OPEN, grow

    additions = _additions(old, sources, model, encoder, settings)
    provisional = writers.plain if writers.llm is not None and still_open is Open.extractive else None
    new = grow(old, additions, writers.windows, chats=writers.chats, provisional=provisional)
    failed = dict(new.notes.get(FAILED, {})) | writers.note_failures(new)
    touched = {addition.book_id for addition in additions}
    waiting = set(new.notes.get(OPEN, ()))
    before = {s.id: s.summary for s in old.sessions}
    summary_of = {b.id: b.summary for b in old.books}
    made = {}
    if writers.llm is None:
        made = writers.whole_books(new, sorted(touched))
    else:
        # The summary of a book is written anew when one of its windows has been; the old one serves until then.
        chats = {chat.id for chat in sources.chats}
        closed = {s.book_id for s in new.sessions if s.id not in waiting and before.get(s.id) != s.summary} - chats
        stale = sorted(book for book in closed if summary_of.get(book, "") or book in touched)
        made = {b: summary_of.get(b, "") for b in touched} | writers.whole_books(new, stale)
    books = tuple(replace(b, summary=made.get(b.id, b.summary)) for b in new.books)
    notes = {key: value for key, value in new.notes.items() if key != FAILED} | ({FAILED: failed} if failed else {})
    return replace(new, books=books, notes=notes)


def _additions(
    old: Mindscape, sources: Sources, model: Encoder, encoder: str, settings: dict[str, Any]
) -> list[Addition]:
    from mia_serve.cli.mindscape_build import chunk_size
    from mia_serve.mindscape.append import Addition, text_addition

    additions = []
    ends = {tail.book_id: tail.text for tail in old.tails}
    for book in sources.books:
        # Pieces are joined as they are; one that ends without white space is taken to end a paragraph.
        before = ends.get(book.id, "")
        gap = "\n\n" if before and not before[-1].isspace() and not book.text[0].isspace() else ""
        size, overlap = settings.get("chunk_tokens"), settings.get("overlap")
        if size is None:
            size, overlap = chunk_size(model, encoder, None, None)
        text = gap + book.text
        additions.append(
            text_addition(old, book.id, text, model.tokenizer, size, overlap or 0, book.title, book.author)
        )
    for chat in sources.chats:
        # Sessions without a name are new ones, numbered on from those that are there.
        there = [s.id.partition(":")[2] for s in old.sessions if s.book_id == chat.id]
        number = max([len(there), *(int(name[1:]) for name in there if re.fullmatch(r"s[0-9]{1,9}", name))])
        for s in chat.sessions:
            name = s.id if s.named else f"s{number + int(s.id[1:])}"
            additions.append(Addition(chat.id, s.turns, name, s.date, s.turn_ids, chat.title))
    return additions


def _save(folder: Path, old: Mindscape, new: Mindscape, model: Encoder) -> None:
    from mia_serve.mindscape.vectors import all_vectors, carry_vectors

    have = all_vectors(folder)
    others = sorted({spec for _, spec in have.values()} - {model.spec_hash})
    if others:
        notice(f"vectors of other encoders are dropped ({', '.join(others)}): run `mia-serve embed` again for each")
    new.save(folder, vectors=carry_vectors(old, new, model, have, progress()))
