"""HTTP/1.1 by uvicorn and httptools, with an end to what a client may send before its request is known."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mia_serve.http.errors import HttpError

HEAD_BYTES = 65_536  # of request line and headers, beyond the first piece that is read
HEAD_S = 20.0  # seconds that a new connection has for them


class BoundedHttp(HttpToolsProtocol):
    """A connection whose requests have heads of bounded size, and a first one that comes in time.

    httptools keeps a head in memory until it is complete, and sets no limit itself.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head: int | None = 0  # bytes of a head that is not complete; None: none is under way
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection."""
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._in_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come in."""
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > HEAD_BYTES and not self.transport.is_closing():
                self._refuse(
                    HttpError(431, f"the request's headers have more than {HEAD_BYTES} bytes", "headers_too_large")
                )

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._head = 0

    def on_headers_complete(self) -> None:
        """End a head."""
        self._head = None
        self._in_time()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(HttpError(400, "this is not an HTTP/1.1 request", "invalid_http"))

    def _refuse(self, error: HttpError) -> None:
        answer = error.response()
        reason = {400: "Bad Request", 431: "Request Header Fields Too Large"}[error.status]
        head = [f"HTTP/1.1 {error.status} {reason}", "content-type: application/json", "connection: close"]
        head.append(f"content-length: {len(answer.body)}")
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + bytes(answer.body))
        self.transport.close()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
