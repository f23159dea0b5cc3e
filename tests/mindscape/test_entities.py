"""Entities found by a model: what it is asked, how those of one name become one node, and where nodes go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mia_serve.llm import ChatClient, LlmFailed, ReplyCache
from mia_serve.mindscape.entities import DESCRIPTION, Extracted, extract_entities, name_key, write_nodes
from mia_serve.mindscape.mindscape import Mindscape
from mia_serve.mindscape.records import Book, Chunk, Node
from mia_train.silver_input import Unit, read_nodes
from tests.llm.server import serving


def chunk(book: str, i: int, text: str = "") -> Chunk:
    return Chunk(f"{book}:{i}", text or f"Text {i} of {book}.", f"{book}:w0", book)


def entity(name: str, description: str, kind: str = "person") -> dict[str, str]:
    return {"name": name, "kind": kind, "description": description}


def reply(*entities: Any) -> str:
    return json.dumps({"entities": entities}, ensure_ascii=False)


def extract(url: str | None, chunks: Sequence[Chunk], **options: Any) -> Extracted:
    async def run() -> Extracted:
        async with ChatClient(url, "m", **({"max_retries": 0} | options)) as client:
            return await extract_entities(client, chunks)

    return asyncio.run(run())


def by_text(replies: dict[str, Any]) -> Any:
    """Answer by the text of the chunk."""
    return lambda body: next(r for text, r in replies.items() if text in body["messages"][1]["content"])


def test_SRV_24_the_schema_bounds_every_string_and_the_list():
    with serving(lambda body: reply()) as stub:
        assert extract(stub.url, [chunk("b", 0, "Anna ran.")]) == Extracted([], {})
    (body,) = stub.requests
    schema = body["response_format"]["json_schema"]["schema"]
    fields = schema["$defs"]["_Entity"]["properties"]
    assert {name: field["maxLength"] for name, field in fields.items()} == {"name": 80, "kind": 20, "description": 400}
    assert schema["properties"]["entities"]["maxItems"] == 20 and schema["type"] == "object"
    asked = body["messages"][1]["content"]
    assert "<text>\nAnna ran.\n</text>" in asked and "language of the passage" in asked
    for wanted in ("people, places, organisations, things and events", "name", "kind", "description", "At most 20"):
        assert wanted in asked, wanted


def test_entities_of_one_name_are_one_node_a_book_and_descriptions_come_once():
    replies = {
        "Text 0 of a": reply(entity("Anna Lee", "Anna is a doctor."), entity("Town", "A town by the sea.", "Place")),
        "Text 1 of a": reply(
            entity("ANNA  LEE", "Anna is a Doctor."), entity("anna lee", "She left the town.", "Hero")
        ),
        "Text 0 of c": reply(entity("Anna Lee", "Another Anna.")),
    }
    with serving(by_text(replies)) as stub:
        found = extract(stub.url, [chunk("a", 0), chunk("c", 0), chunk("a", 1)])
    assert found.nodes == [
        Node("node:a:Anna Lee", "Anna Lee", "Anna is a doctor. She left the town.", "a", "person", ("a:0", "a:1")),
        Node("node:a:Town", "Town", "A town by the sea.", "a", "place", ("a:0",)),
        Node("node:c:Anna Lee", "Anna Lee", "Another Anna.", "c", "person", ("c:0",)),
    ]


def test_chinese_names_are_merged_whatever_space_or_marks_are_around_them():
    first = reply(entity("贾 宝玉", "荣国府的公子。", "人物"), entity("《石头记》", "一部书。", "物"))
    second = reply(entity("贾宝玉", "衔玉而生。", "人物"), entity("贾母", "宝玉的祖母。", "人物"))
    with serving(by_text({"Text 0": first, "Text 1": second})) as stub:
        found = extract(stub.url, [chunk("红楼梦", 0), chunk("红楼梦", 1)])
    assert [(n.id, n.description, n.kind) for n in found.nodes] == [
        ("node:红楼梦:贾 宝玉", "荣国府的公子。衔玉而生。", "人物"),
        ("node:红楼梦:《石头记》", "一部书。", "物"),
        ("node:红楼梦:贾母", "宝玉的祖母。", "人物"),
    ]
    assert name_key("Ｍｒ.  Holmes") == name_key("mr. holmes") != name_key("mrs. holmes")
    assert name_key("石头记") == name_key(" 《石头记》") and name_key("“”") == ""


def test_long_descriptions_stop_at_the_bound():
    said = [f"In part {i} " + "she walked along the sea and came back. " * 9 for i in range(9)]
    with serving(lambda body: reply(*(entity("Anna", one) for one in said))) as stub:
        (node,) = extract(stub.url, [chunk("b", 0)]).nodes
    assert len(node.description) <= DESCRIPTION and node.description.startswith("In part 0 she")
    assert node.description.count("In part") == 3


def test_nodes_go_to_training_and_into_a_mindscape(tmp_path: Path):
    book = Book("b", ("Text 0 of b.", "Text 1 of b."), summaries=("All of it.",))
    mindscape = Mindscape.from_books([book])
    said = reply(entity("Anna\nLee", 'She said "no".'), entity("Tōkyō", "", "place"), entity("", "Nobody."))
    with serving(lambda body: said) as stub:
        nodes = extract(stub.url, mindscape.chunks).nodes
    file = tmp_path / "nodes.jsonl"
    file.write_text("an earlier one")
    write_nodes(file, nodes)
    assert read_nodes(file, {"b"}) == [
        Unit("node:b:Anna Lee", 'Anna Lee : She said "no".', "b"),
        Unit("node:b:Tōkyō", "Tōkyō : place", "b"),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["nodes.jsonl"]
    kept = Mindscape(mindscape.chunks, mindscape.sessions, nodes=tuple(nodes))
    assert kept.nodes[0].chunk_ids == ("b:0", "b:1")


def test_SRV_26_what_endpoints_make_of_the_schema_is_read_and_too_long_is_cut():
    replies = {
        "Text 0": "Here: ```json\n" + reply(entity("Anna", "A doctor.")) + "\n```",
        "Text 1": json.dumps([entity("Bob", "A sailor.")]),
        "Text 2": reply(entity("C" * 500, "d" * 9000)),
        "Text 3": reply(*(entity(f"Guest {i}", "One of many.") for i in range(50))),
    }
    with serving(by_text(replies)) as stub:
        found = extract(stub.url, [chunk("b", i) for i in range(4)])
    assert found.failures == {} and len(stub.requests) == 4, "nothing is asked twice"
    assert [n.name for n in found.nodes[:3]] == ["Anna", "Bob", "C" * 80]
    assert found.nodes[2].description == "d" * 400 and len(found.nodes) == 3 + 20


def test_chunks_that_fail_are_counted_and_a_wrong_reply_is_asked_for_once_more():
    def answer(body: dict[str, Any]) -> Any:
        asked, turns = body["messages"][1]["content"], len(body["messages"])
        if "Text 1" in asked:
            return 400
        if "Text 2" in asked:
            return '{"people": ["Anna"]}'
        return (
            reply(entity("Anna", "A doctor.")) if turns > 2 or "Text 0" in asked else '{"entities": [{"name": "Anna"}]}'
        )

    with serving(answer) as stub:
        found = extract(stub.url, [chunk("b", i) for i in range(4)])
    assert found.failures == {"b:1": "http 400", "b:2": "bad reply"}
    assert found.nodes[0].chunk_ids == ("b:0", "b:3") and len(stub.requests) == 6


def test_a_refused_key_stops_all_and_replay_makes_no_call(tmp_path: Path):
    chunks = [chunk("b", i) for i in range(50)]
    with serving(lambda body: 401) as stub, pytest.raises(LlmFailed) as caught:
        extract(stub.url, chunks, concurrency=3)
    assert caught.value.hopeless and len(stub.requests) <= 6
    file = tmp_path / "c.jsonl"
    with serving(lambda body: reply(entity("Anna", "A doctor.")), delay=0.05) as stub:
        first = extract(stub.url, chunks, concurrency=10, cache=ReplyCache(file))
    assert stub.most_at_once == 10
    assert extract(None, chunks, cache=ReplyCache(file, "replay")) == first


TEXT = st.text(st.characters(codec=None), max_size=30) | st.sampled_from(
    ["安娜", "Anna", "b:Anna", "\ud800", "x" * 100_000, "\x00"]
)
RECORD = st.fixed_dictionaries({"name": TEXT, "kind": TEXT, "description": TEXT})
ODD = st.dictionaries(
    st.sampled_from(["name", "kind", "description", "x"]),
    TEXT | st.none() | st.integers() | st.lists(TEXT, max_size=2),
)
REPLY = st.one_of(
    st.lists(RECORD, max_size=5).map(lambda found: json.dumps({"entities": found})),
    st.lists(ODD, max_size=3).map(lambda found: json.dumps({"entities": found})),
    st.lists(RECORD, max_size=3).map(json.dumps),
    RECORD.map(lambda one: json.dumps({"entities": [one]})[:-5]),
    TEXT,
)


def test_no_reply_crashes_and_every_node_can_be_read_by_training(tmp_path: Path):
    chunks = [chunk("a", 0), chunk("a", 1), chunk("a:b", 0)]
    replies: dict[str, str] = {}
    file = tmp_path / "nodes.jsonl"

    @settings(max_examples=30, deadline=None)
    @given(st.lists(REPLY, min_size=3, max_size=3))
    def check(said: list[str]) -> None:
        replies.update({f"{c.text}\n": r for c, r in zip(chunks, said, strict=True)})
        found = extract(stub.url, chunks)
        assert set(found.failures.values()) <= {"bad reply", "no content"}
        assert len({n.id for n in found.nodes}) == len(found.nodes)
        if found.nodes:
            write_nodes(file, found.nodes)
            assert [u.id for u in read_nodes(file, {"a", "a:b"})] == [n.id for n in found.nodes]

    with serving(by_text(replies)) as stub:
        check()
