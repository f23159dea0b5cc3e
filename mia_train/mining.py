"""Mine hard negatives: what an encoder ranks high for a query and what is nevertheless no answer to it.

For each row, in this order:

1. Rank the corpus by cosine, ties by ascending id. Of documents that share a text (letter case, width and white space
   aside) only the one with the lowest id takes part.
2. Leave out the row's positives, by id and by text, and those of other rows with the same query and group.
3. Keep the first ``range_max``: the window. With a teacher, score the window anew and sort it by the new score.
4. Drop a candidate of score s where p, the score of the row's *lowest* positive, says so::

       absolute_margin a    s > p - a
       relative_margin r    s > p - r·|p|
       max_score, min_score s > max_score, s < min_score

5. Skip the first ``range_min`` of those left, then take the best, or draw at random.

Rules 3 to 5 are those of ``sentence_transformers.util.mine_hard_negatives`` (6.2). The relative margin lies below the
positive for either sign; p·(1 - r), which that function used until its issue 3819, lies above a negative p and lets
negatives through that beat the positive. For p > 0 the two agree (TopK-PercPos of NV-Retriever, arXiv 2407.15831).
The lowest positive is the measure because a training step samples any positive of a row and pairs it with the same
negatives, so the margin has to hold for each of them. In contrast to that function a row's window depends on no other
row (there, one row with many positives widens everybody's), texts are compared in normalised form, and a corpus that
is given is not widened by the positives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from mia_serve.core import MiaError
from mia_serve.index import SessionIndex
from mia_train.candidates import Candidates, Document, Pool
from mia_train.embedding import Embedder, once
from mia_train.mining_report import MiningReport, Tally
from mia_train.rescore import Teacher, cosines
from mia_train.rows import Passage, Row, id_key

_TILE = 1024  # queries searched at once
_DEPTH = 10  # candidates for each negative where range_max is not given


@dataclass(frozen=True)
class MiningSettings:
    """How negatives are chosen; see the module for the order of the rules.

    Attributes:
        negatives: Hard negatives a row.
        simple: Simple negatives a row, drawn evenly from the groups of the positives, disjoint from the hard ones.
        range_min: Best-ranked candidates that are left are skipped.
        range_max: Best-ranked candidates that are looked at; None: range_min + 10 a negative.
        absolute_margin: A negative scores at least so much less than the lowest positive.
        relative_margin: Likewise, as a share of the lowest positive's magnitude.
        max_score: A negative scores at most this.
        min_score: A negative scores at least this.
        sampling: Take the ``top`` candidates, or draw at ``random`` (by seed and query id).
        within_group: Hard negatives too come only from the groups of the positives.
        seed: Of all draws.

    Raises:
        MiaError: A value is out of range, or two of them leave nothing to choose from.
    """

    negatives: int = 5
    simple: int = 5
    range_min: int = 0
    range_max: int | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    sampling: Literal["top", "random"] = "top"
    within_group: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("negatives", "simple", "range_min", "range_max", "seed"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise MiaError(f"{name} is {value!r}; allowed: integers from 0")
        if self.negatives + self.simple == 0:
            raise MiaError("negatives and simple are both 0, so nothing would be mined; raise one")
        if self.sampling not in ("top", "random"):
            raise MiaError(f"sampling is {self.sampling!r}; allowed: top, random")
        for name, value in self.filters.items():
            most = 1.0 if name == "relative_margin" else math.inf
            if not math.isfinite(value) or (name.endswith("margin") and not 0.0 <= value <= most):
                allowed = {"relative_margin": " from 0 to 1", "absolute_margin": " from 0"}.get(name, "")
                raise MiaError(f"{name} is {value}; allowed: finite numbers{allowed}")
        if self.max_score is not None and self.min_score is not None and self.min_score > self.max_score:
            raise MiaError(f"min_score {self.min_score} is above max_score {self.max_score}; no score is in between")
        room = max(0, self.window - self.range_min)
        if self.negatives > room:
            raise MiaError(
                f"negatives is {self.negatives}, but the window of range_max {self.window} leaves {room} candidates "
                f"after the first {self.range_min} (range_min); lower negatives or range_min, or raise range_max"
            )

    @property
    def window(self) -> int:
        """Candidates that are looked at."""
        return self.range_min + _DEPTH * self.negatives if self.range_max is None else self.range_max

    @property
    def filters(self) -> dict[str, float]:
        """The score filters that are on, in the order in which they apply."""
        names = ("absolute_margin", "relative_margin", "max_score", "min_score")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check_cosine(self) -> None:
        """Raise MiaError where a filter lies outside of what a cosine can be, as one meant for logits does."""
        for name, value in self.filters.items():
            low, high = {"absolute_margin": (0, 2), "relative_margin": (0, 1)}.get(name, (-1, 1))
            if not low <= value <= high:
                raise MiaError(f"{name} is {value}, but scores are cosines without a cross-encoder; {low} to {high}")


def mine(
    rows: Sequence[Row],
    corpus: Sequence[Document],
    embedder: Embedder,
    settings: MiningSettings,
    *,
    haystacks: Sequence[str] | None = None,
    teacher: Teacher | None = None,
    backend: str = "auto",
) -> tuple[list[Row], MiningReport]:
    """Replace the negatives of rows by mined ones.

    A row that gets fewer than asked for, or none, is kept and counted. Where the embedder is shared, all ranks call
    this together and all return the same.

    Args:
        rows: Training rows; queries, positives and groups are read.
        corpus: Where negatives come from. It need not hold the positives.
        embedder: Encodes queries and documents.
        settings: How to choose.
        haystacks: The haystack of each row; None: all documents and rows have haystack "".
        teacher: Scores the windows anew; its scores then go into the rows, for distillation. Without one rows carry
            no scores, old ones included.
        backend: Of the index, ``auto``, ``torch`` or ``faiss``; the result is the same.

    Returns:
        The rows, in the order given, and what was done.

    Raises:
        MiaError: Ids of the corpus repeat, or settings ask for something that it does not have.
    """
    if teacher is None:
        settings.check_cosine()
    candidates = Candidates(rows, corpus, haystacks, settings.within_group)
    windows, positives = _windows(candidates, embedder, settings, backend)
    if teacher is not None:
        windows, positives = _rescored(windows, rows, corpus, teacher)
    tally = Tally()
    hard: list[list[int]] = []
    simple: list[list[int]] = []
    scores: list[np.ndarray] = []
    for i, (row, window, own) in enumerate(zip(rows, windows, positives, strict=True)):
        chosen, dropped = select(window.scores, own, settings, _random(settings.seed, 0, row))
        hard.append(window.documents[chosen].tolist())
        scores.append(window.scores[chosen])
        simple.append(candidates.simple(i, settings.simple, set(hard[i]), _random(settings.seed, 1, row)))
        tally.window(len(window.documents), window.excluded + dropped)
        tally.scores(own, scores[i])
        tally.row(len(hard[i]), len(simple[i]), settings.negatives, settings.simple)
    report = tally.report(settings, candidates, embedder)
    if teacher is None:
        return [_with_negatives(row, corpus, h, s, None) for row, h, s in zip(rows, hard, simple, strict=True)], report
    drawn = teacher.score([row.query for row in rows], [[corpus[d].text for d in found] for found in simple])
    taught = [np.concatenate(parts) for parts in zip(positives, scores, drawn, strict=True)]
    return [_with_negatives(r, corpus, h, s, t) for r, h, s, t in zip(rows, hard, simple, taught, strict=True)], report


def select(
    scores: np.ndarray, positives: np.ndarray, settings: MiningSettings, random: np.random.Generator
) -> tuple[list[int], Counter[str]]:
    """Choose the hard negatives of one row out of its window.

    Args:
        scores: (w,) scores of the window's candidates, in order of rank, which settles ties.
        positives: (p,) scores of the row's positives, p at least 1.
        settings: Filters, ``range_min``, ``negatives`` and ``sampling``.
        random: For random sampling.

    Returns:
        At most ``settings.negatives`` places in the window, best first, and how many candidates each rule dropped: a
        candidate counts for the first rule that it breaks.
    """
    order = np.argsort(-scores, kind="stable")
    ranked, lowest = scores[order].astype(np.float64), float(positives.min())
    dropped: Counter[str] = Counter()
    left = np.ones(len(order), bool)
    for name, value in settings.filters.items():
        if name == "min_score":
            keep = ranked >= value
        else:
            # Limits from above: a score, or a distance below the lowest positive.
            below = {"absolute_margin": value, "relative_margin": value * abs(lowest)}
            keep = ranked <= (value if name == "max_score" else lowest - below[name])
        dropped[name] = int((left & ~keep).sum())
        left &= keep
    rest = order[left]
    dropped["range_min"] = min(settings.range_min, len(rest))
    rest = rest[settings.range_min :]
    if settings.sampling == "random" and len(rest) > settings.negatives:
        rest = rest[np.sort(random.choice(len(rest), settings.negatives, replace=False))]
    return rest[: settings.negatives].tolist(), dropped


class _Window(NamedTuple):
    documents: np.ndarray  # (w,) int64 rows of the corpus, best first
    scores: np.ndarray  # (w,) float32
    excluded: Counter[str]  # what was left out before the window closed, by reason


def _windows(
    candidates: Candidates, embedder: Embedder, settings: MiningSettings, backend: str
) -> tuple[list[_Window], list[np.ndarray]]:
    """Return each row's window under the encoder, and the cosines of its positives; the same on every rank."""
    rows, corpus = candidates.rows, candidates.corpus
    pools = candidates.hard_pools() if settings.negatives else []
    texts = dict.fromkeys(corpus[d].text for pool, _ in pools for d in pool.documents.tolist())
    texts |= dict.fromkeys(p.text for row in rows for p in row.positives)
    place = {text: i for i, text in enumerate(texts)}
    asked = {text: i for i, text in enumerate(dict.fromkeys(row.query for row in rows))}
    vectors = embedder.documents(list(place))
    queries = embedder.queries(list(asked))

    def search() -> tuple[list[_Window], list[np.ndarray]]:
        windows = [_Window(np.empty(0, np.int64), np.empty(0, np.float32), Counter())] * len(rows)
        for pool, members in pools:
            if not len(pool.documents):
                continue
            index = SessionIndex(
                embedder.encoder.dim, backend, "auto" if backend == "faiss" else embedder.encoder.device
            )
            ids = [corpus[d].id for d in pool.documents.tolist()]
            index.add(ids, _take(vectors, [place[corpus[d].text] for d in pool.documents.tolist()]), ids)
            for start in range(0, len(members), _TILE):
                tile = members[start : start + _TILE]
                batch = queries[[asked[rows[i].query] for i in tile]]
                for i, window in zip(tile, _search(candidates, tile, pool, index, batch, settings.window), strict=True):
                    windows[i] = window
        own = [[place[p.text] for p in row.positives] for row in rows]
        return windows, [cosines(queries[asked[r.query]], vectors, np.array(o)) for r, o in zip(rows, own, strict=True)]

    return once(search, embedder.shared)


