from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mia_serve.core import Encoder, MiaError
from mia_serve.eval.datasets import Benchmark, Haystack, Query
from mia_serve.mindscape import Book, Mindscape
from mia_serve.retriever import Retriever
from mia_train.data import build_rows
from mia_train.rows import Nodes, Passage, Row, id_key, parse_row, read_rows, row_to_json, text_key, write_rows

from .conftest import make_rows

GOOD = {"query_id": "q", "query": "who?", "signature": None, "positives": [{"id": "a", "text": "he"}]}


def test_rows_survive_jsonl_and_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    nodes = Nodes((Passage("e1", "Ann : a clerk"),), (Passage("e2", "Bo : a dog"),))
    rows = [*make_rows(3), Row("z", "无签名?", (Passage("p", "文"),), nodes=nodes)]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows([tmp_path / "rows.jsonl"]) == rows
    parquet.write_table(pa.Table.from_pylist([row_to_json(row) for row in rows[:3]]), tmp_path / "rows.parquet")
    assert read_rows([tmp_path / "rows.parquet"]) == rows[:3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positives": []}, "without a positive"),
        ({"query": "  "}, "'query'"),
        ({"query": ""}, "'query' is empty"),
        ({"querry": "x"}, "unknown key 'querry'"),
        ({"query_id": None}, "'query_id'"),
        ({"signature": "one text"}, "'signature' is a list"),
        ({"negatives": [{"id": "b"}]}, r"'negatives'\[0\]"),
        ({"negatives": [{"id": "b", "text": "x", "kind": "soft"}]}, "hard, signature, simple"),
        ({"positives": [{"id": "b", "text": ""}]}, "text"),
        ({"nodes": {"positives": []}}, "'nodes' without a positive"),
        ({"nodes": [{"id": "e", "text": "Ann"}]}, "'nodes' is an object"),
        ({"nodes": {"positives": [{"id": "e", "text": "Ann"}], "negs": []}}, "'nodes' is an object"),
        ({"group": 5}, "'group' is 5"),
        ({"source": ["a"]}, "'source' is"),
        ({"group": "half \ud83d"}, "'group' holds half of a surrogate pair"),
        ({"source": "half \ud83d"}, "'source' holds half of a surrogate pair"),
        ({"positives": [{"id": "b", "text": "x", "score": 10**400}]}, "must be a finite number"),
        ({"query": "half \ud83d"}, "'query' holds half of a surrogate pair"),
        ({"signature": ["half \ud83d"]}, r"'signature'\[0\] holds half"),
    ],
)
def test_a_bad_row_is_one_line_that_names_file_and_line(tmp_path: Path, change: dict, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(MiaError, match=message) as error:
        read_rows([file])
    assert str(error.value).startswith(f"{file}:3: ")
    assert "\n" not in str(error.value)


def test_broken_json_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"query": \n')
    (tmp_path / "b.jsonl").write_text("\n")
    (tmp_path / "c.csv").write_text("x")
    (tmp_path / "e.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"query": "caf\xe9"}\n')
    (tmp_path / "f.parquet").write_bytes(b"junk")
    (tmp_path / "g.jsonl").write_text(json.dumps(GOOD), encoding="utf-8-sig")
    with pytest.raises(MiaError, match=r"e\.jsonl:2: not UTF-8 \(byte 15 of the line\)"):
        read_rows([tmp_path / "e.jsonl"])
    with pytest.raises(MiaError, match=r"f\.parquet: not a Parquet file"):
        read_rows([tmp_path / "f.parquet"])
    assert len(read_rows([tmp_path / "g.jsonl"])) == 1
    with pytest.raises(MiaError, match=r"a\.jsonl:1: not JSON"):
        read_rows([tmp_path / "a.jsonl"])
    for content in ("[" * 200_000, '{"query_id": ' + "9" * 5000 + "}"):
        (tmp_path / "h.jsonl").write_text(content)
        with pytest.raises(MiaError, match=r"h\.jsonl:1: not JSON"):
            read_rows([tmp_path / "h.jsonl"])
    with pytest.raises(MiaError, match="no rows"):
        read_rows([tmp_path / "b.jsonl"])
    with pytest.raises(MiaError, match=r"not \.csv"):
        read_rows([tmp_path / "c.csv"])
    with pytest.raises(FileNotFoundError, match=r"d\.jsonl"):
        read_rows([tmp_path / "d.jsonl"])


def test_TRN_39_keys_come_from_utf8_bytes_and_stay() -> None:
    assert id_key("b:3") == 2488981591605415644
    assert text_key("The  Boat\n“é” 船") == 8776913488949034951
    assert text_key("the boat “é” 船") == text_key("ＴＨＥ  boat “é” 船 ")
    assert id_key("a") != text_key("a") != text_key("b")


def benchmark() -> Benchmark:
    words = ["ferryman", "lamps", "quay", "ledger", "floor", "key", "clock", "village", "boat", "night"]

    def book(name: str) -> Book:
        chunks = [f"{name} {words[i]} {words[(i * 3 + 1) % 10]} the night {i}" for i in range(9)]
        chunks.append(chunks[0].upper() + " ")  # the same text as chunk 0 in another spelling
        return Book(name, tuple(chunks), summaries=tuple(f"{name} window {w} {words[w]}" for w in range(5)))

    mindscape = Mindscape.from_books([book("seen"), book("kept")], window=2)
    queries = [Query(f"q{i}", f"where is the {words[i]} {i}?", (f"seen:{i}",), "seen") for i in range(4)]
    return Benchmark("toy", "train", True, (Haystack("toy", mindscape, tuple(queries)),))


@pytest.fixture(scope="module")
def encoder(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert, device="cpu")


def test_build_rows_excludes_gold_by_id_and_text_and_books_without_questions(encoder: Encoder) -> None:
    for mode in (None, "coverage"):
        rows = build_rows(benchmark(), encoder, signature_mode=mode, hard_negatives=2, simple_negatives=2)
        assert [row.query_id for row in rows] == ["q0", "q1", "q2", "q3"]
        for row in rows:
            gold = {text_key(p.text) for p in row.positives}
            assert row.negatives
            assert all(n.id not in {p.id for p in row.positives} for n in row.negatives)
            assert all(text_key(n.text) not in gold for n in row.negatives)
            assert all(n.id.startswith("seen:") for n in row.negatives)
            assert len({n.id for n in row.negatives}) == len(row.negatives)
            parse_row(row_to_json(row), "here")


def test_build_rows_is_deterministic_and_shows_signatures_as_served(encoder: Encoder) -> None:
    first = build_rows(benchmark(), encoder, signature_mode="coverage", hard_negatives=2, simple_negatives=2, seed=3)
    assert first == build_rows(
        benchmark(), encoder, signature_mode="coverage", hard_negatives=2, simple_negatives=2, seed=3
    )
    haystack = benchmark().haystacks[0]
    served = Retriever(haystack.mindscape, encoder, device="cpu").signatures([q.text for q in haystack.queries])
    assert [row.signature for row in first] == [signature.texts for signature in served]
    session_of = {chunk.id: chunk.session_id for chunk in haystack.mindscape.chunks}
    for row, signature in zip(first, served, strict=True):
        wrong = set(signature.session_ids) - {session_of[p.id] for p in row.positives}
        assert all(session_of[n.id] in wrong for n in row.negatives if n.kind == "signature")
    assert any(n.kind == "signature" for row in first for n in row.negatives)


def test_the_gold_of_a_question_that_is_asked_twice_is_no_negative_of_either(encoder: Encoder) -> None:
    given = benchmark()
    (haystack,) = given.haystacks
    first, second = haystack.queries[:2]
    assert first.group == second.group and first.gold != second.gold
    again = replace(second, text=f" {first.text.upper()}")
    twice = replace(given, haystacks=(replace(haystack, queries=(first, again, *haystack.queries[2:])),))
    rows = build_rows(twice, encoder, hard_negatives=2, simple_negatives=2)
    for row in rows[:2]:
        assert row.negatives and not {p.id for p in row.negatives} & {*first.gold, *second.gold}
