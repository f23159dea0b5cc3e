from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mia_serve.core import Encoder, MiaError, fuse_views
from mia_train import loop, trainer
from mia_train.collate import Collator, Sample
from mia_train.config import Recipe
from mia_train.losses import Candidates, PositiveKeys, info_nce
from mia_train.model import MiaModel
from mia_train.rows import Passage, Row
from mia_train.schema import LoraSection, LossConfig

from .conftest import make_rows

Build = Callable[..., Recipe]
LORA = {"rank": 2, "alpha": 4, "dropout": 0.0}


def log_of(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (Path(recipe.training.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses_of(recipe: Recipe) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in log_of(recipe) if "loss" in line}


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the next run stop after ``step``, with the schedule of the full run."""
    original = loop.MiaTrainer.training_step

    def training_step(self: loop.MiaTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(loop.MiaTrainer, "training_step", training_step)


@pytest.fixture
def stub_evaluation(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Evaluations return the values put into this list, one after the other."""
    values: list[float] = []

    def make(recipe: Recipe, encoder: Encoder) -> Any:
        return (lambda: {"mrr": values.pop(0), "r@10": 0.5}) if recipe.data.eval else None

    monkeypatch.setattr(trainer, "make_evaluation", make)
    yield values


def test_run_leaves_an_encoder_with_log_card_and_recipe(tiny_bert: Path, make_recipe: Build) -> None:
    from sentence_transformers import SentenceTransformer

    recipe = make_recipe(tiny_bert, loss={"negatives": "in_batch"})
    result = trainer.run(recipe)
    assert (result.steps, result.skipped) == (4, 0)
    assert result.rows_per_second > 0 and result.peak_memory_gib > 0
    lines = log_of(recipe)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    for key in ("loss", "grad_norm", "learning_rate", "rows_per_s", "tokens_per_s", "padding", "positive_similarity",
                "hardest_negative_similarity", "masked_negatives"):  # fmt: skip
        assert lines[0][key] is not None
    folder = result.folder
    for name in ("README.md", "recipe.yaml", "mia_encoder.json", "rows.jsonl", "checkpoint-4/recipe.yaml"):
        assert (folder / name).is_file()
    assert json.loads((folder / "mia_run.json").read_text()) == {"base": str(tiny_bert), "e1": ".", "k_sum": 5}
    texts = ["where was the quay", "the ferryman counted the lamps"]
    ours = Encoder.load(folder, device="cpu")
    assert ours.spec_hash != Encoder.load(tiny_bert, device="cpu").spec_hash
    theirs = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(ours.encode_documents(texts), theirs.encode_document(texts), atol=1e-5)
    np.testing.assert_allclose(ours.encode_queries(texts), theirs.encode_query(texts), atol=1e-5)


@pytest.mark.parametrize("lora", [None, LORA])
def test_TRN_17_TRN_18_resume_gives_the_losses_of_an_uninterrupted_run(
    lora: dict | None, tiny_bert: Path, tiny_qwen3: Path, make_recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_bert if lora is None else tiny_qwen3  # BERT with dropout: the random state must come back too
    options = {"training": {"warmup": 0.0}} | ({"lora": lora} if lora else {})
    whole = make_recipe(base, out="whole", **options)
    trainer.run(whole)
    cut = make_recipe(base, out="cut", **options)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(cut)
    trainer.run(cut, resume="auto")
    assert losses_of(cut) == pytest.approx(losses_of(whole), abs=1e-6)
    assert [line["step"] for line in log_of(cut)] == [line["step"] for line in log_of(whole)]
    one, other = (Encoder.load(r.training.output_dir, device="cpu") for r in (whole, cut))
    assert one.spec_hash == other.spec_hash
    if lora:
        folder = Path(cut.training.output_dir)
        assert (folder / "adapter_model.safetensors").is_file() and not (folder / "model.safetensors").exists()
        states = [
            torch.load(Path(r.training.output_dir) / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
            for r in (whole, cut)
        ]
        assert len(states[0]) == len(states[1]) > 0
        for key, state in states[0].items():
            assert torch.allclose(state["exp_avg"], states[1][key]["exp_avg"], atol=1e-7)


def test_TRN_19_the_best_checkpoint_is_the_one_that_is_kept(
    tiny_qwen3: Path, make_recipe: Build, stub_evaluation: list[float]
) -> None:
    stub_evaluation += [0.9, 0.1]
    recipe = make_recipe(
        tiny_qwen3,
        lora=LORA,
        data={"eval": "saltmarsh:test"},
        training={"max_steps": 2, "eval_steps": 1, "save_steps": 1, "metric": "mrr", "warmup": 0.0},
    )
    result = trainer.run(recipe)
    final = Encoder.load(result.folder, device="cpu")
    best, last = (Encoder.load(result.folder / f"checkpoint-{n}", device="cpu") for n in (1, 2))
    assert final.spec_hash == best.spec_hash != last.spec_hash
    evaluated = [line for line in log_of(recipe) if "eval_mrr" in line]
    assert [(line["step"], line["eval_mrr"]) for line in evaluated] == [(1, 0.9), (2, 0.1)]
    assert "0.900" in (result.folder / "README.md").read_text()


def test_a_best_step_between_two_saves_is_saved_as_well(
    tiny_bert: Path, make_recipe: Build, stub_evaluation: list[float]
) -> None:
    stub_evaluation += [0.9, 0.1, 0.1, 0.1]
    recipe = make_recipe(
        tiny_bert, data={"eval": "saltmarsh:test"}, training={"eval_steps": 1, "save_steps": 2, "metric": "mrr"}
    )
    folder = trainer.run(recipe).folder
    best = Encoder.load(folder / "checkpoint-1", device="cpu")
    assert best.spec_hash == Encoder.load(folder, device="cpu").spec_hash


def test_TRN_26_accumulation_gives_the_gradient_of_the_larger_batch(still_bert: Path, make_recipe: Build) -> None:
    norms = []
    for size, accumulation in ((8, 1), (1, 8), (2, 4)):
        recipe = make_recipe(
            still_bert,
            out=f"run{size}",
            training={"batch_size": size, "accumulation": accumulation, "max_steps": 3, "warmup": 0.0},
        )
        trainer.run(recipe)
        norms.append([(line["loss"], line["grad_norm"]) for line in log_of(recipe) if "loss" in line])
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-4)
    np.testing.assert_allclose(norms[2], norms[0], rtol=1e-4)


def test_TRN_10_the_logged_gradient_norm_is_that_of_the_logged_loss(still_bert: Path, make_recipe: Build) -> None:
    recipe = make_recipe(still_bert, training={"max_steps": 1, "batch_size": 4, "warmup": 0.0})
    seen: list[float] = []
    original = loop.MiaTrainer.compute_loss

    def compute_loss(self: loop.MiaTrainer, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, model, inputs, *args, **kwargs)
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        seen.extend([float(loss.detach()), float(torch.cat([g.flatten() for g in gradients]).norm())])
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.MiaTrainer, "compute_loss", compute_loss)
        trainer.run(recipe)
    line = log_of(recipe)[0]
    assert [line["loss"], line["grad_norm"]] == pytest.approx(seen, rel=1e-4)


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    original = loop.batch_loss
    calls = iter(range(1, 100))

    def batch_loss(*args: Any) -> Any:
        output = original(*args)
        return output._replace(loss=output.loss * float("inf")) if next(calls) in steps else output

    monkeypatch.setattr(loop, "batch_loss", batch_loss)


def test_TRN_28_a_non_finite_step_is_skipped_and_counted(
    tiny_bert: Path, make_recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2})
    recipe = make_recipe(tiny_bert, training={"warmup": 0.0, "save_steps": 1, "weight_decay": 0.1})
    result = trainer.run(recipe)
    assert result.skipped == 1
    assert log_of(recipe)[1]["grad_norm"] is None and log_of(recipe)[3]["skipped_steps"] == 1
    weights = Encoder.load(result.folder, device="cpu").model.state_dict()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def test_TRN_28_the_run_aborts_after_five_and_saves_the_rows(
    tiny_bert: Path, make_recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, set(range(2, 100)))
    recipe = make_recipe(tiny_bert, training={"max_steps": 10})
    with pytest.raises(RuntimeError, match="5 steps in a row"):
        trainer.run(recipe)
    saved = json.loads((Path(recipe.training.output_dir) / "nonfinite_batches.json").read_text())
    assert [record["step"] for record in saved] == [2, 3, 4, 5, 6]
    assert all(len(record["query_ids"]) == 2 for record in saved)


def test_TRN_25_trained_weights_are_float32_under_bf16(tiny_qwen3: Path, make_recipe: Build) -> None:
    recipe = make_recipe(
        tiny_qwen3,
        model={"dtype": "bf16"},
        lora=LORA,
        training={"bf16": True, "max_steps": 2, "learning_rate": 1e-5, "warmup": 0.0, "gradient_checkpointing": True},
    )
    result = trainer.run(recipe)
    encoder = Encoder.load(result.folder, device="cpu", dtype="float32")
    adapters = {n: p for n, p in encoder.model.named_parameters() if "lora_B" in n}
    assert adapters
    assert all(p.dtype == torch.float32 and bool((p != 0).any()) for p in adapters.values())  # B starts at 0: it moved


def test_TRN_25_bfloat16_masters_are_warned_about(tiny_bert: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder = Encoder.load(tiny_bert, device="cpu", dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        loop.MiaModel(encoder)
    assert "not float32" in caplog.text
    caplog.clear()
    model = loop.MiaModel(Encoder.load(tiny_bert, device="cpu", dtype="bfloat16"), lora=LoraSection(rank=2, alpha=4))
    assert "not float32" not in caplog.text
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_the_signature_view_trains_and_full_state_saves(
    tiny_qwen3: Path, make_recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(  # as sharded parameters are saved: from a gathered state dict
        loop.MiaTrainer, "save_model",
        lambda self, output_dir=None, _internal_call=False: self._save(output_dir, self.model.state_dict()),
    )  # fmt: skip
    recipe = make_recipe(
        tiny_qwen3,
        lora=LORA,
        data={"view": "signature", "signature_dropout": 0.3, "signature_noise": 0.3},
        training={"warmup": 0.0},
    )
    result = trainer.run(recipe)
    final, saved = (Encoder.load(f, device="cpu") for f in (result.folder, result.folder / "checkpoint-4"))
    assert final.spec_hash == saved.spec_hash
    facts = json.loads((result.folder / "mia_run.json").read_text())
    assert facts == {"base": str(tiny_qwen3), "e1": str(tiny_qwen3), "k_sum": 5, "signature_mode": "coverage"}


def test_the_joint_loss_trains(tiny_qwen3: Path, make_recipe: Build) -> None:
    from mia_train.rows import Nodes

    nodes = Nodes((Passage("e", "Ann : a clerk"),), (Passage("f", "Bo : a dog"),))
    rows = [replace(row, nodes=nodes if i % 2 else None) for i, row in enumerate(make_rows())]
    recipe = make_recipe(tiny_qwen3, rows=rows, loss={"beta": 0.5}, training={"max_steps": 2})
    assert trainer.run(recipe).loss is not None


def bad(rows: list[Row], **change: Any) -> list[Row]:
    return [*rows[:3], replace(rows[3], **change), *rows[4:]]


@pytest.mark.parametrize(
    ("rows", "sections", "message"),
    [
        (bad(make_rows(), negatives=()), {}, "row 'q3' has no negatives"),
        (
            bad(make_rows(), negatives=(Passage("x", make_rows()[3].positives[0].text.upper()),)),
            {},
            "row 'q3' has no neg",
        ),
        (make_rows(1, negatives=0), {"loss": {"negatives": "in_batch"}}, "no other row has another positive"),
        (
            make_rows(),
            {
                "data": {"hard_negatives": 0, "simple_negatives": 0},
                "loss": {"negatives": "in_batch"},
                "training": {"batch_size": 1},
            },
            "at least 2 candidates",
        ),
        (make_rows(), {"training": {"max_steps": None, "epochs": 1, "warmup": 4}}, "leave nothing of the 4"),
        (bad(make_rows(), query="lamps " * 200), {}, "row 'q3': query"),
        (make_rows(), {"loss": {"beta": 0.5}}, "no node token"),
        ([replace(r, signature=None) for r in make_rows()], {"data": {"view": "signature"}}, "no row has a signature"),
    ],
)
def test_rows_that_cannot_train_are_refused_before_the_first_step(
    rows: list[Row], sections: dict, message: str, tiny_bert: Path, make_recipe: Build
) -> None:
    with pytest.raises(MiaError, match=message):
        trainer.run(make_recipe(tiny_bert, rows=rows, **sections))


def test_a_folder_with_checkpoints_is_not_written_into_by_chance(tiny_bert: Path, make_recipe: Build) -> None:
    recipe = make_recipe(tiny_bert, training={"max_steps": 1})
    trainer.run(recipe)
    with pytest.raises(MiaError, match="--resume auto"):
        trainer.run(recipe)
    with pytest.raises(MiaError, match=r"no trainer_state\.json"):
        trainer.run(recipe, resume=str(tiny_bert))


def test_a_checkpoint_that_was_cut_short_is_passed_over(tiny_bert: Path, make_recipe: Build) -> None:
    recipe = make_recipe(tiny_bert)
    folder = trainer.run(recipe).folder
    (folder / "checkpoint-4" / "trainer_state.json").unlink()
    trainer.run(recipe, resume="auto")  # from step 2
    assert sorted(losses_of(recipe)) == [1, 2, 3, 4]
    assert [line["step"] for line in log_of(recipe)].count(3) == 1


def test_evaluation_searches_the_benchmark_with_the_weights_as_they_are(tiny_bert: Path) -> None:
    from mia_serve.signature import Signature
    from mia_train.evaluate import RetrievalEvaluation

    from .test_rows import benchmark

    encoder = Encoder.load(tiny_bert, device="cpu")
    toy = benchmark()
    signatures = [[Signature.from_texts(["the boat"]) for _ in haystack.queries] for haystack in toy.haystacks]
    found = RetrievalEvaluation(toy, encoder, signatures)()
    assert {"mrr", "r@10", "plain_mrr"} <= set(found)
    assert found["plain_mrr"] == RetrievalEvaluation(toy, encoder)()["mrr"]


def test_losses_on_the_single_views_are_added_to_that_of_the_fused_query(tiny_bert: Path) -> None:
    encoder = Encoder.load(tiny_bert)
    rows = make_rows(4)
    collator = Collator(encoder, rows, hard_negatives=1, use_signatures=True)
    batch = collator([Sample(row, i, 0) for i, row in enumerate(rows)])
    model = MiaModel(encoder).eval()
    vectors = model(batch.groups)[batch.order]
    query, target = vectors[batch.query_readouts], vectors[batch.chunk_readouts]
    keys = batch.documents
    single = [
        info_nce(
            view,
            Candidates(vectors[keys.readouts], keys.ids, keys.texts, keys.valid),
            PositiveKeys(keys.positive_ids, keys.positive_texts),
            negatives="in_batch",
            temperature=0.05,
        ).loss
        for view in (fuse_views(query, target, 0.5), query, target)
    ]
    config = LossConfig(negatives="in_batch", temperature=0.05, query_view=0.3, signature_view=0.5)
    expected = single[0] + 0.3 * single[1] + 0.5 * single[2]
    assert torch.allclose(loop.batch_loss(vectors, batch, config, 0.5).loss, expected)
    assert len({round(x.item(), 4) for x in single}) == 3
