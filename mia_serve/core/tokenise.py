"""From texts to token ids, built from parts and never found again by searching.

User text is plain text: no string in it can become a control token. What a query is made of is counted before it is
put together, so that summaries are cut (evenly) and a query never is, and the terminal tokens always survive.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence as Seq
from typing import Any

from tokenizers import Tokenizer

from mia_serve.core.errors import MiaError, TooLong
from mia_serve.core.pooling import Sequence
from mia_serve.core.spec import EncoderSpec

logger = logging.getLogger(__name__)

Signature = Seq[str] | str | None


class TextTokeniser:
    """Build the token sequences of one encoder.

    Args:
        tokenizer: A transformers tokenizer backed by the ``tokenizers`` library.
        spec: The encoder's spec.

    Raises:
        MiaError: The template names a special token that the vocabulary lacks.
    """

    def __init__(self, tokenizer: Any, spec: EncoderSpec) -> None:
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise MiaError(f"{spec.base}: a tokenizer.json (fast tokenizer) is needed; convert the tokenizer first")
        self.spec = spec
        self._plain = without_control_tokens(tokenizer.backend_tokenizer)
        template = spec.template
        self._start = [_token_id(tokenizer, t, spec) for t in template.start]
        self._end = [_token_id(tokenizer, t, spec) for t in template.end]
        self._node = None if template.node_token is None else _token_id(tokenizer, template.node_token, spec)
        separator = template.separator_token
        self._separator_token = [] if separator is None else [_token_id(tokenizer, separator, spec)]
        self._lead = self._ids([template.signature_lead])[0] if template.signature_lead else []
        self._separator = self._ids([template.summary_separator])[0] if template.summary_separator else []
        self._warned = False

    @property
    def has_node_token(self) -> bool:
        """Whether the template knows a node token, hence a node view of its own."""
        return self._node is not None

    def document(self, text: str) -> Sequence:
        """Return the sequence of one document, cut to ``max_document_tokens``; view ``document``."""
        return self.documents([text])[0]

    def documents(self, texts: Seq[str], truncate: bool = True) -> list[Sequence]:
        """Return the sequences of documents; see :meth:`document`.

        Args:
            texts: n documents.
            truncate: Cut a document that is too long; False: refuse it.

        Raises:
            TooLong: A document is over ``max_document_tokens`` and may not be cut.
        """
        return self.documents_of_ids(self._ids([self.spec.template.document_prefix + t for t in texts]), truncate)

    def documents_of_ids(self, documents: Seq[list[int]], truncate: bool = True) -> list[Sequence]:
        """Return the sequences of documents whose tokens, the template's prefix among them, are given as ids."""
        limit = self.spec.max_document_tokens
        room = limit - len(self._start) - len(self._end)
        out = []
        for i, ids in enumerate(documents):
            if len(ids) > room and not truncate:
                raise TooLong(
                    f"document {i} has {len(ids)} tokens, {room} fit (max_document_tokens {limit}); shorten it"
                )
            whole = self._start + ids[:room] + self._end
            out.append(Sequence(whole, {"document": self._span(0, len(whole))}))
        return out

    def query(
        self, text: str, signature: Signature = None, node: bool = False, truncate: bool = False
    ) -> list[Sequence]:
        """Return the sequences of one query; see :meth:`queries`."""
        return self.queries([text], [signature], node=node, truncate=truncate)[0]

    def queries(
        self,
        texts: Seq[str],
        signatures: Seq[Signature] | None = None,
        node: bool = False,
        truncate: bool = False,
    ) -> list[list[Sequence]]:
        """Return, for each query, the one or two sequences that give its views.

        Causal base: one sequence ``[prefix query d_q lead summaries (node) chunk]``; ``query`` is read at d_q, which
        cannot see the summaries. Bidirectional base with a signature: the query alone, and the query with its
        summaries. Without a signature only ``query`` (and ``node``, where asked and known) is read.

        Args:
            texts: n queries.
            signatures: n signatures: a list of summaries, one string, or None / [] for none.
            node: Also read the ``node`` view.
            truncate: Cut a query that is too long instead of refusing it.

        Raises:
            MiaError: An empty query, a query over ``max_query_tokens``, or no room left for the summaries.
        """
        signatures = [None] * len(texts) if signatures is None else signatures
        if len(signatures) != len(texts):
            raise MiaError(f"{len(texts)} queries but {len(signatures)} signatures; give one (or None) a query")
        for i, text in enumerate(texts):
            if not text.strip():
                raise MiaError(f"query {i} is empty; drop it or give it a text")
        query_ids = self._ids([self.spec.template.query_prefix + t for t in texts])
        return [
            self._query(i, ids, _summaries(signature), node, truncate)
            for i, (ids, signature) in enumerate(zip(query_ids, signatures, strict=True))
        ]

    def _query(self, row: int, ids: list[int], summaries: list[str], node: bool, truncate: bool) -> list[Sequence]:
        limit = self.spec.max_query_tokens
        room = limit - len(self._start) - len(self._end)
        if len(ids) > room:
            if not truncate:
                raise TooLong(
                    f"query {row} has {len(ids)} tokens, {room} fit (max_query_tokens {limit}); "
                    "shorten it, raise the limit, or pass truncate=True"
                )
            ids = ids[:room]
        alone = self._start + ids + self._end
        query_end = len(self._start) + len(ids) + 1 if self._end else len(alone)
        causal = self.spec.pooling == "last"
        query_span = (query_end - 1, query_end) if causal else self._span(0, len(alone))
        node_ids = [self._node] if node and self._node is not None else []
        tail = ([] if self._node is None else [self._node]) + self._end
        head = self._start + ids + self._end[:1]
        left = limit - len(head) - len(self._lead) - len(tail)
        # A query that had to be cut, or nearly, takes all there is: summaries go before any of it does.
        if not summaries or (truncate and left < self._least_room(len(summaries))):
            spans = {"query": query_span}
            if node_ids and len(alone) < limit:
                alone = alone + node_ids
                spans["node"] = (len(alone) - 1, len(alone))
            return [Sequence(alone, spans)]
        body = self._signature(row, summaries, left)
        whole = head + self._lead + body + tail
        n = len(whole)
        if causal:
            spans = {"query": query_span, "chunk": (n - 1, n)}
            if self._node is not None:
                spans["node"] = (n - 1 - len(self._end), n - len(self._end))
            return [Sequence(whole, spans)]
        chunk = self._span(0, len(head) if self.spec.signature_pooling == "query" else n)
        return [Sequence(alone, {"query": query_span}), Sequence(whole, {"chunk": chunk})]

    def _signature(self, row: int, summaries: list[str], room: int) -> list[int]:
        """Return the ids of the summaries with separators, cut evenly to ``room`` tokens."""
        template = self.spec.template
        last = len(summaries) - 1
        texts = [
            (template.summary_lead if i == 0 else "") + s + (template.summary_separator if i < last else "")
            for i, s in enumerate(summaries)
        ]
        parts = self._ids(texts)
        if room < self._least_room(len(parts)):
            raise MiaError(
                f"query {row}: no room for its {len(parts)} summaries in max_query_tokens "
                f"{self.spec.max_query_tokens}; shorten the query, give fewer summaries or raise the limit"
            )
        room -= len(self._separator_token) * last
        shares = cut_evenly([len(p) for p in parts], room)
        if sum(shares) < sum(map(len, parts)) and not self._warned:
            self._warned = True
            logger.warning(
                "a signature of %d tokens was cut evenly to the %d that max_query_tokens leaves it (said once)",
                sum(map(len, parts)),
                room,
            )
        out: list[int] = []
        for i, (part, share) in enumerate(zip(parts, shares, strict=True)):
            if share < len(part) and i < last:
                part = part[: share - len(self._separator)] + self._separator
            out += part[:share] + (self._separator_token if i < last else [])
        return out

    def _least_room(self, summaries: int) -> int:
        """Return the fewest tokens that summaries and what stands between them take."""
        return summaries * (1 + len(self._separator)) + (summaries - 1) * len(self._separator_token)

    def _span(self, start: int, end: int) -> tuple[int, int]:
        """Return the span of a view over tokens [start, end) under the encoder's pooling."""
        return {"mean": (start, end), "cls": (start, start + 1), "last": (end - 1, end)}[self.spec.pooling]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        try:
            return [e.ids for e in self._plain.encode_batch(texts, add_special_tokens=False)]
        except TypeError as error:
            for text in texts:
                check_unicode(text)
            raise error


