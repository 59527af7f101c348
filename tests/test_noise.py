"""The noise is a function of seed, position and id, uniform, and the same by every route."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from omnidraft.runtime.noise import gumbel, gumbel_of, high_words, keys, mix, uniform
from omnidraft.runtime.sampling import Sampling, draw, draw_scores

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


@given(WORD, WORD)
@settings(max_examples=30)
def test_two_routes_to_the_noise_agree(seed: int, position: int) -> None:
    h1 = high_words(seed, position, 300)
    np.testing.assert_array_equal(
        gumbel_of(h1, mix(h1 + keys(seed, position)[1])), gumbel(seed, position, np.arange(300))
    )


@given(seed=WORD, spread=st.sampled_from([0.0, 0.1, 1.0, 8.0]))
@settings(max_examples=60, deadline=None)
def test_lazy_draw_equals_the_plain_argmax(seed: int, spread: float) -> None:
    scores = (np.random.default_rng(seed).normal(size=5000) * spread).astype(np.float32)
    every = scores.astype(np.float64) + gumbel(seed, 3, np.arange(5000))
    assert draw_scores(scores, None, seed, 3) == int(every.argmax())
    assert draw_scores(scores, np.arange(5000), seed, 3) == int(every.argmax())


def test_lowest_id_wins_a_tie() -> None:
    assert draw(np.array([1, 3, 3, 2], np.float32), [], Sampling(), 0) == 1
