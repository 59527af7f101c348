"""A candidate is kept only if it agrees better with the target, on text it has not learned, and forgets nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Loaded
from sessions import answers, generate, learning, noise, trained

from omnidraft.adapters.index import Facts
from omnidraft.adapters.layout import Floats
from omnidraft.adapters.learner import MOST_BEHIND, MOST_MISSES, SLACK, Learner, Round
from omnidraft.adapters.learning_file import Candidate
from omnidraft.adapters.trainer import Snapshot

pytestmark = pytest.mark.model


@pytest.fixture
def learner(loaded: dict[str, Loaded], prompts: list[str], tmp_path: Path) -> Iterator[Learner]:
    """With four fresh samples."""
    with learning(loaded["int8"], tmp_path) as learner:
        learner.memory.fresh = answers(learner, prompts[3:7])
        yield learner


def judge(learner: Learner, snapshot: Snapshot, misses: int = 0) -> Round:
    done = Round(0.0, 0.0)
    learner._standing.candidate = Candidate(snapshot, snapshot.lora, 24, 2, 640, misses)
    learner._judge(learner._standing.candidate, done)
    return done


def in_use(learner: Learner) -> Floats | None:
    """What the drafter drafts with, which must be what the learner says."""
    assert learner.engine.pair.drafter is not None
    used = learner.engine.pair.drafter.decoder._parameters
    assert (used is None) == (learner.parameters is None) and used is learner.engine._adapter
    return None if used is None else learner.layout.vector(used)


def test_a_better_candidate_is_kept_and_used(learner: Learner, loaded: dict[str, Loaded], tmp_path: Path) -> None:
    """The control of what follows: learned from the very text that it is judged by."""
    good = trained(learner, learner.memory.fresh, 15)
    done = judge(learner, good)
    assert done.kept and done.before is not None and done.after is not None and done.after > done.before
    assert learner.version == 1 and np.array_equal(in_use(learner), good.lora)
    (version,) = learner.store.versions()
    assert (version.forecast.before, version.forecast.after) == (done.before, done.after)
    assert (version.samples, version.loss, version.rank) == (640, "projected", 4)
    _, stored = learner.store.current()
    assert stored is not None and np.array_equal(stored.lora, good.lora) and stored.optimizer == good.optimizer
    candidate = learner._standing.candidate
    assert candidate is not None and (candidate.rounds, candidate.positions) == (0, 640), "it goes on from there"
    with learning(loaded["int8"], tmp_path) as again:
        assert again.version == 1 and np.array_equal(in_use(again), good.lora), "the next start drafts with it at once"


@pytest.mark.parametrize("poison", ["unlearned", "noise", "not a number", "infinite", "as it was"])
def test_a_candidate_that_is_not_better_is_rolled_back(learner: Learner, poison: str) -> None:
    bad = {
        "unlearned": lambda: trained(learner, learner.memory.fresh, 10, -3e-3),
        "noise": lambda: Snapshot(noise(learner)),
        "not a number": lambda: Snapshot(np.full_like(noise(learner), np.nan)),
        "infinite": lambda: Snapshot(np.full_like(noise(learner), np.inf)),
        "as it was": lambda: Snapshot(learner.layout.initial(4)),
    }[poison]()
    done = judge(learner, bad)
    assert done.kept is False and learner.version == 0 and in_use(learner) is None
    assert learner.store.versions() == () and learner._standing.candidate is not None, "it may learn on"
    judge(learner, bad, MOST_MISSES - 1)
    assert learner.store.versions() == () and learner._standing.candidate is None


def test_what_is_in_use_stays_when_a_worse_one_comes(learner: Learner) -> None:
    good = trained(learner, learner.memory.fresh, 15)
    judge(learner, good)
    assert judge(learner, Snapshot(noise(learner))).kept is False
    assert learner.version == 1 and np.array_equal(in_use(learner), good.lora)
    assert learner._standing.behind == 0, "the one in use is still better than the drafter as shipped"


def test_a_candidate_that_forgets_the_anchors_is_rolled_back(learner: Learner, prompts: list[str]) -> None:
    """One that has learned the fresh text at the cost of all other text."""
    others = answers(learner, prompts[12:16])
    trainer_start = trained(learner, learner.memory.fresh, 40, 1e-2)
    measure = learner._shadow.measure
    assert measure(trainer_start.lora, learner.memory.fresh) > measure(None, learner.memory.fresh)
    assert measure(trainer_start.lora, others) < measure(None, others) - SLACK, "it forgets nothing"
    learner.memory.anchors = others
    done = judge(learner, trainer_start)
    assert done.kept is False and done.before is not None and done.after is not None and done.after > done.before
    assert learner.version == 0 and in_use(learner) is None and learner._standing.candidate is None
    learner.memory.anchors = []
    assert judge(learner, trainer_start).kept, "without anchors it would be kept"


def test_an_adapter_that_stays_behind_the_drafter_as_shipped_is_given_up(learner: Learner, tmp_path: Path) -> None:
    """As when what is said now has nothing to do with what was learned; another start finds it given up too."""
    learner.store.add(Snapshot(noise(learner, 0.1)), Facts())
    learner._version, learner._current = learner.store.current()
    learner._use()
    worse = Snapshot(noise(learner))
    for lost in range(1, MOST_BEHIND):
        done = judge(learner, worse)
        assert (done.kept, done.note, learner.version, learner._standing.behind) == (False, "", 1, lost)
    done = judge(learner, worse)
    assert "as shipped" in done.note and learner.version == 0 and learner._standing.behind == 0
    assert in_use(learner) is None and learner.store.current() == (None, None)
    assert [version.number for version in learner.store.versions()] == [1], "a user may go back to it"


def test_a_comparison_that_is_not_lost_begins_the_count_anew(learner: Learner) -> None:
    learner.store.add(Snapshot(noise(learner, 0.1)), Facts())
    learner._version, learner._current = learner.store.current()
    judge(learner, Snapshot(noise(learner)))
    assert learner._standing.behind == 1
    assert judge(learner, trained(learner, learner.memory.fresh, 15)).kept
    assert learner._standing.behind == 0 and learner.version == 2


def test_judging_leaves_the_drafter_as_it_was(learner: Learner, prompts: list[str]) -> None:
    """Its rows of KV are those of samples afterwards, which the next response must not see."""
    before = generate(learner.engine, prompts[8])
    judge(learner, Snapshot(noise(learner)))
    after = generate(learner.engine, prompts[8])
    assert (after.tokens, after.counts["passes"]) == (before.tokens, before.counts["passes"])
