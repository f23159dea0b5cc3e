"""A run's folder: what it holds, which answers in it stand, and whether a run may go on in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mia_serve.core import MiaError
from mia_serve.llm import Journal

if TYPE_CHECKING:
    from mia_serve.eval.qa import QaHaystack

FORMAT, VERSION = "mia-qa-run", 1
SETTINGS = "settings.json"
REPLIES = "replies.jsonl"
#: Failures after which a run that is repeated asks again.
_TRANSIENT = ("unreachable", "timeout", "bad response", "http 408", "http 409", "http 429", "http 5")


def check_resumable(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder whose answers were made with other settings, or that holds something else.

    Args:
        folder: The run's folder.
        settings: All that the answers depend on.

    Raises:
        MiaError: It does; the message names what differs.
    """
    path = folder / SETTINGS
    if not path.is_file():
        if folder.is_dir() and (folder / "answers.jsonl").exists():
            raise MiaError(f"{folder} has answers but no {SETTINGS}; give another --out, or remove it")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        wanted = json.loads(json.dumps(settings))
        known = before["format"] == FORMAT
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise MiaError(f"{path} is not of a run of this program; give another --out")
    differing = _differences(before, wanted)
    if differing:
        raise MiaError(
            f"{folder} holds a run with other settings: {'; '.join(differing[:6])}; give another --out, or the "
            "same settings"
        )


def finished(
    journal: Journal, systems: Sequence[str], *, standing: bool = True
) -> dict[str, dict[str, dict[str, Any]]]:
    """Read the answers that stand: system -> question -> record; those that failed for a passing reason do not.

    Args:
        journal: The file of answers.
        systems: Systems whose answers are wanted.
        standing: False: also those that failed for a passing reason, as a run that ended counts them.

    Raises:
        MiaError: The file holds something else.
    """
    done: dict[str, dict[str, dict[str, Any]]] = {key: {} for key in systems}
    for record in journal.read():
        key, question = record.get("system"), record.get("id")
        if key not in done or not isinstance(question, str) or "metrics" not in record:
            continue
        if standing and any(passing(label) for label in _labels(record)):
            done[key].pop(question, None)
        else:
            done[key][question] = record
    return done


def _labels(record: Mapping[str, Any]) -> list[object]:
    """Return why an answer failed, or a step or a choice of pages before it."""
    steps = [step.get("failed") for step in record.get("steps") or ()]
    return [record.get("failed"), *steps, str(record.get("problem", "")).rpartition(": ")[2]]


def passing(failed: object) -> bool:
    """Tell whether an answer failed for a reason that may pass: it is asked for again when the run is repeated."""
    return isinstance(failed, str) and failed.startswith(_TRANSIENT)


def read_run(folder: Path) -> dict[str, Any]:
    """Read ``run.json`` of a finished run.

    Raises:
        FileNotFoundError: There is no such folder.
        MiaError: It holds no finished run, or one of another version.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no run at {folder}: give the folder of `mia-serve eval NAME --out`")
    path = folder / "run.json"
    if not path.is_file():
        raise MiaError(f"{folder} holds no finished run (no run.json): give the same `mia-serve eval` command again")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        known = (record["format"], record["version"]) == (FORMAT, VERSION)
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise MiaError(f"{path} is not a {FORMAT} of version {VERSION}; run the evaluation again")
    return record


def named_texts(
    haystacks: Sequence[QaHaystack], done: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> Iterable[dict[str, str]]:
    """Return the texts of all chunks that an answer names."""
    named: set[str] = set()
    for answers in done.values():
        for record in answers.values():
            named.update(record["chunks"], record["gold"] or (), (chunk for chunk, _ in record["e1"]))
            for part in (record, *(record["steps"] or ())):
                named.update(part["chunks"], *(fact["sources"] for fact in part["evidence"]))
    for haystack in haystacks:
        for chunk in haystack.mindscape.chunks:
            if chunk.id in named:
                named.discard(chunk.id)
                yield {"id": chunk.id, "text": chunk.text}


def lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Return records as JSON lines."""
    return "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [f"{name} {part}" for part in _differences(old, new)]
        elif old != new:
            found.append(f"{name} {_shown(old)} (now {_shown(new)})")
    return found


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else text[:12] + "…"
