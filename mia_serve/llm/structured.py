"""JSON out of a model's reply: found tolerantly, checked strictly, asked for once more where it is wrong."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mia_serve.llm.client import ChatClient, Message
from mia_serve.llm.failures import LlmFailed

T = TypeVar("T")

_THOUGHT = re.compile(r"\A.*</think>", re.DOTALL)  # reasoning, where the server does not set it apart
_FENCE = re.compile(r"```[\w-]*[ \t]*\n?(.*?)```", re.DOTALL)
_CLOSES = {"]": "[", "}": "{"}
_SHOWN = 2000  # characters of a wrong reply that the second try shows to the model


async def ask_json(client: ChatClient, messages: Sequence[Message], shape: type[T] | Any, max_tokens: int = 1024) -> T:
    """Ask for a value of a given type as JSON.

    The schema goes to the endpoint where its root is an object; other roots most endpoints refuse, so these are asked
    for by the prompt alone. Either way the reply is checked here, and a wrong one is asked for once more with the
    complaint.

    Args:
        client: The model.
        messages: The chat; its last message says what JSON is wanted.
        shape: A pydantic model, or any type that pydantic knows: ``list[int]``, ``Annotated[...]``, ``TypedDict``.
        max_tokens: Most tokens of the reply.

    Returns:
        The value.

    Raises:
        LlmFailed: There was no reply, or ("bad reply") two that do not fit.
    """
    adapter: TypeAdapter[T] = TypeAdapter(shape)
    found = adapter.json_schema()
    schema = found if found.get("type") == "object" else None
    reply = await client.chat(messages, schema, max_tokens)
    try:
        return read_json(reply.text, adapter)
    except ValueError as error:
        complaint = f"That reply cannot be used: {error}. Reply again, with the corrected JSON and nothing else."
    again: list[Message] = [
        *messages,
        {"role": "assistant", "content": reply.text[:_SHOWN]},
        {"role": "user", "content": complaint},
    ]
    reply = await client.chat(again, schema, max_tokens)
    try:
        return read_json(reply.text, adapter)
    except ValueError as error:
        shown = " ".join(reply.text.split())[:120]
        raise LlmFailed("bad reply", f"{error}; {client.model!r} replied twice, the last time {shown!r}") from None


def read_json(text: str, shape: TypeAdapter[T] | type[T] | Any) -> T:
    """Find the one value of a type in a reply, with or without a fence or words around it.

    Only ``json.loads`` and ``ast.literal_eval`` read it; nothing in a reply is ever run. A list of one item, or an
    object with one entry, may stand for what it holds.

    Raises:
        ValueError: There is no such value, or several that differ; the message says what is wrong.
    """
    adapter: TypeAdapter[T] = shape if isinstance(shape, TypeAdapter) else TypeAdapter(shape)
    text = _THOUGHT.sub("", text)
    complaint = ""
    for stage in ([text], _FENCE.findall(text), _spans(text)):
        fitting: list[T] = []
        for candidate in stage:
            for value in _values(candidate):
                try:
                    checked = adapter.validate_python(value)
                except (ValidationError, RecursionError) as error:
                    complaint = complaint or _first_error(error)
                    continue
                if checked not in fitting:
                    fitting.append(checked)
                break
        if len(fitting) > 1:
            raise ValueError(f"it holds {len(fitting)} different JSON values where one is wanted")
        if fitting:
            return fitting[0]
    raise ValueError(complaint or "it holds no JSON")


def _values(text: str) -> Iterator[Any]:
    """Read JSON, else a Python literal; then what a wrapper of one holds."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings():  # of odd escapes in what is no Python
                warnings.simplefilter("ignore")
                value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return
    yield value
    if isinstance(value, list | dict) and len(value) == 1:
        yield next(iter(value.values() if isinstance(value, dict) else value))


def _spans(text: str) -> list[str]:
    """Return the outermost bracketed parts of a text, in one pass; brackets inside double quotes do not count."""
    found: list[tuple[int, int]] = []
    opened: list[int] = []
    quoted = escaped = False
    for i, character in enumerate(text):
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = bool(opened)
        elif character in "[{":
            opened.append(i)
        elif character in "]}" and opened and text[opened[-1]] == _CLOSES[character]:
            start = opened.pop()
            while found and found[-1][0] > start:
                found.pop()
            found.append((start, i + 1))
    return [text[start:end] for start, end in found]


def _first_error(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{first['msg']} (at {place})" if place else first["msg"]
