"""Keyword summaries: no model at all, only what sets a window apart from the others."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from mia_serve.core import MiaError
from mia_serve.mindscape.records import Window
from mia_serve.mindscape.sentences import count_words, first_words, split_terms

_NAMES, _NAME_TIMES = 6, 2
# A capitalised word after a lower-case one or a comma: not the start of a sentence.
_NAME = re.compile(r"(?<=[a-z,] )([A-Z][a-z'’]+(?: [A-Z][a-z'’]+)*)")


def keyword_summaries(windows: Sequence[Window], max_words: int = 32, among: Sequence[Window] = ()) -> list[str]:
    """Summarise each window as ``title. names. words``.

    Names are capitalised runs inside sentences, most frequent first; words are those with the highest
    ``(1 + ln tf) * ln((1 + N) / df)`` over the N windows. For telling sessions apart this carries nearly what the full
    text does, in a third of the tokens of sentences; it is no text to read. A CJK window gets pairs of characters.

    Args:
        windows: The windows.
        max_words: Most words of a summary, the title included.
        among: Further windows that words are weighed against; they get no summary.

    Returns:
        One summary a window.

    Raises:
        MiaError: The bound is below 1, or a window holds no text.
    """
    if max_words < 1:
        raise MiaError(f"max_words is {max_words}: it must be at least 1")
    texts = [" ".join(" ".join(window.texts).split()) for window in windows]
    empty = next((i for i, text in enumerate(texts) if not text), None)
    if empty is not None:
        raise MiaError(f"window {empty} holds no text: drop its chunks or give their texts")
    counts = [Counter(term for term in split_terms(text) if len(term) > 1) for text in texts]
    spread = Counter(term for count in counts for term in count)
    for window in among:
        spread.update({term for term in split_terms(" ".join(window.texts)) if len(term) > 1})
    total = len(texts) + len(among)
    summaries = []
    for text, count, title in zip(texts, counts, (window.title for window in windows), strict=True):
        names = [name for name, times in Counter(_NAME.findall(text)).most_common(_NAMES) if times >= _NAME_TIMES]
        said = set(split_terms(" ".join([title, *names])))
        weight = {
            term: (1 + math.log(tf)) * math.log((1 + total) / spread[term])
            for term, tf in count.items()
            if term not in said and not term.isdigit()
        }
        left = max_words - count_words(title) - sum(map(count_words, names))
        # Equal weights in alphabetical order: the same summary whatever order the terms were met in. No commas between
        # the words: they would be a third of an encoder's tokens.
        words = sorted(weight, key=lambda term: (-weight[term], term))[: max(0, left)]
        parts = [part for part in (title, ", ".join(names), " ".join(words)) if part]
        # A window of numbers or marks only has no word of its own; it is its own summary then.
        summaries.append(first_words(". ".join(parts) or text, max_words))
    return summaries
