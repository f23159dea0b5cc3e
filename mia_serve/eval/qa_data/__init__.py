"""Question-answering benchmarks of the papers: books, questions with references, gold evidence where it is known."""

from __future__ import annotations

from mia_serve.eval.qa_data.base import QaBenchmark, QaBook, QaQuestion, QaSource, book_gold, gold_chunk_ids
from mia_serve.eval.qa_data.evidence import write_questions
from mia_serve.eval.qa_data.load import QA_BENCHMARKS, load_qa
from mia_serve.eval.qa_data.trivial import Constant, constant_answers

__all__ = [
    "QA_BENCHMARKS",
    "Constant",
    "QaBenchmark",
    "QaBook",
    "QaQuestion",
    "QaSource",
    "book_gold",
    "constant_answers",
    "gold_chunk_ids",
    "load_qa",
    "write_questions",
]
