"""Collections and their chunks: create, list, info, delete; add, upsert, delete, page through, map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Depends, Path, Query

from mia_serve.http import operations
from mia_serve.http.charging import charge_chunks
from mia_serve.http.collection import Collection
from mia_serve.http.errors import problems
from mia_serve.http.keys import Caller, require
from mia_serve.http.schemas_collections import (
    PAGE,
    AddChunks,
    AddText,
    ChunkPage,
    CollectionInfo,
    CollectionList,
    CollectionMap,
    DeleteIds,
    Deletion,
    MapBook,
    MapSession,
    NewChunks,
    NewCollection,
    StoredChunk,
    UpsertChunks,
    WriteResult,
)
from mia_serve.http.services import Services, get_services
from mia_serve.http.texts import COLLECTION_ID

if TYPE_CHECKING:
    from mia_serve.mindscape import Mindscape

router = APIRouter(prefix="/v1/collections", tags=["collections"])

GetServices = Annotated[Services, Depends(get_services)]
Id = Annotated[str, Path(alias="id", pattern=COLLECTION_ID, description="The collection.", examples=["gatsby"])]
Writer = Annotated[Caller, Depends(require("write"))]
READ, WRITE, ADMIN = ([Depends(require(role))] for role in ("read", "write", "admin"))

ADDITIONS: dict[str, Any] = {
    "text": {
        "summary": "The text of a book",
        "value": {
            "text": "In my younger and more vulnerable years …",
            "book_id": "gatsby",
            "title": "The Great Gatsby",
        },
    },
    "chunks": {
        "summary": "Passages of a book",
        "value": {"chunks": [{"id": "gatsby:0", "text": "In my younger years …"}], "book_id": "gatsby"},
    },
    "turns": {
        "summary": "Turns of a chat session",
        "value": {
            "turns": [{"speaker": "Ana", "text": "I moved to Porto."}, {"speaker": "Ben", "text": "When?"}],
            "conversation_id": "ana-ben",
            "session_id": "2024-05-01",
            "date": "1 May 2024",
        },
    },
}
DELETIONS: dict[str, Any] = {
    "ids": {"summary": "Chunks", "value": {"ids": ["gatsby:0", "gatsby:1"]}},
    "book_id": {"summary": "A book or a conversation", "value": {"book_id": "gatsby"}},
}


@router.post(
    "", status_code=201, dependencies=WRITE, summary="Create a collection", responses=problems(400, 401, 403, 409, 429)
)
async def create_collection(body: NewCollection, services: GetServices) -> CollectionInfo:
    """Create an empty collection of books or chats; 409 where its id is taken."""
    return _info(await services.collections.create(body.id, body.title, body.kind))


@router.get("", dependencies=READ, summary="List collections", responses=problems(401, 403, 429))
async def list_collections(services: GetServices) -> CollectionList:
    """List all collections by id, with their counts."""
    found = [_info(collection) for collection in services.collections.list()]
    return CollectionList(collections=sorted(found, key=lambda info: info.id))


@router.get("/{id}", dependencies=READ, summary="Describe a collection", responses=problems(400, 401, 403, 404, 429))
async def get_collection(collection: Id, services: GetServices) -> CollectionInfo:
    """Return the counts, version and settings of a collection."""
    return _info(services.collections.get(collection))


@router.delete(
    "/{id}",
    status_code=204,
    dependencies=ADMIN,
    summary="Delete a collection",
    responses=problems(400, 401, 403, 404, 429),
)
async def delete_collection(collection: Id, services: GetServices) -> None:
    """Delete a collection with all it holds, at once and for good."""
    await services.collections.delete(collection)


@router.post(
    "/{id}/chunks",
    status_code=201,
    summary="Add to a collection",
    responses=problems(400, 401, 403, 404, 409, 413, 429, 503),
)
async def add_chunks(
    collection: Id,
    body: Annotated[NewChunks, Body(openapi_examples=ADDITIONS)],
    services: GetServices,
    caller: Writer,
) -> WriteResult:
    """Add a book's text, passages of a book, or turns of a chat.

    When this returns, what was added is on disk, its sessions are summarised, and searches find it. An id that is
    there already is refused with 409, and nothing of the request is added.
    """
    return await _write(services, caller, collection, _addition(body))


@router.put(
    "/{id}/chunks",
    summary="Upsert chunks",
    responses=problems(400, 401, 403, 404, 409, 413, 429, 503),
)
async def upsert_chunks(collection: Id, body: UpsertChunks, services: GetServices, caller: Writer) -> WriteResult:
    """Give chunks that are there a new text, and add those that are not; their sessions get new summaries."""
    chunks = tuple(operations.ChunkIn(chunk.id, chunk.text) for chunk in body.chunks)
    return await _write(services, caller, collection, operations.Upsert(chunks, body.book_id))


@router.post(
    "/{id}/chunks/delete",
    dependencies=WRITE,
    summary="Delete chunks or a book",
    responses=problems(400, 401, 403, 404, 429, 503),
)
async def delete_chunks(
    collection: Id, body: Annotated[Deletion, Body(openapi_examples=DELETIONS)], services: GetServices
) -> WriteResult:
    """Delete chunks by id, or a whole book; what is not there is told in `unknown` and are no error."""
    target = services.collections.get(collection)
    if not isinstance(body, DeleteIds):
        return _result(await target.write(operations.DeleteBook(body.book_id)))
    return _result(await target.write(operations.DeleteChunks(tuple(body.ids))))


@router.get(
    "/{id}/chunks", dependencies=READ, summary="Page through chunks", responses=problems(400, 401, 403, 404, 429)
)
async def list_chunks(
    collection: Id,
    services: GetServices,
    offset: Annotated[int, Query(ge=0, le=1 << 40, description="Chunks to pass over.")] = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE, description="Chunks to return at most.")] = 100,
) -> ChunkPage:
    """Return chunks in the order of their books, from `offset` on."""
    snapshot = services.collections.get(collection).snapshot
    chunks = snapshot.mindscape.chunks
    return ChunkPage(
        version=snapshot.version,
        total=len(chunks),
        offset=offset,
        chunks=[
            StoredChunk(id=chunk.id, text=chunk.text, session_id=chunk.session_id, book_id=chunk.book_id)
            for chunk in chunks[offset : offset + limit]
        ],
    )


# Not a coroutine: of a large collection this takes a while, and FastAPI runs it, and its JSON, in a thread.
@router.get("/{id}/map", dependencies=READ, summary="Map a collection", responses=problems(400, 401, 403, 404, 429))
def map_collection(collection: Id, services: GetServices) -> CollectionMap:
    """Return books and sessions with their summaries, in reading order, without the texts."""
    snapshot = services.collections.get(collection).snapshot
    return CollectionMap(version=snapshot.version, books=map_books(snapshot.mindscape))


def map_books(mindscape: Mindscape) -> list[MapBook]:
    """Return the books of a mindscape with their sessions, in document order."""
    facts = {book.id: book for book in mindscape.books}
    books: dict[str, MapBook] = {}
    for session in mindscape.sessions:
        if session.book_id not in books:
            known = facts.get(session.book_id)
            title, author = (known.title, known.author) if known else ("", "")
            books[session.book_id] = MapBook(id=session.book_id, title=title, author=author, sessions=[])
        books[session.book_id].sessions.append(
            MapSession(
                id=session.id,
                title=session.title,
                date=session.date,
                summary=session.summary,
                chunks=len(session.chunk_ids),
            )
        )
    return list(books.values())


def _info(collection: Collection) -> CollectionInfo:
    return CollectionInfo(**collection.info())


def _addition(body: NewChunks) -> operations.Operation:
    if isinstance(body, AddText):
        return operations.AddText(book_id=body.book_id, title=body.title, author=body.author, text=body.text)
    if isinstance(body, AddChunks):
        chunks = tuple(operations.ChunkIn(chunk.id, chunk.text) for chunk in body.chunks)
        return operations.AddChunks(book_id=body.book_id, chunks=chunks, title=body.title, author=body.author)
    turns = tuple(operations.TurnIn(turn.id, turn.speaker, turn.text) for turn in body.turns)
    return operations.AddTurns(
        conversation_id=body.conversation_id, session_id=body.session_id, date=body.date, turns=turns
    )


async def _write(
    services: Services, caller: Caller, collection_id: str, operation: operations.Operation
) -> WriteResult:
    collection = services.collections.get(collection_id)
    written = await collection.write(operation)
    await charge_chunks(services, caller, collection.snapshot, written.added + written.replaced)
    return _result(written)


def _result(written: operations.Written) -> WriteResult:
    return WriteResult(**written._asdict())
