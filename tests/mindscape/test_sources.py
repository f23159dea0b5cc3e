"""Books and chats out of files, and what is wrong with files."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from mia_serve.core import MiaError
from mia_serve.mindscape import sources
from mia_serve.mindscape.sources import SourceBook, SourceChat, SourceSession, read_sources, to_books
from tests.mindscape.test_chunking import words
from tests.mindscape.test_epub import parts, write  # noqa: F401


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_folder_of_all_kinds(parts, tmp_path):  # noqa: F811
    (tmp_path / "b_two-c.txt").write_text("\ufeffText of b.", encoding="utf-8")
    write(tmp_path / "a.epub", parts)
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps({"gutenberg_id": "17", "title": "C", "text": "Text of c."}) + "\n\n")
        file.write(json.dumps({"book_title": "d_by_e", "text": "title: D\nauthor: E. F.\n\nText of d."}) + "\n")
        file.write(json.dumps({"title": "G", "id": 7, "author": "H", "text": "Text of g."}) + "\n")
    lines(tmp_path / "claims.jsonl", {"book_title": "d_by_e", "claim": "It is."})
    for name in ("LICENSE.md", "README.txt", ".hidden", "empty.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "more").mkdir()
    found = read_sources(tmp_path)
    assert [(b.id, b.title, b.author) for b in found.books] == [
        ("a", "The Lamp House", "Ada Reave"),
        ("b_two-c", "b two c", ""),
        ("17", "C", ""),
        ("d_by_e", "D", "E. F."),
        ("7", "G", "H"),
    ]
    assert found.books[1].text == "Text of b." and found.chats == []
    assert found.skipped == [
        "LICENSE.md: neither .txt, .epub nor .jsonl",
        "README.txt: about the folder",
        "claims.jsonl: its rows are neither books nor chats (they have book_title, claim; give rows with text "
        "and title (or id), sessions, messages, turns, or session and text)",
        "empty.jsonl: empty",
        "more: a folder",
    ]
    assert read_sources(tmp_path / "b_two-c.txt").books == [found.books[1]]


@pytest.mark.skipif(not os.environ.get("MIA_DATA"), reason="MIA_DATA is not set: no benchmark files")
@pytest.mark.parametrize(("name", "books", "skipped"), [("nocha_sample", 4, 2), ("literaryqa", 16, 2)])
def test_public_data(name, books, skipped):
    found = read_sources(Path(os.environ["MIA_DATA"]) / name)
    assert (len(found.books), len(found.skipped)) == (books, skipped)
    assert all(len(book.text) > 50_000 and book.title for book in found.books)
    if name == "nocha_sample":
        assert found.books[1].id == "the_great_gatsby_f_scott_fitzgerald"
        assert (found.books[1].title, found.books[1].author) == ("The Great Gatsby", "F. Scott Fitzgerald")


def test_chats_in_their_three_forms(tmp_path):
    session = {"id": "D1", "date": "8 May", "turns": ["A: hi", {"speaker": "B", "text": "hello", "dia_id": "D1:2"}]}
    lines(tmp_path / "one.jsonl", {"sessions": [session, {"turns": ["bye"]}], "title": "Us"}, {"sessions": [session]})
    image = [{"type": "text", "text": "what is"}, {"type": "image_url"}, {"type": "text", "text": "this?"}]
    lines(
        tmp_path / "two.jsonl",
        {"messages": [{"role": "user", "content": image}, {"role": "assistant", "content": None}]},
        {"id": "x", "date": "9 May", "messages": [{"role": "assistant", "content": "A lamp."}]},
    )
    lines(
        tmp_path / "wire.jsonl",
        {"session": 1, "speaker": "A", "text": "hi", "date": "1 May", "id": "m1"},
        {"session": 1, "speaker": "B", "text": "ho"},
        {"session": 2, "text": "again"},
        {"session": 1, "text": "elsewhere", "chat": "other"},
    )
    found = read_sources(tmp_path)
    d1 = SourceSession("D1", ("A: hi", "B: hello"), "8 May", ("", "D1:2"))
    assert found.chats == [
        SourceChat("one", (d1, SourceSession("s2", ("bye",), "", ("",), False)), "Us"),
        SourceChat("one-2", (d1,)),
        SourceChat(
            "two",
            (
                SourceSession("s1", ("user: what is\nthis?",), "", ("",), False),
                SourceSession("x", ("assistant: A lamp.",), "9 May", ("",)),
            ),
        ),
        SourceChat(
            "wire",
            (
                SourceSession("1", ("A: hi", "B: ho"), "1 May", ("m1", "")),
                SourceSession("2", ("again",), "", ("",)),
            ),
        ),
        SourceChat("other", (SourceSession("1", ("elsewhere",), "", ("",)),)),
    ]
    assert found.skipped == [f"{tmp_path / 'two.jsonl'} line 1, turn 2: a turn without text"]


BOOK = {"id": "a", "title": "A", "text": "x"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([BOOK, {"id": "b", "title": "B", "text": " "}], "line 2: book 'b' is empty"),
        ([BOOK, BOOK], "line 2: id 'a' is also that of .* line 1"),
        ([BOOK, "{"], "line 2 is not JSON"),
        ([BOOK, "[1]"], "line 2: it is a list; give an object"),
        ([BOOK, {"turns": ["x"]}], "line 2: this row is a session, those before are books"),
        ([BOOK, {"claim": "x"}], "line 2: this row is neither book nor chat"),
        ([BOOK | {"text": ["x"]}], "line 1: 'text' is a list; give a string"),
        ([BOOK | {"id": "a/b"}], "line 1: id 'a/b' holds '/'"),
        ([BOOK | {"id": "a:b"}], "line 1: id 'a:b' holds ':'"),
        ([BOOK | {"id": "a\nb"}], r"line 1: id 'a\\nb' holds"),
        (['{"id": "a", "text": "half \\ud83d"}'], "line 1: 'text' holds half of a surrogate pair"),
        ([{"sessions": 3}], "line 1: 'sessions' is a int; give a list"),
        ([{"sessions": []}], "line 1: chat 'x' has no turn with text"),
        ([{"sessions": [{"turns": ["a"]}, {"date": "9"}]}], "line 1, session 2: it has no turns"),
        ([{"sessions": [{"id": "s", "turns": ["a"]}, {"id": "s", "turns": ["b"]}]}], "two sessions 's'"),
        ([{"turns": [3]}], "line 1, turn 1: it is a int; give an object"),
        ([{"session": "", "text": "x"}], "line 1: 'session' is empty"),
        ([{"session": s, "text": "x"} for s in "aba"], "line 3: session 'a' had ended"),
        ([BOOK | {"text": "\u200b\u200d\x01"}], "line 1: book 'a' is empty"),
        ([BOOK | {"text": "a\0b\0"}], "line 1: book 'a' holds NUL characters, as UTF-16 does"),
        ([{"id": "", "title": " ", "text": "x"}], "line 1: the book has neither id nor title"),
        (
            [{"turns": [{"id": "t", "text": "a"}, {"id": "t", "text": "b"}]}],
            "line 1, turn 2: chat 'x' has two turns 't'",
        ),
        ([{"turns": ["a"]}, {"turns": [{"id": "s1:0", "text": "b"}]}], "line 2, turn 1: chat 'x' has two turns 's1:0'"),
        ([{"claim": "x"}], r"holds no book and no chat \(skipped: x\.jsonl: its rows"),
        ([], r"holds no book and no chat \(skipped: x\.jsonl: empty\)"),
    ],
)
def test_wrong_rows_name_file_and_line(tmp_path, rows, message):
    with pytest.raises(MiaError, match=message) as caught:
        read_sources(lines(tmp_path / "x.jsonl", *rows))
    assert "x.jsonl" in str(caught.value)


def test_wrong_files(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read_sources(tmp_path / "none")
    with pytest.raises(MiaError, match="holds no book and no chat: give"):
        read_sources(tmp_path)
    (tmp_path / "x.txt").write_bytes("Ünicode".encode("latin-1"))
    with pytest.raises(MiaError, match=r"x\.txt is not UTF-8 \(byte 0\)"):
        read_sources(tmp_path)
    (tmp_path / "x.txt").write_text("Text.")
    lines(tmp_path / "y.jsonl", BOOK | {"id": "x"})
    with pytest.raises(MiaError, match=r"y\.jsonl line 1: id 'x' is also that of .*x\.txt"):
        read_sources(tmp_path)
    (tmp_path / "y.jsonl").write_bytes(b'{"id": "b", "text": "\xff"}')
    with pytest.raises(MiaError, match=r"y\.jsonl line 1 is not UTF-8"):
        read_sources(tmp_path)
    packed = gzip.compress(json.dumps(BOOK).encode())
    for wrong in (b"no gzip", packed[:-6], packed[:12]):
        (tmp_path / "z.jsonl.gz").write_bytes(wrong)
        with pytest.raises(MiaError, match="is not gzip, or was cut off"):
            read_sources(tmp_path / "z.jsonl.gz")
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(b" " * 300))
    monkeypatch.setattr(sources, "MOST_LINE", 200)
    with pytest.raises(MiaError, match=r"line 1: it unpacks to a size that no book needs"):
        read_sources(tmp_path / "z.jsonl.gz")


def test_pipes_are_not_waited_for_and_utf16_without_a_mark_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("Text.")
    os.mkfifo(tmp_path / "b.txt")
    found = read_sources(tmp_path)
    assert ([b.id for b in found.books], found.skipped) == (["a"], ["b.txt: no plain file"])
    (tmp_path / "a.txt").write_bytes("Text.".encode("utf-16-le"))
    with pytest.raises(MiaError, match=r"a\.txt: book 'a' holds NUL characters"):
        read_sources(tmp_path)


def test_to_books():
    (book,) = to_books([SourceBook("a", "A", "Ann", "one two three four")], words, size=2, overlap=0)
    assert (book.id, book.title, book.author, book.chunks) == ("a", "A", "Ann", ("one two", "three four"))
