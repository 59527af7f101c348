"""A disk that is full, read-only or broken at any moment of a save, and a kill: what was saved before is still there.

Every kind of state document, every effect that saving it has on the disk, once and lasting. Kills while adapters and
learning are saved are in test_adapter_kills and test_learning_file.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import failing_disk
from kills import needs_fork, survives
from test_adapter_store import DRAFTER, FACTS, LAYOUT, TARGET, snapshot
from test_learning_file import FOLDER, SIZES, at, moments

from omnidraft.adapters.learning_file import LearningFile
from omnidraft.adapters.store import AdapterStore
from omnidraft.runtime import files, hashes, state
from omnidraft.runtime.answers import Answers
from omnidraft.runtime.cache_file import CacheFile
from omnidraft.runtime.calibration import FILE, SCHEMA
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.state import LOCK, MARKER, State
from omnidraft.tools.session import Session, SessionFile

BYTES = [bytes([b]) for b in range(97, 107)]
WORDS = [*BYTES, b"ab", b"bc", b"cd"]
Lines = list[str]
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of state. `save` brings it to a moment; `find` tells, part by part, which moment a new process finds."""

    save: Callable[[State, int], object]
    find: Callable[[State], Found]


def _cache(opened: State) -> CacheFile:
    return CacheFile(opened, "pairs/one/ngram_cache.json", {"draft_tokenizer": "a"}, BYTES, WORDS)


def _save_cache(opened: State, moment: int) -> None:
    file = _cache(opened)
    cache = file.open()
    cache.observe(10, (0, 1))
    file.save(cache)


def _seen(cache: Any) -> int:
    return sum(entry[2] for entry in cache.to_payload()["entries"])


def _answers(opened: State) -> Answers:
    return Answers(opened, "answers/one.json", {"target": "a"}, 100)


def _save_answer(opened: State, moment: int) -> None:
    answers = _answers(opened)
    answers.add([moment] * 5)
    answers.save()


def _save_calibration(opened: State, moment: int) -> None:
    opened.update(FILE, SCHEMA, {}, lambda old: {**(old or {}), "graph": {"w0": moment}})


def _save_hash(opened: State, moment: int) -> None:
    known = {"size": moment, "mtime_ns": 1, "ctime_ns": 1, "inode": 1, "sha256": "0" * 64}
    opened.update(hashes.FILE, hashes.SCHEMA, {}, lambda old: {**(old or {}), "/model.onnx": known})


def _session(opened: State) -> SessionFile:
    return SessionFile(opened, "learning/one", {"drafter": "a"}, "b" * 64)


def _store(opened: State) -> AdapterStore:
    return AdapterStore(opened, DRAFTER, TARGET, LAYOUT)


def _find_adapters(opened: State) -> Found:
    """By the seeds of the snapshots, -1 for one that none of them is."""
    store = _store(opened)
    version, _ = store.current()
    seeds = {one.number: _seed(store.parameters(one.number)) for one in store.versions()}
    return {"current": seeds.get(version.number) if version is not None else 0, "all": tuple(seeds.values())}


def _seed(parameters: dict[str, Any] | None) -> int:
    if parameters is None:
        return -1
    found = LAYOUT.vector(parameters)
    return next((seed for seed in range(1, 4) if np.array_equal(found, snapshot(seed).lora)), -1)


def _learning(opened: State) -> LearningFile:
    return LearningFile(opened, FOLDER, {"drafter": "a", "target": "b"}, *SIZES)


def _save_learning(opened: State, moment: int) -> None:
    memory, standing = at(moment)
    _learning(opened).save_replay(memory)
    _learning(opened).save(memory, standing)


