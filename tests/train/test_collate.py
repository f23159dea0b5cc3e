from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mia_serve.core import Encoder, fuse_views
from mia_train.collate import Collator, plan_groups
from mia_train.model import MiaModel
from mia_train.rows import Row, id_key
from mia_train.schedule import Sample

from .conftest import SUMMARIES, make_rows


@pytest.fixture(scope="module")
def bert(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert, device="cpu")


@pytest.fixture(scope="module")
def qwen(tiny_qwen3: Path) -> Encoder:
    return Encoder.load(tiny_qwen3, device="cpu")


def collator(encoder: Encoder, rows: list[Row], **options: Any) -> Collator:
    return Collator(encoder, rows, **({"hard_negatives": 1, "simple_negatives": 1} | options))


def test_what_is_drawn_depends_on_seed_row_and_pass_alone(bert: Encoder) -> None:
    rows = make_rows(8, negatives=6)
    options = {"signature_dropout": 0.5, "signature_noise": 0.5, "use_signatures": True}
    one, other = collator(bert, rows, **options), collator(bert, rows, **options)
    forward = [one.draw(Sample(rows[i], i, 0)) for i in range(8)]
    backward = [other.draw(Sample(rows[i], i, 0)) for i in reversed(range(8))]
    assert forward == backward[::-1]
    assert forward != [one.draw(Sample(rows[i], i, 1)) for i in range(8)]
    assert forward != [collator(bert, rows, seed=9, **options).draw(Sample(rows[i], i, 0)) for i in range(8)]


def test_kinds_of_negatives_and_fill_in(bert: Encoder) -> None:
    row = make_rows(1, negatives=6)[0]
    drawn = collator(bert, [row], hard_negatives=2, simple_negatives=1).draw(Sample(row, 0, 0)).documents
    assert drawn[0] in row.positives
    assert [p.kind for p in drawn[1:]] == ["hard", "hard", "simple"]
    short = collator(bert, [row], hard_negatives=4, simple_negatives=1).draw(Sample(row, 0, 0)).documents
    assert [p.kind for p in short[1:]] == ["hard", "hard", "hard", "simple", "simple"]
    few = collator(bert, [row], hard_negatives=9, simple_negatives=0)([Sample(row, 0, 0)])
    assert few.documents.valid.tolist() == [[True] * 7 + [False] * 3]


def test_signature_dropout_and_noise(bert: Encoder) -> None:
    rows = make_rows(8)
    shown = collator(bert, rows, use_signatures=True)
    assert shown.draw(Sample(rows[0], 0, 0)).signature == rows[0].signature
    assert collator(bert, rows).draw(Sample(rows[0], 0, 0)).signature is None
    dropped = collator(bert, rows, use_signatures=True, signature_dropout=0.3)
    share = np.mean([dropped.draw(Sample(rows[i], i, k)).signature is None for i in range(8) for k in range(100)])
    assert 0.25 < share < 0.35
    noisy = collator(bert, rows, use_signatures=True, signature_noise=1.0)
    for i, row in enumerate(rows):
        signature = noisy.draw(Sample(row, i, 0)).signature
        assert signature is not None and row.signature is not None
        changed = [(a, b) for a, b in zip(signature, row.signature, strict=True) if a != b]
        assert len(changed) == 1
        assert changed[0][0] in SUMMARIES and changed[0][0] not in row.signature


