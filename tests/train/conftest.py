"""Rows, recipes and models for the tests of training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mia_train.config import Recipe
from mia_train.rows import Passage, Row, write_rows

SUMMARIES = [
    "The ferryman counts the lamps and finds one missing.",
    "She hides the ledger under the floor.",
    "Nobody says where the boat has gone.",
    "The key is under the clock.",
]


def make_rows(n: int = 8, negatives: int = 3) -> list[Row]:
    """Return n different rows: one or two positives, hard and simple negatives, two summaries each."""
    words = [
        "ferryman",
        "lamps",
        "quay",
        "ledger",
        "floor",
        "key",
        "clock",
        "village",
        "boat",
        "night",
        "missing",
        "man",
    ]
    rows = []
    for i in range(n):
        topic = f"{words[i % 12]} {words[(i * 5 + 3) % 12]}"
        rows.append(
            Row(
                query_id=f"q{i}",
                query=f"where was the {topic}",
                positives=tuple(Passage(f"p{i}.{j}", f"the {topic} {words[j]} on the quay") for j in range(1 + i % 2)),
                negatives=tuple(
                    Passage(f"n{i}.{j}", f"one {words[(i + j * 7) % 12]} the night {j}", ("hard", "simple")[j % 2])
                    for j in range(negatives)
                ),
                signature=(SUMMARIES[i % 4], SUMMARIES[(i + 1) % 4]),
                group=f"g{i % 2}",
                source="test",
            )
        )
    return rows


@pytest.fixture
def make_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Return a builder of recipes over eight rows; keyword arguments are sections that are merged in."""

    def build(base: Path | str, rows: list[Row] | None = None, out: str = "run", **sections: dict[str, Any]) -> Recipe:
        file = tmp_path / "rows.jsonl"
        write_rows(file, rows if rows is not None else make_rows())
        content: dict[str, Any] = {
            "model": {"base": str(base)},
            "data": {"train": [str(file)], "hard_negatives": 1, "simple_negatives": 1},
            "loss": {"temperature": 0.05},
            "training": {
                "output_dir": str(tmp_path / out),
                "max_steps": 4,
                "batch_size": 2,
                "learning_rate": 1e-3,
                "log_steps": 1,
                "save_steps": 2,
            },
        }
        for section, values in sections.items():
            content.setdefault(section, {}).update(values)
        return Recipe.model_validate(content)

    return build


@pytest.fixture
def still_bert(tiny_bert: Path, tmp_path: Path) -> Path:
    """The tiny BERT without dropout."""
    folder = tmp_path / "still-bert"
    shutil.copytree(tiny_bert, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
