"""The encoder: one path from texts to unit vectors, for indexing, search and training alike."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mia_serve.core.device import resolve_device, resolve_dtype
from mia_serve.core.errors import MiaError
from mia_serve.core.pooling import Sequence, SequenceBatch, pad_sequences, pool_spans
from mia_serve.core.scoring import fuse_views, normalise
from mia_serve.core.spec import EncoderSpec
from mia_serve.core.tokenise import Signature, TextTokeniser

logger = logging.getLogger(__name__)

# Texts are tokenised and sorted by length this many at a time: enough to fill batches, little to keep in memory.
WINDOW = 8192
TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 131072}
_CHECKSUM_BLOCK = 1 << 20  # numbers of a parameter summed at once


class QueryViews(NamedTuple):
    """Views of n queries, each (n, d) float32 unit rows; without a signature ``chunk`` equals ``query``."""

    query: np.ndarray
    chunk: np.ndarray
    node: np.ndarray


class EncodeFailed(RuntimeError):
    """Some rows did not fit into device memory even alone; all the others are in ``vectors``.

    Attributes:
        rows: Indices of the texts that failed; their vectors are NaN.
        vectors: View name -> (n, d) float32 array.
    """

    def __init__(self, rows: list[int], vectors: dict[str, np.ndarray]) -> None:
        super().__init__(f"out of device memory for {len(rows)} text(s), first at row {rows[0]}; shorten them")
        self.rows, self.vectors = rows, vectors


def embed_batch(model: torch.nn.Module, batch: SequenceBatch, dim: int | None = None) -> Tensor:
    """Run one forward and return the (R, d) float32 unit vectors of the batch's readouts; differentiable.

    Args:
        model: The backbone.
        batch: B padded rows with R readouts.
        dim: Keep the first so many values, before normalising; None: all.
    """
    hidden = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return normalise(pool_spans(hidden, batch.attention_mask, batch.rows, batch.starts, batch.ends)[:, :dim])


class Encoder:
    """Texts in, unit vectors out.

    Attributes:
        pads: Whether sequences that run together are padded to the longest of them, which costs time.

    Args:
        model: A transformers backbone whose output has ``last_hidden_state`` (adapters included).
        tokenizer: Its transformers tokenizer.
        spec: Everything else that changes a vector.
        device: Where to run.
    """

    pads = True

    def __init__(self, model: torch.nn.Module, tokenizer: Any, spec: EncoderSpec, device: torch.device) -> None:
        self.model = model.to(device).eval()
        self.tokenizer = tokenizer
        self.spec = spec
        self.device = device
        self.text = TextTokeniser(tokenizer, spec)
        self.tokens_per_batch = TOKENS_PER_BATCH.get(device.type, 4096)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        **spec: Any,
    ) -> Encoder:
        """Open an encoder by what its folder says of itself.

        Args:
            name_or_path: A folder (sentence-transformers, plain transformers, adapter-only or one of ours), a hub id,
                or ``package:module/path`` for a folder inside an installed Python package.
            device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` …
            dtype: ``auto`` (bfloat16 on CUDA, float32 elsewhere), ``float32``, ``bfloat16`` or ``float16``.
            **spec: Fields of :class:`EncoderSpec` to use instead of what the folder says.

        Raises:
            MiaError: The folder is not a model that MiA can encode with.
            FileNotFoundError: There is no such folder, package or reachable hub id.
        """
        from mia_serve.core.load import load_parts

        place = resolve_device(device)
        model, tokenizer, found = load_parts(str(name_or_path), resolve_dtype(dtype, place), spec)
        return cls(model, tokenizer, found, place)

    def save(self, path: str | Path) -> None:
        """Write a folder that :meth:`load` and ``SentenceTransformer`` open; adapters are saved alone."""
        from mia_serve.core.load import save_parts

        save_parts(self.model, self.tokenizer, self.spec, Path(path))

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.spec.truncate_dim or self.spec.dim

    @property
    def spec_hash(self) -> str:
        """Return 16 hex digits over the spec and a fingerprint of the weights as they are now.

        The fingerprint reads every weight, so that vectors of a model that differs in one are never taken for this
        one's; that costs about as much as a copy of the weights.
        """
        digest = hashlib.sha256(self.spec.hash.encode())
        with torch.no_grad():
            for name, parameter in sorted(self.model.named_parameters()):
                digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
                digest.update(_checksum(parameter))
        return digest.hexdigest()[:16]

    def tokenise_query(self, text: str, signature: Signature = None, node: bool = False) -> list[Sequence]:
        """Return the token sequences of one query; see :meth:`TextTokeniser.queries`."""
        return self.text.queries([text], [signature], node=node)[0]

    def tokenise_document(self, text: str) -> Sequence:
        """Return the token sequence of one document."""
        return self.text.document(text)

    def encode_queries(
        self,
        texts: Seq[str],
        signatures: Seq[Signature] | None = None,
        alpha: float | None = None,
        truncate: bool = False,
    ) -> np.ndarray:
        """Encode queries, each with its signature where it has one.

        Args:
            texts: n queries.
            signatures: n signatures (list of summaries, a string, None or []); None for none at all.
            alpha: Weight of the signature-aware view; the spec's where None.
            truncate: Cut queries that are too long instead of refusing them.

        Returns:
            (n, d) float32 unit rows ``(1 - alpha) * h_q + alpha * h_chunk``, normalised; a row without a signature is
            its query-only view.

        Raises:
            MiaError: Empty or too long query, lengths that do not match, alpha outside [0, 1].
        """
        alpha = self.checked_alpha(alpha)
        if alpha == 0.0:
            signatures = None
        _texts(texts, "queries")
        vectors = self._embed(self._query_windows(texts, signatures, False, truncate), len(texts), ("query", "chunk"))
        return fuse_rows(vectors["query"], vectors["chunk"], alpha)

    def checked_alpha(self, alpha: float | None) -> float:
        """Return the weight of the signature-aware view: the spec's where None."""
        alpha = self.spec.alpha if alpha is None else alpha
        if not 0.0 <= alpha <= 1.0:
            raise MiaError(f"alpha is {alpha}; allowed: 0 to 1")
        return alpha

    def encode_documents(self, texts: Seq[str], out: np.ndarray | None = None) -> np.ndarray:
        """Encode documents.

        Args:
            texts: n documents; longer ones than ``max_document_tokens`` are cut.
            out: (n, d) float32 array or memmap to write into.

        Returns:
            (n, d) float32 unit rows.
        """
        _texts(texts, "documents")
        windows = ([[s] for s in self.text.documents(texts[i : i + WINDOW])] for i in range(0, len(texts), WINDOW))
        return self._embed(windows, len(texts), ("document",), out)["document"]

    def encode_views(self, texts: Seq[str], signatures: Seq[Signature] | None = None) -> QueryViews:
        """Encode queries and return their views apart; see :class:`QueryViews`.

        Where the template knows no node token, ``node`` equals ``chunk``.
        """
        _texts(texts, "queries")
        views = ("query", "chunk", "node")
        vectors = self._embed(self._query_windows(texts, signatures, True, False), len(texts), views)
        for name, fallback in (("chunk", "query"), ("node", "chunk")):
            lacking = np.isnan(vectors[name]).any(axis=1)
            vectors[name][lacking] = vectors[fallback][lacking]
        return QueryViews(**vectors)

    def _query_windows(
        self, texts: Seq[str], signatures: Seq[Signature] | None, node: bool, truncate: bool
    ) -> Iterator[list[list[Sequence]]]:
        if signatures is not None and len(signatures) != len(texts):
            raise MiaError(f"{len(texts)} queries but {len(signatures)} signatures; give one (or None) a query")
        for i in range(0, len(texts), WINDOW):
            part = None if signatures is None else signatures[i : i + WINDOW]
            yield self.text.queries(texts[i : i + WINDOW], part, node=node, truncate=truncate)

    @torch.inference_mode()
    def embed_sequences(self, sequences: Seq[Sequence]) -> list[dict[str, np.ndarray] | None]:
        """Run the model over token sequences: the one way from ids to vectors, and the one to override.

        Args:
            sequences: What is to be read, in any order and of any lengths.

        Returns:
            One dict a sequence: view name -> (d,) float32 unit vector. None for a sequence that did not fit into device
            memory even alone.
        """
        self.model.eval()
        found: list[dict[str, np.ndarray] | None] = [None] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i].ids))
        for batch in batches_by_tokens([len(sequences[i].ids) for i in order], self.tokens_per_batch):
            self._embed_rows([order[i] for i in batch], sequences, found)
        return found

    def _embed(
        self, windows: Iterator[list[list[Sequence]]], n: int, views: tuple[str, ...], out: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Fill (n, d) arrays, one a view, from windows of token sequences; what has no readout stays NaN."""
        if out is not None and (out.shape != (n, self.dim) or out.dtype != np.float32):
            raise MiaError(f"out is {out.dtype} {out.shape}; it must be float32 {(n, self.dim)}")
        arrays = {v: np.full((n, self.dim), np.nan, np.float32) if out is None else out for v in views}
        failed: set[int] = set()
        base = 0
        for window in windows:
            rows = [base + i for i, sequences in enumerate(window) for _ in sequences]
            found = self.embed_sequences([s for sequences in window for s in sequences])
            failed |= fill_rows(rows, found, arrays)
            base += len(window)
        if failed:
            raise EncodeFailed(sorted(failed), arrays)
        return arrays

    def _embed_rows(
        self, places: list[int], sequences: Seq[Sequence], found: list[dict[str, np.ndarray] | None]
    ) -> None:
        """Embed a batch; on device out-of-memory go on with halves, down to single rows."""
        try:
            batch = pad_sequences([sequences[i] for i in places], self.pad_id)
            vectors = embed_batch(self.model, batch.to(self.device), self.spec.truncate_dim).cpu().numpy()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if len(places) == 1:
                return  # its length is to blame, no budget would help
            longest = max(len(sequences[i].ids) for i in places)
            # Half of what failed, and never less than one such row: many failures must not make all batches tiny.
            self.tokens_per_batch = min(self.tokens_per_batch, max(longest, longest * len(places) // 2))
            logger.warning("out of device memory: token budget is now %d", self.tokens_per_batch)
            middle = len(places) // 2
            self._embed_rows(places[:middle], sequences, found)
            self._embed_rows(places[middle:], sequences, found)
            return
        for place in places:
            found[place] = {}
        for row, view, vector in zip(batch.rows.tolist(), batch.views, vectors, strict=True):
            views = found[places[row]]
            assert views is not None
            views[view] = vector


def fill_rows(rows: Seq[int], found: Seq[dict[str, np.ndarray] | None], arrays: dict[str, np.ndarray]) -> set[int]:
    """Put what :meth:`Encoder.embed_sequences` found into arrays, one a view, and return the rows that failed.

    Raises:
        RuntimeError: A vector is not finite.
    """
    failed: set[int] = set()
    for row, views in zip(rows, found, strict=True):
        if views is None:
            failed.add(row)
            continue
        for view, vector in views.items():
            if not np.isfinite(vector).all():
                raise RuntimeError(
                    f"the encoder gave NaN for text {row}: its weights are broken, or too large for their number "
                    "format; try dtype 'float32' or an earlier checkpoint"
                )
            if view in arrays:
                arrays[view][row] = vector
    return failed


def fuse_rows(query: np.ndarray, chunk: np.ndarray, alpha: float) -> np.ndarray:
    """Fuse views where there is a signature's; rows whose ``chunk`` is NaN keep the query's view.

    Args:
        query: (n, d) float32 unit rows; changed in place.
        chunk: (n, d) float32 unit rows, NaN where a query had no signature.
        alpha: Weight of ``chunk``.
    """
    have = ~np.isnan(chunk).any(axis=1)
    if have.any():
        query[have] = fuse_views(torch.from_numpy(query[have]), torch.from_numpy(chunk[have]), alpha).numpy()
    return query


def batches_by_tokens(lengths: list[int], budget: int) -> Iterator[range]:
    """Cut rows, sorted by descending length, into batches of at most ``budget`` padded tokens.

    A row longer than the budget goes alone.
    """
    start = 0
    while start < len(lengths):
        size = max(1, budget // max(1, lengths[start]))
        yield range(start, min(start + size, len(lengths)))
        start += size


def _texts(texts: Seq[str], what: str) -> None:
    if isinstance(texts, str):
        raise MiaError(f"{what} is one string; give a list of strings")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise MiaError(f"{what}[{i}] is {type(text).__name__}; give strings")


def _checksum(parameter: torch.Tensor) -> bytes:
    """Sum the bits of a tensor, each number times an odd factor of its place, modulo 2⁶⁴: one changed number shows.

    Integers, so that every device gives the same.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = parameter.detach().flatten().view(kinds[parameter.element_size()])
    factors = torch.arange(1, 2 * min(len(bits), _CHECKSUM_BLOCK), 2, device=bits.device)
    sums = [(part.long() * factors[: len(part)]).sum() for part in bits.split(_CHECKSUM_BLOCK)]
    return torch.stack(sums).cpu().numpy().tobytes()
