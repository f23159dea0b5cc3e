"""One HTML page of a question-answering run: tables, and for each question the map of the book it was asked of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.qa_folder import read_run
from mia_serve.llm import Journal

_REPLY = 4000  # characters of a reply that are shown


def build_page(run: str | Path, limit: int | None = None) -> str:
    """Lay out a run as one self-contained HTML page: no script, style, font or picture is fetched.

    Args:
        run: Folder that `mia-serve eval NAME --out` wrote.
        limit: Most questions that can be opened, spread evenly over the run; the tables are of all of them.

    Raises:
        FileNotFoundError: There is no such folder.
        MiaError: It holds no finished run.
    """
    from jinja2 import Environment

    folder = Path(run)
    record = read_run(folder)
    asked = _questions(folder, record)
    if limit is not None and limit < len(asked):
        asked = [asked[i * len(asked) // limit] for i in range(limit)]
    data = _data(folder, record, asked)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"figure": figure, "difference": difference}
    parts = {name: _part(name) for name in ("page.css", "page.js")}
    return environment.from_string(_part("page.html.j2")).render(
        run=record,
        metrics=_metrics(record),
        axis=_axis(record),
        shown=len(asked),
        css=parts["page.css"],
        js=parts["page.js"],
        data=_embedded(data),
    )


def figure(value: float | None, digits: int = 3) -> str:
    """Write a share as ``.512``; – where there is none, 1.000 and more with its whole part."""
    if value is None:
        return "–"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def difference(value: float | None, digits: int = 3) -> str:
    """Write a difference with its sign: ``+.021``."""
    return "–" if value is None else ("+" if value >= 0 else "−") + figure(abs(value), digits)


def _metrics(record: dict[str, Any]) -> list[str]:
    """Return the metrics that any system has, in the order in which they come."""
    return list(dict.fromkeys(name for system in record["systems"] for name in system["metrics"]))


def _axis(record: dict[str, Any]) -> dict[str, float]:
    """Return the right end of each metric's bars: 1 for shares, the largest bound for others."""
    ends: dict[str, float] = {}
    for system in record["systems"]:
        for name, value in system["metrics"].items():
            bounds = [b for b in (value.get("high"), value.get("mean")) if b is not None]
            ends[name] = max([ends.get(name, 1.0), *bounds])
    return ends


