"""``mia-serve eval nocha`` and the other question-answering benchmarks, and ``eval tables`` over several runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mia_serve.cli.common import (
    AlphaOption,
    AnswerModes,
    CacheOption,
    DeviceOption,
    Encoders,
    JsonOption,
    K0Option,
    KSumOption,
    PriorOption,
    SignatureUpdates,
    cache_folder,
    check_output,
    check_outside,
    chosen,
    emit,
    progress,
    run_defaults,
    write_file,
)
from mia_serve.cli.llm_options import (
    CONCURRENCY,
    BudgetOption,
    ConcurrencyOption,
    GuidedOption,
    LlmCacheOption,
    LlmModelOption,
    LlmOption,
    MaxTokens,
    PriceOption,
    ReplayOption,
    cost_text,
    open_client,
)
from mia_serve.cli.sweep import GridOption, SweepOption, SweepPlotsOption, check_sweep_outputs

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.core.cached_encoder import CachedEncoder
    from mia_serve.eval.qa_data import QaBenchmark
    from mia_serve.eval.qa_run import QaPlan
    from mia_serve.eval.sweep import Sweep, Value
    from mia_serve.llm import ChatClient

#: Benchmarks, each a command of this name.
NAMES = ("nocha", "literaryqa", "narrativeqa", "detectiveqa", "novelhopqa", "fairytaleqa")
BASE = "all-MiniLM-L6-v2"


class Summarizers(StrEnum):
    """Who writes the session summaries."""

    extractive = "extractive"
    llm = "llm"


class _Asked(NamedTuple):
    """The options that decide what is loaded; the others are settings of the run."""

    name: str
    split: str | None
    series: bool | Path
    data: Path | None
    limit: int | None
    evidence: Path | None
    names: dict[str, str | None]
    out: Path


def qa(
    ctx: typer.Context,
    llm: LlmOption = None,
    llm_model: LlmModelOption = None,
    encoder: Annotated[
        str | None,
        typer.Option(metavar="E2_DIR", help="E2, retriever of (query, signature); without it σ is a prior on E1."),
    ] = None,
    e1: Annotated[str | None, typer.Option("--e1", help="E1; by default what E2 names, none drops it.")] = None,
    base: Annotated[
        str | None,
        typer.Option(help=f"Untrained; by default what E2 names, else {BASE}; none drops it."),
    ] = None,
    selector: Annotated[str | None, typer.Option(help="Encoder that chooses the signature; E1 by default.")] = None,
    agent: Annotated[bool, typer.Option("--agent", help="Add the agent loop, with and without σ.")] = False,
    systems: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Rows to run, separated by commas, or all."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the benchmark's files; that of $MIA_DATA by default."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the questions.")] = None,
    series: Annotated[bool, typer.Option("--series", help="Ask all books of an author together.")] = False,
    series_map: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Series instead by a JSON file {name: [ids of books]}."),
    ] = None,
    evidence: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Silver evidence (`mia-train silver`) as gold where it has rows."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Most questions, spread evenly over the books; pairs stay together."),
    ] = None,
    mode: Annotated[
        AnswerModes | None,
        typer.Option(help="Prompts of MiA-RAG and the agent; by default chunks+sig, and the paper's best."),
    ] = None,
    k: Annotated[int, typer.Option("-k", "--k", min=1, help="Passages that an answer is written from.")] = 10,
    k0: K0Option = 50,
    k_sum: KSumOption = None,
    alpha: AlphaOption = None,
    prior: PriorOption = 0.1,
    n_stop: Annotated[int, typer.Option("--n-stop", min=1, help="Most steps of the agent.")] = 3,
    signature_update: Annotated[
        SignatureUpdates, typer.Option("--signature-update", help="How the agent's σ changes.")
    ] = SignatureUpdates.select,
    rewrite_query: Annotated[
        bool, typer.Option("--rewrite-query/--no-rewrite-query", help="Whether the agent rewrites its query.")
    ] = True,
    summarizer: Annotated[Summarizers, typer.Option(help="Who writes session summaries.")] = Summarizers.extractive,
    window: Annotated[int, typer.Option(min=1, help="Chunks in a session.")] = 20,
    chunk_tokens: Annotated[
        int | None,
        typer.Option("--chunk-tokens", min=8, help="Most tokens in a chunk; the paper's, or what the encoders read."),
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that neighbouring chunks share; the paper's, in proportion."),
    ] = None,
    max_tokens: MaxTokens = 512,
    guided: GuidedOption = False,
    context_tokens: Annotated[
        int | None,
        typer.Option(
            "--context-tokens", min=64, help="Tokens of prompt and reply together; what the endpoint says by default."
        ),
    ] = None,
    llm_cache: LlmCacheOption = None,
    replay: ReplayOption = False,
    concurrency: ConcurrencyOption = CONCURRENCY,
    budget: BudgetOption = None,
    price: PriceOption = None,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    n_boot: Annotated[int, typer.Option("--n-boot", min=1, help="Resamples for the intervals.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the resamples.")] = 0,
    sweep: SweepOption = None,
    grid: GridOption = False,
    plots: SweepPlotsOption = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="RUN", help="Folder of the run.  [default: runs/eval-NAME]"),
    ] = None,
    json_to: JsonOption = None,
) -> None:
    """Answer a benchmark's questions from its books; without --llm, only retrieve.

    A run that was stopped, however, goes on when the same command is given again.
    """
    name = ctx.info_name or ""
    folder = out if out is not None else Path("runs") / f"eval-{name}"
    check_output(json_to, "--json")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {str(folder)!r} is a file; give a folder")
    check_outside({"--json": json_to, "--plots": plots}, {"--out": folder})
    _check_cache(llm_cache, folder)
    check_sweep_outputs(sweep, grid, plots, json_to)
    sweeps = _sweeps(sweep)
    if series and series_map is not None:
        raise ValueError("--series and --series-map: give one of them")
    if llm is None and not replay:
        _check_needs_llm(agent, summarizer, llm_model, llm_cache)
    defaults = run_defaults(encoder)
    names = {
        "base": chosen(base, defaults.base or BASE),
        "e1": chosen(e1, defaults.e1),
        "e2": chosen(encoder, None),
        "selector": chosen(selector, None),
    }
    if names["base"] is None and names["e1"] is None:
        raise ValueError("no first-stage encoder: give --base or --e1")

    from mia_serve.eval.qa_systems import available

    there = {role: names[role] is not None for role in ("base", "e1", "e2")}
    keys = available(_systems(systems, agent, llm is not None or replay), **there, llm=llm is not None or replay)
    asked = _Asked(name, split, series_map or series, data, limit, evidence, names, folder)
    benchmark = _load(asked)
    client = _client(asked, llm, llm_model, llm_cache, replay, concurrency, budget)
    encoders = Encoders(device, cache_folder(cache))
    opened = _open_encoders(encoders, names)

    from mia_serve.eval.qa import QaSettings, chunk_size

    size, shared = chunk_size(benchmark, opened, chunk_tokens, overlap)
    settings = QaSettings(
        k=k,
        k0=k0,
        k_sum=k_sum or defaults.k_sum,
        alpha=alpha,
        prior=prior,
        mode=None if mode is None else mode.value,
        n_stop=n_stop,
        rewrite_query=rewrite_query,
        signature_update=signature_update.value,
        window=window,
        chunk_tokens=size,
        overlap=shared,
        summarizer=summarizer.value,
        max_tokens=max_tokens,
        guided=guided,
        context_tokens=context_tokens,
    )
    plan = _plan(asked, benchmark, settings, keys, opened, client, n_boot, seed)
    record, study = _run(plan, client, sweeps, grid)

    from mia_serve.eval.qa_tables import run_text

    record["texts"] = encoders.report.to_dict()
    text = run_text(record)
    if study is not None:
        record["sweep"] = study.to_dict()
        write_file(folder / "sweep.json", study.to_json())
        _write_plots(study, plots)
        text += f"\n{study.to_text()}"
    text += f"{encoders.report.to_text()}\n"
    if client is not None:
        text += cost_text(client.stats, price)
    emit(text + f"Run: {folder} (page: mia-serve report {folder})\n", record, json_to)


def tables(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    json_to: JsonOption = None,
) -> None:
    """Print several benchmarks' runs as the paper's tables 1 and 2, beside its figures, and what answers RQ1-RQ3."""
    check_output(json_to, "--json")
    from mia_serve.eval.paper_tables import paper_record, paper_text
    from mia_serve.eval.qa_folder import read_run

    records = [read_run(run) for run in runs]
    emit(paper_text(records), paper_record(records), json_to)


def _check_needs_llm(agent: bool, summarizer: Summarizers, model: str | None, cache: Path | None) -> None:
    """Refuse what only a language model can do where there is none."""
    needs = {
        "--agent": agent or None,
        "--summarizer llm": summarizer is Summarizers.llm or None,
        "--llm-model": model,
        "--llm-cache": cache,
    }
    lone = next((what for what, value in needs.items() if value is not None), None)
    if lone is not None:
        raise ValueError(f"{lone} needs a language model: give --llm URL (`mia-serve llm up MODEL` starts one)")


def _check_cache(file: Path | None, run: Path) -> None:
    """Refuse replies under the name of another file of the run, which the run would replace or add to."""
    from mia_serve.eval.qa_folder import REPLIES

    if file is None or file.resolve() == (run / REPLIES).resolve():
        return
    if run.resolve() in file.resolve().parents:
        raise ValueError(f"--llm-cache {str(file)!r} lies in the run's folder: leave it out for {REPLIES} there")


def _systems(option: str | None, agent: bool, answers: bool) -> tuple[str, ...]:
    """Return the rows that are asked for; with --agent its two are among them."""
    from mia_serve.eval.qa_systems import AGENT, DEFAULT, LABELS, RETRIEVAL

    keys: tuple[str, ...] = DEFAULT if answers else RETRIEVAL
    if option is not None:
        keys = tuple(key.strip() for key in option.split(",") if key.strip())
    return tuple(LABELS) if keys == ("all",) else (*keys, *(AGENT if agent else ()))


def _load(asked: _Asked) -> QaBenchmark:
    from mia_serve.core.names import resolve_folder
    from mia_serve.eval.qa_data import load_qa

    for model in filter(None, asked.names.values()):
        resolve_folder(model)
    return load_qa(
        asked.name,
        asked.split,
        series=asked.series,
        data_dir=asked.data,
        limit=asked.limit,
        evidence=asked.evidence,
    )


def _client(
    asked: _Asked,
    llm: str | None,
    model: str | None,
    cache_file: Path | None,
    replay: bool,
    concurrency: int,
    budget: int | None,
) -> ChatClient | None:
    """Open the client; its replies are kept in the run's folder where no other file is named."""
    if llm is None and not replay:
        return None
    from mia_serve.eval.qa_folder import REPLIES

    if not replay:
        asked.out.mkdir(parents=True, exist_ok=True)
    return open_client(llm, model, cache_file or asked.out / REPLIES, replay, concurrency, budget)


