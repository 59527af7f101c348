"""The shadow comparison: how well drafters with different adapters agree with the target, on what none has learned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from omnidraft.adapters.labels import Labels, projected
from omnidraft.adapters.layout import Floats, Layout
from omnidraft.adapters.samples import Sample, Spelling
from omnidraft.runtime.causal_model import CausalModel


def agreement(logits: NDArray[np.float32], labels: Labels) -> NDArray[np.float64]:
    """Σ_d min(q(d), p̃(d)) = 1 - TV(q, p̃) at each position [s], from the drafter's logits [T, V] of the sample.

    It is the highest acceptance rate that any coupling of q and p̃ can reach, and bounds that of the coupled draw:
    P(x = y) >= (1 - TV) / (1 + TV) (Daliri et al., arXiv 2408.07978).
    """
    rows = logits[labels.at].astype(np.float64)
    top = rows.max(1, keepdims=True)
    total = np.exp(rows - top).sum(1, keepdims=True)
    q = np.exp(np.take_along_axis(rows, labels.ids, 1) - top) / total
    overlap: NDArray[np.float64] = np.minimum(q, np.where(labels.on, labels.p, 0.0)).sum(1)
    return overlap


class Shadow:
    """Measures adapters on samples with the very graph that drafts; the decoder's past is lost each time."""

    def __init__(self, decoder: CausalModel, layout: Layout, spelling: Spelling) -> None:
        self._decoder, self._layout, self._spelling = decoder, layout, spelling

    def measure(self, lora: Floats | None, samples: Sequence[Sample]) -> float:
        """Mean agreement over all positions of the samples; `lora` None: the drafter as shipped. NaN without any."""
        self._decoder.set_adapter(None if lora is None else self._layout.parameters(lora))
        found = [self._agreement(sample) for sample in samples]
        return float(np.concatenate(found).mean()) if found else float("nan")

    def _agreement(self, sample: Sample) -> NDArray[np.float64]:
        self._decoder.reserve(len(sample.draft))
        self._decoder.rollback(0)
        return agreement(self._decoder.run(sample.draft[:-1]), projected(sample, self._spelling, 0.0))
