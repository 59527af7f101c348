"""A process that learns may be killed at any moment: the adapters are then those of before or of after.

A forked child dies at its n-th effect on the file system, for every n (see `kills`).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kills import needs_fork, survives
from test_adapter_store import LAYOUT, add, files, open_store, same, snapshot

from omnidraft.adapters.index import Index
from omnidraft.adapters.store import AdapterStore
from omnidraft.runtime.state import State

pytestmark = needs_fork
Action = Callable[[AdapterStore], object]


def _whole(folder: Path) -> tuple[Index, list[str]]:
    """(index, what is wrong) of a folder as a new process finds it, which then adds a version."""
    wrong: list[str] = []
    store = open_store(folder, wrong)
    index = store.index()
    for version in index.versions:
        parameters = store.parameters(version.number)
        if parameters is None or not np.array_equal(LAYOUT.vector(parameters), snapshot(version.number).lora):
            wrong.append(f"version {version.number} is not what was added")
    if index.current and not same(store.current()[1], snapshot(index.current)):
        wrong.append("the current version is not what was added")
    if add(store, 50).number != index.last + 1 or not same(store.current()[1], snapshot(50)):
        wrong.append("a further version is not what was added")
    if files(folder) != {"index.json"} | store.index().files():
        wrong.append("files of nobody")
    return index, wrong


def kills(tmp_path: Path, before: Action, work: Action) -> list[str]:
    """What is wrong after a kill at any moment of `work`; the state must be that of before or that of after."""
    for name in ("old", "new"):
        before(open_store(tmp_path / name))
    work(open_store(tmp_path / "new"))
    old, new = (_summary(open_store(tmp_path / name).index()) for name in ("old", "new"))
    assert old != new
    found, wrong, n, survived = set(), [], 0, False
    while not survived:
        n += 1
        folder = tmp_path / str(n)
        shutil.copytree(tmp_path / "old", folder)
        survived = survives(n, lambda folder=folder: work(open_store(folder)))
        index, faults = _whole(folder)
        found.add(_summary(index))
        wrong += [f"kill {n}: {fault}" for fault in faults]
        if _summary(index) not in (old, new):
            wrong.append(f"kill {n}: neither before nor after")
    assert n > 10 and found >= {old, new}, "the kills land on both sides"
    return wrong


def _summary(index: Index) -> tuple[int, int, tuple[int, ...]]:
    return index.current, index.last, tuple(version.number for version in index.versions)


WORK: dict[str, tuple[Action, Action]] = {
    "the first version": (lambda store: None, lambda store: add(store, 1)),
    "a version for which another makes room": (lambda store: add(store, 1, 2, 3, 4, 5), lambda store: add(store, 6)),
    "a rollback": (lambda store: add(store, 1, 2), lambda store: store.use(1)),
    "to forget": (lambda store: add(store, 1, 2), lambda store: store.forget()),
}


@pytest.mark.parametrize("case", WORK)
def test_a_kill_at_any_moment_leaves_the_versions_of_before_or_after(tmp_path: Path, case: str) -> None:
    assert kills(tmp_path, *WORK[case]) == []


def test_a_store_that_writes_its_index_first_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: files that are written behind the index are missing after some kill."""
    real_write, real_update = State.write_file, State.update
    waiting: list[tuple[str, bytes]] = []

    def write_later(self: State, relative: str, data: bytes) -> str:
        waiting.append((relative, data))
        return hashlib.sha256(data).hexdigest()

    def update_first(self: State, *arguments: object) -> object:
        written = real_update(self, *arguments)  # type: ignore[arg-type]
        while waiting:
            real_write(self, *waiting.pop(0))
        return written

    monkeypatch.setattr(State, "write_file", write_later)
    monkeypatch.setattr(State, "update", update_first)
    wrong = kills(tmp_path, *WORK["the first version"])
    assert any("missing; version 1 is dropped" in fault for fault in wrong)


def test_a_store_that_removes_old_files_first_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the version that makes room is lost with the index that still names it."""
    real_update = State.update

    def remove_first(self: State, relative: str, *arguments: object) -> object:
        folder, name = relative.rsplit("/", 1)
        newest = sorted((self.folder / folder).glob("*.o*"), key=lambda p: p.stat().st_mtime_ns)[-10:]  # type: ignore
        self.keep_only(folder, {name, *(path.name for path in newest)})
        return real_update(self, relative, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(State, "update", remove_first)
    wrong = kills(tmp_path, *WORK["a version for which another makes room"])
    assert any("missing; version 1 is dropped" in fault for fault in wrong)
