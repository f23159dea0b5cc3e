"""``mia-serve mindscape show``, and the facts that all commands on mindscapes print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mia_serve.cli.common import JsonOption, check_folder, check_output, check_outside, emit

if TYPE_CHECKING:
    from mia_serve.mindscape import Mindscape

_SHOWN = 20  # books, nodes and the like that are printed; --json has all


def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of `mindscape build`.")],
    sessions: Annotated[int, typer.Option(min=0, help="Sessions to print.")] = 3,
    json_to: JsonOption = None,
) -> None:
    """Print what a mindscape holds."""
    check_output(json_to, "--json")
    check_folder(folder, "mindscape")
    check_outside({"--json": json_to}, {"the mindscape": folder})
    from mia_serve.mindscape import Mindscape

    mindscape = Mindscape.load(folder)
    record = facts(folder, mindscape)
    books, nodes = _books(mindscape), [vars(node) | {"chunk_ids": list(node.chunk_ids)} for node in mindscape.nodes]
    shown = [
        {"id": s.id, "title": s.title, "date": s.date, "chunks": len(s.chunk_ids), "summary": s.summary}
        for s in mindscape.sessions[:sessions]
    ]
    text = fact_lines(record)
    text += "".join(
        f"book        {book['id']}: {_named(book)}{book['chunks']} chunks, {book['sessions']} sessions"
        f"{', summed up' if book['summary'] else ''}\n"
        for book in books[:_SHOWN]
    )
    text += _more(books, "books")
    text += "".join(f"node        {node['name']} ({node['book_id']}): {node['description']}\n" for node in nodes[:5])
    text += "".join(
        f"\n{s['id']}  {s['title']} {s['date']}".rstrip() + f"  ({s['chunks']} chunks)\n{s['summary']}\n" for s in shown
    )
    emit(text, record | {"by_book": books, "nodes": nodes, "first_sessions": shown}, json_to)


def facts(folder: Path, mindscape: Mindscape) -> dict[str, Any]:
    """Return what there is to say of a mindscape and its folder, as JSON has it."""
    from mia_serve.mindscape.append import FAILED, NO_ENTITIES, OPEN
    from mia_serve.mindscape.store import read_manifest

    vectors = read_manifest(folder)["vectors"]
    return {
        "mindscape": str(folder),
        "books": len({chunk.book_id for chunk in mindscape.chunks}),
        "sessions": len(mindscape.sessions),
        "chunks": len(mindscape.chunks),
        "characters": sum(len(chunk.text) for chunk in mindscape.chunks),
        "summarizer": mindscape.summarizer,
        "window": mindscape.window,
        "node_count": len(mindscape.nodes),
        "built": dict(mindscape.notes.get("build", {})),
        "open": list(mindscape.notes.get(OPEN, ())),
        "failed": dict(mindscape.notes.get(FAILED, {})),
        "failed_entities": dict(mindscape.notes.get(NO_ENTITIES, {})),
        "vectors": {name: {key: entry[key] for key in ("rows", "dim", "spec_hash")} for name, entry in vectors.items()},
    }


def fact_lines(record: dict[str, Any]) -> str:
    """Return the lines on `facts` for people."""
    names = ("mindscape", "books", "sessions", "chunks", "characters", "summarizer", "window")
    lines = [f"{name:<12}{record[name]}" for name in names if record[name] is not None]
    if record["built"].get("chunk_tokens"):
        lines.append(f"{'cut':<12}{record['built']['chunk_tokens']} tokens, {record['built']['overlap']} shared")
    if record["node_count"]:
        lines.append(f"{'nodes':<12}{record['node_count']}")
    if record["open"]:
        lines.append(f"{'open':<12}{_few(record['open'])} (summed up for now)")
    for what, failed in (("failed", record["failed"]), ("no entities", record["failed_entities"])):
        if failed:
            lines.append(f"{what:<12}{_few([f'{name} ({label})' for name, label in failed.items()])}")
    lines += [f"{'vectors':<12}{name}: {entry['rows']} x {entry['dim']}" for name, entry in record["vectors"].items()]
    return "\n".join(lines) + "\n"


def _books(mindscape: Mindscape) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for session in mindscape.sessions:
        book = found.setdefault(
            session.book_id,
            {"id": session.book_id, "title": session.title, "author": "", "sessions": 0, "chunks": 0, "summary": ""},
        )
        book["sessions"] += 1
        book["chunks"] += len(session.chunk_ids)
    for facts_of in mindscape.books:
        found[facts_of.id] |= {
            "title": facts_of.title or found[facts_of.id]["title"],
            "author": facts_of.author,
            "summary": facts_of.summary,
        }
    return list(found.values())


def _named(book: dict[str, Any]) -> str:
    return ", ".join([*(part for part in (book["title"], book["author"]) if part), ""])


def _few(items: list[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def _more(items: list[Any], what: str) -> str:
    return f"            and {len(items) - _SHOWN} more {what}\n" if len(items) > _SHOWN else ""
