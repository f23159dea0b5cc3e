"""A server with tiny random encoders: over a socket (`server`), or in this process (`client`)."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from mia_serve.http import ServerConfig, create_app
from mia_serve.http.app import server_settings
from mia_serve.http.services import Services


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


SIGNATURE = ["The lamps along the quay are counted.", "The ledger is under the floor."]


class Running(NamedTuple):
    """A server that listens.

    Attributes:
        url: Its address, without a slash at the end.
        app: The app, whose ``state.services`` tests may look at.
        config: What it was told.
    """

    url: str
    app: FastAPI
    config: ServerConfig

    @property
    def services(self) -> Services:
        return self.app.state.services


MakeConfig = Callable[..., ServerConfig]


@pytest.fixture(scope="session")
def make_config(tiny_bert: Path, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeConfig:
    """Return ``make(**keys)``: a configuration with tiny encoders (E1 a BERT, E2 a Qwen3) and a fresh folder."""

    def make(**changes: Any) -> ServerConfig:
        keys: dict[str, Any] = {
            "e1": {"model": str(tiny_bert), "name": "tiny-bert", "device": "cpu"},
            "e2": {"model": str(tiny_qwen3), "name": "tiny-qwen3", "device": "cpu"},
            "port": 0,
            "data": tmp_path_factory.mktemp("collections"),
            "collections": {"window": 2, "chunk_tokens": 32},
            "drain_s": 5,
        }
        return ServerConfig.model_validate(keys | changes)

    return make


@contextmanager
def serving(config: ServerConfig) -> Iterator[Running]:
    """Run a real uvicorn in a thread on a free port until the block ends."""
    app = create_app(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(server_settings(app, config))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            end = time.monotonic() + 60
            while not (server.started and app.state.services.ready):
                assert thread.is_alive() and time.monotonic() < end, "the server did not start"
                time.sleep(0.02)
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app, config)
        finally:
            server.should_exit = True
            thread.join(30)


@asynccontextmanager
async def connected(config: ServerConfig, wait: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """Open an app in this process and a client of it, no socket in between; wait until it is ready."""
    app = create_app(config)
    async with app.router.lifespan_context(app):
        while wait and not app.state.services.ready:
            await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            client.app = app  # type: ignore[attr-defined]
            yield client


@pytest.fixture(scope="session")
def server(make_config: MakeConfig) -> Iterator[Running]:
    """A server for all tests that do not break it; give collections names of your own."""
    with serving(make_config()) as running:
        yield running


@pytest.fixture
def client(make_config: MakeConfig) -> Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]:
    """Return ``client(**keys of the configuration)``: an `httpx.AsyncClient` of a fresh app, for `async with`.

    ``client.app.state.services`` is what its routes share.
    """

    def make(**changes: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        return connected(make_config(**changes))

    return make
