"""The result of a retrieval evaluation, as a record, as JSON and as a table of at most 100 columns."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mia_serve.eval.bootstrap import Interval, cluster_bootstrap, paired_bootstrap
from mia_serve.eval.metrics import LABELS, METRICS, QueryScores

if TYPE_CHECKING:
    from rich.table import Table

    from mia_serve.core import Encoder

#: Row key -> label, in the order of the table.
ROW_LABELS: dict[str, str] = {
    "base": "base encoder",
    "e1": "E1",
    "prior": "E1, signature as prior",
    "none": "E2, no signature",
    "first_k": "E2, first-K signature",
    "coverage": "E2, coverage signature",
    "coverage_prior": "E2, the same, and as prior",
    "global_summary": "E2, global summary",
    "shuffled": "E2, shuffled signature",
    "oracle": "E2, gold-session signature*",
}
#: Differences reported, (first, second) for first - second.
PAIRS: tuple[tuple[str, str], ...] = (
    ("e1", "base"),
    ("prior", "e1"),
    ("coverage", "e1"),
    ("coverage", "none"),
    ("coverage", "first_k"),
    ("coverage", "shuffled"),
    ("coverage_prior", "e1"),
    ("coverage_prior", "none"),
    ("global_summary", "e1"),
    ("global_summary", "none"),
    ("coverage", "global_summary"),
    ("oracle", "e1"),
)
_PAIR_NAMES = {
    "base": "base",
    "e1": "E1",
    "prior": "prior",
    "none": "none",
    "first_k": "first-K",
    "coverage": "coverage",
    "coverage_prior": "coverage and prior",
    "global_summary": "global summary",
    "shuffled": "shuffled",
    "oracle": "gold session*",
}
WIDTH = 100


@dataclass(frozen=True)
class QueryResult:
    """Keep what one question scored in every row, for paired tests by others."""

    id: str
    haystack: str
    group: str
    gold: tuple[str, ...]
    tags: dict[str, Any]
    scores: dict[str, QueryScores]
    chance: QueryScores
    signatures: dict[str, tuple[str, ...]]
    donor: str | None = None


@dataclass(frozen=True)
class Row:
    """Hold one retriever's means; ``oracle`` marks a row that was told the gold session."""

    key: str
    label: str
    oracle: bool
    metrics: dict[str, Interval]


@dataclass(frozen=True)
class Pair:
    """Hold the paired differences of two rows, first - second."""

    first: str
    second: str
    label: str
    metrics: dict[str, Interval]


