"""What is seen of a proposal before the target sees it: the cheap inputs of the acceptance head."""

from __future__ import annotations

from collections.abc import Mapping
from math import log

import numpy as np
from numpy.typing import NDArray

from omnidraft.runtime.translation import Kind

FEATURES = ("logit", "entropy", "margin", "coverage", "merge", "split", "piece", "index", "temperature")
CERTAIN = 7.0  # |logit| at which q̂ is cut off
LATER_PIECE = 0.9  # q̂ of the further pieces of a split, which follow from the first
DEEPEST = 8  # index in the draft from which on all are alike


def describe(
    masses: Mapping[int, float], coverage: float, token: int, kind: Kind, piece: int, index: int, temperature: float
) -> NDArray[np.float32]:
    """float32 [F], in the order of FEATURES.

    `masses`: q̂ before it is normalised, by target id; `coverage`: share of the drafter's mass that has a translation;
    `piece`: number of the piece of a split, 0 for the first; `index`: of the proposal in its draft, from 0.
    logit of q̂(token); entropy of q̂ in nats; margin over the second likeliest; kind as 0 or 1.
    """
    total = sum(masses.values()) or 1.0
    share = masses.get(token, 0.0) / total
    entropy, second = 0.0, 0.0
    for other, mass in masses.items():
        if mass > 0:
            part = mass / total
            entropy -= part * log(part)
            if other != token and part > second:
                second = part
    mapped = LATER_PIECE if piece else share
    return np.array(
        (
            logit(mapped), entropy, share - second, coverage, kind is Kind.MERGE, kind is Kind.SPLIT and not piece,
            piece > 0, min(index, DEEPEST) / DEEPEST, temperature,
        ),
        np.float32,
    )  # fmt: skip


def logit(probability: float) -> float:
    """log(p / (1 - p)), at most CERTAIN away from 0."""
    if probability <= 0 or probability >= 1:
        return CERTAIN if probability >= 1 else -CERTAIN
    return max(-CERTAIN, min(CERTAIN, log(probability / (1 - probability))))
