"""``mia-serve mindscape``: build one from a benchmark or a folder of books, and look at it."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mia_serve.cli.common import (
    CacheOption,
    Data,
    DeviceOption,
    Encoders,
    JsonOption,
    cache_folder,
    check_folder,
    check_output,
    check_outside,
    emit,
    progress,
    write_file,
)
from mia_serve.cli.embed import BUILT_WITH

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.mindscape import Mindscape

app = typer.Typer(help="Build and inspect mindscapes: chunks, sessions and their summaries.", no_args_is_help=True)


class Summaries(StrEnum):
    """How the windows of books are summarised without a language model."""

    extractive = "extractive"
    keywords = "keywords"


@app.command("build")
def build(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder to write.")],
    encoder: Annotated[str, typer.Option(help="Makes extractive summaries and vectors; counts a chunk's tokens.")],
    data: Annotated[Data | None, typer.Option(help="Benchmark to take the texts from.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the benchmark.")] = None,
    books: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder of .txt files, one a book.")] = None,
    window: Annotated[int, typer.Option(min=1, help="Chunks in a session of a book.")] = 20,
    chunk_tokens: Annotated[
        int | None,
        typer.Option("--chunk-tokens", min=8, help="Most tokens in a chunk of a book; 200, or what the encoder takes."),
    ] = None,
    overlap: Annotated[int, typer.Option(min=0, help="Tokens that neighbouring chunks share.")] = 0,
    summaries: Annotated[
        Summaries, typer.Option(help="Of books: sentences to read, or the title, names and words that tell apart.")
    ] = Summaries.extractive,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Build a mindscape with the vectors of its chunks and summaries."""
    check_output(json_to, "--json")
    if (data is None) == (books is None):
        raise ValueError("give the texts once: either --data NAME or --books FOLDER")
    if data is not None and summaries is not Summaries.extractive:
        raise ValueError(f"--summaries {summaries.value} is for --books; {data.value} brings its own, leave it out")
    check_outside({"--json": json_to}, {"--out": out})
    from mia_serve.mindscape.store import check_replaceable

    check_replaceable(out)  # before anything is encoded
    files = _book_files(books) if books is not None else []
    encoders = Encoders(device, cache_folder(cache))
    model = encoders.open(encoder)
    special = len(model.spec.template.start) + len(model.spec.template.end)
    room = model.spec.max_document_tokens - special
    size = min(200, room) if chunk_tokens is None else chunk_tokens
    if size > room:
        raise ValueError(f"--chunk-tokens {size}: {encoder} reads {room} tokens of a document; give at most that")
    if overlap >= size:
        raise ValueError(f"--overlap {overlap} is not below the chunk size {size}; give a smaller one")
    say = progress()
    if data is not None:
        say(f"loading {data.value}")
        mindscape = _from_benchmark(data.value, split)
    else:
        say(f"cutting {len(files)} books")
        mindscape = _from_books(files, model, encoder, window, size, overlap, summaries)
    from mia_serve.mindscape.vectors import embed_mindscape

    mindscape.save(out, vectors=embed_mindscape(mindscape, model, progress=say))
    # A folder is named in full: the mindscape may be used from elsewhere. Hub ids and package: names stay.
    name = str(Path(encoder).resolve()) if Path(encoder).is_dir() else encoder
    write_file(out / BUILT_WITH, json.dumps({"encoder": name, "spec_hash": model.spec_hash}) + "\n")
    record = _facts(out, mindscape)
    text = _lines(record) + encoders.report.to_text() + "\n"
    emit(text, record | {"texts": encoders.report.to_dict()}, json_to)


@app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of `mindscape build`.")],
    sessions: Annotated[int, typer.Option(min=0, help="Sessions to print.")] = 3,
    json_to: JsonOption = None,
) -> None:
    """Print what a mindscape holds."""
    check_output(json_to, "--json")
    check_folder(folder, "mindscape")
    check_outside({"--json": json_to}, {"the mindscape": folder})
    from mia_serve.mindscape import Mindscape

    mindscape = Mindscape.load(folder)
    record = _facts(folder, mindscape)
    shown = [
        {"id": s.id, "title": s.title, "date": s.date, "chunks": len(s.chunk_ids), "summary": s.summary}
        for s in mindscape.sessions[:sessions]
    ]
    lines = [
        f"\n{s['id']}  {s['title']} {s['date']}".rstrip() + f"  ({s['chunks']} chunks)\n{s['summary']}\n" for s in shown
    ]
    emit(_lines(record) + "".join(lines), record | {"first_sessions": shown}, json_to)


def _book_files(folder: Path) -> list[Path]:
    check_folder(folder, "--books")
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"--books {str(folder)!r} holds no .txt file; give a folder with one file a book")
    return files


def _from_benchmark(name: str, split: str | None) -> Mindscape:
    from mia_serve.eval.datasets import load_benchmark

    # All books pooled: a mindscape is the whole collection, whatever a benchmark asks of each book.
    benchmark = load_benchmark(name, split, series=True)
    return benchmark.haystacks[0].mindscape


def _from_books(
    files: list[Path],
    encoder: Encoder,
    name: str,
    window: int,
    chunk_tokens: int,
    overlap: int,
    summaries: Summaries,
) -> Mindscape:
    from mia_serve.mindscape import Book, Mindscape, chunk_text, extractive_summaries, keyword_summaries

    books = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")  # without the mark that Windows editors put first
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 (byte {error.start}); convert it first") from error
        if not text.strip():
            raise ValueError(f"{file} is empty; remove it or give its text")
        pieces = chunk_text(text, encoder.tokenizer, chunk_tokens, overlap)
        title = file.stem.replace("_", " ").replace("-", " ")
        books.append(Book(file.stem, tuple(piece.text for piece in pieces), title))
    if summaries is Summaries.keywords:
        return Mindscape.from_books(books, window, summarise=keyword_summaries, summarizer="keywords")
    return Mindscape.from_books(
        books,
        window,
        summarise=lambda windows, titles: extractive_summaries(windows, titles, encoder),
        summarizer=f"extractive({name})",
    )


def _facts(folder: Path, mindscape: Mindscape) -> dict[str, object]:
    from mia_serve.mindscape.store import read_manifest

    vectors = read_manifest(folder)["vectors"]
    return {
        "mindscape": str(folder),
        "books": len({chunk.book_id for chunk in mindscape.chunks}),
        "sessions": len(mindscape.sessions),
        "chunks": len(mindscape.chunks),
        "characters": sum(len(chunk.text) for chunk in mindscape.chunks),
        "summarizer": mindscape.summarizer,
        "vectors": {name: {key: entry[key] for key in ("rows", "dim", "spec_hash")} for name, entry in vectors.items()},
    }


def _lines(record: dict[str, object]) -> str:
    vectors = record["vectors"]
    assert isinstance(vectors, dict)
    lines = [f"{name:<12}{record[name]}" for name in record if name != "vectors"]
    lines += [f"{'vectors':<12}{name}: {entry['rows']} x {entry['dim']}" for name, entry in vectors.items()]
    return "\n".join(lines) + "\n"
