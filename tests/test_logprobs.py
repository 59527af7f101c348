"""Logprobs are the target's own law, and drafting does not change them."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Loaded
from scipy.special import log_softmax

from omnidraft.runtime.logprobs import logprobs
from omnidraft.runtime.sampling import Sampling


@pytest.mark.parametrize("size", [1, 7, 3000])
def test_they_are_the_log_softmax(size: int) -> None:
    rng = np.random.default_rng(size)
    row = (rng.normal(size=size) * 20).astype(np.float32)
    expected = log_softmax(row.astype(np.float64))
    token = int(rng.integers(size))
    for top in {0, 1, size // 2, size}:
        found = logprobs(row, token, top)
        assert found.logprob == pytest.approx(expected[token])
        ids, values = [i for i, _ in found.top], [value for _, value in found.top]
        assert ids == np.argsort(-row, kind="stable")[:top].tolist()
        assert values == pytest.approx(expected[ids])


def test_of_equal_tokens_the_lowest_id_comes_first() -> None:
    assert [i for i, _ in logprobs(np.array([1, 2, 1, 2, 1], np.float32), 0, 3).top] == [1, 3, 0]


@pytest.mark.model
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, top_k=50, repetition_penalty=1.2, seed=3)])
def test_they_are_those_of_plain_decoding(loaded: dict[str, Loaded], sampling: Sampling) -> None:
    """Bit for bit, at accepted and corrected positions, whatever the draft."""
    prompt = "How many legs do three cats have? Explain."
    pair = loaded["int8"]
    plain = list(pair.engine("off").stream(prompt, sampling, 40, top_logprobs=3))
    drafted = list(pair.engine("4").stream(prompt, sampling, 40, top_logprobs=3))
    assert any(chunk.from_draft for chunk in drafted) and not all(chunk.from_draft for chunk in drafted)
    assert [(chunk.token, chunk.logprobs) for chunk in drafted] == [(chunk.token, chunk.logprobs) for chunk in plain]
    for chunk in plain:
        assert chunk.logprobs is not None and len(chunk.logprobs.top) == 3
        assert chunk.logprobs.logprob <= chunk.logprobs.top[0][1]
    if sampling.temperature == 0:
        assert all(chunk.logprobs and chunk.logprobs.top[0][0] == chunk.token for chunk in plain)


@pytest.mark.model
def test_nobody_asks_nobody_pays(loaded: dict[str, Loaded]) -> None:
    assert all(chunk.logprobs is None for chunk in loaded["int8"].engine("2").stream("Hello", Sampling(), 4))
