"""BM25 over documents with external ids; the term weights are bm25s's (Lù, arXiv 2407.03618)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.core.storage import recover, sha256, write_aside
from mia_serve.lexical.analyzers import get_analyzer

FORMAT = 1
_META = "mia_bm25.json"
_BLOCK = 32  # columns that one maximum stands for while the best are looked for


class LexicalHits(NamedTuple):
    """Documents that share a term with the query, best first.

    Attributes:
        ids: One list a query, at most k long; empty where nothing matches.
        scores: Their scores, above 0.
    """

    ids: list[list[str]]
    scores: list[list[float]]


class _Postings(NamedTuple):
    """Term weights as bm25s lays them out: the documents of term t are ``documents[starts[t]:starts[t + 1]]``."""

    weights: np.ndarray
    documents: np.ndarray
    starts: np.ndarray


class _Meta(NamedTuple):
    """Describe a saved index; every other file of its folder is in ``sha256``."""

    format: int
    analyzer: str
    analyzer_version: str
    k1: float
    b: float
    unique_terms: bool
    documents: int
    sha256: dict[str, str]


class BM25Index:
    """Score texts against queries by BM25, with statistics over exactly these texts. Immutable.

    score(q, D) = sum over terms t of q of idf(t) * tf / (tf + k1 * (1 - b + b * |D| / mean |D|)),
    idf(t) = ln(1 + (N - df + 0.5) / (df + 0.5)): Lucene's form, which leaves out the factor (k1 + 1) that other texts
    have in the numerator (multiply by it for their scale; the order of documents is the same). Sums are float64,
    rounded once to float32, so that documents that should tie do, and do not depend on the order of a query's words.

    Args:
        ids: Id of each document, unique, (N,).
        texts: Documents, (N,); an empty one counts in the statistics and matches nothing.
        analyzer: Name of the analyzer for documents and queries, see ``get_analyzer``.
        k1: How slowly repeats of a term saturate, 0 or more.
        b: How much long documents are held back, in [0, 1].
        unique_terms: Count each distinct term of a query once, as the chat-memory study does. False: a term that a
            query repeats counts each time, as in classic BM25.

    Raises:
        MiaError: Lengths differ, an id or a text is not a string, an id comes twice, a parameter is out of range, or
            as ``get_analyzer``.
    """

    def __init__(
        self,
        ids: Iterable[str],
        texts: Iterable[str],
        analyzer: str = "study",
        k1: float = 1.5,
        b: float = 0.75,
        unique_terms: bool = True,
    ):
        ids, texts = _strings(ids, "id", "ids"), _strings(texts, "text", "texts")
        if len(ids) != len(texts):
            raise MiaError(f"{len(ids)} ids but {len(texts)} texts; give one id for each text")
        _check_parameters(ids, k1, b)
        self.ids = ids
        self.analyzer = get_analyzer(analyzer)
        self.k1, self.b, self.unique_terms = float(k1), float(b), unique_terms
        # Numbered in order of appearance, so that equal texts give equal files (bm25s numbers terms by a salted hash).
        vocabulary: defaultdict[str, int] = defaultdict()
        vocabulary.default_factory = vocabulary.__len__
        documents = [[vocabulary[term] for term in self.analyzer(text)] for text in texts]
        self._vocabulary = dict(vocabulary)
        order = self._arrange()
        self._postings = _weigh([documents[column] for column in order], len(self._vocabulary), self.k1, self.b)

    def __len__(self) -> int:
        return len(self.ids)

    def scores(self, queries: Iterable[str]) -> np.ndarray:
        """Score every document for each query, (n, N) float32, columns as ``ids``; 0 where no term matches.

        Raises:
            MiaError: ``queries`` is one string, or a query is not a string.
        """
        queries = _strings(queries, "query", "queries")
        table = np.zeros((len(queries), len(self.ids)), dtype=np.float32)
        for row, query in enumerate(queries):
            table[row] = self._score(query)[self._place]
        return table

    def search(self, queries: Iterable[str], k: int) -> LexicalHits:
        """Find the k best documents for each query; ties by ascending id.

        Only documents that share a term with the query come back, so there may be fewer than k, or none.

        Raises:
            MiaError: ``k`` is below 1, ``queries`` is one string, or a query is not a string.
        """
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise MiaError(f"k is {k!r}; it must be a whole number of 1 or more")
        found = LexicalHits([], [])
        for query in _strings(queries, "query", "queries"):
            scores = self._score(query)
            best = _matching(scores, int(k))
            best = best[np.argsort(-scores[best], kind="stable")[:k]]
            found.ids.append([self._sorted_ids[column] for column in best.tolist()])
            found.scores.append(scores[best].tolist())
        return found

    def save(self, path: str | Path) -> None:
        """Write the index to a folder, replacing an index that is there; a killed writer leaves the old one.

        Only JSON and numpy arrays, no pickle. The analyzer goes by name and version.

        Raises:
            MiaError: ``path`` holds something else than a BM25 index.
        """
        path = Path(path).absolute()
        recover(path)
        if path.exists() and not (path / _META).is_file() and (not path.is_dir() or any(path.iterdir())):
            raise MiaError(f"{path} exists and is no BM25 index; give a new folder, or remove it yourself")
        with write_aside(path) as folder:
            for name, array in self._postings._asdict().items():
                np.save(folder / f"{name}.npy", array, allow_pickle=False)
            for name, value in (("ids", self.ids), ("vocabulary", list(self._vocabulary))):
                (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
            meta = _Meta(
                format=FORMAT,
                analyzer=self.analyzer.name,
                analyzer_version=self.analyzer.version,
                k1=self.k1,
                b=self.b,
                unique_terms=self.unique_terms,
                documents=len(self.ids),
                sha256={file.name: sha256(file) for file in sorted(folder.iterdir())},
            )
            (folder / _META).write_text(json.dumps(meta._asdict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> BM25Index:
        """Open a saved index.

        Raises:
            FileNotFoundError: No BM25 index at ``path``.
            MiaError: It is damaged, of another format, or its analyzer cuts text otherwise than today's.
        """
        path = Path(path)
        recover(path.absolute())
        meta = _read_meta(path)
        analyzer = get_analyzer(meta.analyzer)
        if analyzer.version != meta.analyzer_version:
            raise MiaError(
                f"BM25 index {path} was made by version {meta.analyzer_version} of the analyzer '{analyzer.name}', "
                f"installed is {analyzer.version}: its terms are cut otherwise; build the index again"
            )
        index = cls.__new__(cls)
        index.analyzer = analyzer
        index.k1, index.b, index.unique_terms = meta.k1, meta.b, meta.unique_terms
        index.ids = json.loads((path / "ids.json").read_text(encoding="utf-8"))
        terms = json.loads((path / "vocabulary.json").read_text(encoding="utf-8"))
        index._vocabulary = {term: number for number, term in enumerate(terms)}
        index._postings = _Postings(*(np.load(path / f"{name}.npy", allow_pickle=False) for name in _Postings._fields))
        index._arrange()
        return index

    def _arrange(self) -> list[int]:
        """Lay documents out by ascending id, so that a stable sort breaks ties by id; return the order."""
        order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
        self._sorted_ids = [self.ids[column] for column in order]
        self._place = np.empty(len(order), dtype=np.int64)
        self._place[order] = np.arange(len(order))
        return order

    def _score(self, query: str) -> np.ndarray:
        """Score every document for one query, (N,) float32, by ascending id."""
        known = [self._vocabulary[term] for term in self.analyzer(query) if term in self._vocabulary]
        weights, documents, starts = self._postings
        total = np.zeros(len(self.ids))
        # In order of term number, not of the query: a float sum depends on the order of its terms.
        for term in sorted(set(known) if self.unique_terms else known):
            part = slice(starts[term], starts[term + 1])
            np.add.at(total, documents[part], weights[part])
        return total.astype(np.float32)


def _weigh(documents: list[list[int]], terms: int, k1: float, b: float) -> _Postings:
    """Let bm25s compute the weight of each term in each document; documents are lists of term numbers."""
    if not terms:
        return _Postings(np.zeros(0), np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64))
    import bm25s  # late: it brings in numba where that is installed

    bm25 = bm25s.BM25(k1=k1, b=b, method="lucene", dtype="float64", int_dtype="int32", backend="numpy")
    built = bm25.build_index_from_ids(list(range(terms)), documents, show_progress=False)
    return _Postings(built["data"], built["indices"], built["indptr"])


def _matching(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the columns above 0 that are as good as the k-th best, ties to it included, in ascending order.

    The k-th best of the blocks' maxima is met by k columns at least, so nothing below it can be among the k best: one
    fast pass instead of a partition of all scores.
    """
    bound = 0.0
    maxima = scores[: len(scores) // _BLOCK * _BLOCK].reshape(_BLOCK, -1).max(axis=0)
    if len(maxima) > k:
        bound = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
    found = np.flatnonzero(scores >= bound if bound > 0 else scores > 0)
    if len(found) > k:
        kept = scores[found]
        found = found[kept >= np.partition(kept, len(kept) - k)[len(kept) - k]]
    return found


def _strings(values: Iterable[str], one: str, several: str) -> list[str]:
    """Return values as a list if all are strings; their names, singular and plural, are for the message."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        given = "one string" if isinstance(values, str) else repr(values)
        raise MiaError(f"{several} is {given}; give a list of {several}")
    found = list(values)
    for position, value in enumerate(found):
        if not isinstance(value, str):
            raise MiaError(f"{one} {position} is {value!r:.60}, not a string; give a string for each of the {several}")
    return found


def _check_parameters(ids: list[str], k1: float, b: float) -> None:
    if not (isinstance(k1, Real) and 0 <= k1 < np.inf):
        raise MiaError(f"k1 is {k1!r}; it must be a number of 0 or more (1.5 by default)")
    if not (isinstance(b, Real) and 0 <= b <= 1):
        raise MiaError(f"b is {b!r}; it must be a number in [0, 1] (0.75 by default)")
    seen: set[str] = set()
    for identifier in ids:
        if identifier in seen:
            raise MiaError(f"id {identifier!r} comes twice; ids must be unique")
        seen.add(identifier)


def _read_meta(path: Path) -> _Meta:
    """Read the description of a saved index after checking every file against it."""
    if not (path / _META).is_file():
        raise FileNotFoundError(f"no BM25 index at {path}")
    damaged = MiaError(f"BM25 index {path} is damaged; build it again")
    try:
        fields = json.loads((path / _META).read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise MiaError(
                f"BM25 index {path} has format {fields['format']}, this version reads {FORMAT}; build it again"
            )
        meta = _Meta(**fields)
    except MiaError:
        raise
    except (ValueError, KeyError, TypeError):
        raise damaged from None
    for name, digest in meta.sha256.items():
        if not (path / name).is_file() or sha256(path / name) != digest:
            raise damaged
    return meta
