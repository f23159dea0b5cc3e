"""Distillation and Matryoshka losses against hand-computed values and sentence-transformers; what is logged of σ."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mia_serve.core import Encoder, MiaError
from mia_train import trainer
from mia_train.collate import Collator, TrainBatch
from mia_train.config import Recipe
from mia_train.losses import distillation
from mia_train.model import MiaModel
from mia_train.objective import batch_loss
from mia_train.rows import Passage, Row, parse_row, row_to_json
from mia_train.schedule import Sample
from mia_train.schema import DistillConfig, LossConfig
from tests.train.conftest import make_rows

Build = Callable[..., Recipe]
NAN = float("nan")
TEXTS = [
    ("where was the boat", "the ferryman counted the lamps", "nobody would say", 3.0, -1.0),
    ("who hid the ledger", "she kept the ledger under the floor", "the village at night", 0.5, 0.25),
    ("lamps on the quay", "one missing lamp along the quay", "he found that", 1.0, 2.0),
]
ROWS = [
    Row(q, q, (Passage(p, p, score=good),), (Passage(n, n, score=bad),)) for q, p, n, good, bad in TEXTS
]  # fmt: skip
TEACHER = torch.tensor([row[3:] for row in TEXTS])


def forward(base: Path, rows: list[Row] = ROWS, **collator: Any) -> tuple[MiaModel, TrainBatch, Tensor]:
    encoder = Encoder.load(base, device="cpu")
    batch = Collator(encoder, rows, **({"hard_negatives": 1} | collator))(
        [Sample(row, i, 0) for i, row in enumerate(rows)]
    )
    net = MiaModel(encoder).eval()
    return net, batch, net(batch.groups)[batch.order]


def test_kl_equals_the_formula() -> None:
    scores, teacher = torch.tensor([[0.6, 0.2, 0.1]]), torch.tensor([[2.0, 1.0, -1.0]])
    p, q = (teacher * 0.1 / 0.5).softmax(1)[0], (scores / 0.5).softmax(1)[0]
    expected = sum(float(p[i]) * math.log(float(p[i]) / float(q[i])) for i in range(3))
    assert float(distillation(scores, teacher, temperature=0.5, teacher_scale=0.1)) == pytest.approx(expected, abs=1e-6)
    assert float(distillation(scores, scores, temperature=0.5)) == pytest.approx(0.0, abs=1e-7)


def test_margin_mse_equals_the_formula() -> None:
    scores, teacher = torch.tensor([[0.6, 0.2, 0.1]]), torch.tensor([[2.0, 1.0, -1.0]])
    expected = ((0.4 - 0.5) ** 2 + (0.5 - 1.5) ** 2) / 2  # leads .4 and .5 against half of 1 and 3
    assert float(distillation(scores, teacher, kind="margin_mse", teacher_scale=0.5)) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_passages_and_rows_without_teacher_scores_take_no_part(kind: Any) -> None:
    scores = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    teacher = torch.tensor([[1.0, NAN, 0.5], [NAN, 1.0, 1.0], [1.0, NAN, NAN], [NAN, NAN, NAN]])
    loss = distillation(scores, teacher, kind=kind)
    alone = distillation(scores[:1, [0, 2]], teacher[:1, [0, 2]], kind=kind)
    assert float(loss.detach()) == pytest.approx(float(alone.detach()) / 4, rel=1e-6)
    loss.backward()
    assert scores.grad is not None and bool(torch.isfinite(scores.grad).all())
    assert bool((scores.grad[1:] == 0).all()) and bool((scores.grad[0, [0, 2]] != 0).all())
    assert scores.grad[0, 1] == 0


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_TRN_30_no_gradient_flows_into_the_teacher(kind: Any) -> None:
    scores = torch.rand(2, 3, requires_grad=True)
    teacher = scores * 2.0 + 0.1  # made by the student itself
    distillation(scores, teacher, kind=kind).backward()
    ours = scores.grad.clone()
    scores.grad = None
    distillation(scores, teacher.detach().clone(), kind=kind).backward()
    torch.testing.assert_close(ours, scores.grad)


def st_model(base: Path, out: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    Encoder.load(base, device="cpu").save(out)
    return SentenceTransformer(str(out), device="cpu").eval()


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_distillation_equals_sentence_transformers(kind: Any, still_bert: Path, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss

    theirs = st_model(still_bert, tmp_path / "st")
    features = [theirs.preprocess([row[k] for row in TEXTS]) for k in range(3)]
    if kind == "kl":
        expected = DistillKLDivLoss(theirs, temperature=0.5)(features, TEACHER) / 0.5**2
    else:
        expected = MarginMSELoss(theirs)(features, TEACHER)
    expected.backward()
    net, batch, vectors = forward(tmp_path / "st")
    distill = DistillConfig(kind=kind, temperature=0.5)
    ours = batch_loss(vectors, batch, LossConfig(contrastive=0.0, distill=distill), 0.5)
    ours.loss.backward()
    assert float(ours.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(ours.distill) == pytest.approx(float(expected.detach()), rel=1e-5)
    theirs_by_name = dict(theirs[0].auto_model.named_parameters())
    for name, parameter in net.backbone.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs_by_name[name].grad, atol=1e-5, rtol=1e-3)


def test_matryoshka_equals_sentence_transformers(still_bert: Path, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

    theirs = st_model(still_bert, tmp_path / "st")
    features = [theirs.preprocess([row[k] for row in TEXTS]) for k in range(3)]
    width = theirs.get_embedding_dimension()
    widths = (width // 2, width // 4)
    loss = MatryoshkaLoss(theirs, MultipleNegativesRankingLoss(theirs, scale=20.0), [width, *widths])
    expected = loss(features, torch.zeros(3))
    _, batch, vectors = forward(tmp_path / "st")
    config = LossConfig(negatives="in_batch", temperature=0.05, matryoshka=widths)
    ours = batch_loss(vectors, batch, config, 0.5).loss
    assert float(ours.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    whole = batch_loss(vectors, batch, config.model_copy(update={"matryoshka": ()}), 0.5).loss
    assert float(ours.detach()) > float(whole.detach())


def test_distillation_is_added_by_its_weight_and_to_every_view(still_bert: Path) -> None:
    rows = [replace(row, signature=("the boat was hidden at night",)) for row in ROWS]
    _, batch, vectors = forward(still_bert, rows, use_signatures=True)

    def loss(**config: Any) -> float:
        return float(batch_loss(vectors, batch, LossConfig(negatives="in_batch", temperature=0.05, **config), 0.5).loss)

    distill = DistillConfig(weight=3.0)
    both = loss(distill=distill, query_view=0.5)
    only = loss(distill=distill, query_view=0.5, contrastive=0.0)
    assert both == pytest.approx(loss(query_view=0.5) + only, rel=1e-5)
    assert only == pytest.approx(3.0 * loss(distill=DistillConfig(), query_view=0.5, contrastive=0.0), rel=1e-5)
    assert only > loss(distill=distill, contrastive=0.0)


def test_loss_with_and_without_signature_is_over_the_rows_that_have_one(still_bert: Path) -> None:
    rows = [replace(row, signature=("the boat was hidden at night",) if i else None) for i, row in enumerate(ROWS)]
    _, batch, vectors = forward(still_bert, rows, use_signatures=True)
    found = batch_loss(vectors, batch, LossConfig(negatives="in_batch", temperature=0.05), 0.5)
    queries = batch_loss(vectors, batch, LossConfig(negatives="in_batch", temperature=0.05), 0.0).contrast.rows
    assert found.signature_rows == 2
    assert float(found.with_signature) == pytest.approx(float(found.contrast.rows[1:].sum()))
    assert float(found.without_signature) == pytest.approx(float(queries[1:].sum()))
    assert float(found.contrast.rows[0]) == pytest.approx(float(queries[0]), rel=1e-5)


def test_a_run_logs_what_the_signature_is_worth_and_what_is_distilled(still_bert: Path, make_recipe: Build) -> None:
    rows = [
        replace(row, positives=tuple(replace(p, score=1.0) for p in row.positives),
                negatives=tuple(replace(n, score=0.1) for n in row.negatives))
        for row in make_rows()
    ]  # fmt: skip
    recipe = make_recipe(
        still_bert, rows, data={"view": "signature"}, loss={"negatives": "in_batch", "distill": {"weight": 0.5}}
    )
    trainer.run(recipe)
    lines = [json.loads(x) for x in (Path(recipe.training.output_dir) / "metrics.jsonl").read_text().splitlines()]
    for line in (line for line in lines if "loss" in line):
        assert line["loss"] == pytest.approx(line["loss_with_signature"] + 0.5 * line["distill_loss"], rel=1e-4)
        assert line["loss_without_signature"] != pytest.approx(line["loss_with_signature"], rel=1e-6)


def test_distillation_without_teacher_scores_is_refused(tiny_bert: Path, make_recipe: Build) -> None:
    with pytest.raises(MiaError, match=r"loss\.distill: no row has teacher scores.*mia-train mine"):
        trainer.run(make_recipe(tiny_bert, loss={"distill": {}}))


def test_a_run_trains_and_records_matryoshka_widths(still_bert: Path, make_recipe: Build, tmp_path: Path) -> None:
    recipe = make_recipe(still_bert, loss={"negatives": "in_batch", "matryoshka": [16, 8]})
    folder = trainer.run(recipe).folder
    whole, cut = Encoder.load(folder), Encoder.load(folder, truncate_dim=8)
    assert whole.spec.matryoshka == (16, 8) and whole.spec.truncate_dim is None and cut.dim == 8
    texts = ["where was the boat", "lamps on the quay"]
    full, short = whole.encode_documents(texts), cut.encode_documents(texts)
    expected = torch.nn.functional.normalize(torch.from_numpy(full[:, :8]), dim=1)
    torch.testing.assert_close(torch.from_numpy(short), expected, atol=1e-6, rtol=0)
    assert whole.spec_hash != cut.spec_hash
    cut.save(tmp_path / "cut")
    assert Encoder.load(tmp_path / "cut").dim == 8
    with pytest.raises(MiaError, match="truncate_dim is 12; allowed: 32, 16, 8"):
        Encoder.load(folder, truncate_dim=12)
    with pytest.raises(MiaError, match=r"loss\.matryoshka: 32 is not below the 32"):
        trainer.run(make_recipe(still_bert, out="other", loss={"negatives": "in_batch", "matryoshka": [32]}))


def test_a_signature_is_fused_after_cutting(still_bert: Path) -> None:
    """Cut parts are fused as unit vectors, so a score is the sum of the two cut views' cosines at any width."""
    cut = Encoder.load(still_bert, truncate_dim=8)
    fused = cut.encode_queries(["where was the boat"], [["the boat was hidden"]], alpha=0.5)
    views = cut.encode_views(["where was the boat"], [["the boat was hidden"]])
    both = torch.from_numpy(views.query + views.chunk)
    torch.testing.assert_close(torch.from_numpy(fused), torch.nn.functional.normalize(both, dim=1), atol=1e-6, rtol=0)