def _open_encoders(encoders: Encoders, names: dict[str, str | None]) -> dict[str, CachedEncoder | None]:
    say = progress()
    opened: dict[str, CachedEncoder | None] = {}
    for role, given in names.items():
        if given is not None:
            say(f"loading {role}: {given}")
        opened[role] = None if given is None else encoders.open(given)
    return opened


def _plan(
    asked: _Asked,
    benchmark: QaBenchmark,
    settings: Any,
    systems: tuple[str, ...],
    opened: dict[str, CachedEncoder | None],
    client: ChatClient | None,
    n_boot: int,
    seed: int,
) -> QaPlan:
    from mia_serve.eval.qa import extractive_summariser, llm_summariser
    from mia_serve.eval.qa_run import QaEncoders, QaPlan

    roles: dict[str, Encoder | None] = dict(opened)
    encoders = QaEncoders(**roles)
    name = asked.names["e1"] or asked.names["base"] or ""
    summarise = extractive_summariser(encoders.first, name)
    if settings.summarizer == Summarizers.llm.value:
        assert client is not None  # _check_needs_llm
        summarise = llm_summariser(client, encoders.first)
    return QaPlan(
        benchmark=benchmark,
        settings=settings,
        systems=systems,
        encoders=encoders,
        client=client,
        summarise=summarise,
        folder=asked.out,
        asked={"limit": asked.limit, "series": bool(asked.series)},
        names=asked.names,
        n_boot=n_boot,
        seed=seed,
    )


def _sweeps(sweep: list[str] | None) -> dict[str, tuple[Value, ...]]:
    if not sweep:
        return {}
    from mia_serve.eval.sweep import parse_sweeps

    return parse_sweeps(sweep)


def _write_plots(study: Sweep, plots: str | None) -> None:
    if plots is None:
        return
    from mia_serve.eval.sweep_plots import sweep_plots

    drawn = sweep_plots(study)
    Path(plots).mkdir(exist_ok=True)
    for name, picture in drawn.items():
        write_file(Path(plots) / name, picture)


def _run(
    plan: QaPlan, client: ChatClient | None, sweeps: dict[str, tuple[Value, ...]], grid: bool
) -> tuple[dict[str, Any], Sweep | None]:
    import asyncio
    from contextlib import nullcontext

    from mia_serve.eval.qa_run import run_qa
    from mia_serve.eval.qa_sweep import sweep_qa

    async def work() -> tuple[dict[str, Any], Sweep | None]:
        async with client or nullcontext():
            if sweeps:
                return await sweep_qa(plan, sweeps, grid=grid, say=progress())
            return await run_qa(plan, progress()), None

    return asyncio.run(work())
