"""Collections over HTTP: create, fill, read, change, delete; and what is refused."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mia_serve.http.keys import ROLES, Role, add_key
from tests.http.conftest import Running

PASSAGES = [
    "The ferryman counted the lamps along the quay.",
    "One lamp was missing that night.",
    "She kept the ledger under the floor.",
    "The key lay under the clock.",
    "潮水退去以后，他在码头上找到了那本账。",
]


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def name(http: httpx.Client) -> str:
    """A fresh collection of books."""
    name = f"c{uuid.uuid4().hex[:12]}"
    assert http.post("/v1/collections", json={"id": name, "title": "Quay"}).status_code == 201
    return name


def add(http: httpx.Client, name: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(f"/v1/collections/{name}/chunks", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def passages(book: str = "quay") -> dict[str, Any]:
    return {"chunks": [{"id": f"{book}-{i}", "text": text} for i, text in enumerate(PASSAGES)], "book_id": book}


def texts(http: httpx.Client, name: str) -> dict[str, str]:
    found = http.get(f"/v1/collections/{name}/chunks", params={"limit": 1000}).json()
    return {chunk["id"]: chunk["text"] for chunk in found["chunks"]}


def test_a_collection_lives_from_creation_to_deletion(http: httpx.Client) -> None:
    made = http.post("/v1/collections", json={"id": "life", "title": "Life", "kind": "chats"})
    assert made.status_code == 201
    assert {key: made.json()[key] for key in ("id", "title", "kind", "chunks", "sessions", "books")} == {
        "id": "life", "title": "Life", "kind": "chats", "chunks": 0, "sessions": 0, "books": 0
    }  # fmt: skip
    again = http.post("/v1/collections", json={"id": "life"})
    assert again.status_code == 409 and "life" in again.json()["error"]["message"]
    assert http.get("/v1/collections/life").json() == made.json()
    listed = http.get("/v1/collections").json()["collections"]
    assert "life" in [item["id"] for item in listed]
    assert [item["id"] for item in listed] == sorted(item["id"] for item in listed)
    assert http.delete("/v1/collections/life").status_code == 204
    assert http.get("/v1/collections/life").status_code == 404
    assert http.delete("/v1/collections/life").status_code == 404
    assert "life" not in [item["id"] for item in http.get("/v1/collections").json()["collections"]]


def test_passages_come_back_in_order_and_in_pages(http: httpx.Client, name: str) -> None:
    added = add(http, name, passages() | {"title": "The Quay", "author": "A. Ferryman"})
    assert added["added"] == [f"quay-{i}" for i in range(5)] and added["replaced"] == added["deleted"] == []
    page = http.get(f"/v1/collections/{name}/chunks", params={"offset": 1, "limit": 2}).json()
    assert (page["total"], page["offset"], page["version"]) == (5, 1, added["version"])
    assert [(chunk["id"], chunk["text"]) for chunk in page["chunks"]] == [
        ("quay-1", PASSAGES[1]),
        ("quay-2", PASSAGES[2]),
    ]
    assert http.get(f"/v1/collections/{name}/chunks", params={"offset": 99}).json()["chunks"] == []
    info = http.get(f"/v1/collections/{name}").json()
    assert (info["chunks"], info["sessions"], info["books"]) == (5, 3, 1)  # windows of two
    drawn = http.get(f"/v1/collections/{name}/map").json()
    assert drawn["version"] == added["version"] and len(drawn["books"]) == 1
    book = drawn["books"][0]
    assert (book["id"], book["title"], book["author"]) == ("quay", "The Quay", "A. Ferryman")
    assert [session["chunks"] for session in book["sessions"]] == [2, 2, 1]
    assert all(session["summary"] for session in book["sessions"])
    assert [session["id"] for session in book["sessions"]] == list(
        dict.fromkeys(chunk["session_id"] for chunk in http.get(f"/v1/collections/{name}/chunks").json()["chunks"])
    )


def test_a_text_is_cut_by_the_server(http: httpx.Client, name: str) -> None:
    words = [f"lamp {i} on the quay." for i in range(60)]
    added = add(http, name, {"text": " ".join(words), "book_id": "b", "title": "Lamps"})
    assert len(added["added"]) > 3
    pieces = texts(http, name)
    assert list(pieces) == added["added"]
    assert "".join("".join(pieces.values()).split()) == "".join("".join(words).split())


def test_turns_make_sessions_of_a_conversation(http: httpx.Client) -> None:
    name = "turns"
    http.post("/v1/collections", json={"id": name, "kind": "chats"})
    first = {
        "turns": [{"speaker": "Ana", "text": "I moved to Porto."}, {"id": "t2", "speaker": "Ben", "text": "When?"}],
        "conversation_id": "ana-ben",
        "session_id": "s1",
        "date": "1 May 2024",
    }
    added = add(http, name, first)
    assert len(added["added"]) == 2 and added["added"][1] == "t2"
    add(http, name, first | {"turns": [{"speaker": "Ben", "text": "I like Porto."}]})
    add(http, name, first | {"turns": [{"speaker": "Ana", "text": "The cat came along."}], "session_id": "s2"})
    sessions = http.get(f"/v1/collections/{name}/map").json()["books"][0]["sessions"]
    assert [session["chunks"] for session in sessions] == [3, 1]
    assert sessions[0]["date"] == "1 May 2024"
    found = http.post(f"/v1/collections/{name}/search", json={"query": "cat", "mode": "lexical"}).json()
    assert "The cat came along." in found["hits"][0]["text"] and "Ana" in found["hits"][0]["text"]


def test_search_finds_what_was_added_changed_and_no_longer_what_was_deleted(http: httpx.Client, name: str) -> None:
    def found(word: str) -> list[str]:
        body = {"query": word, "mode": "lexical"}
        return [hit["id"] for hit in http.post(f"/v1/collections/{name}/search", json=body).json()["hits"]]

    add(http, name, passages())
    assert found("ledger") == ["quay-2"]
    changed = http.put(f"/v1/collections/{name}/chunks", json={"chunks": [{"id": "quay-2", "text": "A parrot spoke."}]})
    assert changed.status_code == 200 and changed.json()["replaced"] == ["quay-2"]
    assert found("ledger") == [] and found("parrot") == ["quay-2"]
    gone = http.post(f"/v1/collections/{name}/chunks/delete", json={"ids": ["quay-2", "nothing", "quay-2"]})
    assert gone.status_code == 200
    assert gone.json()["deleted"] == ["quay-2"] and gone.json()["unknown"] == ["nothing"]
    assert found("parrot") == [] and set(texts(http, name)) == {"quay-0", "quay-1", "quay-3", "quay-4"}
    everywhere = http.post(f"/v1/collections/{name}/search", json={"query": "parrot", "k": 100}).json()
    assert everywhere["version"] == gone.json()["version"] and len(everywhere["hits"]) == 4
    new = {"chunks": [{"id": "extra", "text": "A macaw."}, {"id": "quay-3", "text": "A cuckoo."}], "book_id": "birds"}
    both = http.put(f"/v1/collections/{name}/chunks", json=new).json()
    assert (both["added"], both["replaced"]) == (["extra"], ["quay-3"]) and found("macaw") == ["extra"]
    assert http.post(f"/v1/collections/{name}/chunks/delete", json={"book_id": "birds"}).json()["deleted"] == ["extra"]
    book = http.post(f"/v1/collections/{name}/chunks/delete", json={"book_id": "quay"}).json()
    assert sorted(book["deleted"]) == ["quay-0", "quay-1", "quay-3", "quay-4"]
    assert texts(http, name) == {} and http.get(f"/v1/collections/{name}/map").json()["books"] == []


def test_an_id_that_exists_is_a_conflict_and_nothing_of_the_request_is_kept(http: httpx.Client, name: str) -> None:
    add(http, name, passages())
    body = {"chunks": [{"id": "new", "text": "new"}, {"id": "quay-1", "text": "old"}], "book_id": "quay"}
    answer = http.post(f"/v1/collections/{name}/chunks", json=body)
    assert answer.status_code == 409 and "quay-1" in answer.json()["error"]["message"]
    assert "new" not in texts(http, name)


ADD, SEARCH = "/v1/collections/{name}/chunks", "/v1/collections/{name}/search"


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("POST", "/v1/collections", {"id": "../up"}, "id"),
        ("POST", "/v1/collections", {"id": ""}, "id"),
        ("POST", "/v1/collections", {"id": "a" * 65}, "id"),
        ("POST", "/v1/collections", {"id": "a\x00"}, "id"),
        ("POST", "/v1/collections", {"id": 7}, "id"),
        ("POST", "/v1/collections", {"id": "x", "kind": "films"}, "'books' or 'chats'"),
        ("POST", "/v1/collections", {"id": "x", "titel": "y"}, "titel"),
        ("POST", "/v1/collections", ["x"], ""),
        ("POST", ADD, {}, "exactly one of `text`, `chunks`, `turns`"),
        ("POST", ADD, {"text": "a", "chunks": [{"text": "b"}], "book_id": "b"}, "exactly one"),
        ("POST", ADD, "text", "exactly one"),
        ("POST", ADD, {"text": "a"}, "book_id"),
        ("POST", ADD, {"text": "", "book_id": "b"}, "text"),
        ("POST", ADD, {"text": " \n", "book_id": "b"}, "empty text"),
        ("POST", ADD, {"text": "a\x00b", "book_id": "b"}, "NUL character at position 1"),
        ("POST", ADD, {"chunks": [], "book_id": "b"}, "chunks"),
        ("POST", ADD, {"chunks": [{"text": "a", "bogus": 1}], "book_id": "b"}, "bogus"),
        ("POST", ADD, {"chunks": [{"id": "i", "text": 3}], "book_id": "b"}, "chunks.0.text"),
        ("POST", ADD, {"chunks": [{"id": "i", "text": "a" * 200_001}], "book_id": "b"}, "200000"),
        ("POST", ADD, {"turns": [{"text": "a"}], "conversation_id": "c", "session_id": "s"}, "speaker"),
        ("POST", ADD, {"text": "a", "book_id": "b" * 257}, "book_id"),
        ("PUT", ADD, {"chunks": [{"text": "a"}]}, "id"),
        ("POST", ADD + "/delete", {"ids": ["a"], "book_id": "b"}, "exactly one of `ids`, `book_id`"),
        ("POST", ADD + "/delete", {"ids": []}, "ids"),
        ("POST", ADD + "/delete", {"ids": "a"}, "ids"),
        ("GET", ADD + "?limit=0", None, "limit"),
        ("GET", ADD + "?offset=-1", None, "offset"),
        ("GET", ADD + "?limit=many", None, "limit"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(
    http: httpx.Client, name: str, method: str, path: str, body: Any, says: str
) -> None:
    answer = http.request(method, path.format(name=name), json=body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"], answer.text
    assert http.get(f"/v1/collections/{name}").json()["chunks"] == 0


@pytest.mark.parametrize("raw", [b'{"text": "\\ud800", "book_id": "b"}', b'{"text": ', b"\xff\xfe", b""])
def test_a_body_that_is_no_text_is_refused(http: httpx.Client, name: str, raw: bytes) -> None:
    head = {"content-type": "application/json"}
    answer = http.post(f"/v1/collections/{name}/chunks", content=raw, headers=head)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("GET", "/chunks", None),
        ("GET", "/map", None),
        ("POST", "/chunks", {"text": "a", "book_id": "b"}),
        ("PUT", "/chunks", {"chunks": [{"id": "a", "text": "b"}]}),
        ("POST", "/chunks/delete", {"ids": ["a"]}),
        ("POST", "/search", {"query": "a"}),
        ("POST", "/signature", {"query": "a"}),
    ],
)
def test_an_unknown_collection_is_404(http: httpx.Client, method: str, path: str, body: Any) -> None:
    answer = http.request(method, f"/v1/collections/nowhere{path}", json=body)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "no_collection"
    assert "nowhere" in answer.json()["error"]["message"]


def test_a_reader_reads_a_writer_fills_and_only_an_admin_deletes_collections(
    client: Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    secrets = {role: add_key(keys, role, role)[1] for role in ROLES}

    async def ask() -> None:
        async with client(keys=keys) as http:

            async def status(role: Role, method: str, path: str, body: Any = None) -> int:
                head = {"Authorization": f"Bearer {secrets[role]}"}
                return (await http.request(method, f"/v1{path}", json=body, headers=head)).status_code

            new, one = {"id": "k"}, {"chunks": [{"id": "a", "text": "boat"}], "book_id": "b"}
            assert await status("read", "POST", "/collections", new) == 403
            assert await status("write", "POST", "/collections", new) == 201
            assert await status("read", "POST", "/collections/k/chunks", one) == 403
            assert await status("write", "POST", "/collections/k/chunks", one) == 201
            assert await status("read", "PUT", "/collections/k/chunks", {"chunks": one["chunks"]}) == 403
            assert await status("read", "POST", "/collections/k/chunks/delete", {"ids": ["a"]}) == 403
            for path in ("", "/k", "/k/chunks", "/k/map"):
                assert await status("read", "GET", f"/collections{path}") == 200
            assert await status("read", "POST", "/collections/k/search", {"query": "boat"}) == 200
            assert await status("read", "POST", "/collections/k/signature", {"query": "boat"}) == 200
            assert await status("read", "POST", "/rerank", {"query": "boat", "documents": ["a"]}) == 200
            assert await status("write", "DELETE", "/collections/k") == 403
            assert await status("admin", "DELETE", "/collections/k") == 204
            assert (await http.get("/v1/collections")).status_code == 401

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chunks", {"book_id": "b", "chunks": [{"text": ""}]}, "chunks.0.text"),
        ("chunks", {"book_id": "b", "chunks": ["a"]}, "chunks.0"),
        ("chunks", {"book_id": " ", "text": "a"}, "book_id"),
        ("chunks", {"conversation_id": "c", "session_id": "s", "turns": [{"text": "a"}]}, "turns.0.speaker"),
        ("chunks/delete", {"ids": [""]}, "ids.0"),
        ("chunks/delete", {"ids": ["a"], "all": True}, "all"),
        ("search", {"query": "a", "signature": "all"}, "signature"),
        ("search", {"query": "a", "signature": [""]}, "signature.0"),
    ],
)
def test_a_wrong_field_has_the_name_that_the_client_gave_it(
    http: httpx.Client, name: str, path: str, body: Any, field: str
) -> None:
    error = http.post(f"/v1/collections/{name}/{path}", json=body).json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ") and "Value error" not in error["message"]


def test_every_route_is_described_in_the_openapi(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    ours = {path: paths[path] for path in paths if path.startswith(("/v1/coll", "/v1/sig", "/v1/rerank"))}
    assert len(ours) == 9
    for path, methods in ours.items():
        for method, route in methods.items():
            where = f"{method} {path}"
            assert route["summary"] and route["description"], where
            success = next(code for code in route["responses"] if code.startswith("2"))
            assert success == "204" or "$ref" in route["responses"][success]["content"]["application/json"]["schema"]
            assert "400" in route["responses"] or method == "get", where
            if "requestBody" in route:
                content = route["requestBody"]["content"]["application/json"]
                assert "examples" in content or "$ref" in content["schema"], where
