"""The coupled draw gives p exactly, whatever the drafter does; the paper's rule does not."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.verification import verify

RUNS = 6000


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Of χ² against the exact law; cells that expect fewer than five are pooled."""
    runs = sum(counts.values())
    cells = [(counts[key], runs * mass) for key, mass in law.items() if runs * mass >= 5]
    rest = [(counts[key], runs * mass) for key, mass in law.items() if runs * mass < 5]
    if rest:
        cells.append((sum(o for o, _ in rest), sum(e for _, e in rest)))
    observed, expected = zip(*cells, strict=True)
    return float(chisquare(observed, expected, sum_check=False).pvalue)


def first_two(model: toy.Toy, temperature: float, rule: str) -> float:
    law = {
        (a, b): model.p("", temperature)[a] * model.p(model.targets[a], temperature)[b]
        for a, b in product(range(len(model.targets)), repeat=2)
    }
    draws = (tuple(model.generate(2, 4, Sampling(temperature, seed=seed), rule)) for seed in range(RUNS))
    return p_value(Counter(draws), law)


def test_worked_example_coupled_is_exact_and_paper_is_biased() -> None:
    model = toy.worked_example()
    law = {(t,): mass for t, mass in enumerate([0.1, 0.1, 0.3, 0.5])}
    counts = {
        rule: Counter((model.round([], 2, Sampling(1.0, seed=seed), rule)[0],) for seed in range(20_000))
        for rule in ("coupled", "paper")
    }
    assert p_value(counts["coupled"], law) > 1e-4
    assert p_value(counts["paper"], law) < 1e-15
    # The bias is the one derived by hand: P(f) = .05 in place of .1, P(fla) = .55 in place of .5.
    shares = {t: counts["paper"][(t,)] / 20_000 for t in range(4)}
    assert shares[0] == pytest.approx(0.05, abs=0.007)
    assert shares[3] == pytest.approx(0.55, abs=0.015)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_nested_ngrams_coupled_is_exact(temperature: float) -> None:
    assert first_two(toy.nested(), temperature, "coupled") > 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_control_paper_rule_fails_the_same_test(temperature: float) -> None:
    assert first_two(toy.nested(), temperature, "paper") < 1e-8


@given(
    seed=st.integers(0, 2**64 - 1),
    k=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 2]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    penalty=st.sampled_from([1.0, 1.3]),
)
@settings(max_examples=150, deadline=None)
def test_text_does_not_depend_on_draft_length(
    seed: int, k: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    model = toy.nested()
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty, seed)
    assert model.generate(12, k, sampling) == model.generate(12, 0, sampling)


def test_paper_rule_is_exact_at_temperature_0() -> None:
    model = toy.nested()
    greedy = Sampling()
    assert model.generate(30, 4, greedy, "paper") == model.generate(30, 0, greedy)


def test_round_ends_at_first_mismatch_or_with_bonus() -> None:
    rows = np.eye(4, dtype=np.float32)[[2, 1, 3]]
    assert verify(rows, [2, 1], [], Sampling(), 0).tokens == [2, 1, 3]
    assert verify(rows, [2, 0], [], Sampling(), 0).tokens == [2, 1]
    assert verify(rows, [0, 1], [], Sampling(), 0).accepted == 0


def test_drafting_speeds_up_the_toy() -> None:
    """Not vacuous: the equalities above hold while proposals are really accepted."""
    model = toy.nested()
    emitted = [len(model.round([], 4, Sampling(1.0, seed=seed), "coupled")) for seed in range(500)]
    assert np.mean(emitted) > 1.1


def test_penalty_sees_the_tokens_of_its_own_round_without_any_history() -> None:
    """The second row is penalised for the first, also at the very beginning of a text."""
    rows = np.array([[0, 5, 0], [0, 2.0, 1.9], [9, 0, 0]], np.float32)
    assert verify(rows, [1, 1], [], Sampling(repetition_penalty=1.5), 0).tokens == [1, 2]
