"""A prompt cut to a model's context: what matters least goes first, and question, options and rule never.

The order: the worst-ranked passages, whole, down to the best one; its end, down to a short beginning; the signature,
from its least useful pick; the evidence, from its oldest fact; and at last the rest of the passage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from mia_serve.core.errors import MiaError
from mia_serve.rag.prompts import build_prompt
from mia_serve.rag.question import Question

if TYPE_CHECKING:
    from mia_serve.llm import Message

#: Bytes of UTF-8 that count as one token: of ASCII, and of all else. In prose a token of Qwen3's vocabulary has 4.4
#: (English) and 4.3 (Chinese), one of SmolLM2's, which knows no Chinese, 4.4 and 1.7.
_ASCII_BYTES, _OTHER_BYTES = 3, 2
_CHAT_TOKENS = 32  # what a chat template puts around a system and a user message
_BEGINNING = 100  # tokens of the best passage that are kept as long as there is anything else to leave out


class PromptTooLong(MiaError):
    """Question, options and rule alone do not fit."""


@dataclass(frozen=True)
class Trimmed:
    """What was left out so that a prompt fits.

    Attributes:
        passages: Passages left out, the worst-ranked ones.
        signature: Summaries of the signature left out, the last picks.
        evidence: Facts left out, the oldest.
        cut: Characters cut off the end of the best passage.
    """

    passages: int = 0
    signature: int = 0
    evidence: int = 0
    cut: int = 0

    def __bool__(self) -> bool:
        return self != Trimmed()

    def to_dict(self) -> dict[str, int]:
        """Return a JSON-ready dict."""
        return asdict(self)

    def to_text(self) -> str:
        """Return what was left out in words, such as "3 passages, 1 summary of the signature"."""
        counted = (
            (self.passages, "passage", "passages"),
            (self.cut, "character of the last passage", "characters of the last passage"),
            (self.signature, "summary of the signature", "summaries of the signature"),
            (self.evidence, "fact", "facts"),
        )
        return ", ".join(f"{n} {one if n == 1 else many}" for n, one, many in counted if n) or "nothing"


class Contents(NamedTuple):
    """What a prompt holds beside the question.

    Attributes:
        passages: Texts, best first.
        signature: Summaries, most useful first.
        evidence: Facts, oldest first.
        cite: Number the passages and ask to cite them.
        as_summary: Give the signature as the summary of the book, which is how MiA-Gen was trained.
        guided: Ask for the JSON of `answer_schema`.
    """

    passages: tuple[str, ...] = ()
    signature: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    cite: bool = False
    as_summary: bool = False
    guided: bool = False

    def prompt(self, question: Question) -> list[Message]:
        """Return the chat messages that ask a question from this.

        Raises:
            MiaError: The question's options do not fit its task, or it is empty.
        """
        messages = build_prompt(
            question.task,
            question.text,
            self.passages,
            "\n".join(self.signature) if self.as_summary else None,
            None if self.as_summary else self.signature,
            question.options,
            self.evidence,
            self.cite,
            self.guided,
        )
        return [{"role": message["role"], "content": message["content"]} for message in messages]


class Fitted(NamedTuple):
    """A prompt that fits.

    Attributes:
        contents: What it still holds.
        messages: The prompt.
        tokens: Its tokens, as they were counted.
        trimmed: What was left out.
    """

    contents: Contents
    messages: list[Message]
    tokens: int
    trimmed: Trimmed


def estimate_tokens(text: str) -> int:
    """Estimate a text's tokens from above where no tokenizer is at hand: one for 3 bytes of ASCII or 2 of other UTF-8.

    Prose has fewer; tables of numbers and code may have more.
    """
    size = len(text.encode("utf-8", "replace"))
    plain = len(text.encode("ascii", "ignore"))
    return math.ceil(plain / _ASCII_BYTES + (size - plain) / _OTHER_BYTES)


def prompt_tokens(messages: Sequence[Message], tokens: Callable[[str], int] = estimate_tokens) -> int:
    """Count the tokens of a chat, with what its template adds."""
    return _CHAT_TOKENS + sum(tokens(message["content"]) for message in messages)


def fit(
    question: Question,
    contents: Contents,
    limit: int | None = None,
    tokens: Callable[[str], int] = estimate_tokens,
) -> Fitted:
    """Lay out a question's prompt within a limit of tokens, leaving out what matters least.

    Args:
        question: Is never cut, nor are its options and the rule how to answer.
        contents: What the prompt is to hold.
        limit: Most tokens of the prompt; the reply needs room beside them. None: all is kept.
        tokens: Counts a text's tokens.

    Raises:
        PromptTooLong: Question, options and rule need more than the limit.
        MiaError: The question's options do not fit its task, or it is empty.
    """

    def size(held: Contents) -> int:
        return prompt_tokens(held.prompt(question), tokens)

    if limit is None:
        return _fitted(question, contents, contents, size(contents))
    held = contents
    while len(held.passages) > 1 and size(held) > limit:
        held = held._replace(passages=held.passages[:-1])
    if size(held) <= limit:
        return _fitted(question, contents, held, size(held))
    if held.passages:
        held = _cut(held, lambda shorter: size(shorter) <= limit or tokens(shorter.passages[0]) <= _BEGINNING)
    while held.signature and size(held) > limit:
        held = held._replace(signature=held.signature[:-1])
    while held.evidence and size(held) > limit:
        held = held._replace(evidence=held.evidence[1:])
    if held.passages:  # of it comes back what there is room for by now, or less stays
        held = _cut(held._replace(passages=contents.passages[:1]), lambda shorter: size(shorter) <= limit)
    if size(held) > limit:
        held = held._replace(passages=())
    if (least := size(held)) > limit:
        raise PromptTooLong(
            f"question {question.id!r} needs about {least} tokens with options and rule, and {limit} are free for the "
            "prompt: take a model with a longer context, or fewer tokens for the reply"
        )
    return _fitted(question, contents, held, least)


def _cut(held: Contents, enough: Callable[[Contents], bool]) -> Contents:
    """Cut the only passage at its end, at a word, by as little as is enough; by all but its first character at most."""
    text = held.passages[0]
    low, high = 1, len(text)  # kept at least, and at most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if enough(held._replace(passages=(text[:middle],))) else (low, middle - 1)
    kept = text[:low]
    if low < len(text) and not text[low].isspace() and (space := kept.rfind(" ", low // 2)) > 0:
        kept = kept[:space]  # text without spaces is cut between characters
    return held._replace(passages=(kept.rstrip() or text[:low],))


def _fitted(question: Question, contents: Contents, held: Contents, tokens: int) -> Fitted:
    left_out = Trimmed(
        passages=len(contents.passages) - len(held.passages),
        signature=len(contents.signature) - len(held.signature),
        evidence=len(contents.evidence) - len(held.evidence),
        cut=len(contents.passages[0]) - len(held.passages[0]) if held.passages else 0,
    )
    return Fitted(held, held.prompt(question), tokens, left_out)
