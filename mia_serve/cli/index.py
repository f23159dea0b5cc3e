"""``mia-serve index``: build an index of chunks, change it, and look at it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

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
)

if TYPE_CHECKING:
    from mia_serve.cli.index_sources import FileSource, MindscapeSource

app = typer.Typer(help="Build, change and inspect vector indexes.", no_args_is_help=True)


class Stored(StrEnum):
    """How an index holds its vectors."""

    float32 = "float32"
    float16 = "float16"
    int8 = "int8"


IndexArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of `index build`.")]
SourceOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--mindscape", metavar="DIR", help="Take the chunks of a mindscape; metadata names their book."),
]
ChunksOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--chunks", metavar="FILE.jsonl", help='Or of a file: {"id", "text", "session", "metadata": {...}} a line.'
    ),
]
EncoderOption = Annotated[str, typer.Option(help="Encoder of the chunks: folder, hub id or package:module/path.")]


@app.command("build")
def build(
    encoder: EncoderOption,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder to write.")],
    mindscape: SourceOption = None,
    chunks: ChunksOption = None,
    storage: Annotated[Stored, typer.Option(help="Numbers of a vector: 4, 2 or 1 bytes each.")] = Stored.float32,
    replace: Annotated[bool, typer.Option("--replace", help="Put it in the place of an older index.")] = False,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Index the chunks of a mindscape or of a file; what is half-written is never opened."""
    check_output(json_to, "--json")
    check_outside({"--json": json_to}, {"--out": out})
    _check_source(mindscape, chunks, json_to)
    if not out.is_dir():
        check_output(out, "--out", overwrite=False)
    encoders = Encoders(device, cache_folder(cache))
    if not replace and _is_index(out):
        raise ValueError(f"--out {str(out)!r} exists; --replace puts a new index there, `index add` adds to it")
    source = _open_source(mindscape, chunks)
    model = encoders.open(encoder)
    from mia_serve.index.writer import IndexWriter

    options: dict[str, Any] = {"spec_hash": model.spec_hash, "storage": storage.value, "replace": replace}
    with _plain_warnings(), IndexWriter(out, model.dim, **options) as writer:
        for rows in source.blocks(model):
            writer.add(*rows)
        count = len(writer)
    record = {
        "index": str(out),
        "rows": count,
        "dim": model.dim,
        "storage": storage.value,
        "spec_hash": model.spec_hash,
        "encoder": encoder,
        "texts": encoders.report.to_dict(),
    }
    text = f"{out}: {count:,} chunks, dim {model.dim}, {storage.value}, encoder {model.spec_hash}\n"
    emit(text + encoders.report.to_text() + "\n", record, json_to)


