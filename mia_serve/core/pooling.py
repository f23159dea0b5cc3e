"""Padding token sequences, and reading vectors out of hidden states.

Every pooling is the mean of the states of a token span: CLS is the first token, last-token pooling the terminal
one, d_q and the node token one each, mean pooling all of them. Positions are counted from a row's first real token
and moved by what the attention mask says, so they hold for either padding side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mia_serve.core.errors import MiaError


class Sequence(NamedTuple):
    """Token ids of one forward row, and where its views are read.

    Attributes:
        ids: Token ids, special tokens included.
        spans: View name -> ``(start, end)``; the view is the mean of the hidden states of these tokens.
    """

    ids: list[int]
    spans: dict[str, tuple[int, int]]


class SequenceBatch(NamedTuple):
    """A padded batch of B rows with R readouts, in order of the rows and then of each row's spans."""

    input_ids: Tensor  # (B, L) int64
    attention_mask: Tensor  # (B, L) int64
    rows: Tensor  # (R,) int64, which row a readout belongs to
    starts: Tensor  # (R,) int64, in tokens of the unpadded row
    ends: Tensor  # (R,) int64
    views: list[str]  # (R,) view names

    def to(self, device: torch.device) -> SequenceBatch:
        """Return the batch with its tensors on ``device``."""
        return SequenceBatch(
            self.input_ids.to(device, non_blocking=True),
            self.attention_mask.to(device, non_blocking=True),
            self.rows.to(device, non_blocking=True),
            self.starts.to(device, non_blocking=True),
            self.ends.to(device, non_blocking=True),
            self.views,
        )


def pad_sequences(sequences: list[Sequence], pad_id: int, side: str = "right") -> SequenceBatch:
    """Pad rows to the longest.

    The mask is made from the lengths, never from the ids: a token that equals the padding token (d_q of the Qwen
    template) stays visible. Left padding is right for rotary position embeddings only.

    Args:
        sequences: B rows.
        pad_id: Id written into the padding.
        side: ``right`` or ``left``.
    """
    if side not in ("left", "right"):
        raise MiaError(f"padding side is {side!r}; allowed: left, right")
    length = max(len(s.ids) for s in sequences)
    input_ids = torch.full((len(sequences), length), pad_id, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    rows: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    views: list[str] = []
    for i, sequence in enumerate(sequences):
        n = len(sequence.ids)
        where = slice(0, n) if side == "right" else slice(length - n, length)
        input_ids[i, where] = torch.tensor(sequence.ids, dtype=torch.long)
        mask[i, where] = 1
        for view, (start, end) in sequence.spans.items():
            rows.append(i)
            starts.append(start)
            ends.append(end)
            views.append(view)
    return SequenceBatch(input_ids, mask, torch.tensor(rows), torch.tensor(starts), torch.tensor(ends), views)


def pool_spans(hidden: Tensor, mask: Tensor, rows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Average hidden states over spans, in float32.

    Args:
        hidden: (B, L, d) hidden states of any float type.
        mask: (B, L), 1 for real tokens, which are contiguous.
        rows: (R,) row of each readout.
        starts: (R,) first token of each span, counted from the row's first real token.
        ends: (R,) one past the last token.

    Returns:
        (R, d) float32 vectors, not normalised.
    """
    if torch.is_autocast_enabled(hidden.device.type):  # which would do the sums below in half precision
        with torch.autocast(hidden.device.type, enabled=False):
            return pool_spans(hidden, mask, rows, starts, ends)
    first = mask.argmax(dim=1)[rows]
    starts, ends = starts + first, ends + first
    if bool((ends - starts == 1).all()):  # CLS, last token, d_q, node: no need for a sum over L
        return hidden[rows, starts].float()
    column = torch.arange(hidden.shape[1], device=hidden.device)
    weights = ((column >= starts[:, None]) & (column < ends[:, None])).float()
    weights = weights / weights.sum(dim=1, keepdim=True)
    if rows.numel() == hidden.shape[0] and torch.equal(rows, torch.arange(rows.numel(), device=rows.device)):
        return torch.bmm(weights[:, None], hidden.float())[:, 0]
    return torch.einsum("rl,rld->rd", weights, hidden.float()[rows])
