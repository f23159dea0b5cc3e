"""Books and chats as files: what `mindscape build` and `append` read.

    NAME.txt                  a book; its title is the file's name
    NAME.epub                 a book; see `epub`
    NAME.jsonl, NAME.jsonl.gz one JSON object a line; all lines of a file are of one kind:
        {"text", "title", "author"?, "id"?}             a book (also "book_title"; "book_id", "gutenberg_id")
        {"sessions": [{"turns", "id"?, "date"?}], "id"?, "title"?}       a chat
        {"messages" or "turns", "id"?, "date"?, "chat"?}                 a session of the chat named by "chat", else by
                                                                        the file; "messages" as the OpenAI API has them
        {"session", "text" or "content", "speaker" or "role", "date"?, "id"?, "chat"?}      a turn

A turn is a string, or {"text" or "content", "speaker" or "role"?, "id"?}.
"""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mia_serve.core.errors import MiaError
from mia_serve.mindscape.chunking import chunk_text
from mia_serve.mindscape.epub import read_epub
from mia_serve.mindscape.records import Book

#: Bytes of a book (a line, a text file), and of a whole file once unpacked.
MOST_LINE, MOST_FILE = 64 << 20, 8 << 30

_HEADER = re.compile(r"\s*title:[ \t]*(?P<title>[^\n]+)\n\s*author:[ \t]*(?P<author>[^\n]+)\n", re.IGNORECASE)
_BAD_ID = re.compile(r"[/:\\\x00-\x1f\x7f]")
_ABOUT = re.compile(r"(licen[cs]e|readme|copying|notice)(\.txt)?", re.IGNORECASE)
_KINDS = "rows with text and title (or id), sessions, messages, turns, or session and text"


@dataclass(frozen=True)
class SourceBook:
    """A book as its source gives it."""

    id: str
    title: str
    author: str
    text: str


@dataclass(frozen=True)
class SourceSession:
    """One session of a chat: its turns as `speaker: text`, the date as the source writes it, turn names (or `""`).

    One that the source does not name is called `s` and its number in the source, and is not `named`.
    """

    id: str
    turns: tuple[str, ...]
    date: str = ""
    turn_ids: tuple[str, ...] = ()
    named: bool = True


@dataclass(frozen=True)
class SourceChat:
    """A chat as its source gives it, its sessions in order."""

    id: str
    sessions: tuple[SourceSession, ...]
    title: str = ""


@dataclass(frozen=True)
class Sources:
    """What was read.

    Attributes:
        books: The books, in order of files and lines.
        chats: The chats, likewise.
        skipped: Files that hold neither, and turns without text, each with the reason.
    """

    books: list[SourceBook]
    chats: list[SourceChat]
    skipped: list[str]


