"""The record of one signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mia_serve.core.errors import MiaError


@dataclass(frozen=True)
class Signature:
    """Session summaries that stand for what a query activated.

    Attributes:
        session_ids: Ids in order of selection, or all of the book with its global summary; empty where only texts were
            given.
        texts: Summaries in the order in which the encoder reads them: that of selection or of the document. One global
            summary stands for all sessions of its book.
        gains: Marginal gain of each pick, in order of selection; empty where nothing was maximised.
        terms: f_Q, f_C, f_D and the value of the set, or None.
        mode: How it was made: "coverage", "first_k", "global_summary", "update" (by the agent) or "given".
        pick_terms: Marginal f_Q, f_C, f_D of each pick, unweighted: they sum to those of the set, and with their
            weights to the gains. Empty where nothing was maximised, and in records older than this field.
    """

    session_ids: tuple[str, ...]
    texts: tuple[str, ...]
    gains: tuple[float, ...] = ()
    terms: dict[str, float] | None = None
    mode: str = "given"
    pick_terms: tuple[tuple[float, float, float], ...] = ()

    @property
    def text(self) -> str:
        """Summaries, one a line."""
        return "\n".join(self.texts)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "session_ids": list(self.session_ids),
            "texts": list(self.texts),
            "gains": list(self.gains),
            "terms": None if self.terms is None else dict(self.terms),
            "mode": self.mode,
            "pick_terms": [list(terms) for terms in self.pick_terms],
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Signature:
        """Rebuild a signature from to_dict's output; ``pick_terms`` may be missing.

        Raises:
            ValueError: If keys are missing or unknown, or a pick has other than three terms.
        """
        known = {"session_ids", "texts", "gains", "terms", "mode", "pick_terms"}
        if set(record) | {"pick_terms"} != known:
            raise MiaError(f"signature record has keys {sorted(record)}: expected {sorted(known)}")
        picks = [tuple(float(term) for term in terms) for terms in record.get("pick_terms", ())]
        if any(len(terms) != 3 for terms in picks):
            raise MiaError(f"signature record has pick_terms {picks}: expected three numbers a pick")
        return cls(
            session_ids=tuple(record["session_ids"]),
            texts=tuple(record["texts"]),
            gains=tuple(float(g) for g in record["gains"]),
            terms=record["terms"],
            mode=record["mode"],
            pick_terms=tuple((q, c, d) for q, c, d in picks),
        )

    @classmethod
    def from_texts(cls, texts: Sequence[str] | str | None) -> Signature:
        """Wrap texts that the caller chose; one string is one global summary, None or "" is an empty signature."""
        if isinstance(texts, str):
            texts = [texts] if texts.strip() else []
        if texts is not None and not isinstance(texts, Sequence):
            raise MiaError(f"{texts!r} is no signature: give a list of texts, one text or None")
        return cls(session_ids=(), texts=tuple(texts or ()))


Given = Sequence[Signature] | Sequence[Sequence[str] | str | None]


def given_signatures(signatures: Given, n_queries: int) -> list[Signature]:
    """Check signatures that the caller chose, one a query, and wrap those that are bare texts.

    Raises:
        MiaError: If they are not one a query, or one holds something else than texts.
    """
    if len(signatures) != n_queries:
        raise MiaError(f"{len(signatures)} signatures for {n_queries} queries: give one a query (None or [] for none)")
    records = []
    for position, item in enumerate(signatures):
        record = item if isinstance(item, Signature) else Signature.from_texts(item)
        if not all(isinstance(text, str) for text in record.texts):
            raise MiaError(f"signature {position} holds something that is not a text: give a Signature or list of str")
        records.append(record)
    return records
