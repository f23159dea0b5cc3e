"""One collection: writes in order, each on disk before it is acknowledged, and a snapshot that is swapped with it.

    collection.json        what it is; which checkpoint holds, and of which version
    checkpoint-VERSION/    a mindscape with its vectors (none where the collection was empty)
    log-VERSION.jsonl      what has been written since

Recovery reads the checkpoint that `collection.json` names and the records behind its version; whatever else lies there
was left by a crash. A checkpoint is written under its own name, then named, then the logs that it covers are dropped,
so that a crash between any two steps loses nothing and repeats nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mia_serve.core import MiaError
from mia_serve.core.storage import sync
from mia_serve.http.changes import Replay, change_record, packed
from mia_serve.http.kit import Kit, encode
from mia_serve.http.log import Log, WriteFailed
from mia_serve.http.operations import Operation, Written, apply, size, unknown
from mia_serve.http.queue import QueueFull
from mia_serve.http.snapshot import Snapshot
from mia_serve.mindscape.draft import Changes, Draft
from mia_serve.mindscape.mindscape import Mindscape
from mia_serve.mindscape.vectors import PARTS, all_vectors, vector_name

logger = logging.getLogger(__name__)

FACTS = "collection.json"
_FORMAT, _FORMAT_VERSION = "mia-collection", 1
_MOST = 256  # operations that share one record, so that the first of many does not wait for the last
_MOST_WAITING = 1 << 26  # characters that may wait to be written to one collection
_RETRY_S = 10.0


class NoCollection(MiaError):
    """There is no collection of that name."""


@dataclass(frozen=True)
class Facts:
    """What `collection.json` says.

    Attributes:
        id: Name of the collection.
        title: A title to show.
        kind: "books" or "chats": what it is for. It takes either.
        created: When it was made, ISO 8601.
        version: Version that the checkpoint holds.
        checkpoint: Folder of the checkpoint; None: the collection was empty.
    """

    id: str
    title: str
    kind: str
    created: str
    version: int = 0
    checkpoint: str | None = None


class _Job(NamedTuple):
    operation: Operation
    waiter: asyncio.Future[Written]


class Collection:
    """A collection that is open; made by `Collections`. All methods are for one event loop.

    Attributes:
        id: Its name.
        snapshot: Its current version; take it once a request.
    """

    def __init__(self, folder: Path, facts: Facts, kit: Kit, log: Log, snapshot: Snapshot) -> None:
        self.id = facts.id
        self.snapshot = snapshot
        self._folder, self._facts, self._kit, self._log = folder, facts, kit, log
        self._waiting: list[_Job] = []
        self._work: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._closed = False
        self._saved_bytes = _size(folder / facts.checkpoint) if facts.checkpoint else 0
        self._save_at = self._due()

    @classmethod
    def open(cls, folder: Path, kit: Kit) -> Collection:
        """Open a collection's folder, and take up what its last process left. Blocks.

        Raises:
            MiaError: The folder is damaged.
            OSError: It cannot be read.
        """
        facts = read_facts(folder)
        log = Log(folder)
        replay, known = _replayed(folder, facts, log)
        mindscape = replay.mindscape()
        vectors, encoded = _recovered_vectors(facts.id, replay, mindscape, kit, known)
        collection = cls(folder, facts, kit, log, kit.snapshot(replay.version, mindscape, vectors))
        _clean(folder, facts)
        if encoded or log.size >= collection._save_at:
            collection._try_checkpoint(collection.snapshot)
        return collection

    def info(self) -> dict[str, Any]:
        """Return what is known of it, in JSON's types."""
        mindscape = self.snapshot.mindscape
        return {
            "id": self.id,
            "title": self._facts.title,
            "kind": self._facts.kind,
            "chunks": len(mindscape.chunks),
            "sessions": len(mindscape.sessions),
            "books": len({session.book_id for session in mindscape.sessions}),
            "version": self.snapshot.version,
            "summarizer": mindscape.summarizer or self._kit.summarizer,
            "created": self._facts.created,
            "bytes": self._saved_bytes + self._log.size,
        }

    async def write(self, operation: Operation) -> Written:
        """Do an operation; when this returns it is on disk and in `snapshot`.

        What is written while others are at work shares its record and its flush with what else waits by then. To stop
        waiting does not take back what is under way.

        Raises:
            Conflict: An id to add is there already.
            NoCollection: The collection was deleted.
            MiaError: The operation is not possible.
            QueueFull: Too much waits to be written.
            WriteFailed: The disk did not take it.
        """
        if self._closed:
            raise self._gone()
        waiting = sum(size(job.operation) for job in self._waiting) + size(operation)
        if self._waiting and waiting > _MOST_WAITING:
            raise QueueFull(waiting // 4, _MOST_WAITING // 4, _RETRY_S)  # about four characters a token
        waiter: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(operation, waiter))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._serve())
        return await waiter

    async def close(self, keep: bool = True) -> None:
        """Finish what waits (refuse it, if the collection is not to be kept), save what the log holds, and close."""
        self._closed = True
        if not keep:
            for job in self._waiting:
                if not job.waiter.done():
                    job.waiter.set_exception(self._gone())
            self._waiting.clear()
        if self._work is not None:
            await asyncio.wait([self._work])
        if self._saving is not None:
            await asyncio.wait([self._saving])
        self._log.close()
        if keep and self._log.size:
            await asyncio.get_running_loop().run_in_executor(self._kit.threads, self._try_checkpoint, self.snapshot)

    def _gone(self) -> NoCollection:
        return NoCollection(f"there is no collection {self.id!r} (any more), or the server stops")

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = [job for job in self._waiting[:_MOST] if not job.waiter.done()]  # done: given up meanwhile
            del self._waiting[:_MOST]
            operations = [job.operation for job in batch]
            outcomes = await loop.run_in_executor(self._kit.threads, self._commit, operations)
            for job, outcome in zip(batch, outcomes, strict=True):
                if job.waiter.done():
                    continue
                if isinstance(outcome, Written):
                    job.waiter.set_result(outcome)
                else:
                    job.waiter.set_exception(outcome)
            if self._log.size >= self._save_at and (self._saving is None or self._saving.done()):
                self._log.rotate()  # between two records: all in the files before are in this snapshot
                self._saving = asyncio.create_task(self._save(self.snapshot))

    async def _save(self, snapshot: Snapshot) -> None:
        await asyncio.get_running_loop().run_in_executor(self._kit.threads, self._try_checkpoint, snapshot)

    def _commit(self, operations: Sequence[Operation]) -> list[Written | Exception]:
        """Do operations in one record; where that fails as a whole, one by one, so that only those at fault fail."""
        if not operations:
            return []
        try:
            return self._write(operations)
        except WriteFailed as error:
            return [error] * len(operations)
        except Exception as error:  # of whatever kind: it belongs to who asked
            if len(operations) == 1:
                return [error]
        return [outcome for operation in operations for outcome in self._commit([operation])]

    def _write(self, operations: Sequence[Operation]) -> list[Written | Exception]:
        base = self.snapshot
        draft = Draft(None if base.empty else base.mindscape, self._kit.window, self._kit.summarizer)
        draft.summarizer = _named(draft.summarizer, self._kit.summarizer)
        outcomes: list[Changes | MiaError] = []
        for operation in operations:
            try:
                outcomes.append(apply(operation, draft, self._kit.cutter))
            except MiaError as error:
                outcomes.append(error)
        version = base.version
        if any(any(outcome) for outcome in outcomes if isinstance(outcome, Changes)):
            version += 1
            self._swap(version, base, draft)
        return [
            Written(version, *outcome, unknown(operation, outcome)) if isinstance(outcome, Changes) else outcome
            for operation, outcome in zip(operations, outcomes, strict=True)
        ]

    def _swap(self, version: int, base: Snapshot, draft: Draft) -> None:
        """Make the next version of a draft, put it on the disk, and only then show it."""
        mindscape = draft.finish(self._kit.summariser(base.mindscape), chats=self._kit.chats)
        record = change_record(version, None if base.empty else base.mindscape, mindscape)
        fresh = self._kit.embed(record, base)
        record["vectors"] = {h: packed(fresh[h], encoder.dim) for h, encoder, _ in self._kit.embedders}
        snapshot = self._kit.snapshot(version, mindscape, self._kit.carry(base, mindscape, fresh))
        self._log.append(record)
        self.snapshot = snapshot

    def _due(self) -> int:
        """Return the size of the log at which it is time for a checkpoint: writing all of it anew must be worth it."""
        return max(self._kit.checkpoint_bytes, self._saved_bytes // 2)

    def _try_checkpoint(self, snapshot: Snapshot) -> None:
        try:
            self._checkpoint(snapshot)
            self._save_at = self._due()
        except Exception as error:  # the log has it all, so nothing is lost; it is tried again when the log has grown
            self._save_at = self._log.size + self._due()
            logger.warning("collection %s: no checkpoint could be written (%s); its log grows", self.id, error)

    def _checkpoint(self, snapshot: Snapshot) -> None:
        facts = replace(self._facts, version=snapshot.version, checkpoint=None)
        if not snapshot.empty:
            facts = replace(facts, checkpoint=f"checkpoint-{snapshot.version:012d}")
            place = self._folder / str(facts.checkpoint)
            try:
                snapshot.mindscape.save(place, _named_vectors(snapshot.vectors, self._kit))
            except BaseException:
                if facts.checkpoint != self._facts.checkpoint:
                    shutil.rmtree(place, ignore_errors=True)
                raise
        write_facts(self._folder, facts)
        self._facts = facts
        self._log.drop(facts.version)
        _clean(self._folder, facts)
        self._saved_bytes = _size(self._folder / facts.checkpoint) if facts.checkpoint else 0


def read_facts(folder: Path) -> Facts:
    """Read what a collection's folder says of itself.

    Raises:
        MiaError: It says nothing, or what this version does not understand.
    """
    try:
        found = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if (found.pop("format"), found.pop("format_version")) != (_FORMAT, _FORMAT_VERSION):
            raise MiaError(f"{folder.name} is no collection of this version of MiA ({_FORMAT} {_FORMAT_VERSION})")
        return Facts(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, MiaError):
            raise
        raise MiaError(f"{folder.name}/{FACTS} cannot be read ({error}): put it back from a copy") from error


def write_facts(folder: Path, facts: Facts) -> None:
    """Write `collection.json` anew; a crash leaves the old one or the new one."""
    content = {"format": _FORMAT, "format_version": _FORMAT_VERSION} | asdict(facts)
    aside = folder / f".{FACTS}.tmp"
    with open(aside, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, folder / FACTS)
    sync(folder)


def _replayed(folder: Path, facts: Facts, log: Log) -> tuple[Replay, set[str]]:
    """Return what is there after the checkpoint and the log, and the hashes of the encoders whose vectors it has."""
    mindscape: Mindscape | None = None
    vectors: dict[str, np.ndarray] = {}
    known: set[str] = set()
    if facts.checkpoint is not None:
        mindscape = Mindscape.load(folder / facts.checkpoint)
        for name, (array, spec_hash) in all_vectors(folder / facts.checkpoint).items():
            vectors[spec_hash + ("/sessions" if name.startswith("sessions-") else "")] = array
            known.add(spec_hash)
    replay = Replay(mindscape, vectors, facts.version)
    for record in log.read():
        if record["version"] <= replay.version:
            continue  # a crash came between the checkpoint and the dropping of its logs
        if record["version"] != replay.version + 1:
            raise MiaError(
                f"the log of collection {facts.id!r} lacks versions {replay.version + 1} to {record['version'] - 1}: "
                "a file is missing; put the collection's folder back from a copy"
            )
        replay.apply(record)
        known |= record["vectors"].keys()
    return replay, known


def _recovered_vectors(
    name: str, replay: Replay, mindscape: Mindscape | None, kit: Kit, known: set[str]
) -> tuple[dict[str, np.ndarray], bool]:
    """Return the vectors of what was recovered, and whether some had to be encoded: those of an encoder that is new."""
    vectors: dict[str, np.ndarray] = {}
    encoded = False
    for spec_hash, encoder, with_sessions in kit.embedders if mindscape is not None else ():
        assert mindscape is not None
        texts = {"chunks": {c.id: c.text for c in mindscape.chunks}}
        if with_sessions:
            texts["sessions"] = {s.id: s.summary for s in mindscape.sessions}
        for part, text_of in texts.items():
            ids = list(text_of)
            rows, missing = replay.rows(part, spec_hash, ids, encoder.dim)
            if missing:
                logger.warning(
                    "collection %s: encoding %d of %d %s with encoder %s; it has vectors of %s",
                    *(name, len(missing), len(ids), part, spec_hash, ", ".join(sorted(known)) or "none"),
                )
                made = encode(encoder, [text_of[ids[i]] for i in missing])
                for i in missing:
                    rows[i] = made[text_of[ids[i]]]
                encoded = True
            vectors[spec_hash + ("/sessions" if part == "sessions" else "")] = rows
    return vectors, encoded


def _named_vectors(vectors: dict[str, np.ndarray], kit: Kit) -> dict[str, tuple[np.ndarray, str]]:
    return {
        vector_name(part, h): (vectors[key], h)
        for h, _, _ in kit.embedders
        for part, key in zip(PARTS, (h, f"{h}/sessions"), strict=True)
        if key in vectors
    }


def _named(old: str, now: str) -> str:
    """Name the summarisers of a mindscape that another one goes on with."""
    names = old.removeprefix("mixed: ").split(", ")
    return old if now in names else f"mixed: {', '.join([*names, now])}"


def _clean(folder: Path, facts: Facts) -> None:
    """Remove what crashes, and checkpoints that are no longer named, have left."""
    for item in folder.iterdir():
        if item.name.startswith((".checkpoint-", "checkpoint-")) and item.name != facts.checkpoint:
            shutil.rmtree(item, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(item.stat().st_size for item in folder.iterdir() if item.is_file())
