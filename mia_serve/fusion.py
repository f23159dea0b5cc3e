"""Fusion of lexical and dense scores over every candidate, and the choice of its weight without looking at the answer.

Both sides score all candidates of a query (all sessions of a conversation); neither is cut to a short list first, so
a candidate that one side ranks low can still win. Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from mia_serve.core.errors import MiaError

#: Weights that a search over alpha tries: 0, .05 ... 1. 1 is the first (lexical) side alone.
ALPHAS: tuple[float, ...] = tuple(step / 20 for step in range(21))
#: Constant of reciprocal rank fusion (Cormack, Clarke & Büttcher, SIGIR 2009).
RRF_K = 60
#: A row whose population standard deviation is below this says nothing: its z-scores are all zero.
_FLAT = 1e-9
#: So does one whose scores differ by no more than this part of the largest: scores of over 1000 carry that much noise.
_FLAT_PART = 1e-12


def zscore(scores: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Standardise each row by the mean and population standard deviation of its candidates.

    Args:
        scores: (n, S), one row a query.
        mask: (n, S) or (S,) bool, True where a candidate is there (rows may be padded, or a session have no vector).
            Absent ones do not enter the statistics. None: all are there.

    Returns:
        (n, S) float64. Absent candidates are 0, the mean, as is a whole row that is constant (deviation under 1e-9, or
        scores that agree to 12 digits).

    Raises:
        MiaError: A score of a present candidate is not a number, NaN or infinite, or the mask has another shape.
    """
    values, present = _checked(scores, mask)
    count = np.maximum(present.sum(axis=-1, keepdims=True), 1)
    # Powers of two change no digit of a result, and keep large scores from overflowing when they are squared.
    largest = np.abs(values).max(axis=-1, keepdims=True, initial=0.0)
    exponent = np.maximum(np.frexp(largest)[1], 0)
    values, largest = np.ldexp(values, -exponent), np.ldexp(largest, -exponent)
    centred = np.where(present, values - values.sum(axis=-1, keepdims=True) / count, 0.0)
    deviation = np.sqrt((centred * centred).sum(axis=-1, keepdims=True) / count)
    # The mean of equal scores is rounded and need not equal them, so their deviation alone does not tell.
    highest = values.max(axis=-1, keepdims=True, initial=-np.inf, where=present)
    lowest = values.min(axis=-1, keepdims=True, initial=np.inf, where=present)
    flat = (deviation < np.ldexp(_FLAT, -exponent)) | (highest - lowest <= _FLAT_PART * largest)
    return np.where(flat, 0.0, centred / np.where(flat, 1.0, deviation))


