"""Collections on disk: writes against a slow reference, versions that readers see, crashes of the disk, restarts."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import re
import resource
import shutil
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_serve.core import Encoder, MiaError
from mia_serve.http.collections import Collection, Collections, Conflict, NoCollection, WriteFailed
from mia_serve.http.operations import (
    AddChunks,
    AddText,
    AddTurns,
    ChunkIn,
    DeleteBook,
    DeleteChunks,
    TurnIn,
    Upsert,
)
from mia_serve.http.queue import QueueFull
from mia_serve.mindscape import Book, Mindscape, Window, build_mindscape, chunk_text, keyword_summaries
from mia_serve.mindscape.sources import SourceBook, Sources
from mia_serve.retriever import Retriever

WORDS = re.findall(
    r"\w+", "lamp quay ferry ledger clock key floor boat night village tide sand rope mill corn owl moss fox fern dusk"
)


def first_words(windows: Any) -> list[str]:
    """A summary that depends on its window alone."""
    return [" ".join(w.texts)[:40].strip() or "-" for w in windows]


@pytest.fixture(scope="module")
def e1(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert, device="cpu")


@pytest.fixture(scope="module")
def e2(tiny_qwen3: Path) -> Encoder:
    return Encoder.load(tiny_qwen3, device="cpu")


def make(root: Path, e1: Encoder, e2: Encoder | None = None, **changes: Any) -> Collections:
    given = {"summarise": first_words, "summarizer": "first", "window": 3, "chunk_tokens": 16, "chunk_overlap": 2}
    return Collections(root, e1, e2, **{**given, **changes})


@asynccontextmanager
async def opened(root: Path, e1: Encoder, e2: Encoder | None = None, **changes: Any) -> AsyncIterator[Collections]:
    collections = make(root, e1, e2, **changes)
    await collections.open()
    try:
        yield collections
    finally:
        await collections.close()


def chunks(*texts: str, ids: Any = ()) -> tuple[ChunkIn, ...]:
    return tuple(ChunkIn(i, t) for i, t in zip([*ids, *[None] * (len(texts) - len(ids))], texts, strict=True))


def texts(collection: Collection) -> dict[str, str]:
    return {c.id: c.text for c in collection.snapshot.mindscape.chunks}


@contextmanager
def no_encoding(*encoders: Encoder) -> Iterator[list[int]]:
    """Count the texts that are encoded as documents meanwhile."""
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for encoder in encoders:
            real = encoder.encode_documents

            def counted(given: Any, real: Callable = real, **more: Any) -> np.ndarray:
                counts.append(len(given))
                return real(given, **more)

            patch.setattr(encoder, "encode_documents", counted)
        yield counts


def check_vectors(collection: Collection, e1: Encoder, e2: Encoder | None = None) -> None:
    """All vectors are those of encoding all texts anew."""
    m, vectors = collection.snapshot.mindscape, collection.snapshot.vectors
    if not m.chunks:
        return
    for encoder in (e1, *([e2] if e2 else [])):
        assert np.abs(vectors[encoder.spec_hash] - encoder.encode_documents([c.text for c in m.chunks])).max() < 1e-5
    summaries = e1.encode_documents([s.summary for s in m.sessions])
    assert np.abs(vectors[f"{e1.spec_hash}/sessions"] - summaries).max() < 1e-5


async def test_any_writes_are_what_a_dict_of_texts_is(tmp_path, e1, e2):
    for seed in range(3):
        await _random_writes(tmp_path / str(seed), random.Random(seed), e1, e2)


async def _random_writes(root: Path, rng: random.Random, e1: Encoder, e2: Encoder) -> None:
    slow: dict[str, tuple[str, str]] = {}  # id -> (book, text)
    ever: dict[str, set[str]] = {}  # ids that a book has had since it is there
    collections = make(root, e1, e2, checkpoint_bytes=rng.choice([1, 20_000, 1 << 30]))
    await collections.open()
    collection = await collections.create("c")
    for step in range(40):
        kind, book = rng.random(), rng.choice("abc")
        new = [f"{rng.choice(WORDS)} {rng.choice(WORDS)} {step} {i}" for i in range(rng.randrange(1, 5))]
        some = rng.sample(sorted(slow), min(len(slow), rng.randrange(1, 4)))
        if kind < 0.4:
            if book == "c":
                turns = tuple(TurnIn(None, "Ana", text) for text in new)
                done = await collection.write(AddTurns("c", f"s{step // 9}", turns))
                new = [f"Ana: {text}" for text in new]
            else:
                done = await collection.write(AddChunks(book, chunks(*new)))
            assert ever.get(book, set()).isdisjoint(done.added)
            slow |= {i: (book, t) for i, t in zip(done.added, new, strict=True)}
        elif kind < 0.55:
            own = [f"own-{step}-{i}" for i in range(len(new))]
            done = await collection.write(
                Upsert(chunks(*new, *(f"x {step} {i}" for i in some), ids=[*own, *some]), "a")
            )
            assert done.added == tuple(own) and set(done.replaced) == set(some)
            slow |= {i: ("a", t) for i, t in zip(own, new, strict=True)}
            slow |= {i: (slow[i][0], f"x {step} {i}") for i in some}
        elif kind < 0.85:
            done = await collection.write(DeleteChunks((*some, "nobody")))
            assert set(done.deleted) == set(some) and done.unknown == ("nobody",)
            for i in some:
                del slow[i]
        elif kind < 0.93:
            done = await collection.write(DeleteBook(book))
            gone = {i for i, (b, _) in slow.items() if b == book}
            assert set(done.deleted) == gone and done.unknown == (() if gone else (book,))
            slow = {i: pair for i, pair in slow.items() if i not in gone}
        else:
            await collections.close()
            collections = make(root, e1, e2)
            with no_encoding(e1, e2) as encoded:
                await collections.open()
            assert encoded == []
            collection = collections.get("c")
        ever = {b: ever.get(b, set()) | {i for i, (own, _) in slow.items() if own == b} for b, _ in slow.values()}
        assert texts(collection) == {i: t for i, (_, t) in slow.items()}
        m = collection.snapshot.mindscape
        assert [s.summary for s in m.sessions] == first_words(
            [Window(tuple(c.text for c in m.chunks if c.session_id == s.id)) for s in m.sessions]
        )
    check_vectors(collection, e1, e2)
    if slow:
        snapshot = collection.snapshot
        whole = Retriever(snapshot.mindscape, e1, e2).search(["lamp ferry", "owl"], 5).hits
        for query, ids in zip(("lamp ferry", "owl"), whole.ids, strict=True):
            signature = await snapshot.searcher.signature(query)
            assert (await snapshot.searcher.search(query, 5, signature)).ids == tuple(ids)
    await collections.close()


async def test_a_text_in_pieces_is_the_text_cut_at_once(tmp_path, e1):
    text = "\n\n".join(" ".join(random.Random(i).choices(WORDS, k=23)) + "." for i in range(9))
    async with opened(tmp_path, e1) as collections:
        collection = await collections.create("c")
        for start in range(0, len(text), 170):
            await collection.write(AddText("a", text[start : start + 170], "A", "Ann"))
        sources = Sources([SourceBook("a", "A", "Ann", text)], [], [])
        whole = build_mindscape(sources, e1.tokenizer, first_words, size=16, overlap=2, window=3, summarizer="first")
        m = collection.snapshot.mindscape
        assert (m.chunks, m.sessions, m.books, m.tails) == (whole.chunks, whole.sessions, whole.books, whole.tails)
        check_vectors(collection, e1)
        # An edited book goes on with a text of its own.
        await collection.write(DeleteChunks(("a:1",)))
        before = texts(collection)
        more = ["A new beginning of the end. " * 9, "It goes on, and on. " * 9]
        for part in more:
            await collection.write(AddText("a", part))
        after = texts(collection)
        assert before.items() < after.items()
        assert [t for i, t in after.items() if i not in before] == [
            c.text for c in chunk_text("".join(more), e1.tokenizer, 16, 2)
        ]
        assert collection.snapshot.mindscape.sessions[0].chunk_ids == ("a:0", "a:2")


async def test_an_operation_is_done_whole_or_not_at_all(tmp_path, e1):
    async with opened(tmp_path, e1) as collections:
        collection = await collections.create("c")
        await collection.write(AddChunks("a", chunks("one", "two", ids=["x", "y"])))
        await collection.write(AddTurns("chat", "s1", (TurnIn("t1", "Ana", "hello"), TurnIn(None, "", "bye"))))
        assert texts(collection) == {"x": "one", "y": "two", "t1": "Ana: hello", "chat:s1:1": "bye"}
        before = collection.snapshot
        for operation, error, message in (
            (AddChunks("a", chunks("new", "again", ids=["z", "y"])), Conflict, "'y' is there already"),
            (AddChunks("a", chunks("new", "again", ids=["z", "z"])), Conflict, "'z' occurs twice"),
            (AddTurns("chat", "s1", (TurnIn("x", "", "hi"),)), Conflict, "'x' is there already"),
            (AddChunks("a", chunks("new", " ")), MiaError, "text 1 is empty"),
            (AddChunks("a", chunks("half \ud800")), MiaError, "half a character"),
            (AddChunks("a", ()), MiaError, "nothing is added"),
            (AddChunks("", chunks("new")), MiaError, "book id of 0 characters"),
            (AddChunks("a" * 600, chunks("new")), MiaError, "book id of 600 characters"),
            (AddChunks("chat", chunks("new")), MiaError, "'chat' is a chat"),
            (AddTurns("a", "s1", (TurnIn(None, "", "hi"),)), MiaError, "'a' is a book"),
            (AddText("a", "  "), MiaError, "text 0 is empty"),
            (Upsert(chunks("other", "new", ids=["x", "n"]), "chat"), MiaError, "'chat' is a chat"),
            (Upsert(chunks("other", "other", ids=["x", "x"])), Conflict, "occurs twice"),
            (Upsert(chunks("other")), MiaError, "has no id"),
        ):
            with pytest.raises(error, match=message):
                await collection.write(operation)
            assert collection.snapshot is before
        assert (await collection.write(Upsert(chunks("one", ids=["x"])))).version == before.version  # nothing changed
        done = await collection.write(Upsert(chunks("other", "new", ids=["x", "n"])))
        assert (done.replaced, done.added, texts(collection)["n"]) == (("x",), ("n",), "new")


async def test_writes_at_once_share_a_flush_and_fail_alone(tmp_path, e1, monkeypatch):
    flushes = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushes.append(fd), real(fd))[1])

    def failing(windows):
        if any("poison" in text for w in windows for text in w.texts):
            raise RuntimeError("the summariser is ill")
        return first_words(windows)

    async with opened(tmp_path, e1, summarise=failing) as collections:
        collection = await collections.create("c")
        flushes.clear()
        writes = [collection.write(AddChunks(f"b{i}", chunks(f"{i}", ids=[f"i{i // 2}"]))) for i in range(100)]
        done = await asyncio.gather(*writes, return_exceptions=True)
        assert [isinstance(d, Conflict) for d in done] == [False, True] * 50  # the second of two in one batch
        assert len(texts(collection)) == 50 and 1 <= len(flushes) < 20
        bad = AddChunks("bad", chunks("fine", "poison"))
        done = await asyncio.gather(
            *(collection.write(o) for o in (AddChunks("g1", chunks("x")), bad, AddChunks("g2", chunks("y")))),
            return_exceptions=True,
        )
        assert [type(d).__name__ for d in done] == ["Written", "RuntimeError", "Written"]
        assert "bad:0" not in texts(collection) and {"g1:0", "g2:0"} <= set(texts(collection))


async def test_a_write_costs_what_is_new_only(tmp_path, e1, e2):
    async with opened(tmp_path, e1, e2) as collections:
        collection = await collections.create("c")
        await collection.write(AddChunks("a", chunks(*(f"{w} {i}" for i, w in enumerate(WORDS)))))
        with no_encoding(e1) as first, no_encoding(e2) as second:
            await collection.write(AddChunks("a", chunks("one more")))
        assert (first, second) == ([2], [1])  # a chunk and the summary of its window; E2 chooses no sessions
        with no_encoding(e1) as first, no_encoding(e2) as second:
            await collection.write(DeleteChunks(("a:0",)))
            await collection.write(DeleteBook("nobody"))
        assert (first, second) == ([1], [])
        check_vectors(collection, e1, e2)


async def test_readers_see_one_version_and_never_wait(tmp_path, e1):
    gate, entered = threading.Event(), threading.Event()

    def slow(windows):
        entered.set()
        assert gate.wait(30)
        return first_words(windows)

    async with opened(tmp_path, e1, summarise=slow) as collections:
        collection = await collections.create("c")
        gate.set()
        await collection.write(AddChunks("a", chunks("round 0 one", "round 0 two", ids=["x", "y"])))
        stop, seen = asyncio.Event(), set()

        async def read() -> None:
            while not stop.is_set():
                snapshot = collection.snapshot
                found = await snapshot.searcher.search("round", 2)
                own = {snapshot.mindscape.chunks[row].text.split()[1] for row in found.rows}
                assert len(own) == 1 and set(found.ids) == {"x", "y"}  # never two rounds at once
                assert {snapshot.mindscape.chunks[snapshot.row_of(i)].text.split()[1] for i in "xy"} == own
                assert len(snapshot.lexical) == len(snapshot.mindscape.chunks)
                seen.add(own.pop())

        readers = [asyncio.create_task(read()) for _ in range(4)]
        for i in range(1, 15):
            await collection.write(Upsert(chunks(f"round {i} one", f"round {i} two", ids=["x", "y"])))
        gate.clear()
        entered.clear()
        waiting = asyncio.create_task(collection.write(DeleteChunks(("x",))))
        await asyncio.to_thread(entered.wait, 30)
        async with asyncio.timeout(20):  # while the write hangs
            for _ in range(3):
                assert len((await collection.snapshot.searcher.search("another", 5)).ids) == 2
        assert not waiting.done()
        stop.set()
        await asyncio.gather(*readers)
        gate.set()
        assert (await waiting).deleted == ("x",)
        assert len(seen) > 1


async def test_a_restart_finds_everything_and_encodes_nothing(tmp_path, e1, e2, monkeypatch):
    async with opened(tmp_path, e1, e2) as collections:
        await collections.create("empty", "Nothing", "chats")
        collection = await collections.create("c", "T", "books")
        await collection.write(AddChunks("a", chunks("one", "two")))
        emptied = await collections.create("emptied")
        await emptied.write(AddChunks("a", chunks("one")))
        await emptied.write(DeleteBook("a"))
        info, held = [c.info() for c in collections.list()], texts(collection)
        assert [i["id"] for i in info] == ["c", "emptied", "empty"]
        assert info[0] | {"created": "", "bytes": 0} == {
            "id": "c", "title": "T", "kind": "books", "chunks": 2, "sessions": 1, "books": 1, "version": 1,
            "summarizer": "first", "created": "", "bytes": 0,
        }  # fmt: skip
        assert info[0]["bytes"] > 500
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["checkpoint-000000000001", "collection.json"]
    with no_encoding(e1, e2) as encoded:
        async with opened(tmp_path, e1, e2) as collections:
            again = [c.info() for c in collections.list()]
            assert [i | {"bytes": 0} for i in again] == [i | {"bytes": 0} for i in info]
            assert texts(collections.get("c")) == held
            assert collections.get("emptied").snapshot.empty
            assert (await collections.get("emptied").write(DeleteBook("a"))).unknown == ("a",)
    assert encoded == []


async def test_another_encoder_encodes_anew_once_and_says_so(tmp_path, e1, e2, caplog):
    async with opened(tmp_path, e1) as collections:
        collection = await collections.create("c")
        await collection.write(AddChunks("a", chunks("one", "two", "three", "four")))
    with caplog.at_level(logging.WARNING, "mia_serve.http"):
        async with opened(tmp_path, e2) as collections:
            check_vectors(collections.get("c"), e2)
    assert [r.getMessage() for r in caplog.records] == [
        f"collection c: encoding 4 of 4 chunks with encoder {e2.spec_hash}; it has vectors of {e1.spec_hash}",
        f"collection c: encoding 2 of 2 sessions with encoder {e2.spec_hash}; it has vectors of {e1.spec_hash}",
    ]
    with no_encoding(e2) as encoded:
        async with opened(tmp_path, e2):
            pass
    assert encoded == []


async def test_the_encoder_may_change_between_records(tmp_path, e1, e2):
    for encoder, text in ((e1, "first"), (e2, "second"), (e1, "third")):
        collections = make(tmp_path, encoder)
        await collections.open()
        collection = collections.get("c") if collections.list() else await collections.create("c")
        await collection.write(Upsert(chunks(text, text + " too", ids=["x", text])))
        check_vectors(collection, encoder)
        await collections.close()
    async with opened(tmp_path, e1, e2) as collections:
        assert texts(collections.get("c")) == {
            "x": "third", "first": "first too", "second": "second too", "third": "third too"
        }  # fmt: skip
        check_vectors(collections.get("c"), e1, e2)


async def test_a_torn_record_is_dropped_and_a_damaged_one_is_refused(tmp_path, e1, caplog):
    collections = make(tmp_path, e1)
    await collections.open()
    collection = await collections.create("c")
    for i in range(3):
        await collection.write(AddChunks("a", chunks(f"text {i}")))
    (log,) = (tmp_path / "c").glob("log-*.jsonl")
    whole = log.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line)["record"]["version"] for line in lines] == [1, 2, 3]
    other = tmp_path.parent / f"{tmp_path.name}-copies"
    for cut in (1, 10, len(lines[2]) // 2, len(lines[2]) - 1, len(lines[2])):
        root = other / str(cut)
        (root / "c").mkdir(parents=True)
        (root / "c" / "collection.json").write_bytes((tmp_path / "c" / "collection.json").read_bytes())
        (root / "c" / log.name).write_bytes(whole[: len(whole) - cut])
        async with opened(root, e1) as again:
            assert list(texts(again.get("c")).values()) == ["text 0", "text 1"]
            await again.get("c").write(AddChunks("a", chunks("text 2 again")))
        async with opened(root, e1) as again:
            assert list(texts(again.get("c")).values()) == ["text 0", "text 1", "text 2 again"]
    for name, damaged in {
        "turned": lines[0] + lines[1].replace(b"text 1", b"text 7") + lines[2],
        "lost": lines[0] + lines[2],
    }.items():
        root = other / name
        (root / "c").mkdir(parents=True)
        (root / "c" / "collection.json").write_bytes((tmp_path / "c" / "collection.json").read_bytes())
        (root / "c" / log.name).write_bytes(damaged)
        async with opened(root, e1) as again:
            await again.create("d")
            assert [c.id for c in again.list()] == ["d"]
            with pytest.raises(MiaError, match="'c' is damaged"):
                again.get("c")
            with pytest.raises(Conflict):
                await again.create("C")
            assert (root / "c" / log.name).read_bytes() == damaged  # nothing was thrown away
            await again.delete("c")
            assert [p.name for p in root.iterdir() if p.name[0] != "."] == ["d"]
    await collections.close()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let the system refuse to write files beyond a size, as a full disk does: a part of the bytes is written first."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


async def test_a_full_disk_refuses_the_write_and_nothing_else(tmp_path, e1, caplog):
    async with opened(tmp_path, e1, checkpoint_bytes=1) as collections:
        collection = await collections.create("c")
        await collection.write(AddChunks("a", chunks("one")))
        while collection._saving is not None and not collection._saving.done():
            await asyncio.sleep(0.01)
        before = texts(collection)
        with file_size_limit(300):
            for _ in range(2):
                with pytest.raises(WriteFailed, match="nothing of this write was kept"):
                    await collection.write(AddChunks("a", chunks("two " * 300)))
            assert texts(collection) == before
            assert (await collection.snapshot.searcher.search("one", 1)).ids == ("a:0",)
        with file_size_limit(50), pytest.raises(WriteFailed, match="'d' cannot be made"):
            await collections.create("d")
        done = await collection.write(AddChunks("a", chunks("three")))
        assert done.added == ("a:1",) and done.version == 2
    async with opened(tmp_path, e1) as collections:
        assert [c.id for c in collections.list()] == ["c"]
        assert list(texts(collections.get("c")).values()) == ["one", "three"]


async def test_a_checkpoint_that_fails_loses_nothing(tmp_path, e1, caplog):
    async with opened(tmp_path, e1, checkpoint_bytes=1000) as collections:
        collection = await collections.create("c")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mindscape, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            for i in range(8):
                await collection.write(AddChunks("a", chunks(f"text {i}")))
            await collection._saving
            assert "no checkpoint could be written" in caplog.text
        for i in range(8, 40):
            await collection.write(AddChunks("a", chunks(f"text {i}")))
        await collection._saving
        assert collection._facts.version > 8
        names = sorted(p.name for p in (tmp_path / "c").iterdir())
        assert len([n for n in names if n.startswith("checkpoint-")]) == 1
    async with opened(tmp_path, e1) as collections:
        assert list(texts(collections.get("c")).values()) == [f"text {i}" for i in range(40)]


async def test_a_folder_that_went_away_refuses_the_write(tmp_path, e1):
    async with opened(tmp_path, e1) as collections:
        collection = await collections.create("c")
        os.rename(tmp_path / "c", tmp_path / "elsewhere")
        with pytest.raises(WriteFailed, match="cannot be written"):
            await collection.write(AddChunks("a", chunks("one")))
        os.rename(tmp_path / "elsewhere", tmp_path / "c")
        assert (await collection.write(AddChunks("a", chunks("one")))).version == 1


@pytest.mark.parametrize(
    "id", ["../x", "a/b", "CON", "lpt1", "x" * 65, "", "ü", "a\n", "-a", ".a", "a b", "a\x00b", "猫"]
)
async def test_names_that_are_no_names_are_refused(tmp_path, e1, id):
    async with opened(tmp_path / "root", e1) as collections:
        with pytest.raises(MiaError, match="cannot name a collection"):
            await collections.create(id)
        with pytest.raises(NoCollection):
            collections.get(id)
        with pytest.raises(NoCollection):
            await collections.delete(id)
    assert sorted(p.name for p in tmp_path.rglob("*")) == [".lock", "root"]


async def test_create_and_delete(tmp_path, e1):
    async with opened(tmp_path, e1) as collections:
        done = await asyncio.gather(*(collections.create(n) for n in ("a", "A", "a")), return_exceptions=True)
        assert [type(d).__name__ for d in done] == ["Collection", "Conflict", "Conflict"]
        collection = collections.get("a")
        writes = [asyncio.create_task(collection.write(AddChunks("b", chunks(f"text {i}")))) for i in range(5)]
        await asyncio.sleep(0)  # the first ones are under way
        more = [asyncio.create_task(collection.write(AddChunks("b", chunks(f"text {i}")))) for i in range(5)]
        await asyncio.sleep(0)
        await collections.delete("a")
        done = await asyncio.gather(*writes, *more, return_exceptions=True)
        assert {type(d).__name__ for d in done} <= {"Written", "NoCollection"} and isinstance(done[-1], NoCollection)
        with pytest.raises(NoCollection):
            await collection.write(AddChunks("b", chunks("late")))
        with pytest.raises(NoCollection):
            collections.get("a")
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]
        again = await collections.create("a")
        assert again.snapshot.empty and again.info()["version"] == 0


async def test_a_folder_that_cannot_be_made_is_named(tmp_path, e1):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(MiaError, match=f"{root}: the folder of the collections cannot be made"):
            await make(root, e1).open()


async def test_only_one_server_has_the_folder(tmp_path, e1):
    (tmp_path / ".deleted-x-1").mkdir()
    (tmp_path / "not-ours").mkdir()
    async with opened(tmp_path, e1) as collections:
        assert collections.list() == [] and not (tmp_path / ".deleted-x-1").exists()
        with pytest.raises(MiaError, match="another server"):
            await make(tmp_path, e1).open()
    async with opened(tmp_path, e1):
        pass


async def test_old_versions_are_freed(tmp_path, e1):
    async with opened(tmp_path, e1) as collections:
        collection = await collections.create("c")
        await collection.write(AddChunks("a", chunks("zero")))
        refs = []
        for i in range(6):
            snapshot = collection.snapshot
            await snapshot.searcher.search("zero", 1)
            assert snapshot.lexical is not None
            refs.append(weakref.ref(snapshot))
            del snapshot
            await collection.write(AddChunks("a", chunks(f"text {i}")))
        await asyncio.sleep(0.05)
        gc.collect()
        assert [ref() for ref in refs] == [None] * 6
        await asyncio.sleep(0.2)
        assert sum(t.name.startswith("retriever") for t in threading.enumerate()) <= 1


async def test_summaries_are_sentences_of_e1_or_words_weighed_against_the_others(tmp_path, minilm):
    async with opened(tmp_path / "1", minilm, summarise=None, window=1) as collections:
        collection = await collections.create("c")
        await collection.write(AddChunks("a", chunks("The lamp on the quay was broken that night.")))
        assert collection.snapshot.mindscape.sessions[0].summary == "The lamp on the quay was broken that night."
    async with opened(tmp_path / "2", minilm, summarise=keyword_summaries, window=1) as collections:
        collection = await collections.create("c")
        for own in ("lamp", "mill", "sea"):
            await collection.write(AddChunks("a", chunks(f"the {own} and the night and the {own} of the night")))
        assert collection.snapshot.mindscape.sessions[2].summary.startswith("sea ")


async def test_an_old_mindscape_is_not_mixed_up_with_a_new_summariser(tmp_path, e1):
    async with opened(tmp_path, e1) as collections:
        await (await collections.create("c")).write(AddChunks("a", chunks("one")))
    async with opened(tmp_path, e1, summarizer="llm") as collections:
        collection = collections.get("c")
        assert collection.info()["summarizer"] == "first"
        for text in ("two", "three"):
            await collection.write(AddChunks("a", chunks(text)))
        assert collection.info()["summarizer"] == "mixed: first, llm"


def test_a_book_in_one_go_is_what_from_books_makes(tmp_path, e1):
    async def run() -> None:
        async with opened(tmp_path, e1) as collections:
            collection = await collections.create("c")
            own = tuple(f"p{i}" for i in range(8))
            await collection.write(AddChunks("a", chunks(*WORDS[:8], ids=own), "A", "Ann"))
            book = Book("a", tuple(WORDS[:8]), "A", own, author="Ann")
            whole = Mindscape.from_books([book], 3, first_words, "first")
            m = collection.snapshot.mindscape
            assert (m.chunks, m.sessions, m.books) == (whole.chunks, whole.sessions, whole.books)

    asyncio.run(run())


async def test_a_crash_between_any_two_steps_of_a_checkpoint_loses_nothing(tmp_path, e1):
    copies = []

    def hook(patch: pytest.MonkeyPatch, owner: Any, name: str, root: Path) -> None:
        real = getattr(owner, name)

        def hooked(*given: Any, **more: Any) -> Any:
            copies.append(tmp_path / f"copy-{len(copies)}")  # what a crash would leave at this moment
            copy(root, copies[-1])
            return real(*given, **more)

        patch.setattr(owner, name, hooked)

    copy, root = shutil.copytree, tmp_path / "root"
    async with opened(root, e1, checkpoint_bytes=1 << 30) as collections:
        collection = await collections.create("c")
        for i in range(3):
            await collection.write(AddChunks("a", chunks(f"text {i}")))
        for _ in range(2):  # the first checkpoint, and one that takes its place
            collection._log.rotate()
            snapshot = collection.snapshot
            await collection.write(AddChunks("a", chunks("later")))
            with pytest.MonkeyPatch.context() as patch:
                for owner, name in (
                    (os, "fsync"), (os, "rename"), (os, "replace"), (Path, "unlink"), (shutil, "rmtree")
                ):  # fmt: skip
                    hook(patch, owner, name, root)
                await asyncio.to_thread(collection._checkpoint, snapshot)
        held = {"once": dict(list(texts(collection).items())[:-1]), "twice": texts(collection)}
        assert len(list((root / "c").glob("log-*"))) == 1
    assert len(copies) > 20
    for i, place in enumerate(copies):
        async with opened(place, e1) as again:
            assert texts(again.get("c")) in held.values(), place
            assert i < len(copies) // 2 or texts(again.get("c")) == held["twice"]
            assert (await again.get("c").write(DeleteChunks(("a:0",)))).deleted == ("a:0",)


async def test_too_much_that_waits_is_refused(tmp_path, e1):
    gate = threading.Event()
    async with opened(tmp_path, e1, summarise=lambda ws: gate.wait(30) and first_words(ws)) as collections:
        collection = await collections.create("c")
        big = AddChunks("a", chunks("lamp " * 8_000_000))  # 40 MB
        writes = [asyncio.create_task(collection.write(AddChunks("b", chunks("first"))))]
        await asyncio.sleep(0.05)  # under way
        writes.append(asyncio.create_task(collection.write(big)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="wait to be encoded"):
            await collection.write(big)
        writes[1].cancel()  # its client has gone: it is not begun
        gate.set()
        await writes[0]
        await collection.write(AddChunks("b", chunks("second")))
        assert list(texts(collection).values()) == ["first", "second"]
