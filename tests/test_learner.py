"""Whole sessions with learning on: the text, the adapter, the budget, and a start that goes on from the last one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import NOWHERE, TARGETS, Loaded
from sessions import QUICK, answer, answers, generate, learning, noise, same_samples, trained

from omnidraft.adapters import memory as memory_module
from omnidraft.adapters.index import Facts
from omnidraft.adapters.labels import batch, paper, projected
from omnidraft.adapters.learner import Learner
from omnidraft.adapters.settings import Settings
from omnidraft.adapters.trainer import Snapshot
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State

pytestmark = pytest.mark.model
GREEDY, WARM = Sampling(), Sampling(0.7, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def pair(loaded: dict[str, Loaded]) -> Loaded:
    return loaded["int8"]


@pytest.mark.parametrize(
    ("precision", "sampling", "count"),
    [("int8", GREEDY, 10), ("int8", WARM, 10), ("int4", WARM, 6), ("fp32", GREEDY, 6)],
    ids=["int8 greedy", "int8 sampled", "int4 sampled", "fp32 greedy"],
)
def test_text_with_learning_is_text_without(
    loaded: dict[str, Loaded], prompts: list[str], tmp_path: Path, precision: str, sampling: Sampling, count: int
) -> None:
    """Three prompts again and again, so that what is learned is better and is used; the proposals show that it is."""
    asked = (prompts[3:6] * 4)[:count]
    plain, shipped = loaded[precision].engine("off"), loaded[precision].engine("3", State(tmp_path / "off", print))
    expected = [generate(plain, prompt, sampling).tokens for prompt in asked]
    without = [generate(shipped, prompt, sampling) for prompt in asked]
    faster = {"interval": 1, "rate": 1e-2} if count < 8 else {}
    with learning(loaded[precision], tmp_path / "on", **faster) as learner:
        done = answer(learner, asked, sampling)
        assert learner.version > 0, "nothing was learned that is used"
        assert learner.head is not None and learner.engine._head is learner.head, "its head learned with it"
    assert [report.tokens for report, _ in done] == expected
    assert [report.counts for report, _ in done] != [report.counts for report in without], "no proposal changes"
    assert sum(learned is not None for _, learned in done) >= 4


def test_what_was_learned_is_accepted_more_often(pair: Loaded, prompts: list[str], tmp_path: Path) -> None:
    """On an int8 drafter too, whose LoRA runs beside quantized weights; the text stays."""
    with learning(pair, tmp_path) as learner:
        before = [generate(learner.engine, prompt) for prompt in prompts[3:6]]
        snapshot = trained(learner, answers(learner, prompts[3:6]), 20)
        learner.engine.use_adapter(learner.layout.parameters(snapshot.lora))
        after = [generate(learner.engine, prompt) for prompt in prompts[3:6]]
        learner.engine.use_adapter(None)
        again = [generate(learner.engine, prompt) for prompt in prompts[3:6]]
    assert [r.tokens for r in after] == [r.tokens for r in before] == [r.tokens for r in again]
    accepted, shipped = (sum(r.counts["accepted"] for r in run) for run in (after, again))
    assert accepted > shipped


@pytest.mark.parametrize("loss", ["projected", "paper"])
def test_learning_a_sample_raises_its_agreement(pair: Loaded, prompts: list[str], tmp_path: Path, loss: str) -> None:
    """The loss is that of the drafter that drafts: what the int8 graph says comes nearer to the target."""
    with learning(pair, tmp_path) as learner:
        (sample,) = answers(learner, prompts[3:4])
        spelling = learner._spelling
        labels = projected(sample, spelling, 0.0) if loss == "projected" else paper(sample, spelling, 1.0)
        trainer = learner._open()
        agreement = [learner._shadow.measure(None, [sample])]
        losses = []
        for _ in range(3):
            losses += [trainer.step(batch([(sample, labels)], spelling.unmapped), 3e-3) for _ in range(5)]
            agreement.append(learner._shadow.measure(trainer.snapshot().lora, [sample]))
    assert losses[-1] < losses[0]
    if loss == "projected":
        assert all(later > earlier for earlier, later in pairwise(agreement))
    assert agreement[-1] > agreement[0] + 0.02


def test_learning_takes_no_more_time_than_its_budget(pair: Loaded, prompts: list[str], tmp_path: Path) -> None:
    """A round begins only while less was spent than decoding has earned, so one round at most is too much."""
    rounds = {}
    for budget in (0.05, 100.0):
        with learning(pair, tmp_path / str(budget), budget=budget, interval=1) as learner:
            decoding = rounds[budget] = 0.0
            for prompt in prompts[:6]:
                report, spent = generate(learner.engine, prompt), learner.seconds
                decoding += report.seconds - report.phases["learn"]
                done = learner.after_response()
                rounds[budget] += done is not None
                assert done is None or spent < budget * decoding
                assert done is None or 0 < done.seconds == pytest.approx(learner.seconds - spent)
    assert 1 <= rounds[0.05] < rounds[100.0] == 6


def test_a_session_of_many_starts_is_that_of_one(pair: Loaded, prompts: list[str], tmp_path: Path) -> None:
    """The same weights, bit for bit, and the same samples, whether the process goes on or begins anew each time."""
    asked = (prompts[3:6] * 4)[:10]
    with learning(pair, tmp_path / "one") as learner:
        answer(learner, asked)
    for prompt in asked:
        with learning(pair, tmp_path / "many") as learner:
            answer(learner, [prompt])
    found = []
    for name in ("one", "many"):
        with learning(pair, tmp_path / name) as learner:
            found.append((learner.memory, learner._standing, learner.store.index()))
    (one, standing, index), (many, other, versions) = found
    for part in ("fresh", "replay", "anchors"):
        assert same_samples(getattr(many, part), getattr(one, part)), part
    assert (many.responses, many.set_apart) == (one.responses, one.set_apart) == (10, 1)
    assert one.replay and one.anchors and one.fresh
    assert (other.behind, other.rounds) == (standing.behind, standing.rounds)
    assert standing.candidate is not None and other.candidate is not None
    assert np.array_equal(other.candidate.snapshot.lora, standing.candidate.snapshot.lora)
    assert np.array_equal(other.candidate.average, standing.candidate.average)
    assert other.candidate.snapshot.optimizer == standing.candidate.snapshot.optimizer
    assert (other.candidate.rounds, other.candidate.positions) == (
        standing.candidate.rounds, standing.candidate.positions,
    )  # fmt: skip
    assert [v.adapter for v in versions.versions] == [v.adapter for v in index.versions] != []
    assert [v.forecast for v in versions.versions] == [v.forecast for v in index.versions]


def test_damaged_files_cost_what_they_held_and_no_more(pair: Loaded, prompts: list[str], tmp_path: Path) -> None:
    """All at once: each is set aside with one line, the text stays, and learning goes on from the adapter in use."""
    with learning(pair, tmp_path) as learner:
        answer(learner, prompts[3:7])
        learner.store.add(trained(learner, learner.memory.replay, 5), Facts())
        folder = tmp_path / learner.folder
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 3
    for path in files:
        path.write_bytes(path.read_bytes()[:-5])
    said: list[str] = []
    with learning(pair, tmp_path, said.append) as learner:
        assert (learner.version, learner.memory.responses, learner._standing.candidate) == (1, 0, None)
        done = answer(learner, prompts[3:5])
        assert done[1][1] is not None and learner._standing.candidate is not None
    assert len(said) == 2 and all("set aside" in line for line in said), "nobody names the candidate any more"
    plain = pair.engine("off")
    assert [report.tokens for report, _ in done] == [generate(plain, prompt).tokens for prompt in prompts[3:5]]


def test_each_target_has_an_adapter_of_its_own(bundle: Path, prompts: list[str], tmp_path: Path) -> None:
    state = State(tmp_path, pytest.fail)
    plain = {name: Engine.open(bundle, name, options=Options("off")) for name in TARGETS}
    learners = {
        name: Learner(Engine.open(bundle, name, options=Options("3"), state=state), state, Settings(**QUICK), print)
        for name in TARGETS
    }
    for prompt in prompts[3:5] * 4:  # turn by turn
        for name, learner in learners.items():
            got = generate(learner.engine, prompt).tokens
            learner.after_response()
            assert got == generate(plain[name], prompt).tokens
    first, second = learners.values()
    assert first.folder != second.folder and first.version > 0 and second.version > 0
    assert first._current is not None and second._current is not None
    assert not np.array_equal(first._current.lora, second._current.lora)
    assert not set(map(bytes, (s.target for s in first.memory.replay))) & {
        bytes(s.target) for s in second.memory.replay
    }
    before = first.store.index()
    second.store.forget()
    assert first.store.index() == before and second.store.index().versions == ()
    for learner in learners.values():
        learner.close()


def test_waiting_samples_are_learned_before_memory_is_full(
    pair: Loaded, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning(pair, tmp_path, interval=10_000) as learner:
        assert not any(done for _, done in answer(learner, prompts[:2]))
        monkeypatch.setattr(memory_module, "FRESH_BYTES", 3 * learner.memory.fresh[0].nbytes)
        assert any(done for _, done in answer(learner, prompts[2:4]))


def test_an_adapter_of_another_rank_takes_the_place_of_what_was_begun(
    pair: Loaded, prompts: list[str], tmp_path: Path
) -> None:
    """A user may import one between two sessions."""
    with learning(pair, tmp_path) as learner:
        answer(learner, prompts[:2])
        assert learner._standing.candidate is not None
        learner.store.add(Snapshot(noise(learner, 0.001, rank=6)), Facts())
    said: list[str] = []
    with learning(pair, tmp_path, said.append, rank=None) as learner:
        assert len(said) == 1 and "another rank" in said[0]
        answer(learner, prompts[:2])
        assert learner._standing.candidate is not None
        assert learner.layout.rank(learner._standing.candidate.snapshot.lora) == 6
    with learning(pair, tmp_path, said.append, rank=8) as learner:
        assert "going on with rank 6" in said[1] and learner._rank == 6


def test_a_candidate_that_diverges_is_dropped(pair: Loaded, prompts: list[str], tmp_path: Path) -> None:
    with learning(pair, tmp_path) as learner:
        answer(learner, prompts[:2])
        candidate = learner._standing.candidate
        assert candidate is not None
        learner._open().load(Snapshot(np.full_like(candidate.snapshot.lora, np.inf)))
        ((_, _), (_, done)) = answer(learner, prompts[2:4])
        assert done is not None and "diverged" in done.note and learner._standing.candidate is None
        ((_, _), (_, done)) = answer(learner, prompts[4:6])
        assert done is not None and np.isfinite(done.loss) and not done.note, "it begins anew"


def test_an_engine_that_cannot_learn_is_refused_in_one_line(pair: Loaded, tmp_path: Path) -> None:
    state = State(tmp_path, pytest.fail)
    bare = Engine(replace(pair.pair, drafter=None, vocabulary=None), Options("off"), NOWHERE, pair.calibration)
    assert pair.pair.drafter is not None
    info = replace(pair.pair.drafter.info, lora=None, training=None)
    frozen = Engine(
        replace(pair.pair, drafter=replace(pair.pair.drafter, info=info)), Options("2"), NOWHERE, pair.calibration
    )
    for engine, why in ((bare, "needs a drafter"), (frozen, "has no LoRA inputs")):
        with pytest.raises(OmniDraftError, match=f"^[^\n]*{why}[^\n]*$"):
            Learner(engine, state, Settings(), print)
