"""The gradient cache gives the gradient of one large forward, whatever the mini-batches."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mia_serve.core import Encoder, MiaError
from mia_train import trainer
from mia_train.collate import Collator, TrainBatch, plan_by_tokens
from mia_train.config import Recipe
from mia_train.gradcache import cached_backward
from mia_train.model import MiaModel
from mia_train.objective import batch_loss
from mia_train.rows import Nodes, Passage
from mia_train.schedule import Sample
from mia_train.schema import DistillConfig, LoraSection, LossConfig
from tests.train.conftest import make_rows
from tests.train.test_trainer import poison

Build = Callable[..., Recipe]
CONFIG = LossConfig(negatives="in_batch", temperature=0.05, query_view=0.5)
ALONE, SOME, ALL = 1, 60, 100_000  # tokens a forward


def build(base: Path, tokens: int, **model: Any) -> tuple[MiaModel, TrainBatch]:
    """Return a model in training mode, dropout on, and a batch of eight rows with signatures."""
    torch.manual_seed(0)
    encoder = Encoder.load(base, device="cpu")
    net = MiaModel(encoder, **model).train()
    torch.manual_seed(1)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:  # zero at the start, and with it every gradient of lora_A
            torch.nn.init.normal_(parameter, std=0.2)
    rows = make_rows(8)
    collator = Collator(encoder, rows, hard_negatives=2, use_signatures=True, group_tokens=tokens)
    return net, collator([Sample(row, i, 0) for i, row in enumerate(rows)])


def loss_of(batch: TrainBatch) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def loss(vectors: Tensor) -> tuple[Tensor, Tensor]:
        found = batch_loss(vectors[batch.order], batch, CONFIG, 0.5).loss
        return found, found.detach()

    return loss


def gradients(net: MiaModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def plain(net: MiaModel, batch: TrainBatch, times: int = 1) -> tuple[float, dict[str, Tensor]]:
    """The reference: all groups in one graph. Same groups, so the same draws of dropout."""
    net.zero_grad()
    torch.manual_seed(7)
    losses = [loss_of(batch)(net(batch.groups))[0] for _ in range(times)]
    torch.stack(losses).sum().backward()
    return float(losses[-1].detach()), gradients(net)


def cached(net: MiaModel, batch: TrainBatch, times: int = 1, **options: Any) -> tuple[float, dict[str, Tensor]]:
    net.zero_grad()
    torch.manual_seed(7)
    losses = [cached_backward(net, batch.groups, loss_of(batch), **options) for _ in range(times)]
    return float(losses[-1]), gradients(net)


def assert_equal(ours: tuple[float, dict[str, Tensor]], reference: tuple[float, dict[str, Tensor]]) -> None:
    assert ours[0] == pytest.approx(reference[0], abs=1e-6)
    assert ours[1].keys() == reference[1].keys() != set()
    largest = max(float(g.abs().max()) for g in reference[1].values())
    assert largest > 1e-3
    for name, gradient in reference[1].items():
        torch.testing.assert_close(ours[1][name], gradient, atol=2e-6 * max(1.0, largest), rtol=1e-4, msg=name)


@pytest.mark.parametrize("tokens", [ALONE, SOME, 200, ALL])
@pytest.mark.parametrize("base", ["tiny_bert", "tiny_qwen3"])
def test_TRN_07_gradient_equals_the_plain_one_for_every_mini_batch(
    base: str, tokens: int, request: pytest.FixtureRequest
) -> None:
    net, batch = build(request.getfixturevalue(base), tokens)
    assert {ALONE: len(batch.groups) > 20, ALL: len(batch.groups) == 1}.get(tokens, 1 < len(batch.groups) < 20)
    assert_equal(cached(net, batch), plain(net, batch))


def test_TRN_07_dropout_is_drawn_once(tiny_bert: Path) -> None:
    """With dropout the loss differs from that without, and random numbers go on as after a plain step."""
    net, batch = build(tiny_bert, SOME)
    loss, _ = cached(net, batch)
    after = torch.rand(4)
    assert loss != pytest.approx(cached(net.eval(), batch)[0], abs=1e-4)
    plain(net.train(), batch)
    torch.testing.assert_close(torch.rand(4), after)


def test_TRN_07_two_steps_before_the_gradient_is_used(tiny_bert: Path) -> None:
    net, batch = build(tiny_bert, SOME)
    assert_equal(cached(net, batch, times=2), plain(net, batch, times=2))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_TRN_33_with_lora_and_gradient_checkpointing(checkpointing: bool, tiny_qwen3: Path) -> None:
    lora = LoraSection(rank=2, alpha=4, dropout=0.1)
    net, batch = build(tiny_qwen3, SOME, lora=lora, gradient_checkpointing=checkpointing)
    ours = cached(net, batch)
    assert all("lora" in name for name in ours[1])
    assert_equal(ours, plain(net, batch))


def test_further_rounds_that_sharded_parameters_need_add_nothing(tiny_qwen3: Path) -> None:
    net, batch = build(tiny_qwen3, SOME)
    net.eval()  # the extra forwards draw dropout of their own
    assert_equal(cached(net, batch, rounds=len(batch.groups) + 3), plain(net, batch))


def test_gradients_are_averaged_over_processes_once(tiny_bert: Path) -> None:
    """Every second forward but the last is inside ``no_sync``."""
    net, batch = build(tiny_bert, SOME)
    inside, seen = [0], []

    class NoSync:
        def __enter__(self) -> None:
            inside[0] += 1

        def __exit__(self, *details: object) -> None:
            inside[0] -= 1

    def forward(groups: Any) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(inside[0])
        return net(groups)

    cached_backward(forward, batch.groups, loss_of(batch), no_sync=NoSync)
    assert seen == [1] * (len(batch.groups) - 1) + [0]


def test_only_one_group_s_activations_are_alive(tiny_bert: Path) -> None:
    net, batch = build(tiny_bert, SOME)
    alive: list[weakref.ref[Tensor]] = []
    most = [0]

    def watch(module: Any, inputs: Any, output: Any) -> None:
        hidden = output.last_hidden_state
        if hidden.requires_grad:
            alive.append(weakref.ref(hidden))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))

    net.backbone.register_forward_hook(watch)
    cached(net, batch)
    assert len(alive) == len(batch.groups) > 3
    assert most[0] == 1


def test_mini_batches_keep_to_their_tokens() -> None:
    lengths = [5, 90, 7, 7, 30, 2, 31, 6]
    plan = plan_by_tokens(lengths, 64)
    assert sorted(i for group in plan for i in group) == list(range(8))
    assert plan[0] == [1]  # longer than the budget: alone
    for group in plan[1:]:
        assert len(group) * max(lengths[i] for i in group) <= 64


def log_of(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (Path(recipe.training.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_cached_run_equals_a_plain_one(accumulation: int, still_bert: Path, make_recipe: Build) -> None:
    runs = []
    for tokens in (None, ALONE, SOME):
        recipe = make_recipe(
            still_bert,
            out=f"run-{tokens}",
            loss={"negatives": "in_batch"},
            data={"view": "signature"},
            training={"batch_size": 4, "accumulation": accumulation, "mini_batch_tokens": tokens},
        )
        trainer.run(recipe)
        runs.append(log_of(recipe))
    for run in runs[1:]:
        for key in ("loss", "grad_norm", "positive_similarity", "masked_negatives", "total_tokens"):
            assert [line[key] for line in run] == pytest.approx([line[key] for line in runs[0]], rel=1e-4), key
    assert runs[0][-1]["loss"] < runs[0][0]["loss"]


def test_deepspeed_is_refused_before_anything_is_loaded(
    tiny_bert: Path, make_recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tiny_bert, training={"mini_batch_tokens": 64})
    arguments = SimpleNamespace(world_size=1, device="cpu", deepspeed_plugin=None)
    monkeypatch.setattr(trainer, "training_arguments", lambda *_: arguments)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(MiaError, match=r"mini_batch_tokens.*DeepSpeed"):
        trainer.run(recipe)
    assert not Path(recipe.training.output_dir).exists()


def test_TRN_28_a_non_finite_loss_in_the_cached_step_is_skipped(
    still_bert: Path, make_recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {3})  # the first of the second step's two passes
    recipe = make_recipe(
        still_bert, training={"warmup": 0.0, "accumulation": 2, "mini_batch_tokens": SOME, "weight_decay": 0.1}
    )
    result = trainer.run(recipe)
    assert result.skipped == 1 and log_of(recipe)[1]["grad_norm"] is None
    assert all(line["grad_norm"] > 0 for i, line in enumerate(log_of(recipe)) if i != 1)
    weights = Encoder.load(result.folder, device="cpu").model.state_dict()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def test_TRN_07_joint_loss_with_every_objective_and_rows_that_lack_parts(tiny_qwen3: Path) -> None:
    """Nodes, signatures and teacher scores on some rows only."""
    torch.manual_seed(0)
    encoder = Encoder.load(tiny_qwen3, device="cpu")
    net = MiaModel(encoder).train()
    rows = make_rows(6)
    for i in (0, 2, 4):
        nodes = Nodes((Passage(f"e{i}", "the man: hid the ledger"),), (Passage(f"f{i}", "the key: under the clock"),))
        scored = tuple(replace(p, score=-j) for j, p in enumerate(rows[i].negatives))
        positives = tuple(replace(p, score=2) for p in rows[i].positives)
        rows[i] = replace(rows[i], nodes=nodes, negatives=scored, positives=positives, signature=None)
    collator = Collator(encoder, rows, hard_negatives=2, use_signatures=True, nodes=True, group_tokens=SOME)
    batch = collator([Sample(row, i, 0) for i, row in enumerate(rows)])
    config = CONFIG.model_copy(update={"beta": 0.7, "matryoshka": (16,), "distill": DistillConfig(teacher_scale=0.1)})

    def loss(vectors: Tensor) -> tuple[Tensor, Tensor]:
        found = batch_loss(vectors[batch.order], batch, config, 0.5).loss
        return found, found.detach()

    reference, _ = loss(net(batch.groups))
    reference.backward()
    expected = gradients(net)
    net.zero_grad()
    assert_equal(
        (float(cached_backward(net, batch.groups, loss)), gradients(net)), (float(reference.detach()), expected)
    )