@dataclass(frozen=True)
class RetrievalReport:
    """Hold everything that a reader needs to trust, repeat or compare the numbers.

    Attributes:
        benchmark: Name, split, counts and haystack sizes.
        settings: Everything that was chosen, seed and number of resamples included.
        encoders: Name and spec hash of base, E1, E2 and the selection encoder.
        rows: One a retriever.
        pairs: Paired differences.
        chance: Expected scores of a random ranking, mean over the questions.
        coverage: Share of questions whose gold session is in the pool and in each signature.
        refused: Questions a metric leaves out because their haystack is too small for its cutoff.
        versions: Of Python and the packages that matter.
        seconds: Wall time.
        queries: Per-question scores, not part of the JSON (see ``query_lines``).
    """

    benchmark: dict[str, Any]
    settings: dict[str, Any]
    encoders: dict[str, dict[str, Any] | None]
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    chance: dict[str, float | None]
    coverage: dict[str, dict[str, float]]
    refused: dict[str, int]
    versions: dict[str, str | None]
    seconds: float
    queries: tuple[QueryResult, ...]

    def row(self, key: str) -> Row:
        """Return the row with a key of ``ROW_LABELS``."""
        return next(row for row in self.rows if row.key == key)

    def pair(self, first: str, second: str) -> Pair:
        """Return the differences ``first - second``."""
        return next(pair for pair in self.pairs if (pair.first, pair.second) == (first, second))

    def gap_share(self) -> dict[str, float | None] | None:
        """Give the share of the gain from E1 to the gold-session oracle that the coverage signature reaches.

        Returns:
            Metric to share (can be negative, None where the oracle gains nothing); None without the rows it needs.
        """
        means = {row.key: {name: value.mean for name, value in row.metrics.items()} for row in self.rows}
        if not {"e1", "coverage", "oracle"} <= means.keys():
            return None
        shares: dict[str, float | None] = {}
        for metric in METRICS:
            low, reached, high = (means[key][metric] for key in ("e1", "coverage", "oracle"))
            known = low is not None and reached is not None and high is not None and high > low
            shares[metric] = (reached - low) / (high - low) if known else None  # type: ignore[operator]
        return shares

    def to_dict(self) -> dict[str, Any]:
        """Return the report without its per-question scores, ready for JSON."""
        return {
            "benchmark": self.benchmark,
            "settings": self.settings,
            "encoders": self.encoders,
            "rows": [asdict(row) for row in self.rows],
            "pairs": [_pair_record(pair) for pair in self.pairs],
            "gap_share": self.gap_share(),
            "chance": self.chance,
            "gold_session": self.coverage,
            "refused": self.refused,
            "versions": self.versions,
            "seconds": round(self.seconds, 3),
        }

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def query_lines(self) -> str:
        """Return the per-question scores as JSON lines."""
        lines = (json.dumps(asdict(result), ensure_ascii=False, allow_nan=False) for result in self.queries)
        return "".join(line + "\n" for line in lines)

    def to_text(self) -> str:
        """Lay the report out for a terminal, at most 100 columns wide."""
        from rich.console import Console

        sink = io.StringIO()
        # No colour system and no markup: session names and metrics are text, not commands to the terminal.
        console = Console(file=sink, width=WIDTH, color_system=None, markup=False, highlight=False, emoji=False)
        console.print(self._headline())
        console.print()
        console.print(self._row_table())
        console.print()
        if self.pairs:
            console.print("Paired differences")
            console.print(self._pair_table())
            console.print()
        for line in self._footnotes():
            console.print(line)
        return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"

    def _headline(self) -> str:
        facts = self.benchmark
        sizes = facts["haystack_sizes"]
        spread = f"{sizes['min']}" if sizes["min"] == sizes["max"] else f"{sizes['min']}-{sizes['max']}"
        return (
            f"{facts['name']} {facts['split']}{' series' if facts['series'] else ''}: {facts['queries']} questions in "
            f"{facts['groups']} groups, {facts['haystacks']} haystack(s) of {spread} chunks"
        )

    def _row_table(self) -> Table:
        table = _table()
        for row in self.rows:
            table.add_row(row.label, *(_mean_cell(row.metrics[metric]) for metric in METRICS))
        table.add_row("chance", *(_number(self.chance[metric]) for metric in METRICS))
        return table

    def _pair_table(self) -> Table:
        table = _table()
        for pair in self.pairs:
            table.add_row(pair.label, *(_pair_cell(pair.metrics[metric]) for metric in METRICS))
        return table

    def _footnotes(self) -> list[str]:
        facts, settings = self.benchmark, self.settings
        notes = [
            f"Second line: 95 % interval from {settings['n_boot']} resamples of whole groups ({facts['groups']}), "
            f"seed {settings['seed']}; ! = the interval of the difference excludes 0. Third line: two-sided p. "
            f"MRR looks at the first {settings['depth']} ranks."
        ]
        if facts["groups"] == 1:
            notes.append("One group only: no interval can be given.")
        elif facts["groups"] < 10:
            notes.append(f"Only {facts['groups']} groups: percentile intervals of so few are too narrow.")
        for metric, count in self.refused.items():
            notes.append(f"{LABELS[metric]} leaves out {count} question(s): haystack no larger than the cutoff.")
        if facts["queries_without_gold"]:
            notes.append(f"{facts['queries_without_gold']} question(s) without gold are in no mean.")
        if self.coverage:
            names = {"pool": "pool", "coverage": "coverage σ", "first_k": "first-K σ", "global_summary": "book"}
            shares = (
                f"{name} {self.coverage[key]['any_gold_session']:.3f} (of {self.coverage[key]['mean_sessions']:.1f})"
                for key, name in names.items()
                if key in self.coverage
            )
            notes.append("A gold session is in: " + ", ".join(shares) + " sessions.")
        gap = self.gap_share()
        if gap is not None:
            parts = (f"{LABELS[metric]} {share:.2f}" for metric, share in gap.items() if share is not None)
            notes.append("* oracle: σ = the gold session's summary, an upper bound.")
            notes.append("Share of the way from E1 to it that coverage goes: " + ", ".join(parts) + ".")
        elif any(row.oracle for row in self.rows):
            notes.append("* oracle: σ = the gold session's summary, an upper bound.")
        return notes


