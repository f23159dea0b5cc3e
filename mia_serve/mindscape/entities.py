"""Entity nodes found by a language model: the people, places, things and events of a book, each with a description."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from mia_serve.llm import ChatClient, LlmFailed, Message, ask_json
from mia_serve.llm.neutral import keep_open
from mia_serve.mindscape.calls import ask_all
from mia_serve.mindscape.records import Chunk, Node
from mia_serve.mindscape.replies import plain
from mia_serve.mindscape.sentences import join_sentences

_ROLE = (
    "You are an expert reader who keeps a register of all that has a name in a text, so that it can be looked up later."
)
_RULES = """\
List the entities that matter in this passage: people, places, organisations, things and events.
- name: the fullest name that the passage gives it, as it is written there. No pronouns, and no bare words such as
  "the man", unless the text calls somebody so all the time.
- kind: person, place, organisation, thing or event.
- description: one or two sentences on who or what it is, what it does or what happens to it here, and how it stands to
  the others. Only what the passage says, in the language of the passage.
At most {most} entities, those that matter most first; an empty list if there are none.
Reply with JSON and nothing else: {{"entities": [{{"name": "...", "kind": "...", "description": "..."}}]}}"""

#: Changes with the wording.
PROMPT_HASH = hashlib.sha256(repr((_ROLE, _RULES)).encode()).hexdigest()[:16]

_ENTITIES = 20  # of one chunk
_NAME, _KIND, _SAID = 80, 20, 400  # characters in a reply
#: Most characters of a node's description, out of all chunks: about as long as a short passage.
DESCRIPTION = 1200


class _Entity(BaseModel):
    name: Annotated[str, BeforeValidator(lambda v: _cut(v, _NAME)), Field(max_length=_NAME)]
    kind: Annotated[str, BeforeValidator(lambda v: _cut(v, _KIND)), Field(max_length=_KIND)]
    description: Annotated[str, BeforeValidator(lambda v: _cut(v, _SAID)), Field(max_length=_SAID)]


class _Entities(BaseModel):
    entities: Annotated[
        list[_Entity],
        BeforeValidator(lambda v: v[:_ENTITIES] if isinstance(v, list) else v),
        Field(max_length=_ENTITIES),
    ]

    @model_validator(mode="before")
    @classmethod
    def _bare_list(cls, value: Any) -> Any:
        return {"entities": value} if isinstance(value, list) else value


def _cut(value: Any, most: int) -> Any:
    """Cut a string where an endpoint did not keep to the schema: that is no reason to ask again."""
    return plain(value)[:most].strip() if isinstance(value, str) else value


class Extracted(NamedTuple):
    """Entities, and the chunks that gave none.

    Attributes:
        nodes: Book by book, in order of first appearance.
        failures: Label of the failure (`LlmFailed.label`) by chunk id.
    """

    nodes: list[Node]
    failures: dict[str, str]


class _Found(NamedTuple):
    """One entity in one chunk."""

    name: str
    kind: str
    description: str
    chunk: Chunk


def entity_messages(text: str) -> list[Message]:
    """Return the chat that asks for the entities of a chunk."""
    shown = keep_open(text.strip("\n"), ("text",))
    asked = f"Here is a passage.\n\n<text>\n{shown}\n</text>\n\n{_RULES.format(most=_ENTITIES)}"
    return [{"role": "system", "content": _ROLE}, {"role": "user", "content": asked}]


async def extract_entities(
    client: ChatClient, chunks: Sequence[Chunk], progress: bool | None = None, max_tokens: int = 2048
) -> Extracted:
    """Let a model find the entities of each chunk, and merge those of one name within a book.

    Args:
        client: The model.
        chunks: In reading order.
        progress: Whether stderr shows a bar; None: where it is a terminal.
        max_tokens: Most tokens of a reply.

    Raises:
        LlmFailed: The endpoint cannot be used, or the budget is spent. A chunk that fails alone is only counted.
    """

    async def one(chunk: Chunk) -> list[_Found]:
        found: _Entities = await ask_json(client, entity_messages(chunk.text), _Entities, max_tokens)
        return [_Found(e.name, e.kind.lower(), e.description, chunk) for e in found.entities]

    results = await ask_all(client, chunks, one, "find entities", progress)
    failures = {c.id: r.label for c, r in zip(chunks, results, strict=True) if isinstance(r, LlmFailed)}
    return Extracted(_merge(e for result in results if not isinstance(result, LlmFailed) for e in result), failures)


def write_nodes(path: str | Path, nodes: Iterable[Node]) -> None:
    """Write nodes as JSON lines, as ``mia-train silver --nodes`` reads them; a file is replaced once they are whole."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            for node in nodes:
                row = {"id": node.id, "book": node.book_id, "name": node.name, "description": node.description}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def name_key(name: str) -> str:
    """Return what names are compared by: compatibility forms, case and space do not matter.

    Space between CJK characters goes, other space is squeezed; marks around the name are dropped.
    """
    folded = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    return join_sentences(folded.split(" ")).strip(" \"'“”‘’《》「」『』.,;:·*_") if folded else ""


def _merge(found: Iterable[_Found]) -> list[Node]:
    same: dict[tuple[str, str], list[_Found]] = {}
    for one in found:
        if key := name_key(one.name):
            same.setdefault((one.chunk.book_id, key), []).append(one)
    books: dict[str, list[Node]] = {}
    taken: set[str] = set()
    for (book, _), group in same.items():
        kind = Counter(one.kind for one in group if one.kind).most_common(1)
        description = _described(group) or (kind[0][0] if kind else "")
        if not description:
            continue
        name = group[0].name
        node_id = f"node:{book}:{name}"
        while node_id in taken:  # book "a" with "b:c" and book "a:b" with "c"
            node_id += "'"
        taken.add(node_id)
        chunk_ids = tuple(dict.fromkeys(one.chunk.id for one in group))
        node = Node(node_id, name, description, book, kind[0][0] if kind else "", chunk_ids)
        books.setdefault(book, []).append(node)
    return [node for nodes in books.values() for node in nodes]


def _described(group: Sequence[_Found]) -> str:
    """Join what is said of an entity, each thing once, as long as it fits."""
    said: dict[str, str] = {}
    length = 0
    for one in group:
        key = one.description.casefold()
        if key and key not in said and length + len(one.description) < DESCRIPTION:
            said[key] = one.description
            length += len(one.description) + 1
    return join_sentences(said.values())
