"""Mindscapes: chunks, sessions with their summaries, and how they are made and kept."""

from mia_serve.mindscape.chunking import TextChunk, chunk_text
from mia_serve.mindscape.extractive import book_summaries, extractive_summaries
from mia_serve.mindscape.keywords import keyword_summaries
from mia_serve.mindscape.mindscape import WINDOW, Mindscape, split_windows
from mia_serve.mindscape.records import Book, Chunk, ConversationSession, Session

__all__ = [
    "WINDOW",
    "Book",
    "Chunk",
    "ConversationSession",
    "Mindscape",
    "Session",
    "TextChunk",
    "book_summaries",
    "chunk_text",
    "extractive_summaries",
    "keyword_summaries",
    "split_windows",
]
