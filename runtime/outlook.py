"""What is expected of proposals: the acceptance head, kept honest by what became of its predictions."""

from __future__ import annotations

from math import exp

import numpy as np

from omnidraft.runtime.acceptance import AcceptanceHead

CORRECTION = 0.03  # step of the bias on the logit: about thirty outcomes move it where it belongs
MOST = 3.0


class Outlook:
    """Probability that a proposal is accepted given that all before it in the round were.

    Without a head it is q̂ itself. A bias on the logit follows the outcomes, so that another subject, target or adapter
    than the head was trained with shifts the predictions within some dozens of tokens (online logistic regression
    with an intercept alone).
    """

    def __init__(self, head: AcceptanceHead | None) -> None:
        self.head = head
        self.bias = 0.0

    def expect(self, hidden: np.ndarray | None, features: np.ndarray) -> float:
        """From the drafter's hidden state float32 [H] and the features float32 [F] of `features.describe`."""
        known = self.head is not None and hidden is not None
        z = self.head.logit(hidden, features) if known else float(features[0])  # type: ignore[union-attr, arg-type]
        return 1 / (1 + exp(-(z + self.bias)))

    def observe(self, expected: float, accepted: bool) -> None:
        """What became of a proposal that the target has judged."""
        self.bias = max(-MOST, min(MOST, self.bias + CORRECTION * (accepted - expected)))
