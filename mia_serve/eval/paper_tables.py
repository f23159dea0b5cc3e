"""Several runs in the layout of MiA-Signature's tables 1 and 2, beside its figures, and what answers its RQ1 to RQ3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from mia_serve.core import MiaError
from mia_serve.eval.paper import (
    AGENT_TABLE,
    ANSWER_INPUTS,
    AVERAGES,
    COLUMNS,
    PAPER_B_RECALL,
    PAPER_B_TABLE,
    STATIC_TABLE,
    Averages,
    Figure,
    PaperRow,
    benchmark_key,
    paper_averages,
)
from mia_serve.eval.qa_tables import COUNTS, metric_label, new_table, render

Record = Mapping[str, Any]
#: System -> benchmark -> metric -> percentage.
Results = dict[str, dict[str, dict[str, float | None]]]

_HEADS = {
    "dqa_en_acc": "DQA\nEN\nAcc",
    "dqa_en_r": "DQA\nEN\nR@10",
    "dqa_zh_acc": "DQA\nZH\nAcc",
    "dqa_zh_r": "DQA\nZH\nR@10",
    "nqa_f1": "NQA\n\nF1",
    "nqa_r": "NQA\n\nR@10",
    "nhqa_f1": "NHQA\n\nF1",
    "nhqa_r": "NHQA\n\nR@10",
    "nocha_pair": "NoCha\n\npair",
    "nocha_acc": "NoCha\n\nAcc",
    "avg_r": "Avg\n\nR@10",
    "avg_perf": "Avg\n\nPerf",
}
_MARKS = {"derived": "d", "inferred": "i"}
#: Short names of our systems: with an E2, and where σ is a prior instead.
_SHORT = {
    "base": "untrained",
    "e1": "E1",
    "e2_query": "E2, query-only",
    "sig_first_k": "first-K σ",
    "sig": "E2 + σ",
    "mia_rag": "MiA-RAG",
    "mia_rag_auto": "σ by choice",
    "summary_only": "summary only",
    "raptor": "RAPTOR-style",
    "gist": "gists",
    "agent_no_sig": "agent, no σ",
    "agent": "MiA-Agent",
}
_SHORT_PRIOR = {"sig": "E1, σ as prior", "mia_rag": "MiA-RAG, σ prior", "agent": "Agent, σ prior"}
#: Systems of ours that paper A's tables do not have; in table 1.
_MORE = ("e1", "sig_first_k", "mia_rag_auto", "summary_only", "raptor", "gist")


class _Question(NamedTuple):
    """One of the paper's research questions: the difference that answers it, and what the paper found."""

    title: str
    pairs: tuple[tuple[str, str], ...]
    published: str


_QUESTIONS = (
    _Question(
        "RQ1: does σ help retrieval? Same generator, chunks only.",
        (("sig", "e2_query"), ("sig", "e1"), ("sig", "base"), ("sig", "sig_first_k")),
        "Paper: Avg R@10 42.1d to 46.7 (+10.9 % relative), Avg Perf 52.2 to 54.2 (+3.8 % relative).",
    ),
    _Question(
        "RQ2: does σ help the agent?",
        (("agent", "agent_no_sig"), ("agent", "mia_rag")),
        "Paper: R@10 DetectiveQA-ZH 46.7 to 52.7, NovelHopQA 33.9 to 39.3; F1 NarrativeQA 42.4 to 45.3, NovelHopQA "
        "37.4 to 38.7; NoCha pairs 57.1 to 71.4.",
    ),
    _Question(
        "RQ3: does the generator gain from seeing σ?",
        (("mia_rag", "sig"), ("mia_rag_auto", "sig"), ("mia_rag_auto", "mia_rag")),
        "Paper: NoCha pairs 61.9 to 65.1; NarrativeQA F1 45.1 down to 42.5-43.2d; Avg Perf 54.2 to 56.0. MiA-Agent on "
        "NoCha by prompt: " + ", ".join(f"{mode} {value}" for mode, value in ANSWER_INPUTS.items()) + ".",
    ),
)


