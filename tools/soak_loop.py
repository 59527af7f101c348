"""The soak's loop: answers one after another, under all that changes in a day, summed up cycle by cycle.

A cycle is one run through all legs; a leg is some answers of one target with one draft policy, learning or not. What is
kept of a cycle does not grow with its answers, so that the loop is not what memory is spent on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import psutil

from omnidraft.adapters.heap import give_back
from omnidraft.adapters.learner import Learner
from omnidraft.adapters.settings import Settings
from omnidraft.runtime.calibration import Calibration, calibrate
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import Pair
from omnidraft.runtime.report import Report, rate
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State

ANSWERS = 3  # of a leg
POLICIES = (("cost", True), ("cost", False), ("threshold", False), ("4", True), ("off", False))  # draft, learning
CANCELLED, COMPARED = 0.15, 0.2  # share of the answers
WARM = Sampling(0.7, top_p=0.95)
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Leg:
    """Answers that have target, draft policy, and learning or none in common."""

    target: str
    draft: str
    learning: bool


@dataclass(frozen=True)
class Cycle:
    """What one run through all legs came to. Times are seconds, sizes are bytes.

    `begin`, `end`: since the start; `acceptance`: accepted / proposed by target; `tokens_per_second`: over all answers;
    `first_token`, `round`: the PERCENTILES of the time to the first token and of a round, as the reader of a stream
    sees them; `memory`: resident at the end, when nobody learns and malloc has given back what is free; `peak`: the
    most that was resident behind an answer; `state`: each file of the state folder.
    """

    begin: float
    end: float
    answers: int
    cancelled: int
    tokens: int
    tokens_per_second: float | None
    acceptance: dict[str, float | None]
    first_token: list[float]
    round: list[float]
    memory: int
    peak: int
    state: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class _Sums:
    """What is counted while a cycle lasts."""

    begin: float
    answers: int = 0
    cancelled: int = 0
    tokens: int = 0
    seconds: float = 0.0
    counts: dict[str, list[float]] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    peak: int = 0

    def add(self, leg: Leg, report: Report, rounds: Sequence[float]) -> None:
        self.answers += 1
        self.cancelled += report.finish_reason == "cancelled"
        self.tokens += report.completion_tokens
        self.seconds += report.seconds
        accepted, proposed = self.counts.setdefault(leg.target, [0, 0])
        self.counts[leg.target] = [accepted + report.counts["accepted"], proposed + report.counts["proposed"]]
        self.rounds += rounds
        self.peak = max(self.peak, _resident())
        if report.time_to_first_token is not None:
            self.first.append(report.time_to_first_token)

    def closed(self, end: float, memory: int, state: dict[str, int]) -> Cycle:
        acceptance = {name: rate(*counts) for name, counts in self.counts.items()}
        first, rounds = (np.percentile(times or [0.0], PERCENTILES).tolist() for times in (self.first, self.rounds))
        speed = rate(self.tokens, self.seconds)
        return Cycle(
            self.begin, end, self.answers, self.cancelled, self.tokens, speed, acceptance,
            first, rounds, memory, self.peak, state,
        )  # fmt: skip


class Soak:
    """Answers prompts until told to stop.

    `cycles`: those that are whole; `compared`: answers that were decoded again without drafts; `differing`: a line for
    each whose text was another.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        prompts: Sequence[str],
        state: State,
        max_new_tokens: int,
        warn: Callable[[str], None],
    ) -> None:
        """`pairs`: each target once, loaded with the drafter; `state` has a folder; `prompts` fit every target."""
        self._pairs = {pair.name: pair for pair in pairs}
        self._prompts, self._state, self._budget, self._warn = prompts, state, max_new_tokens, warn
        self._calibrations: dict[str, Calibration] = {pair.name: calibrate(pair, state) for pair in pairs}
        nowhere, plain = State(None, warn), Options("off")
        self._plain = {pair.name: Engine(pair, plain, nowhere, self._calibrations[pair.name]) for pair in pairs}
        self._dice = random.Random(0)
        self._asked = 0
        self._start = perf_counter()
        self.legs = [Leg(name, draft, learns) for draft, learns in POLICIES for name in self._pairs]
        self.cycles: list[Cycle] = []
        self.compared = 0
        self.differing: list[str] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self._start

    def state_files(self) -> dict[str, int]:
        """Bytes of each file of the state folder, by its relative name."""
        folder = self._state.folder
        assert folder is not None
        return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}

    def cycle(self, goes_on: Callable[[], bool], advance: Callable[[Leg], None]) -> bool:
        """One run through all legs. False if `goes_on`, asked before each answer, ended it early.

        `advance` is told of each answer. Raises OmniDraftError if an answer ends with an error.
        """
        sums = _Sums(self.elapsed)
        for leg in self.legs:
            if not self._leg(leg, sums, goes_on, advance):
                return False
        give_back()
        self.cycles.append(sums.closed(self.elapsed, _resident(), self.state_files()))
        return True

    def _leg(self, leg: Leg, sums: _Sums, goes_on: Callable[[], bool], advance: Callable[[Leg], None]) -> bool:
        """As after a start of the program: engine and learner go on from what the state folder has."""
        engine = Engine(self._pairs[leg.target], Options(leg.draft), self._state, self._calibrations[leg.target])
        learner = Learner(engine, self._state, Settings(), self._warn) if leg.learning else None
        try:
            for _ in range(ANSWERS):
                if not goes_on():
                    return False
                self._answer(leg, engine, learner, sums)
                advance(leg)
        finally:
            if learner is not None:
                learner.close()
        return True

    def _answer(self, leg: Leg, engine: Engine, learner: Learner | None, sums: _Sums) -> None:
        """One answer, learned from, cut short or compared as the dice fall."""
        dice = self._dice
        prompt = self._prompts[self._asked % len(self._prompts)]
        self._asked += 1
        sampling = Sampling(WARM.temperature, top_p=WARM.top_p, seed=self._asked) if dice.random() < 0.5 else Sampling()
        longest = dice.randint(1, self._budget) if dice.random() < CANCELLED else None
        report, rounds = _listen(engine, prompt, sampling, self._budget, longest)
        sums.add(leg, report, rounds)
        if learner is not None and report.finish_reason != "cancelled":
            learner.after_response()
        if dice.random() < COMPARED and report.tokens and report.lossless == "exact":
            self.compared += 1
            self._compare(leg, prompt, sampling, report)

    def _compare(self, leg: Leg, prompt: str, sampling: Sampling, report: Report) -> None:
        """With plain decoding of as many tokens: what was cut short is a beginning of it."""
        plain = self._plain[leg.target].generate(prompt, sampling=sampling, max_new_tokens=len(report.tokens))
        if plain.tokens != report.tokens or plain.text != report.text:
            learns = "learning" if leg.learning else "not learning"
            self.differing.append(
                f"answer {self._asked} of {leg.target} (draft {leg.draft}, {learns}, temperature "
                f"{sampling.temperature:g}, seed {sampling.seed}) is not plain decoding's: {prompt[:60]!r}"
            )


def _resident() -> int:
    resident: int = psutil.Process().memory_info().rss
    return resident


def _listen(
    engine: Engine, prompt: str, sampling: Sampling, budget: int, longest: int | None
) -> tuple[Report, list[float]]:
    """The report, and the seconds that passed before each round's text arrived; cut short after `longest` tokens."""
    rounds: list[float] = []
    with closing(engine.stream(prompt, sampling, budget)) as stream:
        before, opens = perf_counter(), False  # the first token is the prefill's
        for count, chunk in enumerate(stream, 1):
            now = perf_counter()
            if opens:
                rounds.append(now - before)
            before, opens = now, not chunk.from_draft  # a round ends with the target's own token
            if count == longest:
                break
    assert engine.report is not None
    return engine.report, rounds
