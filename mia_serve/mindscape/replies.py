"""A summary out of a model's reply, whatever the model wrapped around it."""

from __future__ import annotations

import json
import re
import unicodedata

from mia_serve.llm import LlmFailed
from mia_serve.mindscape.sentences import count_words, ends_sentence, first_words, join_sentences, sentence_spans

_THOUGHT = re.compile(r"\A.*</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_UNFINISHED = re.compile(r"<think(?:ing)?>.*\Z", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"```[\w-]*[ \t]*\n?(.*?)```", re.DOTALL)
_TAG = re.compile(r"</?(?:summary|text|part|session|answer|output)\b[^<>]{0,40}>", re.IGNORECASE)
_MARK = re.compile(r"\A(?:[-*•>#]+|\d{1,2}[.)])\s+")
_WORD = (
    r"summary|abstract|synopsis|retelling|narrative|paragraph|rewrite|"
    r"摘要|总结|總結|概要|概述|要約|あらすじ|요약|zusammenfassung|résumé|resumen|resumo|riassunto|резюме|"
    r"краткое содержание|пересказ"
)
_LABEL = re.compile(
    rf"\A(?:(?:sure|certainly|of course|okay|ok|好的)[,.!，。！]?\s*)?"
    rf"(?:here(?:'s|’s|\s+is)\b[^:：.!?]{{0,120}}?(?:{_WORD})[^:：.!?]{{0,80}}[:：]"
    rf"|(?:以下|这|這|下面)是[^:：。]{{0,40}}(?:{_WORD})[^:：。]{{0,20}}[:：]"
    rf"|(?:the\s+|a\s+)?(?:(?:session|final|global|book|chat|overall|brief|内容|本章|故事|剧情)\s*)?(?:{_WORD})"
    rf"(?:\s+of\s+[^:：.!?]{{0,80}})?\s*[:：]"
    rf"|(?:part|session)\s+\d+\s*(?:(?:/|of)\s*\d+)?\s*[:：])\s*",
    re.IGNORECASE,
)
_HEADING = re.compile(rf"\A(?:(?:session|final|global|book|overall)\s+)?(?:{_WORD})\s*[:：]?\Z", re.IGNORECASE)
_COUNT = re.compile(
    r"\s*[(\[（]?\s*(?:word count|total words|字数|字數)\s*[:：]?\s*\d+[^()\[\]（）]{0,20}[)\]）]?\s*\Z", re.I
)
_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "「": "」", "『": "』", "«": "»", "„": "“", "`": "`"}
_SHORTEST = 8  # a summary that was cut off has to reach this part of a bound, half of what is asked for
_ABSURD = 10  # times the bound in characters: no summary any more, whatever its first sentences say


def whole_enough(text: str, max_words: int, max_characters: int) -> bool:
    """Whether a reply that was cut off still makes a summary: its whole sentences fill an eighth of a bound."""
    try:
        kept = clean_reply(text, max_words, max_characters, cut=True)
    except LlmFailed:
        return False
    return count_words(kept) >= max_words / _SHORTEST or len(kept) >= max_characters / _SHORTEST


def clean_reply(text: str, max_words: int, max_characters: int, cut: bool = False) -> str:
    """Return the summary that a reply holds, as one paragraph.

    Reasoning, code fences, tags, JSON around it, labels ("Summary:"), list marks, a count of words and quotes around
    the whole are taken off, and sentences that it repeats. What is longer than the bounds is cut at the end of a
    sentence.

    Args:
        text: The reply.
        max_words: Most words; a CJK character counts as one.
        max_characters: Most characters.
        cut: Whether the reply was cut off; what follows its last whole sentence is left out then.

    Raises:
        LlmFailed: ("bad reply") It holds no summary: nothing but reasoning or marks, other JSON, or far too much.
    """
    text = _UNFINISHED.sub("", _THOUGHT.sub("", text))
    if len(text) > _ABSURD * max_characters:
        raise LlmFailed("bad reply", f"{len(text)} characters where at most {max_characters} were wanted")
    text = _unwrapped(_unfenced(text))
    paragraph = _one_paragraph(one_line_each(text))
    if cut:
        paragraph = _whole_sentences(paragraph)
    if not any(character.isalnum() for character in paragraph):
        raise LlmFailed("bad reply", f"the reply holds no summary: {' '.join(text.split())[:80]!r}")
    return _bounded(_said_once(paragraph), max_words, max_characters)


