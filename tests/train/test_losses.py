from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mia_serve.core import Encoder
from mia_train.collate import Collator, Sample
from mia_train.losses import Candidates, LossOutput, PositiveKeys, info_nce, joint
from mia_train.model import MiaModel
from mia_train.objective import batch_loss
from mia_train.rows import Passage, Row
from mia_train.schema import LossConfig

TAU = 0.1


def unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)


def candidates(vectors: Tensor, ids: Tensor, texts: Tensor | None = None, valid: Tensor | None = None) -> Candidates:
    texts = ids + 1000 if texts is None else texts
    return Candidates(vectors, ids, texts, torch.ones_like(ids, dtype=torch.bool) if valid is None else valid)


def own_positive(c: Candidates) -> PositiveKeys:
    return PositiveKeys(c.ids[:, :1], c.texts[:, :1])


def test_own_negatives_equal_the_formula_with_any_number_of_them() -> None:
    queries, vectors = unit(3, 8), unit(3, 4, 8, seed=1)
    ids = torch.arange(12).reshape(3, 4) + 1
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 1]]).bool()
    c = candidates(vectors, ids, valid=valid)
    expected = []
    for i in range(3):
        scores = torch.stack([queries[i] @ vectors[i, j] / TAU for j in range(4) if valid[i, j]])
        expected.append(-torch.log_softmax(scores, 0)[0])
    out = info_nce(queries, c, own_positive(c), temperature=TAU)
    assert torch.allclose(out.loss, torch.stack(expected).mean(), atol=1e-6)
    assert out.masked == 0
    assert out.candidates == valid.sum()


def test_in_batch_negatives_equal_the_formula() -> None:
    queries, vectors = unit(3, 8), unit(3, 2, 8, seed=1)
    c = candidates(vectors, torch.arange(6).reshape(3, 2) + 1)
    scores = queries @ vectors.reshape(6, 8).T / TAU
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 2, 4]))
    out = info_nce(queries, c, own_positive(c), negatives="in_batch", temperature=TAU)
    assert torch.allclose(out.loss, expected, atol=1e-6)


@pytest.mark.parametrize("same", ["id", "text"])
def test_TRN_05_a_passage_that_occurs_twice_is_masked(same: str) -> None:
    eye = torch.eye(4)
    p_p_q_r = eye[[0, 0, 1, 2]]
    ids = torch.tensor([[1], [1 if same == "id" else 4], [2], [3]])
    texts = torch.tensor([[11], [11 if same == "text" else 14], [12], [13]])
    c = candidates(p_p_q_r[:, None], ids, texts)
    out = info_nce(p_p_q_r, c, own_positive(c), negatives="in_batch", temperature=TAU)
    unique = eye[[0, 1, 2]]
    d = candidates(unique[:, None], torch.tensor([[1], [2], [3]]))
    assert torch.allclose(out.loss, info_nce(unique, d, own_positive(d), negatives="in_batch", temperature=TAU).loss)
    assert out.masked == 4  # the other P for both P rows, the second P for Q and for R
    assert out.positive == 1


def test_TRN_05_all_positives_of_a_query_are_no_negatives_of_it() -> None:
    queries, vectors = unit(2, 8), unit(2, 2, 8, seed=1)
    c = candidates(vectors, torch.tensor([[1, 2], [3, 4]]))
    # 3 is row 0's other positive (by id), 2 is row 1's (by text), and both must stay for the other row
    positives = PositiveKeys(torch.tensor([[1, 3], [3, 0]]), torch.tensor([[1001, 0], [1003, 1002]]))
    out = info_nce(queries, c, positives, negatives="in_batch", temperature=TAU)
    scores = queries @ vectors.reshape(4, 8).T / TAU
    first = -torch.log_softmax(scores[0, [0, 1, 3]], 0)[0]
    second = -torch.log_softmax(scores[1, [0, 2, 3]], 0)[1]
    assert torch.allclose(out.loss, (first + second) / 2, atol=1e-6)
    assert out.masked == 2


def test_own_negative_with_the_positives_text_is_masked_and_the_positive_never() -> None:
    c = candidates(unit(1, 3, 8), torch.tensor([[1, 2, 3]]), torch.tensor([[7, 7, 8]]))
    out = info_nce(unit(1, 8, seed=2), c, own_positive(c), temperature=TAU)
    assert out.masked == 1
    assert out.candidates == 2


def test_mask_margin_masks_by_score_but_not_the_positive() -> None:
    queries = torch.tensor([[1.0, 0.0]])
    vectors = torch.nn.functional.normalize(torch.tensor([[[0.5, 0.9], [1.0, 0.0], [0.0, 1.0]]]), dim=-1)
    c = candidates(vectors, torch.tensor([[1, 2, 3]]))
    out = info_nce(queries, c, own_positive(c), temperature=TAU, mask_margin=0.1)
    assert (int(out.masked), int(out.candidates)) == (1, 2)
    assert info_nce(queries, c, own_positive(c), temperature=TAU, mask_margin=0.9).masked == 0


