"""``mia-serve eval``: measure on a benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mia_serve.cli import evaluate_qa, study
from mia_serve.cli.common import (
    AlphaOption,
    Backend,
    BackendOption,
    CacheOption,
    Candidates,
    Cover,
    CoverOption,
    CoverWeight,
    CoverWeightOption,
    Data,
    DeviceOption,
    Encoders,
    JsonOption,
    K0Option,
    KSumOption,
    PriorOption,
    cache_folder,
    check_output,
    chosen,
    emit,
    progress,
    run_defaults,
    write_file,
)
from mia_serve.cli.sweep import GridOption, SweepOption, SweepPlotsOption, check_sweep_outputs, write_sweep

if TYPE_CHECKING:
    from mia_serve.core import Encoder


app = typer.Typer(help="Measure on a benchmark.", no_args_is_help=True)
app.command("locomo")(study.locomo)
app.command("longmemeval")(study.longmemeval)
for _name in evaluate_qa.NAMES:
    app.command(_name)(evaluate_qa.qa)
app.command("tables")(evaluate_qa.tables)


@app.callback()
def _group() -> None:
    """Measure on a benchmark."""


@app.command("retrieval")
def retrieval(
    data: Annotated[Data, typer.Option(help="Benchmark.")] = Data.saltmarsh,
    split: Annotated[str | None, typer.Option(help="Split of the questions.")] = None,
    series: Annotated[bool, typer.Option("--series", help="Pool all books or conversations in one haystack.")] = False,
    encoder: Annotated[str | None, typer.Option(metavar="E2_DIR", help="E2, retriever of (query, signature).")] = None,
    e1: Annotated[str | None, typer.Option("--e1", help="E1; by default what E2 names, none drops it.")] = None,
    base: Annotated[str | None, typer.Option(help="Untrained; by default what E2 names, none drops it.")] = None,
    selector: Annotated[str | None, typer.Option(help="Encoder that chooses the signature; E1 by default.")] = None,
    alpha: AlphaOption = None,
    k0: K0Option = 50,
    k_sum: KSumOption = None,
    prior: PriorOption = 0.1,
    cover: CoverOption = Cover.member,
    cover_weight: CoverWeightOption = CoverWeight.e1_score,
    candidates: Annotated[Candidates, typer.Option(help="What E2 ranks.")] = Candidates.all,
    backend: BackendOption = Backend.auto,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Use N questions, spread evenly over the split.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the shuffled control and the resamples.")] = 0,
    n_boot: Annotated[int, typer.Option("--n-boot", min=1, help="Resamples for the intervals.")] = 10_000,
    oracle: Annotated[bool, typer.Option("--oracle", help="Add a row that is told the gold session.")] = False,
    per_query: Annotated[str | None, typer.Option(metavar="FILE", help="Write the scores of every question.")] = None,
    sweep: SweepOption = None,
    grid: GridOption = False,
    plots: SweepPlotsOption = None,
    json_to: JsonOption = None,
) -> None:
    """Print what E1, E2 and its signature are worth, with 95 % intervals over books or conversations."""
    check_output(json_to, "--json")
    check_output(per_query, "--per-query")
    if per_query == "-":
        raise ValueError("--per-query - : give a file; stdout is for the table or --json -")
    if sweep and (oracle or per_query is not None):
        raise ValueError(
            f"--{'oracle' if oracle else 'per-query'} with --sweep: a sweep has no such rows; leave it out"
        )
    check_sweep_outputs(sweep, grid, plots, json_to)
    if sweep:
        from mia_serve.eval.sweep import RETRIEVAL_FACTORS, parse_sweeps

        sweeps = parse_sweeps(sweep, RETRIEVAL_FACTORS)
    defaults = run_defaults(encoder)
    names = {
        "base": chosen(base, defaults.base),
        "e1": chosen(e1, defaults.e1),
        "e2": chosen(encoder, None),
        "selector": chosen(selector, None),
    }
    if names["base"] is None and names["e1"] is None:
        raise ValueError("no first-stage encoder: give --base or --e1 (the checkpoint of --encoder names neither)")

    encoders = Encoders(device, cache_folder(cache))

    # Only now what takes seconds to import: a mistyped option has been answered already.
    from mia_serve.core.names import resolve_folder
    from mia_serve.eval.datasets import load_benchmark
    from mia_serve.eval.retrieval import DEFAULT_ROWS, evaluate_retrieval

    say = progress()
    for name in filter(None, names.values()):
        resolve_folder(name)
    more = ["oracle"] if oracle else []
    if defaults.signature_mode == "global_summary":  # as E2 was trained
        more.append("global_summary")
    benchmark = load_benchmark(data.value, split, series, limit=limit)
    loaded: dict[str, Encoder | None] = {}
    for role, given in names.items():
        if given is not None:
            say(f"loading {role}: {given}")
        loaded[role] = None if given is None else encoders.open(given)
    if sweep:
        from mia_serve.eval.sweep_retrieval import sweep_retrieval

        first = loaded["e1"] or loaded["base"]
        assert first is not None
        swept = sweep_retrieval(
            benchmark,
            sweeps,
            e1=first,
            e2=loaded["e2"],
            selector=loaded["selector"],
            k0=k0,
            k_sum=k_sum or defaults.k_sum,
            alpha=alpha,
            prior=prior,
            grid=grid,
            n_boot=n_boot,
            seed=seed,
            progress=say,
            cover=cover.value,
            cover_weight=cover_weight.value,
            candidates=candidates.value,
            backend=backend.value,
        )
        write_sweep(swept, plots, json_to, {"names": names, "limit": limit, "texts": encoders.report.to_dict()})
        return
    report = evaluate_retrieval(
        benchmark,
        base=loaded["base"],
        e1=loaded["e1"],
        e2=loaded["e2"],
        selector=loaded["selector"],
        k0=k0,
        k_sum=k_sum or defaults.k_sum,
        prior=prior,
        cover=cover.value,
        cover_weight=cover_weight.value,
        alpha=alpha,
        candidates=candidates.value,
        backend=backend.value,
        seed=seed,
        rows=(*DEFAULT_ROWS, *more),
        n_boot=n_boot,
        progress=say,
    )
    record = report.to_dict()
    record["settings"] |= {"limit": limit, "device": device, "names": names}
    record["texts"] = encoders.report.to_dict()
    if per_query is not None:
        write_file(per_query, report.query_lines())
    emit(f"{report.to_text()}{encoders.report.to_text()}\n", record, json_to)