def one_line_each(text: str) -> list[str]:
    """Return the lines that hold something, with single spaces, without control characters and halves of surrogates."""
    return [line for raw in text.splitlines() if (line := plain(raw))]


def plain(text: str) -> str:
    """Return a text on one line: single spaces, a space for control characters and what no file can hold."""
    return " ".join("".join(" " if unicodedata.category(c) in ("Cc", "Cs") else c for c in text).split())


def _unfenced(text: str) -> str:
    """Return what stands in fences, where that is most of the reply; else the reply without their marks."""
    fenced = "\n".join(_FENCE.findall(text)).strip()
    return fenced if len(fenced) > len(_FENCE.sub("", text).strip()) else text.replace("```", "\n")


def _unwrapped(text: str) -> str:
    """Return the one text that a JSON reply holds."""
    bare = text.strip()
    if not bare.startswith(("{", "[", '"')):
        return text
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        if bare.startswith("{"):
            raise LlmFailed("bad reply", f"broken JSON where a summary was wanted: {plain(bare)[:80]!r}") from None
        return text  # a quotation, or a remark in brackets
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        named = [entry for key, entry in value.items() if key.casefold() == "summary"]
        said = [entry for entry in named or value.values() if isinstance(entry, str)]
        value = said[0] if len(said) == 1 else None
    if not isinstance(value, str):
        raise LlmFailed("bad reply", f"JSON where a summary was wanted: {plain(bare)[:80]!r}")
    return value


def _one_paragraph(lines: list[str]) -> str:
    lines = [_MARK.sub("", _TAG.sub("", line).replace("**", "").strip()).strip() for line in lines]
    lines = [line for line in lines if line]
    while len(lines) > 1 and _HEADING.match(lines[0]):
        del lines[0]
    paragraph = _unquoted(join_sentences(lines))
    for _ in range(3):  # "Sure! Here is the summary: Part 1/3: …"
        paragraph = _LABEL.sub("", paragraph)
    return _unquoted(_COUNT.sub("", paragraph))


def _unquoted(text: str) -> str:
    """Take off quotes around the whole: a pair of them with none of their kind between."""
    text = text.strip()
    while len(text) > 1 and _QUOTES.get(text[0]) == text[-1]:
        inner = text[1:-1]
        if text[0] in inner or text[-1] in inner:
            break
        text = inner.strip()
    return text


def _whole_sentences(text: str) -> str:
    """Leave out the last sentence where it has no end."""
    spans = sentence_spans(text)
    if spans and not ends_sentence(text):
        spans.pop()
    return text[: spans[-1][1]] if spans else ""


def _said_once(text: str) -> str:
    """Leave out sentences that were said before: a weak model repeats itself until it is stopped."""
    sentences = [text[start:end] for start, end in sentence_spans(text)]
    kept = list(dict.fromkeys(sentences))
    return text if len(kept) == len(sentences) else join_sentences(kept)


def _bounded(text: str, max_words: int, max_characters: int) -> str:
    """Cut a text after its last sentence that lies within both bounds; within a sentence where there is none."""
    if len(text) <= max_characters and count_words(text) <= max_words:
        return text
    head = first_words(text[:max_characters], max_words)
    # The marks behind its last word belong to it.
    ends = [end for _, end in sentence_spans(text) if end <= max_characters and count_words(text[:end]) <= max_words]
    if ends:
        return text[: ends[-1]]
    broken_word = len(head) == max_characters and head[-1:].isalnum() and " " in head
    return (head.rsplit(" ", 1)[0] if broken_word else head).rstrip()
