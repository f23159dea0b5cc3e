"""First-K, pools, and the signature record."""

from __future__ import annotations

import json

import pytest
import torch

from mia_serve.signature import Signature, first_k, unique_in_order


def test_unique_in_order_keeps_first_occurrences() -> None:
    sessions = torch.tensor([[4, 4, 1, 4, 0, 1], [2, 2, 2, 2, 2, 2], [-1, -1, -1, -1, -1, -1], [3, -1, 0, 3, 5, -1]])
    assert unique_in_order(sessions).tolist() == [[4, 1, 0], [2, -1, -1], [-1, -1, -1], [3, 0, 5]]


def test_unique_in_order_agrees_with_dict() -> None:
    sessions = torch.randint(0, 9, (40, 25), generator=torch.Generator().manual_seed(0))
    for row, pool in zip(sessions.tolist(), unique_in_order(sessions).tolist(), strict=True):
        assert [i for i in pool if i >= 0] == list(dict.fromkeys(row))


def test_first_k_pads_and_cuts() -> None:
    sessions = torch.tensor([[4, 4, 1, 4, 0, 1], [2, 2, 2, 2, 2, 2]])
    assert first_k(sessions, 2).tolist() == [[4, 1], [2, -1]]
    assert first_k(sessions, 5).tolist() == [[4, 1, 0, -1, -1], [2, -1, -1, -1, -1]]
    assert first_k(torch.empty((2, 0), dtype=torch.int64), 2).tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("sessions", [torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3)])
def test_wrong_sessions_are_refused(sessions: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected"):
        first_k(sessions, 2)


def test_record_survives_json() -> None:
    picks = ((0.1, 0.5, 0.2), (0, 0.25, 0.2))
    record = Signature(("b", "a"), ("text a", "山 text b"), (0.5, 0.25), {"value": 0.75}, "coverage", picks)
    assert Signature.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert record.text == "text a\n山 text b"
    with pytest.raises(ValueError, match="expected"):
        Signature.from_dict({"texts": []})
    with pytest.raises(ValueError, match="three numbers a pick"):
        Signature.from_dict(record.to_dict() | {"pick_terms": [[0.5, 0.25]]})


def test_records_from_before_the_terms_of_picks_are_read() -> None:
    older = {"session_ids": ["a"], "texts": ["t"], "gains": [0.5], "terms": {"value": 0.5}, "mode": "coverage"}
    assert Signature.from_dict(older) == Signature(("a",), ("t",), (0.5,), {"value": 0.5}, "coverage", ())


def test_from_texts() -> None:
    assert Signature.from_texts("one").texts == ("one",)
    assert Signature.from_texts(["one", "two"]).texts == ("one", "two")
    assert Signature.from_texts(None).texts == Signature.from_texts("").texts == ()
