"""TREC run and qrels files, so that any other evaluation tool can check the numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

import numpy as np

from mia_serve.eval.study_report import Study

QRELS = "qrels.txt"


def trec_files(study: Study) -> dict[str, str]:
    """Write a study out as TREC files: name -> content, a run a method and one ``qrels.txt``.

    trec_eval sorts a run by score itself and breaks ties by descending id, so the scores are made strictly decreasing
    in its 32-bit floats (``decreasing``): every tool then sees the ranking that was measured. A document is
    ``conversation:session``.
    """
    questions = [(_field(question.id), question) for question in study.questions]
    qrels = (
        f"{name} 0 {_field(f'{question.conversation}:{session}')} 1\n"
        for name, question in questions
        for session in question.gold
    )
    files = {QRELS: "".join(qrels)}
    for row in study.rows:
        tag = re.sub(r"[^\w.+-]", "_", row.key)
        lines = []
        for name, question in questions:
            scores = decreasing(question.ranked_scores[row.key])
            lines += [
                f"{name} Q0 {_field(f'{question.conversation}:{session}')} {rank} {score:.9g} {tag}\n"
                for rank, (session, score) in enumerate(zip(question.rankings[row.key], scores, strict=True), 1)
            ]
        files[f"{tag}.run"] = "".join(lines)
    return files


def decreasing(scores: np.ndarray | Sequence[float]) -> np.ndarray:
    """Lower equal scores of a descending ranking to the next 32-bit float, one after another, (n,) float32."""
    values = np.array(scores, np.float32)
    for i in range(1, len(values)):
        if values[i] >= values[i - 1]:
            values[i] = np.nextafter(values[i - 1], np.float32(-np.inf))
    return values


def _field(text: str) -> str:
    """Write white space, which separates the fields of a line, as in a URL; different ids stay different."""
    return re.sub(r"[\s%]", lambda found: quote(found[0]), text)
