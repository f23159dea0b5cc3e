"""Signatures of training rows, out of a mindscape or a benchmark, and what becomes of them in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mia_serve.core import Encoder, MiaError
from mia_serve.eval.datasets import Benchmark, Haystack, Query
from mia_serve.mindscape import Book, Mindscape, book_summaries
from mia_serve.mindscape.vectors import embed_mindscape
from mia_serve.retriever import Retriever
from mia_train.config import Recipe
from mia_train.data import build_rows, check_rows, prepare_rows
from mia_train.rows import Passage, Row, read_rows
from mia_train.signatures import Asked, choose_signatures, sign_rows

Build = Callable[..., Recipe]
WORDS = ["ferryman", "lamps", "quay", "ledger", "floor", "key", "clock", "village", "boat", "night"]


@pytest.fixture(scope="module")
def encoder(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert, device="cpu")


@pytest.fixture(scope="module")
def mindscape() -> Mindscape:
    """Six books of two windows, and one of a single window."""
    books = [
        Book(
            name,
            tuple(f"{name} {WORDS[(i * 3 + b) % 10]} {WORDS[(i + b) % 10]} the night {i}" for i in range(4)),
            title=f"Book {name}",
            summaries=tuple(f"{WORDS[b]} of {name}. The {WORDS[(b + w) % 10]} was on the quay {w}." for w in range(2)),
        )
        for b, name in enumerate("abcdef")
    ]
    one = Book("one", ("one boat in the night",), summaries=("What the meeting of one boat was about",))
    return Mindscape.from_books([*books, one], window=2)


@pytest.fixture
def folder(mindscape: Mindscape, tmp_path: Path) -> Path:
    mindscape.save(tmp_path / "mindscape")
    return tmp_path / "mindscape"


def rows_of(mindscape: Mindscape, count: int = 12) -> list[Row]:
    """Rows without signatures whose passages are chunks of the mindscape."""
    passages = [Passage(chunk.id, chunk.text) for chunk in mindscape.chunks]

    def passage(i: int) -> Passage:
        return passages[i % len(passages)]

    return [
        Row(
            f"q{i}",
            f"where was the {WORDS[i % 10]} {i}",
            (passage(i * 5),),
            (passage(i * 5 + 7), replace(passage(i * 5 + 9), kind="simple")),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("mode", ["coverage", "first_k"])
def test_rows_without_a_signature_get_what_serving_would_choose(
    encoder: Encoder, mindscape: Mindscape, folder: Path, mode: Any
) -> None:
    rows = rows_of(mindscape)
    rows[3] = replace(rows[3], signature=("brought along",))
    rows[4] = replace(rows[4], signature=())
    signed = sign_rows(rows, folder, encoder, mode=mode, k0=6, k_sum=2)
    served = Retriever(mindscape, encoder, k0=6, k_sum=2).signatures([row.query for row in rows], mode=mode)
    for i, (row, choice) in enumerate(zip(signed, served, strict=True)):
        assert row.signature == (("brought along",) if i == 3 else choice.texts)
    assert [replace(row, signature=None) for row in signed] == [replace(row, signature=None) for row in rows]
    assert sign_rows(signed, folder / "not needed", encoder) == signed


def test_vectors_that_the_mindscape_keeps_are_not_made_again(
    encoder: Encoder, mindscape: Mindscape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mindscape.save(tmp_path / "kept", embed_mindscape(mindscape, encoder))
    mindscape.save(tmp_path / "bare")
    fresh = sign_rows(rows_of(mindscape), tmp_path / "bare", encoder)
    monkeypatch.setattr(Encoder, "encode_documents", lambda *_: pytest.fail("chunks were encoded again"))
    assert sign_rows(rows_of(mindscape), tmp_path / "kept", encoder) == fresh


def test_a_share_of_the_signatures_without_gold_gets_a_gold_session(encoder: Encoder, mindscape: Mindscape) -> None:
    chunks = [chunk for chunk in mindscape.chunks if chunk.book_id != "one"]
    asked = [
        Asked(f"q{i}", f"where was the {WORDS[i % 10]}", (chunks[i % 24].id, chunks[(i + 5) % 24].id))
        for i in range(120)
    ]
    retriever = Retriever(mindscape, encoder, k0=8, k_sum=2)
    plain = choose_signatures(retriever, asked, "coverage")
    assert [c.signature for c in plain] == retriever.signatures([a.text for a in asked])
    half = choose_signatures(retriever, asked, "coverage", 0.5, seed=3)
    assert half == choose_signatures(retriever, asked, "coverage", 0.5, seed=3)
    assert [c.found for c in half] == [c.found for c in plain]
    summaries = {session.id: session.summary for session in mindscape.sessions}
    session_of = {chunk.id: chunk.session_id for chunk in mindscape.chunks}
    places, gold_taken = set(), set()
    misses = changed = 0
    for query, before, after in zip(asked, plain, half, strict=True):
        gold = {session_of[i] for i in query.positives}
        assert after.gold == gold and before.found == bool(gold & set(before.signature.session_ids))
        misses += not before.found
        if after.signature == before.signature:
            continue
        changed += 1
        assert not before.found
        (place,) = [
            i
            for i, (a, b) in enumerate(zip(after.signature.session_ids, before.signature.session_ids, strict=True))
            if a != b
        ]
        assert after.signature.session_ids[place] in gold
        assert after.signature.texts == tuple(summaries[i] for i in after.signature.session_ids)
        places.add(place)
        gold_taken.add(sorted(gold).index(after.signature.session_ids[place]))
    assert misses > 40 and 0.35 < changed / misses < 0.65
    assert places == gold_taken == {0, 1}
    always = choose_signatures(retriever, asked, "coverage", 1.0, seed=3)
    assert all(c.gold & set(c.signature.session_ids) for c in always)


def test_global_summary_of_a_training_row_is_that_of_the_positives_book(
    encoder: Encoder, mindscape: Mindscape, folder: Path
) -> None:
    rows = rows_of(mindscape)
    rows.append(Row("last", "which boat", (Passage("one:0", "one boat in the night"),)))
    signed = sign_rows(rows, folder, encoder, mode="global_summary", gold_share=0.5)
    for row in signed:
        book = row.positives[0].id.split(":")[0]
        summaries = [session.summary for session in mindscape.sessions if session.book_id == book]
        title = next(session.title for session in mindscape.sessions if session.book_id == book)
        assert row.signature == tuple(book_summaries([summaries], [title], encoder))
    assert signed[-1].signature == ("What the meeting of one boat was about",)
    assert any(row.signature and row.signature[0].startswith("Book a. ") for row in signed)


def test_benchmark_rows_are_made_by_the_same_path(encoder: Encoder, mindscape: Mindscape, folder: Path) -> None:
    rows = rows_of(mindscape)
    queries = tuple(Query(row.query_id, row.query, (row.positives[0].id,), "g") for row in rows)
    benchmark = Benchmark("toy", "train", True, (Haystack("toy", mindscape, queries),))
    for mode in ("coverage", "first_k", "global_summary"):
        settings: Any = {"k_sum": 2, "seed": 5}
        built = build_rows(
            benchmark,
            encoder,
            signature_mode=mode,
            signature_gold=0.7,
            hard_negatives=2,
            simple_negatives=1,
            **settings,
        )
        signed = sign_rows(rows, folder, encoder, mode=mode, gold_share=0.7, **settings)
        assert [row.signature for row in built] == [row.signature for row in signed]
        if mode == "global_summary":  # its wrong sessions are the others of the book
            for row in built:
                book = row.positives[0].id.split(":")[0]
                near = [n.id for n in row.negatives if n.kind == "signature"]
                assert all(i.startswith(book) for i in near) and (near or book == "one")


@pytest.mark.parametrize("options", [{"gold_share": 0.1}, {"mode": "global_summary"}])
def test_positives_from_elsewhere_are_refused_where_they_are_needed(
    encoder: Encoder, mindscape: Mindscape, folder: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(mindscape, 3)
    rows[1] = replace(rows[1], positives=(Passage("elsewhere:4", "a text"),))
    with pytest.raises(MiaError) as error:
        sign_rows(rows, folder, encoder, **options)
    said = str(error.value)
    assert said.startswith(f"data.mindscape: {folder} has no chunk 'elsewhere:4', a positive of row 'q1'")
    assert "1 of 3 rows" in said and "data.signature_gold: 0" in said
    assert sign_rows(rows, folder, encoder)[1].signature
    assert "the positives of 1 of 3 rows are not in" in capsys.readouterr().err
    half = [replace(rows[0], positives=(Passage("elsewhere:4", "a text"), *rows[0].positives)), rows[2]]
    assert all(row.signature for row in sign_rows(half, folder, encoder, **options))  # one positive will do


@pytest.mark.parametrize("options", [{"gold_share": 0.1}, {"mode": "global_summary"}])
def test_a_mindscape_that_was_cut_anew_is_not_taken_for_that_of_the_rows(
    encoder: Encoder, mindscape: Mindscape, folder: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its chunks have the ids that the old ones had, and other texts."""
    rows = rows_of(mindscape, 3)
    old = [replace(row, positives=(replace(row.positives[0], text="as it was cut before"),)) for row in rows]
    with pytest.raises(MiaError, match=r"has another text for chunk 'a:0', a positive of row 'q0'.*3 of 3 rows"):
        sign_rows(old, folder, encoder, **options)
    sign_rows(old, folder, encoder)
    assert "the positives of 3 of 3 rows are not in" in capsys.readouterr().err
    spaced = [replace(row, positives=(replace(row.positives[0], text=f" {row.positives[0].text}\n"),)) for row in rows]
    assert all(row.signature for row in sign_rows(spaced, folder, encoder, **options))


