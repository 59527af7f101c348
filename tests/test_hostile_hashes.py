"""Hashes of a bundle's files are remembered, and forgotten as soon as a file may be another."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_hostile_bundles import WEIGHTS, write_bundle

from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.hashes import FILE, MOST, SCHEMA, Hashes
from omnidraft.runtime.state import State

LONG_AGO = 1_000_000_000 * 10**9  # nanoseconds


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "state", pytest.fail)


def settled(path: Path, content: bytes) -> Path:
    """A file whose times are past. On POSIX the time of the last change of its inode has to pass for real."""
    path.write_bytes(content)
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return path


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("omnidraft.runtime.hashes.SETTLED_NS", -1)
    return settled(tmp_path / "model.onnx.data", b"weights")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def remembered(state: State, file: Path) -> str | None:
    return ((state.load(FILE, SCHEMA, {}) or {}).get(str(file)) or {}).get("sha256")


def lie(state: State, file: Path) -> None:
    """Let the state say something else of a file, which shows who believes it."""

    def change(old: dict | None) -> dict:  # type: ignore[type-arg]
        assert old is not None
        return {**old, str(file): {**old[str(file)], "sha256": "0" * 64}}

    state.update(FILE, SCHEMA, {}, change)


def test_a_file_that_has_not_changed_is_not_read_again(state: State, file: Path) -> None:
    assert Hashes(state).of([file]) == {file: sha256(b"weights")}
    lie(state, file)
    assert Hashes(state).of([file]) == {file: "0" * 64}
    assert Hashes().of([file]) == {file: sha256(b"weights")}


@pytest.mark.parametrize("how", ["content", "times set back", "another file in its place", "touched"])
def test_a_file_that_may_have_changed_is_read_again(state: State, file: Path, how: str) -> None:
    Hashes(state).of([file])
    lie(state, file)
    content = b"weights"
    if how == "touched":
        os.utime(file)
    elif how == "another file in its place":
        settled(file.with_name("new"), content).replace(file)
    else:
        content = b"WEIGHTS"
        file.write_bytes(content)
        if how == "times set back":
            os.utime(file, ns=(LONG_AGO, LONG_AGO))
    assert Hashes(state).of([file]) == {file: sha256(content)}
    assert remembered(state, file) == sha256(content)


def test_a_file_of_this_moment_is_not_remembered(state: State, tmp_path: Path) -> None:
    """It may change again within one tick of the file system's clock."""
    path = tmp_path / "fresh"
    path.write_bytes(b"a")
    assert Hashes(state).of([path]) == {path: sha256(b"a")} and remembered(state, path) is None


def test_processes_add_to_what_others_remember(state: State, file: Path, tmp_path: Path) -> None:
    paths = [settled(tmp_path / f"{i}", b"%d" % i) for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: Hashes(State(state.folder, pytest.fail)).of([path]), paths))
    assert [remembered(state, path) for path in paths] == [sha256(b"%d" % i) for i in range(24)]


def test_memory_is_bounded_and_the_oldest_goes(state: State, file: Path) -> None:
    Hashes(state).of([file])
    entry = (state.load(FILE, SCHEMA, {}) or {})[str(file)]
    state.update(FILE, SCHEMA, {}, lambda old: {f"/{i}": entry for i in range(MOST)})
    Hashes(state).of([file])
    found = state.load(FILE, SCHEMA, {}) or {}
    assert len(found) == MOST and str(file) in found and "/0" not in found


def test_a_bundle_that_is_damaged_after_it_was_checked_is_noticed(file: Path, state: State, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    write_bundle(folder)
    for _ in range(2):
        opened = open_bundle(folder, state)
        opened.verify(opened.files)
    (folder / WEIGHTS).write_bytes(b"W" * 16)
    with pytest.raises(OmniDraftError, match="changed since export"):
        open_bundle(folder, state).verify(opened.files)
    assert remembered(state, (folder / WEIGHTS).absolute()) == sha256(b"W" * 16)
