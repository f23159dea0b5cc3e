"""BM25 over LoCoMo's sessions gives the chat-memory study's figures to four digits (arXiv 2606.04194)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from mia_serve.fusion import rank
from mia_serve.lexical import BM25Index

DATA = os.environ.get("MIA_DATA")
LOCOMO = Path(DATA or "", "locomo", "locomo10.json")
pytestmark = pytest.mark.skipif(not DATA or not LOCOMO.is_file(), reason="needs MIA_DATA with locomo/locomo10.json")


def gold_sessions(evidence, strict):
    """Session numbers of a question's evidence; strict takes only strings that are one id, as the study does."""
    found = set()
    for item in evidence or []:
        matches = [re.fullmatch(r"D(\d+):\d+", item.strip())] if strict else re.finditer(r"D(\d+):\d+", item)
        found |= {int(match[1]) for match in matches if match}
    return found


def five_metrics(order, gold):
    """Hit@1, recall@3, recall@5, MRR, nDCG@5."""
    relevant = np.array([number in gold for number in order])
    gains = relevant[:5] / np.log2(np.arange(2, 7))
    ideal = (1 / np.log2(np.arange(2, 7)))[: len(gold)].sum()
    first = int(np.argmax(relevant))
    return [
        relevant[0],
        relevant[:3].sum() / len(gold),
        relevant[:5].sum() / len(gold),
        1 / (first + 1),
        gains.sum() / ideal,
    ]


@pytest.mark.parametrize(
    ("strict", "questions", "figures"),
    [(True, 1978, [0.6395, 0.7788, 0.8325, 0.7504, 0.7456]), (False, 1982, [0.6382, 0.7775, 0.8314, 0.7494, 0.7445])],
)
def test_locomo_figures_to_four_digits(strict, questions, figures):
    rows = []
    for sample in json.loads(LOCOMO.read_text(encoding="utf-8")):
        talk = sample["conversation"]
        numbers = sorted(int(key.split("_")[1]) for key in talk if re.fullmatch(r"session_\d+", key))
        texts = ["\n".join(f"{t['speaker']}: {t['text']}" for t in talk[f"session_{n}"]) for n in numbers]
        asked = [(row["question"], gold_sessions(row.get("evidence"), strict) & set(numbers)) for row in sample["qa"]]
        asked = [(question, gold) for question, gold in asked if gold]
        index = BM25Index([f"session_{number}" for number in numbers], texts)
        for order, (_, gold) in zip(rank(index.scores([question for question, _ in asked])), asked, strict=True):
            rows.append(five_metrics([numbers[column] for column in order], gold))
    assert len(rows) == questions
    assert np.round(np.mean(rows, axis=0), 4).tolist() == figures
