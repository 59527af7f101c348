"""The phase split: where the time of a generation went."""

from __future__ import annotations

import time
from collections.abc import Callable

PHASES = ("prefill", "draft", "translate", "verify", "learn", "other")


class PhaseClock:
    """Attributes every moment between start and stop to the phase that was entered last."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = "other"
        self._since: float | None = None

    def enter(self, phase: str) -> None:
        """Go on in `phase`; starts the clock if it stands still."""
        now = self._now()
        if self._since is not None:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @property
    def phase(self) -> str:
        """The phase that was entered last."""
        return self._phase

    def stop(self) -> None:
        """Stand still: what passes now is the consumer's time, not ours."""
        self.enter(self._phase)
        self._since = None

    @property
    def total(self) -> float:
        """Seconds attributed so far."""
        return sum(self.seconds.values())
