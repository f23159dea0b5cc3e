"""``mia-train silver``: training rows out of questions with answers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mia_serve.cli.common import DeviceOption, JsonOption, check_apart, check_output
from mia_serve.cli.llm_options import (
    ConcurrencyOption,
    LlmCacheOption,
    LlmOption,
    MaxTokens,
    ReplayOption,
    open_client,
)

if TYPE_CHECKING:
    from mia_serve.llm import ChatClient


class Filter(StrEnum):
    """Who chooses among the candidates."""

    llm = "llm"
    none = "none"


def silver(
    mindscape: Annotated[Path, typer.Option(metavar="DIR", help="Folder of `mia-serve mindscape build`.")],
    questions: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON lines: id, question, answer, and book to search that book only.")
    ],
    encoder: Annotated[str, typer.Option(help="Finds the candidates: folder, hub id or package:module/path.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Rows to write (.jsonl).")],
    nodes: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Entities, JSON lines: name, description, and optionally id and book."),
    ] = None,
    filter_: Annotated[
        Filter, typer.Option("--filter", help="llm: a language model chooses; none: the first of the vote are taken.")
    ] = Filter.llm,
    llm: LlmOption = None,
    llm_model: Annotated[Optional[str], typer.Option("--llm-model", help="Name of the model there.")] = None,  # noqa: UP045
    llm_cache: LlmCacheOption = None,
    replay: ReplayOption = False,
    concurrency: ConcurrencyOption = 32,
    max_tokens: MaxTokens = 512,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Chunks that each of the three queries finds.")] = 10,
    keep: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="With --filter none: silver chunks a question.  [default: 2]"),
    ] = None,
    hard: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=0,
            help="Hard negatives a row, most: candidates that are not silver. 5 with a language model; 0 without, "
            "where many of them would be false negatives.",
        ),
    ] = None,
    simple: Annotated[int, typer.Option(min=0, help="Simple negatives a row, drawn from the same book.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the simple negatives.")] = 0,
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Find silver evidence for questions whose evidence is not known, and write training rows.

    The question, the question with its answer and the answer alone each find --top-k chunks; a vote keeps 10
    candidates; a language model names those that support the answer. Counts go to OUT.report.json.
    With a language model OUT.work keeps all decisions: the same command goes on where it was, and asks nothing twice.
    """
    from mia_serve.core.errors import MiaError

    if out.suffix != ".jsonl":
        raise MiaError(f"--out {str(out)!r}: rows are written as .jsonl; give such a name")
    report_file, work = (out.with_name(out.name + end) for end in (".report.json", ".work"))
    written = {"--out": out, "the report": report_file, "the work file": work, "--json": json_to}
    check_apart(written | {"--llm-cache": llm_cache}, {"--questions": questions, "--nodes": nodes})
    for what, path in written.items():
        check_output(path, what)
    client = _client(filter_, llm, llm_model, llm_cache, replay, concurrency)
    if filter_ is Filter.llm and keep is not None:
        raise MiaError("--keep is for --filter none; with a language model, it says how many are kept")

    from mia_serve.llm import LlmFailed
    from mia_train.silver import SilverSettings, make_silver

    settings = SilverSettings(
        filter=filter_.value,
        top_k=top_k,
        candidates=10,
        keep=keep if keep is not None else 2,
        hard=hard,
        simple=simple,
        seed=seed,
        max_tokens=max_tokens,
    )
    inputs = _inputs(mindscape, questions, nodes, encoder, device)
    try:
        made = make_silver(**inputs, client=client, settings=settings, work=work)
    except LlmFailed as failure:
        kept = f"; what was answered is in {work}: the same command goes on from there" if work.exists() else ""
        typer.echo(f"error: {failure}{kept}", err=True)
        raise typer.Exit(1) from None
    _write(out, report_file, made.rows, made.report, json_to)


def _client(
    filter_: Filter, llm: str | None, model: str | None, cache: Path | None, replay: bool, concurrency: int
) -> ChatClient | None:
    from mia_serve.core.errors import MiaError

    if filter_ is Filter.none:
        if llm or model or cache or replay:
            raise MiaError("--llm, --llm-model, --llm-cache, --replay: no use with --filter none; leave them out")
        return None
    if not replay and not (llm and model):
        raise MiaError("--filter llm needs --llm URL and --llm-model NAME; without a language model take --filter none")
    return open_client(llm, model, cache, replay, concurrency)


def _inputs(folder: Path, questions: Path, nodes: Path | None, encoder: str, device: str) -> dict[str, Any]:
    """Read all inputs, the encoder last: what is wrong with the files is told before anything is encoded."""
    from mia_serve.cli.common import load_encoder
    from mia_serve.mindscape import Mindscape
    from mia_serve.mindscape.vectors import stored_vectors
    from mia_train.silver_input import chunk_units, read_nodes, read_questions

    opened = Mindscape.load(folder)
    books = {chunk.book_id for chunk in opened.chunks}
    inputs: dict[str, Any] = {
        "questions": read_questions(questions, books),
        "nodes": read_nodes(nodes, books) if nodes is not None else (),
        "chunks": chunk_units(opened),
    }
    model = load_encoder(encoder, device)
    return inputs | {"encoder": model, "vectors": stored_vectors(folder, "chunks", model)}


def _write(out: Path, report_file: Path, rows: list[Any], report: dict[str, Any], json_to: str | None) -> None:
    import json

    from mia_serve.cli.common import emit, write_file
    from mia_train.rows import write_rows

    write_file(report_file, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    failed = ", ".join(f"{count} {reason}" for reason, count in report["failed_by_reason"].items())
    if not rows:
        typer.echo(
            f"error: no rows: of {report['questions']} questions {report['dropped_none']} have no silver evidence, "
            f"{report['failed']} failed{f' ({failed})' if failed else ''}; see {report_file}",
            err=True,
        )
        raise typer.Exit(1)
    write_rows(out, rows)
    text = (
        f"{out}: {report['kept']} rows ({report['source']}) of {report['questions']} questions, "
        f"{report['silver_per_question']:.2f} silver chunks each; {report['dropped_none']} without evidence dropped, "
        f"{report['failed']} failed{f' ({failed})' if failed else ''}\n"
    )
    emit(text, report, json_to)
