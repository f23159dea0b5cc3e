"""Series books: the books of one author, or of one series, as one long source (MiA-Signature, arXiv 2605.06416)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mia_serve.core import MiaError
from mia_serve.mindscape.mindscape import Mindscape

_REMARK = re.compile(r"[(\[（【][^)\]）】]*[)\]）】]|\b\d{3,4}\s*[-–—?]?\s*(?:\d{3,4})?\b")
_NO_NAME = frozenset({"", "anonymous", "various", "unknown", "佚名", "无名氏"})


class Described(Protocol):
    """What is needed of a book here: `SourceBook` and `BookFacts` have it."""

    @property
    def id(self) -> str:
        """Id of the book."""
        ...

    @property
    def title(self) -> str:
        """Title, `""` for none."""
        ...

    @property
    def author(self) -> str:
        """Author, `""` for none."""
        ...


def group_books(books: Sequence[Described], by: str | Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Group books into series of at least two.

    Args:
        books: The books.
        by: `"author"`: the books of an author, in order of title and then id, under the author's `author_key`. Or a
            map from a series' name to the ids of its books, whose order is kept.

    Returns:
        Name of the series -> ids of its books. Books of no series, and series of one book, are left out.

    Raises:
        MiaError: Ids occur twice, a map names a book that is not there or twice in a series, or `by` is another word.
    """
    known = {book.id: book for book in books}
    if len(known) != len(books):
        raise MiaError("two books share an id: give every book its own")
    if isinstance(by, str):
        if by != "author":
            raise MiaError(f"by={by!r}: allowed are 'author', or a map from a series' name to its books' ids")
        groups: dict[str, list[str]] = {}
        for book in sorted(books, key=lambda b: (b.title.casefold(), b.id)):
            groups.setdefault(author_key(book.author), []).append(book.id)
        groups = {name: ids for name, ids in sorted(groups.items()) if name not in _NO_NAME}
    else:
        groups = {name: list(ids) for name, ids in by.items()}
        for name, ids in groups.items():
            unknown = next((i for i in ids if i not in known), None)
            if unknown is not None:
                some = ", ".join(list(known)[:5])
                raise MiaError(f"series {name!r} names book {unknown!r}, which is not there (there are: {some}, …)")
            if len(set(ids)) != len(ids):
                raise MiaError(f"series {name!r} names a book twice: give each once")
    return {name: ids for name, ids in groups.items() if len(ids) >= 2}


def author_key(author: str) -> str:
    """Return what authors are compared by: "Doyle, A. C. (1859-1930)" and "a c doyle" are the same."""
    name = _REMARK.sub(" ", unicodedata.normalize("NFKC", author))
    if name.count(",") == 1 and " and " not in name:
        last, first = name.split(",")
        if len(last.split()) <= 3:  # "Doyle, Arthur Conan", and no list of two names
            name = f"{first} {last}"
    return " ".join(re.sub(r"[\W_]+", " ", name.casefold()).split())


def select_books(mindscape: Mindscape, books: Iterable[str]) -> Mindscape:
    """Return the mindscape of some books, in the order given, with all that is known of them; the notes are dropped.

    Raises:
        MiaError: A book is not there or is named twice.
    """
    wanted = list(books)
    row = {book: i for i, book in enumerate(wanted)}
    have = {session.book_id for session in mindscape.sessions}
    unknown = next((book for book in wanted if book not in have), None)
    if unknown is not None:
        raise MiaError(f"the mindscape has no book {unknown!r}: give the book_id of a chunk")
    if len(row) != len(wanted):
        raise MiaError("a book is named twice: give each once")
    return replace(
        mindscape,
        chunks=tuple(sorted((c for c in mindscape.chunks if c.book_id in row), key=lambda c: row[c.book_id])),
        sessions=tuple(sorted((s for s in mindscape.sessions if s.book_id in row), key=lambda s: row[s.book_id])),
        books=tuple(sorted((b for b in mindscape.books if b.id in row), key=lambda b: row[b.id])),
        nodes=tuple(sorted((n for n in mindscape.nodes if n.book_id in row), key=lambda n: row[n.book_id])),
        tails=tuple(t for t in mindscape.tails if t.book_id in row),
        notes={},
    )
