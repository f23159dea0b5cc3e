"""What an encoder is: everything, beside the weights, that changes a vector."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from mia_serve.core.errors import MiaError
from mia_serve.core.template import Template

SPEC_FILE = "mia_encoder.json"
Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True)
class EncoderSpec:
    """Describe an encoder completely; written as ``mia_encoder.json`` into every checkpoint.

    Attributes:
        base: The name or folder that the weights were first taken from.
        revision: Revision of a hub base, or None.
        pooling: ``mean`` over tokens, ``cls`` (first token) or ``last`` (causal bases: the terminal token).
        template: The texts and special tokens around queries, signatures and documents.
        max_query_tokens: Limit of a query with its signature, special tokens included.
        max_document_tokens: Limit of a document, special tokens included; longer ones are cut.
        alpha: Weight of the signature-aware view in the fused query (1 - alpha for the query-only view).
        signature_pooling: Mean pooling only: whether the signature-aware view averages ``all`` tokens or only
            those of the ``query``, to which the summaries then speak through attention.
        similarity: Always ``cosine``: rows are unit vectors.
        dim: Width of the model's vectors.
        matryoshka: Narrower widths that the vectors were trained to be cut to, descending; empty: none are known.
        truncate_dim: Cut vectors to so many values (and make them unit vectors again); None: all of them.
    """

    base: str
    pooling: Pooling
    template: Template
    dim: int
    max_query_tokens: int
    max_document_tokens: int
    revision: str | None = None
    alpha: float = 0.5
    signature_pooling: Literal["all", "query"] = "all"
    similarity: Literal["cosine"] = "cosine"
    matryoshka: tuple[int, ...] = ()
    truncate_dim: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("pooling", ("mean", "cls", "last")),
            ("signature_pooling", ("all", "query")),
            ("similarity", ("cosine",)),
        ):
            if getattr(self, name) not in allowed:
                raise MiaError(f"encoder spec: {name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0.0 <= self.alpha <= 1.0:
            raise MiaError(f"encoder spec: alpha is {self.alpha!r}; allowed: 0 to 1")
        special = len(self.template.start) + len(self.template.end)
        for name, least in (("dim", 1), ("max_query_tokens", special + 1), ("max_document_tokens", special + 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise MiaError(f"encoder spec: {name} is {value!r}; allowed: integers from {least}")
        cut, known = self.truncate_dim, (self.dim, *self.matryoshka)
        whole = isinstance(cut, int) and not isinstance(cut, bool)
        if cut is not None and (not whole or not 1 <= cut <= self.dim or (self.matryoshka and cut not in known)):
            widths = ", ".join(map(str, known)) if self.matryoshka else f"integers from 1 to {self.dim}"
            raise MiaError(f"encoder spec: truncate_dim is {cut!r}; allowed: {widths}, or None")

    @property
    def hash(self) -> str:
        """Return 16 hex digits over all fields but the place the weights came from."""
        facts = {k: v for k, v in asdict(self).items() if k not in ("base", "revision")}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def with_changes(self, **changes: Any) -> EncoderSpec:
        """Return a copy with the given fields replaced."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """Return the spec as JSON text, template hash included for a reader's eye."""
        return json.dumps({**asdict(self), "template_hash": self.template.hash}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = SPEC_FILE) -> EncoderSpec:
        """Read a spec back.

        Raises:
            MiaError: A field is missing or unknown, or the template does not match its recorded hash.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise MiaError(f"{source} is not valid JSON ({error}); save the encoder again") from error
        if not isinstance(raw, dict) or not isinstance(raw.get("template", {}), dict):
            raise MiaError(f"{source} and its template must each hold a JSON object; save the encoder again")
        recorded = raw.pop("template_hash", None)
        known = {f.name for f in fields(cls)}
        unknown = set(raw) - known
        if unknown:
            raise MiaError(f"{source}: unknown field {sorted(unknown)[0]!r}; written by a newer version of MiA?")
        missing = {"base", "pooling", "template", "dim", "max_query_tokens", "max_document_tokens"} - set(raw)
        if missing:
            raise MiaError(f"{source}: field {sorted(missing)[0]!r} is missing; save the encoder again")
        template = Template.from_dict(raw.pop("template"), source)
        if recorded is not None and recorded != template.hash:
            raise MiaError(
                f"{source}: the template was edited by hand (hash {template.hash}, recorded {recorded}); "
                "vectors would change silently: save the encoder again with the new template"
            )
        widths = raw.get("matryoshka", [])
        if not isinstance(widths, list) or not all(type(width) is int and width >= 1 for width in widths):
            raise MiaError(f"{source}: matryoshka is {widths!r}; allowed: a list of widths; save the encoder again")
        raw["matryoshka"] = tuple(widths)
        return cls(template=template, **raw)
