"""A run of question answering as tables of at most 100 columns."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 100
LABELS = {
    "f1": "F1",
    "em": "EM",
    "accuracy": "Acc",
    "pair_accuracy": "Pair acc",
    "answer_words": "words",
}
#: Metrics that are no shares.
COUNTS = ("answer_words",)


def metric_label(name: str) -> str:
    """Return the heading of a metric."""
    return LABELS.get(name) or name.replace("recall", "R")


def percent(value: float | None, sign: bool = False) -> str:
    """Write a share as a percentage with one decimal; – where there is none."""
    if value is None:
        return "–"
    return f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"


def run_text(record: Mapping[str, Any]) -> str:
    """Lay a run out: its systems, what separates them, and what a reader must know."""
    blocks: list[Table | str] = [_headline(record), "", _system_table(record)]
    if record["pairs"]:
        blocks += ["", "Paired differences (same questions)", _pair_table(record)]
    blocks += ["", *_notes(record)]
    return render(blocks)


def render(blocks: Sequence[Table | str]) -> str:
    """Print tables and lines, ends of lines trimmed."""
    sink = io.StringIO()
    # No colour system and no markup: names of books and labels are text, not commands to the terminal.
    console = Console(file=sink, width=WIDTH, color_system=None, markup=False, highlight=False, emoji=False)
    for block in blocks:
        console.print(block)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"


def new_table(headings: Sequence[str]) -> Table:
    """Return an empty table: a column of names, then columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0), show_edge=False)
    table.add_column("", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _headline(record: Mapping[str, Any]) -> str:
    facts, settings = record["benchmark"], record["settings"]
    sizes = facts["haystack_sizes"]
    spread = f"{sizes['min']}" if sizes["min"] == sizes["max"] else f"{sizes['min']}-{sizes['max']}"
    pairs = f" ({facts['pairs']} pairs)" if facts["pairs"] else ""
    model = record["llm"]["model"] if record["llm"] else "no language model: passages only"
    name = f"{facts['name']} {facts['split']}{' series' if facts['series'] else ''}"
    size = f" (at most {settings['chunk_tokens']} tokens)" if settings["chunk_tokens"] else ""
    return (
        f"{name}: {facts['questions']} questions{pairs} on {facts['books']} books, {facts['haystacks']} haystack(s) of "
        f"{spread} chunks{size}, {facts['sessions']} sessions; {model}"
    )


def _metrics(record: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for system in record["systems"] for name in system["metrics"]))


def _system_table(record: Mapping[str, Any]) -> Table:
    names = _metrics(record)
    answered = record["llm"] is not None
    table = new_table([*map(metric_label, names), *(["prompt", "failed"] if answered else [])])
    for system in record["systems"]:
        cells = [_mean_cell(name, system["metrics"].get(name)) for name in names]
        if answered:
            cells += [str(system["mode"]), str(sum(system["failures"].values()))]
        table.add_row(system["label"], *cells)
    for row in record["trivial"]:
        table.add_row(_short(row["label"]), *(percent(row["metrics"].get(name)) for name in names), "", "")
    return table


def _short(label: str) -> str:
    return label if len(label) <= 30 else label[:29] + "…"


def _mean_cell(name: str, value: Mapping[str, Any] | None) -> str:
    if value is None or value["mean"] is None:
        return "–"
    if name in COUNTS:
        return f"{value['mean']:.1f}"
    mean = percent(value["mean"])
    return mean if value["low"] is None else f"{mean}\n{percent(value['low'])}-{percent(value['high'])}"


def _pair_table(record: Mapping[str, Any]) -> Table:
    names = [name for name in _metrics(record) if name not in COUNTS]
    table = new_table([metric_label(name) for name in names])
    for pair in record["pairs"]:
        table.add_row(pair["label"], *(_difference_cell(pair["metrics"].get(name)) for name in names))
    return table


def _difference_cell(value: Mapping[str, Any] | None) -> str:
    if value is None or value["mean"] is None:
        return "–"
    mean = percent(value["mean"], sign=True)
    if value["low"] is None:
        return mean
    mark = "!" if value["excludes_zero"] else ""
    return f"{mean}{mark}\n{percent(value['low'], True)},{percent(value['high'], True)}"


def _notes(record: Mapping[str, Any]) -> list[str]:
    facts, settings = record["benchmark"], record["settings"]
    notes = [
        f"Percent. Second line: 95 % interval from {settings['n_boot']} resamples of whole books ({facts['books']}), "
        f"seed {settings['seed']}; ! = the interval of the difference excludes 0."
    ]
    if facts["books"] == 1:
        notes.append("One book only: no interval can be given.")
    elif facts["books"] < 10:
        notes.append(f"Only {facts['books']} books: percentile intervals of so few are too narrow.")
    if facts["without_gold"]:
        why = "; ".join(f"{n} {reason}" for reason, n in facts["without_gold_reasons"].items())
        notes.append(
            f"No gold passage is known of {facts['without_gold']} question(s), which are in no recall"
            + (f": {why}." if why else ".")
        )
    unknown = {
        name: value["reason"]
        for system in record["systems"]
        for name, value in system["metrics"].items()
        if value["mean"] is None
    }
    notes += [f"{metric_label(name)} has no value: {reason}." for name, reason in unknown.items()]
    if facts["lone_claims"]:
        notes.append(f"{facts['lone_claims']} claim(s) without their counterpart are in no pair.")
    failed: dict[str, int] = {}
    for system in record["systems"]:
        for label, count in system["failures"].items():
            failed[label] = failed.get(label, 0) + count
    if failed:
        listed = ", ".join(f"{count} {label}" for label, count in sorted(failed.items()))
        notes.append(f"Failed (answers count as wrong, after a failed update the agent's state stays): {listed}.")
    if record["settings"]["uses_prior"] and any(system["key"] == "sig" for system in record["systems"]):
        notes.append("No E2 was given: σ reaches retrieval as a prior on the first stage.")
    if record["llm"]:
        stats = record["llm"]["stats"]
        used = f"{stats['prompt_tokens']:,} in prompts, {stats['completion_tokens']:,} in replies"
        notes.append(f"Tokens that these answers stand for: {used}.")
    return notes
