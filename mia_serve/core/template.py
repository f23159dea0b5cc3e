"""The texts and special tokens that stand around a query, its signature and a document.

The layout is the papers' ``[instruction; query; d_q; summary; node token; chunk token]`` (paper B, eq. 5 and fig. 16);
a bidirectional encoder uses the same parts with its own special tokens.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from mia_serve.core.errors import MiaError

MIA_INSTRUCTION = (
    "Given a search query with the book's summary, retrieve relevant chunks or helpful entity summaries "
    "from the given context that answer the query."
)


@dataclass(frozen=True)
class Template:
    """Name every text and token that is added to what the user gives.

    Attributes:
        query_prefix: Text before the query (instruction included); tokenised together with it.
        document_prefix: Text before a document.
        signature_lead: Text between the end-of-query token and the first summary.
        summary_lead: Text glued to the first summary (a blank, where the tokenizer marks word starts).
        summary_separator: Text after each summary but the last.
        separator_token: Special token after each summary but the last, where white space does not survive.
        start: Special tokens at the very beginning (``[CLS]``).
        end: Special tokens at the very end (``[SEP]``, ``<|endoftext|>``); the first also ends the query.
        node_token: Special token whose state is the node view; None where the model has none.
    """

    query_prefix: str = ""
    document_prefix: str = ""
    signature_lead: str = ""
    summary_lead: str = ""
    summary_separator: str = ""
    separator_token: str | None = None
    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    node_token: str | None = None

    @property
    def hash(self) -> str:
        """Return 16 hex digits over all parts."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "template") -> Template:
        """Build a template from parsed JSON; lists become tuples, unknown parts are an error."""
        unknown = set(raw) - {f.name for f in fields(cls)}
        if unknown:
            raise MiaError(f"{source}: unknown template part {sorted(unknown)[0]!r}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        return cls(**values)


def instruction_prefix(instruction: str) -> str:
    """Return the query prefix that Qwen3-Embedding and MiA-Emb were trained with, for one instruction."""
    return f"Instruct: {instruction}\nQuery: "


def causal_template(end: str, node_token: str | None, query_prefix: str = "", document_prefix: str = "") -> Template:
    """Return the layout of MiA-Emb for a causal base (paper B, fig. 16)."""
    return Template(
        query_prefix=query_prefix,
        document_prefix=document_prefix,
        signature_lead="\nHere is the summary providing possibly useful global information. "
        "Please encode the query based on the summary:\nSummary:",
        summary_lead=" ",
        summary_separator="\n",
        end=(end,),
        node_token=node_token,
    )


def bidirectional_template(
    start: tuple[str, ...], end: tuple[str, ...], query_prefix: str = "", document_prefix: str = ""
) -> Template:
    """Return the layout for BERT-like bases: ``[CLS] query [SEP] summary [SEP] summary [SEP]``."""
    return Template(
        query_prefix=query_prefix,
        document_prefix=document_prefix,
        separator_token=end[0] if end else None,
        start=start,
        end=end,
    )
