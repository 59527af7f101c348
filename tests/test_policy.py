"""Draft lengths: the policy of cost against every fixed length, on simulated devices whose best is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.runtime.pass_times import PassTimes
from omnidraft.runtime.policy import LONGEST_DRAFT, CostAware, Fixed, Policy, Threshold

MS = 1e-3
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, LONGEST_DRAFT + 1)
STEP = 0.5 * MS
DEVICES: dict[str, Callable[[int], float]] = {
    "flat": lambda m: (25 + 0.5 * m) * MS,  # bound by reading weights, as fp32 is
    "steep": lambda m: (5 + 4 * m) * MS,  # bound by arithmetic, as int4 without VNNI is
    "steps": lambda m: (10 + 4 * ((m - 1) // 4)) * MS,  # rows in tiles of four
    "expensive second row": lambda m: (8 if m == 1 else 12 + m) * MS,
}


def times(device: Callable[[int], float]) -> PassTimes:
    return PassTimes((64, 448), WIDTHS, (tuple(device(m) for m in WIDTHS),) * 2)


class Device:
    """Runs rounds on a clock of its own. `chance(i)`: true acceptance of the i-th proposal, and what is predicted."""

    def __init__(self, policy: Policy, passes: Callable[[int], float], least: int, clock: list[float]) -> None:
        self.policy, self.passes, self.least, self.clock = policy, passes, least, clock
        self.rng = random.Random(0)
        self.tokens, self.drafted = 0, 0

    def round(self, chance: Callable[[random.Random], float]) -> int:
        began = self.clock[0]
        expected: list[float] = []
        if self.policy.opens(200, LONGEST_DRAFT, ()):
            self.drafted += 1
            while True:
                self.clock[0] += STEP
                expected.append(chance(self.rng))
                if not self.policy.more(expected) or len(expected) >= LONGEST_DRAFT:
                    break
        kept = self.policy.keep(expected)[0]
        rows = max(kept + 1, self.least)
        took = self.passes(rows)
        self.clock[0] += took
        accepted = 0
        while accepted < kept and self.rng.random() < expected[accepted]:
            accepted += 1
        self.tokens += accepted + 1
        self.policy.close(rows, took, accepted + 1, self.clock[0] - began)
        return kept


def speed(
    make: Callable[[list[float]], Policy | None], passes: Callable[[int], float], least: int,
    chance: Callable[[random.Random], float], rounds: int = 1500,
) -> float:  # fmt: skip
    clock = [0.0]
    policy = make(clock)
    if policy is None:
        return 1 / passes(least)
    device = Device(policy, passes, least, clock)
    for _ in range(rounds):
        device.round(chance)
    return device.tokens / clock[0]


def cost(passes: Callable[[int], float], least: int) -> Callable[[list[float]], CostAware]:
    draw = PassTimes((0,), (1, 2), ((STEP, STEP),))
    return lambda clock: CostAware(times(passes), draw, least, lambda: clock[0])


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("acceptance", [0.02, 0.2, 0.5, 0.8, 0.95])
def test_cost_is_as_quick_as_the_best_fixed_length(device: str, acceptance: float, least: int) -> None:
    """Where every proposal is accepted with the same probability, some fixed length (or none) is best."""
    passes = DEVICES[device]
    mine = speed(cost(passes, least), passes, least, lambda rng: acceptance)
    rivals = [speed(lambda clock, k=k: Fixed(k), passes, least, lambda rng: acceptance) for k in (1, 2, 4, 8, 16)]
    plain = speed(lambda clock: None, passes, least, lambda rng: acceptance)
    assert mine >= 0.97 * max(*rivals, plain)


@pytest.mark.parametrize("device", ["flat", "steep"])
def test_cost_beats_every_fixed_length_where_some_text_is_easy(device: str) -> None:
    """Where acceptance varies and is known in advance, no fixed length can follow it."""
    passes = DEVICES[device]

    def chance(rng: random.Random) -> float:
        return rng.choice((0.05, 0.3, 0.97, 0.97))

    mine = speed(cost(passes, 1), passes, 1, chance)
    rivals = [speed(lambda clock, k=k: Fixed(k), passes, 1, chance) for k in (1, 2, 3, 4, 6, 8)]
    assert mine > 1.03 * max(*rivals, 1 / passes(1))


def test_a_useless_drafter_rests_and_costs_next_to_nothing() -> None:
    passes = DEVICES["steep"]
    clock = [0.0]
    device = Device(cost(passes, 1)(clock), passes, 1, clock)
    for _ in range(600):
        device.round(lambda rng: 0.01)
    assert device.drafted < 30
    assert device.tokens / clock[0] >= 0.985 / passes(1)
    before = device.drafted
    for _ in range(600):
        device.round(lambda rng: 0.9)
    assert device.drafted - before > 400, "it is tried again, and used where it has become good"


def test_exact_mode_gives_the_free_row_to_the_best_proposal() -> None:
    passes = DEVICES["steep"]
    clock = [0.0]
    policy = cost(passes, 2)(clock)
    policy.opens(100, 16, ())
    assert policy.keep([0.001])[0] == 1, "the second row is there anyway"
    assert policy.keep([0.001, 0.001])[0] == 1
    near = cost(passes, 1)(clock)
    near.opens(100, 16, ())
    assert near.keep([0.001])[0] == 0


def test_what_was_found_for_nothing_is_taken_where_the_drafter_is_not_worth_its_time() -> None:
    passes = DEVICES["flat"]
    clock = [0.0]
    policy = cost(passes, 1)(clock)
    assert not policy.opens(100, 8, [0.99] * 8), "eight certain tokens are better than any draft"
    assert policy.keep([0.99] * 8)[0] == 8
    assert policy.opens(100, 8, [0.05])


@given(st.lists(st.floats(0, 1), max_size=16), st.integers(1, 4), st.sampled_from(sorted(DEVICES)))
def test_the_prefix_kept_is_the_one_that_gains_most(expected: list[float], least: int, device: str) -> None:
    passes = DEVICES[device]
    policy = cost(passes, least)([0.0])
    policy.opens(100, LONGEST_DRAFT, ())
    kept, gain = policy.keep(expected)

    def value(m: int) -> float:
        product, total = 1.0, 1.0
        for a in expected[:m]:
            product *= a
            total += product
        return total - policy.rate * times(passes).at(100)[max(m + 1, least)]

    assert gain == pytest.approx(max(value(m) for m in range(len(expected) + 1)), abs=1e-9)
    assert value(kept) == pytest.approx(gain, abs=1e-9)


def test_a_device_slower_than_calibrated_is_noticed() -> None:
    """Calibrated steep; since then each further row costs next to nothing, but a pass takes three times as long."""
    truth = DEVICES["flat"]
    clock = [0.0]
    policy = cost(DEVICES["steep"], 1)(clock)
    device = Device(policy, truth, 1, clock)
    for _ in range(300):
        device.round(lambda rng: 0.6)
    assert policy.rate == pytest.approx(device.tokens / clock[0], rel=0.3)


def test_the_threshold_ends_a_draft_once_a_rejection_is_likelier_than_gamma() -> None:
    policy = Threshold(0.6)
    policy.opens(0, 16, ())
    assert policy.more([0.9, 0.8]) and policy.more([0.9, 0.5])
    assert not policy.more([0.9, 0.4])
    assert policy.keep([0.9, 0.4])[0] == 2, "the one that ended it is verified too"
    policy.opens(0, 2, ())
    assert not policy.more([1.0, 1.0])


def test_a_fixed_length_is_fixed() -> None:
    policy = Fixed(3)
    assert policy.opens(0, 16, ()) and policy.more([0.0, 0.0]) and not policy.more([1.0] * 3)
    assert policy.keep([0.5] * 4)[0] == 3, "a split may have given one more"
    assert not policy.opens(0, 0, ())


def test_pass_times_are_straight_lines_between_what_was_measured() -> None:
    found = PassTimes((100, 200), (1, 2, 5), ((1.0, 2.0, 5.0), (2.0, 4.0, 7.0)))
    assert found.at(100) == pytest.approx([0, 1, 2, 3, 4, 5])
    assert found.at(150) == pytest.approx([0, 1.5, 3, 4, 5, 6])
    assert found.at(300) == pytest.approx([0, 3, 6, 7, 8, 9])
    assert found.at(0) == pytest.approx(found.at(100)), "never less than behind the shortest past"
    assert PassTimes.from_dict(found.as_dict()) == found
    three = PassTimes((0, 10, 20), (1,), ((1.0,), (2.0,), (4.0,)))
    assert [three.at(past)[1] for past in (0, 5, 10, 15, 20, 25)] == pytest.approx([1, 1.5, 2, 3, 4, 5])