KINDS: dict[str, Kind] = {
    "n-gram cache": Kind(_save_cache, lambda opened: {"seen": _seen(_cache(opened).open())}),
    "answers": Kind(_save_answer, lambda opened: {"last": max([0, *(a[0] for a in _answers(opened).load())])}),
    "calibration": Kind(_save_calibration, lambda opened: opened.load(FILE, SCHEMA, {}) or {}),
    "hashes": Kind(_save_hash, lambda opened: opened.load(hashes.FILE, hashes.SCHEMA, {}) or {}),
    "session": Kind(
        lambda opened, moment: _session(opened).save(Session(done=moment)),
        lambda opened: {"done": _session(opened).load().done},
    ),
    "adapter": Kind(lambda opened, moment: _store(opened).add(snapshot(moment), FACTS), _find_adapters),
    "learning": Kind(
        _save_learning,
        lambda opened: dict(zip(("learning.json", "replay.json"), moments(_learning(opened).load()), strict=True)),
    ),
}
FAULTS = {
    "full for a moment": (errno.ENOSPC, False),
    "full": (errno.ENOSPC, True),
    "read-only": (errno.EROFS, True),
    "broken for a moment": (errno.EIO, False),
}


def saved(kind: Kind, folder: Path, moment: int, lines: Lines) -> None:
    """As a process does that lives for one save. One that cannot open its state says so in the line of its error."""
    try:
        kind.save(State(folder, lines.append), moment)
    except OmniDraftError as error:
        lines.append(str(error))


def wrong_after(kind: Kind, folder: Path, old: Found, new: Found, said: Lines) -> list[str]:
    """What a new process finds wrong in a folder in which the save of moment 2 met with a fault."""
    lines: Lines = []
    found = kind.find(State(folder, lines.append))
    wrong = [f"{part} is {found.get(part)!r}" for part in new if found.get(part) not in (old[part], new[part])]
    if found != new and not said:
        wrong.append("the save failed and nobody was told")
    wrong += [f"not one line: {line!r}" for line in said if "\n" in line or str(folder) not in line]
    saved(kind, folder, 3, lines)
    again = kind.find(State(folder, lines.append))
    wrong += [f"{part} does not go on" for part in again if again[part] == found[part]]
    return wrong + lines


def prepared(kind: Kind, folder: Path) -> tuple[Found, Found]:
    """What is found at moment 1, which `folder`/old is at, and at moment 2."""
    lines: Lines = []
    saved(kind, folder / "old", 1, lines)
    shutil.copytree(folder / "old", folder / "new")
    saved(kind, folder / "new", 2, lines)
    old, new = (kind.find(State(folder / name, lines.append)) for name in ("old", "new"))
    assert lines == [] and all(old[part] != new[part] for part in new)
    return old, new


def faults(kind: Kind, folder: Path, code: int, lasting: bool) -> list[str]:
    """What is wrong after a fault at any effect of a save."""
    old, new = prepared(kind, folder)
    wrong, n, struck = [], 0, True
    while struck:
        n += 1
        copy = shutil.copytree(folder / "old", folder / str(n))
        said: Lines = []
        with failing_disk(copy, code, n, lasting) as disk:
            saved(kind, copy, 2, said)
        struck = disk.struck
        wrong += [f"fault {n}: {line}" for line in wrong_after(kind, copy, old, new, said)]
        if not lasting and list(copy.rglob("*.new")):
            wrong.append(f"fault {n}: {[path.name for path in copy.rglob('*.new')]} is left")
    assert n > 4, "hardly anything was tried"
    return wrong


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", KINDS)
def test_a_disk_that_fails_at_any_moment_costs_what_was_new_at_most(tmp_path: Path, name: str, fault: str) -> None:
    assert faults(KINDS[name], tmp_path, *FAULTS[fault]) == []


def kills(kind: Kind, folder: Path) -> list[str]:
    """What is wrong after a kill at any effect of a save."""
    old, new = prepared(kind, folder)
    wrong, n, survived = [], 0, False
    while not survived:
        n += 1
        copy = shutil.copytree(folder / "old", folder / str(n))
        survived = survives(n, lambda copy=copy: kind.save(State(copy, print), 2))
        wrong += [f"kill {n}: {line}" for line in wrong_after(kind, copy, old, new, ["killed: " + str(copy)])]
    assert n > 4, "hardly anything was tried"
    return wrong


@needs_fork
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("adapter", "learning")])
def test_a_kill_at_any_moment_leaves_what_was_before_or_after(tmp_path: Path, name: str) -> None:
    assert kills(KINDS[name], tmp_path) == []


