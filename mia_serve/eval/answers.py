"""How well a short answer matches its references: SQuAD's exact match and token F1 (Rajpurkar et al., 2016).

Chinese is written without spaces, so there each character counts as a word, as in the evaluation of CMRC 2018 (Cui et
al., 2019); Latin words and numbers in between stay whole.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_HAN = re.compile(r"([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
_WIDE_PUNCTUATION = re.compile(
    r"[\u2014\u2018-\u201f\u2026\u3000-\u303f\uff00-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65\u00b7]"
)


def normalise_answer(text: str, language: str = "en") -> str:
    """Lower the case, drop ASCII punctuation and English articles, and squeeze the spaces, as SQuAD's script does.

    Args:
        text: An answer.
        language: With "zh" Chinese punctuation is dropped too, and every Chinese character becomes a word.
    """
    text = text.lower().translate(_NO_PUNCTUATION)
    if language == "zh":
        text = _HAN.sub(r" \1 ", _WIDE_PUNCTUATION.sub(" ", text))
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, references: Sequence[str], language: str = "en") -> float:
    """Return 1 if the normalised prediction equals a normalised reference, else 0."""
    found = normalise_answer(prediction, language)
    return float(any(found == normalise_answer(reference, language) for reference in references))


def answer_f1(prediction: str, references: Sequence[str], language: str = "en") -> float:
    """Return the best F1 of normalised words over the references; between empty answers it is their exact match."""
    found = normalise_answer(prediction, language)
    return max((_f1(found, normalise_answer(reference, language)) for reference in references), default=0.0)


def _f1(prediction: str, reference: str) -> float:
    found, wanted = prediction.split(), reference.split()
    shared = sum((Counter(found) & Counter(wanted)).values())
    if not found or not wanted:
        return float(found == wanted)
    return 2 * shared / (len(found) + len(wanted))
