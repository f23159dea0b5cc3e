"""Text to terms: named analyzers, the same one for documents and for queries.

An index stores the name and the version of its analyzer, a digest of what the analyzer does, so that an index is never
searched with terms cut in another way.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tempfile
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mia_serve.core.errors import MiaError

ANALYZERS = ("study", "plain", "cjk", "jieba")

# The study's regex is ASCII: "café" gives "caf". Its list has 50 function words; the 21 that are not here have one or
# two letters and go by the rule on length.
_STUDY_TERM = re.compile(r"[a-z0-9][a-z0-9\-_']{1,30}")
_STUDY_SHORTEST = 3
# fmt: off
_STUDY_STOP = frozenset({
    "all", "and", "any", "are", "been", "but", "did", "does", "for", "from", "has", "have", "how", "not", "our", "that",
    "the", "this", "was", "what", "when", "where", "who", "why", "with", "yes", "you", "your", "yours",
})
# fmt: on

_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Hiragana and katakana with their marks, and Korean syllables and letters (half-width ones went by NFKC).
_KANA_HANGUL = "\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u1100-\u11ff\u3131-\u318e\uac00-\ud7ff"
# Vowel signs, points and viramas (Mn, Mc), all below the ideographs of plane 2; \w has none of them.
_MARKS = "".join(c for c in map(chr, range(0x20000)) if unicodedata.category(c) in ("Mn", "Mc"))


def _word(letter: str) -> str:
    """Return the pattern of a word: letters, and the marks that follow a letter of it."""
    return rf"{letter}+(?:[{_MARKS}]+{letter}*)*"


_WORD = re.compile(_word(r"\w"))
_OTHER_WORD = _word(rf"(?:(?![{_HAN}{_KANA_HANGUL}])\w)")
_CJK_OR_WORD = re.compile(rf"(?P<run>[{_HAN}{_KANA_HANGUL}]+)|{_OTHER_WORD}")
_HAN_OR_CJK_OR_WORD = re.compile(rf"(?P<han>[{_HAN}]+)|(?P<run>[{_KANA_HANGUL}]+)|{_OTHER_WORD}")
# These choose a shape and would cut a word, or make two of it: variation selectors, the joiner, and the non-joiner
# after a virama (after a letter, as in Persian, it stands between the parts of a compound).
_SHAPING = re.compile(rf"[\u180b-\u180d\u180f\u200c\u200d\ufe00-\ufe0f\U000e0100-\U000e01ef](?<![^{_MARKS}]\u200c)")

#: Analysed to make an analyzer's version: a change in what comes out of it is another version.
_PROBE = (
    "The OvertimeService wasn't re-started by user_7 at 10:45, yes? Café ＡＢＣ１２３ naïve I've x y2 "
    "华山是一个很好旅游景点。她在2024年去了臺北101 東京タワーへ行きました ﾃｽﾄ 나는 서울에 갔다 "
    "हिन्दी की कु ශ්\u200dරී שָׁלוֹם مَرْحَبًا ที่นี่ ಸಾಫ್ಟ್\u200cವೇರ್ می\u200cخواهم"
)


@dataclass(frozen=True)
class Analyzer:
    """Cut a text into terms, in order and with repeats.

    Attributes:
        name: One of ``ANALYZERS``.
        terms: The function that does it.
    """

    name: str
    terms: Callable[[str], list[str]]

    def __call__(self, text: str) -> list[str]:
        """Return the terms of a document or a query."""
        return self.terms(text)

    @property
    def version(self) -> str:
        """Digest of the analyzer's behaviour: its rules and the terms of a text in several scripts (16 hex digits)."""
        return _version(self)


@functools.cache
def get_analyzer(name: str) -> Analyzer:
    r"""Return a named analyzer.

    - ``study``: the English one of the chat-memory study (arXiv 2606.04194): ASCII letters and digits with ``- _ '``
      inside, lower case, at least three characters, 50 function words dropped, no stemming. Blind to other scripts.
    - ``plain``: words (``\w`` and combining marks) of any script that writes spaces between them, after NFKC (so that
      full-width letters and composed accents agree) and in lower case, nothing dropped. A pointed word (Hebrew,
      Arabic) is not the same term as the bare one.
    - ``cjk``: as ``plain``, but Chinese, Japanese and Korean runs become single characters and pairs of neighbours; a
      query of one character finds it.
    - ``jieba``: as ``cjk``, but Chinese is cut into words by jieba's dictionary (search mode, so that parts of long
      words are terms too). Needs the package jieba.

    Raises:
        MiaError: No analyzer of that name, or jieba is not installed.
    """
    if name not in ANALYZERS:
        raise MiaError(f"no analyzer '{name}': choose from {', '.join(ANALYZERS)}")
    if name == "jieba":
        return Analyzer(name, functools.partial(_jieba_terms, _jieba_cutter()))
    return Analyzer(name, {"study": _study_terms, "plain": _plain_terms, "cjk": _cjk_terms}[name])


def _study_terms(text: str) -> list[str]:
    terms = _STUDY_TERM.findall(text.lower())
    return [term for term in terms if len(term) >= _STUDY_SHORTEST and term not in _STUDY_STOP]


def _plain_terms(text: str) -> list[str]:
    return _WORD.findall(_normal(text))


def _cjk_terms(text: str) -> list[str]:
    terms: list[str] = []
    for match in _CJK_OR_WORD.finditer(_normal(text)):
        terms.extend(_characters_and_pairs(match[0]) if match["run"] else [match[0]])
    return terms


def _jieba_terms(cut: Callable[..., Iterator[str]], text: str) -> list[str]:
    terms: list[str] = []
    for match in _HAN_OR_CJK_OR_WORD.finditer(_normal(text)):
        if match["han"]:
            terms.extend(cut(match[0]))
        else:
            terms.extend(_characters_and_pairs(match[0]) if match["run"] else [match[0]])
    return terms


def _normal(text: str) -> str:
    return _SHAPING.sub("", unicodedata.normalize("NFKC", text).lower())


def _characters_and_pairs(run: str) -> list[str]:
    return [*run, *(run[i : i + 2] for i in range(len(run) - 1))]


def _jieba_cutter() -> Any:
    try:
        with warnings.catch_warnings():  # of jieba's own source, at its first import
            warnings.simplefilter("ignore")
            import jieba
    except ImportError:
        raise MiaError(
            "the analyzer 'jieba' needs the package jieba: pip install 'mia-retrieval[zh]', or choose cjk"
        ) from None
    jieba.setLogLevel("WARNING")
    # An instance of our own: words that an application adds to jieba's global one would change our terms. Its cache
    # goes to a private folder, for the default place is one file in /tmp that any user can have written.
    tokenizer = jieba.Tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.tmp_dir = folder
        tokenizer.initialize()
    return tokenizer.cut_for_search


@functools.cache
def _version(analyzer: Analyzer) -> str:
    rules: list[Any] = [analyzer(_PROBE)]
    if analyzer.name == "study":
        rules += [_STUDY_TERM.pattern, _STUDY_SHORTEST, sorted(_STUDY_STOP)]
    if analyzer.name == "jieba":
        import jieba

        rules.append(jieba.__version__)
    return hashlib.sha256(json.dumps(rules).encode()).hexdigest()[:16]