@app.command("add")
def add(
    index: IndexArgument,
    encoder: EncoderOption,
    mindscape: SourceOption = None,
    chunks: ChunksOption = None,
    upsert: Annotated[bool, typer.Option("--upsert", help="Replace the chunks whose ids are in the index.")] = False,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Add chunks to an index: all of them, or on an error none."""
    check_output(json_to, "--json")
    check_outside({"--json": json_to}, {"the index": index})
    _check_source(mindscape, chunks, json_to)
    encoders = Encoders(device, cache_folder(cache))
    from mia_serve.index.store import read_generation

    read_generation(index)  # says what is wrong with the folder before the encoder is opened
    source = _open_source(mindscape, chunks)
    model = encoders.open(encoder)
    from mia_serve.index.writer import IndexWriter

    with _plain_warnings(), IndexWriter(index, model.dim, spec_hash=model.spec_hash) as writer:
        before = len(writer)
        if not upsert:
            source.check_new(writer)
        for rows in source.blocks(model):
            (writer.upsert if upsert else writer.add)(*rows)
        count = len(writer)
    added = count - before
    record = {
        "index": str(index),
        "rows": count,
        "added": added,
        "replaced": source.count - added,
        "spec_hash": model.spec_hash,
        "encoder": encoder,
        "texts": encoders.report.to_dict(),
    }
    text = f"{index}: {count:,} chunks; {added:,} added, {record['replaced']:,} replaced\n"
    emit(text + encoders.report.to_text() + "\n", record, json_to)


@app.command("delete")
def delete(
    index: IndexArgument,
    ids: Annotated[Optional[list[str]], typer.Argument(metavar="ID...", help="Ids of chunks.")] = None,  # noqa: UP045
    ids_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--ids-file", metavar="FILE", help="Ids, one a line."),
    ] = None,
    json_to: JsonOption = None,
) -> None:
    """Delete chunks by id: all of them, or where one is not in the index none; `index compact` frees their space."""
    check_output(json_to, "--json")
    check_outside({"--json": json_to}, {"the index": index})
    check_apart({"--json": json_to}, {"--ids-file": ids_file})
    names = list(ids or []) + (_read_ids(ids_file) if ids_file is not None else [])
    if not names:
        raise ValueError("no ids to delete; give some, or --ids-file FILE with one a line")
    from mia_serve.index.store import read_generation
    from mia_serve.index.writer import IndexWriter

    read_generation(index)
    with IndexWriter(index) as writer:
        writer.delete(names)
        count = len(writer)
    record = {"index": str(index), "rows": count, "deleted": len(names)}
    emit(f"{index}: {count:,} chunks; {len(names):,} deleted\n", record, json_to)


@app.command("compact")
def compact(index: IndexArgument, json_to: JsonOption = None) -> None:
    """Rewrite an index without its deleted rows, as one segment; row numbers stay."""
    check_output(json_to, "--json")
    check_outside({"--json": json_to}, {"the index": index})
    from mia_serve.index.store import read_generation
    from mia_serve.index.writer import IndexWriter

    read_generation(index)
    before = _bytes(index)
    with IndexWriter(index) as writer:
        writer.compact()
        count = len(writer)
    after = _bytes(index)
    record = {"index": str(index), "rows": count, "bytes_before": before, "bytes": after}
    emit(f"{index}: {count:,} chunks, {before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB now\n", record, json_to)


@app.command("info")
def info(
    index: IndexArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Check the vectors against their checksums.")] = False,
    json_to: JsonOption = None,
) -> None:
    """Print what an index holds and which encoder made it."""
    check_output(json_to, "--json")
    check_outside({"--json": json_to}, {"the index": index})
    from mia_serve.index.store import read_snapshot

    found = read_snapshot(index, verify=verify)
    alive = sum(int(segment.alive.sum()) for segment in found.segments)
    dead = sum(len(segment.ids) for segment in found.segments) - alive
    sessions = len({name for segment in found.segments for name in compress(segment.sessions, segment.alive)})
    size = _bytes(index)
    record = {
        "index": str(index),
        "rows": alive,
        "dead_rows": dead,
        "sessions": sessions,
        "segments": len(found.segments),
        "dim": found.dim,
        "storage": found.storage,
        "generation": found.generation,
        "spec_hash": found.spec_hash,
        "bytes": size,
        "verified": verify,
        "first_ids": list(islice((name for s in found.segments for name in compress(s.ids, s.alive)), 3)),
    }
    text = (
        f"{index}: {_counted(alive, 'chunk')} in {_counted(sessions, 'session')}, dim {found.dim}, {found.storage}, "
        f"encoder {found.spec_hash}\n"
        f"{_counted(dead, 'dead row')}, segments: {len(found.segments)}, generation {found.generation}, "
        f"{size / 2**20:.1f} MiB{', checksums agree' if verify else ''}\n"
    )
    emit(text, record, json_to)


def _open_source(mindscape: Path | None, chunks: Path | None) -> MindscapeSource | FileSource:
    from mia_serve.cli.index_sources import FileSource, MindscapeSource

    if mindscape is not None:
        return MindscapeSource(mindscape)
    assert chunks is not None  # _check_source
    return FileSource(chunks)


def _check_source(mindscape: Path | None, chunks: Path | None, json_to: str | None) -> None:
    if (mindscape is None) == (chunks is None):
        raise ValueError("give the chunks once: either --mindscape DIR or --chunks FILE.jsonl")
    if mindscape is not None:
        check_folder(mindscape, "--mindscape")
    check_outside({"--json": json_to}, {"--mindscape": mindscape})
    check_apart({"--json": json_to}, {"--chunks": chunks})


def _is_index(path: Path) -> bool:
    from mia_serve.index.store import read_generation

    try:
        read_generation(path)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings as lines for people, without the place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *place, **more: typer.echo(f"warning: {message}", err=True)
        yield


def _read_ids(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"--ids-file {str(path)!r}: no such file")
    try:
        # Not splitlines, which cuts at characters that an id may hold, such as U+2028.
        lines = [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"--ids-file {str(path)!r} is not UTF-8 (byte {error.start}); convert it first") from error
    return [line for line in lines if line.strip()]


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
