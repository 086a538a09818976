"""The page at ``/``: files of this package, sent as they are. They need no key; what the page asks of the API does.

The page loads nothing from elsewhere, and its policy forbids inline scripts and turning text into HTML.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from outpace.serving.errors import ApiError

FOLDER = Path(__file__).parent / "web"
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types")),
        "require-trusted-types-for 'script'",
    )
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: dict[str, str]

    def response(self, request: Request) -> Response:
        """The file, unless the browser has this version of it."""
        if request.headers.get("if-none-match") == self.headers["ETag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    headers = {
        "Content-Type": _TYPES[path.suffix],
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return _File(content, headers)


def add_page(app: FastAPI) -> None:
    """Add the page's routes: ``/`` and ``/web/NAME``."""
    files = {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES}

    @app.get("/", response_model=None, include_in_schema=False)
    async def page(request: Request) -> Response:
        return files["index.html"].response(request)

    @app.get("/web/{name}", response_model=None, include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise ApiError(f"there is no path {request.url.path}", 404)
        return files[name].response(request)
