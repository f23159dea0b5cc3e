"""Strings and numbers that requests may hold: strings are bounded and without what no text has."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

QUERY_CHARACTERS = 32_768
SUMMARY_CHARACTERS = 20_000
CHUNK_CHARACTERS = 200_000
BOOK_CHARACTERS = 50_000_000  # the limit of the body is lower in practice
NAME_CHARACTERS = 256


def _no_nul(text: str) -> str:
    place = text.find("\x00")
    if place >= 0:
        raise ValueError(f"a NUL character at position {place}: remove it")
    return text


def _no_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("an empty text: give at least one character that is not white space")
    return text


def _whole(number: Any) -> Any:
    """Let 3.0 through, which is a whole number in JSON; a strict integer takes no float, and neither "3" nor true."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


WHOLE = BeforeValidator(_whole)
"""Goes behind the bounds of a strict integer, so that the OpenAPI still tells them."""

# The patterns say in the OpenAPI what the checks above refuse with a plainer message.
_ANY = Field(json_schema_extra={"pattern": r"^[^\x00]*$"})
_FILLED = Field(json_schema_extra={"pattern": r"^[^\x00]*[^\s\x00][^\x00]*$"})

Query = Annotated[
    str, StringConstraints(min_length=1, max_length=QUERY_CHARACTERS), AfterValidator(_no_nul),
    AfterValidator(_no_blank), _FILLED,
]  # fmt: skip
Summary = Annotated[
    str, StringConstraints(min_length=1, max_length=SUMMARY_CHARACTERS), AfterValidator(_no_nul),
    AfterValidator(_no_blank), _FILLED,
]  # fmt: skip
ChunkText = Annotated[
    str, StringConstraints(min_length=1, max_length=CHUNK_CHARACTERS), AfterValidator(_no_nul),
    AfterValidator(_no_blank), _FILLED,
]  # fmt: skip
BookText = Annotated[
    str, StringConstraints(min_length=1, max_length=BOOK_CHARACTERS), AfterValidator(_no_nul),
    AfterValidator(_no_blank), _FILLED,
]  # fmt: skip
Name = Annotated[
    str, StringConstraints(min_length=1, max_length=NAME_CHARACTERS), AfterValidator(_no_nul),
    AfterValidator(_no_blank), _FILLED,
]  # fmt: skip
Words = Annotated[str, StringConstraints(max_length=NAME_CHARACTERS), AfterValidator(_no_nul), _ANY]
"""A title, an author, a date: may be empty."""

COLLECTION_ID = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
CollectionId = Annotated[str, StringConstraints(pattern=COLLECTION_ID)]
