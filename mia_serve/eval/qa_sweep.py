"""The sensitivity study of question answering: the run of a benchmark again for each value of a setting.

Every setting is a run of its own in ``RUN/sweep``, resumable as all runs are. Chunk vectors are made once, and all runs
share the language model's recorded replies, so that equal prompts are asked once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.qa import Progress
from mia_serve.eval.qa_data import QaQuestion
from mia_serve.eval.qa_folder import finished
from mia_serve.eval.qa_metrics import LENGTH, PAIR_ACCURACY, metric_names, unit_values
from mia_serve.eval.qa_run import QaPlan, run_qa
from mia_serve.eval.qa_systems import AGENT, label
from mia_serve.eval.qa_tables import metric_label
from mia_serve.eval.sweep import FACTORS, Scores, Setting, Sweep, Value, summarise_sweep
from mia_serve.eval.sweep import plan as plan_settings
from mia_serve.llm import Journal

_SIGMA = ("sig_first_k", "sig", "mia_rag", "mia_rag_auto", "agent")
#: Systems whose answers a factor can change.
_CONCERNS: dict[str, tuple[str, ...]] = {
    "k0": _SIGMA,
    "k_sum": _SIGMA,
    "window": (*_SIGMA, "summary_only", "raptor", "gist"),
    "alpha": _SIGMA,
    "prior": _SIGMA,
    "n_stop": AGENT,
}


async def sweep_qa(
    run: QaPlan,
    sweeps: Mapping[str, Sequence[Value]],
    *,
    grid: bool = False,
    say: Progress = lambda line: None,
) -> tuple[dict[str, Any], Sweep]:
    """Run the default setting in the run's folder, then every other one, and compare.

    Args:
        run: The run with the default setting.
        sweeps: What `parse_sweeps` returns.
        grid: Run all combinations, not one factor at a time.
        say: Called with a line at each step.

    Returns:
        The record of the default's run, and the study.

    Raises:
        MiaError: No system depends on a factor; else as `run_qa`.
    """
    default = default_setting(run)
    settings = plan_settings(sweeps, default, grid)
    for name in sweeps:
        concerned(run.systems, [name])  # a factor that concerns none is told before any work
    systems = concerned(run.systems, sweeps)
    record = await run_qa(run, say)
    scores = {default: _scores(run, systems)}
    for number, setting in enumerate(settings[1:], 1):
        say(f"setting {number} of {len(settings) - 1}: {_name(setting, default)}")
        varied = [name for name in sweeps if getattr(setting, name) != getattr(default, name)]
        other = _variant(run, setting, default, concerned(run.systems, varied))
        await run_qa(other, say)
        scores[setting] = _scores(other, other.systems)
    names = [name for name in _metrics(run) if name != LENGTH]
    study = summarise_sweep(
        scores,
        [question.book for question in _questions(run)],
        sweeps,
        default=default,
        systems={key: label(key, run.encoders.e2 is not None) for key in systems},
        metrics={name: metric_label(name) for name in names},
        benchmark=record["benchmark"],
        grid=grid,
        facts={"encoders": record["encoders"], "llm": record["llm"], "versions": record["versions"]},
        n_boot=run.n_boot,
        seed=run.seed,
    )
    return record, study


def default_setting(run: QaPlan) -> Setting:
    """Return the run's settings as a sweep's default; None for what none of its systems depends on."""
    settings, e2 = run.settings, run.encoders.e2
    return Setting(
        k0=settings.k0,
        k_sum=settings.k_sum,
        window=settings.window,
        alpha=None if e2 is None else e2.spec.alpha if settings.alpha is None else settings.alpha,
        prior=settings.prior if e2 is None else None,
        n_stop=settings.n_stop if set(AGENT) & set(run.systems) else None,
    )


def concerned(systems: Sequence[str], factors: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    """Return the systems whose answers one of the factors can change.

    Raises:
        MiaError: There is none.
    """
    found = tuple(key for key in systems if any(key in _CONCERNS[name] for name in factors))
    if not found:
        raise MiaError(f"--sweep {', '.join(factors)}: no system of this run depends on it; add --agent or --systems")
    return found


def _variant(run: QaPlan, setting: Setting, default: Setting, systems: tuple[str, ...]) -> QaPlan:
    changed = {name: getattr(setting, name) for name in FACTORS if getattr(setting, name) != getattr(default, name)}
    same_sessions = setting.window == default.window
    return replace(
        run,
        settings=replace(run.settings, **changed),
        systems=systems,
        folder=run.folder / "sweep" / _name(setting, default),
        mindscapes=run.folder / "mindscapes" if same_sessions else None,
    )


def _name(setting: Setting, default: Setting) -> str:
    changed = (name for name in FACTORS if getattr(setting, name) != getattr(default, name))
    return ",".join(f"{name}={getattr(setting, name)}" for name in changed)


def _scores(run: QaPlan, systems: Sequence[str]) -> Scores:
    journal = Journal(run.folder / "answers.jsonl")
    done = finished(journal, systems, standing=False)
    questions = _questions(run)
    return Scores({key: {name: _by_question(done[key], questions, name) for name in _metrics(run)} for key in systems})


def _by_question(
    records: Mapping[str, Mapping[str, Any]], questions: Sequence[QaQuestion], metric: str
) -> list[float | None]:
    """Return one value a question; that of a pair stands at its first claim."""
    values = unit_values(records, questions, metric).values
    if metric != PAIR_ACCURACY:
        return values
    pairs = iter(values)
    first: set[str | None] = {None}
    placed: list[float | None] = []
    for question in questions:
        placed.append(None if question.pair in first else next(pairs))
        first.add(question.pair)
    return placed


def _questions(run: QaPlan) -> list[QaQuestion]:
    return list(run.benchmark.questions)


def _metrics(run: QaPlan) -> list[str]:
    return metric_names(_questions(run), run.settings.k, run.client is not None)
