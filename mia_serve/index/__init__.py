"""Exact vector search over chunks and their sessions."""

from mia_serve.index.faiss_flat import GpuOptions
from mia_serve.index.results import Hits, SessionHits, SessionScores
from mia_serve.index.session_index import SessionIndex
from mia_serve.index.writer import IndexWriter

__all__ = ["GpuOptions", "Hits", "IndexWriter", "SessionHits", "SessionIndex", "SessionScores"]
