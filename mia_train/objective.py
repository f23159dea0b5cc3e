"""The training objective of a micro-batch: which views meet which candidates, under which losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mia_serve.core import fuse_views
from mia_serve.core.scoring import normalise
from mia_train.collate import SlotKeys, TrainBatch
from mia_train.losses import (
    Candidates,
    LossOutput,
    PositiveKeys,
    distillation,
    gather_candidates,
    info_nce,
    joint,
)
from mia_train.schema import LossConfig


class Objective(NamedTuple):
    """The loss of a micro-batch and what it is made of; only ``loss`` carries a gradient.

    Attributes:
        loss: Scalar that is minimised.
        contrast: InfoNCE of the fused query at full width, with the state of the negatives.
        distill: Distillation loss of the fused query at full width, before its weight; 0 without distillation.
        with_signature: InfoNCE of the fused query, summed over the rows that have a signature.
        without_signature: InfoNCE of the query-only view of the same rows, against the same candidates.
        signature_rows: Number of those rows.
    """

    loss: Tensor
    contrast: LossOutput
    distill: Tensor
    with_signature: Tensor
    without_signature: Tensor
    signature_rows: Tensor


def batch_loss(vectors: Tensor, batch: TrainBatch, config: LossConfig, alpha: float) -> Objective:
    """Compute the objective of a micro-batch from its readouts.

    The loss is that of the fused query, plus, by the recipe's weights, that of either view alone; each at full width
    and at every width of ``matryoshka``, summed (as sentence-transformers' MatryoshkaLoss does).

    Args:
        vectors: (R, d) unit vectors in the order of building.
        batch: The micro-batch.
        config: Kind of negatives, temperature, beta, margin, distillation, widths.
        alpha: Weight of the signature-aware view in the fused query.
    """
    whole = _at_width(vectors, batch, config, alpha)
    total = whole.loss
    for width in config.matryoshka:
        if width < vectors.shape[1]:
            total = total + _at_width(normalise(vectors[:, :width]), batch, config, alpha).loss
    return whole._replace(loss=total)


def _at_width(vectors: Tensor, batch: TrainBatch, config: LossConfig, alpha: float) -> Objective:
    chunk = _over_candidates(vectors, batch.query_readouts, batch.chunk_readouts, batch.documents, config, alpha)
    if config.beta is None or batch.nodes is None or batch.node_readouts is None:
        return chunk
    node = _over_candidates(
        vectors, batch.query_readouts, batch.node_readouts, batch.nodes, config, alpha, batch.node_weights
    )
    return chunk._replace(
        loss=config.beta * chunk.loss + (1.0 - config.beta) * node.loss,
        contrast=joint(chunk.contrast, node.contrast, config.beta),
    )


def _over_candidates(
    vectors: Tensor,
    query_readouts: Tensor,
    target_readouts: Tensor,
    keys: SlotKeys,
    config: LossConfig,
    alpha: float,
    weights: Tensor | None = None,
) -> Objective:
    """Compare every view of the queries with one kind of candidates."""
    query, target, documents = vectors[query_readouts], vectors[target_readouts], vectors[keys.readouts]
    with torch.autocast(vectors.device.type, enabled=False):
        pool = gather_candidates(Candidates(documents, keys.ids, keys.texts, keys.valid), config.negatives)

    def contrast(view: Tensor) -> LossOutput:
        return info_nce(
            view,
            pool,
            PositiveKeys(keys.positive_ids, keys.positive_texts),
            temperature=config.temperature,
            mask_margin=config.mask_margin,
            row_weights=weights,
        )

    def distil(view: Tensor) -> Tensor:
        if config.distill is None:
            return view.new_zeros(())
        d = config.distill
        with torch.autocast(view.device.type, enabled=False):
            scores = torch.einsum("bd,bcd->bc", view.float(), documents.float())
        return distillation(scores, keys.teacher, kind=d.kind, temperature=d.temperature, teacher_scale=d.teacher_scale)

    fused = fuse_views(query, target, alpha)
    of_fused, distilled = contrast(fused), distil(fused)
    weight = config.distill.weight if config.distill is not None else 0.0
    total = config.contrastive * of_fused.loss + weight * distilled
    with torch.set_grad_enabled(config.query_view > 0 and torch.is_grad_enabled()):
        alone = contrast(query)
    for view, of_view, share in ((query, alone, config.query_view), (target, None, config.signature_view)):
        if share > 0:
            found = of_view if of_view is not None else contrast(view)
            total = total + share * (config.contrastive * found.loss + weight * distil(view))
    shown = (target_readouts != query_readouts).float()  # a row without a signature has one readout for both views
    return Objective(
        loss=total,
        contrast=of_fused,
        distill=distilled.detach(),
        with_signature=(of_fused.rows * shown).sum(),
        without_signature=(alone.rows * shown).sum(),
        signature_rows=shown.sum(),
    )
