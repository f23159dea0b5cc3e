"""Take a story out of the file it came in: Project Gutenberg's frame, and the markup of film scripts."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_START = re.compile(r"^\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG[^\n]*\n", re.MULTILINE | re.IGNORECASE)
_END = re.compile(
    r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg)",
    re.MULTILINE | re.IGNORECASE,
)
_AUTHOR = re.compile(r"^Author:[^\S\n]*(\S[^\n]*)$", re.MULTILINE)
_TITLE = re.compile(r"^Title:[^\S\n]*(\S[^\n]*)$", re.MULTILINE)
_MARKUP = re.compile(r"<(?:html|head|body|pre|!doctype)\b", re.IGNORECASE)
_BLOCKS = frozenset(("p", "div", "br", "tr", "li", "pre", "h1", "h2", "h3", "h4", "title"))
#: Where the facts of a book stand in a Project Gutenberg file.
_HEAD = 20_000


def story_of(text: str) -> str:
    """Return the story: what lies within Project Gutenberg's frame, and no markup."""
    if _MARKUP.search(text[:_HEAD]):
        reader = _Text()
        reader.feed(text)
        reader.close()
        text = "".join(reader.pieces)
    start = _START.search(text[:_HEAD])
    begin = start.end() if start else 0
    end = _END.search(text, begin)
    return text[begin : end.start() if end else len(text)].strip()


def author_of(text: str) -> str:
    """Return the author that a Project Gutenberg file names before its story; empty where it names none."""
    return _before_story(_AUTHOR, text)


def title_of(text: str) -> str:
    """Return the title that a Project Gutenberg file names before its story; empty where it names none."""
    return _before_story(_TITLE, text)


def _before_story(pattern: re.Pattern[str], text: str) -> str:
    start = _START.search(text[:_HEAD])
    found = pattern.search(text[: start.start()]) if start else None
    return found[1].strip() if found else ""


class _Text(HTMLParser):
    """Keeps the text of a page: no tags, scripts or styles; block tags end a line."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style"):
            self._hidden += 1
        elif tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._hidden = max(0, self._hidden - 1)
        elif tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(data)
