"""What the target says to a round's proposals, by the coupled draw (DESIGN.md section 4).

The target draws its own token at every position and never looks at the drafter, so the text is that
of plain decoding, whatever was proposed. The paper's rule, for comparison, is in `paper.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.runtime.sampling import Sampling, draw


@dataclass(frozen=True)
class Verdict:
    """The tokens that a round emits; the first `accepted` of them were proposed."""

    tokens: list[int]
    accepted: int


def verify(
    rows: np.ndarray, proposed: Sequence[int], history: Sequence[int], sampling: Sampling, position: int
) -> Verdict:
    """Keep proposals while they are what the target draws; end with the first draw that is not, or the bonus.

    `rows` float32 [≥ k+1, V]: the target's logits behind the last committed token and behind each of
    the k proposals; `history`: all committed ids, for the repetition penalty; `position`: the
    absolute position of the first new token.
    """
    tokens: list[int] = []
    penalised = sampling.repetition_penalty != 1
    for i in range(len(proposed) + 1):
        y = draw(rows[i], [*history, *tokens] if penalised else (), sampling, position + i)
        tokens.append(y)
        if i < len(proposed) and y != proposed[i]:
            break
    return Verdict(tokens, i)
