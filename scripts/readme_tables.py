#!/usr/bin/env python3
"""Print the README's tables of public data from the records in scripts/receipts/."""

from __future__ import annotations

import json
from pathlib import Path

RECEIPTS = Path(__file__).resolve().parent / "receipts"
METRICS = (("r@10", "R@10"), ("mrr", "MRR"), ("hit@1", "Hit@1"))
PAIRS = (
    ("e1", "base"),
    ("prior", "e1"),
    ("coverage", "e1"),
    ("coverage", "none"),
    ("coverage", "shuffled"),
    ("coverage_prior", "e1"),
)
SETS = (
    ("fairytaleqa_val_books", "FairytaleQA val, each question asked of its whole fairy book"),
    ("fairytaleqa_val_series", "FairytaleQA val, all fairy books pooled"),
    ("qmsum_val_series", "QMSum val, all meetings pooled"),
    ("qmsum_val_meetings", "QMSum val, each question asked of its meeting"),
    ("locomo_series", "LoCoMo, all conversations pooled"),
    ("saltmarsh_test_series", "Saltmarsh test, all four books pooled"),
)


def interval(value: dict[str, float], sign: bool = False) -> str:
    """Return `mean [low, high]` to three decimals."""
    form = "{:+.3f}" if sign else "{:.3f}"
    mean = form.format(value["mean"])
    if value.get("low") is None:
        return mean
    return f"{mean} [{form.format(value['low'])}, {form.format(value['high'])}]"


def main() -> None:
    for name, title in SETS:
        file = RECEIPTS / f"{name}.json"
        if not file.is_file():
            continue
        record = json.loads(file.read_text("utf-8"))
        facts = record["benchmark"]
        groups, largest = facts["groups"], facts["haystack_sizes"]["max"]
        print(f"**{title}** ({facts['queries']} questions in {groups} groups, up to {largest} chunks)\n")
        print("| | " + " | ".join(label for _, label in METRICS) + " |\n|---|" + "---|" * len(METRICS))
        for row in record["rows"]:
            cells = " | ".join(interval(row["metrics"][key]) for key, _ in METRICS)
            print(f"| {row['label']} | {cells} |")
        for pair in record["pairs"]:
            if (pair["first"], pair["second"]) in PAIRS:
                cells = " | ".join(interval(pair["metrics"][key], sign=True) for key, _ in METRICS)
                print(f"| *{pair['first']} - {pair['second']}* | {cells} |")
        print()


if __name__ == "__main__":
    main()