def _search(
    candidates: Candidates, tile: Sequence[int], pool: Pool, index: SessionIndex, queries: np.ndarray, size: int
) -> list[_Window]:
    """Search one tile of rows, deep enough that what is excluded costs no candidate."""
    banned = [pool.holds(candidates.banned[i]) for i in tile]
    hits = index.search(queries, size + max(map(len, banned)))
    windows = []
    for i, out, rows, scores in zip(tile, banned, hits.rows, hits.scores, strict=True):
        found = pool.documents[rows]
        kept = np.flatnonzero(~np.isin(found, list(out)))[:size]
        # The ranking was looked at up to the last candidate of a full window, and else to its end.
        end = int(kept[-1]) if len(kept) == size else len(found)
        seen = Counter(candidates.reason(i, d) for d in found[:end].tolist() if d in out)
        windows.append(_Window(found[kept], scores[kept], seen))
    return windows


def _rescored(
    windows: Sequence[_Window], rows: Sequence[Row], corpus: Sequence[Document], teacher: Teacher
) -> tuple[list[_Window], list[np.ndarray]]:
    """Return the windows with a teacher's scores in place of the cosines, and its scores of the positives."""
    own = [[p.text for p in row.positives] for row in rows]
    found = [[corpus[d].text for d in window.documents.tolist()] for window in windows]
    scores = teacher.score([row.query for row in rows], [a + b for a, b in zip(own, found, strict=True)])
    cut = [(s[: len(texts)], s[len(texts) :]) for s, texts in zip(scores, own, strict=True)]
    return [w._replace(scores=s) for w, (_, s) in zip(windows, cut, strict=True)], [s for s, _ in cut]


def _take(vectors: np.ndarray, places: list[int]) -> np.ndarray:
    # One pool, the usual case, lies in one piece: no second copy of millions of vectors.
    whole = places == list(range(places[0], places[0] + len(places)))
    return vectors[places[0] : places[0] + len(places)] if whole else vectors[places]


def _random(seed: int, stream: int, row: Row) -> np.random.Generator:
    return np.random.default_rng([seed, stream, id_key(row.query_id) % 2**63])


def _with_negatives(
    row: Row, corpus: Sequence[Document], hard: Sequence[int], simple: Sequence[int], scores: np.ndarray | None
) -> Row:
    """Return a row with these negatives, and with scores (positives, hard, simple, in this order) or none."""
    kinds = ["hard"] * len(hard) + ["simple"] * len(simple)
    found = [Passage(corpus[d].id, corpus[d].text, kind) for d, kind in zip([*hard, *simple], kinds, strict=True)]
    passages = [*row.positives, *found]
    given = [None] * len(passages) if scores is None else [round(float(score), 6) for score in scores]
    passages = [replace(passage, score=score) for passage, score in zip(passages, given, strict=True)]
    n = len(row.positives)
    return replace(row, positives=tuple(passages[:n]), negatives=tuple(passages[n:]))
