"""Faults that trainers of retrievers have had, each as a tiny input; those not here stand beside the part they test."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mia_serve.core import Encoder, MiaError
from mia_serve.signature import Signature
from mia_train import trainer
from mia_train.collate import Collator
from mia_train.config import Recipe
from mia_train.evaluate import RetrievalEvaluation
from mia_train.losses import Candidates, PositiveKeys, info_nce
from mia_train.schedule import Sample, Schedule
from tests.train.conftest import make_recipe, make_rows, still_bert
from tests.train.test_rows import benchmark

__all__ = ["make_recipe", "still_bert"]  # fixtures
Build = Callable[..., Recipe]


def log_of(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (Path(recipe.training.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def test_TRN_29_more_negatives_are_used_and_counted(still_bert: Path, make_recipe: Build) -> None:
    losses = []
    for hard in (1, 4):
        data = {"hard_negatives": hard, "simple_negatives": 0}
        recipe = make_recipe(still_bert, make_rows(8, negatives=4), out=f"run-{hard}", data=data)
        trainer.run(recipe)
        assert [line["negatives_per_row"] for line in log_of(recipe)] == [hard] * 4
        losses.append(log_of(recipe)[0]["loss"])
    assert losses[1] > losses[0]


def test_TRN_29_a_recipe_that_asks_for_more_negatives_than_any_row_has_is_refused(
    still_bert: Path, make_recipe: Build
) -> None:
    recipe = make_recipe(still_bert, make_rows(8, negatives=3), data={"hard_negatives": 4})
    with pytest.raises(MiaError, match=r"data\.hard_negatives \+ data\.simple_negatives is 5, but no row .* than 3"):
        trainer.run(recipe)


def test_TRN_05_every_row_comes_once_a_pass(still_bert: Path) -> None:
    rows = make_rows(10)
    schedule = Schedule(rows, 30, seed=3)
    for epoch in range(3):
        seen = [schedule[i].row.query_id for i in range(10 * epoch, 10 * epoch + 10)]
        assert sorted(seen) == sorted(row.query_id for row in rows)


def test_TRN_10_a_duplicated_batch_has_the_same_gradient(still_bert: Path) -> None:
    """Own negatives: eight rows that are four twice over."""
    norms = []
    for times in (1, 2):
        encoder = Encoder.load(still_bert, device="cpu")
        rows = make_rows(4)
        collator = Collator(encoder, rows, hard_negatives=2)
        batch = collator([Sample(row, i, 0) for i, row in enumerate(rows)] * times)
        hidden = torch.cat([_vectors(encoder, group) for group in batch.groups])[batch.order]
        keys = batch.documents
        info_nce(
            hidden[batch.query_readouts],
            Candidates(hidden[keys.readouts], keys.ids, keys.texts, keys.valid),
            PositiveKeys(keys.positive_ids, keys.positive_texts),
            temperature=0.05,
        ).loss.backward()
        gradients = [p.grad.flatten() for p in encoder.model.parameters() if p.grad is not None]
        norms.append(float(torch.cat(gradients).norm()))
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def _vectors(encoder: Encoder, group: Any) -> torch.Tensor:
    from mia_serve.core import embed_batch

    return embed_batch(encoder.model, group)


def test_TRN_36_evaluations_leave_no_process_or_thread_behind(still_bert: Path) -> None:
    encoder = Encoder.load(still_bert, device="cpu")
    toy = benchmark()
    signatures = [[Signature.from_texts(["the boat"]) for _ in haystack.queries] for haystack in toy.haystacks]
    evaluation = RetrievalEvaluation(toy, encoder, signatures)
    first = evaluation()
    before = len(multiprocessing.active_children()), threading.active_count(), len(os.listdir("/proc/self/fd"))
    results = [evaluation() for _ in range(5)]
    assert all(result == first for result in results)
    after = len(multiprocessing.active_children()), threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert after == before


def test_TRN_22_training_and_serving_build_the_same_ids(still_bert: Path, tmp_path: Path) -> None:
    """A prompt changed for training travels with the checkpoint."""
    from dataclasses import replace

    encoder = Encoder.load(still_bert, device="cpu")
    spec = encoder.spec.with_changes(template=replace(encoder.spec.template, query_prefix="the man: "))
    trained = Encoder(encoder.model, encoder.tokenizer, spec, encoder.device)
    trained.save(tmp_path / "saved")
    served = Encoder.load(tmp_path / "saved")
    row = make_rows(1)[0]
    batch = Collator(trained, [row], hard_negatives=1, use_signatures=True, groups=1)([Sample(row, 0, 0)])
    ids = [group_row[: int(mask.sum())].tolist() for group in batch.groups
           for group_row, mask in zip(group.input_ids, group.attention_mask, strict=True)]  # fmt: skip
    assert row.signature is not None
    expected = [s.ids for s in served.tokenise_query(row.query, list(row.signature))]
    assert len(expected) == 2 and all(sequence in ids for sequence in expected)
    assert expected[0] != Encoder.load(still_bert).tokenise_query(row.query)[0].ids
    np.testing.assert_allclose(
        served.encode_queries([row.query], [list(row.signature)]),
        trained.encode_queries([row.query], [list(row.signature)]),
        atol=1e-6,
    )
