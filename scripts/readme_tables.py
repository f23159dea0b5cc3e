#!/usr/bin/env python3
"""Print the README's tables of public data from the records in scripts/receipts/."""

from __future__ import annotations

import json
from pathlib import Path

RECEIPTS = Path(__file__).resolve().parent / "receipts"
SETS = {
    "fairytaleqa_val_books": "FairytaleQA, whole fairy book",
    "fairytaleqa_val_series": "FairytaleQA, all books pooled",
    "qmsum_val_series": "QMSum, all meetings pooled",
    "locomo_series": "LoCoMo, all conversations pooled",
    "saltmarsh_test_series": "Saltmarsh, all books pooled",
}
ROWS = ("base", "e1", "prior", "none", "first_k", "coverage", "coverage_prior", "shuffled", "oracle")
PAIRS = {
    ("e1", "base"): "E1 - base",
    ("prior", "e1"): "signature as prior - E1",
    ("coverage", "e1"): "E2 with coverage signature - E1",
    ("coverage", "none"): "… - E2 without signature",
    ("coverage", "shuffled"): "… - E2 with another question's",
    ("coverage_prior", "e1"): "E2 with it, and as prior - E1",
    ("oracle", "e1"): "E2 with the gold session* - E1",
}


def main() -> None:
    records = {name: json.loads((RECEIPTS / f"{name}.json").read_text("utf-8")) for name in SETS}
    print("| R@10 / MRR | " + " | ".join(SETS.values()) + " |\n|---|" + "---|" * len(SETS))
    facts = [r["benchmark"] for r in records.values()]
    sizes = [f"{f['queries']} in {f['groups']}, up to {f['haystack_sizes']['max']} chunks" for f in facts]
    print("| *questions in groups* | " + " | ".join(sizes) + " |")
    for key in ROWS:
        cells, label = [], ""
        for record in records.values():
            row = next((r for r in record["rows"] if r["key"] == key), None)
            label = row["label"] if row else label
            cells.append(f"{row['metrics']['r@10']['mean']:.3f} / {row['metrics']['mrr']['mean']:.3f}" if row else "")
        print(f"| {label} | " + " | ".join(cells) + " |")
    print("\n| difference in R@10 | " + " | ".join(SETS.values()) + " |\n|---|" + "---|" * len(SETS))
    for (first, second), label in PAIRS.items():
        cells = []
        for record in records.values():
            pair = next((p for p in record["pairs"] if (p["first"], p["second"]) == (first, second)), None)
            value = pair["metrics"]["r@10"] if pair else None
            cells.append(f"{value['mean']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]" if value else "")
        print(f"| {label} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
