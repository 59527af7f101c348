"""The noise is a function of seed, position and id, uniform, and the same by every route."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from omnidraft.runtime.noise import gumbel, gumbel_of, loud, uniform
from omnidraft.runtime.sampling import Sampling, draw, draw_from

WORD = st.integers(0, 2**64 - 1)


def test_golden_values() -> None:
    for case in json.loads((Path(__file__).parent / "golden" / "noise.json").read_text())["cases"]:
        ids = np.array(case["ids"])
        np.testing.assert_allclose(gumbel(case["seed"], case["position"], ids), case["gumbel"], rtol=1e-13)


def test_noise_is_gumbel_and_independent_of_neighbours() -> None:
    g = gumbel(7, 100, np.arange(40_000))
    assert kstest(g, "gumbel_r").pvalue > 1e-3
    for other in (gumbel(7, 101, np.arange(40_000)), gumbel(8, 100, np.arange(40_000)), np.roll(g, 1)):
        assert abs(np.corrcoef(g, other)[0, 1]) < 0.02


@given(WORD, WORD)
def test_uniform_is_inside_the_open_interval(seed: int, position: int) -> None:
    assert 0 < uniform(seed, position, 1) < 1
    assert uniform(seed, position, 1) != uniform(seed, position, 2)


def test_noise_is_finite_at_the_ends_of_the_hash() -> None:
    ends = np.array([0, 2**32 - 1], np.uint32)
    assert np.isfinite(gumbel_of(ends, ends)).all()


@given(seed=WORD, position=WORD, v=st.sampled_from([1.0, 0.3, 1e-3, 1e-9]))
@settings(max_examples=60)
def test_no_loud_token_is_overlooked(seed: int, position: int, v: float) -> None:
    """Every id with 1 - u <= v is found, and not many more."""
    u = np.exp(-np.exp(-gumbel(seed, position, np.arange(3000))))
    found = loud(seed, position, 3000, v)
    assert set(np.flatnonzero(1 - u <= v * (1 - 1e-9))) <= set(found.tolist())
    assert len(found) <= 3000 * v + 300


@given(seed=WORD, spread=st.sampled_from([0.0, 0.1, 1.0, 8.0]), temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]))
@settings(max_examples=100, deadline=None)
def test_lazy_draw_equals_the_plain_argmax(seed: int, spread: float, temperature: float) -> None:
    logits = (np.random.default_rng(seed).normal(size=5000) * spread).astype(np.float32)
    scores = logits / np.float32(temperature)
    every = scores.astype(np.float64) + gumbel(seed, 3, np.arange(5000))
    assert draw(logits, [], Sampling(temperature, seed=seed), 3) == int(every.argmax())
    assert draw_from(np.arange(5000), scores, seed, 3) == int(every.argmax())


def test_lowest_id_wins_a_tie() -> None:
    assert draw(np.array([1, 3, 3, 2], np.float32), [], Sampling(), 0) == 1
