"""``mia-serve mindscape build``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mia_serve.cli.common import (
    CacheOption,
    Data,
    DeviceOption,
    Encoders,
    JsonOption,
    cache_folder,
    check_apart,
    check_output,
    check_outside,
    emit,
    notice,
    progress,
    read_object,
    write_file,
)
from mia_serve.cli.embed import BUILT_WITH
from mia_serve.cli.llm_options import (
    CONCURRENCY,
    BudgetOption,
    ConcurrencyOption,
    LlmCacheOption,
    LlmModelOption,
    LlmOption,
    MaxTokens,
    Price,
    PriceOption,
    ReplayOption,
    cost_text,
    open_client,
)
from mia_serve.cli.mindscape_show import fact_lines, facts
from mia_serve.cli.mindscape_writers import Summarizer, Writers, check_kept, llm_given, open_writers, replies_file

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.llm import ChatClient
    from mia_serve.mindscape import Mindscape
    from mia_serve.mindscape.sources import Sources

#: The papers' chunks (MiA-RAG, arXiv 2512.17220): tokens, and tokens shared with the one before.
SIZE, OVERLAP = 1200, 100


def build(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder to write.")],
    source: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="[SOURCE]", help="Folder or file of books (.txt, .epub, .jsonl) or chats (.jsonl)."),
    ] = None,
    data: Annotated[Data | None, typer.Option(help="Benchmark to take the texts from, in place of SOURCE.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the benchmark.")] = None,
    encoder: Annotated[
        str, typer.Option(help="Makes vectors and extractive summaries; counts a chunk's tokens.")
    ] = "all-MiniLM-L6-v2",
    summarizer: Annotated[
        Summarizer, typer.Option(help="Sentences to read; the title, names and words that tell apart; or an LLM.")
    ] = Summarizer.extractive,
    window: Annotated[int, typer.Option(min=1, help="Chunks in a session of a book.")] = 20,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            "--chunk-tokens", min=8, help="Most tokens in a chunk of a book; 1200, or what the encoder reads."
        ),
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(min=0, help="Tokens that neighbouring chunks share; a twelfth by default.")
    ] = None,
    series: Annotated[
        str | None,
        typer.Option(metavar="author|FILE", help="One mindscape a series, in DIR/SERIES: by author, or {name: [id]}."),
    ] = None,
    entities: Annotated[bool, typer.Option("--entities", help="Let the LLM find entities too (nodes).")] = False,
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
    """Build a mindscape with the vectors of its chunks and summaries.

    With --summarizer llm every reply is kept in DIR.replies.jsonl (or --llm-cache): the same command goes on where it
    was stopped, and asks for nothing twice.
    """
    check_output(json_to, "--json")
    given = llm_given(llm, llm_model, llm_cache, replay, llm_budget) or "--entities" * entities
    _check_use(source, data, summarizer, series, given, overlap, chunk_tokens)
    check_outside({"--json": json_to, "--llm-cache": llm_cache}, {"--out": out})
    check_apart({"--json": json_to}, {"--llm-cache": replies_file(out, llm_cache)})
    check_kept(json_to, source, series)
    with build_lock(out):
        if data is not None:
            record, text = _benchmark(out, data.value, split, encoder, Encoders(device, cache_folder(cache)))
            emit(text, record, json_to)
            return
        assert source is not None
        sources, groups = _read(source, series)
        _check_places(out, groups)
        client = None
        if summarizer is Summarizer.llm:
            client = open_client(llm, llm_model, replies_file(out, llm_cache), replay, concurrency, llm_budget)
        encoders = Encoders(device, cache_folder(cache))
        model = encoders.open(encoder)
        size, shared = chunk_size(model, encoder, chunk_tokens, overlap, bool(sources.books))
        settings: dict[str, Any] = {"encoder": full_name(encoder), "summarizer": summarizer.value}
        settings |= {"chunk_tokens": size, "overlap": shared} if sources.books else {}
        with open_writers(summarizer, model, encoder, client, llm_max_tokens) as writers:
            mindscape = _summed_up(sources, writers, model, size, shared, window, entities, settings)
        record, text = _save(out, groups, mindscape, model, encoder)
        text += encoders.report.to_text() + "\n"
        record["texts"] = encoders.report.to_dict()
        if client is not None:
            text += cost_text(client.stats, llm_price)
            record["llm"] = llm_record(client, llm_price)
    emit(text, record, json_to)


def chunk_size(
    encoder: Encoder, name: str, chunk_tokens: int | None, overlap: int | None, told: bool = True
) -> tuple[int, int]:
    """Return the size and overlap of chunks: what was asked for, else the papers' as far as the encoder reads.

    Raises:
        ValueError: The encoder does not read as much as was asked for, or the overlap is not below the size.
    """
    special = len(encoder.spec.template.start) + len(encoder.spec.template.end)
    room = encoder.spec.max_document_tokens - special
    size = min(SIZE, room) if chunk_tokens is None else chunk_tokens
    if size > room:
        raise ValueError(f"--chunk-tokens {size}: {name} reads {room} tokens of a document; give at most that")
    shared = size * OVERLAP // SIZE if overlap is None else overlap
    if shared >= size:
        raise ValueError(f"--overlap {shared} is not below the chunk size {size}; give a smaller one")
    if told and chunk_tokens is None and size < SIZE:
        notice(
            f"chunks of {size} tokens, {shared} of them shared: {name} reads no more (the papers' are {SIZE}/{OVERLAP})"
        )
    return size, shared


def full_name(encoder: str) -> str:
    """Return a folder's path in full, as the mindscape may be used from elsewhere; hub ids and package: names stay."""
    return str(Path(encoder).resolve()) if Path(encoder).is_dir() else encoder


