"""The history of a personalisation session: kept in the state folder, so that the next start goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from omnidraft.adapters.learner import Round
from omnidraft.runtime.report import Report
from omnidraft.runtime.state import State

SCHEMA = "omnidraft-session/1"
SMOOTH = 12  # prompts that a point of the curve is the mean of


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
        return _rate(self.responses[-last:])


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


def draw_session(session: Session, title: str, path: Path) -> None:
    """Write acceptance rate over the prompts of a session, with the rounds that were kept, as PNG or SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    responses = session.responses
    rates = [_rate(responses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(responses))]
    axes.plot(range(1, len(rates) + 1), [float("nan") if r is None else r for r in rates], color="C0", zorder=3)
    for at, _, kept in session.rounds:
        if kept is not None:
            axes.axvline(at, color="C2" if kept else "C3", alpha=0.35, linewidth=0.8)
    for begin, task in _tasks(responses):
        axes.axvline(begin + 0.5, color="0.6", linestyle=":", linewidth=1)
        axes.annotate(task, (begin + 1, 0.985), xycoords=("data", "axes fraction"), va="top", fontsize="small")
    axes.set_xlabel("prompts; lines: an adapter was kept (green) or rolled back (red)")
    axes.set_ylabel(f"acceptance rate, mean of {SMOOTH} prompts")
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize="medium")
    figure.savefig(path)


def _tasks(responses: Sequence[Sequence[Any]]) -> list[tuple[int, str]]:
    """Where each run of one task begins."""
    return [(i, row[0]) for i, row in enumerate(responses) if i == 0 or responses[i - 1][0] != row[0]]


def _rate(responses: Sequence[Sequence[Any]]) -> float | None:
    proposed = sum(row[2] for row in responses)
    return sum(row[1] for row in responses) / proposed if proposed else None
