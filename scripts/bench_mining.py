"""Part of ``bench_training.py``: mining beside sentence-transformers' mine_hard_negatives; same ids, then time."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from mia_serve.core import Encoder
from mia_train.candidates import Document
from mia_train.corpus import corpus_of_rows
from mia_train.embedding import Embedder
from mia_train.mining import MiningSettings, mine
from mia_train.rows import Passage, Row

PAIRS, WORDS = 2000, [f"w{i}" for i in range(400)]
SETTINGS = {"range_min": 3, "range_max": 60, "relative_margin": 0.05}


def tiny_model(folder: Path) -> None:
    """Write a random BERT that is near to a bag of words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    model = BertModel(config).eval()
    with torch.no_grad():  # near to a bag of words, so that a text is close to those that share its words only
        model.embeddings.word_embeddings.weight.normal_()
        model.embeddings.position_embeddings.weight.mul_(0.1)
        model.embeddings.token_type_embeddings.weight.zero_()
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def rows() -> list[Row]:
    """Return pairs whose positive holds the words of its query."""
    random = np.random.default_rng(0)
    found = []
    for i in range(PAIRS):
        query = " ".join(random.choice(WORDS, 8))
        text = f"{query} {query} {' '.join(random.choice(WORDS, random.integers(1, 6)))}"
        found.append(Row(f"q{i}", query, (Passage(f"p{i:04}", text),)))
    return found


def bench_mining(repeats: int = 5) -> dict[str, Any]:
    """Mine negatives of the same pairs with both, compare them, and return the median times."""
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        plain, saved = Path(name, "plain"), Path(name, "saved")
        plain.mkdir()
        tiny_model(plain)
        encoder = Encoder.load(plain, device="cpu")
        encoder.save(saved)
        model = SentenceTransformer(str(saved), device="cpu")
    data = rows()
    # planted: of a hundred positives a near copy (two words more), which only the margin can tell from a negative,
    # and one in other white space and letter case, which the normalised text gives away
    near = [Document(f"n{i}", f"{r.positives[0].text} {WORDS[i]} {WORDS[-i - 1]}") for i, r in enumerate(data[:100])]
    copies = [
        Document(f"x{i}", f"  {r.positives[0].text.replace(' ', '  ').upper()} ") for i, r in enumerate(data[:100])
    ]
    corpus = corpus_of_rows(data) + near
    wide = corpus + copies
    settings = MiningSettings(negatives=4, simple=0, **SETTINGS)
    pairs = Dataset.from_dict({"query": [r.query for r in data], "positive": [r.positives[0].text for r in data]})

    def theirs() -> Dataset:
        return mine_hard_negatives(
            pairs, model, num_negatives=4, sampling_strategy="top", use_faiss=False, verbose=False,
            output_format="labeled-list", corpus=[d.text for d in near], **SETTINGS,
        )  # fmt: skip

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(repeats):
        start = time.perf_counter()
        found, _ = mine(data, corpus, Embedder(encoder), settings)
        times["ours"].append(time.perf_counter() - start)
        start = time.perf_counter()
        out = theirs()
        times["theirs"].append(time.perf_counter() - start)
    expected = {line["query"]: line["positive"][1:] for line in out}
    got = {r.query: [p.text for p in r.negatives] for r in found if r.negatives}
    equal = sum(got.get(q) == expected.get(q) for q in {*got, *expected})
    again, _ = mine(data, wide, Embedder(encoder), settings)
    false = sum(p.id in (f"n{i}", f"x{i}") for i, r in enumerate(again) for p in r.negatives)
    seconds = {name: median(values) for name, values in times.items()}
    return {
        "what": f"{PAIRS} pairs, 4 negatives each out of {len(corpus)} documents, encoding included",
        "settings": SETTINGS,
        "rows_equal": equal,
        "rows_compared": len({*got, *expected}),
        "planted_false_negatives": len(near) + len(copies),
        "planted_false_negatives_mined": false,
        "agree": equal == len({*got, *expected}) and false == 0,
        "seconds": {"mia": seconds["ours"], "sentence-transformers": seconds["theirs"]},
        "mia_over_peer": seconds["ours"] / seconds["theirs"],
    }