def collect_results(records: Sequence[Record]) -> Results:
    """Gather what the systems of several runs scored, in percent.

    Raises:
        MiaError: Two runs are of the same benchmark.
    """
    results: Results = {}
    seen: dict[str, None] = {}
    for record in records:
        name = run_key(record)
        if name in seen:
            raise MiaError(f"two runs are of {name}; give one run of each benchmark")
        seen[name] = None
        for system in record["systems"]:
            shares = {metric: value for metric, value in system["metrics"].items() if metric not in COUNTS}
            means = {metric: value["mean"] for metric, value in shares.items()}
            own = {metric: None if mean is None else 100 * mean for metric, mean in means.items()}
            results.setdefault(system["key"], {})[name] = own
    return results


def run_key(record: Record) -> str:
    """Return the benchmark of a run as the paper's tables name it."""
    return benchmark_key(record["benchmark"]["name"], record["benchmark"]["language"])


def paper_record(records: Sequence[Record]) -> dict[str, Any]:
    """Return our results, their averages and the published figures, JSON-ready."""
    results = collect_results(records)
    return {
        "runs": [
            {"benchmark": run_key(record), "split": record["benchmark"]["split"],
             "questions": record["benchmark"]["questions"], "llm": record["llm"] and record["llm"]["model"]}
            for record in records
        ],
        "results": results,
        "averages": {key: paper_averages(found)._asdict() for key, found in results.items()},
        "published": [
            {"table": number, "label": row.label, "system": row.system,
             "figures": {column: figure._asdict() for column, figure in row.figures.items()}}
            for number, table in ((1, STATIC_TABLE), (2, AGENT_TABLE))
            for row in table
        ],
        "pairs": {run_key(record): record["pairs"] for record in records},
    }  # fmt: skip


def paper_text(records: Sequence[Record]) -> str:
    """Lay several runs out as the paper does, at most 100 columns wide."""
    results = collect_results(records)
    labels = _SHORT | (_SHORT_PRIOR if all(record["settings"]["uses_prior"] for record in records) else {})
    blocks: list[Table | str] = ["Table 1. Static RAG", _table(STATIC_TABLE, results, labels, _MORE)]
    blocks += ["", "Table 2. Agent loop", _table(AGENT_TABLE, results, labels, ())]
    blocks += ["", *_legend(records)]
    for question in _QUESTIONS:
        blocks += ["", question.title, *_answer(question, records), question.published]
    blocks += _paper_b(results, labels)
    other = [record for record in records if run_key(record) not in {name for name, _ in COLUMNS.values()}]
    if other:
        blocks += ["", "Benchmarks that the paper does not have", *_others(other)]
    return render(blocks)


def _table(rows: Sequence[PaperRow], results: Results, labels: Mapping[str, str], more: Sequence[str]) -> Table:
    table = new_table([*_HEADS.values()])
    for row in rows:
        table.add_row(row.label, *(_figure(row.figures[column]) for column in (*COLUMNS, *AVERAGES)))
        if row.system is not None:
            table.add_row(*_own(row.system, results, labels))
    table.add_section()
    for key in more:
        if key in results:
            table.add_row(*_own(key, results, labels))
    return table


def _own(key: str, results: Results, labels: Mapping[str, str]) -> list[str]:
    """Return our row: a name that is told from the paper's, and what was measured."""
    found = results.get(key, {})
    cells = [found.get(benchmark, {}).get(metric) for benchmark, metric in COLUMNS.values()]
    averages = paper_averages(found) if found else Averages(None, None)
    return [f"  ours: {labels[key]}", *("–" if cell is None else f"{cell:.1f}" for cell in (*cells, *averages))]


def _figure(figure: Figure) -> str:
    return "?" if figure.value is None else f"{figure.value:.1f}{_MARKS.get(figure.tag, '')}"


