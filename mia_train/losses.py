"""Contrastive losses over a query's candidates, with false negatives masked in the logits.

Everything here works on unit vectors and integer keys of documents; no model, no text. The scores, the softmax and
the loss are float32 whatever the model runs in.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mia_train import distributed

Negatives = Literal["own", "in_batch"]


class Candidates(NamedTuple):
    """The documents of B queries, C slots each; slot 0 is the sampled positive.

    The keys are 64-bit hashes (``mia_train.rows.id_key`` and ``text_key``). Empty slots keep the shape equal on every
    rank and are marked in ``valid``.
    """

    vectors: Tensor  # (B, C, d) unit rows
    ids: Tensor  # (B, C) int64 key of the document id
    texts: Tensor  # (B, C) int64 key of the normalised text
    valid: Tensor  # (B, C) bool


class PositiveKeys(NamedTuple):
    """Keys of *all* positives of B queries, sampled or not; 0 pads."""

    ids: Tensor  # (B, P) int64
    texts: Tensor  # (B, P) int64


class LossOutput(NamedTuple):
    """The loss and what to watch while it falls; the statistics carry no gradient.

    Attributes:
        loss: Scalar, mean over the rows.
        rows: (B,) loss of each row, detached.
        positive: Mean cosine of the positives.
        hardest: Mean cosine of each row's best negative that took part.
        masked: False negatives that were masked, summed over the rows.
        candidates: Candidates that took part, positives included, summed over the rows.
    """

    loss: Tensor
    rows: Tensor
    positive: Tensor
    hardest: Tensor
    masked: Tensor
    candidates: Tensor


class CandidatePool(NamedTuple):
    """What B queries are compared with: M candidates each, gathered once however many views of a query there are.

    With in-batch negatives all queries share M = world size * B * C candidates and the keys are (1, M); with own ones
    M = C, ``vectors`` is (B, C, d) and the keys are (B, C).
    """

    vectors: Tensor  # (M, d) or (B, C, d) float32
    ids: Tensor
    texts: Tensor
    valid: Tensor
    repeated: Tensor  # bool, repeats an earlier candidate
    target: Tensor  # (B,) int64, column of each query's positive

    def scores(self, queries: Tensor) -> Tensor:
        """Return the cosines (B, M) of B unit queries."""
        if self.vectors.dim() == 3:
            return torch.einsum("bd,bcd->bc", queries, self.vectors)
        return queries @ self.vectors.T


def gather_candidates(candidates: Candidates, negatives: Negatives) -> CandidatePool:
    """Lay out the candidates of B queries; in-batch ones are gathered from all processes, gradient included.

    Raises:
        ValueError: A query has fewer than two candidates, so that its loss would be 0 and nothing would be learnt.
    """
    if negatives not in ("own", "in_batch"):
        raise ValueError(f"negatives is {negatives!r}; allowed: own, in_batch")
    rows, slots = candidates.ids.shape
    columns = slots if negatives == "own" else rows * slots * distributed.world_size()
    if columns < 2:
        raise ValueError(
            f"InfoNCE needs at least 2 candidates per query, got {columns}; add negatives to the rows, or use "
            "in_batch negatives with a batch of 2 or more"
        )
    device, vectors = candidates.ids.device, candidates.vectors.float()
    if negatives == "own":
        keys = candidates.ids, candidates.texts, candidates.valid
        return CandidatePool(vectors, *keys, _repeated_own(*keys), torch.zeros(rows, dtype=torch.long, device=device))
    everyone = distributed.all_gather(vectors).flatten(0, 1)
    ids, texts, valid = (distributed.all_gather(x).flatten()[None] for x in candidates[1:])
    repeated = _repeated(ids[0], valid[0]) | _repeated(texts[0], valid[0])
    target = (torch.arange(rows, device=device) + rows * distributed.rank()) * slots
    return CandidatePool(everyone, ids, texts, valid, repeated, target)


def info_nce(
    queries: Tensor,
    candidates: Candidates | CandidatePool,
    positives: PositiveKeys,
    *,
    negatives: Negatives = "own",
    temperature: float = 0.01,
    mask_margin: float | None = None,
    row_weights: Tensor | None = None,
) -> LossOutput:
    """Compute InfoNCE, ``-log softmax(cos / temperature)`` of the positive (paper B, eq. 12-14).

    ``own`` compares a query with its own slots only (the papers' form). ``in_batch`` adds the slots of all other rows,
    across devices too; its gradient under DDP averaging does not depend on the number of processes.

    A candidate is no negative of a query, and leaves its softmax, if it has the id or the normalised text of any
    positive of the query, if it repeats an earlier candidate (a document counts once), or, with ``mask_margin``, if
    its score exceeds the positive's by more than the margin. The sampled positive itself is never masked.

    Args:
        queries: (B, d) unit rows.
        candidates: C slots a row, on every rank the same B and C; or what :func:`gather_candidates` made of them.
        positives: Keys of all positives of each row.
        negatives: ``own`` or ``in_batch``; for candidates that are not gathered yet.
        temperature: Divides the cosines.
        mask_margin: Allowed excess of a negative's cosine over the positive's, or None.
        row_weights: (B,) factor of each row in the mean, 0 for rows without this kind of positive.

    Raises:
        ValueError: A query has fewer than two candidates, so that its loss would be 0 and nothing would be learnt.
    """
    with torch.autocast(queries.device.type, enabled=False):
        pool = candidates if isinstance(candidates, CandidatePool) else gather_candidates(candidates, negatives)
        scores = pool.scores(queries.float())
        false = pool.repeated | _is_positive(pool.ids, positives.ids) | _is_positive(pool.texts, positives.texts)
        is_target = F.one_hot(pool.target, scores.shape[1]).bool()
        if mask_margin is not None:
            limit = scores.detach().gather(1, pool.target[:, None]) + mask_margin
            false = false | (scores.detach() > limit)
        false = false & pool.valid & ~is_target
        blocked = (false | ~pool.valid) & ~is_target
        logits = (scores / temperature).masked_fill(blocked, float("-inf"))
        losses = F.cross_entropy(logits, pool.target, reduction="none")
    weights = torch.ones_like(losses) if row_weights is None else row_weights.to(losses)
    with torch.no_grad():
        positive = scores.gather(1, pool.target[:, None])[:, 0]
        hardest = scores.masked_fill(blocked | is_target, float("-inf")).amax(dim=1)
        has_negative = torch.isfinite(hardest) & (weights > 0)
        mean_hardest = torch.where(has_negative, hardest, 0).sum() / has_negative.sum().clamp(min=1)
        mean_positive = (positive * weights).sum() / weights.sum().clamp(min=1e-9)
        counted = weights > 0
    return LossOutput(
        loss=(losses * weights).mean(),
        rows=losses.detach(),
        positive=mean_positive,
        hardest=mean_hardest,
        masked=false[counted].sum(),
        candidates=(~blocked)[counted].sum(),
    )


def distillation(
    scores: Tensor,
    teacher: Tensor,
    *,
    kind: Literal["kl", "margin_mse"] = "kl",
    temperature: float = 0.05,
    teacher_scale: float = 1.0,
) -> Tensor:
    """Compute how far a query's scores are from a teacher's, over the row's own candidates.

    ``kl``: KL(softmax(teacher / T) || softmax(scores / T)), without the factor T² that Hinton et al. (2015) put before
    it: at T = 0.05 it would only hide the weight. ``margin_mse``: mean over the negatives of the squared difference
    between the student's and the teacher's lead of the positive (Hofstätter et al., 2020).

    Args:
        scores: (B, C) cosines, slot 0 the positive.
        teacher: (B, C) scores on any scale, NaN where the teacher gave none; no gradient flows into it.
        kind: ``kl`` or ``margin_mse``.
        temperature: T of ``kl``.
        teacher_scale: Multiplies the teacher's scores first.

    Returns:
        Scalar: the mean over all B rows. A row whose positive and at least one negative are not scored counts as 0.
    """
    teacher = teacher.detach().float() * teacher_scale
    known = ~teacher.isnan()
    usable = known[:, 0] & (known.sum(dim=1) > 1)
    with torch.autocast(scores.device.type, enabled=False):
        scores = scores.float()
        if kind == "margin_mse":
            wrong = (scores[:, :1] - scores[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
            wrong = wrong.masked_fill(~(known[:, 1:] & known[:, :1]), 0.0)
            rows = wrong.square().sum(dim=1) / known[:, 1:].sum(dim=1).clamp(min=1)
        else:
            # Rows that are left out get finite logits, or their zero weight would meet a NaN gradient.
            known = known | ~usable[:, None]
            logits = (scores / temperature).masked_fill(~known, float("-inf"))
            wanted = (teacher.nan_to_num() / temperature).masked_fill(~known, float("-inf")).log_softmax(dim=1)
            gap = F.kl_div(
                logits.log_softmax(dim=1).masked_fill(~known, 0.0),
                wanted.masked_fill(~known, 0.0),
                reduction="none",
                log_target=True,
            )
            rows = gap.masked_fill(~known, 0.0).sum(dim=1)
        return rows.masked_fill(~usable, 0.0).mean()


def joint(chunk: LossOutput, node: LossOutput, beta: float) -> LossOutput:
    """Combine the chunk and the node loss of one query forward: ``beta * L_c + (1 - beta) * L_n`` (paper B, eq. 12).

    The similarities that are reported are the chunks'.
    """
    return chunk._replace(
        loss=beta * chunk.loss + (1.0 - beta) * node.loss,
        masked=chunk.masked + node.masked,
        candidates=chunk.candidates + node.candidates,
    )


def _is_positive(keys: Tensor, positives: Tensor) -> Tensor:
    """Return (B, M): whether a candidate's key is among the query's positives; keys are (B, M) or (1, M)."""
    found = torch.zeros(positives.shape[0], keys.shape[1], dtype=torch.bool, device=keys.device)
    for column in positives.T:  # P is small; (B, M, P) at once would not be
        found |= (keys == column[:, None]) & (column != 0)[:, None]
    return found


def _repeated(keys: Tensor, valid: Tensor) -> Tensor:
    """Return (M,): whether a valid candidate's key stands at an earlier valid place of the list, in O(M log M)."""
    _, group = torch.unique(torch.where(valid, keys, 0), return_inverse=True)
    place = torch.arange(len(keys), device=keys.device)
    first = torch.full_like(place, len(keys)).scatter_reduce(0, group, place, "amin")
    return (first[group] < place) & valid


def _repeated_own(ids: Tensor, texts: Tensor, valid: Tensor) -> Tensor:
    """Return (B, C): whether a slot repeats an earlier slot of its own row."""
    same = (ids[:, :, None] == ids[:, None, :]) | (texts[:, :, None] == texts[:, None, :])
    earlier = torch.ones(same.shape[1:], dtype=torch.bool, device=ids.device).tril(-1)
    return (same & earlier & valid[:, None, :] & valid[:, :, None]).any(dim=2)
