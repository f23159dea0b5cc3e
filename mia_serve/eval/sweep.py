"""Sensitivity to the method's settings, one at a time around the defaults, with paired differences to them.

The paper's K₀ = 50, K_sum = 5, W = 20, α = 0.5 and N_stop = 3 come without such a study (arXiv 2605.06416).
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from mia_serve.core.errors import MiaError
from mia_serve.eval.bootstrap import Interval, cluster_bootstrap, paired_bootstrap

AUTO = "auto"
Value = int | float | str


@dataclass(frozen=True)
class Setting:
    """One choice of everything that can be swept; None where a benchmark has no use for it.

    Attributes:
        k0: Chunks that E1 hands to the pool, K₀.
        k_sum: Most sessions in a signature, K_sum, or "auto" (see `Retriever`).
        window: Chunks of a book in one session, W.
        alpha: Weight of E2's signature view, α.
        prior: Weight of the signature as a prior, β.
        n_stop: Most searches of the agent for one question, N_stop.
    """

    k0: int = 50
    k_sum: int | Literal["auto"] = 5
    window: int | None = None
    alpha: float | None = None
    prior: float | None = None
    n_stop: int | None = None


FACTORS: tuple[str, ...] = tuple(field.name for field in fields(Setting))
#: Those that retrieval depends on, without an agent.
RETRIEVAL_FACTORS = ("k0", "k_sum", "window", "alpha", "prior")
#: How a factor is written for people.
FACTOR_LABELS = {
    "k0": "K₀, chunks that form the pool",
    "k_sum": "K_sum, most sessions in a signature",
    "window": "W, chunks in a session",
    "alpha": "alpha, weight of E2's signature view",
    "prior": "beta, weight of the signature as a prior",
    "n_stop": "N_stop, most searches of the agent",
}
_MOST = {"alpha": 1.0}  # greatest value allowed; others have none


class Scores(NamedTuple):
    """What one setting scored.

    Attributes:
        metrics: System -> metric -> one value a question, in one order for all settings; None where there is none.
        facts: System -> further means of this setting, such as the size of its signatures.
    """

    metrics: Mapping[str, Mapping[str, Sequence[float | None]]]
    facts: Mapping[str, Mapping[str, float]] = {}


@dataclass(frozen=True)
class SweepRow:
    """Hold what one system scored under one setting, and its paired differences to the default setting."""

    system: str
    setting: Setting
    metrics: dict[str, Interval]
    differences: dict[str, Interval] | None
    facts: dict[str, float]


@dataclass(frozen=True)
class Sweep:
    """Hold a sensitivity study.

    Attributes:
        benchmark: Name, split and counts.
        default: The setting that others are compared to.
        factors: Factor -> its values, the default's among them, in ascending order.
        grid: Whether all combinations were run, and not one factor at a time.
        systems: Key -> label.
        metrics: Key -> label.
        rows: One a setting and system; only those of the systems that a setting concerns.
        notes: What a reader must know.
        facts: Seed, resamples, encoders, versions and the like.
    """

    benchmark: dict[str, Any]
    default: Setting
    factors: dict[str, tuple[Value, ...]]
    grid: bool
    systems: dict[str, str]
    metrics: dict[str, str]
    rows: tuple[SweepRow, ...]
    notes: tuple[str, ...]
    facts: dict[str, Any]

    def row(self, system: str, setting: Setting) -> SweepRow | None:
        """Return a system's row under a setting; None where the setting does not concern the system."""
        return next((row for row in self.rows if (row.system, row.setting) == (system, setting)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the study ready for JSON."""
        record = asdict(self)
        for row in record["rows"]:
            for metric, found in (row["differences"] or {}).items():
                row["differences"][metric] = found | {"excludes_zero": Interval(**found).excludes_zero}
        return record

    def to_json(self) -> str:
        """Return the study as JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_text(self) -> str:
        """Lay the study out for a terminal, at most 100 columns wide."""
        from mia_serve.eval.sweep_table import sweep_text

        return sweep_text(self)


def parse_sweeps(given: Iterable[str], allowed: Sequence[str] = FACTORS) -> dict[str, tuple[Value, ...]]:
    """Read ``--sweep`` options such as ``k_sum=1,3,5`` or ``alpha=0,.25,.5``.

    Args:
        given: The options, one a factor.
        allowed: Factors that this measurement can vary.

    Returns:
        Factor -> its values, each once, in ascending order ("auto" last).

    Raises:
        MiaError: A factor is unknown, not one of ``allowed`` or given twice, or a value is not one for it.
    """
    sweeps: dict[str, tuple[Value, ...]] = {}
    for option in given:
        name, equals, listed = option.partition("=")
        name = name.strip().lower().replace("-", "_")
        if not equals or name not in allowed:
            what = f"{name!r} cannot be varied here" if name in FACTORS else f"unknown setting {name!r}"
            problem = what if equals else "no values"
            raise MiaError(f"--sweep {option!r}: {problem}; give NAME=VALUE,VALUE with NAME of {', '.join(allowed)}")
        if name in sweeps:
            raise MiaError(f"--sweep {name} is given twice; list all of its values in one")
        sweeps[name] = _ascending(_value(name, text.strip(), option) for text in listed.split(","))
    return sweeps


def plan(sweeps: Mapping[str, Sequence[Value]], default: Setting, grid: bool = False) -> tuple[Setting, ...]:
    """Name the settings to run: the default first, then each factor's other values around it, or the whole grid.

    Args:
        sweeps: What `parse_sweeps` returns.
        default: The setting to compare with; its value joins each factor's.
        grid: Run all combinations.

    Returns:
        Distinct settings.

    Raises:
        MiaError: The default has no value for a factor.
    """
    for name in sweeps:
        if getattr(default, name) is None:
            raise MiaError(f"--sweep {name}: nothing here depends on it")
    found = [default]
    if grid:
        values = with_default(sweeps, default)
        found += [changed(default, zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    else:
        found += [changed(default, [(name, value)]) for name, values in sweeps.items() for value in values]
    return tuple(dict.fromkeys(found))


def changed(setting: Setting, values: Iterable[tuple[str, Value]]) -> Setting:
    """Return a setting with other values of some factors."""
    given: dict[str, Any] = dict(values)
    return replace(setting, **given)


def with_default(sweeps: Mapping[str, Sequence[Value]], default: Setting) -> dict[str, tuple[Value, ...]]:
    """Return each factor's values with the default's among them, in ascending order."""
    return {name: _ascending([*values, getattr(default, name)]) for name, values in sweeps.items()}


def summarise_sweep(
    scores: Mapping[Setting, Scores],
    groups: Sequence[Hashable],
    sweeps: Mapping[str, Sequence[Value]],
    *,
    default: Setting,
    systems: Mapping[str, str],
    metrics: Mapping[str, str],
    benchmark: Mapping[str, Any],
    grid: bool = False,
    notes: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
    n_boot: int = 10_000,
    seed: int = 0,
) -> Sweep:
    """Take means with intervals, and paired differences to the default, of what every setting scored.

    Args:
        scores: What the settings of `plan` scored, the default's included.
        groups: Book or conversation of each question: what is resampled.
        sweeps: What `parse_sweeps` returns.
        default: The setting to compare with.
        systems: Key -> label, in the order of the table.
        metrics: Key -> label.
        benchmark: Facts of the benchmark; ``name`` and ``split`` are printed.
        grid: Whether the settings are all combinations.
        notes: What a reader must know.
        facts: Further facts for the record.
        n_boot: Resamples for the intervals.
        seed: Of the resamples.

    Raises:
        MiaError: A setting has other than one value a question.
    """
    rows = []
    for setting, found in scores.items():
        for system in systems:
            if system not in found.metrics:
                continue
            own, base = found.metrics[system], scores[default].metrics[system]
            means = {m: cluster_bootstrap(own[m], groups, n_boot=n_boot, seed=seed) for m in metrics}
            differences = None
            if setting != default:
                differences = {m: paired_bootstrap(own[m], base[m], groups, n_boot=n_boot, seed=seed) for m in metrics}
            rows.append(SweepRow(system, setting, means, differences, dict(found.facts.get(system, {}))))
    about = {"groups": len(set(groups)), "questions": len(groups)} | dict(benchmark)
    settings = {"n_boot": n_boot, "seed": seed, "interval": "95 % percentile, clusters resampled by group"}
    return Sweep(
        benchmark=about,
        default=default,
        factors=with_default(sweeps, default),
        grid=grid,
        systems=dict(systems),
        metrics=dict(metrics),
        rows=tuple(rows),
        notes=tuple(notes),
        facts=settings | dict(facts or {}),
    )


def _ascending(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(sorted(dict.fromkeys(values), key=lambda value: math.inf if isinstance(value, str) else value))


def _value(name: str, text: str, option: str) -> Value:
    """Read one value of a factor."""
    if name == "k_sum" and text.lower() == AUTO:
        return AUTO
    real = name in ("alpha", "prior")
    low, high = (0.0, _MOST.get(name, math.inf)) if real else (1, math.inf)
    try:
        value: int | float = float(text) + 0.0 if real else int(text)  # no -0.0
    except ValueError:
        value = math.nan
    if low <= value <= high and value < math.inf:
        return value
    kind = f"a number from {low:g}" if real else f"an integer from {low}"
    upto = f" to {high:g}" if high < math.inf else ""
    also = f", or {AUTO}" if name == "k_sum" else ""
    raise MiaError(f"--sweep {option!r}: {text!r} is no value of {name}; give {kind}{upto}{also}")
