"""Bearer keys: who may do what, and how much of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import Request, Security
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection

from mia_serve.core.errors import MiaError
from mia_serve.http.config import Role
from mia_serve.http.errors import HttpError
from mia_serve.http.limits import Allowance

logger = logging.getLogger(__name__)

ROLES: tuple[Role, ...] = ("read", "write", "admin")
PREFIX = "mia-"
_RELOAD_S = 1.0  # how long a revoked key may still work


@dataclass(frozen=True)
class Key:
    """One key, as the file keeps it: never the key itself.

    Attributes:
        id: Short name of the key, public: `key revoke` and the log use it.
        name: Whose it is.
        role: ``read`` < ``write`` < ``admin``.
        sha256: Digest of the key, hex.
        created: ISO date and time, UTC.
        requests_per_minute: Its own limit; None: that of the configuration.
        tokens_per_minute: Likewise.
    """

    id: str
    name: str
    role: Role
    sha256: str
    created: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True)
class Caller:
    """Who sent a request, and what is left to it.

    Attributes:
        id: Id of the key; the address where there are no keys.
        role: What it may do.
        allowance: Counts what it uses.
    """

    id: str
    role: Role
    allowance: Allowance

    def charge(self, tokens: int) -> None:
        """Count tokens that were encoded for it; the request after the one that uses up the minute's is refused."""
        self.allowance.charge(self.id, tokens)


def read_keys(path: Path) -> list[Key]:
    """Read a file of keys.

    Raises:
        FileNotFoundError: There is none.
        MiaError: It is no such file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        keys = [Key(**entry) for entry in record["keys"]]
        for key in keys:
            if key.role not in ROLES or len(bytes.fromhex(key.sha256)) != 32:
                raise ValueError(f"key {key.id!r}")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file of keys; `mia-serve key add` makes one") from None
    except (ValueError, TypeError, KeyError) as error:
        raise MiaError(f"{path} is not a file of keys ({type(error).__name__}: {error}); make it anew") from error
    return keys


def add_key(
    path: Path,
    name: str,
    role: Role,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
) -> tuple[Key, str]:
    """Make a key and put it into the file, which is made where it is missing.

    Returns:
        What the file keeps, and the key itself, which is kept nowhere.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    keys = read_keys(path) if path.exists() else []
    key = Key(secrets.token_hex(4), name, role, _digest(secret), created, requests_per_minute, tokens_per_minute)
    _write(path, [*keys, key])
    return key, secret


def revoke_key(path: Path, key_id: str) -> Key:
    """Take a key out of the file; servers that read it refuse the key within a second or two.

    Raises:
        MiaError: There is no such key.
    """
    keys = read_keys(path)
    found = [key for key in keys if key.id == key_id]
    if not found:
        raise MiaError(f"{path} has no key {key_id!r}; it has: {', '.join(key.id for key in keys) or 'none'}")
    _write(path, [key for key in keys if key.id != key_id])
    return found[0]


class KeyRing:
    """The keys of a file, read again when it changes.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Looked at before it is read, so that no change is missed; of a file that is not there `read_keys` says more.
        self._stamp = self._look() if path.exists() else (0, 0, 0)
        self._keys = read_keys(path)
        self._next_look = time.monotonic() + _RELOAD_S

    def find(self, secret: str) -> Key | None:
        """Return the key that this is, in the same time whichever it is."""
        self._refresh()
        digest, found = _digest(secret), None
        for key in self._keys:
            if hmac.compare_digest(digest, key.sha256):
                found = key
        return found

    def __len__(self) -> int:
        return len(self._keys)

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _RELOAD_S
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._keys, self._stamp = read_keys(self.path), stamp
        except (OSError, MiaError) as error:
            # Nobody gets in by breaking the file, and nobody who was in is thrown out by an editor's slip.
            logger.error("the file of keys cannot be read, the keys stay as they were: %s", error)

    def _look(self) -> tuple[int, int, int]:
        found = self.path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino


#: Says in the OpenAPI that keys are meant; `require` does the work.
BEARER = HTTPBearer(auto_error=False, description="A key of `mia-serve key add`; needed where the server has keys.")


def require(role: Role) -> Callable[..., Awaitable[Caller]]:
    """Return the dependency of a route that lets in who has this role or a higher one.

    It raises 401 without a key, 403 for a key of a lower role, 429 with Retry-After when the minute's requests or
    tokens are used up.
    """

    async def check(request: Request, _: Annotated[Any, Security(BEARER)]) -> Caller:
        caller = caller_of(request)
        if ROLES.index(caller.role) < ROLES.index(role):
            raise HttpError(403, f"this needs a key of role {role!r}; yours is {caller.role!r}", "role")
        caller.allowance.admit(caller.id)
        if role != "read":
            # A write that has begun is finished, whether or not the client still listens.
            request.state.finish = True
        return caller

    return check


def caller_of(request: HTTPConnection) -> Caller:
    """Return who sends a request.

    Raises:
        HttpError: 401: no key, or none of ours.
    """
    services = request.app.state.services
    ring: KeyRing | None = services.keys
    if ring is None:
        address = request.client.host if request.client else "unknown"
        return Caller(address, "admin", services.allowance)
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    key = ring.find(secret.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        message = "give a key in the header `Authorization: Bearer KEY`" if not secret else "this key is not known"
        raise HttpError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    request.state.key_id = key.id
    return Caller(key.id, key.role, services.allowance.of(key.requests_per_minute, key.tokens_per_minute))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _write(path: Path, keys: list[Key]) -> None:
    """Write the file whole or not at all, readable by its owner alone."""
    record = {"keys": [asdict(replace(key)) for key in keys]}
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
