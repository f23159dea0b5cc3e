"""Replies of a language model, recorded and replayed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mia_serve.core.errors import MiaError
from mia_serve.llm.failures import LlmFailed
from mia_serve.llm.journal import Journal

Mode = Literal["record", "replay", "off"]


class Usage(NamedTuple):
    """Tokens of one call, as the endpoint counts them; 0 where it does not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Reply:
    """What a model replied.

    Attributes:
        text: Content of the message.
        finish_reason: Why it ended: "stop", or another word of the endpoint's.
        usage: Tokens of the call that made it.
        cached: Whether it was recorded earlier.
        seconds: What the call took when it was made; 0 in recordings that do not say.
    """

    text: str
    finish_reason: str
    usage: Usage
    cached: bool = False
    seconds: float = 0.0


def call_key(
    model: str,
    messages: Sequence[Any],
    schema: dict[str, Any] | None,
    temperature: float,
    seed: int,
    max_tokens: int,
) -> str:
    """Return the SHA-256 of all that a reply depends on, from its UTF-8 JSON; the address is not part of it."""
    call = {
        "model": model,
        "messages": list(messages),
        "schema": schema,
        "temperature": float(temperature),
        "seed": seed,
        "max_tokens": max_tokens,
    }
    return hashlib.sha256(json.dumps(call, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def _is_reply(entry: dict[str, Any]) -> bool:
    failed, usage = entry.get("failed"), entry.get("usage")
    said = all(isinstance(entry.get(key), str) for key in ("text", "finish_reason"))
    counted = isinstance(usage, list) and len(usage) == 2 and all(isinstance(count, int) for count in usage)
    told = isinstance(failed, dict) and {"reason", "detail", "status"} <= failed.keys()
    timed = isinstance(entry.get("seconds", 0.0), int | float)
    return isinstance(entry.get("key"), str) and (told if "failed" in entry else said and counted and timed)


class ReplyCache:
    """A file of replies (JSON lines): key, model, seed, reply, usage, seconds; no prompts and no API key.

    Failed calls are recorded too, so that replay shows what the run saw; recording makes them again.

    Args:
        path: The file.
        mode: "record" uses what is there and adds what is not; "replay" makes no call; "off" does neither.

    Raises:
        FileNotFoundError: There is nothing to replay.
        MiaError: The file is something else, or the mode is unknown.
    """

    def __init__(self, path: str | Path, mode: Mode = "record") -> None:
        if mode not in ("record", "replay", "off"):
            raise MiaError(f"cache mode {mode!r}: allowed are 'record', 'replay', 'off'")
        self.path, self.mode = Path(path), mode
        self._journal = Journal(path)
        self._entries: dict[str, dict[str, Any]] = {}
        if mode == "replay" and not self.path.is_file():
            raise FileNotFoundError(f"{path}: no recorded replies to replay; record them first")
        if mode == "off":
            return
        if self.path.is_dir() or not self.path.absolute().parent.is_dir():
            raise MiaError(f"{path}: give a file in a folder that exists")
        for entry in self._journal.read():
            if not _is_reply(entry):
                raise MiaError(f"{path} holds other records than replies; give another file")
            self._entries[entry["key"]] = entry

    @property
    def models(self) -> list[str]:
        """Names of the models whose replies are recorded, in order of appearance."""
        return list(dict.fromkeys(str(entry["model"]) for entry in self._entries.values() if "model" in entry))

    def get(self, key: str, model: str) -> Reply | None:
        """Return the recorded reply, or None where a call is to be made.

        Raises:
            LlmFailed: In replay, if the call was not recorded, or failed when it was.
        """
        entry = self._entries.get(key)
        if entry is not None and "text" in entry:
            seconds = entry.get("seconds", 0.0)
            return Reply(entry["text"], entry["finish_reason"], Usage(*entry["usage"]), cached=True, seconds=seconds)
        if self.mode != "replay":
            return None
        if entry is None:
            raise LlmFailed(
                "not recorded",
                f"{self.path} holds no reply of {model!r} for call {key[:16]}…: prompt, schema or settings are not "
                "those of the recording; run again without replay",
            )
        failed = entry["failed"]
        raise LlmFailed(failed["reason"], failed["detail"], failed["status"])

    def put(self, key: str, model: str, seed: int, result: Reply | LlmFailed) -> None:
        """Record what a call gave; it is on disk when this returns."""
        if self.mode != "record":
            return
        entry: dict[str, Any] = {"key": key, "model": model, "seed": seed}
        if isinstance(result, Reply):
            result = replace(result, cached=False)
            entry |= {"text": result.text, "finish_reason": result.finish_reason, "usage": list(result.usage)}
            entry["seconds"] = result.seconds
        else:
            entry["failed"] = {"reason": result.reason, "status": result.status, "detail": str(result)}
        self._journal.append(entry)
        self._entries[key] = entry

    def close(self) -> None:
        """Close the file."""
        self._journal.close()