@pytest.mark.parametrize("name", ["bert", "qwen"])
def test_TRN_22_token_ids_are_the_encoders_own_after_a_reload_too(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    encoder: Encoder = request.getfixturevalue(name)
    encoder.save(tmp_path / "saved")
    served = Encoder.load(tmp_path / "saved", device="cpu")
    rows = make_rows(4)
    batch = collator(encoder, rows, use_signatures=True, groups=1)([Sample(row, i, 0) for i, row in enumerate(rows)])
    (group,) = batch.groups
    seen = {tuple(ids[mask.bool()].tolist()) for ids, mask in zip(group.input_ids, group.attention_mask, strict=True)}
    for row in rows:
        assert {tuple(s.ids) for s in served.tokenise_query(row.query, list(row.signature or ()))} <= seen
        assert any(tuple(served.tokenise_document(p.text).ids) in seen for p in row.positives)


@pytest.mark.parametrize("name", ["bert", "qwen"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_readouts_equal_the_served_vectors(name: str, groups: int, request: pytest.FixtureRequest) -> None:
    encoder: Encoder = request.getfixturevalue(name)
    rows = make_rows(5)
    rows[1] = replace(rows[1], signature=None)
    collate = collator(encoder, rows, use_signatures=True, groups=groups)
    samples = [Sample(row, i, 0) for i, row in enumerate(rows)]
    batch = collate(samples)
    assert len(batch.groups) == groups
    with torch.no_grad():
        vectors = MiaModel(encoder).eval()(batch.groups)[batch.order]
    fused = fuse_views(vectors[batch.query_readouts], vectors[batch.chunk_readouts], encoder.spec.alpha)
    served = encoder.encode_queries([row.query for row in rows], [list(row.signature or ()) for row in rows])
    np.testing.assert_allclose(fused.numpy(), served, atol=1e-5)
    for i, sample in enumerate(samples):
        documents = collate.draw(sample).documents
        expected = encoder.encode_documents([p.text for p in documents])
        np.testing.assert_allclose(vectors[batch.documents.readouts[i]].numpy(), expected, atol=1e-5)
        assert batch.documents.ids[i].tolist() == [id_key(p.id) for p in documents]


@pytest.mark.parametrize("name", ["bert", "qwen"])
def test_TRN_44_empty_repeated_and_ordered_signatures(name: str, request: pytest.FixtureRequest) -> None:
    encoder: Encoder = request.getfixturevalue(name)
    a, b = SUMMARIES[:2]
    base = make_rows(1)[0]

    def query_ids(signature: tuple[str, ...] | None) -> tuple[Any, bool]:
        row = replace(base, signature=signature)
        batch = collator(encoder, [row], use_signatures=True, groups=1)([Sample(row, 0, 0)])
        ids = [i[m.bool()].tolist() for i, m in zip(batch.groups[0].input_ids, batch.groups[0].attention_mask,
                                                    strict=True)]  # fmt: skip
        return sorted(ids), bool(batch.query_readouts[0] == batch.chunk_readouts[0])

    assert query_ids(None) == query_ids(())
    assert query_ids(None)[1]  # the fused query is the query-only encoding itself
    assert query_ids((a, a)) == query_ids((a,))
    assert query_ids((a, b)) != query_ids((b, a))
    long = query_ids((a * 300,))[0]
    assert max(map(len, long)) == encoder.spec.max_query_tokens


def test_node_views_and_weights(qwen: Encoder) -> None:
    from mia_train.rows import Nodes, Passage

    rows = make_rows(2)
    rows[0] = replace(rows[0], nodes=Nodes((Passage("e", "Ann : a clerk"),), (Passage("f", "Bo : a dog"),)))
    batch = collator(qwen, rows, use_signatures=True, nodes=True)([Sample(row, i, 0) for i, row in enumerate(rows)])
    assert batch.node_weights is not None and batch.node_weights.tolist() == [1.0, 0.0]
    assert batch.nodes is not None and batch.nodes.valid.tolist() == [[True, True, False], [False] * 3]
    assert batch.node_readouts is not None
    assert len({int(batch.query_readouts[0]), int(batch.chunk_readouts[0]), int(batch.node_readouts[0])}) == 3


def test_groups_have_the_least_padding_there_is() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        lengths = random.integers(1, 40, size=7).tolist()
        for groups in (1, 2, 3):
            plan = plan_groups(lengths, groups)
            assert sorted(i for group in plan for i in group) == list(range(7))
            assert len(plan) == groups
            spent = sum(len(group) * max(lengths[i] for i in group) for group in plan)
            ordered = sorted(lengths)
            best = min(
                sum((b - a) * ordered[b - 1] for a, b in itertools.pairwise([0, *cut, 7]))
                for cut in itertools.combinations(range(1, 7), groups - 1)
            )
            assert spent == best
    assert plan_groups([5, 3], 4) == [[1], [0]]
