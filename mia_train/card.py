"""The model card (README.md of a checkpoint), made of the run's facts and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mia_train.config import METRICS, Recipe

PEFT_NOTE = " (install peft: the folder holds adapters)"
_HEADINGS = {"r@3": "R@3", "r@5": "R@5", "r@10": "R@10", "hit@1": "Hit@1", "mrr": "MRR", "ndcg@10": "nDCG@10"}


@dataclass(frozen=True)
class CardFacts:
    """What a run knows about the encoder it made.

    Attributes:
        name: Title of the card, usually the folder's name.
        recipe: The resolved recipe.
        rows: Rows read per source, in the recipe's order.
        steps: Optimiser steps taken.
        processes: Processes that trained together.
        device: Such as ``cpu`` or ``NVIDIA H200``.
        seconds: Training time without loading and evaluation.
        rows_per_second: Over all processes.
        peak_memory_gib: Highest memory of one process: the device's on GPU, the resident set on CPU.
        dim: Length of a vector.
        pooling: ``mean``, ``cls`` or ``last``, as trained.
        metrics: One table row a label ("base", "trained"), each from metric name to value.
        benchmark: What the metrics were measured on; "" without metrics.
        final_loss: Mean loss of the last log line; None when nothing was logged.
        base_revision: Commit of the base on the hub; None for a folder.
        base_licence: SPDX id of the base's licence; None when the base does not say.
        languages: ISO codes; empty when not known.
        versions: Library to version.
        merged: False where the folder holds only adapters, which sentence-transformers needs peft to open.
    """

    name: str
    recipe: Recipe
    rows: Mapping[str, int]
    steps: int
    processes: int
    device: str
    seconds: float
    rows_per_second: float
    peak_memory_gib: float
    dim: int
    pooling: str
    metrics: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    benchmark: str = ""
    final_loss: float | None = None
    base_revision: str | None = None
    base_licence: str | None = None
    languages: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    merged: bool = True


def render_card(facts: CardFacts) -> str:
    """Return the card as Markdown with the hub's metadata block on top."""
    from huggingface_hub import ModelCardData

    recipe = facts.recipe
    role = "E2 (query with signature)" if recipe.data.view == "signature" else "E1 (query alone)"
    metadata = ModelCardData(
        base_model=recipe.model.base if _is_hub_id(recipe.model.base) else None,
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        license=facts.base_licence,
        language=list(facts.languages) or None,
        tags=["sentence-transformers", "feature-extraction", "retrieval", "mia"],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {facts.name}",
        f"{role} of [MiA](https://arxiv.org/abs/2512.17220), trained from `{_short(recipe.model.base)}`"
        + (f" at revision `{facts.base_revision}`" if facts.base_revision else "")
        + f". Vectors have {facts.dim} dimensions ({facts.pooling} pooling, unit length); compare them by dot product.",
        "## Use\n\n" + _usage(facts),
        "## Training\n\n" + _table(["", ""], _training(facts)),
    ]
    if facts.metrics:
        columns = [m for m in METRICS if any(values.get(m) is not None for values in facts.metrics.values())]
        rows = {label: [_number(values.get(m)) for m in columns] for label, values in facts.metrics.items()}
        table = _table(["encoder", *(_HEADINGS[m] for m in columns)], rows)
        caution = ""
        if recipe.data.eval and recipe.training.eval_steps:
            caution = (
                f"\n\nThe checkpoint was picked by {recipe.training.metric} on this set, so the figures flatter it."
            )
        parts.append(f"## Results on {facts.benchmark or 'the evaluation set'}\n\n{table}{caution}")
    if facts.versions:
        parts.append("## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in facts.versions.items()))
    parts.append("## Licence\n\n" + _licence(facts))
    return "\n\n".join(parts) + "\n"


def write_card(facts: CardFacts, folder: str | Path) -> Path:
    """Write ``README.md`` into a checkpoint folder, over the one that sentence-transformers may have put there."""
    path = Path(folder) / "README.md"
    path.write_text(render_card(facts), encoding="utf-8")
    return path


def _usage(facts: CardFacts) -> str:
    signature = facts.recipe.data.view == "signature"
    arguments = "queries, signatures" if signature else "queries"
    comment = "; signatures: a list of session summaries per query" if signature else ""
    code = [
        "```python",
        "from mia_serve.core import Encoder",
        "",
        'encoder = Encoder.load("PATH")',
        f"query_vectors = encoder.encode_queries({arguments})  # (n, {facts.dim}){comment}",
        f"document_vectors = encoder.encode_documents(documents)  # (m, {facts.dim})",
        "```",
    ]
    without = "The same vectors" if not signature else "Documents and plain queries (no signature)"
    peft = "" if facts.merged else PEFT_NOTE
    code += [
        "",
        f"{without} from sentence-transformers{peft}:",
        "",
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        'model = SentenceTransformer("PATH")',
        "query_vectors = model.encode_query(queries)",
        "document_vectors = model.encode_document(documents)",
        "```",
    ]
    return "\n".join(code)


def _training(facts: CardFacts) -> dict[str, list[str]]:
    recipe, training = facts.recipe, facts.recipe.training
    loss = f"InfoNCE, temperature {recipe.loss.temperature:g}, " + (
        "in-batch negatives with false negatives masked"
        if recipe.loss.negatives == "in_batch"
        else "own negatives only"
    )
    if recipe.loss.beta is not None:
        loss += f", {recipe.loss.beta:g} chunk + {1 - recipe.loss.beta:g} node"
    if recipe.loss.mask_margin is not None:
        loss += f", negatives masked above the positive + {recipe.loss.mask_margin:g}"
    for view, weight in (("query", recipe.loss.query_view), ("signature", recipe.loss.signature_view)):
        loss += f", + {weight:g} on the {view} view alone" if weight > 0 else ""
    lora = "full fine-tune"
    if recipe.lora is not None:
        targets = recipe.lora.targets if isinstance(recipe.lora.targets, str) else ", ".join(recipe.lora.targets)
        lora = f"LoRA rank {recipe.lora.rank}, alpha {recipe.lora.alpha}, dropout {recipe.lora.dropout:g} on {targets}"
    batch = training.batch_size * training.accumulation * facts.processes
    passes = f"{training.batch_size} a forward pass, accumulation {training.accumulation}, processes {facts.processes}"
    lengths = f"query {recipe.model.max_query_tokens or 'as the base'}, "
    lengths += f"document {recipe.model.max_document_tokens or 'as the base'}"
    values = {
        "rows": "; ".join(f"{_short(source)}: {count:,}" for source, count in facts.rows.items()),
        "negatives per row": f"{recipe.data.hard_negatives} hard, {recipe.data.simple_negatives} simple",
        "loss": loss,
        "weights": lora,
        "steps": f"{facts.steps:,} of {batch} rows ({passes})",
        "learning rate": f"{training.learning_rate:g}, {training.scheduler}, warm-up {training.warmup:g}",
        "precision": f"{'bf16' if training.bf16 else 'fp32'} compute, fp32 trained weights",
        "token limits": lengths,
        "seed": f"{training.seed}",
        "last logged loss": _number(facts.final_loss),
        "speed": f"{facts.rows_per_second:.1f} rows/s, {facts.seconds / 60:.1f} min",
        "peak memory": f"{facts.peak_memory_gib:.2f} GiB a process, {facts.device}",
    }
    if recipe.data.view == "signature":
        chooser = _short(recipe.data.signature_encoder or recipe.model.base)
        values["signature"] = (
            f"{recipe.data.signature_mode}, at most {recipe.data.k_sum}, chosen by `{chooser}` for rows without one; "
            f"gold {recipe.data.signature_gold:g}, dropout {recipe.data.signature_dropout:g}, "
            f"noise {recipe.data.signature_noise:g}"
        )
    return {name: [value] for name, value in values.items()}


def _licence(facts: CardFacts) -> str:
    base = f"`{_short(facts.recipe.model.base)}`"
    if facts.base_licence:
        return f"The base {base} is under {facts.base_licence}, which covers these weights too. " + _DATA_NOTE
    return f"The base {base} names no licence: find it out before you share these weights. " + _DATA_NOTE


_DATA_NOTE = "The training data has terms of its own; check that they allow the use you have in mind."


def _table(header: list[str], rows: Mapping[str, list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join([_cell(label), *map(_cell, cells)]) + " |" for label, cells in rows.items()]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def _short(name: str) -> str:
    # A card travels; the folders of the machine that trained do not.
    return Path(name).name if Path(name).is_absolute() else name