def mix(first: np.ndarray, second: np.ndarray, alpha: float | np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Mix two sides' scores: ``alpha * z(first) + (1 - alpha) * z(second)``.

    Args:
        first: (n, S) scores of the first side, by custom the lexical one.
        second: (n, S) scores of the second side for the same candidates.
        alpha: Weight of the first side in [0, 1]: one number, or one a query (n,).
        mask: (n, S) or (S,) bool, False where there is no such candidate (padding). None: all are there.

    Returns:
        (n, S) float64; -inf where there is no candidate, so that ``rank`` puts it last.

    Raises:
        MiaError: Shapes differ, ``alpha`` is not a number in [0, 1], or as ``zscore``.
    """
    first, second = _same_shape(first, second)
    weight = _numbers(alpha, "alpha")[..., None]
    if not ((weight >= 0) & (weight <= 1)).all():
        raise MiaError(f"alpha is {alpha}; it must lie in [0, 1] (1: the first side alone)")
    if weight.ndim > 1 and weight.shape[:-1] != first.shape[:-1]:
        raise MiaError(f"alpha has shape {weight.shape[:-1]}, scores {first.shape}; give one number, or one a query")
    mixed = weight * zscore(first, mask) + (1 - weight) * zscore(second, mask)
    return mixed if mask is None else np.where(mask, mixed, -np.inf)


def adaptive_alpha(lexical: np.ndarray, dense: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Weigh the two sides for each query by how far each lifts its best candidate above the rest. Needs no labels.

    ``alpha = max z(lexical) / (max z(lexical) + max z(dense))``: a side whose scores are all alike has no opinion on
    this query, one with a single high score has a clear one. No constants, nothing fitted.

    It stands in for a tuned alpha where there are no questions with known answers to tune on. On LoCoMo with MiniLM
    it does as well as leave-one-conversation-out, not clearly better (Hit@1 +0.56 pp over turns, 95 % interval
    [0.0, 1.14], one-sided p .034, two-sided .066; +0.15 pp with summaries and facts, [-0.43, 0.69], one-sided p .33),
    and little of that comes from telling queries apart: its mean as one fixed alpha does nearly the same. It reads the
    shape of the scores only, so it cannot know how good an encoder is: for one much stronger than MiniLM its
    alpha, near .6, is too high, and one tuned on labels wins.

    Args:
        lexical: (n, S) scores of the first side.
        dense: (n, S) scores of the second side for the same candidates.
        mask: (n, S) or (S,) bool, False where there is no such candidate. None: all are there.

    Returns:
        (n,) float64 in [0, 1], for ``mix``; 0 or 1 where one side is constant, 0.5 where both are.

    Raises:
        MiaError: As ``mix``.
    """
    sides = _same_shape(lexical, dense)
    first, second = (zscore(scores, mask).max(axis=-1, initial=0.0) for scores in sides)
    both = first + second
    return np.where(both > 0, first / np.where(both > 0, both, 1.0), 0.5)


def rrf(
    score_lists: Sequence[np.ndarray], k: float = RRF_K, present: Sequence[np.ndarray | None] | None = None
) -> np.ndarray:
    """Fuse by reciprocal rank: the sum over lists of ``1 / (k + rank)``, ranks from 1.

    Equal scores are ranked by their column, lower first, so the result does not depend on how a sort treats ties.

    Args:
        score_lists: One (n, S) array a list, all over the same candidates.
        k: Constant that flattens the top ranks, 60 in the paper.
        present: One (n, S) or (S,) bool array a list (None: all there). A candidate that a list does not hold takes no
            rank in it and gets 0 from it.

    Returns:
        (n, S) float64.

    Raises:
        MiaError: No list, shapes that differ, a ``k`` that is negative or no number, or a score that is NaN, infinite
            or no number.
    """
    if not len(score_lists):
        raise MiaError("no score list to fuse; give one (n, S) array for each ranking")
    masks = [None] * len(score_lists) if present is None else list(present)
    if len(masks) != len(score_lists):
        raise MiaError(f"{len(score_lists)} score lists but {len(masks)} masks; give one for each, or None")
    constant = _numbers(k, "k")
    if constant.ndim or not constant >= 0:
        raise MiaError(f"k is {k}; it must be one number of 0 or more (60 in the paper)")
    tables = [_numbers(scores, "scores") for scores in score_lists]
    shape = tables[0].shape
    fused = np.zeros(shape)
    for scores, mask in zip(tables, masks, strict=True):
        if scores.shape != shape:
            raise MiaError(f"shapes {shape} and {scores.shape} differ; all lists must score the same candidates")
        values, there = _checked(scores, mask)
        order = rank(np.where(there, values, -np.inf))
        places = np.empty_like(order)
        np.put_along_axis(places, order, np.broadcast_to(np.arange(1, shape[-1] + 1), shape), axis=-1)
        fused += np.where(there, 1.0 / (constant + places), 0.0)
    return fused


def rank(scores: np.ndarray) -> np.ndarray:
    """Order candidates by descending score, ties to the lower column.

    Args:
        scores: (S,) or (n, S).

    Returns:
        Column numbers, best first, of the same shape.
    """
    return np.argsort(-_numbers(scores, "scores"), axis=-1, kind="stable")


def leave_one_group_out(values: np.ndarray, groups: Sequence[Hashable]) -> tuple[np.ndarray, dict[Hashable, int]]:
    """Choose, for each group, the setting that does best on the questions of all other groups.

    A group's own values are never read when its setting is chosen.

    Args:
        values: (n, A), the metric of each question under each setting (one column an alpha, ascending).
        groups: Group of each question, (n,): its conversation, or its fold.

    Returns:
        The column chosen for each question (n,) int64, and for each group in order of appearance. "Best" is the mean
        over the other groups' questions (micro average), ties to the lowest column.

    Raises:
        MiaError: Lengths differ, a value is not a number, NaN or infinite, a group cannot be hashed, or there are fewer
            than two groups.
    """
    table = _numbers(values, "values")
    if table.ndim != 2 or table.shape[1] == 0 or len(table) != len(groups):
        raise MiaError(f"values have shape {table.shape} for {len(groups)} groups; give (questions, settings)")
    if not np.isfinite(table).all():
        raise MiaError("values hold NaN or infinity; leave out questions that have no value")
    place: dict[Hashable, int] = {}
    member = np.empty(len(groups), dtype=np.int64)
    for question, group in enumerate(groups):
        try:
            member[question] = place.setdefault(group, len(place))
        except TypeError:
            raise MiaError(f"group {question} is {group!r:.60}, which cannot be hashed; give strings") from None
    if len(place) < 2:
        raise MiaError(f"{len(place)} group; choosing a setting on the others needs at least two")
    # Rounded sums would depend on the order of the questions, and settings that tie would not.
    chosen = {
        group: int(np.argmax([math.fsum(column) for column in table[member != number].T.tolist()]))
        for group, number in place.items()
    }
    return np.array([chosen[group] for group in groups], dtype=np.int64), chosen


def _same_shape(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of both sides as float64."""
    first, second = _numbers(first, "scores"), _numbers(second, "scores")
    if first.shape != second.shape:
        raise MiaError(f"shapes {first.shape} and {second.shape} differ; both must score the same candidates")
    return first, second


def _numbers(given: Any, name: str) -> np.ndarray:
    """Return what was given as float64; text is refused, even where it spells a number."""
    try:
        array = np.asarray(given)
    except ValueError:
        raise MiaError(f"{name} have rows of different lengths; give an array") from None
    if array.dtype.kind not in "biuf":
        raise MiaError(f"{name} of type {array.dtype} ({given!r:.60}); give numbers")
    return array.astype(np.float64, copy=False)


def _checked(scores: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 scores with 0 where absent, and the mask in full."""
    values = _numbers(scores, "scores")
    if not values.ndim:
        raise MiaError(f"scores is one number, {scores!r:.60}; give a row a query")
    if mask is None:
        present = np.ones(values.shape, dtype=bool)
    else:
        given = np.asarray(mask, dtype=bool)
        if given.shape not in (values.shape, values.shape[-1:]):
            raise MiaError(f"mask has shape {given.shape}, the scores {values.shape}; give one flag a score")
        present = np.broadcast_to(given, values.shape)
    values = np.where(present, values, 0.0)
    if not np.isfinite(values).all():
        raise MiaError("scores hold NaN or infinity; give finite ones, and a mask for candidates that have none")
    return values, present
