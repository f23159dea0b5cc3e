"""What the distributed tests run in every process: ``torchrun -m tests.distributed.worker OUT BERT QWEN``.

Rank 0 writes what it found to ``OUT/facts-W.json``; the tests compare it between numbers of processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from mia_train import distributed, trainer
from mia_train.config import Recipe
from mia_train.losses import Candidates, PositiveKeys, info_nce

ROWS, SLOTS, WIDTH = 8, 3, 12


def fixed_batch() -> tuple[torch.Tensor, Candidates, PositiveKeys]:
    """Return 8 rows of raw inputs, with a passage that two rows share and one that is another row's positive."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(ROWS, WIDTH, generator=generator)
    vectors = torch.randn(ROWS, SLOTS, WIDTH, generator=generator)
    ids = torch.arange(ROWS * SLOTS).reshape(ROWS, SLOTS) + 1
    texts = ids + 1000
    ids[6, 0], vectors[6, 0] = ids[1, 0], vectors[1, 0]  # rows 1 and 6 have the same positive
    texts[7, 2], vectors[7, 2] = texts[0, 1], vectors[0, 1]  # rows 0 and 7 share a negative by text
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[2, 2] = valid[5, 1] = False
    positives = PositiveKeys(torch.stack([ids[:, 0], torch.zeros(ROWS, dtype=torch.long)], 1), texts[:, :1])
    positives.ids[3, 1] = ids[5, 0]  # row 5's positive answers row 3 too
    return queries, Candidates(vectors, ids, texts, valid), positives


def gradient(negatives: str) -> dict[str, Any]:
    """Return loss, masked count and DDP-averaged gradient of a linear encoder on this world's share of the batch."""
    queries, candidates, positives = fixed_batch()
    share = slice(distributed.rank() * ROWS // distributed.world_size(), None)
    share = slice(share.start, share.start + ROWS // distributed.world_size())
    torch.manual_seed(1)
    model: torch.nn.Module = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    if distributed.is_distributed():
        model = DistributedDataParallel(model)
    mine = Candidates(*(x[share] for x in candidates))
    both = torch.cat([queries[share][:, None], mine.vectors], dim=1)
    encoded = F.normalize(model(both), dim=-1)
    output = info_nce(
        encoded[:, 0],
        mine._replace(vectors=encoded[:, 1:]),
        PositiveKeys(*(x[share] for x in positives)),
        negatives=negatives,  # type: ignore[arg-type]
        temperature=0.1,
    )
    output.loss.backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return {
        "gradient": parameter.grad.flatten().tolist(),
        "loss": float(distributed.sum_over_ranks(output.loss.detach())) / distributed.world_size(),
        "masked": int(distributed.sum_over_ranks(output.masked)),
        "positive": float(distributed.sum_over_ranks(output.positive)) / distributed.world_size(),
    }


def train(out: Path, base: str, name: str, **sections: Any) -> Recipe:
    """Train four steps with a global batch of eight; rank 0 counts its evaluations."""
    world = int(os.environ["WORLD_SIZE"])
    content: dict[str, Any] = {
        "model": {"base": base},
        "data": {"train": [str(out / "rows.jsonl")], "hard_negatives": 1, "simple_negatives": 1},
        "loss": {"negatives": "in_batch", "temperature": 0.05},
        "training": {
            "output_dir": str(out / f"{name}-{world}"),
            "max_steps": 4,
            "batch_size": 4 // world,
            "accumulation": 2,
            "learning_rate": 1e-3,
            "warmup": 0.0,
            "log_steps": 1,
        },
    }
    for section, values in sections.items():
        content.setdefault(section, {}).update(values)
    recipe = Recipe.model_validate(content)
    trainer.run(recipe)
    return recipe


def stub_evaluation(calls: list[int]) -> Any:
    """Return a factory whose evaluations note that they ran in this process."""

    def make(recipe: Recipe, encoder: Any) -> Any:
        def evaluate() -> dict[str, float]:
            calls.append(distributed.rank())
            return {"mrr": 0.1 * len(calls), "r@10": 0.5}

        return evaluate if recipe.data.eval else None

    return make


def main() -> None:
    """Run every part in this world."""
    out, bert, qwen = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    assert "wandb" not in sys.modules, "TRN-38: wandb is imported only when a run asks for it"
    facts: dict[str, Any] = {}
    recipe = train(out, bert, "plain")  # the first run joins the process group
    facts["world"] = distributed.world_size()
    facts["own"], facts["in_batch"] = gradient("own"), gradient("in_batch")
    facts["log"] = str(Path(recipe.training.output_dir) / "metrics.jsonl")
    facts["objects"] = distributed.gather_objects(f"rank {distributed.rank()}")
    calls: list[int] = []
    trainer.make_evaluation = stub_evaluation(calls)
    lora = train(
        out, qwen, "lora",
        lora={"rank": 2, "alpha": 4, "dropout": 0.0},
        data={"eval": "saltmarsh:test", "view": "signature", "signature_dropout": 0.5},
        training={"gradient_checkpointing": True, "eval_steps": 2, "metric": "mrr", "report_to": ["wandb"]},
    )  # fmt: skip
    facts["lora"] = lora.training.output_dir
    facts["evaluations"] = distributed.gather_objects(calls)
    failures = distributed.gather_objects(failure_of_rank_0())
    facts["failures"] = failures
    if distributed.is_main():
        (out / f"facts-{facts['world']}.json").write_text(json.dumps(facts))


def failure_of_rank_0() -> str:
    """Return what every rank sees when rank 0 fails."""
    try:
        distributed.on_main(lambda: 1 // 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    main()
