"""The history of a personalisation session: kept in the state folder, so that the next start goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from omnidraft.adapters.learner import Round
from omnidraft.runtime.report import Report
from omnidraft.runtime.state import State

SCHEMA = "omnidraft-session/1"


@dataclass
class Session:
    """`done`: prompts of the file that were answered; `responses`: [task, accepted, proposed, seconds, tokens] of each;

    `rounds`: [responses before it, loss, kept] of each round of learning.
    """

    done: int = 0
    responses: list[list[Any]] = field(default_factory=list)
    rounds: list[list[Any]] = field(default_factory=list)

    def add(self, task: str, report: Report, learned: Round | None) -> None:
        """One more response, and what was learned after it."""
        counts = report.counts
        self.done += 1
        self.responses.append(
            [task, counts["accepted"], counts["proposed"], round(report.seconds, 4), counts["emitted"]]
        )
        if learned is not None and isfinite(learned.loss):
            self.rounds.append([len(self.responses), round(learned.loss, 5), learned.kept])

    def acceptance(self, last: int) -> float | None:
        """Acceptance rate of the last responses."""
        return acceptance_rate(self.responses[-last:])


class SessionFile:
    """The document of one pair, and of one file of prompts: another file begins a new session."""

    def __init__(self, state: State, learning: str, pair: Mapping[str, str], prompts: str) -> None:
        """`learning`: the folder of what this pair learned; `prompts`: SHA-256 of the file."""
        self._state, self._key = state, {**pair, "prompts": prompts}
        self._relative = f"{learning}/session-{prompts[:12]}.json"

    def load(self) -> Session:
        """The session as it was left, or a new one."""
        payload = self._state.load(self._relative, SCHEMA, dict(self._key))
        return Session() if payload is None else Session(**payload)

    def save(self, session: Session) -> None:
        """Keep it."""
        self._state.update(self._relative, SCHEMA, dict(self._key), lambda _old: vars(session))


def acceptance_rate(responses: Sequence[Sequence[Any]]) -> float | None:
    """Accepted / proposed over responses of a session."""
    proposed = sum(row[2] for row in responses)
    return sum(row[1] for row in responses) / proposed if proposed else None