def llm_record(client: ChatClient, price: Price | None) -> dict[str, Any]:
    """Return what was asked of a model, and its price, as JSON has it."""
    stats = client.stats
    record: dict[str, Any] = {"model": client.model, "stats": stats.to_dict()}
    if price is not None:
        record["dollars"] = (stats.prompt_tokens * price.prompt + stats.completion_tokens * price.reply) / 1e6
    return record


@contextmanager
def build_lock(out: Path) -> Iterator[None]:
    """Keep other writers of a mindscape away.

    Raises:
        MiaError: Another one is at work.
    """
    from mia_serve.core.errors import MiaError
    from mia_serve.core.storage import lock_file, unlock_file

    out = Path(os.path.realpath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = out.with_name(f".{out.name}.lock")
    try:
        descriptor = lock_file(lock, 0)
    except TimeoutError:
        raise MiaError(f"{out} is being written by another command; wait for it, then try again") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        unlock_file(descriptor)


def _check_use(
    source: Path | None,
    data: Data | None,
    summarizer: Summarizer,
    series: str | None,
    llm_options: str,
    overlap: int | None,
    chunk_tokens: int | None,
) -> None:
    if (data is None) == (source is None):
        raise ValueError("give the texts once: either SOURCE, a folder or file, or --data NAME")
    if data is not None and (summarizer is not Summarizer.extractive or series is not None):
        raise ValueError(f"--summarizer and --series are for a SOURCE; {data.value} brings its own, leave them out")
    if data is not None and (overlap is not None or chunk_tokens is not None):
        raise ValueError(f"--chunk-tokens and --overlap are for a SOURCE; {data.value} is cut already, leave them out")
    if summarizer is not Summarizer.llm and llm_options:
        raise ValueError(f"{llm_options} and the like are for --summarizer llm; add it, or leave them out")
    if overlap is not None and chunk_tokens is not None and overlap >= chunk_tokens:
        raise ValueError(f"--overlap {overlap} is not below the chunk size {chunk_tokens}; give a smaller one")


def _check_places(out: Path, groups: dict[str, list[str]]) -> None:
    from mia_serve.core.errors import MiaError
    from mia_serve.mindscape.store import MANIFEST, check_replaceable

    if groups and (out / MANIFEST).exists():
        raise MiaError(f"{out} is a mindscape; --series writes one a series into a folder: give another --out")
    for place in [out / folder_name(name) for name in groups] or [out]:
        check_replaceable(place)  # before anything is encoded


def folder_name(series: str) -> str:
    """Return the name of a series' folder."""
    return re.sub(r"[^\w.]+", "-", series).strip("-.") or "series"


def _read(source: Path, series: str | None) -> tuple[Sources, dict[str, list[str]]]:
    """Read the source, and the series that its books form."""
    from mia_serve.core.errors import MiaError
    from mia_serve.mindscape.series import group_books
    from mia_serve.mindscape.sources import read_sources

    sources = read_sources(source)
    for line in sources.skipped:
        notice(f"skipped {line}")
    if series is None:
        return sources, {}
    by: Any = series
    if series != "author":
        by = read_object(Path(series))
        if not all(isinstance(ids, list) and all(isinstance(i, str) for i in ids) for ids in by.values()):
            raise MiaError(f'{series}: give lists of book ids, {{"name of the series": ["id", "id"]}}')
    groups = group_books(sources.books, by)
    wanted = {book for ids in groups.values() for book in ids}
    left = [b.id for b in sources.books if b.id not in wanted] + [chat.id for chat in sources.chats]
    if left:
        notice(f"left out, in no series of two or more books: {', '.join(left)}")
    if not groups:
        raise MiaError(
            f"--series {series}: no two books belong together; leave it out, or give a FILE that says which do"
        )
    names = [folder_name(name) for name in groups]
    if len(set(names)) != len(names):
        raise MiaError(f"--series {series}: two series have the same folder name ({', '.join(names)}); rename one")
    return replace(sources, books=[b for b in sources.books if b.id in wanted], chats=[]), groups


def _summed_up(
    sources: Sources,
    writers: Writers,
    model: Encoder,
    size: int,
    overlap: int,
    window: int,
    entities: bool,
    settings: dict[str, Any],
) -> Mindscape:
    from mia_serve.mindscape import build_mindscape
    from mia_serve.mindscape.append import FAILED, NO_ENTITIES

    say = progress()
    say(f"cutting {len(sources.books)} books, {len(sources.chats)} chats")
    mindscape = build_mindscape(
        sources,
        model.tokenizer,
        writers.windows,
        size=size,
        overlap=overlap,
        window=window,
        summarizer=writers.name,
        chats=writers.chats,
    )
    notes: dict[str, Any] = {"build": settings}
    failed = writers.note_failures(mindscape)
    if failed:
        notes[FAILED] = failed
    # A chat that a model sums up has no summary of the whole: it has no end, and the model is asked for a story's.
    whole = [b.id for b in (sources.books if writers.llm is not None else mindscape.books)]
    made = writers.whole_books(mindscape, whole)
    books = tuple(replace(book, summary=made.get(book.id, "")) for book in mindscape.books)
    nodes = mindscape.nodes
    if writers.llm is not None:
        from mia_serve.mindscape.written import PROMPT_HASH

        settings |= {"llm": writers.llm.client.model, "prompts": PROMPT_HASH}
        if entities:
            from mia_serve.mindscape.entities import extract_entities

            found = writers.llm.run(extract_entities(writers.llm.client, mindscape.chunks))
            nodes = tuple(found.nodes)
            if found.failures:
                notes[NO_ENTITIES] = dict(found.failures)
                notice(f"no entities of {len(found.failures)} chunks; run again to ask for them again")
    return replace(mindscape, books=books, nodes=nodes, notes=notes)


def _save(
    out: Path, groups: dict[str, list[str]], mindscape: Mindscape, model: Encoder, encoder: str
) -> tuple[dict[str, Any], str]:
    """Write the mindscape, or one a series; return what there is to say of them, for JSON and for people."""
    from mia_serve.mindscape.append import FAILED, NO_ENTITIES
    from mia_serve.mindscape.series import select_books
    from mia_serve.mindscape.vectors import embed_mindscape, select_vectors

    vectors = embed_mindscape(mindscape, model, progress=progress())
    if not groups:
        record = _write(out, mindscape, vectors, model, encoder)
        return record, fact_lines(record)
    records = {}
    for name, books in groups.items():
        part = select_books(mindscape, books)
        own = {row.id for rows in (part.sessions, part.chunks) for row in rows}
        notes = dict(mindscape.notes)
        for what in (FAILED, NO_ENTITIES):
            failed = {name: label for name, label in notes.pop(what, {}).items() if name in own}
            notes |= {what: failed} if failed else {}
        part = replace(part, notes=notes | {"series": name})
        place = out / folder_name(name)
        with build_lock(place):
            records[name] = _write(place, part, select_vectors(mindscape, part, vectors), model, encoder)
    text = "".join(f"series      {name}\n{fact_lines(record)}\n" for name, record in records.items())
    return {"series": records}, text


def _write(out: Path, mindscape: Mindscape, vectors: dict[str, Any], model: Encoder, encoder: str) -> dict[str, Any]:
    mindscape.save(out, vectors=vectors)
    write_file(out / BUILT_WITH, json.dumps({"encoder": full_name(encoder), "spec_hash": model.spec_hash}) + "\n")
    return facts(out, mindscape)


def _benchmark(out: Path, name: str, split: str | None, encoder: str, encoders: Encoders) -> tuple[dict[str, Any], str]:
    from mia_serve.eval.datasets import load_benchmark
    from mia_serve.mindscape.store import check_replaceable
    from mia_serve.mindscape.vectors import embed_mindscape

    check_replaceable(out)
    model = encoders.open(encoder)
    say = progress()
    say(f"loading {name}")
    # All books pooled: a mindscape is the whole collection, whatever a benchmark asks of each book.
    mindscape = load_benchmark(name, split, series=True).haystacks[0].mindscape
    record = _write(out, mindscape, embed_mindscape(mindscape, model, progress=say), model, encoder)
    text = fact_lines(record) + encoders.report.to_text() + "\n"
    return record | {"texts": encoders.report.to_dict()}, text
