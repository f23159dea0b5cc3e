"""The model card (README.md) of a fine-tuned generator, made of the run's facts and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mia_train.card import _DATA_NOTE, PEFT_NOTE, _is_hub_id, _number, _short, _table
from mia_train.generator.examples import ExamplesReport, describe
from mia_train.generator.schema import GeneratorRecipe

_CONTEXTS = {
    "summary": " and a summary of the whole book",
    "signature": " and the signature of the question (summaries of the sessions that matter)",
    "none": "",
}


@dataclass(frozen=True)
class GeneratorFacts:
    """What a run knows about the generator it made.

    Attributes:
        name: Title of the card, usually the folder's name.
        recipe: The resolved recipe.
        examples: What became of the rows.
        steps: Optimiser steps taken.
        processes: Processes that trained together.
        device: Such as ``cpu`` or ``NVIDIA H200``.
        seconds: Training time without loading and saving.
        tokens_per_second: Over all processes.
        peak_memory_gib: Highest memory of one process.
        final_loss: Mean loss of the last log line.
        versions: Library to version.
    """

    name: str
    recipe: GeneratorRecipe
    examples: ExamplesReport
    steps: int
    processes: int
    device: str
    seconds: float
    tokens_per_second: float
    peak_memory_gib: float
    final_loss: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def render_generator_card(facts: GeneratorFacts) -> str:
    """Return the card as Markdown with the hub's metadata block on top."""
    from huggingface_hub import ModelCardData

    base = facts.recipe.model.base
    metadata = ModelCardData(
        base_model=base if _is_hub_id(base) else None,
        library_name="transformers" if facts.recipe.lora is None else "peft",
        pipeline_tag="text-generation",
        tags=["rag", "sft", "trl", "mia"],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {facts.name}",
        f"Generator of [MiA](https://arxiv.org/abs/2512.17220), fine-tuned from `{_short(base)}` to answer questions "
        f"from retrieved passages{_CONTEXTS[facts.recipe.data.context]}.",
        "## Use\n\n" + _usage(facts.recipe),
        "## Training\n\n" + _table(["", ""], {name: [value] for name, value in _training(facts).items()}),
    ]
    if facts.versions:
        parts.append("## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in facts.versions.items()))
    parts.append(f"## Licence\n\nThat of the base `{_short(base)}` covers these weights too. {_DATA_NOTE}")
    return "\n\n".join(parts) + "\n"


def _usage(recipe: GeneratorRecipe) -> str:
    given = {"summary": ", summary=summary", "signature": ", signature=signature", "none": ""}[recipe.data.context]
    lora = "" if recipe.lora is None else f" beside its base with `--enable-lora`{PEFT_NOTE}"
    lines = [
        "```python",
        "from transformers import pipeline",
        "from mia_serve.rag import build_prompt",
        "",
        f'messages = build_prompt("free", question, chunks{given})  # chunks: texts, best first',
        'generator = pipeline("text-generation", "PATH")',
        'answer = generator(messages, max_new_tokens=64, do_sample=False)[0]["generated_text"][-1]["content"]',
        "```",
        "",
        f"vLLM serves the folder as it is{lora}; send it the same messages.",
    ]
    return "\n".join(lines)


def _training(facts: GeneratorFacts) -> dict[str, str]:
    recipe, training, data = facts.recipe, facts.recipe.training, facts.recipe.data
    lora = "full fine-tune"
    if recipe.lora is not None:
        lora = f"LoRA rank {recipe.lora.rank}, alpha {recipe.lora.alpha}, dropout {recipe.lora.dropout:g}"
    batch = training.batch_size * training.accumulation * facts.processes
    return {
        "rows": ", ".join(_short(source) for source in data.train),
        "examples": describe(facts.examples),
        "chunks": ", ".join(map(str, data.chunks)) + ", each row once with each number",
        "loss": "cross-entropy on the answer and its end of turn",
        "weights": lora,
        "steps": f"{facts.steps:,} of {batch} examples ({training.batch_size} a forward pass, accumulation "
        f"{training.accumulation}, processes {facts.processes})",
        "learning rate": f"{training.learning_rate:g}, {training.scheduler}, warm-up {training.warmup:g}",
        "precision": f"{'bf16' if training.bf16 else 'fp32'} compute, fp32 trained weights",
        "token limit": f"{recipe.model.max_tokens:,}",
        "seed": f"{training.seed}",
        "last logged loss": _number(facts.final_loss),
        "speed": f"{facts.tokens_per_second:.0f} tokens/s, {facts.seconds / 60:.1f} min",
        "peak memory": f"{facts.peak_memory_gib:.2f} GiB a process, {facts.device}",
    }
