"""The law p: every truncation against a direct definition, in the documented order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.sampling import Sampling, penalise, probabilities

LOGITS = st.lists(st.integers(-40, 40), min_size=2, max_size=40).map(lambda v: np.array(v, np.float32) / 4)


def reference(logits: np.ndarray, history: list[int], s: Sampling) -> np.ndarray:
    """The definitions, one after the other, on sorted probabilities."""
    z = penalise(logits, history, s.repetition_penalty).astype(np.float32) / np.float32(s.temperature)
    order = np.lexsort((np.arange(len(z)), -z))
    alive = list(order[: s.top_k]) if s.top_k else list(order)

    def law(ids: list[int]) -> np.ndarray:
        p = np.zeros(len(z))
        p[ids] = np.exp(z[ids].astype(float) - float(z.max()))
        return p / p.sum()

    if s.top_p < 1:
        cumulative = np.cumsum(law(alive)[alive])
        alive = alive[: int(np.searchsorted(cumulative, s.top_p - 1e-12)) + 1]
    if s.min_p > 0:
        p = law(alive)
        alive = [i for i in alive if p[i] >= s.min_p * p.max() * (1 - 1e-6)]
    return law(alive)


@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.5, 1.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.95, 0.511, 0.013]),
    min_p=st.sampled_from([0.0, 0.0507, 0.31]),
    penalty=st.sampled_from([1.0, 1.25]),
)
@settings(max_examples=300, deadline=None)
def test_truncations_follow_their_definitions(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    s = Sampling(temperature, top_k, top_p, min_p, penalty)
    np.testing.assert_allclose(probabilities(logits, [0, 1], s), reference(logits, [0, 1], s), atol=1e-9)


@given(LOGITS)
def test_penalty_pulls_seen_tokens_down_and_leaves_the_rest(logits: np.ndarray) -> None:
    after = penalise(logits, [0, 0], 1.5)
    assert after[0] <= logits[0]
    np.testing.assert_array_equal(after[1:], logits[1:])
    assert penalise(logits, [0], 1.0) is logits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0), ("top_p", 1.1),
        ("min_p", 2), ("repetition_penalty", 0), ("seed", -1), ("seed", 2**64),
    ],
)  # fmt: skip
def test_impossible_values_are_refused(name: str, value: float) -> None:
    with pytest.raises(OmniDraftError, match=name.replace("_", ".")):
        Sampling(**{name: value})
