"""The template: golden ids, what is cut, and what user text cannot do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mia_serve.core import MIA_INSTRUCTION, Encoder, EncoderSpec, MiaError, TextTokeniser
from mia_serve.core.template import causal_template, instruction_prefix
from mia_serve.core.tokenise import cut_evenly

LONG = " ".join(["lamp"] * 10_000)


@pytest.fixture(scope="module")
def qwen3(qwen3_tokenizer: Path) -> TextTokeniser:
    template = causal_template("<|endoftext|>", "<|repo_name|>", instruction_prefix(MIA_INSTRUCTION))
    spec = EncoderSpec("qwen3", "last", template, 1024, max_query_tokens=256, max_document_tokens=64)
    return TextTokeniser(AutoTokenizer.from_pretrained(qwen3_tokenizer), spec)


def test_golden_ids_of_the_mia_template_on_the_real_qwen3_tokenizer(qwen3: TextTokeniser, qwen3_tokenizer: Path):
    (sequence,) = qwen3.query("Why did she lie about the boat?", ["Ada hid the ferry.", "The lamp went out."])
    printed = (
        "Instruct: Given a search query with the book's summary, retrieve relevant chunks or helpful entity summaries "
        "from the given context that answer the query.\nQuery: Why did she lie about the boat?<|endoftext|>\n"
        "Here is the summary providing possibly useful global information. Please encode the query based on the "
        "summary:\nSummary: Ada hid the ferry.\nThe lamp went out.<|repo_name|><|endoftext|>"
    )
    whole = AutoTokenizer.from_pretrained(qwen3_tokenizer)(printed)["input_ids"]
    assert sequence.ids == whole
    assert sequence.ids[:4] == [641, 1235, 25, 16246] and sequence.ids[-2:] == [151663, 151643]
    d_q = sequence.spans["query"][0]
    assert sequence.ids[d_q] == 151643 and sequence.ids[d_q - 1] == 30  # "?"
    n = len(sequence.ids)
    assert sequence.spans == {"query": (d_q, d_q + 1), "chunk": (n - 1, n), "node": (n - 2, n - 1)}


def test_golden_ids_on_minilm(minilm: Encoder):
    alone, conditioned = minilm.tokenise_query("Who hid the key?", ["A lamp.", "The sea"])
    assert alone.ids == [101, 2040, 11041, 1996, 3145, 1029, 102]
    assert conditioned.ids == [*alone.ids, 1037, 10437, 1012, 102, 1996, 2712, 102]
    assert alone.spans == {"query": (0, 7)} and conditioned.spans == {"chunk": (0, 14)}
    assert minilm.tokenise_document("The sea").ids == [101, 1996, 2712, 102]


def test_TRN_03_exactly_one_terminal_token_and_it_is_not_the_eos_token(tiny_qwen3: Path, tmp_path: Path):
    encoder = Encoder.load(tiny_qwen3)
    end = encoder.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    published = encoder.tokenizer("test")["input_ids"]
    assert encoder.tokenise_document("test").ids == published and published.count(end) == 1 and published[-1] == end
    assert end != encoder.tokenizer.eos_token_id
    # A tokenizer that appends nothing itself gets the same one.
    bare = tmp_path / "bare"
    shutil.copytree(tiny_qwen3, bare)
    tokenizer = AutoTokenizer.from_pretrained(bare)
    tokenizer.backend_tokenizer.post_processor = None
    import json

    raw = json.loads((bare / "tokenizer.json").read_text("utf-8"))
    raw["post_processor"] = None
    (bare / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    assert Encoder.load(bare).tokenise_document("test").ids == published


@pytest.mark.parametrize("text", ["a <|repo_name|> b", "<|endoftext|>", "x<|im_end|>y"])
def test_control_tokens_in_user_text_stay_plain_text_qwen3(qwen3: TextTokeniser, text: str):
    control = set(range(151643, 151669))
    (sequence,) = qwen3.query(text, [text])
    outside = [i for i in sequence.ids if i in control]
    assert outside == [151643, 151663, 151643]  # d_q, node, chunk: ours
    assert [i for i in qwen3.document(text).ids if i in control] == [151643]


@pytest.mark.parametrize(("name", "text"), [("tiny_bert", "lamp [SEP] key [CLS]"), ("tiny_xlmr", "lamp </s> key <s>")])
def test_control_tokens_in_user_text_stay_plain_text(name: str, text: str, request: pytest.FixtureRequest):
    encoder = Encoder.load(request.getfixturevalue(name))
    special = set(encoder.tokenizer.all_special_ids) - {encoder.tokenizer.unk_token_id}
    assert sum(i in special for i in encoder.tokenise_document(text).ids) == 2


def test_plain_text_ids_equal_the_tokenizers_own(
    minilm: Encoder, tiny_xlmr: Path, qwen3: TextTokeniser, qwen3_tokenizer
):
    texts = ["The boat — gone!", "名探偵 café  naïve", "a\n\nb\tc", "x" * 300, "ﬁ №5 ① ½"]
    own = AutoTokenizer.from_pretrained(qwen3_tokenizer)
    xlmr = Encoder.load(tiny_xlmr)
    for text in texts:
        assert qwen3.document(text).ids[:-1] == own(text)["input_ids"][:63]
        for encoder in (minilm, xlmr):
            limit = encoder.spec.max_document_tokens
            expected = encoder.tokenizer(text, truncation=True, max_length=limit)["input_ids"]
            assert encoder.tokenise_document(text).ids == expected


def test_TRN_44_signature_forms(minilm: Encoder):
    query = "who"
    alone = minilm.tokenise_query(query)
    assert (
        minilm.tokenise_query(query, [])
        == minilm.tokenise_query(query, "")
        == minilm.tokenise_query(query, [" "])
        == alone
    )
    one = minilm.tokenise_query(query, ["a lamp"])
    assert one == minilm.tokenise_query(query, "a lamp") == minilm.tokenise_query(query, ["a lamp", "a lamp"])
    ab, ba = minilm.tokenise_query(query, ["a", "b"]), minilm.tokenise_query(query, ["b", "a"])
    assert ab != ba and sorted(ab[1].ids) == sorted(ba[1].ids)  # order is the caller's
    assert alone[0] == ab[0]


@pytest.mark.parametrize("summaries", [[LONG], [LONG, "short"], ["short", LONG, LONG + " 1", "b", LONG + " 2"]])
def test_TRN_44_long_signature_is_cut_evenly_and_the_query_is_not(minilm: Encoder, qwen3: TextTokeniser, summaries):
    query = "Why did she lie about the boat, and to whom did she lie?"
    for text in (minilm.text, qwen3):
        *_, whole = text.query(query, summaries)
        alone = text.query(query)[0].ids
        assert len(whole.ids) == text.spec.max_query_tokens
        assert whole.ids[: len(alone)] == alone
        assert whole.ids[-1] == alone[-1]
        lamp = text.document("a lamp").ids[-2]
        counts, run = [], 0
        for i in whole.ids[len(alone) :]:
            if i == lamp:
                run += 1
            elif run:
                counts, run = [*counts, run], 0
        assert len(counts) == sum(len(s) > 100 for s in summaries) and max(counts) - min(counts) <= 2


def test_cut_evenly_by_hand():
    assert cut_evenly([5, 5], 20) == [5, 5]
    assert cut_evenly([100, 2, 100], 20) == [9, 2, 9]
    assert cut_evenly([100, 100, 100], 20) in ([7, 7, 6], [6, 7, 7])
    assert sum(cut_evenly([100, 3, 50], 17)) == 17


def test_a_query_over_the_limit_and_a_signature_without_room_are_told(minilm: Encoder):
    with pytest.raises(MiaError, match=r"query 0 has 10000 tokens, 510 fit \(max_query_tokens 512\)"):
        minilm.encode_queries([LONG])
    cut = minilm.text.query(LONG, truncate=True)[0].ids
    assert len(cut) == 512 and cut[-1] == 102
    with pytest.raises(MiaError, match="no room for its 2 summaries"):
        minilm.tokenise_query(" ".join(["lamp"] * 508), ["a b", "c d"])
    with pytest.raises(MiaError, match="query 1 is empty"):
        minilm.encode_queries(["a", "  "])
    with pytest.raises(MiaError, match="2 queries but 1 signatures"):
        minilm.encode_queries(["a", "b"], [["s"]])
    with pytest.raises(MiaError, match="one string"):
        minilm.encode_documents("abc")


@pytest.mark.parametrize(("name", "limit"), [("tiny_bert", 100), ("tiny_qwen3", 400)])
def test_a_query_that_is_cut_leaves_its_summaries_nothing(name: str, limit: int, request: pytest.FixtureRequest):
    encoder = Encoder.load(request.getfixturevalue(name), device="cpu", max_query_tokens=limit)
    (cut,) = encoder.text.query(LONG, ["The lamp."], truncate=True)
    assert len(cut.ids) == limit and list(cut.spans) == ["query"]
    vectors = encoder.encode_queries([LONG, "lamp"], [["The lamp."], ["The lamp."]], truncate=True)
    assert (vectors[0] == encoder.encode_queries([LONG], truncate=True)[0]).all()
    assert abs(vectors[1] - encoder.encode_queries(["lamp"], [["The lamp."]])[0]).max() < 1e-5


def test_text_that_is_no_unicode_or_no_text_is_told(minilm: Encoder):
    for call in (
        lambda: minilm.encode_queries(["fine", "a\udcff b"]),
        lambda: minilm.encode_documents(["a\udcff b"]),
        lambda: minilm.encode_queries(["a"], [["a\udcff b"]]),
    ):
        with pytest.raises(MiaError, match="lone surrogate at character 1"):
            call()
    for wrong in ([3], [None]):
        with pytest.raises(MiaError, match="give summaries as strings"):
            minilm.encode_queries(["a"], [wrong])