def summarise_rows(
    results: Sequence[QueryResult], *, n_boot: int, seed: int
) -> tuple[tuple[Row, ...], tuple[Pair, ...]]:
    """Take means with intervals of every row, and of every pair of ``PAIRS`` whose rows are there."""
    groups = [result.group for result in results]
    present = [key for key in ROW_LABELS if key in results[0].scores]

    def values(row: str, metric: str) -> list[float | None]:
        return [result.scores[row][metric] for result in results]

    rows = tuple(
        Row(
            key,
            ROW_LABELS[key],
            key == "oracle",
            {name: cluster_bootstrap(values(key, name), groups, n_boot=n_boot, seed=seed) for name in METRICS},
        )
        for key in present
    )
    pairs = tuple(
        Pair(
            first,
            second,
            f"{_PAIR_NAMES[first]} - {_PAIR_NAMES[second]}",
            {
                name: paired_bootstrap(values(first, name), values(second, name), groups, n_boot=n_boot, seed=seed)
                for name in METRICS
            },
        )
        for first, second in PAIRS
        if first in present and second in present
    )
    return rows, pairs


def encoder_facts(encoder: Encoder | None) -> dict[str, Any] | None:
    """Tell which encoder a row used: base name, hash of spec and weights, and what bounds its input."""
    if encoder is None:
        return None
    spec = encoder.spec
    return {
        "base": spec.base,
        "spec_hash": encoder.spec_hash,
        "dim": encoder.dim,
        "pooling": spec.pooling,
        "alpha": spec.alpha,
        "max_query_tokens": spec.max_query_tokens,
        "max_document_tokens": spec.max_document_tokens,
    }


def _pair_record(pair: Pair) -> dict[str, Any]:
    record = asdict(pair)
    for name, interval in pair.metrics.items():
        record["metrics"][name] |= {"p": interval.p_text, "excludes_zero": interval.excludes_zero}
    return record


def _table() -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    for metric in METRICS:
        table.add_column(LABELS[metric], justify="right", no_wrap=True)
    return table


def _number(value: float | None, sign: bool = False) -> str:
    if value is None:
        return "n/a"
    text = f"{value:+.3f}" if sign else f"{value:.3f}"
    return text.replace("0.", ".", 1) if abs(value) < 0.9995 else text


def _mean_cell(interval: Interval) -> str:
    if interval.low is None:
        return _number(interval.mean)
    return f"{_number(interval.mean)}\n{_number(interval.low)}-{_number(interval.high)}"


def _pair_cell(interval: Interval) -> str:
    mean = _number(interval.mean, sign=True)
    if interval.low is None or interval.high is None:
        return mean
    bounds = f"{_number(interval.low, sign=True)},{_number(interval.high, sign=True)}"
    return f"{mean}{'!' if interval.excludes_zero else ''}\n{bounds}\n{interval.p_text}"
