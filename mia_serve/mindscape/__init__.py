"""Mindscapes: chunks, sessions with their summaries, and how they are made and kept."""

from mia_serve.mindscape.append import append_chunks, append_text
from mia_serve.mindscape.building import build_mindscape
from mia_serve.mindscape.chunking import TextChunk, chunk_text
from mia_serve.mindscape.edit import remove_book, remove_chunks, replace_texts
from mia_serve.mindscape.extractive import book_summaries, extractive_summaries
from mia_serve.mindscape.keywords import keyword_summaries
from mia_serve.mindscape.mindscape import WINDOW, Mindscape, Summarise, book_windows, split_windows
from mia_serve.mindscape.records import Book, BookFacts, Chunk, ConversationSession, Node, Session, Tail, Window
from mia_serve.mindscape.series import group_books, select_books
from mia_serve.mindscape.sources import read_sources

__all__ = [
    "WINDOW",
    "Book",
    "BookFacts",
    "Chunk",
    "ConversationSession",
    "Mindscape",
    "Node",
    "Session",
    "Summarise",
    "Tail",
    "TextChunk",
    "Window",
    "append_chunks",
    "append_text",
    "book_summaries",
    "book_windows",
    "build_mindscape",
    "chunk_text",
    "extractive_summaries",
    "group_books",
    "keyword_summaries",
    "read_sources",
    "remove_book",
    "remove_chunks",
    "replace_texts",
    "select_books",
    "split_windows",
]
