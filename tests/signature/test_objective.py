"""The set function against hand-computed values and its promised properties."""

from __future__ import annotations

import itertools

import pytest
import torch

from mia_serve.signature import set_function_value


def _cosines(seed: int, units: int, chunks: int, dim: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Real cosines of random vectors: (1, H), (1, C, H), (1, H, H) float64."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(1 + chunks + units, dim, generator=generator, dtype=torch.float64)
    vectors = torch.nn.functional.normalize(vectors, dim=1)
    query, chunk, unit = vectors[:1], vectors[1 : 1 + chunks], vectors[1 + chunks :]
    return (query @ unit.T), (chunk @ unit.T)[None], (unit @ unit.T)[None]


def test_terms_by_hand() -> None:
    query = torch.tensor([[0.5, -0.4, 0.25]])
    cover = torch.tensor([[[0.8, 0.2, 0.0], [0.1, 0.6, -0.9]]])
    unit = torch.tensor([[[1.0, 0.5, -0.2], [0.5, 1.0, 0.3], [-0.2, 0.3, 1.0]]])
    found = set_function_value(query, cover, unit, torch.tensor([[1, 0, -1]]), k=4)
    # f_Q = (0 + .5)/4; f_C = (.8 + .6)/2; f_D = (2 - .5/3)/4
    expected = torch.tensor([[0.125, 0.7, (2 - 0.5 / 3) / 4]])
    torch.testing.assert_close(found.terms, expected)
    torch.testing.assert_close(found.value, expected @ torch.tensor([0.3, 0.4, 0.3]))


def test_whole_set_of_orthogonal_units_is_fully_diverse() -> None:
    found = set_function_value(
        torch.zeros(1, 3), torch.zeros(1, 2, 3), torch.eye(3)[None], torch.tensor([[0, 1, 2]]), k=3
    )
    torch.testing.assert_close(found.terms, torch.tensor([[0.0, 0.0, 1.0]]))


def test_identical_units_have_diversity_one_half() -> None:
    # K equal units: (1/K)(K − (1/(K−1)) K(K−1)/2) = 1/2, the least that a full set can have.
    found = set_function_value(
        torch.zeros(1, 4), torch.zeros(1, 1, 4), torch.ones(1, 4, 4), torch.tensor([[0, 1, 2, 3]]), k=4
    )
    torch.testing.assert_close(found.terms[0, 2], torch.tensor(0.5))


def test_k_of_one_counts_the_unit() -> None:
    found = set_function_value(
        torch.tensor([[0.5, 0.1]]), torch.tensor([[[0.4, 0.0]]]), torch.ones(1, 2, 2), torch.tensor([[0]]), k=1
    )
    torch.testing.assert_close(found.terms, torch.tensor([[0.5, 0.4, 1.0]]))


def test_empty_set_is_worth_nothing() -> None:
    query, cover, unit = _cosines(0, 4, 3)
    found = set_function_value(query, cover, unit, torch.full((1, 2), -1), k=2)
    assert found.value.item() == 0 and not found.terms.any()


@pytest.mark.parametrize("seed", range(4))
def test_monotone_and_submodular(seed: int) -> None:
    query, cover, unit = _cosines(seed, 5, 7)
    k = 4

    def value(members: tuple[int, ...]) -> float:
        padded = torch.tensor([list(members) + [-1] * (k - len(members))])
        return set_function_value(query, cover, unit, padded, k=k).value.item()

    sets = [s for size in range(k) for s in itertools.combinations(range(5), size)]
    values = {s: value(s) for size in range(k + 1) for s in itertools.combinations(range(5), size)}
    for small in sets:
        for large in sets:
            if not set(small) <= set(large):
                continue
            for extra in set(range(5)) - set(large):
                gain_small = values[tuple(sorted({*small, extra}))] - values[small]
                gain_large = values[tuple(sorted({*large, extra}))] - values[large]
                assert gain_large >= -1e-12
                assert gain_small >= gain_large - 1e-12


def test_masked_chunks_do_not_count() -> None:
    query, cover, unit = _cosines(1, 4, 5)
    sets = torch.tensor([[0, 2]])
    mask = torch.tensor([[True, True, False, True, False]])
    masked = set_function_value(query, cover, unit, sets, cover_mask=mask)
    dropped = set_function_value(query, cover[:, mask[0]], unit, sets)
    torch.testing.assert_close(masked.terms, dropped.terms)


@pytest.mark.parametrize(
    ("sets", "k", "message"),
    [
        ([[0, 0]], 5, "repeat"),
        ([[0, 4]], 5, "allowed are -1..3"),
        ([[0, -2]], 5, "allowed are -1..3"),
        ([[0, 1, 2]], 2, "3 units but k=2"),
        ([[0], [1]], 5, "expected"),
    ],
)
def test_wrong_sets_are_refused(sets: list[list[int]], k: int, message: str) -> None:
    query, cover, unit = _cosines(2, 4, 3)
    with pytest.raises(ValueError, match=message):
        set_function_value(query, cover, unit, torch.tensor(sets), k=k)


def test_set_with_a_hidden_unit_is_refused() -> None:
    query, cover, unit = _cosines(2, 3, 3)
    with pytest.raises(ValueError, match="pool_mask hides"):
        set_function_value(query, cover, unit, torch.tensor([[2]]), pool_mask=torch.tensor([[True, True, False]]))
