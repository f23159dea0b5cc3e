"""``mia-train mine``: rows in, rows with mined negatives out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mia_serve.cli.common import Backend, BackendOption, DeviceOption, JsonOption, check_apart, check_output, emit

if TYPE_CHECKING:
    import torch

    from mia_train.corpus import Source
    from mia_train.rescore import Teacher


class Sampling(StrEnum):
    """How hard negatives are taken from the candidates that are left."""

    top = "top"
    random = "random"


def mine(
    source: Annotated[
        str, typer.Argument(metavar="ROWS|BENCHMARK", help="Rows (.jsonl, .parquet), or NAME:train[:series].")
    ],
    encoder: Annotated[str, typer.Option(help="E1 that ranks the corpus: folder, hub id or package:module/path.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.jsonl", help="Rows to write.")],
    mindscape: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Corpus: the chunks of this mindscape; groups are its books.")
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help='Corpus: {"id", "text", "group"?} a line. Default: the rows\' passages.'
        ),
    ] = None,
    negatives: Annotated[int, typer.Option(help="Hard negatives a row.")] = 5,
    simple: Annotated[int, typer.Option(help="Simple negatives a row, from the groups of the positives.")] = 5,
    range_min: Annotated[int, typer.Option(help="Skip so many of the best candidates left.")] = 0,
    range_max: Annotated[
        int | None, typer.Option(help="Look at so many of the best candidates; range-min + 10 a negative by default.")
    ] = None,
    absolute_margin: Annotated[
        float | None, typer.Option(help="A negative scores at least this less than the lowest positive p.")
    ] = None,
    relative_margin: Annotated[
        float | None, typer.Option(help="A negative scores at most p - margin * |p|; 0.05 is a good start.")
    ] = None,
    max_score: Annotated[float | None, typer.Option(help="A negative scores at most this.")] = None,
    min_score: Annotated[float | None, typer.Option(help="A negative scores at least this.")] = None,
    sampling: Annotated[Sampling, typer.Option(help="Take the top candidates, or draw.")] = Sampling.top,
    within_group: Annotated[
        bool, typer.Option("--within-group", help="Hard negatives from the positives' groups only.")
    ] = False,
    cross_encoder: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Score anew with this cross-encoder; its scores are written.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(metavar="ENCODER", help="Score anew with this larger bi-encoder (cosine).")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep vectors here; a second run encodes nothing.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all draws, together with a row's query id.")] = 0,
    backend: BackendOption = Backend.auto,
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Replace the negatives of training rows by mined ones; shared over processes by accelerate launch -m mia_train."""
    from mia_serve.core.errors import MiaError

    _check_paths(source, out, mindscape, corpus, json_to)
    if cross_encoder is not None and teacher is not None:
        raise MiaError("--cross-encoder and --teacher both score; give one")
    if backend is Backend.faiss:
        from mia_serve.index.flat import import_faiss

        import_faiss()
    from mia_train.mining import MiningSettings, mine
    from mia_train.mining_report import format_report

    settings = MiningSettings(
        negatives=negatives,
        simple=simple,
        range_min=range_min,
        range_max=range_max,
        absolute_margin=absolute_margin,
        relative_margin=relative_margin,
        max_score=max_score,
        min_score=min_score,
        sampling=sampling.value,
        within_group=within_group,
        seed=seed,
    )
    if cross_encoder is None:
        settings.check_cosine()
    place, processes = _join(device)
    given = _open(source, mindscape, corpus)
    from dataclasses import asdict

    from mia_serve.cli.common import load_encoder
    from mia_train.distributed import is_main
    from mia_train.embedding import Embedder
    from mia_train.rows import write_rows

    try:
        shared = processes > 1
        embedder = Embedder(load_encoder(encoder, str(place)), cache, shared)
        scorer = _teacher(cross_encoder, teacher, place, cache, shared)
        rows, report = mine(
            given.rows,
            given.corpus,
            embedder,
            settings,
            haystacks=given.haystacks,
            teacher=scorer,
            backend=backend.value,
        )
        if is_main():
            write_rows(out, rows)
            record = {
                "source": source,
                "rows_file": str(out),
                "encoder": encoder,
                "spec_hash": embedder.encoder.spec_hash,
                "teacher": cross_encoder or teacher,
                "processes": processes,
                **asdict(report),
            }
            emit(f"{out}: mined with {encoder}\n{format_report(report)}", record, json_to)
    finally:
        if processes > 1:
            import torch.distributed

            torch.distributed.destroy_process_group()


