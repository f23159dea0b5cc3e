"""The published figures of MiA-Signature (arXiv 2605.06416, paper A) and MiA-RAG (arXiv 2512.17220, paper B), as data.

All are percentages. A tag says how far a figure can be trusted: ``stated`` by the paper or its authors, ``derived``
exactly from stated ones, ``inferred`` from the way the system works; what was not obtained is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Literal, NamedTuple

Tag = Literal["stated", "derived", "inferred", "not obtained"]


class Figure(NamedTuple):
    """A published percentage.

    Attributes:
        value: The figure; None where it was not obtained; the middle where only bounds are known.
        tag: Where it comes from.
        low: Lower bound, where it is not known exactly.
        high: Upper bound.
    """

    value: float | None = None
    tag: Tag = "not obtained"
    low: float | None = None
    high: float | None = None


class Averages(NamedTuple):
    """Paper A's two averages over its benchmarks; None where a part is missing."""

    recall: float | None
    performance: float | None


class PaperRow(NamedTuple):
    """A row of paper A's tables: its name, the system of ours that it is set beside, and its figures by column."""

    label: str
    system: str | None
    figures: Mapping[str, Figure]


class PaperBRow(NamedTuple):
    """A row of paper B's end-task table; cells are those of the 3, 5 and 10 best passages (one without passages)."""

    label: str
    system: str | None
    cells: Mapping[str, tuple[float, ...]]
    average: float


#: Columns of paper A: key -> (benchmark, metric). Benchmarks are named as `benchmark_key` names them.
COLUMNS: dict[str, tuple[str, str]] = {
    "dqa_en_acc": ("detectiveqa-en", "accuracy"),
    "dqa_en_r": ("detectiveqa-en", "recall@10"),
    "dqa_zh_acc": ("detectiveqa-zh", "accuracy"),
    "dqa_zh_r": ("detectiveqa-zh", "recall@10"),
    "nqa_f1": ("narrativeqa", "f1"),
    "nqa_r": ("narrativeqa", "recall@10"),
    "nhqa_f1": ("novelhopqa", "f1"),
    "nhqa_r": ("novelhopqa", "recall@10"),
    "nocha_pair": ("nocha", "pair_accuracy"),
    "nocha_acc": ("nocha", "accuracy"),
}
AVERAGES = ("avg_r", "avg_perf")


def _row(label: str, system: str | None, **cells: float | str | Figure) -> PaperRow:
    """Make a row: a number is a stated figure, ``"12.3 derived"`` one with its tag, what is absent was not obtained."""
    figures = {}
    for column in (*COLUMNS, *AVERAGES):
        cell = cells.pop(column, None)
        if isinstance(cell, str):
            value, tag = cell.split()
            figures[column] = Figure(float(value), "derived" if tag == "derived" else "inferred")
        elif isinstance(cell, Figure):
            figures[column] = cell
        else:
            figures[column] = Figure() if cell is None else Figure(float(cell), "stated")
    assert not cells, cells
    return PaperRow(label, system, figures)


#: Paper A, static RAG; the generator of all but the last is DeepSeek-V3.2.
STATIC_TABLE: tuple[PaperRow, ...] = (
    _row(
        "Qwen3-Emb, query-only", "base", dqa_en_acc=58.7, dqa_en_r=24.7, dqa_zh_acc=68.0, dqa_zh_r=29.3, nqa_f1=41.8,
        nqa_r=48.5, nhqa_f1=37.0, nhqa_r=33.7, nocha_pair=49.2, nocha_acc=74.6, avg_r=36.4, avg_perf=47.8,
    ),
    _row("MiA-Emb, query-only", "e2_query", avg_r="42.1 derived", avg_perf=52.2),
    _row(
        "MiA-Emb + σ, chunks only", "sig", dqa_en_r="44.7 inferred", dqa_zh_r="42.7 inferred", nqa_f1=45.1, nqa_r=59.5,
        nhqa_r="36.8 inferred", nocha_pair=61.9, avg_r=46.7, avg_perf=54.2,
    ),
    _row(
        "MiA-RAG, σ to both", "mia_rag", dqa_en_acc=74.7, dqa_en_r=44.7, dqa_zh_acc=80.0, dqa_zh_r=42.7,
        nqa_f1=Figure(42.85, "derived", 42.5, 43.2), nqa_r="59.5 inferred", nhqa_f1=38.7, nhqa_r=36.8, nocha_pair=65.1,
        nocha_acc=82.5, avg_r=46.7, avg_perf=56.0,
    ),
    _row(
        "MiA-RAG, MiA-Gen-14B", None, dqa_en_r="44.7 inferred", dqa_zh_r="42.7 inferred", nqa_f1=27.9,
        nqa_r="59.5 inferred", nhqa_r="36.8 inferred", avg_r="46.7 inferred",
    ),
)  # fmt: skip

