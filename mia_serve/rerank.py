"""Cross-encoders: models that read query and document together, and put a short list in a better order."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from mia_serve.core.device import resolve_device, resolve_dtype
from mia_serve.core.encoder import TOKENS_PER_BATCH, WINDOW, batches_by_tokens
from mia_serve.core.errors import MiaError
from mia_serve.core.load import is_causal, positions
from mia_serve.core.names import resolve_folder
from mia_serve.core.tokenise import check_unicode, without_control_tokens

logger = logging.getLogger(__name__)

_FEWEST = 8  # tokens of a pair: its special tokens and a word or two on either side


class _Row(NamedTuple):
    """One pair as the model reads it: ids, and the segment that each belongs to."""

    pair: int
    ids: list[int]
    types: list[int]


class Reranker:
    """Pairs of query and document in, one relevance score a pair out.

    A score is the model's logit in float32, without the sigmoid that sentence-transformers puts on it by default; that
    of a pair does not depend on the other pairs of the call (to 1e-5, with float32 weights). It equals
    ``CrossEncoder(folder, max_length=max_length).predict(pairs, activation_fn=torch.nn.Identity())``, but for special
    tokens in a text, which are plain text here.

    Args:
        model: A transformers model for sequence classification with one label.
        tokenizer: Its transformers tokenizer.
        device: Where to run.
        max_length: Most tokens of a pair.
    """

    def __init__(self, model: torch.nn.Module, tokenizer: Any, device: torch.device, max_length: int = 256) -> None:
        self.model = model.to(device).eval()
        self.device = device
        self.max_length = max_length
        self.tokens_per_batch = TOKENS_PER_BATCH.get(device.type, 4096)
        self._plain = without_control_tokens(tokenizer.backend_tokenizer)
        self._frame = _Frame.of(tokenizer)
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        segments = getattr(model.config, "type_vocab_size", 0) or 0
        self._has_types = "token_type_ids" in tokenizer.model_input_names and segments > 1

    @classmethod
    def load(
        cls,
        name: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        max_length: int = 256,
    ) -> Reranker:
        """Open a cross-encoder.

        Args:
            name: A folder that transformers or sentence-transformers saved, a hub id, or ``package:module/path``.
            device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` …
            dtype: ``auto`` (bfloat16 on CUDA, float32 elsewhere), ``float32``, ``bfloat16`` or ``float16``.
            max_length: Most tokens of a pair; fewer where the model's positions do not reach so far.

        Raises:
            MiaError: The folder is no cross-encoder with one label, or some of its weights are not there: transformers
                would put random ones in their place, and a plain encoder would rank at random.
            FileNotFoundError: There is no such folder, package or reachable hub id.
        """
        folder = resolve_folder(str(name))
        config = _checked_config(folder, str(name))
        if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < _FEWEST:
            raise MiaError(f"max_length is {max_length!r}; allowed: integers from {_FEWEST}")
        place = resolve_device(device)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=resolve_dtype(dtype, place), output_loading_info=True
            )
        except (ValueError, RuntimeError, OSError, SafetensorError) as error:
            raise MiaError(f"{name}: its model cannot be read ({error}); get or save the folder again") from error
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise MiaError(f"{name}: a tokenizer.json (fast tokenizer) is needed; convert the tokenizer first")
        missing = sorted(loading["missing_keys"])
        if missing:
            raise MiaError(
                f"{name}: its weights lack {missing[0]!r} ({len(missing)} in all); get or save the folder again"
            )
        return cls(model, tokenizer, place, min(max_length, positions(config)))

    @torch.inference_mode()
    def scores(self, pairs: Seq[tuple[str, str]]) -> np.ndarray:
        """Score pairs of query and document.

        Pairs are sorted by length and batched by a budget of tokens. Where a pair is too long its document is cut; the
        query only where it takes more than half of the room, down to that half or to what the document leaves. An empty
        text is read as such: the pair then has the score of the other text alone.

        Args:
            pairs: n tuples (query, document).

        Returns:
            (n,) float32, in the order of the pairs; more is better.

        Raises:
            MiaError: A pair is not two strings.
            RuntimeError: A score is not a finite number, or a pair does not fit into device memory even alone.
        """
        _check_pairs(pairs)
        self.model.eval()
        out = np.full(len(pairs), np.nan, np.float32)
        for start in range(0, len(pairs), WINDOW):
            rows = self._rows(pairs[start : start + WINDOW], start)
            rows.sort(key=lambda row: -len(row.ids))
            for batch in batches_by_tokens([len(row.ids) for row in rows], self.tokens_per_batch):
                self._score_rows([rows[i] for i in batch], out)
        if not np.isfinite(out).all():
            raise RuntimeError(
                f"the cross-encoder gave no finite score for pair {int(np.argmin(np.isfinite(out)))}: its weights are "
                "broken, or too large for their number format; try dtype 'float32' or another checkpoint"
            )
        return out

    def _rows(self, pairs: Seq[tuple[str, str]], start: int) -> list[_Row]:
        # A query comes with many documents, and a document with many queries.
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        for text in texts:
            check_unicode(text)
        encoded = self._plain.encode_batch(texts, add_special_tokens=False)
        ids = {text: found.ids for text, found in zip(texts, encoded, strict=True)}
        room = self.max_length - self._frame.size
        rows = []
        for i, (query, document) in enumerate(pairs, start):
            first, second = ids[query], ids[document]
            # "longest_first" of transformers: the odd token of two halves is the longer text's.
            half = room // 2 if len(first) <= len(second) else room - room // 2
            first = first[: max(room - len(second), half)]
            rows.append(_Row(i, *self._frame.pair(first, second[: room - len(first)])))
        return rows

    def _score_rows(self, rows: list[_Row], out: np.ndarray) -> None:
        """Score a batch; on device out-of-memory go on with halves, down to single rows."""
        try:
            inputs = {
                "input_ids": _padded([row.ids for row in rows], self._pad_id).to(self.device),
                "attention_mask": _padded([[1] * len(row.ids) for row in rows], 0).to(self.device),
            }
            if self._has_types:
                inputs["token_type_ids"] = _padded([row.types for row in rows], 0).to(self.device)
            scores = self.model(**inputs).logits[:, 0].float().cpu().numpy()
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise RuntimeError(
                    f"out of device memory for pair {rows[0].pair} alone; lower max_length or use another device"
                ) from None
            torch.cuda.empty_cache()
            self.tokens_per_batch = max(1, self.tokens_per_batch // 2)
            logger.warning("out of device memory: token budget halved to %d", self.tokens_per_batch)
            middle = len(rows) // 2
            self._score_rows(rows[:middle], out)
            self._score_rows(rows[middle:], out)
            return
        out[[row.pair for row in rows]] = scores


def rerank(order: np.ndarray, rescored: np.ndarray) -> np.ndarray:
    """Re-order the head of rankings by new scores; what was not rescored stays behind it in its order.

    The new scores may be a cross-encoder's alone, or what ``mia_serve.fusion.mix`` makes of them and the scores of the
    first stage. On chat memory the former loses and the latter gains (README).

    Args:
        order: (n, S) or (S,) candidates, best first, as ``mia_serve.fusion.rank`` gives them.
        rescored: (n, k) or (k,) new scores of the first k candidates of each row, in that order, k at most S; -inf for
            one that has none. Equal scores keep the order they had.

    Returns:
        Candidates, best first, of the shape of ``order``.

    Raises:
        MiaError: Shapes do not fit, or a score is NaN.
    """
    order, rescored = np.asarray(order), np.asarray(rescored)
    if order.shape[:-1] != rescored.shape[:-1] or order.ndim not in (1, 2) or rescored.shape[-1] > order.shape[-1]:
        raise MiaError(
            f"order has shape {order.shape} and rescored {rescored.shape}; give (n, S) and (n, k), k at most S"
        )
    if np.isnan(rescored).any():
        raise MiaError("rescored holds NaN; give a number, or -inf where a candidate has no score")
    k = rescored.shape[-1]
    head = np.take_along_axis(order[..., :k], np.argsort(-rescored, axis=-1, kind="stable"), axis=-1)
    return np.concatenate([head, order[..., k:]], axis=-1)


class _Frame(NamedTuple):
    """The special tokens that a tokenizer puts before, between and after the texts of a pair, with segments."""

    before: list[int]
    between: list[int]
    after: list[int]
    types: tuple[list[int], int, list[int], int, list[int]]  # of before, query, between, document, after

    @classmethod
    def of(cls, tokenizer: Any) -> _Frame:
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()  # MiniLM's file, for one, cuts and pads at 128 tokens
        backend.no_padding()
        sample = backend.encode("a", "a")
        sides = sample.sequence_ids
        texts = [side for side in sides if side is not None]
        if set(texts) != {0, 1} or texts != sorted(texts):
            raise MiaError(f"{tokenizer.name_or_path}: the tokenizer does not put a query before a document")
        first, last = sides.index(0), len(sides) - 1 - sides[::-1].index(0)
        second, end = sides.index(1), len(sides) - sides[::-1].index(1)
        ids, types = sample.ids, sample.type_ids
        return cls(
            ids[:first],
            ids[last + 1 : second],
            ids[end:],
            (types[:first], types[first], types[last + 1 : second], types[second], types[end:]),
        )

    @property
    def size(self) -> int:
        """Special tokens of a pair."""
        return len(self.before) + len(self.between) + len(self.after)

    def pair(self, query: list[int], document: list[int]) -> tuple[list[int], list[int]]:
        """Return ids and segments of a pair."""
        before, first, between, second, after = self.types
        types = before + [first] * len(query) + between + [second] * len(document) + after
        return self.before + query + self.between + document + self.after, types


def _checked_config(folder: Path, name: str) -> Any:
    """Return the config of a cross-encoder's folder, and refuse one whose scores would mean nothing."""
    if not (folder / "config.json").is_file():
        raise MiaError(f"{name}: no config.json; give the folder of a cross-encoder (sequence classification)")
    try:
        config = AutoConfig.from_pretrained(folder)
        modules = _json(folder / "modules.json", [])
        settings = _json(folder / "config_sentence_transformers.json", {})
    except (ValueError, OSError) as error:
        raise MiaError(f"{name}: its config cannot be read ({error}); get or save the folder again") from error
    kind = next(iter(config.architectures or ()), "none")
    if not kind.endswith("ForSequenceClassification") or config.num_labels != 1:
        labels = f" with {config.num_labels} labels" if kind.endswith("ForSequenceClassification") else ""
        raise MiaError(
            f"{name} is a {kind}{labels}; allowed: a model for sequence classification with one label, such as "
            "scripts/train_reranker.py makes (a plain encoder would get a random head)"
        )
    if is_causal(config.model_type):
        raise MiaError(
            f"{name} is a decoder ({config.model_type}), which reads a prompt of its own; allowed: BERT-like"
        )
    if len(modules) > 1 or settings.get("default_prompt_name"):
        what = "a prompt" if len(modules) <= 1 else f"the module {modules[1].get('type')!r}"
        raise MiaError(f"{name}: its sentence-transformers files ask for {what}; allowed: one Transformer, no prompt")
    return config


def _json(file: Path, default: Any) -> Any:
    return json.loads(file.read_text("utf-8")) if file.is_file() else copy.copy(default)


def _check_pairs(pairs: Seq[tuple[str, str]]) -> None:
    for i, pair in enumerate(pairs):
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise MiaError(f"pair {i} is {pair!r}; give (query, document), two strings")


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value)
