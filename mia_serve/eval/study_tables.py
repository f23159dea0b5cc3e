"""The chat-memory study as text for a terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mia_serve.eval.bootstrap import Interval
from mia_serve.eval.metrics import LABELS, SESSION_METRICS
from mia_serve.eval.study_report import Row, Study

WIDTH = 100
#: Section -> heading, in the order of the main table.
_SECTIONS = {
    "single": "One side",
    "fused": "Fused",
    "rerank": "Re-ranked by a cross-encoder",
    "trivial": "Trivial",
}
#: Metrics of the table that stands apart; its labels leave no room for more.
_APART_METRICS = ("r@3", "r@5", "ndcg@5")
#: Rows that the category table compares.
_COMPARED = ("bm25", "early", "max", "bm25+max", "rrf", "adaptive")


def study_text(study: Study) -> str:
    """Lay a study out for a terminal."""
    blocks = [_headline(study), _method_table(study)]
    if any(row.section == "summaries" for row in study.rows):
        blocks.append(_apart_table(study))
    if study.differences:
        blocks.append(_difference_table(study))
    blocks.append(_category_table(study))
    if study.lengths:
        blocks.append(_length_table(study))
    if study.curve is not None:
        blocks.append(_alpha_lines(study))
    blocks.append(_notes(study))
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def grid(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align cells in columns: the first ``left`` columns to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _headline(study: Study) -> list[str]:
    facts = study.benchmark
    sessions, turns = facts["sessions"], facts["turns"]
    dropped = "; ".join(f"{count:,} {reason}" for reason, count in facts["dropped"].items())
    sizes = str(sessions["min"]) if sessions["min"] == sessions["max"] else f"{sessions['min']}-{sessions['max']}"
    text = (
        f"{facts['name']}: {facts['questions']:,} questions, {facts['conversations']} conversations of {sizes} "
        f"sessions ({sessions['total']:,} sessions, {turns['total']:,} turns)."
    )
    if dropped:
        text += f" Left out: {dropped}."
    lines = textwrap.wrap(text, WIDTH, break_on_hyphens=False)
    encoder, reranker = study.models.get("encoder"), study.models.get("reranker")
    if encoder:
        # Not wrapped: white space at the end of a prefix counts.
        prefixes = f"query prefix {encoder['query_prefix']!r}, document prefix {encoder['document_prefix']!r}"
        lines.append(f"Encoder: {encoder['name']}, {prefixes}.")
    if reranker:
        lines.append(f"Re-ranker: {reranker['name']}, {reranker['max_length']} tokens.")
    return lines


def _method_table(study: Study) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("", "Hit@1 [95 % CI]", *(LABELS[metric] for metric in SESSION_METRICS[1:]), "alpha")
    ]
    headings: dict[int, str] = {}
    for section, heading in _SECTIONS.items():
        members = [_method_cells(row) for row in study.rows if row.section == section]
        if section == "trivial":
            chance = (number(study.chance[metric], 4) for metric in SESSION_METRICS)
            members.append(("  chance", *chance, ""))
        if members:
            headings[len(rows)] = heading
            rows += members
    lines = []
    for place, line in enumerate(grid(rows)):
        lines += [headings[place], line] if place in headings else [line]
    return lines


def _apart_table(study: Study) -> list[str]:
    """Show what text that a language model wrote adds: on the lexical side and on the dense one."""
    head = ("  BM25 over", "max over", "Hit@1 [95 % CI]", *(LABELS[metric] for metric in _APART_METRICS), "alpha")
    rows: list[tuple[str, ...]] = [head]
    for row in study.rows:
        if row.section == "summaries":
            lexical, _, dense = row.label.partition(" ⊕ ")
            means = (number(row.metrics[metric].mean, 4) for metric in _APART_METRICS)
            rows.append((f"  {lexical}", dense or "-", interval(row.metrics["hit@1"]), *means, _weights(row)))
    title = "Apart: sessions indexed by summaries and facts, which a language model wrote at ingestion"
    return [title, *grid(rows, left=2)]


def _method_cells(row: Row) -> tuple[str, ...]:
    others = (number(row.metrics[metric].mean, 4) for metric in SESSION_METRICS[1:])
    return (f"  {row.label}", interval(row.metrics["hit@1"]), *others, _weights(row))


def _weights(row: Row) -> str:
    """Write the weights of BM25: the range of those chosen on other conversations, or the mean of each question's."""
    if row.alpha is None:
        return ""
    low, high = number(row.alpha["min"], 2), number(row.alpha["max"], 2)
    if row.chosen is None and low != high:
        return f"{number(row.alpha['mean'], 2)} mean"
    return low if low == high else f"{low}-{high}"


