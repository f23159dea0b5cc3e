from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from mia_serve.core import MiaError
from mia_serve.eval.qa_data import (
    QA_BENCHMARKS,
    QaQuestion,
    book_gold,
    constant_answers,
    gold_chunk_ids,
    load_qa,
    write_questions,
)
from mia_serve.eval.qa_data.detectiveqa import read_novel
from mia_serve.eval.qa_data.novelhopqa import Finder
from mia_serve.eval.qa_data.story_text import author_of, story_of
from mia_serve.mindscape.chunking import TextChunk, chunk_text
from mia_train.silver_input import read_questions

needs_data = pytest.mark.skipif(not os.environ.get("MIA_DATA"), reason="MIA_DATA is not set: no benchmark files")


def write(path: Path, content: object) -> Path:
    """Write rows (a list for .jsonl, anything for .json) or a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    else:
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def characters(text: str) -> list[tuple[int, int]]:
    """A tokenizer whose tokens are characters."""
    return [(i, i + 1) for i in range(len(text))]


# --- gold chunks


def chunks_of(*spans: tuple[int, int]) -> list[TextChunk]:
    return [TextChunk("", start, end, 1) for start, end in spans]


def test_gold_is_every_chunk_that_meets_a_span():
    chunks = chunks_of((0, 10), (8, 18), (16, 26))  # overlap: 8-10 and 16-18
    ids = ["b:0", "b:1", "b:2"]
    assert gold_chunk_ids([(3, 5)], chunks, ids) == ("b:0",)
    assert gold_chunk_ids([(8, 10)], chunks, ids) == ("b:0", "b:1")  # an answer that lies in both chunks
    assert gold_chunk_ids([(9, 17)], chunks, ids) == ("b:0", "b:1", "b:2")
    assert gold_chunk_ids([(10, 16)], chunks, ids) == ("b:1",)  # ends are exclusive: it only touches the others
    assert gold_chunk_ids([(20, 21), (0, 1)], chunks, ids) == ("b:0", "b:2")  # document order
    assert gold_chunk_ids([(26, 30)], chunks, ids) == ()
    with pytest.raises(MiaError, match="2 ids for 3 chunks"):
        gold_chunk_ids([(0, 1)], chunks, ids[:2])
    with pytest.raises(MiaError, match=r"gold span \(4, 4\) holds no character"):
        gold_chunk_ids([(4, 4)], chunks, ids)


def test_EVL_09_gold_that_is_not_known_is_none_and_gold_of_other_chunks_is_refused():
    texts = {"b:0": "one two", "b:1": "three"}
    asked = QaQuestion("q", "?", "free", "b")
    assert book_gold(asked, texts) is None and not asked.has_gold
    silver = QaQuestion("q", "?", "free", "b", gold_chunks=("b:1",), gold_texts=("three",))
    assert book_gold(silver, texts) == ("b:1",)
    with pytest.raises(MiaError, match="gold chunk 'b:1' has another text: the evidence was made with other chunks"):
        book_gold(silver, {"b:0": "one two", "b:1": "three four"})
    with pytest.raises(MiaError, match="gold chunk 'b:1' is not in its book"):
        book_gold(silver, {"b:0": "one two"})
    spans = QaQuestion("q", "?", "free", "b", gold_spans=((0, 3),))
    assert book_gold(spans, texts, chunks_of((0, 7), (8, 13))) == ("b:0",)
    with pytest.raises(MiaError, match="give the chunks with their offsets"):
        book_gold(spans, texts)


# --- NoCha


def claim(book: str, index: int, kind: object, text: str = "Somebody did something.") -> dict:
    return {"book_title": book, "claim": text, "type": kind, "index": index, "genre": "historical"}


@pytest.fixture
def nocha(tmp_path: Path) -> Path:
    rows = [claim("b_two", i, kind) for kind in (True, False) for i in range(3)]  # the claims of a pair lie apart
    rows += [claim("a_one", i, kind) for i in range(2) for kind in ("False", "True")]
    write(tmp_path / "nocha" / "claims.jsonl", [*rows, claim("gone", 9, True)])
    books = [
        {"book_title": "a_one", "text": "title: The One\nauthor: A. Writer\n\n\nOnce."},
        {"book_title": "b_two", "text": "Twice."},
    ]
    write(tmp_path / "nocha" / "books.jsonl.gz", books)
    return tmp_path


def test_nocha_claims_of_a_pair_are_neighbours_and_have_no_gold(nocha):
    b = load_qa("nocha", data_dir=nocha)
    assert [(q.id, q.label, q.pair) for q in b.questions[:2]] == [
        ("a_one:0:false", "FALSE", "a_one:0"),
        ("a_one:0:true", "TRUE", "a_one:0"),
    ]
    assert [q.pair for q in b.questions] == [
        p for p in ("a_one:0", "a_one:1", "b_two:0", "b_two:1", "b_two:2") for _ in "TF"
    ]
    assert (b.books["a_one"].title, b.books["a_one"].author, b.books["b_two"].title) == (
        "The One",
        "A. Writer",
        "b two",
    )
    assert (b.chunk_tokens, b.overlap, b.mode) == (200, 0, "chunks+sig+evi")
    assert dict(b.without_gold) == {"NoCha marks no evidence in the novels": 10}
    assert dict(b.dropped) == {"the novel is not at hand": 1}
    assert {q.task for q in b.questions} == {"claim"} and b.series == {"a_one": ("a_one",), "b_two": ("b_two",)}


def test_nocha_a_limit_never_parts_a_pair(nocha):
    for limit, pairs in ((2, 1), (4, 2), (7, 3), (99, 5)):
        b = load_qa("nocha", data_dir=nocha, limit=limit)
        assert sorted(Counter(q.pair for q in b.questions).values()) == [2] * pairs
    assert {q.book for q in load_qa("nocha", data_dir=nocha, limit=4).questions} == {"a_one", "b_two"}
    with pytest.raises(MiaError, match="limit is 1: the 2 claims of a pair stay together, so it must be at least 2"):
        load_qa("nocha", data_dir=nocha, limit=1)
    with pytest.raises(MiaError, match="nocha asks about single novels: leave series out"):
        load_qa("nocha", data_dir=nocha, series=True)


def test_nocha_in_the_layout_of_its_repository(tmp_path):
    write(tmp_path / "data_sample.json", [claim("x", 1, "True"), claim("x", 1, "False")])
    write(tmp_path / "books" / "x.txt", "Once.")
    assert [q.id for q in load_qa("nocha", data_dir=tmp_path).questions] == ["x:1:true", "x:1:false"]


def test_EVL_10_what_needs_no_reading_is_shown(nocha, tmp_path):
    true, false = constant_answers(load_qa("nocha", data_dir=nocha))
    assert (true.label, true.metrics) == ("always TRUE", {"accuracy": 0.5, "pair_accuracy": 0.0})
    assert false.metrics == true.metrics
    fairy(tmp_path, answers=(["Tom."], ["the tom"], ["a fox", "Tom"], ["a fox"]))
    (free,) = constant_answers(load_qa("fairytaleqa", data_dir=tmp_path))
    assert free.answer == "Tom." and free.metrics == {"f1": 0.75, "em": 0.75}


# --- FairytaleQA


def fairy(root: Path, answers=(["she"],)) -> None:
    def story(name: str, origin: str, ids: list[int], questions: list[dict]) -> dict:
        sections = [f"Section {k} of {name}." for k in range(len(ids))]
        return {"story": name, "origin": origin, "sections": sections, "section_ids": ids, "questions": questions}

    asked = [
        {"question": f"Who {k}?", "answers": own, "sections": [2], "explicit": "e"} for k, own in enumerate(answers)
    ]
    write(root / "fairytaleqa" / "val.jsonl", [story("old-fox", "red", [1, 2, 2], asked)])
    write(root / "fairytaleqa" / "train.jsonl", [story("sea", "blue", [1], []), story("rocket", "red", [1], [])])


def test_fairytaleqa_sections_are_the_chunks_and_a_fairy_book_the_haystack(tmp_path):
    fairy(tmp_path, answers=(["she", "her", "she", ""],))
    b = load_qa("fairytaleqa", data_dir=tmp_path)
    assert b.series == {"red": ("rocket", "old-fox")} and list(b.books) == ["rocket", "old-fox"]
    (q,) = b.questions
    assert (q.id, q.answers, q.gold_chunks, q.task) == (
        "old-fox:q0",
        ("she", "her"),
        ("old-fox:2", "old-fox:2.2"),
        "free",
    )
    assert b.books["old-fox"].sections[2] == ("old-fox:2.2", "Section 2 of old-fox.")
    assert book_gold(q, dict(b.books["old-fox"].sections)) == q.gold_chunks
    pooled = load_qa("fairytaleqa", data_dir=tmp_path, series=True)
    assert pooled.series == {"fairytaleqa": ("sea", "rocket", "old-fox")} and pooled.questions == b.questions


# --- LiteraryQA, series, silver evidence


def document(number: str, title: str, author: str = "", questions: int = 1, answers=("this", "that ")) -> dict:
    qas = [{"question": f"What {i} of {title}?", "answers": list(answers)} for i in range(questions)]
    about = {"gutenberg_id": number, "title": title, "summary": f"{title} told. ", "metadata": {"author": author}}
    return {**about, "qas": qas}


@pytest.fixture
def literary(tmp_path: Path) -> Path:
    folder = tmp_path / "literaryqa"
    rows = [
        document("10", "Sea", "Ann  Lee", 4),
        document("11", "Hill", "Bob", 2),
        document("12", "Lake", "ann lee", 2),
        document("13", "Gone", "Bob", 3),
    ]
    write(folder / "test.jsonl", rows)
    write(folder / "validation.jsonl", [document("14", "Moor", questions=2)])
    novels = [{"gutenberg_id": n, "title": "?", "text": f"The text of {n}."} for n in ("10", "11", "12", "14")]
    write(folder / "novels.jsonl", novels)
    return tmp_path


def test_literaryqa_drops_and_counts_questions_without_their_novel(literary):
    b = load_qa("literaryqa", data_dir=literary)
    assert list(b.books) == ["10", "11", "12"] and len(b.questions) == 8
    assert dict(b.dropped) == {"the novel is not at hand": 3}
    assert list(b.without_gold.values()) == [8]
    q = b.questions[0]
    assert (q.id, q.answers, b.books[q.book].summary) == ("10:q0", ("this", "that"), "Sea told.")
    assert len(load_qa("literaryqa", "all", data_dir=literary).questions) == 10
    assert [q.id for q in load_qa("literaryqa", data_dir=literary, limit=4).questions] == [
        "10:q0",
        "10:q2",
        "11:q0",
        "12:q0",
    ]
    # --data may name the folder itself, too
    assert load_qa("literaryqa", data_dir=literary / "literaryqa").questions == b.questions


def test_EVL_18_a_series_pools_books_of_one_author_and_keeps_questions_with_their_book(literary):
    b = load_qa("literaryqa", data_dir=literary, series=True)
    (books,) = b.series.values()
    assert sorted(books) == ["10", "12"] and set(b.books) == {"10", "12"}
    assert [q.book for q in b.questions] == [book for book in books for _ in range({"10": 4, "12": 2}[book])]
    assert b.dropped["the book is in no series"] == 2
    # two books with the same text, chunked alike: their chunks have different ids
    ids = [f"{book}:{i}" for book in books for i in range(len(chunk_text(b.books[book].text, characters, 8, 2)))]
    assert len(ids) == len(set(ids)) == 6


def test_series_from_a_map(literary, tmp_path):
    path = write(tmp_path / "map.json", {"wet": ["12", "11"]})
    b = load_qa("literaryqa", data_dir=literary, series=path)
    assert (
        set(b.series) == {"wet"} and set(b.series["wet"]) == {"11", "12"} and b.dropped["the book is in no series"] == 4
    )
    with pytest.raises(MiaError, match="99"):
        load_qa("literaryqa", data_dir=literary, series={"wet": ["12", "99"]})
    with pytest.raises(MiaError, match=r"map\.json: not a JSON object of series"):
        load_qa("literaryqa", data_dir=literary, series=write(tmp_path / "map.json", {"wet": [12]}))
    with pytest.raises(MiaError, match="the map has no series of two books or more"):
        load_qa("literaryqa", data_dir=literary, series={"wet": ["12"]})
    with pytest.raises(MiaError, match="no two of the 1 books have one author"):
        load_qa("literaryqa", "validation", data_dir=literary, series=True)


def test_silver_evidence_becomes_gold_by_question(literary, tmp_path):
    def rows(**gold: str) -> Path:
        made = [{"query_id": q, "query": "?", "positives": [{"id": c, "text": "t"}]} for q, c in gold.items()]
        return write(tmp_path / "silver.jsonl", made)

    good = rows(**{"10:q1": "10:0", "99:q0": "99:1"})
    b = load_qa("literaryqa", data_dir=literary, evidence=good)
    assert [(q.id, q.gold_chunks, q.gold_texts) for q in b.questions if q.has_gold] == [("10:q1", ("10:0",), ("t",))]
    assert b.evidence == {"rows": 2, "used": 1, "unknown": 1} and list(b.without_gold.values()) == [7]
    with pytest.raises(MiaError, match="question '10:q1' is about '10', its gold chunk '12:0' is not of that book"):
        load_qa("literaryqa", data_dir=literary, evidence=rows(**{"10:q1": "12:0"}))
    with pytest.raises(MiaError, match=r"none of its 1 rows is of a question here \(such as '99:q0'\)"):
        load_qa("literaryqa", data_dir=literary, evidence=rows(**{"99:q0": "99:0"}))
    write(tmp_path / "silver.jsonl", '{"query_id": "10:q1", "positives": [{"id": "10:0"}]}\n')
    with pytest.raises(MiaError, match=r"silver\.jsonl, line 1: 'text' is missing"):
        load_qa("literaryqa", data_dir=literary, evidence=tmp_path / "silver.jsonl")


def test_questions_are_written_as_silver_reads_them(literary, nocha, detective, tmp_path):
    for name, root, answer in (
        ("literaryqa", literary, "this"),
        ("nocha", nocha, "FALSE"),
        ("detectiveqa", detective, "Bob"),
    ):
        b = load_qa(name, data_dir=root)
        assert write_questions(b, tmp_path / "q.jsonl") == len(b.questions)
        read = read_questions(tmp_path / "q.jsonl", set(b.books))
        assert [(q.id, q.text, q.book) for q in read] == [(q.id, q.text, q.book) for q in b.questions]
        assert read[0].answer == answer


# --- DetectiveQA


NOVEL = "Front matter\n[0] Chapter 1\n[1] Ann came in.\nShe sat.\n[2]\n[3] Bob [7] fell."
NOVEL_ZH = "[1]第一章\n[2]安走了进来。\n[3]鲍勃倒下了。"


def choice(answer: str, position: object, clues: object = (), options=("Ann", "Bob", "Lee", "Tim")) -> dict:
    lettered = dict(zip("ABCD", options, strict=True))
    return {
        "question": "Who?", "options": lettered, "answer": answer, "distraction": {}, "reasoning": ["r"],
        "clue_position": list(clues), "answer_position": position,
    }  # fmt: skip


@pytest.fixture
def detective(tmp_path: Path) -> Path:
    folder = tmp_path / "detectiveqa"
    human = [choice("C", 3, [0, -1, 1]), choice("A", -1)]
    ai = [choice("B", [1, 3])]
    for language, novel, file in (("en", NOVEL, "7-Sea-Ann Lee.txt"), ("zh", NOVEL_ZH, "7-海-安.txt")):
        questions = human if language == "en" else [choice("D", 3, [2], ("甲", "乙", "丙", "丁"))]
        entry = {"novel_id": 7, "num_paragraphs": 4, "questions": questions}
        write(folder / f"anno_data_{language}" / "human_anno" / "7.json", [entry])
        write(folder / f"novel_data_{language}" / file, novel)
    write(folder / "anno_data_en" / "AIsup_anno" / "7.json", [{"novel_id": 7, "questions": ai}])
    write(folder / "anno_data_en" / "AIsup_anno" / "12.json", [{"novel_id": 12, "questions": [*ai, *ai]}])
    write(folder / "novel_data_en" / "20-Hill-Ann Lee.txt", "[1] Never asked.")
    return tmp_path


def test_detectiveqa_gold_is_the_answer_paragraph_without_its_number(detective):
    b = load_qa("detectiveqa", data_dir=detective)
    text = b.books["7"].text
    assert text == "Front matter\nChapter 1\nAnn came in.\nShe sat.\n\nBob [7] fell."
    assert (b.books["7"].title, b.books["7"].author, b.language) == ("Sea", "Ann Lee", "en")
    gold = {q.id: [text[s:e] for s, e in q.gold_spans] if q.gold_spans else None for q in b.questions}
    assert gold == {
        "7:AIsup:q0": ["Ann came in.\nShe sat.", "Bob [7] fell."],
        "7:human:q0": ["Bob [7] fell."],
        "7:human:q1": None,
    }
    q = next(q for q in b.questions if q.id == "7:human:q0")
    assert (q.task, q.options, q.label) == ("choice", ("Ann", "Bob", "Lee", "Tim"), "C")
    assert q.tags == {"annotation": "human", "answer_position": (3,), "clue_position": (0, 1)}
    assert dict(b.dropped) == {"the novel is not at hand": 2}
    assert dict(b.without_gold) == {"the answer has no paragraph (answer_position is -1)": 1}
    assert [(c.answer, c.metrics["accuracy"]) for c in constant_answers(b)] == [
        ("A", 1 / 3), ("B", 1 / 3), ("C", 1 / 3), ("D", 0.0),
    ]  # fmt: skip


def test_detectiveqa_in_chinese_and_an_answer_in_two_overlapping_chunks(detective):
    b = load_qa("detectiveqa", "zh", data_dir=detective)
    (q,) = b.questions
    book = b.books["7"]
    assert (b.language, book.title, book.author, q.options[3], q.label) == ("zh", "海", "安", "丁", "D")
    ((start, end),) = q.gold_spans
    assert book.text[start:end] == "鲍勃倒下了。"
    # 第一章\n安走了进来。\n鲍勃倒下了。: chunks of 8 characters that share 4
    chunks = chunk_text(book.text, characters, 8, 4)
    texts = {f"7:{i}": chunk.text for i, chunk in enumerate(chunks)}
    gold = book_gold(q, texts, chunks)
    assert gold == tuple(name for name, text in texts.items() if set(text) & set("鲍勃倒下"))
    assert len(gold) >= 2


def test_detectiveqa_says_what_is_wrong_where(detective):
    folder = detective / "detectiveqa"
    path = folder / "anno_data_en" / "human_anno" / "7.json"

    def fails(questions: list, match: str) -> None:
        write(path, [{"novel_id": 7, "questions": questions}])
        with pytest.raises(MiaError, match=match):
            load_qa("detectiveqa", data_dir=detective)

    fails([choice("C", 3), choice("E", 3)], r"7\.json, question 1: 'answer' is 'E'")
    fails([choice("C", "3")], r"'answer_position' is '3': it must be paragraph numbers")
    fails([{**choice("C", 3), "options": {"A": "x"}}], "'options' is not an object with the keys A, B, C and D")
    write(path, '[{"novel_id": 7,\n "questions": [}]')
    with pytest.raises(MiaError, match=r"7\.json, line 2: not JSON"):
        load_qa("detectiveqa", data_dir=detective)
    with pytest.raises(MiaError, match=r"n\.txt, line 1: no paragraph begins with its number"):
        read_novel(write(detective / "n.txt", "a\nb [1]"))


def test_detectiveqa_a_number_that_does_not_rise_is_text_and_a_missing_paragraph_no_gold(detective):
    novel = read_novel(write(detective / "n.txt", "[1] a\n[2] b\n[1] a note\n[4] c"))
    assert novel.text == "a\nb\n[1] a note\nc"
    assert {i: novel.text[s:e] for i, (s, e) in novel.spans.items()} == {1: "a", 2: "b\n[1] a note", 4: "c"}
    entry = {"novel_id": 7, "questions": [choice("C", 9), choice("C", [3, 9]), choice("C", 2), choice("C", 3)]}
    write(detective / "detectiveqa" / "anno_data_en" / "human_anno" / "7.json", [entry])
    b = load_qa("detectiveqa", data_dir=detective)
    assert [q.has_gold for q in b.questions] == [True, False, False, False, True]
    assert dict(b.without_gold) == {"the answer's paragraph is empty, or not in the novel": 3}


def test_detectiveqa_series_are_the_novels_of_one_author(detective):
    folder = detective / "detectiveqa"
    for number in (20, 21):
        write(
            folder / "anno_data_en" / "human_anno" / f"{number}.json",
            [{"novel_id": number, "questions": [choice("A", 1)]}],
        )
    write(folder / "novel_data_en" / "21-Lake-Bob.txt", "[1] By another.")
    b = load_qa("detectiveqa", data_dir=detective, series=True)
    assert [sorted(books) for books in b.series.values()] == [["20", "7"]]
    assert {q.book for q in b.questions} == {"7", "20"} and b.dropped["the book is in no series"] == 1


# --- NarrativeQA


GUTENBERG = (
    "The Project Gutenberg EBook of Sea\r\n\r\nTitle: Sea\r\nAuthor: Ann Lee\r\n\r\n"
    "*** START OF THIS PROJECT GUTENBERG EBOOK SEA ***\r\nAuthor: nobody.\r\nThe sea rose.\r\n"
    "*** END OF THIS PROJECT GUTENBERG EBOOK SEA ***\r\nLicence"
)
SCRIPT = "<html><head><script>if (window) {}</script></head><body><pre>INT. HOUSE<br>Ann &amp; Bob.</pre></body></html>"


def test_stories_lose_the_frame_they_came_in():
    assert story_of(GUTENBERG.replace("\r\n", "\n")) == "Author: nobody.\nThe sea rose."
    assert author_of(GUTENBERG.replace("\r\n", "\n")) == "Ann Lee"
    assert story_of(SCRIPT) == "INT. HOUSE\nAnn & Bob."
    assert author_of("Author: a line of a story") == "" and story_of(" plain < text ") == "plain < text"


def table(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def narrative(root: Path) -> Path:
    folder = root / "narrativeqa"
    documents = [
        {"document_id": d, "set": s, "kind": k, "wiki_title": t}
        for d, s, k, t in (
            ("d1", "test", "gutenberg", "Sea, The"), ("d2", "test", "movie", "House"),
            ("d3", "test", "movie", "Gone"), ("d4", "valid", "gutenberg", "Hill"),
        )
    ]  # fmt: skip
    table(folder / "documents.csv", documents)
    summaries = [{"document_id": d, "set": "test", "summary": f"Summary,\nof {d} "} for d in ("d1", "d2", "d3")]
    table(folder / "third_party" / "wikipedia" / "summaries.csv", summaries)
    asked = [("d1", "test"), ("d2", "test"), ("d1", "test"), ("d3", "test"), ("d4", "valid")]
    rows = [
        {"document_id": d, "set": s, "question": f"What {i}?", "answer1": "this", "answer2": f"that {i}"}
        for i, (d, s) in enumerate(asked)
    ]
    table(folder / "qaps.csv", rows)
    (folder / "tmp").mkdir()
    (folder / "tmp" / "d1.content").write_bytes(GUTENBERG.replace("rose", "rosé").encode("cp1252"))
    write(folder / "tmp" / "d2.content", SCRIPT)
    write(folder / "tmp" / "d4.content", "The hill.")
    return root


def hub_rows() -> list[dict]:
    """The same questions as the hub has them: the whole document in every row."""
    texts = {"d1": GUTENBERG.replace("rose", "rosé").replace("\r\n", "\n"), "d2": SCRIPT, "d3": ""}
    about = {"d1": ("gutenberg", "Sea, The"), "d2": ("movie", "House"), "d3": ("movie", "Gone")}
    return [
        {
            "document": {
                "id": d, "kind": about[d][0], "url": "", "text": texts[d],
                "summary": {"text": f"Summary,\nof {d} ", "title": about[d][1]},
            },
            "question": {"text": f"What {i}?", "tokens": []},
            "answers": [{"text": "this", "tokens": []}, {"text": f"that {i}", "tokens": []}],
        }
        for i, d in enumerate(("d1", "d2", "d1", "d3"))
    ]  # fmt: skip


def test_narrativeqa_reads_its_repository_and_the_hubs_files_alike(tmp_path):
    b = load_qa("narrativeqa", data_dir=narrative(tmp_path / "repository"))
    assert [(q.id, q.book, q.answers, q.tags) for q in b.questions] == [
        ("d1:q0", "d1", ("this", "that 0"), {"kind": "gutenberg"}),
        ("d1:q1", "d1", ("this", "that 2"), {"kind": "gutenberg"}),
        ("d2:q0", "d2", ("this", "that 1"), {"kind": "movie"}),
    ]
    sea = b.books["d1"]
    assert (sea.title, sea.author, sea.summary) == ("Sea, The", "Ann Lee", "Summary,\nof d1")
    assert sea.text == "Author: nobody.\nThe sea rosé." and b.books["d2"].text == "INT. HOUSE\nAnn & Bob."
    assert dict(b.dropped) == {"the story is not at hand": 1} and list(b.without_gold.values()) == [3]
    valid = load_qa("narrativeqa", "validation", data_dir=tmp_path / "repository")
    assert [q.id for q in valid.questions] == ["d4:q0"] and valid.books["d4"].author == ""

    data = tmp_path / "hub" / "data"
    data.mkdir(parents=True)
    for i in range(2):
        parquet.write_table(
            pa.Table.from_pylist(hub_rows()[2 * i : 2 * i + 2]), data / f"test-0000{i}-of-00002.parquet"
        )
    from_hub = load_qa("narrativeqa", data_dir=tmp_path / "hub")
    assert (from_hub.questions, from_hub.books, from_hub.dropped) == (b.questions, b.books, b.dropped)
    lines = write(tmp_path / "lines" / "test.jsonl", hub_rows())
    assert load_qa("narrativeqa", data_dir=lines.parent).questions == b.questions


def test_narrativeqa_says_what_is_wrong_where(tmp_path):
    folder = narrative(tmp_path) / "narrativeqa"
    qaps = (folder / "qaps.csv").read_text()
    write(folder / "qaps.csv", qaps + "d9,test,Why?,a,b\n")
    with pytest.raises(
        MiaError, match=r"qaps\.csv, line 7: document 'd9' is not in documents\.csv as one of set 'test'"
    ):
        load_qa("narrativeqa", data_dir=tmp_path)
    write(folder / "qaps.csv", qaps + "d1,test,Why?\n")
    with pytest.raises(MiaError, match=r"qaps\.csv, line 7: not the 5 columns of the header"):
        load_qa("narrativeqa", data_dir=tmp_path)
    (folder / "third_party" / "wikipedia" / "summaries.csv").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"narrativeqa: no third_party/wikipedia/summaries\.csv in .*get github"
    ):
        load_qa("narrativeqa", data_dir=tmp_path)


# --- NovelHopQA


def test_novelhopqa_gold_is_where_the_context_stands(tmp_path):
    folder = tmp_path / "novelhopqa"
    sea = "Ann  went to sea.\nShe\nsang.\n\nBob  stayed at home.\n\nLater she came back."
    write(folder / "books" / "The_Sea.txt", sea)
    write(folder / "books.jsonl", [{"title": "Hill; or, Noli Mé", "text": "A hill.", "author": "B. C."}])

    def row(context: str, book: str = "The Sea") -> dict:
        return {"book": book, "context": context, "question": "Who?", "answer": "Ann"}

    rows = [
        row("to sea.\nShe\nsang."),  # as it is
        row("sea. She sang.  Bob stayed"),  # white space differs
        row("Ann went to sea.\n\nLater she   came back.\n"),  # two passages that lie apart
        row("Ann went to sea.\n\nThis is not there."),
        row("A hill.", "The Hill"),  # a title in short
        row("A hill.", "Lake"),
        {**row("to sea."), "answer": " "},
    ]
    write(folder / "hop_2.jsonl", rows)
    b = load_qa("novelhopqa", "hop_2", data_dir=tmp_path)
    text = b.books["sea"].text
    found = {
        q.id: [text[s:e] for s, e in q.gold_spans] if q.gold_spans else None for q in b.questions if q.book == "sea"
    }
    assert found == {
        "hop_2:q0": ["to sea.\nShe\nsang."],
        "hop_2:q1": ["sea.\nShe\nsang.\n\nBob  stayed"],
        "hop_2:q2": ["Ann  went to sea.", "Later she came back."],
        "hop_2:q3": None,
    }
    assert dict(b.without_gold) == {"the context is not found in the novel": 1}
    assert dict(b.dropped) == {"the novel is not at hand": 1, "the answer is empty": 1}
    (hill,) = (q for q in b.questions if q.book != "sea")
    assert (hill.gold_spans, hill.tags, hill.answers) == (((0, 7),), {"hops": 2}, ("Ann",))
    assert b.books[hill.book].author == "B. C."
    write(folder / "hop_2.jsonl", [row("x"), {"book": "The Sea", "answer": "x"}])
    with pytest.raises(MiaError, match=r"hop_2\.jsonl, line 2: 'question' is missing"):
        load_qa("novelhopqa", "hop_2", data_dir=tmp_path)


def test_a_passage_is_found_whatever_its_white_space():
    text = "  one\u00a0two\n\n three four "
    finder = Finder(text)
    for passage in ("two three", "two\n\n three", "wo  thr", " four", "one two\tthree four"):
        start, end = finder.span(passage)
        assert text[start:end].split() == passage.split()
    assert finder.span("four five") is None and finder.span(" ") is None and finder.spans("  ") is None


# --- from the hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A hub of one data set: the folder of its files, and the environment of a process that asks it."""
    files = tmp_path / "files"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            extra = {}
            if path.startswith("/api/datasets/"):
                found = [(p, p.relative_to(files).as_posix()) for p in sorted(files.rglob("*")) if p.is_file()]
                tree = [{"type": "file", "path": n, "size": p.stat().st_size, "oid": n} for p, n in found]
                info = {"id": "x/y", "sha": "0" * 40, "siblings": [{"rfilename": n} for _, n in found]}
                data = json.dumps(tree if "/tree/" in path else info).encode()
            else:
                name = path.split("/resolve/")[1].split("/", 1)[1]
                data = (files / name).read_bytes()
                extra = {"ETag": f'"{zlib.crc32(name.encode())}"', "X-Repo-Commit": "0" * 40}
            self.send_response(200)
            for key, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **extra}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables = {k: v for k, v in os.environ.items() if k not in ("MIA_DATA", "HF_HUB_CACHE")}
        asked = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
        yield files, {**variables, **asked, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        server.shutdown()


def test_files_that_are_not_here_come_from_the_hub(hub, tmp_path):
    files, environment = hub
    write(files / "novel_data_zh" / "7-海-安.txt", NOVEL_ZH)
    entry = [{"novel_id": 7, "questions": [choice("D", 3)]}]
    write(files / "anno_data_zh" / "human_anno" / "7.json", entry)
    write(files / "anno_data_en" / "human_anno" / "7.json", "not asked for")
    write(files / "default" / "hop_1" / "0000.parquet", "")
    question = {"book": "The Sea", "context": "rose", "question": "What?", "answer": "it"}
    parquet.write_table(pa.Table.from_pylist([question]), files / "default" / "hop_1" / "0000.parquet")
    books = write(tmp_path / "novelhopqa" / "books" / "the sea.txt", "The sea rose.").parents[1]
    code = f"""
from mia_serve.eval.qa_data import load_qa
b = load_qa("detectiveqa", "zh")
hop = load_qa("novelhopqa", "hop_1", data_dir={str(books)!r})
print(b.books["7"].title, b.questions[0].gold_spans, hop.questions[0].gold_spans)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[0] == "海 ((11, 17),) ((8, 12),)", done.stderr
    assert not list((tmp_path / "hf").rglob("anno_data_en"))  # only what the split needs is downloaded


# --- all of them


def test_EVL_04_EVL_18_ids_of_chunks_tell_books_and_questions_apart(literary, nocha, detective, tmp_path):
    fairy(tmp_path)
    for name in ("literaryqa", "nocha", "detectiveqa", "fairytaleqa"):
        b = load_qa(name, data_dir=tmp_path)
        chunks = [f"{book}:{i}" for book in b.books for i in range(50) if not b.books[book].sections]
        chunks += [chunk for book in b.books.values() for chunk, _ in book.sections]
        assert len(chunks) == len(set(chunks)) and not set(chunks) & {q.id for q in b.questions}


@pytest.mark.parametrize("name", QA_BENCHMARKS)
def test_every_benchmark_says_where_its_files_come_from(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MIA_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"{name}: no .*get .*--data"):
        load_qa(name, data_dir=tmp_path)
    with pytest.raises(MiaError, match=f"{name} has no split 'dev': choose from"):
        load_qa(name, "dev")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        load_qa(name, data_dir=tmp_path / "nowhere")


def test_unknown_names_and_limits(literary):
    with pytest.raises(MiaError, match="no benchmark 'squad': choose from narrativeqa, literaryqa, detectiveqa"):
        load_qa("squad")
    with pytest.raises(MiaError, match="limit is 0"):
        load_qa("literaryqa", data_dir=literary, limit=0)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file of silver evidence"):
        load_qa("literaryqa", data_dir=literary, evidence=literary / "none.jsonl")


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("nocha", "claims.jsonl", "\n{oops\n", r"claims\.jsonl, line 2: not JSON"),
        ("nocha", "claims.jsonl", "[1]\n", r"claims\.jsonl, line 1: list, not an object"),
        ("nocha", "claims.jsonl", [claim("a_one", 1, None)], r"claims\.jsonl, line 1: 'type' is None"),
        ("nocha", "claims.jsonl", [claim("a_one", 1, True, " ")], r"claims\.jsonl, line 1: 'claim' is empty"),
        ("nocha", "claims.jsonl", [claim("a_one", 1, True)] * 2, "pair 'a_one:1' has the claims TRUE, TRUE"),
        ("nocha", "claims.jsonl", [claim("a_one", 1, k, "\ud800") for k in (True, False)], "half a character"),
        ("nocha", "books.jsonl", [{"book_title": "x"}], r"books\.jsonl, line 1: 'text' is missing"),
        ("nocha", "books.jsonl.gz", "not gzip", r"books\.jsonl\.gz: not a whole gzip file"),
        ("literaryqa", "test.jsonl", [{**document("10", "x"), "qas": 3}], r"test\.jsonl, line 1: 'qas' is int"),
        ("literaryqa", "test.jsonl", [document("10", "x", answers=[" "])], "question 0: 'answers' is empty"),
        ("literaryqa", "test.jsonl", [document("10", "x")] * 2, r"test\.jsonl, line 2: gutenberg_id '10' occurs twice"),
        ("literaryqa", "test.jsonl", [document("10", "x", questions=0)], "no question is left"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_named_with_its_line(name, file, content, message, literary, nocha):
    write((literary if name == "literaryqa" else nocha) / name / file, "")  # a folder of its own name is there
    path = literary / name / file
    path.write_text(
        content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content), encoding="utf-8"
    )
    with pytest.raises(MiaError, match=message):
        load_qa(name, data_dir=literary)


def test_a_file_that_is_no_utf8_is_named_with_its_line(nocha):
    (nocha / "nocha" / "claims.jsonl").write_bytes(b'{"a": 1}\n{"b": "\xff"}\n')
    with pytest.raises(MiaError, match=r"claims\.jsonl, line 2: not UTF-8"):
        load_qa("nocha", data_dir=nocha)


# --- the real files


@needs_data
def test_real_nocha_is_the_63_pairs_of_the_paper():
    b = load_qa("nocha")
    assert (len(b.books), len(b.questions), len({q.pair for q in b.questions})) == (4, 126, 63)
    assert sum(len(book.text) for book in b.books.values()) > 2_000_000
    assert sorted(book.author for book in b.books.values()) == [
        "Arthur Conan Doyle", "F. Scott Fitzgerald", "L. M. Montgomery", "Louisa May Alcott",
    ]  # fmt: skip
    part = load_qa("nocha", limit=20)
    assert len(part.questions) == 20 and len({q.pair for q in part.questions}) == 10 and len(part.books) == 4
    assert [c.metrics for c in constant_answers(b)] == [{"accuracy": 0.5, "pair_accuracy": 0.0}] * 2


@needs_data
def test_real_literaryqa_has_444_questions_in_16_novels():
    b = load_qa("literaryqa", "all")
    assert (len(b.books), len(b.questions), sum(b.dropped.values())) == (16, 444, 5202 - 444)
    assert all(book.summary and book.text for book in b.books.values())
    assert set(Counter(len(q.answers) for q in b.questions)) == {1, 2}
    assert len({q.book for q in load_qa("literaryqa", "all", limit=50).questions}) == 16


@needs_data
@pytest.mark.skipif(
    bool(os.environ.get("MIA_DATA")) and (Path(os.environ["MIA_DATA"]) / "fairytaleqa" / "test.jsonl").exists(),
    reason="the counts are those of train and val alone",
)
def test_real_fairytaleqa():
    b = load_qa("fairytaleqa", series=True)
    assert (len(b.questions), len(b.books), sum(len(book.sections) for book in b.books.values())) == (1025, 255, 3730)
    assert not b.without_gold and len(load_qa("fairytaleqa").series) == 9