def test_teacher_scores_survive_a_file() -> None:
    row = ROWS[0]
    assert parse_row(json.loads(json.dumps(row_to_json(row))), "x:1") == row
    raw = row_to_json(row)
    raw["negatives"][0]["score"] = NAN
    with pytest.raises(MiaError, match=r"x:1: 'negatives'\[0\]\.score is nan; it must be a finite number"):
        parse_row(raw, "x:1")
    for score in (1e39, 10**400):  # finite, but not in float32: the loss would be NaN
        raw["negatives"][0]["score"] = score
        with pytest.raises(MiaError, match="it must be a finite number below 1e30"):
            parse_row(raw, "x:1")
    raw["negatives"][0]["score"] = 3
    assert parse_row(raw, "x:1").negatives[0].score == 3


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_the_objective_is_float32_under_autocast(kind: Any, still_bert: Path) -> None:
    _, batch, vectors = forward(still_bert)
    config = LossConfig(negatives="in_batch", temperature=0.05, matryoshka=(16,), distill=DistillConfig(kind=kind))
    plain = batch_loss(vectors, batch, config, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = batch_loss(vectors, batch, config, 0.5)
    assert float(mixed.loss.detach()) == pytest.approx(float(plain.loss.detach()), abs=1e-6)
    assert float(mixed.distill) == pytest.approx(float(plain.distill), abs=1e-7)


@pytest.mark.parametrize("widths", ["16", "null", "[16.5]", "[true]", "[0]"])
def test_a_spec_with_broken_widths_is_one_line(widths: str, still_bert: Path, tmp_path: Path) -> None:
    Encoder.load(still_bert, device="cpu").save(tmp_path / "e")
    file = tmp_path / "e" / "mia_encoder.json"
    file.write_text(file.read_text().replace('"matryoshka": []', f'"matryoshka": {widths}'))
    with pytest.raises(MiaError, match=r"mia_encoder\.json: matryoshka is .*; allowed: a list of widths"):
        Encoder.load(tmp_path / "e", device="cpu")
