"""The extractive default summary: no language model, only sentences picked by an encoder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mia_serve.core import MiaError
from mia_serve.mindscape.records import Window
from mia_serve.mindscape.sentences import count_words, first_words, is_cjk, join_sentences, split_sentences, split_terms

# Shorter sentences ("Yes," said he.) say little on their own; they are used only in a window that has nothing else.
_FEW_WORDS = 5

# Sentences of a window that are encoded (more for long summaries): a window of 20 passages has about 100, and encoding
# them all costs as much as encoding the passages themselves and names the right session no better.
_CANDIDATES = 12

#: Words of a book's summary: about 260 tokens, the short end of those that MiA-Emb was trained with (240 to 1,243).
BOOK_WORDS = 200


class DocumentEncoder(Protocol):
    """What is needed of an encoder here; `mia_serve.core.Encoder` has it."""

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        """Encode texts to (n, d) float32 unit rows."""
        ...


def extractive_summaries(
    windows: Sequence[Window], encoder: DocumentEncoder, max_words: int = 60, among: Sequence[Window] = ()
) -> list[str]:
    """Summarise each window by its most central sentences.

    Of each window the dozen sentences richest in the window's own words (tf-idf against the other windows) are encoded,
    all windows in one call. Those nearest to their mean vector are taken, nearest first, while they fit into the bound,
    and are put back into text order behind the title.

    Args:
        windows: The windows.
        encoder: Encodes the sentences (as documents).
        max_words: Most words of a summary, the title included; a CJK character counts as a word.
        among: Further windows that words are weighed against; they get no summary.

    Returns:
        One summary a window.

    Raises:
        MiaError: The bound is below 1, or a window holds no text.
    """
    sentences = [_sentences(window.texts, f"window {i}") for i, window in enumerate(windows)]
    others = [_sentences(window.texts, f"window {i} of `among`") for i, window in enumerate(among)]
    candidates = _richest(sentences, max(_CANDIDATES, max_words // 5), others)
    return _central(candidates, [window.title for window in windows], encoder, max_words)


def book_summaries(
    books: Sequence[Sequence[str]], titles: Sequence[str], encoder: DocumentEncoder, max_words: int = BOOK_WORDS
) -> list[str]:
    """Sum up whole books out of the summaries of their sessions: the second stage of MiA-RAG's mindscape (2512.17220).

    There a language model writes it; here the sentences nearest to the mean of all are taken, as in
    `extractive_summaries`, whatever other books there are. A book of one session has that session's summary, so a
    benchmark that brings a summary of the whole document (QMSum) keeps it.

    Args:
        books: The session summaries of each book, in order.
        titles: One title a book, `""` for none.
        encoder: Encodes the sentences (as documents).
        max_words: Most words of a summary, the title included.

    Returns:
        One summary a book.

    Raises:
        MiaError: Titles and books differ in number, the bound is below 1, or a book has no text.
    """
    if len(books) != len(titles):
        raise MiaError(f"{len(books)} books but {len(titles)} titles: give one a book (an empty one is fine)")
    several = [i for i, book in enumerate(books) if len(book) != 1]
    sentences = []
    for i in several:
        found = _sentences(books[i], f"book {i}")
        # Session summaries may begin with the title, which comes first anyway.
        sentences.append([sentence for sentence in found if sentence != _heading(titles[i])] or found)
    made = iter(_central(sentences, [titles[i] for i in several], encoder, max_words))
    return [book[0] if len(book) == 1 else next(made) for book in books]


def _central(windows: list[list[str]], titles: Sequence[str], encoder: DocumentEncoder, max_words: int) -> list[str]:
    """Summarise each window by those of its sentences that are nearest to their mean."""
    if max_words < 1:
        raise MiaError(f"max_words is {max_words}: it must be at least 1")
    if not windows:
        return []
    vectors = encoder.encode_documents([sentence for window in windows for sentence in window])
    summaries = []
    end = 0
    for window, title in zip(windows, titles, strict=True):
        start, end = end, end + len(window)
        rows = np.asarray(vectors[start:end], dtype=np.float32)
        # Stable sort: of two sentences equally near, the earlier one.
        order = np.argsort(-(rows @ rows.mean(axis=0)), kind="stable")
        summaries.append(_summary(window, order, title, max_words))
    return summaries


def _sentences(window: Sequence[str], name: str) -> list[str]:
    """The distinct sentences of a window, the very short ones left out unless there are no others."""
    sentences = list(dict.fromkeys(s for text in window for s in split_sentences(text)))
    if not sentences:
        raise MiaError(f"{name} holds no text: drop it, or give its texts")
    return [s for s in sentences if count_words(s) >= _FEW_WORDS] or sentences


def _richest(windows: list[list[str]], n: int, others: list[list[str]]) -> list[list[str]]:
    """Keep the n sentences of each window that hold most of its own words (others weigh too), in text order."""
    total = len(windows) + len(others)
    terms = [[set(split_terms(sentence)) for sentence in window] for window in windows]
    counts = [Counter(term for sentence in window for term in sentence) for window in terms]
    spread = Counter(term for window in counts for term in window)
    for window in others:
        spread.update({term for sentence in window for term in split_terms(sentence)})
    kept = []
    for window, of_sentence, count in zip(windows, terms, counts, strict=True):
        weight = {term: tf * math.log((1 + total) / spread[term]) for term, tf in count.items()}
        # Divided by the root of the length: neither the longest sentence nor the shortest wins by its length alone.
        scores = [sum(sorted(weight[t] for t in own)) / math.sqrt(max(1, len(own))) for own in of_sentence]
        rows = np.argsort(-np.array(scores), kind="stable")[:n]
        kept.append([window[row] for row in sorted(rows.tolist())])
    return kept


def _heading(title: str) -> str:
    """The title on one line, as a sentence."""
    title = " ".join(title.split())
    if title and title[-1] not in ".!?。．！？…":
        title += "。" if is_cjk(title) else "."
    return title


def _summary(sentences: list[str], order: np.ndarray, title: str, max_words: int) -> str:
    title = _heading(title)
    left = max_words - count_words(title)
    if title and left < 1:
        return first_words(title, max_words)
    taken = []
    for row in order.tolist():
        words = count_words(sentences[row])
        if words <= left:
            taken.append(row)
            left -= words
    body = [sentences[row] for row in sorted(taken)] or [first_words(sentences[int(order[0])], left)]
    return join_sentences([title, *body] if title else body)
