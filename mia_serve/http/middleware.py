"""What surrounds every request: its id, the log, the counters, the limits of its body, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
import traceback

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mia_serve.http.errors import HttpError, http_error, retry_after
from mia_serve.http.services import Services

access = logging.getLogger("mia_serve.access")
logger = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_AHEAD = 4  # pieces of a body that are read before the route asks for them
_DISCONNECT: Message = {"type": "http.disconnect"}
_GONE = 499  # what logs call a request whose client went away
#: Of answers that are no page; a page brings its own policy.
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


class Edge:
    """Outermost: gives a request its id, logs and counts it once, and turns a bug into a 500 that tells nothing.

    Args:
        app: What is inside.
        log_text: Whether the messages of bugs, which may quote a client's text, are logged.
    """

    def __init__(self, app: ASGIApp, log_text: bool = False) -> None:
        self.app, self.log_text = app, log_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        given = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"x-request-id"), "")
        state["request_id"] = given if _ID.fullmatch(given) else secrets.token_hex(8)
        services: Services = scope["app"].state.services
        started, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = state["request_id"]
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        services.metrics.under_way.inc()
        try:
            await self.app(scope, receive, answer)
        except asyncio.CancelledError:
            state["failure"] = "cancelled"
            if not services.draining or status:
                raise
            # The time to finish is over; say so instead of hanging up.
            error = HttpError(503, "the server stops before it could finish this", "draining", headers=retry_after(1))
            await error.response()(scope, receive, answer)
        except Exception as error:
            said = http_error(error)
            state["failure"] = said.code or type(error).__name__
            if said.code == "internal":
                self._log_bug(state["request_id"], error)
            if status:
                raise  # too late for another answer: the connection is cut, so that nobody takes half for whole
            await said.response()(scope, receive, answer)
        finally:
            services.metrics.under_way.dec()
            self._count(scope, status or _GONE, time.perf_counter() - started, services)

    def _count(self, scope: Scope, status: int, seconds: float, services: Services) -> None:
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        services.metrics.requests.labels(route, method, str(status)).inc()
        services.metrics.seconds.labels(route).observe(seconds)
        state = scope["state"]
        if status >= 400:
            services.metrics.failures.labels(state.get("failure") or str(status)).inc()
        # The template, never the path: a path may hold what a client calls its things.
        access.info(
            "%s %s %d %.1f ms id=%s key=%s",
            method, route, status, 1000 * seconds, state["request_id"], state.get("key_id", "-"),
        )  # fmt: skip

    def _log_bug(self, request_id: str, error: Exception) -> None:
        if self.log_text:
            logger.error("request %s failed", request_id, exc_info=error)
            return
        frames = "".join(traceback.format_tb(error.__traceback__))
        logger.error(
            "request %s failed: %s (log.text: true shows its message)\n%s", request_id, type(error).__name__, frames
        )


_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")


class BodyLimit:
    """Refuse a body that is too large as soon as that shows: by its Content-Length, or while it streams in.

    Args:
        app: What is inside.
        limit: Bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        length = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if length.isdigit() and int(length) > self.limit:
            raise self._error()
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > self.limit:
                    raise self._error()
            return message

        await self.app(scope, counted, send)

    def _error(self) -> HttpError:
        return HttpError(
            413,
            f"the body is larger than {self.limit / 2**20:g} MiB; send less at a time, or raise limits.body_mb",
            "body_too_large",
            headers={"Connection": "close"},  # the rest of it is not read
        )


class UntilGone:
    """Stop the work of a request whose client has gone; writes (`require` marks them) are finished all the same.

    Args:
        app: What is inside.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        messages: asyncio.Queue[Message] = asyncio.Queue(_AHEAD)
        gone = answered = False

        async def read() -> Message:
            return _DISCONNECT if gone and messages.empty() else await messages.get()

        async def answer(message: Message) -> None:
            nonlocal answered
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def pump() -> None:
            """Read ahead of the route, so that a route which reads nothing more does not miss the end."""
            nonlocal gone
            while not gone:
                message = await receive()
                gone = message["type"] == "http.disconnect"
                if gone and not answered and not scope["state"].get("finish"):
                    work.cancel()
                await messages.put(message)

        work = asyncio.ensure_future(self.app(scope, read, answer))
        pumping = asyncio.create_task(pump())
        try:
            await work
        except asyncio.CancelledError:
            if not gone:
                raise
            scope["state"]["failure"] = "gone"
        finally:
            pumping.cancel()


class Gate:
    """Answer 503 while the server starts or is about to stop, and let only this machine's names in without keys.

    A web page can have its own name lead to this machine, and would then be served as if it were ours; its name in the
    header Host gives it away.

    Args:
        app: What is inside.
        hosts: Names that requests may use; None: any.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None = None) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            if self.hosts is not None and _host(scope) not in self.hosts:
                raise HttpError(
                    403,
                    "without keys the server answers to its own names alone (localhost); use one, or give it keys",
                    "wrong_host",
                )
            services: Services = scope["app"].state.services
            if scope["path"].startswith("/v1/") and services.trouble is not None:
                raise HttpError(503, services.trouble, "not_ready", headers=retry_after(1))
        await self.app(scope, receive, send)


def _host(scope: Scope) -> str:
    """Return the name in the header Host, without its port."""
    given = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"host"), "")
    return re.sub(r":\d+$", "", given).strip("[]").lower()