def test_prepared_rows_have_signatures_and_sources(
    make_recipe: Build, tiny_bert: Path, encoder: Encoder, mindscape: Mindscape, folder: Path, tmp_path: Path
) -> None:
    rows = [*rows_of(mindscape, 5), replace(rows_of(mindscape, 6)[5], source="named")]
    recipe = make_recipe(tiny_bert, rows, data={"view": "signature", "mindscape": str(folder), "k_sum": 2})
    (tmp_path / "run").mkdir()
    prepared = read_rows([prepare_rows(recipe, tmp_path / "run", "cpu")])
    expected = sign_rows(rows, folder, encoder, k_sum=2)
    assert prepared == [replace(row, source=row.source or "rows") for row in expected]
    plain = make_recipe(tiny_bert, rows, data={"mindscape": str(folder)})
    assert all(row.signature is None for row in read_rows([prepare_rows(plain, tmp_path / "run", "cpu")]))


def test_the_signature_view_needs_signatures(
    make_recipe: Build, tiny_bert: Path, encoder: Encoder, mindscape: Mindscape, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(mindscape)
    recipe = make_recipe(tiny_bert, rows, data={"view": "signature"})
    with pytest.raises(MiaError, match=r"no row has a signature; name the mindscape .* in data\.mindscape"):
        check_rows(rows, recipe, encoder)
    rows[0] = replace(rows[0], signature=("a summary",))
    check_rows(rows, recipe, encoder)
    assert "11 of 12 rows have no signature and train the query alone" in capsys.readouterr().err


def test_a_mixture_is_checked_before_the_first_step(make_recipe: Build, tiny_bert: Path, encoder: Encoder) -> None:
    from .conftest import make_rows

    recipe = make_recipe(tiny_bert, data={"mixture": {"test": 1, "other": 2}})
    with pytest.raises(MiaError, match=r"data\.mixture: no row is from 'other'; sources here: 'test' \(8 rows\)"):
        check_rows(make_rows(), recipe, encoder)
    recipe = make_recipe(tiny_bert, data={"mixture": {"test": 1}})
    check_rows(make_rows(), recipe, encoder, processes=4)
    with pytest.raises(MiaError, match="has 8 rows, and a batch of one source takes 10"):
        check_rows(make_rows(), recipe, encoder, processes=5)
    with pytest.raises(ValidationError, match=r"training\.epochs: with data\.mixture every source"):
        make_recipe(tiny_bert, data={"mixture": {"test": 1}}, training={"max_steps": None, "epochs": 2})


def test_a_run_with_a_mixture_and_signatures_of_a_mindscape(
    make_recipe: Build, tiny_bert: Path, mindscape: Mindscape, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mia_train import loop
    from mia_train.trainer import run

    seen: list[list[str]] = []
    see = loop.NonFiniteGuard.see
    monkeypatch.setattr(loop.NonFiniteGuard, "see", lambda self, ids: (seen.append(list(ids)), see(self, ids))[1])
    rows = [replace(row, source="ab"[i % 3 == 0]) for i, row in enumerate(rows_of(mindscape))]
    recipe = make_recipe(
        tiny_bert,
        rows,
        data={
            "view": "signature",
            "mindscape": str(folder),
            "signature_mode": "global_summary",
            "mixture": {"a": 3, "b": 1},
        },
        training={"max_steps": 4, "batch_size": 2, "accumulation": 2},
    )
    result = run(recipe)
    sources = [{rows[int(i[1:])].source for i in ids} for ids in seen]
    assert all(len(found) == 1 for found in sources)
    assert [found for found in sources].count({"a"}) == 6 and sources.count({"b"}) == 2
    facts = json.loads((result.folder / "mia_run.json").read_text())
    assert facts["signature_mode"] == "global_summary"
    card = (result.folder / "README.md").read_text()
    assert "a: 8; b: 4" in card or "b: 4; a: 8" in card
    line = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert np.isfinite(line["loss_with_signature"])
