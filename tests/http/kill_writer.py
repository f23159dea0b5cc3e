"""Writes to a collection until it is killed, and says what was acknowledged; the other half of `test_kill.py`.

Started once: it imports what takes long, then forks a child for every line that it reads, `FOLDER SEED PIPE`, before
anything has used a thread. The child writes to the collection in FOLDER, and a line to PIPE after each acknowledgement.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import traceback
from typing import Any

import pyarrow.parquet  # noqa: F401 - what a child would import by itself, and what takes longest
import transformers.models.bert.modeling_bert
import transformers.models.bert.tokenization_bert  # noqa: F401

import mia_serve.core.load  # noqa: F401
from mia_serve.core import Encoder
from mia_serve.http.collections import Collections
from mia_serve.http.operations import AddChunks, AddText, AddTurns, ChunkIn, DeleteChunks, TurnIn, Upsert

WRITERS = 6


def summaries(windows: Any) -> list[str]:
    """Summarise at once: the first words of each window."""
    return [" ".join(w.texts)[:40].strip() for w in windows]


def open_collections(root: str, encoder: Encoder) -> Collections:
    """Make the collections as both halves use them; checkpoints come often."""
    return Collections(
        root, encoder, summarise=summaries, window=4, chunk_tokens=24, chunk_overlap=0, checkpoint_bytes=8_000
    )


async def write(root: str, model: str, seed: int, pipe: int) -> None:
    """Write with several writers at once, each to its own ids, until the process is killed."""
    collections = open_collections(root, Encoder.load(model, device="cpu"))
    await collections.open()
    if not collections.list():
        await collections.create("c")
    collection = collections.get("c")

    def say(**line: Any) -> None:
        os.write(pipe, json.dumps(line).encode() + b"\n")  # less than PIPE_BUF: lines do not mix

    async def writer(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        mine: list[list[str]] = []
        for step in range(10**9):
            kind, name = rng.random(), f"{seed}-{number}-{step}"
            if kind < 0.35 or not mine:
                ids = [f"{name}-{i}" for i in range(rng.randrange(1, 5))]
                new = tuple(ChunkIn(i, f"{i} of {len(ids)}") for i in ids)
                await collection.write(AddChunks(f"book-{number}", new))
                say(added={i: f"{i} of {len(ids)}" for i in ids})
                mine.append(ids)
            elif kind < 0.55:
                turns = tuple(TurnIn(f"{name}-{i}", "Ana", f"{name}-{i} of 3") for i in range(3))
                await collection.write(AddTurns(f"chat-{number}", f"{seed}-{step // 8}", turns))
                say(added={t.id: f"Ana: {t.text}" for t in turns})
            elif kind < 0.75:
                pair = tuple(ChunkIn(f"pair-{number}-{side}", name) for side in ("left", "right"))
                say(began=[number, name])
                await collection.write(Upsert(pair, f"pairs-{number}"))
                say(pair=[number, name])
            elif kind < 0.9:
                gone = mine.pop(rng.randrange(len(mine)))
                say(deleting=gone)
                await collection.write(DeleteChunks(tuple(gone)))
                say(deleted=gone)
            else:
                text = f"{name} begins here. " * 4
                say(text=[f"text-{number}", text])
                await collection.write(AddText(f"text-{number}", text))
                say(texted=[f"text-{number}", text])

    await asyncio.gather(*(writer(number) for number in range(WRITERS)))


def main() -> None:
    """Fork a writer for each line of stdin and say its process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        root, model, seed, pipe = json.loads(line)
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        try:
            asyncio.run(write(root, model, seed, os.open(pipe, os.O_WRONLY)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)


if __name__ == "__main__":
    main()