def _legend(records: Sequence[Record]) -> list[str]:
    told = []
    for record in records:
        facts = record["benchmark"]
        model = record["llm"]["model"] if record["llm"] else "no language model"
        series = " in series" if facts.get("series") else ""
        prior = ", σ as a prior" if record["settings"]["uses_prior"] else ""
        told.append(
            f"{run_key(record)} {facts['split']}, {facts['questions']} questions on {facts['books']} books{series}, "
            f"{model}{prior}"
        )
    return [
        "Percent. Rows without ours: the paper's (Qwen3-Emb and MiA-Emb of 8B, DeepSeek-V3.2; d derived, i inferred "
        "from its figures, ? not obtained). – not run. Avg R@10: DetectiveQA (mean of EN and ZH), NarrativeQA, "
        "NovelHopQA; Avg Perf: these by Acc, F1, F1, and NoCha's pairs; only where all are there.",
        "Ours: " + "; ".join(told) + ".",
    ]


def _answer(question: _Question, records: Sequence[Record]) -> list[Table | str]:
    """Return the differences that answer a question, benchmark by benchmark."""
    names = ["recall@10", "f1", "accuracy", "pair_accuracy"]
    table = new_table([metric_label(name) for name in names])
    for record in records:
        for pair in record["pairs"]:
            if (pair["first"], pair["second"]) in question.pairs:
                cells = [_difference(pair["metrics"].get(name)) for name in names]
                table.add_row(f"{run_key(record)}: {pair['first']} − {pair['second']}", *cells)
    return [table] if table.row_count else ["Ours: not run."]


def _difference(value: Mapping[str, Any] | None) -> str:
    if value is None or value["mean"] is None:
        return "–"
    text = f"{100 * value['mean']:+.1f}"
    if value["low"] is None:
        return text
    return f"{text}{'!' if value['excludes_zero'] else ''} [{100 * value['low']:+.1f}, {100 * value['high']:+.1f}]"


def _paper_b(results: Results, labels: Mapping[str, str]) -> list[Table | str]:
    """Set our figures beside paper B's, where a benchmark of both was run."""
    metrics = {
        "narrativeqa": "f1",
        "detectiveqa-zh": "accuracy",
        "detectiveqa-en": "accuracy",
        "nocha": "pair_accuracy",
    }
    run = {benchmark for found in results.values() for benchmark in found}
    if not run & metrics.keys():
        return []
    table = new_table(["NarrativeQA\nF1", "DQA-ZH\nAcc", "DQA-EN\nAcc", "NoCha\npair"])
    for row in PAPER_B_TABLE:
        table.add_row(row.label, *("/".join(f"{v:.1f}" for v in row.cells[name]) for name in metrics))
        own = results.get(row.system or "", {})
        cells = [own.get(name, {}).get(metric) for name, metric in metrics.items()]
        if any(cell is not None for cell in cells):
            table.add_row(
                f"  ours: {labels[row.system or '']}", *("–" if cell is None else f"{cell:.1f}" for cell in cells)
            )
    recall = new_table(["NarrativeQA", "DQA-ZH", "DQA-EN"])
    for label, cells_of in PAPER_B_RECALL.items():
        recall.add_row(label, *("/".join(f"{value:.1f}" for value in cells) for cells in cells_of.values()))
    return [
        "", "MiA-RAG's paper (B): end task with the 3/5/10 best passages, 72B and 14B generators", table,
        "", "MiA-RAG's paper (B): R@3/5/10 on single books", recall,
    ]  # fmt: skip


def _others(records: Sequence[Record]) -> list[Table | str]:
    blocks: list[Table | str] = []
    for record in records:
        names = list(dict.fromkeys(name for system in record["systems"] for name in system["metrics"]))
        names = [name for name in names if name not in COUNTS]
        table = new_table([metric_label(name) for name in names])
        for system in record["systems"]:
            means = [system["metrics"].get(name, {}).get("mean") for name in names]
            table.add_row(system["label"], *("–" if mean is None else f"{100 * mean:.1f}" for mean in means))
        blocks += [f"{run_key(record)} {record['benchmark']['split']}", table]
    return blocks