def cut_evenly(lengths: list[int], room: int) -> list[int]:
    """Share ``room`` tokens: short parts stay whole, the longer ones get equal shares of what is left.

    Earlier parts get the odd token. The shares sum to ``min(room, sum(lengths))``.
    """
    shares = [0] * len(lengths)
    left, waiting = room, sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    while waiting:
        i = waiting.pop(0)
        shares[i] = min(lengths[i], left // (len(waiting) + 1))
        left -= shares[i]
    return shares


def _summaries(signature: Signature) -> list[str]:
    """Return the summaries of a signature: repeats and blanks dropped, order kept."""
    if signature is None:
        return []
    texts = [signature] if isinstance(signature, str) else list(signature)
    for text in texts:
        if not isinstance(text, str):
            raise MiaError(f"a signature holds {text!r} ({type(text).__name__}); give summaries as strings")
    return list(dict.fromkeys(t for t in texts if t.strip()))


def check_unicode(text: str) -> None:
    """Refuse lone surrogates, which undecodable bytes (of a command line, of broken JSON) become in Python."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MiaError(
            f"text {text[:40]!a} holds a lone surrogate at character {error.start}, which is not Unicode; "
            "decode its source as UTF-8 (errors='replace' keeps the rest)"
        ) from error


def _token_id(tokenizer: Any, token: str, spec: EncoderSpec) -> int:
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise MiaError(f"{spec.base}: the template's special token {token!r} is not in the tokenizer's vocabulary")
    return int(found)


def without_control_tokens(backend: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer to which every control token is ordinary text.

    ``<|repo_name|>`` and others are added tokens that are not marked special, so ``encode_special_tokens`` alone
    would still let a user write them; and a unigram model holds ``<s>`` among its pieces.
    """
    raw = json.loads(backend.to_str())
    control = [t["content"] for t in raw["added_tokens"]]
    raw["added_tokens"], raw["truncation"], raw["padding"], raw["post_processor"] = [], None, None, None
    if raw["model"].get("type") == "Unigram":
        names = set(control)
        hidden = "\ue000"  # a private-use character: the piece keeps its id and can no longer be spelt
        raw["model"]["vocab"] = [[hidden + p if p in names else p, s] for p, s in raw["model"]["vocab"]]
    return Tokenizer.from_str(json.dumps(raw))