def read_sources(path: str | Path) -> Sources:
    """Read the books and chats of a folder (not of folders in it), or of one file; the module says which files.

    Raises:
        FileNotFoundError: Nothing is there.
        MiaError: A file is broken, not UTF-8 or of senseless size; a row is wrong (the message names file and line);
            an id occurs twice; or nothing was found.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(item for item in path.iterdir() if not item.name.startswith("."))
        about = [item for item in files if _ABOUT.fullmatch(item.name)]
    elif path.exists():
        files, about = [path], []
    else:
        raise FileNotFoundError(f"{str(path)!r}: no such file or folder; give one with .txt, .epub or .jsonl files")
    reading = _Reading()
    for file in files:
        if file in about:
            reading.skipped.append(f"{file.name}: about the folder")
        else:
            reading.read(file)
    if not reading.books and not reading.turns:
        skipped = f" (skipped: {'; '.join(reading.skipped)})" if reading.skipped else ""
        raise MiaError(f"{str(path)!r} holds no book and no chat{skipped}: give .txt, .epub, or .jsonl with {_KINDS}")
    chats = [
        SourceChat(
            chat,
            tuple(_session(name, *found, (chat, name) not in reading.unnamed) for name, found in sessions.items()),
            reading.titles.get(chat, ""),
        )
        for chat, sessions in reading.turns.items()
    ]
    return Sources(reading.books, chats, reading.skipped)


def to_books(books: Sequence[SourceBook], tokenizer: Any, size: int = 1200, overlap: int = 100) -> list[Book]:
    """Cut books into chunks with `chunk_text`; chunk ids are `{book}:{i}`.

    Raises:
        MiaError: As `chunk_text`.
    """
    return [
        Book(b.id, tuple(c.text for c in chunk_text(b.text, tokenizer, size, overlap)), b.title, author=b.author)
        for b in books
    ]


class _Row:
    """One JSON object with its place, for messages."""

    def __init__(self, value: dict[str, Any], place: str) -> None:
        self.value, self.place = value, place

    def text(self, *keys: str) -> str:
        """The first of these keys that is there, as text; `""` where none is."""
        key = next((key for key in keys if self.value.get(key) is not None), None)
        found = "" if key is None else self.value[key]
        if isinstance(found, int) and not isinstance(found, bool):
            found = str(found)
        if not isinstance(found, str):
            raise MiaError(f"{self.place}: {key!r} is a {type(found).__name__}; give a string")
        if not _encodable(found):
            raise MiaError(f"{self.place}: {key!r} holds half of a surrogate pair, which is no text; correct it")
        return found

    def id(self, *keys: str, default: str) -> str:
        name = self.text(*keys).strip()
        if _BAD_ID.search(name):
            bad = _BAD_ID.search(name)
            raise MiaError(f"{self.place}: id {name!r} holds {bad and bad[0]!r}, which parts ids; give another id")
        return name or _BAD_ID.sub("_", default)

    def items(self, key: str) -> list[Any]:
        found = self.value[key]
        if not isinstance(found, list):
            raise MiaError(f"{self.place}: {key!r} is a {type(found).__name__}; give a list")
        return found


class _Reading:
    """Collects books and the turns of chats."""

    def __init__(self) -> None:
        self.books: list[SourceBook] = []
        self.skipped: list[str] = []
        self.titles: dict[str, str] = {}  # of chats
        self.turns: dict[str, dict[str, tuple[str, list[tuple[str, str]]]]] = {}  # chat -> session -> date, (id, text)
        self.unnamed: set[tuple[str, str]] = set()  # chat and session, of sessions that are numbered here
        self._places: dict[str, str] = {}  # where each book and chat comes from
        self._last: dict[str, str] = {}  # the session that a chat is in
        self._turn_ids: set[tuple[str, str]] = set()  # chat and turn

    def read(self, file: Path) -> None:
        if file.is_dir():
            self.skipped.append(f"{file.name}: a folder")
        elif file.exists() and not file.is_file():
            self.skipped.append(f"{file.name}: no plain file")  # a pipe would be waited for
        elif file.suffix.lower() == ".txt":
            title = file.stem.replace("_", " ").replace("-", " ")
            self._book(SourceBook(_BAD_ID.sub("_", file.stem), title, "", _read_text(file)), str(file))
        elif file.suffix.lower() == ".epub":
            title, author, text = read_epub(file)
            title = title or file.stem.replace("_", " ").replace("-", " ")
            self._book(SourceBook(_BAD_ID.sub("_", file.stem), title, author, text), str(file))
        elif file.name.lower().endswith((".jsonl", ".jsonl.gz")):
            self._rows(file)
        else:
            self.skipped.append(f"{file.name}: neither .txt, .epub nor .jsonl")

    def _rows(self, file: Path) -> None:
        readers = {"book": self._book_row, "chat": self._chat_row, "session": self._session_row, "turn": self._turn_row}
        name = re.sub(r"\.jsonl(\.gz)?$", "", file.name, flags=re.IGNORECASE)
        first, without_text = "", len(self.skipped)
        for row in _json_rows(file):
            kind = _kind(row.value)
            if not first:
                if not kind:
                    have = ", ".join(row.value)
                    self.skipped.append(
                        f"{file.name}: its rows are neither books nor chats (they have {have}; give {_KINDS})"
                    )
                    return
                first = kind
            elif kind != first:
                raise MiaError(f"{row.place}: this row is {_named(kind)}, those before are {first}s; all must be alike")
            readers[kind](row, name)
        if not first:
            self.skipped.append(f"{file.name}: empty")
        lost = self.skipped[without_text:]
        if len(lost) > 1:
            self.skipped[without_text:] = [f"{lost[0]}, and {len(lost) - 1} more of them"]

    def _book_row(self, row: _Row, name: str) -> None:
        text = row.text("text")
        header = _HEADER.match(text[:2000])  # NoCha's books begin so, and are named by their file names
        title = row.text("title") or (header["title"] if header else row.text("book_title").replace("_", " "))
        author = row.text("author") or (header["author"] if header else "")
        book = row.id("id", "book_id", "gutenberg_id", default=row.text("book_title", "title").strip())
        self._book(SourceBook(book, " ".join(title.split()), " ".join(author.split()), text), row.place)

    def _book(self, book: SourceBook, place: str) -> None:
        if not book.id:
            raise MiaError(f"{place}: the book has neither id nor title; give it one")
        if not any(_is_seen(character) for character in book.text):
            raise MiaError(f"{place}: book {book.id!r} is empty; remove it or give its text")
        if "\0" in book.text:
            raise MiaError(f"{place}: book {book.id!r} holds NUL characters, as UTF-16 does; convert it to UTF-8")
        self._claim(book.id, place)
        self.books.append(book)

    def _claim(self, name: str, place: str) -> None:
        other = self._places.setdefault(name, place)
        if other != place:
            raise MiaError(f"{place}: id {name!r} is also that of {other}; give every book and chat its own")

    def _chat_row(self, row: _Row, name: str) -> None:
        number = row.place.rpartition(" ")[2]
        chat = row.id("id", "chat", default=name if number == "1" else f"{name}-{number}")
        self._claim(chat, row.place)
        self.titles[chat] = row.text("title")
        for i, item in enumerate(row.items("sessions"), 1):
            session = _part(item, f"{row.place}, session {i}")
            if not _kind(session.value) == "session":
                raise MiaError(f"{session.place}: it has no turns; give {{'turns': [...]}}")
            self._session(session, chat, f"s{i}")
        if not any(turns for _, turns in self.turns.get(chat, {}).values()):
            raise MiaError(f"{row.place}: chat {chat!r} has no turn with text; remove it")

    def _session_row(self, row: _Row, name: str) -> None:
        chat = row.id("chat", default=name)
        self._claim(chat, row.place.rpartition(" line ")[0])
        self._session(row, chat, f"s{len(self.turns.get(chat, {})) + 1}")

    def _session(self, row: _Row, chat: str, default: str) -> None:
        session = row.id("id", "session", default="")
        if not session:
            session = default
            self.unnamed.add((chat, session))
        if session in self.turns.get(chat, {}):
            raise MiaError(f"{row.place}: chat {chat!r} has two sessions {session!r}; give every session its own id")
        for i, item in enumerate(row.items("turns" if "turns" in row.value else "messages"), 1):
            turn = _part({"text": item} if isinstance(item, str) else item, f"{row.place}, turn {i}")
            self._turn(turn, chat, session, row.text("date"))

    def _turn_row(self, row: _Row, name: str) -> None:
        chat, session = row.id("chat", default=name), row.id("session", default="")
        self._claim(chat, row.place.rpartition(" line ")[0])
        if not session:
            raise MiaError(f"{row.place}: 'session' is empty; name the session of the turn")
        if session in self.turns.get(chat, {}) and self._last[chat] != session:
            raise MiaError(f"{row.place}: session {session!r} had ended; the rows of a session must follow one another")
        self._turn(row, chat, session, row.text("date"))

    def _turn(self, row: _Row, chat: str, session: str, date: str) -> None:
        text, speaker = _content(row), row.text("speaker", "role", "name").strip()
        if not text:
            self.skipped.append(f"{row.place}: a turn without text")
            return
        self._last[chat] = session
        turns = self.turns.setdefault(chat, {}).setdefault(session, (date, []))[1]
        name = row.text("id", "dia_id").strip()
        key = (chat, name or f"{session}:{len(turns)}")
        if key in self._turn_ids:
            raise MiaError(f"{row.place}: chat {chat!r} has two turns {key[1]!r}; give every turn its own id, or none")
        self._turn_ids.add(key)
        turns.append((name, f"{speaker}: {text}" if speaker else text))


def _session(session_id: str, date: str, turns: list[tuple[str, str]], named: bool) -> SourceSession:
    return SourceSession(session_id, tuple(text for _, text in turns), date, tuple(name for name, _ in turns), named)


def _is_seen(character: str) -> bool:
    """Tell whether a character is neither white space nor one of control, format or private use."""
    return not character.isspace() and not unicodedata.category(character).startswith("C")


def _kind(row: dict[str, Any]) -> str:
    """What a row holds: "book", "chat", "session", "turn", or nothing."""
    has = row.keys()
    if "sessions" in has:
        return "chat"
    if "turns" in has or "messages" in has:
        return "session"
    if "session" in has and ("text" in has or "content" in has):
        return "turn"
    named = ("title", "book_title", "id", "book_id", "gutenberg_id")
    return "book" if "text" in has and any(isinstance(row.get(key), str | int) for key in named) else ""


def _named(kind: str) -> str:
    return f"a {kind}" if kind else "neither book nor chat"


def _part(item: Any, place: str) -> _Row:
    if not isinstance(item, dict):
        raise MiaError(f"{place}: it is a {type(item).__name__}; give an object")
    return _Row(item, place)


def _content(row: _Row) -> str:
    """The text of a turn; of an OpenAI message with several parts, those of text."""
    content = row.value.get("content")
    if not isinstance(content, list) or "text" in row.value:
        return row.text("text", "content").strip()
    parts = [part for part in content if isinstance(part, dict) and part.get("type", "text") == "text"]
    return "\n".join(_Row(part, row.place).text("text") for part in parts).strip()


def _read_text(file: Path) -> str:
    if file.stat().st_size > MOST_LINE:
        raise MiaError(f"{file} has {file.stat().st_size >> 20} MiB, which no book needs; split or remove it")
    try:
        return file.read_text(encoding="utf-8-sig")  # without the mark that Windows editors put first
    except UnicodeDecodeError as error:
        raise MiaError(f"{file} is not UTF-8 (byte {error.start}); convert it first") from None


def _json_rows(file: Path) -> Iterator[_Row]:
    packed = file.name.lower().endswith(".gz")
    total = 0
    with gzip.open(file, "rb") if packed else file.open("rb") as opened:
        number = 0
        while True:
            number += 1
            place = f"{file} line {number}"
            try:
                line = opened.readline(MOST_LINE + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise MiaError(f"{place}: the file is not gzip, or was cut off ({error}); get it again") from None
            total += len(line)
            if len(line) > MOST_LINE or total > MOST_FILE:
                raise MiaError(f"{place}: it unpacks to a size that no book needs; remove the file")
            if not line:
                return
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise MiaError(f"{place} is not UTF-8 (byte {error.start} of the line); convert the file") from None
            except (ValueError, RecursionError) as error:
                raise MiaError(f"{place} is not JSON ({error}); write one object a line") from None
            yield _part(value, place)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
