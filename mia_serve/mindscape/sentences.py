"""Sentences, paragraphs and word counts of English and Chinese text, with character offsets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_CJK_CHAR = re.compile(f"[{_CJK}]")
_FULL_WIDTH = re.compile(f"[{_CJK}\u3000-\u303f\uff00-\uffef“”‘’…]")
# A word is a CJK character, or a run of anything else between spaces that holds a letter or digit.
_PIECE = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
_RUN = re.compile(rf"[{_CJK}]+|(?:(?![{_CJK}])[^\W_])+")
_WRAPPED = re.compile(f"(?<={_FULL_WIDTH.pattern})\\s*\n\\s*(?={_FULL_WIDTH.pattern})")
_END = re.compile(r"[.!?。．！？…]+[\"'”’」』）》)\]]*")
#: Parts paragraphs.
BLANK_LINE = re.compile(r"\n[^\S\n]*\n\s*")
_LAST_WORD = re.compile(r"([A-Za-z][A-Za-z.]*)$")
_ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "messrs", "dr", "st", "prof", "sr", "jr", "capt", "col", "gen", "lt", "sgt", "maj", "rev"),
        *("hon", "esq", "no", "vol", "vs", "viz", "cf", "al", "fig", "e.g", "i.e"),
    )
)


def is_cjk(text: str) -> bool:
    """Whether at least half of the text's words are CJK characters."""
    return 2 * len(_CJK_CHAR.findall(text)) >= max(1, count_words(text))


def count_words(text: str) -> int:
    """Count words; a CJK character counts as one word each, bare punctuation as none."""
    return sum(1 for _ in _words(text))


def split_terms(text: str) -> list[str]:
    """The terms of a text for counting: words in lower case, and pairs of neighbouring CJK characters."""
    terms = []
    for run in _RUN.findall(text.lower()):
        pairs = _CJK_CHAR.match(run) and len(run) > 1
        terms += [run[i : i + 2] for i in range(len(run) - 1)] if pairs else [run]
    return terms


def first_words(text: str, n: int) -> str:
    """Cut the text after its n-th word (as `count_words` counts them)."""
    for i, match in enumerate(_words(text), start=1):
        if i == n:
            return text[: match.end()]
    return text


def join_sentences(sentences: Iterable[str]) -> str:
    """Join sentences by a space, or by nothing after full-width text."""
    joined = ""
    for sentence in sentences:
        full_width = joined and _FULL_WIDTH.match(joined[-1]) and _FULL_WIDTH.match(sentence[0])
        joined += ("" if full_width or not joined else " ") + sentence
    return joined


def paragraph_spans(text: str) -> list[tuple[int, int]]:
    """Character spans of the paragraphs: parted by blank lines, or by line ends in a text that has no blank line."""
    breaks = [m.end() for m in BLANK_LINE.finditer(text)] or [m.end() for m in re.finditer(r"\n+", text)]
    return _spans(text, breaks)


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Character spans of the sentences, without the space around them.

    English sentences end at `. ! ?` (with closing quotes) before space and a capital or a digit, so `"Stop!" he said.`
    is one sentence; titles and initials (`Mr. Holmes`, `J. Smith`) end none. Chinese sentences end at `。！？` with
    their closing quotes, whatever follows but a comma. A blank line always ends a sentence.
    """
    cuts = [m.end() for m in _END.finditer(text) if _ends_sentence(text, m)]
    return _spans(text, cuts + [m.end() for m in BLANK_LINE.finditer(text)])


def ends_sentence(text: str) -> bool:
    """Whether the text closes with the end of a sentence, quotes and brackets behind it included."""
    return any(match.end() == len(text) for match in _END.finditer(text))


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line; lines wrapped between full-width characters join without a space."""
    return [" ".join(_WRAPPED.sub("", text[start:end]).split()) for start, end in sentence_spans(text)]


def _words(text: str) -> Iterator[re.Match[str]]:
    return (match for match in _PIECE.finditer(text) if any(char.isalnum() for char in match.group()))


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    rest = text[match.end() : match.end() + 40]
    if not rest.strip():
        return True
    mark, following = match.group(), rest[0]
    before = text[match.start() - 1] if match.start() else ""
    if re.search("[。．！？]", mark) or ("…" in mark and mark[-1] in "”’」』"):
        if mark[0] == "．" and before.isdigit() and following.isdigit():
            return False  # a number in full width
        return following not in "，、；：,;:。．！？"
    if re.search("[!?]", mark) and (_CJK_CHAR.match(before) or _CJK_CHAR.match(following)):
        return True
    if not following.isspace():
        return False
    after = rest.lstrip().lstrip("\"'“‘([«-–—")[:1]
    if not (after.isupper() or after.isdigit() or _CJK_CHAR.match(after)):
        return False
    if mark == ".":
        word = _LAST_WORD.search(text[max(0, match.start() - 20) : match.start()])
        if word and (word[1].lower() in _ABBREVIATIONS or (len(word[1]) == 1 and word[1].isupper() and word[1] != "I")):
            return False
    return True


def _spans(text: str, cuts: Iterable[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    start = 0
    for end in [*sorted(cuts), len(text)]:
        piece = text[start:end]
        if piece.strip():
            left = start + len(piece) - len(piece.lstrip())
            spans.append((left, left + len(piece.strip())))
        start = max(start, end)
    return spans
