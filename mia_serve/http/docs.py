"""`/docs`: the interface for people to read, made of the OpenAPI here, so that it needs no script and no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

router = APIRouter()

_STYLE = """
:root { color-scheme: light dark; --ink: #22262b; --soft: #626a74; --line: #e3e0d8; --paper: #fbfaf7; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e4df; --soft: #9ca4ae; --line: #33373d; --paper: #16181b; --card: #1e2125; }
}
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
a { color: inherit; }
h2 { margin-top: 2.5rem; text-transform: capitalize; }
details { margin: .5rem 0; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
summary { padding: .6rem .9rem; cursor: pointer; }
details > div { padding: 0 .9rem .9rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { margin: .4rem 0; padding: .7rem; white-space: pre-wrap; border: 1px solid var(--line); border-radius: 6px; }
summary span, .soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
th { white-space: nowrap; font-weight: 600; }
h4 { margin: 1rem 0 .2rem; }
"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
}

Schema = dict[str, Any]


@router.get("/docs", response_class=Response, include_in_schema=False)
async def docs(request: Request) -> Response:
    """Return the page."""
    schema = request.app.openapi()
    if getattr(request.app.state, "docs", None) is None:
        request.app.state.docs = "".join(_page(schema))
    return Response(request.app.state.docs, headers=_HEADERS, media_type="text/html; charset=utf-8")


def _page(schema: Schema) -> Iterator[str]:
    title, version = escape(schema["info"]["title"]), escape(schema["info"]["version"])
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title} {version}</title>"
    yield f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><body>"
    yield f"<h1>{title} {version}</h1><p>{escape(schema['info'].get('summary', ''))} For programs: "
    yield "<a href=/openapi.json>openapi.json</a>. To try it: <a href=/>the page</a>. "
    yield "Where the server has keys, every request but /health and /ready needs the header "
    yield "<code>Authorization: Bearer KEY</code>.</p>"
    tag = None
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                yield f"<h2>{escape(tag)}</h2>"
            yield from _operation(schema, path, method.upper(), operation)
    yield "</body></html>"


def _operation(schema: Schema, path: str, method: str, operation: Schema) -> Iterator[str]:
    title = f"<code>{method} {escape(path)}</code> <span>{escape(operation['summary'])}</span>"
    yield f"<details><summary>{title}</summary>"
    yield f"<div><p>{_prose(operation.get('description', ''))}</p>"
    if operation.get("parameters"):
        yield "<h4>Parameters</h4>"
        given = operation["parameters"]
        rows = [(one["name"], one["schema"], one.get("required", False), one.get("description")) for one in given]
        yield from _table(schema, rows)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    examples = list(_examples(schema, body)) if body else []
    if body:
        for name, shape in _shapes(schema, body["schema"]):
            yield f"<h4>Body{escape(name)}</h4>"
            required = shape.get("required", [])
            fields = shape.get("properties", {}).items()
            yield from _table(schema, [(key, it, key in required, it.get("description")) for key, it in fields])
    for example in examples or [None]:
        yield f"<pre>{escape(_curl(method, path, example))}</pre>"
    yield "<h4>Answers</h4><table>"
    for status, answer in sorted(operation["responses"].items()):
        yield f"<tr><th>{escape(status)}<td>{_prose(answer.get('description', ''))}</tr>"
    yield "</table></div></details>"


def _table(schema: Schema, rows: list[tuple[str, Schema, bool, str | None]]) -> Iterator[str]:
    yield "<table>"
    for name, field, required, description in rows:
        default = "" if required else f" = {json.dumps(field['default'])}" if "default" in field else ""
        kind = escape(_kind(schema, field) + default)
        yield f"<tr><th><code>{escape(name)}</code>{' *' if required else ''}<td><code>{kind}</code>"
        yield f"<td>{_prose(description or '')}</tr>"
    yield "</table>"


def _prose(text: str) -> str:
    """Return text as HTML; what stands between backticks is code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _kind(schema: Schema, field: Schema, deep: int = 0) -> str:
    field = _found(schema, field)
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " | ".join(dict.fromkeys(_kind(schema, part, deep) for part in field[key]))
    if "enum" in field:
        return " | ".join(json.dumps(value) for value in field["enum"])
    if "const" in field:
        return json.dumps(field["const"])
    if field.get("type") == "array":
        return f"[{_kind(schema, field.get('items', {}), deep)}, …]"
    if field.get("properties") and deep < 2:
        inner = (f"{name}: {_kind(schema, part, deep + 1)}" for name, part in field["properties"].items())
        return "{" + ", ".join(inner) + "}"
    return str(field.get("type", "any"))


def _shapes(schema: Schema, body: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the forms that a body may have."""
    found = _found(schema, body)
    forms = found.get("oneOf") or found.get("anyOf")
    if not forms:
        yield "", found
        return
    for form in forms:
        shape = _found(schema, form)
        yield f": {shape.get('title', '')}", shape


def _examples(schema: Schema, body: Schema) -> Iterator[Any]:
    if "examples" in body:
        yield from (example["value"] for example in body["examples"].values())
    elif "example" in body:
        yield body["example"]
    else:
        yield from _found(schema, body["schema"]).get("examples", [])


def _found(schema: Schema, part: Schema) -> Schema:
    while "$ref" in part:
        part = schema["components"]["schemas"][part["$ref"].rpartition("/")[2]]
    return part


def _curl(method: str, path: str, body: Any) -> str:
    verb = "" if method == "GET" or (method == "POST" and body is not None) else f" -X {method}"
    line = f"curl{verb} http://localhost:8100{path}"
    if body is None:
        return line
    shown = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"{line} -H 'Content-Type: application/json' -d '{shown}'"
