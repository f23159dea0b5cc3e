#!/usr/bin/env python3
"""The load of bench_server.py, in a process of its own: closed-loop clients over raw sockets, bodies made beforehand.

    bench_load.py PLAN.json PORT SECONDS ANSWERS.bin

It costs as little of the machine's cores as Python can, for the server shares them. It prints one line of JSON; the
bodies of all answers go to a file, to be checked when the clock has stopped.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

WARM_UP = 1.0  # seconds at the start, whose requests are checked and not counted


class Client:
    """One connection that sends the next request when it has the answer to the last one."""

    def __init__(self, bodies: list[bytes], seed: int) -> None:
        self.bodies, self.order, self.at = bodies, random.Random(seed).sample(range(len(bodies)), len(bodies)), 0
        self.done: list[tuple[int, int, float, float, bytes]] = []  # text, status, start, end, body

    async def run(self, port: int, stop: float) -> None:
        """Send requests until the time is over."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while time.perf_counter() < stop:
            text = self.order[self.at % len(self.order)]
            self.at += 1
            started = time.perf_counter()
            writer.write(self.bodies[text])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            self.done.append((text, int(head[9:12]), started, time.perf_counter(), body))
        writer.close()


def requests(plan: dict[str, Any], port: int) -> list[bytes]:
    """Return the whole HTTP requests."""
    made = []
    for text in plan["texts"]:
        body = json.dumps({"model": plan["model"], "input": text, "encoding_format": "base64"}).encode()
        head = (
            f"POST {plan['path']} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


async def load(plan: dict[str, Any], port: int, seconds: float, answers: BinaryIO) -> dict[str, Any]:
    """Let all clients run, and return what they saw."""
    bodies = requests(plan, port)
    clients = [Client(bodies, seed) for seed in range(plan["clients"])]
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    counted_from, stop = begin + WARM_UP, begin + WARM_UP + seconds
    await asyncio.gather(*(client.run(port, stop) for client in clients))
    after = resource.getrusage(resource.RUSAGE_SELF)
    took = time.perf_counter() - begin
    rows = []
    for text, status, started, ended, body in (row for client in clients for row in client.done):
        rows.append((text, status, started - counted_from, ended - counted_from, len(body)))
        answers.write(body)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "generator_cores": cpu / took, "rows": rows}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    try:
        import uvloop
    except ImportError:
        run = asyncio.run
    else:
        run = uvloop.run
    with open(sys.argv[4], "wb") as answers:
        found = run(load(plan, int(sys.argv[2]), float(sys.argv[3]), answers))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
