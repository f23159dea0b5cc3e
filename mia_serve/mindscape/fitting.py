"""Texts in prompts that a model's context holds: estimates of tokens, and groups that fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mia_serve.core import MiaError
from mia_serve.llm import ChatClient, Message
from mia_serve.mindscape.sentences import sentence_spans

# Prompts that need no more than this, with two tries of a reply, fit every model; no endpoint is asked about them.
_SMALL = 1500
_LEAST = 128  # tokens of text in a prompt, below which summing up makes no sense
_AROUND = 12  # tokens of the marks around a text


class Room(NamedTuple):
    """What a prompt and its reply may take.

    Attributes:
        tokens: Of the texts in a prompt, as `estimate_tokens` counts; None where the context is unknown.
        reply: Of the reply.
    """

    tokens: int | None
    reply: int


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has, rather too many: one for 3.5 ASCII characters or one other."""
    ascii_characters = len(text.encode("ascii", "ignore"))
    return math.ceil(ascii_characters / 3.5) + len(text) - ascii_characters


async def find_room(
    client: ChatClient,
    frame: Sequence[Message],
    longest: int,
    max_tokens: int,
    context_tokens: int | None,
) -> Room:
    """Find how much text a prompt can hold.

    Args:
        client: Asked for the model's context, if that is not given and the longest prompt needs much.
        frame: The prompt without the texts.
        longest: Tokens of the texts of the longest prompt.
        max_tokens: Most tokens of a reply.
        context_tokens: The model's context; None: what the endpoint says.

    Raises:
        MiaError: The context is too small.
    """
    around = sum(estimate_tokens(message["content"]) + 8 for message in frame)
    needed = longest + around + 2 * max_tokens
    if context_tokens is None and (needed <= _SMALL or (context_tokens := await client.context_tokens()) is None):
        return Room(None, max_tokens)
    reply = min(max_tokens, context_tokens // 4)
    # Some more is left free, for the second try that the client makes where a reply was cut off.
    tokens = context_tokens - around - min(2 * reply, context_tokens // 3)
    if tokens < _LEAST:
        raise MiaError(
            f"a context of {context_tokens} tokens is too small to write summaries with: the instructions alone take "
            f"about {around}; serve the model with more (vllm serve --max-model-len)"
        )
    return Room(tokens, reply)


def group_texts(texts: Sequence[str], room: int) -> list[list[str]]:
    """Part texts into consecutive groups of about equal size that fit; a text that does not fit alone is cut.

    Args:
        texts: In order.
        room: Tokens of a group at most.
    """
    pieces = [piece for text in texts for piece in _cut(text, room)]
    return [[pieces[i] for i in rows] for rows in _packed([_size(piece) for piece in pieces], room)]


def halves(texts: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Part texts in the middle; None where there is nothing left to part."""
    if len(texts) == 1:
        texts = _cut(texts[0], max(_AROUND + 1, math.ceil(_size(texts[0]) / 2)))
    if len(texts) < 2:
        return None
    sizes = [_size(text) for text in texts]
    middle = min(range(1, len(texts)), key=lambda i: abs(2 * sum(sizes[:i]) - sum(sizes)))
    return list(texts[:middle]), list(texts[middle:])


def _size(text: str) -> int:
    return estimate_tokens(text) + _AROUND


def _packed(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Part a row of sizes into runs of about equal sums, none above the room but where one size alone is."""
    goal = sum(sizes) / max(1, math.ceil(sum(sizes) / room))
    runs: list[list[int]] = []
    filled = math.inf
    for i, size in enumerate(sizes):
        if filled + size > room or filled >= goal:
            runs.append([])
            filled = 0
        runs[-1].append(i)
        filled += size
    return runs


def _cut(text: str, room: int) -> list[str]:
    """Cut a text at the ends of sentences into pieces that fit, and where a sentence is too long within it."""
    if _size(text) <= room:
        return [text]
    most = room - _AROUND
    starts = [start for start, _ in sentence_spans(text)][1:]
    cuts = [0, *starts, len(text)]
    # A character is at most one token.
    steps = [s for a, b in itertools.pairwise(cuts) for s in (range(a, b, most) if _over(text[a:b], most) else (a,))]
    parts = [text[a:b] for a, b in itertools.pairwise([*steps, len(text)])]
    packed = _packed([estimate_tokens(part) for part in parts], most)
    return [piece for rows in packed if (piece := "".join(parts[i] for i in rows)).strip()]


def _over(text: str, tokens: int) -> bool:
    return estimate_tokens(text) > tokens
