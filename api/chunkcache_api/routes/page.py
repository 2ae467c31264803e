"""``GET /``: the web page, and the files it is made of. They say nothing of this server's data.

Whoever opens it needs no key; what it asks of the API does. Everything it loads comes from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from blake3 import blake3
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

_MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY: Final = "; ".join(
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
HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class _Asset:
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


def _assets() -> Mapping[str, _Asset]:
    """By name. Read once: no name in a request ever reaches the file system."""
    found: dict[str, _Asset] = {}
    for file in files("chunkcache_api").joinpath("web").iterdir():
        content = file.read_bytes()
        media_type = _MEDIA_TYPES[file.name.rpartition(".")[2]]
        found[file.name] = _Asset(content, media_type, f'"{blake3(content).hexdigest()[:32]}"')
    return found


_ASSETS: Final = _assets()

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """The page."""
    return _response(request, "index.html")


@router.get("/web/{name}")
async def asset(request: Request, name: str) -> Response:
    """What the page loads."""
    return _response(request, name)


def _response(request: Request, name: str) -> Response:
    found = _ASSETS.get(name)
    if found is None:
        raise HTTPException(404, "there is no such file")
    headers = HEADERS | {"etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(None, 304, headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
