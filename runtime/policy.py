"""How many tokens to propose in a round: by cost, by the paper's threshold, or a fixed number.

Pure: expected acceptances and seconds in, decisions out. The text depends on none of it (DESIGN.md section 4), so a
policy is free to draw first and decide afterwards, and to drop what was drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from omnidraft.runtime.pass_times import PassTimes

LONGEST_DRAFT = 16
SEEN = 32  # proposals whose expected acceptance says what the next may be
MEMORY = 0.97  # weight that a round leaves to those before it in the moving rate: about 33 rounds
QUICK = 0.1  # weight of the newest observation in other moving averages
SLOW = 0.05
FIRST_WAIT, LONGEST_WAIT = 4, 128  # rounds without drafting before it is tried again


class Policy(Protocol):
    """Decides over one round at a time: `opens`, then `more` after each draw, then `keep`, then `close`."""

    longest: int

    def opens(self, past: int, limit: int, found: Sequence[float]) -> bool:
        """Whether to ask the drafter, where `found` are the expected acceptances of proposals that cost nothing.

        `past`: committed tokens behind which the target will run; `limit`: most proposals that have room.
        """
        ...

    def more(self, expected: Sequence[float]) -> bool:
        """Whether to draw on behind proposals with these expected acceptances, each given all before it.

        Asked once after each draw, also after one that nothing came of.
        """
        ...

    def keep(self, expected: Sequence[float]) -> tuple[int, float]:
        """How many of the proposals to verify, and what that gains (only to compare drafts of one round)."""
        ...

    def close(self, rows: int, verify_seconds: float, emitted: int, seconds: float) -> None:
        """What the round came to: rows and time of the target pass, tokens emitted, time of the whole round."""
        ...


class Fixed:
    """Always k proposals, as many papers have it."""

    def __init__(self, k: int) -> None:
        self.longest = k

    def opens(self, past: int, limit: int, found: Sequence[float]) -> bool:
        """Always."""
        self._limit = min(self.longest, limit)
        return self._limit > 0

    def more(self, expected: Sequence[float]) -> bool:
        """Until there are k."""
        return len(expected) < self._limit

    def keep(self, expected: Sequence[float]) -> tuple[int, float]:
        """All, up to k."""
        return min(self._limit, len(expected)), float(len(expected))

    def close(self, rows: int, verify_seconds: float, emitted: int, seconds: float) -> None:
        """Nothing is learned."""


class Threshold:
    """Draw on until 1 - ∏ a > γ (OmniDraft, arXiv 2507.02659, section 3.3, after SpecDec++)."""

    longest = LONGEST_DRAFT

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma

    def opens(self, past: int, limit: int, found: Sequence[float]) -> bool:
        """Always."""
        self._limit = limit
        return limit > 0

    def more(self, expected: Sequence[float]) -> bool:
        """Until it is likelier than γ that one of them will be rejected."""
        product = 1.0
        for a in expected:
            product *= a
        return len(expected) < self._limit and 1 - product <= self._gamma

    def keep(self, expected: Sequence[float]) -> tuple[int, float]:
        """All."""
        return min(self._limit, len(expected)), float(len(expected))

    def close(self, rows: int, verify_seconds: float, emitted: int, seconds: float) -> None:
        """Nothing is learned."""


class CostAware:
    """The number of proposals that gains most: 1 + Σ Sᵢ - ρ · (time of drafting and verifying), Sᵢ = a₁ … aᵢ.

    ρ, in tokens per second, is what a round is worth elsewhere: the better of the moving rate and the rate without a
    draft (renewal reward). Where drafting does not pay, the drafter rests, and is tried again at a falling rate.
    Source: DESIGN.md section 5.
    """

    longest = LONGEST_DRAFT

    def __init__(
        self, target: PassTimes, drafter: PassTimes, least_rows: int, now: Callable[[], float] = perf_counter
    ) -> None:
        """`least_rows`: W₀ or 1; `target`, `drafter`: calibrated pass times, corrected here by what rounds take."""
        self._target, self._least, self._now = target, least_rows, now
        self._next_draw = drafter.at(0)[1]  # seconds of each draw but the first
        self._drift = 1.0  # how much slower target passes are than calibrated
        self._outside = 0.0  # seconds of a round that are neither drafting nor verifying
        self._later = deque((0.5, 0.9), maxlen=SEEN)  # expected acceptances of the latest proposals behind a first one
        self._worth: tuple[float, float] | None = None  # tokens and seconds that a drafted round is expected to come to
        self._tokens, self._seconds = 0.0, 0.0
        self._rested, self._wait = 0, FIRST_WAIT
        self._spent = 0.0

    @property
    def rate(self) -> float:
        """ρ, tokens per second."""
        plain = 1 / (self._passes[self._least] + self._outside)
        return max(plain, self._tokens / self._seconds) if self._seconds else plain

    def opens(self, past: int, limit: int, found: Sequence[float]) -> bool:
        """Whether drafting is expected to gain more than what was found, or it is time to try again."""
        self._limit = limit
        self._passes = [seconds * self._drift for seconds in self._target.at(past)]
        self._rho = self.rate
        self._spent, self._drawn, self._began = 0.0, 0, self._now()
        if limit <= 0:
            return False
        tokens, seconds = self._worth or (1.0, 0.0)  # nothing is known yet: try
        if tokens - self._rho * seconds > self.keep(found)[1]:
            self._wait = FIRST_WAIT
        elif self._rested < self._wait:
            self._rested += 1
            return False
        else:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        return True

    def more(self, expected: Sequence[float]) -> bool:
        """Whether some longer draft could gain more than the best of what was drawn."""
        self._took_a_draw(expected)
        best, count = self.keep(expected)[1], len(expected)
        goes_on = 0 < count < self._limit and self._ahead(expected, best) > best
        if not goes_on:
            self._drafted(expected)
        return goes_on

    def keep(self, expected: Sequence[float]) -> tuple[int, float]:
        """The prefix that gains most; of equal ones the longest. Rows that are there anyway cost nothing."""
        best, gain = 0, 1 - self._rho * self._pass(0)
        reached, gained = 1.0, 0.0
        for m, a in enumerate(expected[: self._limit], 1):
            reached *= a
            gained += reached
            here = 1 + gained - self._rho * self._pass(m)
            if here >= gain:
                best, gain = m, here
        return best, gain

    def close(self, rows: int, verify_seconds: float, emitted: int, seconds: float) -> None:
        """Follow the device: the rate, the drift of the target's passes, and what else a round takes."""
        expected = self._passes[min(rows, len(self._passes) - 1)]
        self._drift *= 1 + SLOW * (min(max(verify_seconds / expected, 0.25), 4.0) - 1)
        self._outside += SLOW * (max(0.0, seconds - verify_seconds - self._spent) - self._outside)
        self._tokens = MEMORY * self._tokens + emitted
        self._seconds = MEMORY * self._seconds + seconds

    def _pass(self, proposals: int) -> float:
        return self._passes[max(proposals + 1, self._least)]

    def _ahead(self, expected: Sequence[float], best: float) -> float:
        """What drawing on behind these is expected to gain, where `best` is what stopping here gains.

        One more draw has the value of an option: a poor proposal is dropped. Behind a step of the pass times it may
        take several to gain anything; those are taken to be average.
        """
        reached, gained, count = 1.0, 0.0, len(expected)
        for a in expected:
            reached *= a
            gained += reached
        here = 1 + gained - self._rho * self._pass(count + 1)
        one = sum(max(best, here + reached * a) for a in self._later) / len(self._later)
        ahead = one - self._rho * self._next_draw
        usual, time = sum(self._later) / len(self._later), self._next_draw
        for m in range(count + 2, self._limit + 1):
            if ahead > best or reached < 0.01:
                break
            reached *= usual
            gained += reached
            time += self._next_draw
            ahead = max(ahead, 1 + gained + reached * usual - self._rho * (time + self._pass(m)))
        return ahead

    def _drafted(self, expected: Sequence[float]) -> None:
        """Learn what a drafted round comes to. The longer the drafter rested, the less the average before says."""
        kept = self.keep(expected)[0]
        reached, tokens = 1.0, 1.0
        for a in expected[:kept]:
            reached *= a
            tokens += reached
        seconds = self._spent + self._pass(kept)
        if self._worth is None:
            self._worth = tokens, seconds
        weight = max(QUICK, 1 - (1 - QUICK) ** min(self._rested, 8))
        self._worth = (
            self._worth[0] + weight * (tokens - self._worth[0]),
            self._worth[1] + weight * (seconds - self._worth[1]),
        )
        self._rested = 0

    def _took_a_draw(self, expected: Sequence[float]) -> None:
        """Learn from the newest draw what a draw takes, and what to expect of the next."""
        now = self._now()
        took, self._began = now - self._began, now
        self._spent += took
        if self._drawn:
            self._next_draw += QUICK * (took - self._next_draw)
            self._later.extend(expected[self._drawn :])
        else:
            self._later.extend(expected[1:])
        self._drawn = len(expected)
