"""Connect to a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from mia_serve.core.errors import MiaError


@contextlib.contextmanager
def connected(address: str, **options: Any) -> Iterator[None]:
    """Connect to a Ray cluster and let go of it at the end; what was started here is stopped.

    Args:
        address: "local" for one on this machine alone that lives as long as this process, "auto" for the one that
            runs here already, or HOST:PORT.
        **options: Of `ray.init`.

    Raises:
        MiaError: Ray is not installed, or no cluster is there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local":
        # Ray lets in who has its token, and keeps one in the home. One of our own leaves nothing behind.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        options = {"include_dashboard": False} | options
    try:
        import ray
    except ImportError as error:
        raise MiaError("this needs Ray: pip install 'mia-retrieval[ray]'") from error
    if ray.is_initialized():
        yield
        return
    host, _, port = address.rpartition(":")
    if port.isdigit():
        _knock(host, int(port))
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **options)
    except ConnectionError as error:
        raise MiaError(f"no Ray cluster runs at {address!r}: give its HOST:PORT, or 'local'") from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(host: str, port: int) -> None:
    """Refuse an address where no one listens; Ray itself would try for minutes."""
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError as error:
        raise MiaError(
            f"no Ray cluster answers at {host}:{port} ({error}): start one there, or give 'local'"
        ) from error
