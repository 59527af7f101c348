"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnidraft.runtime.report import Report

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SPEEDS = (5, 10, 20, 40, 60, 80, 100, 125, 150, 200, 300, 400, 600, 800, 1200)


class Metrics:
    """The counters of one server. Acceptance rate: rate of accepted over rate of proposed tokens."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        prefix, model = "omnidraft_", ("model",)
        self._requests = Counter(f"{prefix}requests", "HTTP answers.", ("path", "status"), registry=registry)
        self._latency = Histogram(
            f"{prefix}request_seconds", "From request to the end of its answer.", ("path",),
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._queued = Histogram(
            f"{prefix}queue_seconds", "Waiting for the models.", buckets=SECONDS, registry=registry
        )
        self._first = Histogram(
            f"{prefix}time_to_first_token_seconds", "Once the models are free.", model,
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._speed = Histogram(
            f"{prefix}tokens_per_second", "Of each answer.", model, buckets=SPEEDS, registry=registry
        )
        self._answers = Counter(f"{prefix}answers", "Ended answers.", ("model", "finish_reason"), registry=registry)
        self._counts = {
            name: Counter(f"{prefix}{name}_tokens", text, model, registry=registry)
            for name, text in {
                "prompt": "Tokens read.",
                "completion": "Tokens emitted.",
                "proposed": "Draft tokens that the target judged.",
                "accepted": "Draft tokens that the target accepted.",
            }.items()
        }
        self._passes = Counter(f"{prefix}target_passes", "Passes of the target.", model, registry=registry)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is asked whenever somebody looks."""
        Gauge(f"omnidraft_{name}", text, registry=self._registry).set_function(value)

    def waited(self, seconds: float) -> None:
        """A request has left the queue."""
        self._queued.observe(seconds)

    def answered(self, report: Report) -> None:
        """An answer has ended."""
        model, counts = report.target, report.counts
        self._answers.labels(model, report.finish_reason).inc()
        for name, value in (
            ("prompt", report.prompt_tokens), ("completion", report.completion_tokens),
            ("proposed", counts["proposed"]), ("accepted", counts["accepted"]),
        ):  # fmt: skip
            self._counts[name].labels(model).inc(value)
        self._passes.labels(model).inc(counts["passes"])
        if report.time_to_first_token is not None:
            self._first.labels(model).observe(report.time_to_first_token)
        if report.tokens_per_second is not None:
            self._speed.labels(model).observe(report.tokens_per_second)

    def served(self, path: str, status: int, seconds: float) -> None:
        """An HTTP answer has ended."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class Counted:
    """ASGI middleware that counts answers by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str], clock: Callable[[], float]) -> None:
        """`paths`: the known ones; all others count as one."""
        self._app, self._metrics, self._paths, self._clock = app, metrics, paths, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count when the answer has ended, whole or not."""
        began, status = self._clock(), 499  # nginx's word for a client that leaves before it is answered

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.served(path, status, self._clock() - began)
