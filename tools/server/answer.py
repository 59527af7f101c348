"""One request answered: what the worker does for it, and the events that come out."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.generation import Chunk
from omnidraft.runtime.report import Report
from omnidraft.tools.report_lines import summary
from omnidraft.tools.server.engines import Engines
from omnidraft.tools.server.errors import answered_with
from omnidraft.tools.server.metrics import Metrics
from omnidraft.tools.server.schemas import Asked
from omnidraft.tools.server.worker import Ticket


@dataclass(frozen=True)
class Likely:
    """A token's bytes with its logprob, and the likeliest tokens in its place, heaviest first."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]]


@dataclass(frozen=True)
class Piece:
    """Text that can be shown now; whether the drafter proposed the token that completed it.

    `proposed`, `accepted`: draft tokens of this answer so far; `likely`: None where nobody asked, and for a token that
    ends the text.
    """

    text: str
    from_draft: bool
    proposed: int
    accepted: int
    likely: Likely | None


@dataclass(frozen=True)
class Answers:
    """Answers requests on the worker's thread. `longest`: most new tokens where a request does not say."""

    engines: Engines
    metrics: Metrics
    longest: int
    verbose: bool

    def answer(self, asked: Asked, ticket: Ticket) -> Report:
        """Send a `Piece` for each token, and return the report.

        Raises ApiError 400 for a prompt that cannot be answered, 500 for a target that cannot be opened or run.
        """
        self.metrics.waited(perf_counter() - ticket.created)
        with answered_with(500):
            answerer = self.engines.open(asked.model)
        engine = answerer.engine
        with answered_with(400):
            length = self._length(engine, asked)
        with answered_with(500):
            self._stream(engine, asked, length, ticket)
        report = engine.report
        assert report is not None
        self.metrics.answered(report)
        if self.verbose:
            print(f"{asked.model}: {summary(report, asked.sampling.temperature > 0)}", file=sys.stderr)
        if not ticket.cancelled:
            self.engines.answered(answerer)
        return report

    def _length(self, engine: Engine, asked: Asked) -> int:
        """As asked for; else what fits, up to `longest`. Raises OmniDraftError for a prompt that cannot be answered."""
        ids, _, _ = engine.encode(asked.prompt, asked.max_new_tokens or 1, asked.raw)
        return asked.max_new_tokens or min(self.longest, engine.room(len(ids)))

    def _stream(self, engine: Engine, asked: Asked, length: int, ticket: Ticket) -> None:
        arguments = asked.sampling, length, asked.stop, asked.raw, asked.top_logprobs
        with closing(engine.stream(asked.prompt, *arguments)) as stream:
            for chunk in stream:
                if ticket.cancelled:
                    break
                tally = engine.tally
                likely = _likely(engine, chunk)
                ticket.send(Piece(chunk.text, chunk.from_draft, tally.proposed, tally.accepted, likely))


def _likely(engine: Engine, chunk: Chunk) -> Likely | None:
    target = engine.pair.target
    found = chunk.logprobs
    if found is None or chunk.token in target.info.stop_ids:
        return None

    def spelled(token: int) -> bytes:
        known = target.tokens.bytes_of
        return (known[token] if token < len(known) else None) or b""  # special tokens and padding have no text

    return Likely(spelled(chunk.token), found.logprob, [(spelled(token), value) for token, value in found.top])
