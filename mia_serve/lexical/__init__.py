"""Lexical search: named analyzers (Chinese, Japanese and Korean too) and BM25."""

from mia_serve.lexical.analyzers import ANALYZERS, Analyzer, get_analyzer
from mia_serve.lexical.bm25 import BM25Index, LexicalHits

__all__ = ["ANALYZERS", "Analyzer", "BM25Index", "LexicalHits", "get_analyzer"]