def _check_paths(source: str, out: Path, mindscape: Path | None, corpus: Path | None, json_to: str | None) -> None:
    from mia_serve.core.errors import MiaError

    if out.suffix != ".jsonl":
        raise MiaError(f"--out {str(out)!r}: rows are written as .jsonl")
    check_apart({"--out": out, "--json": json_to}, {"the rows that are read": source, "--corpus": corpus})
    if mindscape is not None and corpus is not None:
        raise MiaError("--mindscape and --corpus both name the corpus; give one")
    try:
        check_output(out, "--out")
        check_output(json_to, "--json")
    except ValueError as error:
        raise MiaError(str(error)) from None


def _open(source: str, mindscape: Path | None, corpus: Path | None) -> Source:
    """Read rows and corpus."""
    from mia_serve.core.errors import MiaError
    from mia_train.corpus import Source, corpus_of_mindscape, corpus_of_rows, read_corpus, source_of_benchmark
    from mia_train.data import open_benchmark
    from mia_train.rows import read_rows
    from mia_train.schema import TRAIN_BENCHMARKS, is_row_file, parse_benchmark

    if is_row_file(source):
        rows = read_rows([source])
        given = Source(rows, [], [""] * len(rows))
    else:
        try:
            reference = parse_benchmark(source, TRAIN_BENCHMARKS)
        except ValueError as error:
            raise MiaError(str(error)) from None
        if reference.split != "train":
            raise MiaError(f"{source!r}: only '{reference.name}:train' (or ':train:series') is for training")
        given = source_of_benchmark(open_benchmark(source))
    if mindscape is not None:
        from mia_serve.mindscape import Mindscape

        return Source(given.rows, corpus_of_mindscape(Mindscape.load(mindscape)), [""] * len(given.rows))
    if corpus is not None:
        return Source(given.rows, read_corpus(corpus), [""] * len(given.rows))
    return given if given.corpus else given._replace(corpus=corpus_of_rows(given.rows))


def _join(device: str) -> tuple[str | torch.device, int]:
    """Join the other processes, if there are any; return this one's device and how many there are."""
    import os
    from datetime import timedelta

    from mia_train.launch import check_world, prepare_launch, process_count

    # Alone, the launch is checked but not changed: it would hide all GPUs but one, and --device may name another.
    if prepare_launch(dict(os.environ) if process_count() == 1 else None) == 1:
        return device, 1

    from accelerate import PartialState

    on_cpu = device == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    # Rank 0 searches alone while the others wait; with millions of passages that outlasts any default.
    state = PartialState(cpu=on_cpu, timeout=timedelta(days=2))
    check_world(state.num_processes)
    return state.device, state.num_processes


def _teacher(
    cross_encoder: str | None, encoder: str | None, device: str | torch.device, cache: Path | None, shared: bool
) -> Teacher | None:
    if cross_encoder is not None:
        from mia_train.rescore import CrossEncoderTeacher

        return CrossEncoderTeacher(cross_encoder, device, shared)
    if encoder is None:
        return None
    from mia_serve.cli.common import load_encoder
    from mia_train.embedding import Embedder
    from mia_train.rescore import EncoderTeacher

    return EncoderTeacher(Embedder(load_encoder(encoder, str(device)), cache, shared))
