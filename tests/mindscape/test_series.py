from __future__ import annotations

from dataclasses import replace

import pytest

from mia_serve.core import MiaError
from mia_serve.mindscape import Book, BookFacts, Mindscape, Node, Tail, group_books, select_books
from mia_serve.mindscape.series import author_key

BOOKS = [
    BookFacts("3", "The Return", "Doyle, Arthur Conan"),
    BookFacts("1", "A Study", "Arthur Conan Doyle (1859-1930)"),
    BookFacts("2", "A Study", "ARTHUR CONAN  DOYLE"),
    BookFacts("4", "Emma", "Jane Austen"),
    BookFacts("5", "No name", ""),
    BookFacts("6", "No name either", ""),
    BookFacts("7", "Folk tales", "Anonymous"),
    BookFacts("8", "More of them", "anonymous"),
]


def test_by_author_in_order_of_title_and_id():
    assert group_books(BOOKS, "author") == {"arthur conan doyle": ["1", "2", "3"]}


def test_by_a_map_in_its_own_order():
    series = {"Late": ["3", "1"], "alone": ["4"], "Early": ["1", "2"]}
    assert group_books(BOOKS, series) == {"Late": ["3", "1"], "Early": ["1", "2"]}
    for wrong, message in (
        ({"x": ["1", "9"]}, "series 'x' names book '9', which is not there"),
        ({"x": ["1", "1"]}, "names a book twice"),
        ("publisher", "allowed are 'author'"),
    ):
        with pytest.raises(MiaError, match=message):
            group_books(BOOKS, wrong)
    with pytest.raises(MiaError, match="share an id"):
        group_books([*BOOKS, BOOKS[0]], "author")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Doyle, A. C.", "a c doyle"),
        ("Christie, Agatha, 1890-1976", "Christie Agatha"),
        ("鲁迅（周树人）", "鲁迅"),
        ("Ｊａｎｅ Austen", "jane austen"),
        ("Brontë, Charlotte [author]", "Charlotte Brontë"),
    ],
)
def test_names_that_are_one(one, other):
    assert author_key(one) == author_key(other) != ""
    assert author_key("Charlotte Brontë") != author_key("Emily Brontë")


def test_selected_books_bring_all_that_is_known_of_them(two_books):
    nodes = (Node("n", "N", "d", "red", chunk_ids=("red:0",)), Node("m", "M", "d", "blue"))
    tails = (Tail("red", 1, "x", 0, 0, 9, 0),)
    m = replace(two_books, nodes=nodes, tails=tails, notes={"a": 1})
    third = Mindscape.concat([m, Mindscape.from_books([Book("c", ("t",), summaries=("s",))], window=2)])
    part = select_books(third, ["blue", "red"])
    assert [s.id for s in part.sessions] == ["blue:w0", "blue:w1", "red:w0", "red:w1", "red:w2"]
    assert [b.id for b in part.books] == ["blue", "red"] and [n.id for n in part.nodes] == ["m", "n"]
    assert (part.tails, part.window, part.notes) == (tails, 2, {})
    for wrong, message in ((["red", "red"], "named twice"), (["green"], "no book 'green'")):
        with pytest.raises(MiaError, match=message):
            select_books(m, wrong)
