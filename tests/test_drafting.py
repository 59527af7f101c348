"""q̂ moves the drafter's mass to target tokens and loses none; proposals are what q̂ says."""

from __future__ import annotations

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.runtime.drafting import Law, choose, draft, law
from omnidraft.runtime.sampling import Sampling, draw_from
from omnidraft.runtime.translation import Kind, Mode, Translation
from omnidraft.runtime.vocabulary import VocabularyMap


class Fixed:
    """One row of logits for each length of path, the last for all longer ones."""

    room = 1000

    def __init__(self, *rows: list[float]) -> None:
        self.rows = [np.array(row, np.float32) for row in rows]

    def logits(self, path: tuple[int, ...]) -> np.ndarray:
        return self.rows[min(len(path), len(self.rows) - 1)]


def mass_of(q_hat: Law) -> np.ndarray:
    """q̂ as a vector over target ids."""
    mass = np.zeros(max(q_hat.masses) + 1)
    mass[list(q_hat.masses)] = list(q_hat.masses.values())
    return mass


@given(text=st.text("abc", max_size=6), temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]))
@settings(max_examples=200)
def test_no_mass_is_lost_and_none_is_negative(text: str, temperature: float) -> None:
    """All draft tokens of the toy are mapped, so q̂ sums to 1 whatever merges it holds."""
    model = toy.Behind(toy.nested(), text)
    q_hat = law(model, model.toy.translation, (), temperature)
    assert min(q_hat.masses.values()) >= 0
    assert mass_of(q_hat).sum() == pytest.approx(1, abs=0.01)  # what is lighter than 1e-3 of the heaviest is left out


def test_worked_example_has_the_law_derived_by_hand() -> None:
    model = toy.Behind(toy.worked_example(), "")
    q_hat = law(model, model.toy.translation, (), 1.0)
    by_token = dict(zip(model.toy.targets, mass_of(q_hat).tolist(), strict=True))
    assert by_token == pytest.approx({"f": 0.06, "la": 0.1, "g": 0.3, "fla": 0.54}, abs=1e-6)


def test_twins_add_their_mass() -> None:
    """Two draft tokens begin with target 0: together they outweigh the likeliest single draft token."""
    translation = Translation(VocabularyMap([(0, 1), (0, 2), (3,)], [(), (), (), (2,)]))
    made = draft(Fixed([1.0, 0.9, 1.2]), translation, Sampling(), 0, 2, ())
    assert [(p.token, p.kind, p.path) for p in made.proposals] == [(0, Kind.SPLIT, ()), (1, Kind.SPLIT, (0,))]


def test_a_head_left_alone_is_not_followed_by_what_would_have_merged() -> None:
    """0·1 -> 2 loses to 0 alone, so 1 cannot come next, though it is the likeliest."""
    translation = Translation(VocabularyMap([(0,), (1,), (3,)], [(0,), (1,), (0, 1), (2,)]))
    made = draft(Fixed([5.0, 0.0, 0.0], [0.5, 0.6, 0.4]), translation, Sampling(), 0, 2, ())
    assert made.tokens[0] == 0
    assert made.tokens[1] != 1


def test_nothing_mapped_means_nothing_proposed_and_is_counted() -> None:
    translation = Translation(VocabularyMap([(), ()], [()]))
    made = draft(Fixed([0.0, 1.0]), translation, Sampling(), 0, 3, ())
    assert (made.proposals, made.drawn, made.translated) == ([], 1, 0)


def test_coverage_is_the_mass_that_can_be_translated() -> None:
    translation = Translation(VocabularyMap([(0,), (), (1, 0)], [(0,), ()]), Mode.FULL)
    made = draft(Fixed(np.log([0.5, 0.3, 0.2]).tolist()), translation, Sampling(), 0, 1, ())
    assert made.translated == pytest.approx(0.7)
    direct = Translation(VocabularyMap([(0,), (), (1, 0)], [(0,), ()]), Mode.DIRECT)
    made = draft(Fixed(np.log([0.5, 0.3, 0.2]).tolist()), direct, Sampling(), 0, 1, ())
    assert made.translated == pytest.approx(0.5)


def test_drafting_stops_behind_an_end_token() -> None:
    translation = Translation(VocabularyMap([(0,), (1,)], [(0,), (1,)]))
    assert draft(Fixed([0.0, 1.0]), translation, Sampling(), 0, 5, (1,)).tokens == [1]


@pytest.mark.parametrize("mode", list(Mode))
def test_modes_use_what_they_say(mode: Mode) -> None:
    vocabulary = VocabularyMap([(0,), (1,), (2, 0)], [(0,), (1,), (), (0, 1)])
    translation = Translation(vocabulary, mode)
    assert bool(translation.merges) == mode.static
    assert (translation.pieces[2] == (2, 0)) == mode.static
    assert translation.pieces[0] == (0,)


@given(st.integers(0, 2**32), st.integers(0, 1000))
def test_drawn_proposal_uses_the_targets_noise(seed: int, position: int) -> None:
    """If p is q̂, the drawn x is the y that the target draws."""
    model, sampling = toy.Behind(toy.worked_example(), ""), Sampling(1.0, seed=seed)
    q_hat = law(model, model.toy.translation, (), 1.0)
    y = draw_from(np.arange(4), np.log(mass_of(q_hat)), seed, position)
    assert choose(q_hat, sampling, position) == y


@pytest.mark.parametrize("room", range(6))
def test_drafting_stays_inside_the_window(room: int) -> None:
    """A drafter that is sure of a long merge again and again never looks further than its window goes."""
    translation = Translation(VocabularyMap([(0,), (1,)], [(0,), (1,), (0, 0, 0)]))
    model = Fixed([9.0, 0.0])
    longest = 0

    class Small:
        def __init__(self) -> None:
            self.room = room

        def logits(self, path: tuple[int, ...]) -> np.ndarray:
            nonlocal longest
            longest = max(longest, len(path))
            return model.logits(path)

    assert draft(Small(), translation, Sampling(), 0, 16, ()).proposals
    assert longest <= room
