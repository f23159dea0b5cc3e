"""``mia-serve eval locomo`` and ``longmemeval``: the chat-memory study."""

from __future__ import annotations

import dataclasses
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mia_serve.cli.common import (
    CacheOption,
    DeviceOption,
    JsonOption,
    cache_folder,
    check_apart,
    check_output,
    check_outside,
    emit,
    load_encoder,
    progress,
    write_file,
)
from mia_serve.core.errors import MiaError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mia_serve.core.cached_encoder import CachedEncoder
    from mia_serve.eval.conversations import ConversationBenchmark


class Evidence(StrEnum):
    """Ways to read LoCoMo's evidence."""

    strict = "strict"
    all = "all"
    audit = "audit"


EncoderOption = Annotated[str | None, typer.Option(metavar="NAME", help="Encoder of the dense side; none: BM25 alone.")]
StudyOption = Annotated[
    bool, typer.Option("--study", help="The whole study: poolings, lengths, summaries as index text, baselines.")
]
RerankerOption = Annotated[str | None, typer.Option(metavar="NAME", help="Cross-encoder that re-ranks the top ten.")]
QueryPrefixOption = Annotated[str | None, typer.Option(help="Text before questions; the encoder's by default.")]
DocumentPrefixOption = Annotated[str | None, typer.Option(help="Text before turns; the encoder's by default.")]
BootOption = Annotated[int, typer.Option("--n-boot", min=1, help="Resamples for the intervals.")]
PerQueryOption = Annotated[str | None, typer.Option(metavar="FILE", help="Write what every question scored.")]
TrecOption = Annotated[str | None, typer.Option(metavar="DIR", help="Write TREC run files and qrels.")]
PlotsOption = Annotated[str | None, typer.Option(metavar="DIR", help="Write pictures (PNG).")]


class _Asked(NamedTuple):
    """What both commands are asked for beside their data."""

    encoder: str | None
    study: bool
    reranker: str | None
    query_prefix: str | None
    document_prefix: str | None
    device: str
    cache: str | None
    n_boot: int
    seed: int
    json_to: str | None
    per_query: str | None
    trec: str | None
    plots: str | None
    folds: int = 5


def locomo(
    encoder: EncoderOption = None,
    study: StudyOption = False,
    evidence: Annotated[
        Evidence, typer.Option(help="Evidence that is one turn id (the study's), every id, or as audited.")
    ] = Evidence.strict,
    speaker: Annotated[bool, typer.Option(help="Begin a turn with its speaker's name.")] = True,
    captions: Annotated[bool, typer.Option("--captions", help="End a turn with its picture's caption.")] = False,
    reranker: RerankerOption = None,
    query_prefix: QueryPrefixOption = None,
    document_prefix: DocumentPrefixOption = None,
    device: DeviceOption = "auto",
    cache: CacheOption = None,
    n_boot: BootOption = 4000,
    seed: Annotated[int, typer.Option(min=0, help="Of the resamples.")] = 0,
    per_query: PerQueryOption = None,
    trec: TrecOption = None,
    plots: PlotsOption = None,
    json_to: JsonOption = None,
) -> None:
    """Rank LoCoMo's sessions for its questions: BM25, late interaction over turns, and their fusion."""
    asked = _Asked(
        encoder, study, reranker, query_prefix, document_prefix, device, cache, n_boot, seed, json_to, per_query, trec,
        plots,
    )  # fmt: skip
    _check(asked, _locomo_files())

    from mia_serve.eval.conversations import load_locomo

    _run(asked, load_locomo(evidence.value, speaker=speaker, captions=captions))


def longmemeval(
    data: Annotated[
        str, typer.Option(metavar="FILE|HUB_ID", help="LongMemEval's JSON file, or a data set: owner/name[:FILE].")
    ] = "xiaowu0162/longmemeval-cleaned",
    encoder: EncoderOption = None,
    study: StudyOption = False,
    abstention: Annotated[
        bool, typer.Option("--abstention", help="Keep questions without an answer (the study does).")
    ] = False,
    challenge: Annotated[
        bool, typer.Option("--challenge", help="Keep questions with more sessions than gold ones.")
    ] = False,
    sample: Annotated[int | None, typer.Option(min=1, help="Draw so many questions (the study: 150).")] = None,
    folds: Annotated[int, typer.Option(min=2, help="Parts of the questions, to choose alpha on the others.")] = 5,
    reranker: RerankerOption = None,
    query_prefix: QueryPrefixOption = None,
    document_prefix: DocumentPrefixOption = None,
    device: DeviceOption = "auto",
    cache: CacheOption = None,
    n_boot: BootOption = 4000,
    seed: Annotated[int, typer.Option(min=0, help="Of sample, folds and resamples.")] = 0,
    per_query: PerQueryOption = None,
    trec: TrecOption = None,
    plots: PlotsOption = None,
    json_to: JsonOption = None,
) -> None:
    """Rank the sessions of LongMemEval's questions, each among its own sessions."""
    asked = _Asked(
        encoder, study, reranker, query_prefix, document_prefix, device, cache, n_boot, seed, json_to, per_query, trec,
        plots, folds,
    )  # fmt: skip
    _check(asked, {"--data": data})

    from mia_serve.eval.conversations import load_longmemeval

    _run(asked, load_longmemeval(data, abstention=abstention, challenge=challenge, sample=sample, seed=seed))


def _locomo_files() -> dict[str, Path]:
    """Name every file that LoCoMo may be read from."""
    from mia_serve.eval.conversations import AUDIT_FILE
    from mia_serve.eval.datasets.base import DATA_SETTING
    from mia_serve.eval.datasets.locomo import FILE

    root = os.environ.get(DATA_SETTING)
    names = [f"{name}{end}" for name in (FILE, AUDIT_FILE) for end in ("", ".gz")]
    return {name: Path(root) / name for name in names} if root else {}


