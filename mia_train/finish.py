"""What lies beside a checkpoint: the recipe, where it came from, the card; and the finished encoder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import yaml
from torch import Tensor

from mia_serve.core import SPEC_FILE, Encoder, MiaError
from mia_train.config import GeneratorRecipe, Recipe, dump_recipe
from mia_train.sharding import is_deepspeed, is_fsdp, save_encoder

RUN_FILE = "mia_run.json"
RECIPE_FILE = "recipe.yaml"
# What may change between two parts of a run without changing what is trained; the batch is check_resumable's matter.
_HARMLESS = {"data.eval"} | {
    f"training.{key}"
    for key in (
        "output_dir", "batch_size", "accumulation", "mini_batch_tokens", "gradient_checkpointing",
        "save_steps", "log_steps", "eval_steps", "metric", "report_to",
    )
}  # fmt: skip


def write_run_facts(recipe: Recipe, folder: Path) -> None:
    """Write the resolved recipe and ``mia_run.json``: base, E1 and kind of signature, as search and evaluation use."""
    dump_recipe(recipe, folder / RECIPE_FILE)
    e1 = "."
    if recipe.data.view == "signature":
        e1 = recipe.data.signature_encoder or recipe.model.base
    base = untrained_base(recipe)
    home = Path(recipe.training.output_dir).resolve().parent
    facts = {"base": _near(base, folder, home), "e1": _near(e1, folder, home), "k_sum": recipe.data.k_sum}
    if recipe.data.view == "signature":
        facts["signature_mode"] = recipe.data.signature_mode
    (folder / RUN_FILE).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


def check_resumable(checkpoint: Path, recipe: Recipe, processes: int) -> None:
    """Refuse a checkpoint whose optimiser state, or whose place in the rows, this launch cannot take up.

    Args:
        checkpoint: The checkpoint.
        recipe: The recipe that is to go on from it.
        processes: Processes of this launch.

    Raises:
        MiaError: It was written under another kind of sharding, or with another global batch, seed or mixture: rows
            would be skipped or seen twice.
    """
    states = {"optimizer.pt": "unsharded", "optimizer.bin": "FSDP", "optimizer_0": "FSDP", "latest": "DeepSpeed"}
    wrote = next((kind for name, kind in states.items() if (checkpoint / name).exists()), None)
    now = "FSDP" if is_fsdp() else "DeepSpeed" if is_deepspeed() else "unsharded"
    if wrote not in (None, now):
        raise MiaError(
            f"{checkpoint}: its optimiser state is {wrote} and that of this launch {now}; launch it as before, or give "
            "another training.output_dir"
        )
    file = checkpoint / RECIPE_FILE
    content = yaml.safe_load(file.read_text("utf-8")) if file.is_file() else {}
    for section, key in (("training", "seed"), ("data", "mixture")):
        before, after = (content.get(section) or {}).get(key), getattr(getattr(recipe, section), key)
        if section in content and before != after:
            raise MiaError(
                f"{checkpoint}: {section}.{key} was {before!r} and is {after!r} now, so the rows come in another "
                "order: some would be skipped, others trained on twice; give it as before, or another "
                "training.output_dir"
            )
    then = content.get("training")
    ranks = len(list(checkpoint.glob("rng_state*.pth")))  # one a process
    if not then or not ranks:
        return
    training = recipe.training
    before = ranks * then["batch_size"] * then["accumulation"]
    rows = processes * training.batch_size * training.accumulation
    if rows != before or (now == "DeepSpeed" and ranks != processes):
        raise MiaError(
            f"{checkpoint}: written by {ranks} process(es) with {before} rows a step; this launch is {processes} with "
            f"{rows}, and would skip rows or train on them twice; give as many processes, training.batch_size and "
            "accumulation as before, or another training.output_dir"
        )


def changes_since(checkpoint: Path, recipe: Recipe | GeneratorRecipe) -> list[str]:
    """Name what a recipe says of model, rows, loss and steps that the run of ``checkpoint`` did not, one line each."""
    file = checkpoint / RECIPE_FILE
    then = yaml.safe_load(file.read_text("utf-8")) if file.is_file() else {}
    now, notes = recipe.model_dump(mode="json"), []
    for section in ("model", "lora", "data", "loss", "training"):
        before, after = ((content.get(section) or {}) for content in (then, now))
        for key in after if then else ():
            if f"{section}.{key}" not in _HARMLESS and before.get(key) != after[key]:
                was = f"was {before[key]!r}" if key in before else "was not given"
                notes.append(f"{section}.{key}: {was} up to {checkpoint.name} and is {after[key]!r} now")
    return notes


def untrained_base(recipe: Recipe) -> str:
    """Return the encoder that a line of runs began with: for an E2 trained on top of an E1, that E1's base."""
    base = recipe.model.base
    parent = Path(base) / RUN_FILE
    if not parent.is_file():
        return base
    known = json.loads(parent.read_text("utf-8")).get("base") or base
    return os.path.normpath(Path(base) / known) if known.startswith(".") else str(known)


def _near(name: str, folder: Path, home: Path) -> str:
    """Name a folder that lies beside the run relative to the checkpoint, so that both can be moved together."""
    if os.path.isabs(name) and Path(os.path.normpath(name)).is_relative_to(home):
        return os.path.relpath(name, folder.resolve())
    return name


def publish(encoder: Encoder, output_dir: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write the finished encoder into the run's own folder, beside its log and checkpoints.

    The files are written aside and moved in one by one, what marks the folder as an encoder last.

    Args:
        encoder: The encoder.
        output_dir: The run's folder.
        weights: The whole weights of an encoder whose own are shards; see :func:`mia_train.sharding.save_encoder`.
    """
    aside = output_dir / ".finished"
    if aside.exists():
        shutil.rmtree(aside)
    save_encoder(encoder, aside, weights)
    marker = output_dir / SPEC_FILE
    marker.unlink(missing_ok=True)
    for entry in sorted(aside.iterdir(), key=lambda path: path.name == SPEC_FILE):
        target = output_dir / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(entry, target)
    aside.rmdir()
