"""The paths of the server, as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from omnidraft.runtime.report import Report
from omnidraft.tools.server.answer import Answers, Piece
from omnidraft.tools.server.engines import Engines
from omnidraft.tools.server.errors import ApiError, answer_error, answered_with
from omnidraft.tools.server.gate import Gate, json_body
from omnidraft.tools.server.metrics import Counted, Metrics
from omnidraft.tools.server.schemas import ChatRequest, CompletionRequest, LearningRequest, read
from omnidraft.tools.server.wire import DONE, Chat, Completion, Json, Shape, event
from omnidraft.tools.server.worker import Ticket, Worker

PAGE = Path(__file__).parent / "page"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PATHS = ("/", "/health", "/metrics", "/learning", "/v1/models", CHAT, COMPLETION)


class Gone(ApiError):
    """Nobody is there any more to read an answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client is gone")


@dataclass(frozen=True)
class Access:
    """Who may come in: see `Gate`."""

    key: str | None
    hosts: Collection[str] | None
    origins: Collection[str]


def make_app(worker: Worker, answers: Answers, access: Access) -> Starlette:
    """All paths behind the gate."""
    answers.metrics.watch("queue_length", "Requests that wait.", lambda: worker.waiting)
    answers.metrics.watch("running", "Whether a request is being answered.", lambda: worker.running)
    routes = [
        Route("/", _page),
        Route("/health", partial(_health, worker, answers.engines)),
        Route("/metrics", partial(_metrics, answers.metrics)),
        Route("/learning", partial(_learning, worker, answers.engines), methods=["GET", "PUT"]),
        Route("/v1/models", partial(_models, answers.engines)),
        Route("/v1/models/{name:path}", partial(_model, answers.engines)),
        Route(CHAT, Completions(worker, answers, ChatRequest, Chat), methods=["POST"]),
        Route(COMPLETION, Completions(worker, answers, CompletionRequest, Completion), methods=["POST"]),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    middleware = [
        Middleware(Counted, answers.metrics, PATHS, perf_counter),
        *_cors(access.origins),
        Middleware(Gate, access.key, access.hosts, access.origins),
    ]
    handlers: Any = dict.fromkeys((ApiError, HTTPException, Exception), answer_error)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def _cors(origins: Collection[str]) -> list[Middleware]:
    if not origins:
        return []
    return [Middleware(CORSMiddleware, list(origins), allow_methods=("GET", "POST", "PUT"), allow_headers=("*",))]


class Completions:
    """ASGI endpoint that answers one kind of request, whole or as a stream.

    The status is sent when the first token is there, so what is wrong with a request has a status of its own in a
    stream too. A client that goes away is noticed while it waits as well.
    """

    def __init__(
        self,
        worker: Worker,
        answers: Answers,
        request: type[ChatRequest] | type[CompletionRequest],
        shape: Callable[[str, str], Shape],
    ) -> None:
        self._worker, self._answers, self._request, self._shape = worker, answers, request, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError for what cannot be answered."""
        http = Request(scope, receive)
        try:
            request = read(self._request, await json_body(http))
        except ClientDisconnect:
            return
        _known(self._answers.engines, request.model)
        if isinstance(request, ChatRequest) and self._answers.engines.targets[request.model].chat_template is None:
            raise ApiError(400, f"target {request.model!r} has no chat template; ask /v1/completions", param="model")
        with answered_with(400):
            asked = request.asked()
        shape = self._shape(request.model, self._answers.engines.fingerprint(request.model))
        async with self._ticket(http, partial(self._answers.answer, asked)) as ticket:
            try:
                first = await ticket.receive()
                if request.stream:
                    told = request.stream_options is not None and request.stream_options.include_usage
                    await _stream(send, shape, first, ticket, told)
                else:
                    await JSONResponse(await _whole(shape, first, ticket))(scope, receive, send)
            except Gone:
                return

    @asynccontextmanager
    async def _ticket(self, http: Request, work: Callable[[Ticket], Report]) -> AsyncIterator[Ticket]:
        """In the queue, and out of it at once when the client is gone."""
        ticket = self._worker.submit(work)
        watch = asyncio.create_task(_until_gone(http))
        watch.add_done_callback(lambda _: self._worker.withdraw(ticket, Gone()))
        try:
            yield ticket
        finally:
            watch.cancel()


async def _until_gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _whole(shape: Shape, item: Piece | Report, ticket: Ticket) -> Json:
    pieces = []
    while isinstance(item, Piece):
        pieces.append(item)
        item = await ticket.receive()
    return shape.whole(pieces, item)


async def _stream(send: Send, shape: Shape, item: Piece | Report, ticket: Ticket, told: bool) -> None:
    """Server-sent events. What goes wrong on the way is an event too, since the status has gone out."""

    async def write(data: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        for data in shape.opening():
            await write(event(data))
        while isinstance(item, Piece):
            if item.text or item.likely is not None:
                await write(event(shape.part(item)))
            item = await ticket.receive()
        await write(event(shape.closing(item)))
        if told:
            await write(event(shape.usage(item)))
        await write(DONE)
    except Gone:
        return
    except ApiError as error:
        await write(event(error.body))
    await write(b"", more=False)


def _known(engines: Engines, name: str) -> None:
    if name not in engines.targets:
        names = ", ".join(engines.targets)
        raise ApiError(404, f"no model {name[:100]!r} in this bundle; it has {names}", "model_not_found", "model")


def _described(engines: Engines, name: str) -> Json:
    target = engines.targets[name]
    return {
        "id": name,
        "object": "model",
        "created": int(datetime.fromisoformat(engines.bundle.created).timestamp()),
        "owned_by": "omnidraft",
        "precision": engines.precision(name),
        "context": target.context,
        "chat": target.chat_template is not None,
        "open": engines.is_open(name),
        "license": target.license,
    }


async def _models(engines: Engines, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_described(engines, name) for name in engines.targets]})


async def _model(engines: Engines, request: Request) -> Response:
    name = request.path_params["name"]
    _known(engines, name)
    return JSONResponse(_described(engines, name))


async def _health(worker: Worker, engines: Engines, request: Request) -> Response:
    state = "stopping" if worker.stopping else "ok"
    return JSONResponse({"status": state, "running": worker.running, "waiting": worker.waiting})


async def _metrics(metrics: Metrics, request: Request) -> Response:
    return Response(metrics.text(), media_type="text/plain; version=0.0.4")


async def _learning(worker: Worker, engines: Engines, request: Request) -> Response:
    """Whether answers are learned from; PUT {"on": true or false} changes it, between two answers."""
    if request.method == "PUT":
        wanted = read(LearningRequest, await json_body(request)).on

        def switch(ticket: Ticket) -> None:
            with answered_with(400):
                engines.set_learning(wanted)

        await worker.submit(switch).receive()
    return JSONResponse({"on": engines.learning})


async def _page(request: Request) -> Response:
    # No other page may put ours in a frame and have its switches clicked.
    return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "frame-ancestors 'none'"})