def _check(asked: _Asked, inputs: Mapping[str, str | Path]) -> None:
    """Refuse what could not be done, before hours of work."""
    files = {"--json": asked.json_to, "--per-query": asked.per_query}
    for what, path in files.items():
        check_output(path, what)
    if asked.per_query == "-":
        raise ValueError("--per-query - : give a file; stdout is for the table or --json -")
    folders = {"--trec": asked.trec, "--plots": asked.plots}
    for what, path in folders.items():
        if path is not None and path.strip() in ("", "-"):
            raise MiaError(f"{what} {path!r} is no folder; give one")
        if path is not None and Path(path).exists() and not Path(path).is_dir():
            raise MiaError(f"{what} {path!r} is a file; give a folder")
        if path is not None and not Path(path).is_dir():
            check_output(path, what)
    check_apart(files | folders, inputs)
    own = {what: None if path is None else Path(path) for what, path in folders.items()}
    check_outside(files | {what: path for what, path in inputs.items() if Path(path).is_file()}, own)
    if asked.encoder is None:
        needs = {
            "--reranker": asked.reranker,
            "--query-prefix": asked.query_prefix,
            "--document-prefix": asked.document_prefix,
            "--device": None if asked.device == "auto" else asked.device,
            "--cache": asked.cache,
        }
        lone = next((what for what, value in needs.items() if value is not None), None)
        if lone is not None:
            raise ValueError(f"{lone} without --encoder: it is for the dense side; give --encoder NAME")
    if asked.plots is not None:
        from mia_serve.eval.study_plots import check_matplotlib

        check_matplotlib()


def _run(asked: _Asked, benchmark: ConversationBenchmark) -> None:
    from mia_serve.core.names import resolve_folder
    from mia_serve.core.vector_cache import CacheReport
    from mia_serve.eval.study import RERANK_TOKENS, run_study
    from mia_serve.eval.study_tables import study_text

    outputs = {"--json": asked.json_to, "--per-query": asked.per_query, "--trec": asked.trec, "--plots": asked.plots}
    named = {"--encoder": asked.encoder, "--reranker": asked.reranker}
    check_outside(outputs, {what: resolve_folder(name) for what, name in named.items() if name is not None})
    say, report = progress(), CacheReport()
    encoder = reranker = None
    models: dict[str, Any] = {}
    if asked.encoder is not None:
        encoder, models["encoder"] = _encoder(asked, report, say)
    if asked.reranker is not None:
        from mia_serve.rerank import Reranker

        say(f"loading re-ranker: {asked.reranker}")
        reranker = Reranker.load(asked.reranker, asked.device, max_length=RERANK_TOKENS)
        models["reranker"] = {
            "name": asked.reranker,
            "max_length": reranker.max_length,
            "weights_sha256": _weights(asked.reranker),
        }
    found = run_study(
        benchmark,
        encoder,
        full=asked.study,
        reranker=reranker,
        models=models,
        device="cpu" if encoder is None else str(encoder.device),
        folds=asked.folds,
        n_boot=asked.n_boot,
        seed=asked.seed,
        progress=say,
    )
    text, record = study_text(found), found.to_dict()
    if encoder is not None:
        record["texts"] = report.to_dict()
        text += f"{report.to_text()}\n"
    if asked.per_query is not None:
        write_file(asked.per_query, found.query_lines())
    if asked.trec is not None:
        from mia_serve.eval.trec import trec_files

        _write_folder(asked.trec, trec_files(found))
    if asked.plots is not None:
        from mia_serve.eval.study_plots import study_plots

        _write_folder(asked.plots, study_plots(found))
    emit(text, record, asked.json_to)


def _encoder(asked: _Asked, report: Any, say: Callable[[str], None]) -> tuple[CachedEncoder, dict[str, Any]]:
    """Open the encoder, with other prefixes where they are asked for, and say what decides its vectors."""
    assert asked.encoder is not None
    folder = cache_folder(asked.cache)
    say(f"loading encoder: {asked.encoder}")
    plain = load_encoder(asked.encoder, asked.device)
    from mia_serve.core import Encoder
    from mia_serve.core.cached_encoder import CachedEncoder
    from mia_serve.eval.report import encoder_facts

    prefixes = {"query_prefix": asked.query_prefix, "document_prefix": asked.document_prefix}
    changed: dict[str, Any] = {name: value for name, value in prefixes.items() if value is not None}
    if changed:
        template = dataclasses.replace(plain.spec.template, **changed)
        plain = Encoder(plain.model, plain.tokenizer, plain.spec.with_changes(template=template), plain.device)
    facts = {
        "name": asked.encoder,
        **(encoder_facts(plain) or {}),
        "query_prefix": plain.spec.template.query_prefix,
        "document_prefix": plain.spec.template.document_prefix,
        "template_hash": plain.spec.template.hash,
        "dtype": str(plain.model.dtype).removeprefix("torch."),
        "weights_sha256": _weights(asked.encoder),
    }
    return CachedEncoder(plain, folder, report), facts


def _weights(name: str) -> dict[str, str]:
    """Return the SHA-256 of the weight files of a model, so that others can tell whether they have the same."""
    from mia_serve.core.names import resolve_folder
    from mia_serve.core.storage import sha256

    folder = resolve_folder(name)
    return {str(file.relative_to(folder)): sha256(file) for file in sorted(folder.rglob("*.safetensors"))}


def _write_folder(folder: str, files: dict[str, str] | dict[str, bytes]) -> None:
    Path(folder).mkdir(exist_ok=True)
    for name, content in files.items():
        write_file(Path(folder) / name, content)
