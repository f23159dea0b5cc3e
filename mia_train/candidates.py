"""Who may be a negative of whom: the corpus, its groups and haystacks, and what each row must leave out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mia_serve.core import MiaError
from mia_train.rows import Row, text_key


class Document(NamedTuple):
    """One entry of the corpus.

    Attributes:
        id: Unique in the corpus.
        text: What is encoded.
        group: Book or conversation; simple negatives share a group with the positives.
        haystack: The collection that it is searched in; a row looks into its own only.
    """

    id: str
    text: str
    group: str = ""
    haystack: str = ""


class Pool:
    """The documents that a query may draw from: of equal texts the one with the lowest id, in order of id.

    Attributes:
        of_key: Text key -> row of the corpus.
    """

    def __init__(self, documents: Sequence[int], corpus: Sequence[Document], keys: Sequence[int]) -> None:
        self.of_key: dict[int, int] = {}
        for document in sorted(documents, key=lambda d: corpus[d].id):
            self.of_key.setdefault(keys[document], document)

    @cached_property
    def documents(self) -> np.ndarray:
        """(n,) int64 rows of the corpus."""
        return np.fromiter(self.of_key.values(), np.int64, len(self.of_key))

    def holds(self, keys: set[int]) -> set[int]:
        """Return the pool's documents with one of these text keys, as rows of the corpus."""
        return {self.of_key[key] for key in keys if key in self.of_key}


class Candidates:
    """What each row may draw from, and what it must not.

    Args:
        rows: Training rows.
        corpus: Where negatives come from.
        haystacks: The haystack of each row; None: "" for all.
        within_group: Whether hard negatives come only from the groups of the positives.

    Attributes:
        keys: Text key of each document.
        groups: Groups of each row's positives in the corpus; else the row's own, where the corpus has it; else none.
        banned: For each row the text keys of its positives, and of those of rows with the same query and group.
            The group has a say because one question may be put to many books ("Who is the hero?"): there the other
            book's answer is the best negative for an encoder that reads a signature.

        foreign: Rows none of whose positives is in their haystack, by text.

    Raises:
        MiaError: Ids of the corpus repeat, or it has no groups though they are asked for.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        corpus: Sequence[Document],
        haystacks: Sequence[str] | None = None,
        within_group: bool = False,
    ) -> None:
        if haystacks is not None and len(haystacks) != len(rows):
            raise MiaError(f"{len(rows)} rows but {len(haystacks)} haystacks; give one a row")
        self.rows, self.corpus, self.within_group = rows, corpus, within_group
        self.haystacks = haystacks if haystacks is not None else [""] * len(rows)
        self.keys = [text_key(document.text) for document in corpus]
        self.row_of = {document.id: i for i, document in enumerate(corpus)}
        if len(self.row_of) < len(corpus):
            twice = next(d.id for i, d in enumerate(corpus) if self.row_of[d.id] != i)
            raise MiaError(f"corpus: id {twice!r} occurs twice; give every document its own")
        if within_group and not any(document.group for document in corpus):
            raise MiaError("within_group needs groups; give a corpus whose documents have a 'group', or leave it out")
        self._members: dict[tuple[str, str], list[int]] = {}
        for i, document in enumerate(corpus):
            self._members.setdefault((document.haystack, document.group), []).append(i)
        self._pools: dict[tuple[str, tuple[str, ...] | None], Pool] = {}
        self._find_positives()
        self.groups = [self._groups_of(i) for i in range(len(rows))]
        self.foreign = sum(
            self.pool(hay, None).of_key.keys().isdisjoint(text_key(p.text) for p in row.positives)
            for row, hay in zip(rows, self.haystacks, strict=True)
        )

    def _find_positives(self) -> None:
        self._ids = [{p.id for p in row.positives} for row in self.rows]
        self._positives: list[set[int]] = []
        same: dict[tuple[str, str, int], set[int]] = {}
        asked = [(row.group, hay, text_key(row.query)) for row, hay in zip(self.rows, self.haystacks, strict=True)]
        for row, ids, question in zip(self.rows, self._ids, asked, strict=True):
            # A positive's text in the corpus may differ from the row's (another cut of it): both are meant.
            keys = {text_key(p.text) for p in row.positives}
            keys |= {self.keys[self.row_of[i]] for i in ids if i in self.row_of}
            self._positives.append(keys)
            same.setdefault(question, set()).update(keys)
        self.banned = [same[question] for question in asked]

    def _groups_of(self, i: int) -> tuple[str, ...]:
        row, haystack = self.rows[i], self.haystacks[i]
        found = [self.corpus[self.row_of[p.id]] for p in row.positives if p.id in self.row_of]
        groups = {document.group for document in found if document.haystack == haystack}
        if not groups:
            groups = {self.corpus[d].group for d in self.pool(haystack, None).holds(self._positives[i])}
        for group in (row.group, ""):
            if not groups and (haystack, group) in self._members:
                groups = {group}
        return tuple(sorted(groups))

    def pool(self, haystack: str, groups: tuple[str, ...] | None) -> Pool:
        """Return the pool of some groups of a haystack, or of all of it (None)."""
        if (haystack, groups) not in self._pools:
            if groups is None:
                parts = [members for (h, _), members in self._members.items() if h == haystack]
            else:
                parts = [self._members.get((haystack, group), []) for group in groups]
            self._pools[haystack, groups] = Pool([d for part in parts for d in part], self.corpus, self.keys)
        return self._pools[haystack, groups]

    def hard_pools(self) -> list[tuple[Pool, list[int]]]:
        """Return the pools that hard negatives come from, each with the rows that search it."""
        found: dict[tuple[str, tuple[str, ...] | None], list[int]] = {}
        for i, haystack in enumerate(self.haystacks):
            found.setdefault((haystack, self.groups[i] if self.within_group else None), []).append(i)
        return [(self.pool(*key), rows) for key, rows in found.items()]

    def simple(self, i: int, count: int, taken: set[int], random: np.random.Generator) -> list[int]:
        """Draw documents evenly from a row's groups, without what it must leave out and what is taken.

        Args:
            i: The row.
            count: How many; fewer come back where the groups hold fewer.
            taken: Rows of the corpus; their texts are taken too.
            random: Draws.
        """
        pool = self.pool(self.haystacks[i], self.groups[i])
        size = len(pool.documents)
        if not count or not size:
            return []
        out = pool.holds(self.banned[i] | {self.keys[document] for document in taken})
        enough = min(size, count + len(out))  # at most so many fall away
        drawn = pool.documents[random.choice(size, enough, replace=False)].tolist()
        return [document for document in drawn if document not in out][:count]

    def reason(self, i: int, document: int) -> str:
        """Say why a document that row ``i`` must leave out is left out."""
        if self.corpus[document].id in self._ids[i]:
            return "positive_id"
        return "positive_text" if self.keys[document] in self._positives[i] else "same_query"

    def repeated_texts(self) -> int:
        """Return how many documents have the text of another of their haystack, beyond the first."""
        return len(self.corpus) - len({(d.haystack, key) for d, key in zip(self.corpus, self.keys, strict=True)})