#: Paper A, agent loop.
AGENT_TABLE: tuple[PaperRow, ...] = (
    _row(
        "Agent w/o Sig.", "agent_no_sig", dqa_zh_r=46.7, nqa_f1=42.4, nhqa_f1=37.4, nhqa_r=33.9, nocha_pair=57.1,
        nocha_acc=77.8,
    ),
    _row(
        "MiA-Agent", "agent", dqa_zh_r=52.7, nqa_f1=45.3, nqa_r=59.1, nhqa_f1=38.7, nhqa_r=39.3, nocha_pair=71.4,
        nocha_acc=85.7,
    ),
)  # fmt: skip

#: Paper A, MiA-Agent on NoCha by what the generator is given: pair accuracy.
ANSWER_INPUTS: dict[str, float] = {"chunks": 61.9, "chunks+evi": 66.7, "chunks+sig": 68.3, "chunks+sig+evi": 71.4}

_B_COLUMNS = ("narrativeqa", "infinitebench", "detectiveqa-zh", "detectiveqa-en", "nocha")


def _b(label: str, system: str | None, cells: str, average: float) -> PaperBRow:
    parts = [tuple(float(value) for value in cell.split("/")) for cell in cells.split()]
    return PaperBRow(label, system, dict(zip(_B_COLUMNS, parts, strict=True)), average)


#: Paper B, end task: F1 (NarrativeQA), accuracy (∞Bench, DetectiveQA), pair accuracy (NoCha); "+ S": summary given.
PAPER_B_TABLE: tuple[PaperBRow, ...] = (
    _b("Summary-only, 72B", "summary_only", "39.24 72.05 73.67 61.33 31.75", 55.61),
    _b(
        "Qwen3-Emb-8B, 72B", "base",
        "41.13/45.51/49.06 75.55/80.79/86.90 63.67/70.83/78.00 55.50/61.33/71.17 33.33/38.10/41.27", 59.48,
    ),
    _b(
        "HippoRAG-v2, 72B", None,
        "40.06/45.20/47.16 79.48/84.28/85.15 70.33/73.83/77.17 64.83/68.00/68.50 33.33/36.51/47.62", 61.43,
    ),
    _b(
        "MemoRAG, 72B", None,
        "40.72/43.63/44.86 75.11/76.42/78.17 67.50/68.83/71.17 61.17/63.50/64.33 46.03/49.21/49.21", 59.06,
    ),
    _b(
        "RAPTOR, 72B", "raptor",
        "39.48/42.76/46.94 75.98/79.91/83.84 62.00/68.67/74.67 54.50/62.00/69.67 34.92/34.92/46.03", 58.98,
    ),
    _b(
        "Qwen3-Emb, 72B + S", None,
        "47.67/48.46/51.81 82.10/83.84/86.46 76.00/78.50/81.33 68.17/69.67/73.33 36.51/42.86/44.44", 64.74,
    ),
    _b(
        "MiA-Emb, 72B", "sig",
        "46.38/48.06/49.88 84.72/87.77/90.39 76.17/81.17/82.67 67.17/71.83/75.33 42.86/42.86/49.21", 66.43,
    ),
    _b(
        "MiA-Emb, 72B + S", "mia_rag",
        "50.05/51.04/53.15 84.71/86.46/88.21 81.67/83.17/84.17 70.33/72.33/75.50 41.27/44.44/52.38", 67.93,
    ),
    _b("Summary-only, 14B", None, "38.03 61.57 70.50 58.00 17.46", 49.11),
    _b(
        "Qwen3-Emb-8B, 14B", None,
        "39.32/40.99/44.38 72.49/73.80/77.29 60.33/68.50/75.67 55.17/59.83/66.67 17.46/11.11/15.87", 51.93,
    ),
    _b(
        "Qwen3-Emb, 14B + S", None,
        "43.04/43.32/45.83 75.98/80.79/79.48 75.33/78.83/80.17 65.33/66.83/70.00 19.05/15.87/26.98", 57.79,
    ),
    _b(
        "Qwen3-Emb, MiA-Gen-14B + S", None,
        "50.55/50.08/51.99 75.98/82.10/80.79 76.17/78.50/79.50 67.67/71.50/71.67 49.21/47.62/50.79", 65.61,
    ),
    _b(
        "MiA-Emb, 14B", None,
        "45.89/46.77/47.13 79.48/82.97/84.28 73.00/77.17/80.83 62.33/65.83/70.33 22.22/26.98/26.98", 59.48,
    ),
    _b(
        "MiA-Emb, 14B + S", None,
        "44.38/46.66/47.87 79.91/83.41/84.28 78.33/79.00/82.00 66.50/69.17/71.82 30.16/28.57/38.10", 62.01,
    ),
    _b(
        "MiA-RAG (MiA-Gen-14B + S)", None,
        "52.48/53.52/53.56 80.79/81.22/85.15 79.00/79.67/81.83 69.00/71.17/75.50 55.56/49.21/53.97", 68.11,
    ),
)  # fmt: skip

