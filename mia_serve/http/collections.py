"""The collections of a server: one folder each, under one that no other server writes to."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mia_serve.core import MiaError
from mia_serve.core.storage import lock_file, sync, unlock_file
from mia_serve.http.collection import FACTS, Collection, Facts, NoCollection, write_facts
from mia_serve.http.kit import Embedder, Kit
from mia_serve.http.log import Log, WriteFailed
from mia_serve.http.operations import Conflict, Cutter
from mia_serve.mindscape.extractive import extractive_summaries
from mia_serve.mindscape.mindscape import WINDOW, Summarise

if TYPE_CHECKING:
    from mia_serve.core import Encoder

__all__ = ["Collection", "Collections", "Conflict", "NoCollection", "WriteFailed"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_DEVICES = re.compile(r"CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9]", re.IGNORECASE)  # no files on Windows


class Collections:
    """All collections of a server. Open them before use, close them after; both, and all else, in one event loop.

    Args:
        root: Their folder; it is made, and locked against other servers.
        e1: Query-only encoder. One with `for_bulk` is asked for the encoder of what is written.
        e2: Encoder of (q, σ) pairs.
        summarise: Makes the summaries of sessions, in worker threads; None: sentences that E1 picks. One that takes
            `among` (`keyword_summaries`) is given other windows to weigh words against.
        summarizer: Its name.
        settings: Further arguments of `Retriever`.
        window: Chunks in a session of a book.
        chunk_tokens: Most tokens of E1's in a chunk, where texts are cut here.
        chunk_overlap: Tokens that neighbours share.
        chats: Makes the summaries of sessions of chats; as the others where None.
        checkpoint_bytes: Size of the log at which a checkpoint is written; a large collection waits for half its own.

    Raises:
        MiaError: A number is out of range.
    """

    def __init__(
        self,
        root: str | Path,
        e1: Encoder,
        e2: Encoder | None = None,
        *,
        summarise: Summarise | None = None,
        summarizer: str = "extractive",
        settings: dict[str, Any] | None = None,
        window: int = WINDOW,
        chunk_tokens: int = 1200,
        chunk_overlap: int = 100,
        chats: Summarise | None = None,
        checkpoint_bytes: int = 8 << 20,
    ) -> None:
        if window < 1 or not 0 <= chunk_overlap < chunk_tokens:
            raise MiaError(
                f"window={window}, chunk_tokens={chunk_tokens}, chunk_overlap={chunk_overlap}: a window holds at least "
                "1 chunk, and the overlap is smaller than a chunk"
            )
        self.root = Path(root)
        self._make_kit = partial(
            _kit,
            e1,
            e2,
            summarise=summarise,
            chats=chats,
            summarizer=summarizer,
            settings=dict(settings or {}),
            window=window,
            size=chunk_tokens,
            overlap=chunk_overlap,
            checkpoint_bytes=checkpoint_bytes,
        )
        self._kit: Kit | None = None
        self._threads = ThreadPoolExecutor(16, "collections")
        self._lock: int | None = None
        self._open: dict[str, Collection] = {}
        self._damaged: dict[str, str] = {}
        self._busy: set[str] = set()  # ids that are being created or deleted

    async def open(self) -> None:
        """Open all collections, with every write that was ever acknowledged.

        One that is damaged is reported and left out; to use it is an error that says so.

        Raises:
            MiaError: Another server has the folder.
            OSError: The folder cannot be made or read.
        """
        await self._in_thread(self._recover)

    async def create(self, id: str, title: str = "", kind: Literal["books", "chats"] = "books") -> Collection:
        """Make an empty collection.

        Args:
            id: Letters, digits, `_` and `-`, not first; at most 64.
            title: A title to show.
            kind: What it is for; it takes either.

        Raises:
            Conflict: There is one of that name, or one that differs in case only.
            MiaError: The name is not allowed.
            WriteFailed: The disk did not take it.
        """
        check_id(id)
        taken = {name.casefold(): name for name in (*self._open, *self._damaged, *self._busy)}
        if id.casefold() in taken:
            raise Conflict(f"there is a collection {taken[id.casefold()]!r} already: give another id, or delete it")
        facts = Facts(id, title, kind, datetime.now(UTC).isoformat(timespec="seconds"))
        self._busy.add(id)
        try:
            self._open[id] = await self._in_thread(self._make, facts)
        except OSError as error:
            raise WriteFailed(f"collection {id!r} cannot be made ({error.strerror or error})") from error
        finally:
            self._busy.discard(id)
        return self._open[id]

    def get(self, id: str) -> Collection:
        """Return a collection.

        Raises:
            NoCollection: There is none of that name.
            MiaError: It is damaged.
        """
        if id in self._damaged:
            raise MiaError(f"collection {id!r} is damaged and was not opened; the server's log says why")
        if id not in self._open:
            raise NoCollection(f"there is no collection {id[:64]!r}: create it, or give the id of one that is listed")
        return self._open[id]

    def list(self) -> list[Collection]:
        """Return all collections, by id."""
        return [self._open[id] for id in sorted(self._open)]

    async def delete(self, id: str) -> None:
        """Delete a collection with all it holds. The write that is under way is finished, others are refused.

        Raises:
            NoCollection: There is none of that name.
            WriteFailed: The disk did not take it; the collection is still there.
        """
        collection = None if id in self._damaged else self.get(id)
        self._busy.add(id)
        self._open.pop(id, None)
        try:
            if collection is not None:
                await collection.close(keep=False)
            await self._in_thread(self._remove, id)
            self._damaged.pop(id, None)
        except OSError as error:
            if collection is not None:
                self._open[id] = await self._in_thread(Collection.open, self.root / id, self._ready())
            raise WriteFailed(f"collection {id!r} cannot be deleted ({error.strerror or error})") from error
        finally:
            self._busy.discard(id)

    async def close(self) -> None:
        """Finish what is being written, save what the logs hold, and let go of the folder."""
        await asyncio.gather(*(collection.close() for collection in self._open.values()))
        self._open.clear()
        if self._lock is not None:
            unlock_file(self._lock)
            self._lock = None
        self._threads.shutdown(wait=False)

    def _ready(self) -> Kit:
        if self._kit is None:
            raise MiaError("the collections are not open: await Collections.open() first")
        return self._kit

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _recover(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
            raise MiaError(f"{self.root}: the folder of the collections cannot be made ({error.strerror})") from error
        try:
            self._lock = lock_file(self.root / ".lock", timeout=0)
        except TimeoutError:
            raise MiaError(
                "another server has the folder of the collections open: stop it, or use another folder"
            ) from None
        kit = self._kit = self._make_kit(self._threads)
        for folder in sorted(self.root.iterdir()):
            if folder.name.startswith((".new-", ".deleted-")):
                shutil.rmtree(folder, ignore_errors=True)
            elif _ID.fullmatch(folder.name) and (folder / FACTS).is_file():
                try:
                    self._open[folder.name] = Collection.open(folder, kit)
                except Exception as error:
                    logger.exception("collection %s cannot be opened", folder.name)
                    self._damaged[folder.name] = str(error)

    def _make(self, facts: Facts) -> Collection:
        kit = self._ready()
        aside = self.root / f".new-{facts.id}-{secrets.token_hex(4)}"
        try:
            aside.mkdir()
            write_facts(aside, facts)
            os.rename(aside, self.root / facts.id)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync(self.root)
        folder = self.root / facts.id
        return Collection(folder, facts, kit, Log(folder), kit.snapshot(0, None, {}))

    def _remove(self, id: str) -> None:
        aside = self.root / f".deleted-{id}-{secrets.token_hex(4)}"
        os.rename(self.root / id, aside)
        sync(self.root)
        shutil.rmtree(aside, ignore_errors=True)


def check_id(id: str) -> None:
    """Refuse what cannot name a collection, and so its folder.

    Raises:
        MiaError: It cannot.
    """
    if not _ID.fullmatch(id):
        raise MiaError(
            f"{id[:70]!r} cannot name a collection: give 1 to 64 letters (a-z, A-Z), digits, _ and -, "
            "the first a letter or digit"
        )
    if _DEVICES.fullmatch(id):
        raise MiaError(f"{id!r} cannot name a collection: Windows keeps the name for a device; give another one")


def _kit(
    e1: Encoder,
    e2: Encoder | None,
    threads: ThreadPoolExecutor,
    *,
    summarise: Summarise | None,
    chats: Summarise | None,
    summarizer: str,
    settings: dict[str, Any],
    window: int,
    size: int,
    overlap: int,
    checkpoint_bytes: int,
) -> Kit:
    first = _for_bulk(e1)
    embedders = [Embedder(e1.spec_hash, first, True)]
    if e2 is not None and e2 is not e1 and (second := e2.spec_hash) != embedders[0].spec_hash:
        embedders.append(Embedder(second, _for_bulk(e2), False))
    if summarise is None:
        summarise = partial(extractive_summaries, encoder=first)
    # A copy: tokenizers refuse to be set up for a text in one thread while they are at work in another.
    cutter = Cutter(copy.deepcopy(e1.tokenizer), size, overlap)
    return Kit(
        *(e1, e2, tuple(embedders), summarise, chats, summarizer, settings, cutter, window, threads, checkpoint_bytes)
    )


def _for_bulk(encoder: Encoder) -> Encoder:
    """Return the encoder for what is written, which may wait behind queries; an encoder without a queue is its own."""
    for_bulk = getattr(encoder, "for_bulk", None)
    return for_bulk() if for_bulk is not None else encoder
