"""Where the server listens, and how it stops."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools import options as o
from omnidraft.tools.server.worker import Worker

MOST_CONNECTIONS = 512  # below what a process may usually have open
LAST_RESORT = 5.0  # seconds for the goodbyes, once answers have been cut


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises OmniDraftError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise OmniDraftError(f"{host}:{port}: {error.strerror or error}; give --host or --port another value") from None


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address that a socket is bound to."""
    return ipaddress.ip_address(address).is_loopback


def url(listening: socket.socket) -> str:
    """Where clients find it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: ASGIApp, worker: Worker, listening: socket.socket, grace: float) -> None:
    """Answer until SIGTERM or Ctrl-C; then what is being answered has `grace` seconds to end. A second signal cuts it.

    One line says if the worker does not end; then what it was doing is lost, and nothing else.
    """
    for talkative in ("uvicorn.error", "asyncio"):  # a client that breaks off, or speaks no HTTP, is no news
        logging.getLogger(talkative).setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=int(grace + LAST_RESORT),
    )
    worker.start()
    _Server(config, worker, grace).run([listening])
    worker.stop()
    worker.cut()
    if not worker.join(grace + LAST_RESORT):
        o.warn("the models are still busy; leaving without them")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, worker: Worker, grace: float) -> None:
        super().__init__(config)
        self._worker, self._grace = worker, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, let what is being answered end, and cut it when its time is up."""
        self._worker.stop()
        cut = asyncio.get_running_loop().call_later(self._grace, self._worker.cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A stop that was asked for ends with status 0, so the signal is not raised again as uvicorn would."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
