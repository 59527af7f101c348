"""Who may come in: the key, the name that the server is called by, the page that a browser asks from; and how much."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from omnidraft.tools.server.errors import ApiError

MOST_BYTES = 1 << 20  # of a body; the longest context of a small model is a tenth of it
MOST_READ = 32 << 20  # of a body that is refused: a client that still sends does not look for an answer
BODY_SECONDS = 30.0
OPEN = ("/", "/health")  # without a key; the page has a field for it
OPEN_FOLDER = "/page/"


class Gate:
    """ASGI middleware that turns away what should not reach the models.

    `hosts`: names that this server may be called by, so that a web page whose name was pointed at this machine (DNS
    rebinding) gets nothing; None: any. `origins`: web pages that may ask beside our own. `key`: None for no key.
    """

    def __init__(self, app: ASGIApp, key: str | None, hosts: Collection[str] | None, origins: Collection[str]) -> None:
        self._app, self._hosts, self._origins = app, hosts, origins
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, or pass the request on."""
        error = self._refusal(scope["path"], Headers(scope=scope))
        await (self._app if error is None else error.response)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if self._hosts is not None and _name(host) not in self._hosts:
            return ApiError(403, f"this server is not called {host[:100]!r} but {' or '.join(sorted(self._hosts))}")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != host:
            return ApiError(403, f"pages from {origin[:100]!r} may not ask this server; --allow-origin lets them")
        if self._key is not None and path not in OPEN and not path.startswith(OPEN_FOLDER):
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
                message = "this server wants its key, as in: Authorization: Bearer KEY"
                return ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


async def json_body(request: Request) -> bytes:
    """The body of a request. Raises ApiError 408, 413 or 415, and ClientDisconnect."""
    # A page from elsewhere can send other types without asking first, so only this one is taken.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= MOST_BYTES:
                    body += part
                elif size > MOST_READ:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
    if size > MOST_BYTES:
        raise ApiError(413, f"the body is larger than {MOST_BYTES >> 20} MB", "body_too_large")
    return bytes(body)