def _difference_table(study: Study) -> list[str]:
    rows = [("Differences in Hit@1, pp", "", "95 % CI", "one-sided p")]
    rows += [(f"  {one.label}", *points(one.hit), one.hit.p_text) for one in study.differences]
    return grid(rows)


def _category_table(study: Study) -> list[str]:
    compared = [row for row in study.rows if row.key in _COMPARED]
    short = {
        "bm25": "BM25",
        "early": "early",
        "max": "late",
        "bm25+max": "fusion",
        "rrf": "RRF",
        "adaptive": "by query",
    }
    rows = [("Hit@1 by category", "questions", *(short[row.key] for row in compared))]
    for kind, count in study.benchmark["categories"].items():
        rows.append((f"  {kind}", str(count), *(number(row.categories[kind].mean, 3) for row in compared)))
    return grid(rows)


def _length_table(study: Study) -> list[str]:
    rows = [("Turns of the longest gold session", "questions", "early", "late", "late - early, pp", "95 % CI", "p")]
    for one in study.lengths:
        means = (number(one.early, 3), number(one.late, 3))
        rows.append((f"  {one.turns}", str(one.gap.n), *means, *points(one.gap), one.gap.p_text))
    return grid(rows)


def _alpha_lines(study: Study) -> list[str]:
    curve = study.curve
    assert curve is not None
    tenths = [
        (alpha, hit) for alpha, hit in zip(curve.alphas, curve.everywhere, strict=True) if round(alpha * 20) % 2 == 0
    ]
    lines = grid(
        [
            ("Hit@1 by one alpha for all", *(number(alpha, 1) for alpha, _ in tenths)),
            ("  BM25 ⊕ late, max", *(number(hit, 3) for _, hit in tenths)),
        ]
    )
    best, reached = curve.best
    text = f"  best: {number(reached, 4)} at {number(best, 2)}, chosen with the answers in sight, so no result"
    chosen = study.row("bm25+max").chosen
    if chosen is not None:
        text += "; chosen on the others: " + ", ".join(f"{name} {number(alpha, 2)}" for name, alpha in chosen.items())
    return lines + textwrap.wrap(text + ".", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _notes(study: Study) -> list[str]:
    settings, facts = study.settings, study.benchmark
    units = "conversations" if facts["groups"] < facts["questions"] else "questions"
    notes = [
        f"Intervals and p from {settings['n_boot']:,} resamples of {facts['groups']} {units}, seed {settings['seed']}; "
        "p is one-sided, the share of resamples at or below 0.",
        "Hit@1: the first session is gold. R@k: share of the gold sessions found; R@1 is lower than Hit@1 where a "
        "question has several.",
    ]
    if facts["groups"] == 1:
        notes.append("One conversation only: no interval can be given.")
    elif facts["groups"] <= 10:
        notes.append(f"{facts['groups']} groups are few: percentile intervals of so few are too narrow.")
    if "adversarial" in facts["categories"]:
        notes.append("Adversarial questions ask for what was never said; their gold is the session that baits.")
    if any(row.key == "lse10" for row in study.rows):
        notes.append(
            "* reproduction only: a sum over turns favours long sessions by ln(T)/10, so no index offers it; "
            "log-mean-exp does not."
        )
    partial = settings["reading"].get("partial_gold", 0)
    if partial:
        notes.append(
            f"{partial} question(s) name gold sessions that are not among their sessions; recall is of those that are."
        )
    for metric, count in study.refused.items():
        notes.append(f"{LABELS[metric]} leaves out {count} question(s) with no more sessions than its cutoff.")
    return [line for note in notes for line in textwrap.wrap(note, WIDTH, break_on_hyphens=False)]


def number(value: float | None, digits: int) -> str:
    """Write a share without its leading zero, ``n/a`` where there is none."""
    if value is None:
        return "n/a"
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def interval(value: Interval) -> str:
    """Write a mean with its interval: ``.6395 [.615, .669]``."""
    if value.low is None or value.high is None:
        return number(value.mean, 4)
    return f"{number(value.mean, 4)} [{number(value.low, 3)}, {number(value.high, 3)}]"


def points(value: Interval) -> tuple[str, str]:
    """Write a difference in percentage points, and its interval."""
    mean = "n/a" if value.mean is None else f"{100 * value.mean:+.2f}"
    if value.low is None or value.high is None:
        return mean, ""
    return mean, f"[{100 * value.low:+.1f}, {100 * value.high:+.1f}]"