@pytest.mark.parametrize("negatives", ["own", "in_batch"])
def test_TRN_10_duplicating_the_batch_changes_neither_loss_nor_gradient(negatives: str) -> None:
    queries, vectors = unit(4, 8), unit(4, 3, 8, seed=1)
    ids = torch.arange(12).reshape(4, 3) + 1
    norms = []
    for times in (1, 2):
        weight = torch.eye(8, requires_grad=True)
        c = candidates(vectors.repeat(times, 1, 1) @ weight, ids.repeat(times, 1))
        out = info_nce(queries.repeat(times, 1) @ weight, c, own_positive(c), negatives=negatives, temperature=TAU)
        out.loss.backward()
        norms.append((float(out.loss.detach()), float(weight.grad.norm())))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("negatives", ["own", "in_batch"])
def test_TRN_27_one_row_without_negatives_is_an_error(negatives: str) -> None:
    c = candidates(unit(1, 1, 8), torch.tensor([[1]]))
    with pytest.raises(ValueError, match="at least 2 candidates per query"):
        info_nce(unit(1, 8), c, own_positive(c), negatives=negatives)


def test_unknown_negatives_are_an_error() -> None:
    c = candidates(unit(1, 2, 8), torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="own, in_batch"):
        info_nce(unit(1, 8), c, own_positive(c), negatives="all")  # type: ignore[arg-type]


def test_loss_is_float32_under_bf16_autocast() -> None:
    queries, vectors = unit(2, 64), unit(2, 2, 64, seed=1)
    c = candidates(vectors, torch.tensor([[1, 2], [3, 4]]))
    plain = info_nce(queries, c, own_positive(c), negatives="in_batch").loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(info_nce(queries, c, own_positive(c), negatives="in_batch").loss, plain)


def test_joint_weighs_chunks_and_nodes() -> None:
    chunk = LossOutput(*map(torch.tensor, (1.0, [1.0], 0.5, 0.1, 1.0, 4.0)))
    node = LossOutput(*map(torch.tensor, (3.0, [3.0], 0.2, 0.0, 2.0, 6.0)))
    both = joint(chunk, node, beta=0.25)
    assert float(both.loss) == pytest.approx(0.25 * 1 + 0.75 * 3)
    assert (float(both.masked), float(both.candidates), float(both.positive)) == (3, 10, 0.5)


def test_row_weights_leave_out_rows_without_nodes() -> None:
    queries, vectors = unit(2, 8), unit(2, 2, 8, seed=1)
    c = candidates(vectors, torch.tensor([[1, 2], [3, 4]]))
    half = info_nce(queries, c, own_positive(c), row_weights=torch.tensor([1.0, 0.0]), temperature=TAU)
    one = info_nce(queries[:1], Candidates(*(x[:1] for x in c)), PositiveKeys(c.ids[:1, :1], c.texts[:1, :1]),
                   temperature=TAU)  # fmt: skip
    assert torch.allclose(half.loss, one.loss / 2)


def test_in_batch_loss_equals_sentence_transformers(still_bert: Path, tmp_path: Path) -> None:
    """One batch with a hard negative a row: MultipleNegativesRankingLoss's loss and gradients."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    Encoder.load(still_bert, device="cpu").save(tmp_path / "st")
    texts = [
        ("where was the boat", "the ferryman counted the lamps", "nobody would say"),
        ("who hid the ledger", "she kept the ledger under the floor", "the village at night"),
        ("lamps on the quay", "one missing lamp along the quay", "he found that"),
    ]
    theirs = SentenceTransformer(str(tmp_path / "st"), device="cpu")
    features = [theirs.preprocess([row[k] for row in texts]) for k in range(3)]
    expected = MultipleNegativesRankingLoss(theirs, scale=20.0)(features, None)
    expected.backward()
    encoder = Encoder.load(tmp_path / "st", device="cpu")
    rows = [Row(q, q, (Passage(p, p),), (Passage(n, n),)) for q, p, n in texts]
    batch = Collator(encoder, rows, hard_negatives=1, simple_negatives=0)([Sample(r, i, 0) for i, r in enumerate(rows)])
    model = MiaModel(encoder)
    config = LossConfig(negatives="in_batch", temperature=0.05)
    ours = batch_loss(model(batch.groups)[batch.order], batch, config, alpha=0.5).loss
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    gradients = {name: p.grad for name, p in theirs[0].auto_model.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, p in model.backbone.named_parameters() if p.grad is not None}
    for name, parameter in model.backbone.named_parameters():
        if name in gradients:
            assert torch.allclose(parameter.grad, gradients[name], atol=1e-4), name
