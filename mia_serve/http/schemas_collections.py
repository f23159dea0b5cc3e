"""What the routes of collections take and give."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from mia_serve.http.operations import DEFAULT_BOOK
from mia_serve.http.texts import BookText, ChunkText, CollectionId, Name, Words

MOST_CHUNKS = 10_000
PAGE = 1_000


class Strict(BaseModel):
    """A request body in which an unknown key is an error, and so is a value of another type (true is no number)."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NewCollection(Strict):
    """A collection to create."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"id": "gatsby", "title": "The Great Gatsby", "kind": "books"}]}
    )
    id: CollectionId = Field(description="Its name in every address: letters, digits, `_` and `-`, at most 64.")
    title: Words = Field("", description="A title to show.")
    kind: Literal["books", "chats"] = Field("books", description="What it holds: `books`, or the turns of `chats`.")


class CollectionInfo(BaseModel):
    """What is known of a collection."""

    id: str
    title: str
    kind: Literal["books", "chats"]
    chunks: int = Field(description="Chunks that it holds.")
    sessions: int = Field(description="Sessions: windows of a book, or dated chat sessions.")
    books: int = Field(description="Books or conversations.")
    version: int = Field(description="Grows with every write.")
    summarizer: str = Field(description="Who writes the summaries of its sessions.")
    created: Any = Field(description="When it was created.")
    bytes: int = Field(description="Room that it takes on disk.")


class CollectionList(BaseModel):
    """All collections, by id."""

    collections: list[CollectionInfo]


class NewChunk(Strict):
    """A passage of a book."""

    id: Name | None = Field(None, description="Unique in the collection; one is made where it is missing.")
    text: ChunkText


class KnownChunk(Strict):
    """A chunk with its id."""

    id: Name
    text: ChunkText


class NewTurn(Strict):
    """One turn of a conversation."""

    id: Name | None = Field(None, description="Unique in the collection; one is made where it is missing.")
    speaker: Words = Field(description="Who speaks; put before the text. May be empty.")
    text: ChunkText


class AddText(Strict):
    """The text of a book, or the next part of one that is there; the server cuts it into chunks."""

    text: BookText
    book_id: Name
    title: Words = ""
    author: Words = ""


class AddChunks(Strict):
    """Passages of a book, in order; they go behind those that the book has."""

    chunks: list[NewChunk] = Field(min_length=1, max_length=MOST_CHUNKS)
    book_id: Name
    title: Words = ""
    author: Words = ""


class AddTurns(Strict):
    """Turns of a conversation's last session, behind those that it has; or of a new one, with which the last ends."""

    turns: list[NewTurn] = Field(min_length=1, max_length=MOST_CHUNKS)
    conversation_id: Name
    session_id: Name
    date: Words = Field("", description="Date of the session, as the source writes it.")


def _one_of(names: dict[str, str]) -> Discriminator:
    """Tell the bodies of a route apart by the one key that each of them alone has; names: tag by key."""

    def tag(body: Any) -> str | None:
        if not isinstance(body, dict):
            return type(body).__name__  # one of the models already, or nothing that is known
        found = [name for key, name in names.items() if key in body]
        return found[0] if len(found) == 1 else None

    keys = ", ".join(f"`{key}`" for key in names)
    return Discriminator(
        tag, custom_error_type="one_of", custom_error_message=f"give exactly one of {keys}, with the keys beside it"
    )


NewChunks = Annotated[
    Annotated[AddText, Tag("AddText")] | Annotated[AddChunks, Tag("AddChunks")] | Annotated[AddTurns, Tag("AddTurns")],
    _one_of({"text": "AddText", "chunks": "AddChunks", "turns": "AddTurns"}),
]


class UpsertChunks(Strict):
    """Texts by chunk id: chunks that are there get a new text in their place, others go behind those of a book."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"chunks": [{"id": "gatsby:3", "text": "The green light went out."}]}]},
    )
    chunks: list[KnownChunk] = Field(min_length=1, max_length=MOST_CHUNKS)
    book_id: Name = Field(DEFAULT_BOOK, description="Book of the chunks that are not there yet.")


class DeleteIds(Strict):
    """Chunks to delete."""

    ids: list[Name] = Field(min_length=1, max_length=MOST_CHUNKS)


class DeleteBook(Strict):
    """A book, or a conversation, to delete with all its chunks."""

    book_id: Name


Deletion = Annotated[
    Annotated[DeleteIds, Tag("DeleteIds")] | Annotated[DeleteBook, Tag("DeleteBook")],
    _one_of({"ids": "DeleteIds", "book_id": "DeleteBook"}),
]


class WriteResult(BaseModel):
    """What a write changed. It is on disk, and what it wrote is found from now on."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"version": 4, "added": ["gatsby:0"], "replaced": [], "deleted": []}]}
    )
    version: int = Field(description="Version of the collection that holds the write.")
    added: list[str] = Field(description="Ids of new chunks, in order.")
    replaced: list[str] = Field(description="Ids of chunks that have a new text.")
    deleted: list[str] = Field(description="Ids of chunks that are gone.")
    unknown: list[str] = Field([], description="What was to be deleted and was not there: ids of chunks, or the book.")


class StoredChunk(BaseModel):
    """A chunk of a collection."""

    id: str
    text: str
    session_id: str
    book_id: str


class ChunkPage(BaseModel):
    """Some of a collection's chunks, in the order of its books."""

    version: int
    total: int = Field(description="Chunks in the collection.")
    offset: int
    chunks: list[StoredChunk]


class MapSession(BaseModel):
    """A session on the map."""

    id: str
    title: str
    date: str
    summary: str
    chunks: int = Field(description="Chunks in it.")


class MapBook(BaseModel):
    """A book on the map, its sessions in reading order."""

    id: str
    title: str
    author: str
    sessions: list[MapSession]


class CollectionMap(BaseModel):
    """Books, sessions and their summaries: all of a collection but its texts."""

    version: int
    books: list[MapBook]