#: Paper B, recall of the 3, 5 and 10 best passages.
PAPER_B_RECALL: dict[str, dict[str, tuple[float, float, float]]] = {
    "MiA-Emb-8B": {
        "narrativeqa": (62.68, 75.92, 88.09),
        "detectiveqa-zh": (46.75, 59.17, 72.50),
        "detectiveqa-en": (42.08, 54.17, 69.75),
    },
    "SFT-Emb-8B": {
        "narrativeqa": (55.62, 67.19, 83.65),
        "detectiveqa-zh": (37.92, 48.75, 66.50),
        "detectiveqa-en": (34.00, 45.75, 61.25),
    },
    "Sit-Emb-8B": {
        "narrativeqa": (59.98, 70.70, 82.68),
        "detectiveqa-zh": (42.50, 54.50, 69.30),
        "detectiveqa-en": (36.75, 49.25, 63.83),
    },
    "Qwen3-Emb-8B": {
        "narrativeqa": (41.81, 54.51, 71.13),
        "detectiveqa-zh": (28.58, 39.08, 55.58),
        "detectiveqa-en": (24.17, 34.17, 49.25),
    },
}

_DETECTIVE = ("detectiveqa-en", "detectiveqa-zh")


def benchmark_key(name: str, language: str) -> str:
    """Name a benchmark as the tables here do: DetectiveQA has one of each language."""
    return f"{name}-{language}" if name == "detectiveqa" else name


def paper_averages(results_by_benchmark: Mapping[str, Mapping[str, float | None]]) -> Averages:
    """Average over benchmarks as paper A does (exact on its published rows).

    Recall is the mean over DetectiveQA (mean of its two languages), NarrativeQA and NovelHopQA. Performance is the mean
    over DetectiveQA's accuracy (mean of its languages), NarrativeQA's and NovelHopQA's F1, and NoCha's pair accuracy.

    Args:
        results_by_benchmark: Benchmark (see `benchmark_key`) -> metric -> value.

    Returns:
        The averages, None where a benchmark or its metric is missing.
    """

    def take(benchmark: str, metric: str) -> float | None:
        return results_by_benchmark.get(benchmark, {}).get(metric)

    detective = [_mean([take(one, metric) for one in _DETECTIVE]) for metric in ("recall@10", "accuracy")]
    return Averages(
        _mean([detective[0], take("narrativeqa", "recall@10"), take("novelhopqa", "recall@10")]),
        _mean([detective[1], take("narrativeqa", "f1"), take("novelhopqa", "f1"), take("nocha", "pair_accuracy")]),
    )


def published(benchmark: str) -> dict[str, dict[str, Figure]]:
    """Return paper A's figures for one benchmark: system -> metric -> figure, where any was obtained."""
    found: dict[str, dict[str, Figure]] = {}
    for row in (*STATIC_TABLE, *AGENT_TABLE):
        if row.system is None:
            continue
        figures = {
            metric: row.figures[column]
            for column, (name, metric) in COLUMNS.items()
            if name == benchmark and row.figures[column].value is not None
        }
        if figures:
            found[row.system] = figures
    return found


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
