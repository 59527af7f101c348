"""From logits to the target's law p, and the draw of a token from it.

The order is that of plain decoding everywhere: repetition penalty on the raw logits, temperature,
top-k, top-p, min-p. A law is held as log-weights on its support; normalisation never changes an
argmax, so it is done only where a probability is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.noise import gumbel, loud

NEAR = 12.0  # how far below the top, in log-weights, tokens are tried first


@dataclass(frozen=True)
class Sampling:
    """How the target draws. Temperature 0 is greedy, and then nothing else but the penalty acts."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises OmniDraftError for a value outside its range."""
        rules = (
            (
                self.temperature == 0 or 1e-4 <= self.temperature <= 100,
                "temperature must be 0, or between 0.0001 and 100",
            ),
            (self.top_k >= 0, "top-k must be 0 (off) or more"),
            (0 < self.top_p <= 1, "top-p must be above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min-p must be between 0 and 1"),
            (0.01 <= self.repetition_penalty <= 100, "repetition penalty must be between 0.01 and 100"),
            (0 <= self.seed < 2**64, "seed must be between 0 and 2**64 - 1"),
        )
        for holds, message in rules:
            if not holds:
                raise OmniDraftError(message)


def penalise(logits: np.ndarray, history: Sequence[int], penalty: float) -> np.ndarray:
    """Repetition penalty of CTRL (arXiv 1909.05858) on float32 logits [V], for the ids in `history`."""
    if penalty == 1.0 or not len(history):
        return logits
    ids = np.unique(np.asarray(history, np.int64))
    logits = logits.copy()
    chosen = logits[ids]
    logits[ids] = np.where(chosen > 0, chosen / np.float32(penalty), chosen * np.float32(penalty))
    return logits


def truncate(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Which of the log-weights [n] stay after top-k, top-p and min-p: sorted indices, or all of them.

    Ties at a threshold are kept by index, lowest first, so that the outcome is the same everywhere.
    """
    keep = np.arange(len(scores))
    if 0 < sampling.top_k < len(scores):
        bound = np.partition(scores, len(scores) - sampling.top_k)[len(scores) - sampling.top_k]
        above = np.flatnonzero(scores > bound)
        equal = np.flatnonzero(scores == bound)[: sampling.top_k - len(above)]
        keep = np.sort(np.concatenate([above, equal]))
    if sampling.top_p < 1:
        keep = _nucleus(scores, keep, sampling.top_p)
    if sampling.min_p > 0:
        kept = scores[keep]
        keep = keep[kept >= kept.max() + np.log(sampling.min_p)]
    return keep


def _nucleus(scores: np.ndarray, keep: np.ndarray, top_p: float) -> np.ndarray:
    """The smallest set of the heaviest tokens whose mass reaches top_p."""
    kept = scores[keep]
    weights = np.exp((kept - kept.max()).astype(np.float64))
    needed = top_p * weights.sum()
    floor = 1e-4  # only the head has to be sorted; widen it in the rare case that it is too light
    while True:
        head = np.flatnonzero(weights >= floor)
        if floor == 0 or weights[head].sum() >= needed:
            break
        floor = floor * 1e-3 if floor > 1e-12 else 0.0
    order = head[np.lexsort((head, -weights[head]))]
    count = int(np.searchsorted(np.cumsum(weights[order]), needed)) + 1
    return keep[np.sort(order[:count])]


def support(logits: np.ndarray, history: Sequence[int], sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """p after all truncations: (ids [n] ascending, log-weights float32 [n]), for temperature > 0.

    `logits` is one float32 row [V]; `history` are the tokens before it, earlier proposals included.
    """
    scores = penalise(logits, history, sampling.repetition_penalty) / np.float32(sampling.temperature)
    ids = truncate(scores, sampling)
    return ids, scores[ids]


def draw(logits: np.ndarray, history: Sequence[int], sampling: Sampling, position: int) -> int:
    """The target's token y at an absolute position: argmax_t [log p(t) + g(seed, position, t)].

    At temperature 0, g = 0. The lowest id wins a tie. Source: the Gumbel coupling of
    Daliri et al. (arXiv 2408.07978); it never looks at the drafter.
    """
    if sampling.temperature == 0:
        return int(np.argmax(penalise(logits, history, sampling.repetition_penalty)))
    if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
        return _draw_from_all(penalise(logits, history, sampling.repetition_penalty), sampling, position)
    return draw_from(*support(logits, history, sampling), sampling.seed, position)


def draw_from(ids: np.ndarray, scores: np.ndarray, seed: int, position: int) -> int:
    """argmax of log-weight + noise over a support: ids [n] ascending, log-weights [n]."""
    return int(ids[np.argmax(scores.astype(np.float64) + gumbel(seed, position, ids))])


def _draw_from_all(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    """The same over a whole vocabulary, with the noise evaluated only where it could win.

    The tokens near the top come first. One further down than NEAR needs noise above `needed`, and
    g = -log(-log u) <= -log(1 - u), so the ids that are not loud enough are ruled out.
    """
    seed, temperature = sampling.seed, np.float32(sampling.temperature)

    def noisy(ids: np.ndarray) -> np.ndarray:
        return np.asarray((logits[ids] / temperature).astype(np.float64) + gumbel(seed, position, ids))

    top = float(logits.max())
    near = (logits > top - NEAR * sampling.temperature).nonzero()[0]
    values = noisy(near)
    best = int(values.argmax())
    needed = float(values[best]) - (top / sampling.temperature - NEAR) - 1e-3  # room for float32 rounding
    far = loud(seed, position, len(logits), min(exp(-needed), 1.0))
    if len(far):
        near = np.union1d(near, far)
        best = int(noisy(near).argmax())
    return int(near[best])


def probabilities(logits: np.ndarray, history: Sequence[int], sampling: Sampling) -> np.ndarray:
    """p itself, float64 [V], zero outside its support; one-hot at temperature 0."""
    p = np.zeros(len(logits))
    if sampling.temperature == 0:
        p[draw(logits, history, sampling, 0)] = 1.0
        return p
    ids, scores = support(logits, history, sampling)
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    p[ids] = weights / weights.sum()
    return p
