"""What a learner keeps beside its adapters: exact, whole after a kill at any moment, and none of it needed to go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kills import needs_fork, survives
from sessions import same_samples
from test_adapter_store import FACTS, open_store, snapshot

from omnidraft.adapters import learning_file as module
from omnidraft.adapters import memory as memory_module
from omnidraft.adapters.learning_file import Candidate, LearningFile, Standing
from omnidraft.adapters.memory import ANCHOR_EVERY, ANCHORS, FRESH_BYTES, REPLAY_BYTES, Memory
from omnidraft.adapters.samples import Sample
from omnidraft.runtime.observation import TOP
from omnidraft.runtime.state import State

FOLDER, SIZES = "learning/pair", (50, 90)


def sample(seed: int, length: int = 6) -> Sample:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 90, (length, TOP)).astype(np.int32)
    p = rng.dirichlet(np.ones(TOP), length).astype(np.float16)
    draft, target = (rng.integers(0, size, length + 2 * i).astype(np.int32) for i, size in ((1, 50), (0, 90)))
    return Sample(draft, 2, target, ids, p)


def open_file(folder: Path, lines: list[str] | None = None) -> LearningFile:
    state = State(folder, pytest.fail if lines is None else lines.append)
    return LearningFile(state, FOLDER, {"drafter": "a", "target": "b"}, *SIZES)


def at(moment: int) -> tuple[Memory, Standing]:
    """Where a session is after a number of rounds, of two responses each."""
    seeds = [range(n * 10, n * 10 + 2) for n in range(moment + 1)]
    memory = Memory([sample(s) for s in seeds[-1]], [sample(s) for n in seeds[:-1] for s in n], [sample(999)], 9, 1)
    average = snapshot(moment + 50).lora
    candidate = Candidate(snapshot(moment), average, 3 * moment, moment % 2, 60 * moment) if moment else None
    return memory, Standing(candidate, moment % 3, moment, 0.5 * moment)


def save(folder: Path, moment: int, file: LearningFile | None = None) -> None:
    file, (memory, standing) = file or open_file(folder), at(moment)
    file.save_replay(memory)
    file.save(memory, standing)


def same_candidate(found: Candidate | None, expected: Candidate | None) -> bool:
    if found is None or expected is None:
        return found is expected
    arrays = ((found.snapshot.lora, expected.snapshot.lora), (found.average, expected.average))
    counts = [(c.steps, c.rounds, c.positions, replace(c.snapshot, lora=None)) for c in (found, expected)]
    return all(np.array_equal(*pair) for pair in arrays) and counts[0] == counts[1]


def moments(found: tuple[Memory, Standing]) -> tuple[int | None, int | None]:
    """(of learning.json and the candidate, of replay.json): None where it is that of no moment."""
    memory, standing = found
    small = large = None
    for moment in range(4):
        wanted, stood = at(moment)
        if same_samples(memory.fresh, wanted.fresh) and vars(standing) | {"candidate": 0} == vars(stood) | {
            "candidate": 0
        }:
            small = moment if same_candidate(standing.candidate, stood.candidate) else None
        if same_samples(memory.replay, wanted.replay) and same_samples(memory.anchors, wanted.anchors):
            large = moment
    return small, large


def kept(folder: Path) -> set[str]:
    return {str(path.relative_to(folder / FOLDER)) for path in (folder / FOLDER).rglob("*") if path.is_file()}


def test_what_is_saved_is_loaded_exactly(tmp_path: Path) -> None:
    assert moments(open_file(tmp_path).load()) == (None, None) and open_file(tmp_path).load() == (Memory(), Standing())
    for moment in (0, 1, 2, 3, 0):
        save(tmp_path, moment)
        found = open_file(tmp_path).load()
        assert moments(found) == (moment, moment)
        assert (found[0].responses, found[0].set_apart) == (9, 1)
        assert len(kept(tmp_path)) == (3 if moment else 2), "one candidate at most is kept"


def test_a_candidate_that_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    save(tmp_path, 1, file)
    (path,) = (tmp_path / FOLDER / module.CANDIDATES).iterdir()
    before = path.stat().st_mtime_ns, path.stat().st_ino
    save(tmp_path, 1, file)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    path.unlink()  # as another process does, whose candidate takes this one's place
    save(tmp_path, 1, file)
    assert path.is_file() and moments(open_file(tmp_path).load()) == (1, 1)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-7],
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "empty": lambda data: data[:0],
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["learning.json", "replay.json", "candidate"])
def test_a_damaged_file_is_set_aside_and_the_rest_is_used(tmp_path: Path, name: str, how: str) -> None:
    save(tmp_path, 2)
    (path,) = [p for p in (tmp_path / FOLDER).rglob("*") if p.is_file() and name in str(p)]
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    lines: list[str] = []
    memory, standing = open_file(tmp_path, lines).load()
    assert len(lines) == 1 and str(path) in lines[0] and "set aside as" in lines[0] and "\n" not in lines[0]
    expected, stood = at(2)
    assert same_samples(memory.fresh, [] if name == "learning.json" else expected.fresh)
    assert same_samples(memory.replay, [] if name == "replay.json" else expected.replay)
    assert standing.rounds == (0 if name == "learning.json" else 2)
    assert same_candidate(standing.candidate, stood.candidate if name == "replay.json" else None)
    save(tmp_path, 3)
    assert moments(open_file(tmp_path).load()) == (3, 3), "and it goes on"


def test_samples_that_cannot_be_of_this_pair_are_left_out(tmp_path: Path) -> None:
    save(tmp_path, 2)
    state = State(tmp_path, pytest.fail)
    smaller = LearningFile(state, FOLDER, {"drafter": "a", "target": "b"}, 50, 40)
    memory, _ = smaller.load()
    assert len(memory.fresh) + len(memory.replay) < 6
    assert all(s.target.max() < 40 and s.top_ids.max() < 40 for s in (*memory.fresh, *memory.replay))


def one_round(folder: Path) -> None:
    """All that a round of learning writes at the end of a response, with a version that was kept."""
    assert open_store(folder).add(snapshot(1), FACTS) is not None
    save(folder, 2)


def kills(tmp_path: Path) -> list[str]:
    """What is wrong after a kill at any moment of a round."""
    save(tmp_path / "old", 1)
    found, wrong, n, survived = set(), [], 0, False
    while not survived:
        n += 1
        folder = tmp_path / str(n)
        lines: list[str] = []
        shutil.copytree(tmp_path / "old", folder)
        survived = survives(n, lambda folder=folder: one_round(folder))
        found.add(state := moments(open_file(folder, lines).load()))
        _, current = open_store(folder, lines).current()
        if current is not None and not np.array_equal(current.lora, snapshot(1).lora):
            wrong.append(f"kill {n}: the adapter is not what was added")
        if not {*state} <= {1, 2} or state == (2, 1):
            wrong.append(f"kill {n}: {state}")
        save(folder, 3)
        if moments(open_file(folder, lines).load()) != (3, 3) or len(kept(folder)) != 3:
            wrong.append(f"kill {n}: it does not go on, or leaves {kept(folder)}")
        wrong += [f"kill {n}: {line}" for line in lines]
    assert n > 20 and found >= {(1, 1), (1, 2), (2, 2)}, "the kills land on all sides"
    return wrong


@needs_fork
def test_a_kill_at_any_moment_of_a_round_leaves_what_was_before_or_after(tmp_path: Path) -> None:
    """Samples may be there twice, fresh and among those to replay: they are learned once more. Nothing is lost."""
    assert kills(tmp_path) == []


@needs_fork
def test_a_candidate_that_is_written_over_the_last_one_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with a name that does not depend on the content, some kill leaves a candidate that nobody named."""
    real = State.write_file

    def over(self: State, relative: str, data: bytes) -> str | None:
        digest = real(self, relative, data)
        for old in (self.folder / FOLDER / module.CANDIDATES).glob("*.bin"):  # type: ignore[operator]
            if module.CANDIDATES in relative and old.name != Path(relative).name:
                old.write_bytes(data)
        return digest

    monkeypatch.setattr(State, "write_file", over)
    assert any("set aside" in fault for fault in kills(tmp_path))


