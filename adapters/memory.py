"""What a learner remembers of past responses: fresh ones, those to replay, and anchors that are never learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from omnidraft.adapters.samples import Sample

REPLAY_BYTES = 4 << 20
ANCHORS = 24  # a uniform sample of all responses that were set apart
ANCHOR_EVERY = 8  # one response of so many is set apart


@dataclass
class Memory:
    """Bounded by REPLAY_BYTES and ANCHORS; the oldest samples to replay are dropped first.

    `responses`: how many there were; `set_apart`: how many of them were set apart as anchors.
    """

    fresh: list[Sample] = field(default_factory=list)
    replay: list[Sample] = field(default_factory=list)
    anchors: list[Sample] = field(default_factory=list)
    responses: int = 0
    set_apart: int = 0

    def add(self, samples: Sequence[Sample]) -> bool:
        """One more response; whether an anchor was made of it, which depends on its number only."""
        self.responses += 1
        if self.responses % ANCHOR_EVERY or not samples:
            self.fresh += samples
            return False
        self.set_apart += 1
        if len(self.anchors) < ANCHORS:
            self.anchors.append(samples[0])
            return True
        place = int(np.random.default_rng(self.set_apart).integers(self.set_apart))  # Vitter's algorithm R
        if place < ANCHORS:
            self.anchors[place] = samples[0]
        return place < ANCHORS

    def learned(self) -> None:
        """The fresh samples have been learned: from now on they are replayed."""
        self.replay += self.fresh
        self.fresh = []
        size = sum(sample.nbytes for sample in self.replay)
        while size > REPLAY_BYTES:
            size -= self.replay.pop(0).nbytes
