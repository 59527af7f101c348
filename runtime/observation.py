"""What one response teaches: the tokens that the target said, and what else it found likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

TOP = 16  # of the likeliest tokens, which hold nearly all the mass
LOG_FLOOR = log(1e-3)  # lighter ones than this share of the likeliest are left out


@dataclass
class Observation:
    """One response, seen by the target alone: it holds accepted and corrected positions alike.

    prefix, text: the prompt as the drafter read it, draft ids and then plain text. tokens: the emitted target ids;
    tops: for each, the likeliest target ids [n] and their probabilities float32 [n] at temperature 1, before
    penalties and truncation.
    """

    prefix: Sequence[int]
    text: bytes
    tokens: list[int] = field(default_factory=list)
    tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def add(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """Tokens emitted in one round, with the rows of logits [at least n, V] that they were drawn from."""
        self.tokens += tokens
        self.tops += [likeliest(row) for row in logits[: len(tokens)]]


def likeliest(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The up to TOP heaviest ids of a row float32 [V], and their probabilities float32."""
    top = logits.max()
    ids = (logits > top + LOG_FLOOR).nonzero()[0]
    if len(ids) > TOP:
        ids = ids[np.argpartition(logits[ids], -TOP)[-TOP:]]
    total = np.exp(logits - top).sum()
    return ids.astype(np.int32), np.exp(logits[ids] - top) / total
