"""The answer in a generator's reply: read tolerantly, never run, and None where there is none to read."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import Any

from mia_serve.rag.prompts import Task

_TRIED = 20  # braces of a reply at which an object is looked for, so that no reply takes long
_MARK = re.compile(r"[\[【]([^\[\]【】]{1,80})[\]】]")  # what may be a mark such as [P3], or [P1, P4]
_NUMBERS = re.compile(r"[Pp][0-9]{1,4}(?:\s*(?:[,;、，–-]|and|和)\s*[Pp]?[0-9]{1,4}|\s+[Pp][0-9]{1,4})*")
_NUMBER = re.compile(r"([–-])?\s*[Pp]?([0-9]+)")

_LABEL = re.compile(
    r"(?:the\s+)?(?:(?:final|short|correct|best)\s+)?answer(?:\s+is)?\s*[:：]\s*|(?:最终|正确)?(?:答案|回答|答)[是为]?\s*[:：]\s*",
    re.IGNORECASE,
)
_HEADING = re.compile(r"(?:the\s+)?(?:(?:final|short|correct)\s+)?answer|(?:最终)?(?:答案|回答)", re.IGNORECASE)
_LATEX = re.compile(r"\\(?:boxed|text|textbf|mathrm)\s?\{([^{}]{0,400})\}")
_BULLET = re.compile(r"[-#>•*]+\s+|</?answer>\s*", re.IGNORECASE)
_QUOTES = {'"': '"', "'": "'", "`": "`", "“": "”", "‘": "’", "「": "」", "『": "』", "《": "》"}

_QUOTED_KEY = re.compile(r"""["']answer["']\s*:\s*(.{0,200})""", re.IGNORECASE)
_QUOTED_TEXT = re.compile(r"""["']answer["']\s*:\s*"((?:[^"\\]|\\.){0,2000})""", re.IGNORECASE)
_SAID = re.compile(r"(?:\banswer\s*(?:is|:)|答案\s*(?:是|为|:)|选择?)[\s:*\"'(]*([A-Z])(?![A-Za-z0-9_])", re.IGNORECASE)
_SECOND = re.compile(
    r"[\s*\"')]*(?:(?:or|and)\b|[/&、或和]|,(?=\s*[A-Z]\s*(?:[.,;)]|\Z)))[\s*\"'(]*(?:option\s+)?[A-Z](?![A-Za-z])"
)
_NEGATED = re.compile(
    r"(?:\b(?:not|nor|neither|than|isn't)(?:\s+option)?\s+|(?:不是|不选|并非))[\"'(*]*\Z", re.IGNORECASE
)
_OPENING = re.compile(r"[\s\"'(\[*]*(?:option\s+)?[A-Z](?![A-Za-z0-9_'])", re.IGNORECASE)
_FIRST = re.compile(r"[\s\"'(\[*]*(?:option\s+)?([A-Z])[\"'*]*[)\].:。、]", re.IGNORECASE)
_LISTED = re.compile(
    r"(?:[\n.;。]\s?)[\s\"'(\[*]{0,4}(?:option\s+)?([A-Z])[\"'*]{0,3}(?:[)\].:。、]| is\b)", re.IGNORECASE
)
_LEADING = re.compile(r"[\s\"'(\[*]*(?:option\s+)?([A-Za-z])(?:\s*[\"')\].,:、。*]|\s*\Z)", re.IGNORECASE)
_LONE = re.compile(r"(?<![A-Za-z0-9_'])[A-Z](?![A-Za-z0-9_'])")
_ARTICLE = re.compile(r"A[ \t]+(?!(?:the|is|was|and|or|as|because|since|seems|fits|must|would)\b)[a-z]|I[ \t]+[a-z]")

_VERDICT = re.compile(r"<answer>[\s*\"'.:`()\[\]]*(true|false)[\s*\"'.`()\[\]]*(?:</answer>|\Z)", re.IGNORECASE)
# What ends a sentence is matched from its first sign only: a row of 100,000 dots would else be tried from each of them.
_ENDS = re.compile(r"(?<![.!?。！？])[.!?。！？]+[\s\"'”*_]+|\n+")
_ALONE = re.compile(
    r"\W*(?:(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|verdict)(?:\s+is)?\W+|(?:the\s+|this\s+)?(?:statement|claim)\s+is\s+"
    r"|(?:最终)?(?:答案|回答|结论)[是为]?\W*)?(true|false)\W*",
    re.IGNORECASE,
)


def read_answer(task: Task, reply: str, n_options: int = 0) -> str | None:
    """Read the answer out of a reply.

    Reasoning between ``<think>`` and ``</think>`` is passed over. No string makes it fail.

    Args:
        task: How the question was to be answered.
        reply: What the model replied.
        n_options: Options that there were, for ``choice`` and ``letter``.

    Returns:
        ``free``: the phrase, without label, quotes, fence and marks such as [P3]. ``choice`` and ``letter``: the
        option's letter, by the JSON field ``answer``, else by what is called the answer, else the one it begins with
        ("B. the ferryman"), else the last letter of an option that stands alone; none where two are named as one answer
        ("A or B") or all in turn. ``claim``: "TRUE" or "FALSE", by the last ``<answer>`` that holds one of them, else
        by the JSON field ``answer``, by a last sentence that says nothing else ("The statement is false."), or by a
        first one where the other word does not occur. None: there is no answer to read, which counts as a wrong one.
    """
    text = _without_thought(reply)
    if task == "free":
        return _phrase(text)
    # Full-width letters and colons, as Chinese replies have them, become plain ones.
    text = unicodedata.normalize("NFKC", text).strip()
    if task == "claim":
        return _verdict(text)
    return _letter(text, ascii_uppercase[: max(0, n_options)])


def citations(reply: str, passage_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of the passages that a reply cites by marks such as [P3] or [P1, P4], in its order.

    Marks of passages that were not shown are passed over.

    Args:
        reply: What the model replied.
        passage_ids: Ids of the passages shown as [P1], [P2], …
    """
    cited: list[str] = []
    for mark in _MARK.findall(unicodedata.normalize("NFKC", _without_thought(reply))):
        numbers: list[int] = []
        for to, number in _NUMBER.findall(mark) if _NUMBERS.fullmatch(mark.strip()) else ():
            last = int(number)
            first = numbers[-1] + 1 if to and numbers[-1] < last <= len(passage_ids) else last  # [P1-P3] names three
            numbers += range(first, last + 1)
        cited += [passage_ids[number - 1] for number in numbers if 1 <= number <= len(passage_ids)]
    return tuple(dict.fromkeys(cited))


def _without_thought(reply: str) -> str:
    text = reply.rpartition("</think>")[2]
    text = text.partition("<think>")[0]  # a thought that never ended leaves nothing behind it
    return _LATEX.sub(r"\1", _LATEX.sub(r"\1", text))  # \boxed{\text{B}}


def _phrase(text: str) -> str | None:
    tagged = text.rpartition("<answer>")[2].partition("</answer>")[0]
    text = tagged if tagged.strip() else text
    for record in _objects(text):
        found = _field(record)
        if found is not None and not isinstance(found, dict):
            text = ", ".join(map(str, found)) if isinstance(found, list) else str(found)
            break
    else:
        if field := _QUOTED_TEXT.search(text):  # an object that is cut off, or has a comma too many
            text = field[1]
    for line in text.splitlines():
        phrase = "" if line.strip().startswith("```") else _bare(line)
        if any(map(str.isalnum, phrase)) and not _HEADING.fullmatch(phrase):
            return phrase
    return None


def _bare(line: str) -> str:
    """Take marks, emphasis, labels and quotes off a line, however they are nested."""
    line = _MARK.sub(lambda mark: "" if _NUMBERS.fullmatch(mark[1].strip()) else mark[0], line)
    line = line.replace("**", "").replace("</answer>", "").strip()
    while True:
        before = line
        for what in (_BULLET, _LABEL):
            if found := what.match(line):
                line = line[found.end() :].strip()
        inner = line[1:-1]
        closes = _QUOTES.get(line[:1])
        # "A" and "B" are two quotes, not one around all.
        if closes and len(line) > 1 and line.endswith(closes) and closes not in inner and line[0] not in inner:
            line = inner.strip()
        if line == before:
            return line


def _letter(text: str, letters: str) -> str | None:
    """Find the one letter that a reply means; where two readings are as good as one another, there is none."""
    values = [value for record in _objects(text) if (value := _field(record)) is not None]
    value = values[-1] if values else None
    if value == "":
        return None  # it gives no answer; letters in its reasoning are none
    if isinstance(value, list):
        value = " ".join(map(str, value))
    if isinstance(value, str):
        if found := _leading(value, letters):
            return found
        if lone := set(_lone(value, letters)):
            return lone.pop() if len(lone) == 1 else None
    if (field := _QUOTED_KEY.search(text)) and (found := _leading(field[1], letters)):
        return found
    said = [found for found in _SAID.finditer(text) if found[1] in letters]
    if said := [found for found in said if not _ARTICLE.match(text, found.start(1))]:
        return None if _SECOND.match(text, said[-1].end()) else said[-1][1]
    if (opens := _OPENING.match(text)) and _SECOND.match(text, opens.end()):
        return None  # "A, B", "B or C"
    if whole := _leading(text, letters) if len(text) <= 4 else None:
        return whole
    # "B. Because A was at sea", but not the first line of a list that goes through the options.
    first, listed = _FIRST.match(text), {found.upper() for found in _LISTED.findall(text)} & set(letters)
    if first and first[1].upper() in letters and listed <= {first[1].upper()}:
        return first[1].upper()
    named = _lone(text, letters)
    gone_through = len(letters) > 2 and sorted(named) == list(letters)  # "A is wrong. B is wrong. C fits. D is wrong."
    return named[-1] if named and not gone_through else None


def _leading(value: str, letters: str) -> str | None:
    """Read "B", "(B)", "b." or "B. the ferryman"."""
    found = _LEADING.match(value)
    return found[1].upper() if found and found[1].upper() in letters else None


def _lone(text: str, letters: str) -> list[str]:
    """Return the options' letters that stand alone; "A man", "I think" and "not B" do not count."""
    return [
        found[0]
        for found in _LONE.finditer(text)
        if found[0] in letters
        and not _ARTICLE.match(text, found.start())
        and not _NEGATED.search(text, max(0, found.start() - 20), found.start())
    ]


def _verdict(text: str) -> str | None:
    if tagged := _VERDICT.findall(text):
        return tagged[-1].upper()
    fields = [field for record in _objects(text) if isinstance(field := _field(record), str)]
    if fields and (verdict := _ALONE.fullmatch(fields[-1])):
        return verdict[1].upper()
    sentences = [part for part in _ENDS.split(text) if re.search(r"\w", part)]
    if sentences and (last := _ALONE.fullmatch(sentences[-1])):
        return last[1].upper()
    words = {word.lower() for word in re.findall(r"\b(?:true|false)\b", text, re.IGNORECASE)}
    first = _ALONE.fullmatch(sentences[0]) if sentences else None
    return first[1].upper() if first and len(words) == 1 else None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a text that do not lie in one another."""
    decoder, start = json.JSONDecoder(), 0
    for _ in range(_TRIED):
        start = text.find("{", start)
        if start < 0:
            return
        try:
            value, start = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            continue
        if isinstance(value, dict):
            yield value


def _field(record: dict[str, Any]) -> Any:
    """Return an object's answer, "" where it is null, None where there is no such field."""
    found = [value for key, value in record.items() if key.strip().lower() == "answer"]
    return None if not found else "" if found[0] is None else found[0]
