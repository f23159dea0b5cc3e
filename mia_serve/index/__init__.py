"""Exact vector search over chunks and their sessions."""

from mia_serve.index.results import Hits, SessionHits
from mia_serve.index.session_index import SessionIndex

__all__ = ["Hits", "SessionHits", "SessionIndex"]
