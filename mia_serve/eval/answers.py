"""How well a short answer matches its references: SQuAD's exact match and token F1 (Rajpurkar et al., 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower the case, drop ASCII punctuation and English articles, and squeeze the spaces, as SQuAD's script does."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the normalised prediction equals a normalised reference, else 0."""
    found = normalise_answer(prediction)
    return float(any(found == normalise_answer(reference) for reference in references))


def answer_f1(prediction: str, references: Sequence[str]) -> float:
    """Return the best F1 of normalised words over the references; between empty answers it is their exact match."""
    return max((_f1(normalise_answer(prediction), normalise_answer(r)) for r in references), default=0.0)


def _f1(prediction: str, reference: str) -> float:
    found, wanted = prediction.split(), reference.split()
    shared = sum((Counter(found) & Counter(wanted)).values())
    if not found or not wanted:
        return float(found == wanted)
    return 2 * shared / (len(found) + len(wanted))
