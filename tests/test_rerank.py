"""Cross-encoders: equal to sentence-transformers' on the same folder, and a short list put in a better order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from mia_serve.core import MiaError
from mia_serve.fusion import rank
from mia_serve.rerank import Reranker, rerank

QUERY = "Who counted the lamps along the quay?"
DOCUMENT = "The ferryman counted the lamps along the quay and found one missing."
TEXTS = [
    DOCUMENT,
    "She kept the ledger under the floor, and the key under the clock.",
    "Nobody in the village would say where the boat had gone that night.",
    "",
    "key " * 200,
    DOCUMENT * 9,
]
PAIRS = [(query, text) for query in (QUERY, "the key", "boat " * 90, "lamps " * 30, "") for text in TEXTS]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer BERT cross-encoder: two segments, positions for 128 tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(12)  # as all-MiniLM's file does; it must not cut a pair
    tokenizer.enable_padding(length=12)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=128,
    )  # fmt: skip
    config = BertConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.2, num_labels=1,
    )  # fmt: skip
    return _saved(BertForSequenceClassification, config, fast, tmp_path_factory.mktemp("bert-ce"))


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random RoBERTa cross-encoder: two separators, one segment, position ids that start after the padding id."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", cls_token="<s>", sep_token="</s>",
        model_max_length=64, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    config = RobertaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, initializer_range=0.2, num_labels=1,
    )  # fmt: skip
    return _saved(RobertaForSequenceClassification, config, fast, tmp_path_factory.mktemp("roberta-ce"))


def _saved(kind, config, tokenizer, folder: Path) -> Path:
    torch.manual_seed(0)
    kind(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("max_length", [33, 64, 256])
def test_scores_equal_those_of_sentence_transformers(name, max_length, request):
    from sentence_transformers import CrossEncoder

    folder = request.getfixturevalue(name)
    limit = min(max_length, {"bert": 128, "roberta": 64}[name])
    peer = CrossEncoder(str(folder), max_length=limit, device="cpu")
    expected = peer.predict(PAIRS, activation_fn=torch.nn.Identity())
    ours = Reranker.load(folder, device="cpu", max_length=max_length)
    assert ours.max_length == limit  # a folder whose positions reach less far is served with what they reach
    assert np.abs(ours.scores(PAIRS) - expected).max() < 1e-5
    assert np.ptp(expected) > 0.1


def test_a_folder_that_sentence_transformers_saved_gives_its_logits(bert, tmp_path):
    from sentence_transformers import CrossEncoder

    peer = CrossEncoder(str(bert), max_length=96, device="cpu")
    peer.save_pretrained(str(tmp_path / "ce"))
    logits = Reranker.load(tmp_path / "ce", device="cpu", max_length=96).scores(PAIRS)
    # Its own default is a sigmoid on top.
    assert np.abs(1 / (1 + np.exp(-logits)) - peer.predict(PAIRS)).max() < 1e-5


def test_a_score_depends_on_no_other_pair_and_order_is_kept(bert):
    model = Reranker.load(bert, device="cpu")
    together = model.scores(PAIRS)
    assert together.shape == (len(PAIRS),) and together.dtype == np.float32
    alone = np.concatenate([model.scores([pair]) for pair in PAIRS])
    assert np.abs(together - alone).max() < 1e-5
    shuffled = np.random.default_rng(0).permutation(len(PAIRS))
    assert np.abs(model.scores([PAIRS[i] for i in shuffled]) - together[shuffled]).max() < 1e-5
    model.tokens_per_batch = 1  # a pair longer than the budget goes alone
    assert np.abs(model.scores(PAIRS) - together).max() < 1e-5


def test_only_the_document_is_cut_unless_the_query_takes_more_than_half(bert):
    model = Reranker.load(bert, device="cpu", max_length=43)  # 40 without the special tokens
    words = lambda word, n: " ".join([word] * n)  # noqa: E731  one token each
    assert len(model._plain.encode("key boat", add_special_tokens=False).ids) == 2
    score = lambda q, d: float(model.scores([(q, d)])[0])  # noqa: E731
    document = words("boat", 30) + " " + words("lamps", 60)
    assert score(words("key", 20), document) == pytest.approx(score(words("key", 20), words("boat", 20)), abs=1e-6)
    assert score(words("key", 20), words("boat", 20)) != pytest.approx(
        score(words("key", 19), words("boat", 21)), abs=1e-4
    )
    # A long query goes down to half of the room, or to what a short document leaves.
    assert score(words("key", 90), document) == pytest.approx(score(words("key", 20), words("boat", 20)), abs=1e-6)
    assert score(words("key", 90), "boat") == pytest.approx(score(words("key", 39), "boat"), abs=1e-6)


def test_empty_texts_and_no_pairs_are_defined(bert):
    model = Reranker.load(bert, device="cpu")
    assert model.scores([]).shape == (0,)
    found = model.scores([("", ""), (QUERY, ""), ("", DOCUMENT), (QUERY, " ")])
    assert np.isfinite(found).all()
    assert found[1] == found[3]


def test_special_tokens_in_a_text_are_plain_text(bert):
    model = Reranker.load(bert, device="cpu")
    honest, injected = model.scores([(QUERY, DOCUMENT), (QUERY + " [SEP] " + DOCUMENT, "")])
    assert honest != pytest.approx(injected, abs=1e-4)
    assert 3 not in model._plain.encode("a [SEP] b", add_special_tokens=False).ids


def test_a_plain_encoder_is_refused(tiny_bert, minilm_folder):
    for folder in (tiny_bert, minilm_folder):
        with pytest.raises(MiaError, match=r"is a BertModel; allowed: .* one label"):
            Reranker.load(folder, device="cpu")


def test_a_head_with_other_labels_or_none_at_all_is_refused(bert, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(
        bert, num_labels=3, ignore_mismatched_sizes=True
    ).save_pretrained(tmp_path / "three")
    with pytest.raises(MiaError, match=r"with 3 labels; allowed: .* one label"):
        Reranker.load(tmp_path / "three", device="cpu")
    headless = tmp_path / "headless"
    shutil.copytree(bert, headless)
    weights = {k: v for k, v in load_file(headless / "model.safetensors").items() if not k.startswith("classifier")}
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MiaError, match=r"its weights lack 'classifier\.bias' \(2 in all\)"):
        Reranker.load(headless, device="cpu")


def test_folders_that_ask_for_more_than_a_pair_are_refused(bert, tiny_qwen3, tmp_path):
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(tiny_qwen3, num_labels=1)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "decoder")
    with pytest.raises(MiaError, match=r"is a decoder \(qwen3\)"):
        Reranker.load(tmp_path / "decoder", device="cpu")
    prompted = tmp_path / "prompted"
    shutil.copytree(bert, prompted)
    (prompted / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "query"}))
    with pytest.raises(MiaError, match="ask for a prompt"):
        Reranker.load(prompted, device="cpu")


def test_bad_input_names_what_is_wrong(bert, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Reranker.load(tmp_path / "nothing", device="cpu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MiaError, match=r"no config\.json"):
        Reranker.load(tmp_path / "empty", device="cpu")
    torn = tmp_path / "torn"
    shutil.copytree(bert, torn)
    (torn / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:500])
    with pytest.raises(MiaError, match="its model cannot be read"):
        Reranker.load(torn, device="cpu")
    with pytest.raises(MiaError, match="max_length is 2; allowed: integers from 8"):
        Reranker.load(bert, device="cpu", max_length=2)
    model = Reranker.load(bert, device="cpu")
    for wrong in ("a query", ("only one",), (QUERY, None)):
        with pytest.raises(MiaError, match="pair 1 is"):
            model.scores([(QUERY, DOCUMENT), wrong])
    with pytest.raises(MiaError, match="surrogate"):
        model.scores([(QUERY, "\ud800")])


def test_weights_that_give_no_number_are_reported(bert):
    model = Reranker.load(bert, device="cpu")
    with torch.no_grad():
        model.model.classifier.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="no finite score for pair 0"):
        model.scores([(QUERY, DOCUMENT)])


def test_rerank_reorders_the_head_and_leaves_the_rest():
    fused = np.array([[0.1, 0.9, 0.5, 0.7, 0.3], [5.0, 4.0, 3.0, 2.0, 1.0]])
    order = rank(fused)
    assert order.tolist() == [[1, 3, 2, 4, 0], [0, 1, 2, 3, 4]]
    scores = np.array([[-2.0, 3.0, 1.0], [1.0, 1.0, 7.0]], np.float32)  # of 1, 3, 2 and of 0, 1, 2
    assert rerank(order, scores).tolist() == [[3, 2, 1, 4, 0], [2, 0, 1, 3, 4]]  # ties keep the order they had
    assert rerank(order[0], scores[0]).tolist() == [3, 2, 1, 4, 0]
    assert rerank(order, np.empty((2, 0))).tolist() == order.tolist()
    whole = np.array([[0.0, 1.0, 2.0, -np.inf, 4.0]])  # the fourth has no score, so it goes last
    assert rerank(order[:1], whole).tolist() == [[0, 2, 3, 1, 4]]
    assert sorted(rerank(order, scores)[0].tolist()) == [0, 1, 2, 3, 4]


def test_rerank_refuses_what_does_not_fit():
    order = np.arange(6).reshape(2, 3)
    for scores in (np.zeros((2, 4)), np.zeros((1, 3)), np.zeros(3)):
        with pytest.raises(MiaError, match="k at most S"):
            rerank(order, scores)
    with pytest.raises(MiaError, match="NaN"):
        rerank(order, np.array([[1.0, np.nan], [0.0, 0.0]]))
