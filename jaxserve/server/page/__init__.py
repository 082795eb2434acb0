"""Playground at `/`: its static files, in this folder, and the events that they read.

The page has no build step. Its content security policy lets it load files from and send requests to
this server only, and prevents text from becoming markup or scripts. Third-party libraries are in
`vendor`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jaxserve.server.page import dashboard

_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
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
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class _File:
    """Static file of the web page, held in memory, with an endpoint `answer` for GET requests.

    A browser with a current copy gets status 304.
    """

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        tag = hashlib.sha256(self._content).hexdigest()[:16]
        self._headers = _HEADERS | {"etag": f'"{tag}"'}
        self._media = _MEDIA[path.suffix]

    async def answer(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers, media_type=self._media)


def _paths() -> dict[str, Path]:
    folder = Path(__file__).parent
    files = sorted(path for path in folder.rglob("*") if path.suffix in _MEDIA)
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {"/" if name == "index.html" else f"/page/{name}": names[name] for name in names}


# The page needs no API key. The user enters one, which the page sends with all its requests.
OPEN_PATHS = frozenset(_paths())


def routes() -> list[BaseRoute]:
    """Return the routes of the playground: its static files, and the events of its dashboard."""
    files: list[BaseRoute] = [
        Route(url_path, _File(path).answer, methods=["GET"]) for url_path, path in _paths().items()
    ]
    return [*files, *dashboard.routes()]
