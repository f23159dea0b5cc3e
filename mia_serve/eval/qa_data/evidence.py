"""Silver evidence of a benchmark: the questions to make it from, and what was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mia_serve.core import MiaError
from mia_serve.eval.qa_data.base import QaBenchmark, QaQuestion
from mia_serve.eval.qa_data.files import name_of, read_rows, text_of

#: A row is (ids, texts) of the chunks that answer a question.
Evidence = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]


def read_evidence(path: str | Path) -> Evidence:
    """Read the rows that ``mia-train silver`` writes: ``query_id`` and ``positives``, a list of ``{id, text}``.

    Raises:
        FileNotFoundError: There is no such file.
        MiaError: A row is wrong, or a question has two.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of silver evidence; give rows as `mia-train silver` writes them")
    evidence: Evidence = {}
    for where, row in read_rows(path):
        question, positives = name_of(row, "query_id", where), row.get("positives")
        if question in evidence:
            raise MiaError(f"{where}: question {question!r} has a row already; keep one")
        if not isinstance(positives, list) or not all(isinstance(passage, dict) for passage in positives):
            raise MiaError(f"{where}: 'positives' is no list of {{id, text}}")
        unique = {text_of(p, "id", where): text_of(p, "text", where) for p in positives}
        evidence[question] = (tuple(unique), tuple(unique.values()))
    if not evidence:
        raise MiaError(f"{path}: no rows; give rows as `mia-train silver` writes them")
    return evidence


def apply_evidence(
    questions: list[QaQuestion], evidence: Evidence, path: str | Path
) -> tuple[list[QaQuestion], Mapping[str, int]]:
    """Give each question the gold of its row, in place of what its source marks.

    Returns:
        The questions, and how many rows there are, were used, and are of unknown questions.

    Raises:
        MiaError: No row is of a question here, or a gold chunk is of another book than its question.
    """
    known = {question.id for question in questions}
    used = known & set(evidence)
    if not used:
        raise MiaError(
            f"{path}: none of its {len(evidence)} rows is of a question here (such as {next(iter(evidence))!r}); make "
            "it from the questions of this benchmark and split"
        )
    taken = []
    for question in questions:
        if question.id in used and evidence[question.id][0]:
            ids, texts = evidence[question.id]
            wrong = next((i for i in ids if not i.startswith(f"{question.book}:")), None)
            if wrong is not None:
                raise MiaError(
                    f"{path}: question {question.id!r} is about {question.book!r}, its gold chunk {wrong!r} is not of "
                    "that book; ids of chunks begin with their book"
                )
            question = replace(question, gold_spans=None, gold_chunks=ids, gold_texts=texts)
        taken.append(question)
    return taken, {"rows": len(evidence), "used": len(used), "unknown": len(evidence) - len(used)}


def write_questions(benchmark: QaBenchmark, path: str | Path) -> int:
    """Write the questions as ``mia-train silver`` reads them: ``{"id", "question", "answer", "book"}`` a line.

    The answer is the first reference, the text of the right option, or TRUE or FALSE.

    Returns:
        How many were written.
    """
    lines = []
    for question in benchmark.questions:
        answer = question.label
        if question.answers:
            answer = question.answers[0]
        elif question.options:
            answer = question.options[ord(question.label) - ord("A")]
        row = {"id": question.id, "question": question.text, "answer": answer, "book": question.book}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    Path(path).write_text("".join(lines), encoding="utf-8")
    return len(lines)
