"""Cut a long text into chunks of so many tokens, with exact character offsets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mia_serve.core import MiaError
from mia_serve.mindscape.sentences import BLANK_LINE, paragraph_spans, sentence_spans

#: Gives the character span of every token of a text.
TokenSpans = Callable[[str], list[tuple[int, int]]]

# Tokens: more than the 40 characters that tell whether a sentence ends, in tokenizers of bytes too.
_MARGIN = 128


class TextChunk(NamedTuple):
    """A piece of a text: `text == source[start:end]`."""

    text: str
    start: int
    end: int
    tokens: int


def chunk_text(text: str, tokenizer: Any, size: int = 1200, overlap: int = 100) -> list[TextChunk]:
    """Cut a text into chunks of at most `size` tokens.

    A paragraph that fits into a chunk is kept whole; of a longer one, sentences that fit are kept whole; a longer
    sentence is cut between tokens (never within a character). The next chunk starts exactly `overlap` tokens before the
    end of the one before. Every character but the white space at chunk borders is in some chunk. The papers' settings
    are 1200/100 (NarrativeQA, DetectiveQA) and 200/0 (NoCha), MiA-RAG, arXiv 2512.17220.

    Args:
        text: The source text.
        tokenizer: A fast `transformers` tokenizer, a `tokenizers.Tokenizer`, or a function from a text to its tokens'
            character spans. No special tokens are counted.
        size: Most tokens in a chunk.
        overlap: Tokens that a chunk shares with the one before.

    Returns:
        The chunks in text order.

    Raises:
        MiaError: `size` and `overlap` do not fit together, the text is empty, or the tokenizer gives no offsets.
    """
    spans = _spans(text, tokenizer, size, overlap)
    return [chunk for _, chunk in _cut_all(text, spans, 0, size, overlap)]


class OpenText(NamedTuple):
    """The end of a text that may go on: all that its further chunks depend on.

    Attributes:
        text: From a blank line on, or the whole text.
        start: Character of `text` at which the first chunk begins that may still change.
        skip: Tokens that begin at this character (tokens of bytes do) and belong to the chunk before.
    """

    text: str = ""
    start: int = 0
    skip: int = 0


def chunk_open(
    tail: OpenText, more: str, tokenizer: Any, size: int = 1200, overlap: int = 100
) -> tuple[list[TextChunk], int, OpenText]:
    """Cut a text that arrives in pieces, so that its chunks are those that `chunk_text` makes of the whole.

    The chunks that are open, usually the last two or three, are cut anew with each piece. Before its first blank line a
    text may yet turn out to be one long paragraph, so until then all of its chunks are open. Holds for all tokenizers
    whose tokens behind a blank line do not depend on what stands before it.

    Args:
        tail: What the last call returned; `OpenText()` at first.
        more: The next piece; it follows without a gap.
        tokenizer: As in `chunk_text`, and the same in all calls; so are `size` and `overlap`.
        size: Most tokens in a chunk.
        overlap: Tokens that a chunk shares with the one before.

    Returns:
        The chunks that were open and all that follow, with offsets in `tail.text + more`; how many of them can no
        longer change; and the tail for the next call.

    Raises:
        MiaError: As `chunk_text`; the first piece must have a token.
    """
    text = tail.text + more
    spans = _spans(text, tokenizer, size, overlap)
    starts = [start for start, _ in spans]
    found = list(_cut_all(text, spans, bisect_left(starts, tail.start) + tail.skip, size, overlap))
    breaks = list(BLANK_LINE.finditer(text))
    # Where a chunk ends depends on the unit behind it as far as that fits into a chunk: tokens below
    # first + 2 * size - overlap. The margin is for what tells tokens and sentences of each other.
    known = len(spans) - (2 * size - overlap) - _MARGIN if breaks else -1
    closed = min(sum(first <= known for first, _ in found), len(found) - 1)
    first = found[closed][0]
    cut = max((m.start() for m in breaks if m.end() <= starts[first]), default=0)
    rest = OpenText(text[cut:], starts[first] - cut, first - bisect_left(starts, starts[first]))
    return [chunk for _, chunk in found], closed, rest


def _cut_all(
    text: str, spans: list[tuple[int, int]], first: int, size: int, overlap: int
) -> Iterator[tuple[int, TextChunk]]:
    """Cut from token `first` on, where a chunk begins; yield each chunk behind the index of its first token."""
    starts = [start for start, _ in spans]
    paragraphs = _token_ends(paragraph_spans(text), starts)
    sentences = _token_ends(sentence_spans(text), starts)
    end = first
    while end < len(spans):
        end = _chunk_end(spans, first, first + size, max(first + overlap, end), size - overlap, paragraphs, sentences)
        chunk = _cut(text, spans, first, end)
        if chunk.text:  # some tokenizers have tokens of white space, which can fill a chunk by themselves
            yield first, chunk
        first = max(end - overlap, first + 1)


def _spans(text: str, tokenizer: Any, size: int, overlap: int) -> list[tuple[int, int]]:
    if size < 1 or not 0 <= overlap < size:
        raise MiaError(f"size={size}, overlap={overlap}: size must be at least 1 and overlap between 0 and size - 1")
    spans = [(start, end) for start, end in _token_spans(tokenizer, text) if end > start]
    if not spans or not text.strip():
        raise MiaError("the text to chunk is empty: give a text with at least one token")
    return spans


def _chunk_end(
    spans: list[tuple[int, int]],
    first: int,
    limit: int,
    after: int,
    room: int,
    paragraphs: list[int],
    sentences: list[int],
) -> int:
    """Index after the last token of the chunk that starts at `first`; always more than `after`, where it can be."""
    if limit >= len(spans):
        return len(spans)
    for ends in (paragraphs, sentences):
        i = bisect_left(ends, limit + 1)  # ends[i - 1] <= limit < ends[i]
        # Stopping short is right only if the unit that follows fits into a chunk; a longer one is cut anyway.
        if i and ends[i - 1] > after and ends[i] - ends[i - 1] <= room:
            return ends[i - 1]
    end = limit
    # Byte-level tokenizers spread one character over several tokens with the same span: step back to its start.
    while end > after + 1 and spans[end][0] < spans[end - 1][1]:
        end -= 1
    return end


def _cut(text: str, spans: list[tuple[int, int]], first: int, end: int) -> TextChunk:
    start_char = spans[first][0] if first else 0
    # Characters that no token covers go with the chunk before them, so that nothing is lost.
    end_char = max(spans[end][0], spans[end - 1][1]) if end < len(spans) else len(text)
    piece = text[start_char:end_char]
    left = start_char + len(piece) - len(piece.lstrip())
    stripped = piece.strip()
    return TextChunk(stripped, left, left + len(stripped), end - first)


def _token_ends(spans: list[tuple[int, int]], starts: list[int]) -> list[int]:
    """For each span the index of the first token after it (ascending, the last one is the number of tokens)."""
    ends = [bisect_left(starts, end) for _, end in spans]
    return sorted({end for end in ends if end} | {len(starts)})


def _token_spans(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, padding=False, verbose=False
        )
        return encoded["offset_mapping"]
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "no_truncation"):
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            # A copy: switching off truncation and padding on the caller's tokenizer would be a surprise.
            tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            tokenizer.no_truncation()
            tokenizer.no_padding()
        return tokenizer.encode(text, add_special_tokens=False).offsets
    if callable(tokenizer) and not hasattr(tokenizer, "is_fast"):
        return tokenizer(text)
    raise MiaError(
        f"{type(tokenizer).__name__} gives no character offsets: use a fast transformers tokenizer, a "
        "tokenizers.Tokenizer, or a function from a text to its tokens' (start, end)"
    )
