"""Kill -9 under write load, again and again: what was acknowledged is there, and nothing is there by half.

`MIA_KILLS=50 pytest tests/http/test_kill.py` kills fifty times.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mia_serve.core import Encoder
from mia_serve.http.collections import Collection
from tests.http.kill_writer import open_collections

KILLS = int(os.environ.get("MIA_KILLS", "8"))
ROOT = Path(__file__).parents[2]


class Ledger:
    """What was acknowledged so far, in all lives of the writer."""

    def __init__(self) -> None:
        self.chunks: dict[str, str] = {}
        self.groups: list[tuple[str, ...]] = []
        self.deleting: set[str] = set()
        self.pairs: dict[int, str] = {}
        self.began: dict[int, set[str]] = defaultdict(set)
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.asked_texts: dict[str, list[str]] = defaultdict(list)
        self.acknowledged = 0

    def take(self, line: dict[str, Any]) -> None:
        self.acknowledged += line.keys() <= {"added", "pair", "deleted", "texted"}
        match line:
            case {"added": chunks}:
                self.chunks |= chunks
                self.groups.append(tuple(chunks))
            case {"began": [number, name]}:
                self.began[number].add(name)
            case {"pair": [number, name]}:
                self.pairs[number], self.began[number] = name, set()
            case {"deleting": ids}:
                self.deleting |= set(ids)
            case {"deleted": ids}:
                self.chunks = {i: t for i, t in self.chunks.items() if i not in ids}
            case {"text": [book, text]}:
                self.asked_texts[book].append(text)
            case {"texted": [book, text]}:
                self.texts[book].append(text)

    def check(self, collection: Collection) -> None:
        """Compare with what is there after a kill."""
        there = {c.id: c.text for c in collection.snapshot.mindscape.chunks}
        lost = {i for i, t in self.chunks.items() if there.get(i) != t} - self.deleting
        assert not lost, f"{len(lost)} acknowledged chunks are lost, such as {sorted(lost)[:3]}"
        for group in self.groups:  # deleted in one operation too
            assert len({i in there for i in group}) == 1, f"{group} is there by half"
        by_operation: dict[str, set[str]] = defaultdict(set)
        for i, text in there.items():
            if " of " in text:
                by_operation[i.rpartition("-")[0]].add(text)
        for name, texts in by_operation.items():  # acknowledged or not
            assert len(texts) == int(next(iter(texts)).rpartition(" ")[2]), f"{name} is there by half: {texts}"
        for number in self.pairs.keys() | self.began.keys():
            found = {there.get(f"pair-{number}-{side}") for side in ("left", "right")}
            assert len(found) == 1 and found <= {self.pairs.get(number), *self.began[number]}, f"pair: {found}"
            self.began[number] = set()
            if (now := found.pop()) is not None:
                self.pairs[number] = now
        for book, asked in self.asked_texts.items():
            self._check_text(book, asked, there)
        # A deletion that was under way is done, or is not; what is left of it now stays.
        self.chunks = {i: t for i, t in self.chunks.items() if i in there}
        self.deleting.clear()

    def _check_text(self, book: str, asked: list[str], there: dict[str, str]) -> None:
        words = " ".join(t for i, t in there.items() if i.startswith(f"{book}:")).split()
        found = list(dict.fromkeys(w for w in words if w[0].isdigit()))
        names = [text.split()[0] for text in asked]
        acknowledged = [text.split()[0] for text in self.texts[book]]
        assert found in (acknowledged, names), f"{book}: {found}, acknowledged are {acknowledged}"
        assert all(words.count(name) == 4 for name in found), f"{book}: a text is there by half"
        self.texts[book] = [text for text in asked if text.split()[0] in found]
        self.asked_texts[book] = list(self.texts[book])


@pytest.fixture(scope="module")
def forks():
    """A process that forks a writer when asked to, so that a start costs no imports."""
    command = [sys.executable, "-m", "tests.http.kill_writer"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def life(forks: subprocess.Popen, root: Path, model: Path, seed: int, rng: random.Random, ledger: Ledger) -> None:
    """Start a writer, kill it at a random moment, and take down what it has said."""
    pipe = root.parent / f"pipe-{seed}"
    os.mkfifo(pipe)
    forks.stdin.write(json.dumps([str(root), str(model), seed, str(pipe)]) + "\n")
    forks.stdin.flush()
    child = int(forks.stdout.readline())
    with open(pipe, "rb") as said:
        lines = [said.readline()]  # it is at work
        # Now and then in the middle of the first writes, else after some checkpoints.
        time.sleep(rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0.05, 0.6)]))
        os.kill(child, signal.SIGKILL)
        lines += said.readlines()
    for line in lines:
        if line.endswith(b"\n"):
            ledger.take(json.loads(line))


@pytest.mark.timeout(60 + 10 * KILLS)
def test_kill_9_loses_no_acknowledged_write_and_shows_no_half_one(tmp_path, tiny_bert, forks):
    encoder, rng, ledger = Encoder.load(tiny_bert, device="cpu"), random.Random(os.environ.get("MIA_SEED")), Ledger()
    root = tmp_path / "data"
    encoded: list[int] = []
    real = encoder.encode_documents
    encoder.encode_documents = lambda texts, **more: (encoded.append(len(texts)), real(texts, **more))[1]  # type: ignore

    async def check(last: bool) -> None:
        collections = open_collections(str(root), encoder)
        await collections.open()
        assert encoded == []  # recovery takes vectors from the log
        collection = collections.get("c")
        ledger.check(collection)
        if last:
            m, vectors = collection.snapshot.mindscape, collection.snapshot.vectors[encoder.spec_hash]
            assert np.abs(vectors - real([c.text for c in m.chunks])).max() < 1e-5
            assert len({c.id for c in m.chunks}) == len(m.chunks)
        if rng.random() < 0.3:
            await collections.close()  # a clean end in between; else it is left as after another kill
        else:
            os.close(collections._lock)
            collections._threads.shutdown()

    for seed in range(KILLS):
        life(forks, root, tiny_bert, seed, rng, ledger)
        asyncio.run(check(seed == KILLS - 1))
    print(f"{KILLS} kills, {ledger.acknowledged} acknowledged writes, {len(ledger.chunks)} chunks")
    assert ledger.acknowledged >= KILLS