def _questions(folder: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each question once, with what every system of the run answered, in the order of the benchmark's books."""
    known = [system["key"] for system in record["systems"]]
    asked: dict[str, dict[str, Any]] = {}
    for answer in Journal(folder / "answers.jsonl").read():
        if answer.get("system") not in known or "id" not in answer:
            continue
        question = asked.setdefault(answer["id"], {"first": answer, "answers": {}})
        question["answers"][answer["system"]] = answer  # of two records of one pair the later one counts
    if not asked:
        raise MiaError(
            f"{folder}/answers.jsonl holds no answer of the run: give the same `mia-serve eval` command again"
        )
    order = {key: place for place, key in enumerate(known)}
    for question in asked.values():
        question["answers"] = dict(sorted(question["answers"].items(), key=lambda item: order[item[0]]))
    return sorted(asked.values(), key=lambda q: (q["first"]["haystack"], q["first"]["book"], str(q["first"]["id"])))


class _Map:
    """Numbers the sessions and chunks of a haystack, so that the page names each by its place."""

    def __init__(self, haystack: dict[str, Any]) -> None:
        self.sessions = {session["id"]: i for i, session in enumerate(haystack["sessions"])}
        ids = [chunk for session in haystack["sessions"] for chunk in session["chunks"]]
        self.chunks = {chunk: i for i, chunk in enumerate(ids)}
        self.ids = ids
        places = {book["id"]: i for i, book in enumerate(haystack["books"])}
        self.facts = {
            "id": haystack["id"],
            "books": [{"id": book["id"], "title": book.get("title") or book["id"]} for book in haystack["books"]],
            "sessions": [
                {
                    "id": session["id"],
                    "book": places[session["book_id"]],
                    "name": " ".join(filter(None, (session.get("title"), session.get("date")))),
                    "summary": session["summary"],
                    "chunks": len(session["chunks"]),
                }
                for session in haystack["sessions"]
            ],
        }

    def hits(self, ids: Iterable[str], scores: Iterable[float] | None) -> list[list[float]]:
        """Return [place, score] of each chunk; what was read in no order has no scores, and 0 for each."""
        pairs = zip_longest(ids, scores or (), fillvalue=0.0)
        return [[self.chunks[chunk], round(score, 4)] for chunk, score in pairs if chunk in self.chunks]

    def signature(self, record: dict[str, Any] | None) -> dict[str, Any] | None:
        if not record:
            return None
        gains, terms, texts = record.get("gains") or [], record.get("pick_terms") or [], record["texts"]
        ids = record["session_ids"]
        picks = [
            {
                "session": self.sessions.get(name, -1),
                "gain": gains[i] if i < len(gains) else None,
                "terms": terms[i] if i < len(terms) else None,
            }
            for i, name in enumerate(ids)
        ]
        own = [{"session": -1, "text": text, "gain": None, "terms": None} for text in texts] if not ids else []
        return {"mode": record.get("mode", ""), "picks": picks or own, "total": record.get("terms")}


def _data(folder: Path, record: dict[str, Any], asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Gather what the page's script needs, chunks and sessions by their places."""
    maps = {haystack["id"]: _Map(haystack) for haystack in Journal(folder / "haystacks.jsonl").read()}
    missing = next((q["first"]["haystack"] for q in asked if q["first"]["haystack"] not in maps), None)
    if missing is not None:
        raise MiaError(f"{folder}/haystacks.jsonl lacks {missing!r}: run the evaluation again")
    places = {name: i for i, name in enumerate(maps)}
    questions = [_question(q, maps[q["first"]["haystack"]], places) for q in asked]
    named: dict[int, set[int]] = {}
    for question in questions:
        named.setdefault(question["haystack"], set()).update(_named(question))
    texts: dict[str, dict[int, str]] = {}
    by_id = {row["id"]: row["text"] for row in Journal(folder / "texts.jsonl").read() if "id" in row}
    for place, of in enumerate(maps.values()):
        found = {i: by_id[of.ids[i]] for i in sorted(named.get(place, ())) if of.ids[i] in by_id}
        texts[str(place)] = found
    labels = [{"key": s["key"], "label": s["label"]} for s in record["systems"]]
    used = sorted(named)
    return {
        "systems": labels,
        "weights": record.get("settings", {}).get("weights") or [0.3, 0.4, 0.3],
        "haystacks": [of.facts if place in used else None for place, of in enumerate(maps.values())],
        "chunks": [of.ids if place in used else None for place, of in enumerate(maps.values())],
        "texts": texts,
        "questions": questions,
    }


def _question(question: dict[str, Any], of: _Map, places: dict[str, int]) -> dict[str, Any]:
    first, answers = question["first"], question["answers"]
    lit = next((a for a in answers.values() if a.get("e1")), None)
    return {
        "id": first["id"],
        "haystack": places[first["haystack"]],
        "book": first.get("book", ""),
        "task": first.get("task", ""),
        "text": first["question"],
        "options": first.get("options") or [],
        "references": first.get("references") or ([first["label"]] if first.get("label") else []),
        "label": first.get("label") or "",
        "gold": None if first.get("gold") is None else [of.chunks[c] for c in first["gold"] if c in of.chunks],
        "e1": of.hits(*zip(*lit["e1"], strict=True)) if lit else [],
        "pool": [of.sessions[s] for s in (lit or {}).get("pool") or [] if s in of.sessions],
        "answers": {key: _answer(answer, of) for key, answer in answers.items()},
    }


def _answer(answer: dict[str, Any], of: _Map) -> dict[str, Any]:
    reply = answer.get("reply") or ""
    return {
        "prediction": answer.get("prediction"),
        "reply": reply if len(reply) <= _REPLY else reply[:_REPLY] + " …",
        "failed": answer.get("failed"),
        "mode": answer.get("mode"),
        "hits": of.hits(answer.get("chunks") or [], answer.get("scores")),
        "signature": of.signature(answer.get("signature")),
        "evidence": [_fact(fact, of) for fact in answer.get("evidence") or []],
        "metrics": answer.get("metrics") or {},
        "trimmed": answer.get("trimmed"),
        "steps": [_step(step, of) for step in answer.get("steps") or []],
    }


def _step(step: dict[str, Any], of: _Map) -> dict[str, Any]:
    return {
        "query": step["query"],
        "signature": of.signature(step.get("signature")),
        "hits": of.hits(step.get("chunks") or [], step.get("scores")),
        "candidates": [of.sessions[s] for s in step.get("candidates") or [] if s in of.sessions],
        "decision": step.get("decision"),
        "next": step.get("next_query"),
        "evidence": [_fact(fact, of) for fact in step.get("evidence") or []],
        "failed": step.get("failed"),
    }


def _fact(fact: dict[str, Any], of: _Map) -> dict[str, Any]:
    return {"text": fact["text"], "sources": [of.chunks[c] for c in fact.get("sources") or [] if c in of.chunks]}


def _named(question: dict[str, Any]) -> set[int]:
    """Return the chunks whose texts the page shows: what was found, what is gold, what facts name."""
    found = set(question["gold"] or ())
    for answer in question["answers"].values():
        for part in (answer, *answer["steps"]):
            found |= {int(place) for place, _ in part["hits"]}
            found |= {source for fact in part["evidence"] for source in fact["sources"]}
    return found


def _embedded(data: dict[str, Any]) -> str:
    """Write JSON that may stand in a script element: no text of a book or a model can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode()


def _part(name: str) -> str:
    return files("mia_serve.eval").joinpath("page_files", name).read_text(encoding="utf-8")
