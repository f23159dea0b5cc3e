"""Put the server together, and run it."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from transformers.utils import logging as transformers_logging

from mia_serve import __version__
from mia_serve.core.errors import MiaError
from mia_serve.http import (
    docs,
    page,
    routes_answer,
    routes_collections,
    routes_embeddings,
    routes_health,
    routes_rerank,
    routes_search,
)
from mia_serve.http.config import LOCAL_HOSTS, ServerConfig
from mia_serve.http.errors import add_error_handlers, problems
from mia_serve.http.middleware import BodyLimit, Edge, Gate, UntilGone
from mia_serve.http.protocol import BoundedHttp
from mia_serve.http.services import Services, open_services

logger = logging.getLogger(__name__)

_COMMON = (400, 401, 403, 413, 429, 503)  # what every route under /v1 may answer


def create_app(config: ServerConfig, services: Services | None = None) -> FastAPI:
    """Return the server as an ASGI app; its lifespan opens and closes everything.

    Args:
        config: What it is told.
        services: What `open_services` has loaded; None: the lifespan does.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if app.state.services is None:
            app.state.services = open_services(config)
        await app.state.services.start()
        try:
            yield
        finally:
            await app.state.services.close()

    app = FastAPI(
        title="MiA",
        version=__version__,
        summary="Embeddings, memory, retrieval with signatures, and answers.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = services
    add_error_handlers(app)
    app.include_router(routes_health.router)
    for routes in (routes_embeddings, routes_collections, routes_search, routes_rerank, routes_answer):
        app.include_router(routes.router, responses=problems(*_COMMON))
    app.include_router(docs.router)
    app.include_router(page.router, include_in_schema=False)
    # The last is the outermost.
    local = config.keys is None and not config.open
    app.add_middleware(Gate, hosts=frozenset({*LOCAL_HOSTS, config.host}) if local else None)
    app.add_middleware(BodyLimit, limit=int(config.limits.body_mb * 2**20))
    app.add_middleware(UntilGone)
    app.add_middleware(Edge, log_text=config.log.text)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def run(config: ServerConfig) -> None:
    """Serve until SIGTERM or Ctrl-C; what is under way then has ``drain_s`` seconds.

    Raises:
        MiaError: A model, the keys or the language model are not what they should be, or the address is taken.
    """
    _log(config)
    listener = _listen(config)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    services = open_services(config)
    app = create_app(config, services)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it has drained; that must not end the process with an error.
        signal.signal(number, lambda *_: None)
    server = _Server(server_settings(app, config), services, _banner(config, listener, services))
    server.run(sockets=[listener])
    if services.failure is not None:
        raise services.failure
    if not server.started:
        raise RuntimeError("the server did not start; see above")


def server_settings(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's settings for an app; it takes uvloop where that is installed."""
    return uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        log_config=None,
        access_log=False,  # ours tells no paths
        server_header=False,
        timeout_graceful_shutdown=max(1, round(config.drain_s)),
        timeout_keep_alive=75,  # longer than the minute that load balancers keep theirs
        lifespan="on",
    )


class _Server(uvicorn.Server):
    """Says what it serves when it listens, and that it is about to stop as soon as it is told.

    It stops by itself where the collections cannot be opened.
    """

    def __init__(self, config: uvicorn.Config, services: Services, banner: str) -> None:
        super().__init__(config)
        self._services, self._banner = services, banner

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._banner, file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._services.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.draining = True
        await super().shutdown(sockets)


def _listen(config: ServerConfig) -> socket.socket:
    """Take the address before anything heavy is loaded.

    Raises:
        MiaError: It is taken, or not ours.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise MiaError(
            f"{config.host}:{config.port} cannot be listened on ({error}); give another port or host"
        ) from error
    listener.set_inheritable(True)
    return listener


def _banner(config: ServerConfig, listener: socket.socket, services: Services) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    keys = (
        "no keys: everyone who can reach it may do everything"
        if services.keys is None
        else f"{len(services.keys)} keys"
    )
    e2 = "none" if config.e2 is None else config.e2.served_name
    llm = "none" if config.llm is None else config.llm.model or config.llm.serve or config.llm.url
    served = f"e1 {config.e1.served_name}, e2 {e2}, language model {llm}"
    return f"MiA serves on http://{host}:{listener.getsockname()[1]} ({keys}): {served}; collections in {config.data}"


def _log(config: ServerConfig) -> None:
    logging.basicConfig(
        level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    for name in ("httpx", "httpcore", "openai"):  # they log addresses, one line a call
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI, in which wrong requests are answered as they really are: with 400 and our form."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=app.openapi_tags
        )
        for methods in schema["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                for status, answer in operation["responses"].items():
                    if answer["description"] == "Successful Response":
                        answer["description"] = "Made." if status == "201" else "Done."
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema
