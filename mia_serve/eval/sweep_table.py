"""A sensitivity study as text for a terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import fields

from mia_serve.eval.bootstrap import Interval
from mia_serve.eval.study_tables import grid as aligned
from mia_serve.eval.sweep import FACTOR_LABELS, Setting, Sweep, SweepRow, Value, changed

WIDTH = 100
_ABREAST = 2  # metrics with their differences; the width has no room for more


def sweep_text(sweep: Sweep) -> str:
    """Lay a study out for a terminal: a table a factor, or one of all combinations."""
    facts = sweep.benchmark
    headline = (
        f"{facts['name']} {facts['split']}{' series' if facts.get('series') else ''}: {facts['questions']:,} questions "
        f"in {facts['groups']} groups. Default: {setting_text(sweep.default)}."
    )
    blocks = [textwrap.wrap(headline, WIDTH)]
    keys = list(sweep.metrics)
    for start in range(0, len(keys), _ABREAST):
        shown = keys[start : start + _ABREAST]
        if sweep.grid:
            blocks.append(_table(sweep, " ".join(sweep.factors), _combinations(sweep), shown))
            continue
        for name, values in sweep.factors.items():
            settings = [
                (_name(value, value == getattr(sweep.default, name)), changed(sweep.default, [(name, value)]))
                for value in values
            ]
            blocks.append(_table(sweep, FACTOR_LABELS[name], settings, shown))
    blocks.append(_notes(sweep))
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def setting_text(setting: Setting) -> str:
    """Write a setting as ``k0=50, k_sum=5``; what does not apply is left out."""
    values = ((field.name, getattr(setting, field.name)) for field in fields(setting))
    return ", ".join(f"{name}={_plain(value)}" for name, value in values if value is not None)


def _combinations(sweep: Sweep) -> list[tuple[str, Setting]]:
    settings = sorted(
        {row.setting for row in sweep.rows},
        key=lambda s: [values.index(getattr(s, name)) for name, values in sweep.factors.items()],
    )
    return [
        (_name("/".join(_plain(getattr(s, name)) for name in sweep.factors), s == sweep.default), s) for s in settings
    ]


def _table(sweep: Sweep, title: str, settings: Sequence[tuple[str, Setting]], metrics: Sequence[str]) -> list[str]:
    has_facts = any("signature_gold" in row.facts for row in sweep.rows)
    head = [title if len(title) < 20 else "", *(cell for m in metrics for cell in (sweep.metrics[m], "difference"))]
    lines: list[tuple[str, ...]] = [(*head, *(("gold in σ",) if has_facts else ()))]
    headings: dict[int, str] = {}
    for system, label in sweep.systems.items():
        found = [(name, sweep.row(system, setting)) for name, setting in settings]
        rows = [(name, row) for name, row in found if row is not None]
        if len(rows) > 1:  # a factor that does not concern the system leaves the default alone
            headings[len(lines)] = label
            lines += [_cells(name, row, metrics, has_facts) for name, row in rows]
    table = aligned(lines)
    for place in sorted(headings, reverse=True):
        table.insert(place, headings[place])
    return [title, *table] if len(title) >= 20 else table


def _cells(name: str, row: SweepRow, metrics: Sequence[str], has_facts: bool) -> tuple[str, ...]:
    cells = [f"  {name}"]
    for metric in metrics:
        cells.append(_mean(row.metrics[metric]))
        cells.append(_difference(row.differences[metric]) if row.differences is not None else "")
    if has_facts:
        cells.append(f"{_short(row.facts['signature_gold'])} ({row.facts['signature']:.1f})")
    return tuple(cells)


def _notes(sweep: Sweep) -> list[str]:
    facts = sweep.facts
    notes = [
        f"Intervals: 95 %, {facts['n_boot']} resamples of whole groups, seed {facts['seed']}. Differences are paired, "
        "to the default; a ! marks an interval without 0. They are of single settings: the best of many looks better "
        "than it is, so choose on other questions than you report on."
    ]
    if sweep.benchmark["groups"] == 1:
        notes.append("One group only: no interval can be given.")
    elif sweep.benchmark["groups"] < 10:
        notes.append(f"Only {sweep.benchmark['groups']} groups: percentile intervals of so few are too narrow.")
    if any("signature_gold" in row.facts for row in sweep.rows):
        notes.append("Gold in σ: share of the questions whose signature holds a gold session (mean size of σ).")
    return [line for note in [*notes, *sweep.notes] for line in textwrap.wrap(note, WIDTH)]


def _name(value: Value, default: bool) -> str:
    return f"{_plain(value)} *" if default else _plain(value)


def _plain(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _short(value: float | None, sign: bool = False) -> str:
    if value is None:
        return "n/a"
    text = f"{value:+.3f}" if sign else f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 0.9995 else text


def _mean(value: Interval) -> str:
    if value.low is None:
        return _short(value.mean)
    return f"{_short(value.mean)} {_short(value.low)}-{_short(value.high)}"


def _difference(value: Interval) -> str:
    if value.low is None:
        return _short(value.mean, sign=True)
    mark = "!" if value.excludes_zero else " "
    return f"{_short(value.mean, True)}{mark} {_short(value.low, True)},{_short(value.high, True)}"