# What is remembered


def test_memory_is_bounded_however_long_a_session_is() -> None:
    memory, size = Memory(), sample(0, 200).nbytes
    for number in range(600):
        memory.add([sample(number, 200)])
        assert sum(s.nbytes for s in memory.fresh) <= FRESH_BYTES
        assert memory.full == (len(memory.fresh) * size > FRESH_BYTES // 2)
        assert sum(s.nbytes for s in memory.replay) <= REPLAY_BYTES
    assert memory.replay, "what waits for too long is replayed"
    memory.learned()
    assert memory.fresh == [] and REPLAY_BYTES - size < sum(s.nbytes for s in memory.replay) <= REPLAY_BYTES
    assert same_samples(memory.replay[-1:], [sample(598, 200)]), "the newest stay; the last of all is an anchor"
    assert len(memory.anchors) == ANCHORS


def test_one_response_in_eight_is_an_anchor_and_never_learned() -> None:
    memory = Memory()
    for number in range(1, 80):
        made = memory.add([sample(number), sample(number + 1000)])
        assert made == (number % ANCHOR_EVERY == 0)
    assert (len(memory.anchors), memory.responses, memory.set_apart) == (9, 79, 9)
    assert all(same_samples([memory.anchors[i]], [sample(8 * i + 8)]) for i in range(9))
    assert len(memory.fresh) == 2 * (79 - 9)


def test_anchors_are_of_the_whole_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 responses that were set apart, each quarter has its share of the 24 that stay."""
    monkeypatch.setattr(memory_module, "ANCHOR_EVERY", 1)
    memory, samples = Memory(), [sample(i, 1) for i in range(200)]
    for one in samples:
        memory.add([one])
    stay = [i for i, one in enumerate(samples) if any(one is anchor for anchor in memory.anchors)]
    assert len(stay) == ANCHORS and np.histogram(stay, [0, 50, 100, 150, 200])[0].min() >= 3
