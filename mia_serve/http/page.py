"""The page at `/` on which a person tries the server: a few files of the package, served as they are.

The page talks to the REST interface like any other client and holds no data of its own, so it is free of keys.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends, Request, Response

from mia_serve.http.errors import HttpError
from mia_serve.http.services import Services, get_services

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_NAMES = (
    "index.html",
    "page.css",
    "icon.svg",
    "app.js",
    "add.js",
    "answer.js",
    "api.js",
    "dom.js",
    "map.js",
    "results.js",
    "strings.js",
)

#: Scripts, styles and pictures only from here, connections only to here; no markup made from strings; in no frame.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # The browser asks each time whether its files are still the same: a new server never meets an old page.
    "Cache-Control": "no-cache",
}


class PageFile(NamedTuple):
    """A file of the page, read once.

    Attributes:
        content: Its bytes.
        media_type: As the header Content-Type says it.
        etag: Names this content, in quotes.
    """

    content: bytes
    media_type: str
    etag: str


def _read(name: str) -> PageFile:
    content = files("mia_serve.http").joinpath("page_files", name).read_bytes()
    media_type = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
    return PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


#: All that can be asked for, by name: a request's path is looked up here and never reaches the file system.
FILES: dict[str, PageFile] = {name: _read(name) for name in _NAMES}

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """Serve the page."""
    return _answer(request, FILES["index.html"])


@router.get("/page/server.json")
async def server(services: Annotated[Services, Depends(get_services)]) -> dict[str, bool]:
    """Tell the page whether a language model answers, so that it offers answers only then."""
    return {"llm": services.config.llm is not None}


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def part(name: str, request: Request) -> Response:
    """Serve a file of the page."""
    file = FILES.get(name)
    if file is None:
        raise HttpError(404, "the page has no such file: open / for the page, /docs for the API", "not_found")
    return _answer(request, file)


def _answer(request: Request, file: PageFile) -> Response:
    headers = {**_HEADERS, "ETag": file.etag}
    if _names(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


def _names(header: str, etag: str) -> bool:
    """Tell whether If-None-Match names the tag; a proxy that compresses marks it as weak."""
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in header.split(","))
