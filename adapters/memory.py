"""What a learner remembers of past responses: fresh ones, those to replay, and anchors that are never learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from omnidraft.adapters.samples import Sample

REPLAY_BYTES = 4 << 20
FRESH_BYTES = 4 << 20
ANCHORS = 24  # a uniform sample of all responses that were set apart
ANCHOR_EVERY = 8  # one response of so many is set apart


@dataclass
class Memory:
    """Bounded by FRESH_BYTES, REPLAY_BYTES and ANCHORS; the oldest samples to replay are dropped first.

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
            self._make_room()
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
        self._replay_later(len(self.fresh))

    @property
    def full(self) -> bool:
        """Whether there is hardly room for another fresh sample: learning must not wait for more."""
        return _size(self.fresh) > FRESH_BYTES // 2

    def _make_room(self) -> None:
        """Fresh samples that wait for too long, the oldest first, become samples to replay."""
        size, count = _size(self.fresh), 0
        while size > FRESH_BYTES:
            size -= self.fresh[count].nbytes
            count += 1
        if count:
            self._replay_later(count)

    def _replay_later(self, count: int) -> None:
        self.replay += self.fresh[:count]
        self.fresh = self.fresh[count:]
        size, dropped = _size(self.replay), 0
        while size > REPLAY_BYTES:
            size -= self.replay[dropped].nbytes
            dropped += 1
        del self.replay[:dropped]


def _size(samples: Sequence[Sample]) -> int:
    return sum(sample.nbytes for sample in samples)
