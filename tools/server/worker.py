"""The one thread that owns the engines, and the queue in front of it.

The models answer one request at a time. Each piece of work has a ticket: the worker sends events to it, the server's
event loop receives them, and either may find that the other has had enough.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

from omnidraft.tools.server.errors import ApiError

RETRY_AFTER = {"Retry-After": "1"}


class Ticket:
    """One piece of work: what it has sent so far, and whether anybody still wants it.

    `work` gets the ticket, sends any number of events and returns the last one; an exception is the last event too.
    """

    def __init__(self, work: Callable[[Ticket], Any]) -> None:
        """Belongs to the event loop that makes it."""
        self.work = work
        self.created = perf_counter()
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, event: Any) -> None:
        """From any thread. An event that nobody waits for any more is dropped."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def receive(self) -> Any:
        """The next event; raises what ended the work early."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self, why: Exception) -> None:
        """Nobody wants it any more: whoever waits for an event gets `why`, and the work ends at its next event."""
        if not self.cancelled:
            self.cancelled = True
            self.send(why)


class Worker:
    """A thread that does one piece of work after another.

    `limit`: how many may wait beside the one that is being done; `between`: called after each, when its last event is
    out; `close`: called at the end. All of them run on the thread.
    """

    def __init__(self, limit: int, between: Callable[[], None], close: Callable[[], None]) -> None:
        self._limit, self._between, self._close = limit, between, close
        self._waiting: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running(self) -> bool:
        """Whether one is being done."""
        return self._running is not None

    @property
    def stopping(self) -> bool:
        """Whether nothing new is taken."""
        return self._stopping

    def submit(self, work: Callable[[Ticket], Any]) -> Ticket:
        """Put work in the queue. Raises ApiError 429 if it is full, 503 if the server is stopping."""
        ticket = Ticket(work)
        with self._changed:
            if self._stopping:
                raise _stopped()
            if len(self._waiting) + self.running > self._limit:
                message = f"{len(self._waiting)} requests are waiting, no more fit in the queue; try again later"
                raise ApiError(429, message, "queue_full", headers=RETRY_AFTER)
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def withdraw(self, ticket: Ticket, why: Exception) -> None:
        """Cancel it; its place in the queue is free at once."""
        with self._changed, suppress(ValueError):
            self._waiting.remove(ticket)
        ticket.cancel(why)

    def stop(self) -> None:
        """Take nothing new; what waits is told so, what is being done goes on."""
        with self._changed:
            self._stopping = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify()
        for ticket in waiting:
            ticket.cancel(_stopped())

    def cut(self) -> None:
        """End what is being done, too."""
        running = self._running
        if running is not None:
            running.cancel(_stopped())

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended within a time, after `stop`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (ticket := self._next()) is not None:
                event = _outcome(ticket)
                with self._changed:
                    self._running = None
                ticket.send(event)
                if not self._stopping:
                    try:
                        self._between()
                    except Exception:  # the next piece of work shall be done all the same
                        traceback.print_exc()
        finally:
            self._close()

    def _next(self) -> Ticket | None:
        with self._changed:
            while not self._waiting and not self._stopping:
                self._changed.wait()
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running


def _outcome(ticket: Ticket) -> Any:
    try:
        return ticket.work(ticket)
    except ApiError as error:
        return error
    except Exception:
        traceback.print_exc()
        return ApiError(500, "the server failed; its error stream says why")


def _stopped() -> ApiError:
    return ApiError(503, "the server is stopping", "stopping", headers=RETRY_AFTER)
