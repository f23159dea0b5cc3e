"""From rows to tensors: what is sampled of a row, and its token ids.

Everything random here is a pure function of the seed, the row and the pass over the data. So a resumed run sees what
the interrupted one would have seen, and a batch of 8 in one process holds the same samples as two of 4 in two.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mia_serve.core import Encoder
from mia_serve.core.encoder import batches_by_tokens
from mia_serve.core.pooling import Sequence, SequenceBatch, pad_sequences
from mia_train.rows import Passage, Row, id_key, text_key
from mia_train.schedule import Sample

_SAMPLE = 1  # stream of random numbers under the seed (see schedule)


@dataclass(frozen=True)
class SlotKeys:
    """Which readout fills which candidate slot, and the keys that tell false negatives; see ``losses.Candidates``."""

    readouts: Tensor  # (B, C) int64
    ids: Tensor  # (B, C) int64
    texts: Tensor  # (B, C) int64
    valid: Tensor  # (B, C) bool
    teacher: Tensor  # (B, C) float32 teacher scores, NaN where there is none
    positive_ids: Tensor  # (B, P) int64
    positive_texts: Tensor  # (B, P) int64

    def to(self, device: torch.device) -> SlotKeys:
        """Return a copy on ``device``."""
        return SlotKeys(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


@dataclass(frozen=True)
class TrainBatch:
    """One micro-batch of B rows.

    The sequences are forwarded in ``groups`` of like lengths; ``order`` brings the concatenated readouts back to the
    order of building, into which the ``*_readouts`` point. A row without a signature has the same readout as query and
    as target view, so that fusing gives the query-only vector.
    """

    groups: tuple[SequenceBatch, ...]
    order: Tensor  # (R,) int64
    query_readouts: Tensor  # (B,) int64
    chunk_readouts: Tensor  # (B,) int64
    documents: SlotKeys
    node_readouts: Tensor | None  # (B,) int64
    nodes: SlotKeys | None
    node_weights: Tensor | None  # (B,) float32, 0 for rows without nodes
    query_ids: tuple[str, ...]
    tokens: int  # real tokens
    slots: int  # tokens and padding

    def to(self, device: torch.device | str, non_blocking: bool = True) -> TrainBatch:
        """Return a copy on ``device``."""
        moved: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "groups":
                value = tuple(group.to(torch.device(device)) for group in value)
            elif isinstance(value, Tensor):
                value = value.to(device, non_blocking=non_blocking)
            elif isinstance(value, SlotKeys):
                value = value.to(torch.device(device))
            moved[f.name] = value
        return TrainBatch(**moved)


class Collator:
    """Sample positives, negatives and signatures, and build their token ids with the encoder's own template.

    Args:
        encoder: Its ``tokenise_query`` and ``tokenise_document`` are the only source of token ids.
        rows: All training rows; wrong sessions for ``signature_noise`` are drawn from their signatures.
        hard_negatives: Hard negatives a row and step (kinds ``hard`` and ``signature``).
        simple_negatives: Simple negatives a row and step.
        use_signatures: Whether rows' signatures are shown to the encoder.
        signature_dropout: Probability of leaving the signature out.
        signature_noise: Probability of swapping one summary of the signature for one of another row.
        nodes: Whether the node view and node candidates are built as well.
        groups: Forward groups; with sharded parameters the number must be the same on all ranks (at most 2).
        group_tokens: For the gradient cache: as many groups as it takes for each to hold at most so many tokens,
            padding included; a longer sequence goes alone. None: ``groups`` of them.
        seed: Fixes what is sampled.
    """

    def __init__(
        self,
        encoder: Encoder,
        rows: list[Row],
        *,
        hard_negatives: int,
        simple_negatives: int = 0,
        use_signatures: bool = False,
        signature_dropout: float = 0.0,
        signature_noise: float = 0.0,
        nodes: bool = False,
        groups: int = 4,
        group_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self.encoder, self.seed, self.with_nodes = encoder, seed, nodes
        self.groups, self.group_tokens = groups, group_tokens
        self.hard, self.simple = hard_negatives, simple_negatives
        self.use_signatures = use_signatures
        self.dropout, self.noise = signature_dropout, signature_noise
        self.max_positives = max(len(row.positives) for row in rows)
        self.max_node_positives = max((len(row.nodes.positives) for row in rows if row.nodes), default=1)
        # Passages come back in every pass; their token ids are kept (16,384 of 200 tokens: about 100 MB).
        self._tokenise_document = lru_cache(maxsize=16384)(encoder.tokenise_document)
        self.summaries = sorted({text for row in rows for text in row.signature or ()}) if self.noise > 0 else []

    def __call__(self, samples: list[Sample]) -> TrainBatch:
        """Return the tensors of a micro-batch."""
        sequences: list[Sequence] = []
        views: list[dict[str, int]] = []
        readouts = 0
        drawn = [self.draw(sample) for sample in samples]
        for sample, choice in zip(samples, drawn, strict=True):
            found: dict[str, int] = {}
            signature = list(choice.signature) if choice.signature else None
            for sequence in self.encoder.tokenise_query(sample.row.query, signature, node=self.with_nodes):
                sequences.append(sequence)
                for view in sequence.spans:
                    found[view] = readouts
                    readouts += 1
            views.append(found)
        place: dict[str, int] = {}  # a text that several rows share is forwarded once

        def readout(text: str) -> int:
            nonlocal readouts
            if text not in place:
                sequences.append(self._tokenise_document(text))
                place[text] = readouts
                readouts += 1
            return place[text]

        slots = 1 + self.hard + self.simple
        documents = _slot_keys(
            [choice.documents for choice in drawn],
            [sample.row.positives for sample in samples],
            slots,
            self.max_positives,
            readout,
        )
        nodes = node_weights = node_readouts = None
        if self.with_nodes:
            nodes = _slot_keys(
                [choice.nodes for choice in drawn],
                [sample.row.nodes.positives if sample.row.nodes else () for sample in samples],
                slots,
                self.max_node_positives,
                readout,
            )
            node_weights = torch.tensor([float(sample.row.nodes is not None) for sample in samples])
            node_readouts = torch.tensor([found.get("node", found["query"]) for found in views])
        lengths = [len(sequence.ids) for sequence in sequences]
        plan = plan_groups(lengths, self.groups)
        if self.group_tokens is not None:
            plan = plan_by_tokens(lengths, self.group_tokens)
        groups = [
            # right padding, which all position embeddings bear, as serving does
            pad_sequences([sequences[i] for i in group], self.encoder.pad_id)
            for group in plan
        ]
        return TrainBatch(
            groups=tuple(groups),
            order=_readout_order(sequences, plan),
            query_readouts=torch.tensor([found["query"] for found in views]),
            chunk_readouts=torch.tensor([found.get("chunk", found["query"]) for found in views]),
            documents=documents,
            node_readouts=node_readouts,
            nodes=nodes,
            node_weights=node_weights,
            query_ids=tuple(sample.row.query_id for sample in samples),
            tokens=sum(len(sequence.ids) for sequence in sequences),
            slots=sum(group.input_ids.numel() for group in groups),
        )

    def draw(self, sample: Sample) -> Draw:
        """Return what is sampled of a row in a pass: a pure function of seed, row and pass."""
        row = sample.row
        random = np.random.default_rng([self.seed, _SAMPLE, sample.epoch, sample.number])
        positive = row.positives[int(random.integers(len(row.positives)))]
        documents = (positive, *_draw_negatives(row.negatives, self.hard, self.simple, random))
        dropped, noisy = random.random() < self.dropout, random.random() < self.noise
        signature = row.signature if self.use_signatures and not dropped else None
        if signature and noisy and len(self.summaries) > len(signature):
            slot = int(random.integers(len(signature)))
            wrong = signature[slot]
            while wrong in signature:
                wrong = self.summaries[int(random.integers(len(self.summaries)))]
            signature = (*signature[:slot], wrong, *signature[slot + 1 :])
        nodes: tuple[Passage, ...] = ()
        if self.with_nodes and row.nodes:
            node = row.nodes.positives[int(random.integers(len(row.nodes.positives)))]
            nodes = (node, *_draw_negatives(row.nodes.negatives, self.hard, self.simple, random))
        return Draw(documents, signature, nodes)


class Draw(NamedTuple):
    """What one step uses of a row; the first document (node) is the positive."""

    documents: tuple[Passage, ...]
    signature: tuple[str, ...] | None
    nodes: tuple[Passage, ...]


def _draw_negatives(
    negatives: tuple[Passage, ...], hard: int, simple: int, random: np.random.Generator
) -> list[Passage]:
    """Draw ``hard`` of the hard and ``simple`` of the simple negatives; where one kind is short, the other fills in."""
    shuffled = [negatives[i] for i in random.permutation(len(negatives))]
    hards = [p for p in shuffled if p.kind != "simple"]
    simples = [p for p in shuffled if p.kind == "simple"]
    chosen = hards[:hard] + simples[:simple]
    rest = hards[hard:] + simples[simple:]
    return chosen + rest[: hard + simple - len(chosen)]


def _slot_keys(
    documents: list[tuple[Passage, ...]],
    positives: list[tuple[Passage, ...]],
    slots: int,
    max_positives: int,
    readout: Any,
) -> SlotKeys:
    """Fill (B, slots) candidate slots; empty ones point at readout 0 and are not valid."""
    rows = len(documents)
    index, ids, texts = (torch.zeros(rows, slots, dtype=torch.long) for _ in range(3))
    valid = torch.zeros(rows, slots, dtype=torch.bool)
    teacher = torch.full((rows, slots), float("nan"))
    positive_ids, positive_texts = (torch.zeros(rows, max_positives, dtype=torch.long) for _ in range(2))
    for b in range(rows):
        for c, passage in enumerate(documents[b]):
            index[b, c], ids[b, c], texts[b, c] = readout(passage.text), id_key(passage.id), text_key(passage.text)
            valid[b, c] = True
            if passage.score is not None:
                teacher[b, c] = passage.score
        for p, passage in enumerate(positives[b]):
            positive_ids[b, p], positive_texts[b, p] = id_key(passage.id), text_key(passage.text)
    return SlotKeys(index, ids, texts, valid, teacher, positive_ids, positive_texts)


def _readout_order(sequences: list[Sequence], plan: list[list[int]]) -> Tensor:
    """Return the permutation from readouts as forwarded to readouts as built: ``built = forwarded[order]``."""
    first, total = [], 0
    for sequence in sequences:
        first.append(total)
        total += len(sequence.spans)
    order = torch.empty(total, dtype=torch.long)
    forwarded = [first[i] + k for group in plan for i in group for k in range(len(sequences[i].spans))]
    order[torch.tensor(forwarded)] = torch.arange(total)
    return order


def plan_groups(lengths: list[int], groups: int) -> list[list[int]]:
    """Split rows, sorted by length, into ``min(groups, n)`` runs with as little padding as can be.

    Dynamic programming over the sorted lengths: a run from i to j costs (j - i) times its longest row.

    Returns:
        Row numbers of each run.
    """
    ascending = np.argsort(np.array(lengths), kind="stable")
    longest = np.array(lengths)[ascending]
    n = len(lengths)
    groups = min(groups, n)
    count = np.arange(1, n + 1)
    cost = count * longest  # one run over the first j + 1 rows
    cuts = []
    for _ in range(groups - 1):
        # total[i, j]: rows up to i in the runs before, i + 1 .. j in a run of their own
        total = cost[:, None] + (count[None, :] - count[:, None]) * longest[None, :]
        total = np.where(count[None, :] > count[:, None], total, np.iinfo(np.int64).max)
        cuts.append(total.argmin(axis=0))
        cost = np.where(np.arange(n) > 0, total.min(axis=0), np.iinfo(np.int64).max // 2)
    bounds, end = [n], n - 1
    for cut in reversed(cuts):
        end = int(cut[end])
        bounds.append(end + 1)
    bounds = [0, *reversed(bounds)]
    return [ascending[a:b].tolist() for a, b in pairwise(bounds)]


def plan_by_tokens(lengths: list[int], budget: int) -> list[list[int]]:
    """Split rows, longest first, into runs of at most ``budget`` padded tokens; a longer row goes alone.

    Returns:
        Row numbers of each run.
    """
    descending = np.argsort(-np.array(lengths), kind="stable")
    runs = batches_by_tokens([lengths[i] for i in descending], budget)
    return [descending[run.start : run.stop].tolist() for run in runs]
