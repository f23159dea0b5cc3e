"""Worker of ``test_gradients.py``: the gradient of one fixed global batch of eight rows, in this world.

torchrun --nproc_per_node W -m tests.distributed.gradients MODEL_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mia_serve.core import Encoder
from mia_train import distributed
from mia_train.collate import Collator
from mia_train.gradcache import cached_backward
from mia_train.model import MiaModel
from mia_train.objective import batch_loss
from mia_train.rows import Row
from mia_train.schedule import Sample
from mia_train.schema import DistillConfig, LossConfig
from tests.train.conftest import make_rows

ROWS = 8
KL, MSE = DistillConfig(weight=2.0, temperature=0.2), DistillConfig(kind="margin_mse", weight=5.0)
CONFIGS = {
    "own": LossConfig(temperature=0.2),
    "in_batch": LossConfig(negatives="in_batch", temperature=0.2, query_view=0.5),
    "in_batch+kl": LossConfig(negatives="in_batch", temperature=0.2, distill=KL),
    "own+margin_mse": LossConfig(temperature=0.2, distill=MSE),
    "in_batch+kl+matryoshka": LossConfig(negatives="in_batch", temperature=0.2, distill=KL, matryoshka=(16, 8)),
}
BUDGETS = {"plain": None, "alone": 1, "some": 60, "all": 100_000}  # tokens a forward


def rows() -> list[Row]:
    """Return eight rows, some with teacher scores, one positive shared by the first and the last."""
    made = make_rows(ROWS)
    made[7] = replace(made[7], positives=made[0].positives)
    for i in (0, 2, 3, 7):
        scored = [replace(p, score=1.0 - 0.2 * j) for j, p in enumerate((*made[i].positives, *made[i].negatives))]
        n = len(made[i].positives)
        made[i] = replace(made[i], positives=tuple(scored[:n]), negatives=tuple(scored[n:]))
    return made


def gradient(encoder: Encoder, net: torch.nn.Module, config: LossConfig, tokens: int | None) -> dict[str, Any]:
    """Return the gradient that DDP leaves after this world's share of the batch, and the loss over all of it."""
    everything, world = rows(), distributed.world_size()
    share = range(distributed.rank() * ROWS // world, (distributed.rank() + 1) * ROWS // world)
    collator = Collator(encoder, everything, hard_negatives=2, use_signatures=True, group_tokens=tokens)
    batch = collator([Sample(everything[i], i, 0) for i in share])
    net.zero_grad()

    def loss_of(vectors: Tensor) -> tuple[Tensor, Tensor]:
        loss = batch_loss(vectors[batch.order], batch, config, 0.5).loss
        return loss, loss.detach()

    def no_sync() -> AbstractContextManager[None]:
        return net.no_sync() if isinstance(net, DistributedDataParallel) else nullcontext()

    if tokens is None:
        loss = loss_of(net(batch.groups))[0]
        loss.backward()
    else:
        loss = cached_backward(net, batch.groups, loss_of, no_sync=no_sync)
    found = {n.removeprefix("module."): p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    return {"loss": distributed.sum_over_ranks(loss.detach()) / world, "groups": len(batch.groups), "gradient": found}


def all_gradients(base: str) -> dict[str, dict[str, Any]]:
    """Return the gradient of every configuration, plain and with every mini-batch."""
    encoder = Encoder.load(base, device="cpu")
    net: torch.nn.Module = MiaModel(encoder).eval()
    if distributed.world_size() > 1:
        net = DistributedDataParallel(net)
    return {
        f"{name}, {budget}": gradient(encoder, net, config, tokens)
        for name, config in CONFIGS.items()
        for budget, tokens in BUDGETS.items()
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    facts = all_gradients(sys.argv[1])
    if distributed.is_main():
        torch.save(facts, Path(sys.argv[2]) / f"gradients-{distributed.world_size()}.pt")
    dist.destroy_process_group()
