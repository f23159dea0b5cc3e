"""Server-sent events of work that goes on while they are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mia_serve.http.errors import HttpError

HEARTBEAT_S = 15.0
"""Seconds of silence after which a comment is sent, so that nothing in between takes the connection for dead."""

Emit = Callable[[str, BaseModel], None]
"""Sends an event: its name, and its data."""


class EventStream(Response):
    """A response that does its work and sends what that emits as server-sent events, and at last ``done``.

    Where the work fails, an event ``error`` with the body of an error response comes before ``done``. Where the
    response is cancelled, as it is when the client has gone, so is the work.

    Args:
        work: Is given what sends events.
        explain: Says of an exception of the work what the client is told.
    """

    media_type = "text/event-stream"

    def __init__(self, work: Callable[[Emit], Awaitable[None]], explain: Callable[[Exception], HttpError]) -> None:
        self._work, self._explain = work, explain
        self.status_code, self.background = 200, None
        # Proxies are asked to pass each event on at once.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        work = asyncio.create_task(self._run(frames))
        try:
            while (frame := await _next(frames)) is not None:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _run(self, frames: asyncio.Queue[bytes | None]) -> None:
        try:
            await self._work(lambda name, data: frames.put_nowait(_frame(name, data.model_dump(mode="json"))))
        except Exception as error:
            frames.put_nowait(_frame("error", self._explain(error).body()))
        frames.put_nowait(_frame("done", {}))
        frames.put_nowait(None)


async def _next(frames: asyncio.Queue[bytes | None]) -> bytes | None:
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            return await frames.get()
    except TimeoutError:
        return b": still at work\n\n"


def _frame(name: str, data: dict[str, Any]) -> bytes:
    # ASCII has no line break but \n and \r, which JSON escapes, and no half of a surrogate pair.
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