def _write_in_place(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        files.os.fsync(file.fileno())


@needs_fork
def test_a_write_in_place_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control, for kills and for faults: the strokes do land in the middle of a write."""
    monkeypatch.setattr(state, "write_whole", _write_in_place)
    for count, strike in enumerate((kills, lambda *arguments: faults(*arguments, errno.ENOSPC, True))):
        wrong = strike(KINDS["n-gram cache"], tmp_path / str(count))
        assert any("seen is 0" in line for line in wrong) and any("set aside" in line for line in wrong)


# To forget


def _filled(folder: Path) -> dict[str, Found]:
    for kind in KINDS.values():
        for moment in (1, 2):
            kind.save(State(folder, pytest.fail), moment)
    return _everything(folder, [])


def _everything(folder: Path, lines: Lines) -> dict[str, Found]:
    opened = State(folder, lines.append)
    return {name: kind.find(opened) for name, kind in KINDS.items()}


def forget_kills(folder: Path) -> list[str]:
    """What is wrong after a kill at any moment of forgetting: everything must be there, or nothing."""
    full, nothing = _filled(folder / "full"), _everything(folder / "empty", [])
    found, wrong, n, survived = [], [], 0, False
    while not survived:
        n += 1
        copy = shutil.copytree(folder / "full", folder / str(n))
        survived = survives(n, lambda copy=copy: State(copy, print).forget())
        lines: Lines = []
        found.append(_everything(copy, lines))
        if found[-1] not in (full, nothing):
            wrong.append(f"kill {n}: neither everything nor nothing")
        wrong += [f"kill {n}: {line}" for line in lines]
        left = {path.name for path in copy.iterdir()} - {MARKER, LOCK}
        if found[-1] == nothing and left:
            wrong.append(f"kill {n}: {left} is left")
    assert n > 15 and full in found and nothing in found, "the kills land on both sides"
    return wrong


@needs_fork
def test_a_kill_while_forgetting_leaves_everything_or_nothing(tmp_path: Path) -> None:
    assert forget_kills(tmp_path) == []


@needs_fork
def test_forgetting_without_a_note_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: some kill leaves an index without its files."""

    def at_once(self: State) -> None:
        assert self.folder is not None
        files.remove_inside(self.folder, (MARKER, LOCK))

    monkeypatch.setattr(State, "forget", at_once)
    assert any("neither everything nor nothing" in line for line in forget_kills(tmp_path))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_disk_that_fails_while_forgetting_is_one_line_and_the_next_start_goes_on(tmp_path: Path, code: int) -> None:
    full, nothing = _filled(tmp_path / "full"), _everything(tmp_path / "empty", [])
    n, struck = 0, True
    while struck:
        n += 1
        copy = shutil.copytree(tmp_path / "full", tmp_path / str(n))
        opened = State(copy, pytest.fail)
        with failing_disk(copy, code, n) as disk:
            if n > 1:  # the first effect is that of the lock
                _forget(opened, disk)
            struck = disk.struck or n == 1
        assert _everything(copy, []) in (full, nothing)


def _forget(opened: State, disk: Any) -> None:
    try:
        opened.forget()
        assert not disk.struck, "it failed and nobody was told"
    except OmniDraftError as error:
        assert str(opened.folder) in str(error) and "\n" not in str(error) and "delete" in str(error)


# A folder that cannot be written from the beginning


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_who_only_decodes_goes_on_without_a_state_folder(tmp_path: Path, code: int) -> None:
    lines: Lines = []
    saved(KINDS["answers"], tmp_path / "state", 1, lines)
    with failing_disk(tmp_path, code):
        for folder in (tmp_path / "state", tmp_path / "none"):
            opened = State.where_possible(folder, lines.append)
            assert opened.folder is None and KINDS["answers"].find(opened) == {"last": 0}
            with pytest.raises(OmniDraftError, match="not writable as a state folder"):
                State(folder, pytest.fail)
    assert len(lines) == 2 and all("nothing is kept" in line and "\n" not in line for line in lines)
    assert KINDS["answers"].find(State(tmp_path / "state", pytest.fail)) == {"last": 1}


def test_what_is_wrong_with_the_folder_itself_stays_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "thesis.txt").touch()
    for folder in (tmp_path / "file", tmp_path):
        with pytest.raises(OmniDraftError):
            State.where_possible(folder, pytest.fail)
