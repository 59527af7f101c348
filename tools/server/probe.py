"""One raw exchange with a server, so that a client may be as slow, as rude or as wrong as it likes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from typing import Any, cast
from urllib.parse import urlsplit

PATIENCE = 300.0  # seconds until an answer counts as lost


@dataclass(frozen=True)
class Manners:
    """How a client reads: `size` bytes at a time, `pause` seconds between, hanging up after `most` bytes."""

    size: int = 65536
    pause: float = 0.0
    most: int | None = None


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes


@dataclass(frozen=True)
class Site:
    """A server: its address, the model to ask, and the key that it wants, if it does."""

    url: str
    model: str
    key: str | None = None

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request, after whose answer the line is closed."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(self.url).netloc}", "Connection: close"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        if method != "GET":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def post(self, path: str, data: Any) -> bytes:
        """A request that sends JSON."""
        return self.request("POST", path, json.dumps(data).encode())

    async def send(self, request: bytes, manners: Manners | None = None) -> Reply | None:
        """The answer; None if the client hung up. Raises OSError or TimeoutError if there was no whole answer."""
        async with asyncio.timeout(PATIENCE):
            received = await self._receive(request, manners or Manners())
        return None if received is None else _parsed(received)

    async def _receive(self, request: bytes, manners: Manners) -> bytes | None:
        address = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2 * manners.size)
        received = b""
        try:
            writer.write(request)
            await writer.drain()
            while manners.most is None or len(received) < manners.most:
                part = await reader.read(manners.size)
                if not part:
                    return received
                received += part
                await asyncio.sleep(manners.pause)
            return None
        finally:
            writer.transport.abort()


class _Received:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> BytesIO:
        return BytesIO(self._data)


def _parsed(data: bytes) -> Reply:
    response = HTTPResponse(cast(Any, _Received(data)))
    try:
        response.begin()
        return Reply(response.status, response.read())
    except (HTTPException, ValueError) as error:
        raise ConnectionError(f"no whole answer: {type(error).__name__} after {len(data)} bytes") from None
