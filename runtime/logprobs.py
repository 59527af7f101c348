"""How likely the target found what it said: its law before temperature, penalties and truncation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms at the position of one emitted token: its own, and (id, logarithm) of the likeliest ones.

    `top` is sorted: heaviest first, of equal ones the lowest id first.
    """

    logprob: float
    top: list[tuple[int, float]]


def logprobs(row: np.ndarray, token: int, top: int) -> Logprobs:
    """Of logits float32 [V], for the emitted token and the `top` likeliest (0 to V)."""
    scores = row.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    if top == 0:
        return Logprobs(float(scores[token]), [])
    bound = np.partition(scores, len(scores) - top)[len(scores) - top]
    ids = np.flatnonzero(scores >= bound)
    ids = ids[np.lexsort((ids, -scores[ids]))][:top]
    return Logprobs(float(scores[token]), [(int(i), float(scores[i])) for i in ids])
