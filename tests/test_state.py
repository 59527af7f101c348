"""The state folder survives crashes, full disks, damage and other processes."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omnidraft.runtime import state as module
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.ngram_cache import COLUMNS, SCHEMA
from omnidraft.runtime.state import KEPT_ASIDE, LOCK, MARKER, State, default_state_folder

DOCUMENT = "pairs/one/ngram_cache.json"
KEY: module.Key = {"draft_tokenizer": "a" * 64, "target_tokenizer": "b" * 64}


def payload(seen: int) -> dict[str, Any]:
    return {"columns": COLUMNS, "entries": [[5, [1, 2], seen, 0, 0, 0, 0, None]]}


def seen(document: dict[str, Any] | None) -> int:
    return document["entries"][0][2] if document else 0


def count_one(old: dict[str, Any] | None) -> dict[str, Any]:
    return payload(seen(old) + 1)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def state(tmp_path: Path, lines: list[str]) -> State:
    return State(tmp_path / "state", lines.append)


def file_of(state: State) -> Path:
    assert state.folder is not None
    return state.folder / DOCUMENT


def others(state: State) -> list[str]:
    return sorted(p.name for p in file_of(state).parent.iterdir() if p != file_of(state))


def test_what_is_written_is_read_and_says_what_it_is(state: State, lines: list[str]) -> None:
    assert state.load(DOCUMENT, SCHEMA, KEY) is None
    assert state.update(DOCUMENT, SCHEMA, KEY, count_one) == payload(1)
    assert state.update(DOCUMENT, SCHEMA, KEY, count_one) == payload(2)
    assert state.load(DOCUMENT, SCHEMA, KEY) == payload(2)
    document = json.loads(file_of(state).read_text())
    assert document["schema"] == SCHEMA and document["key"] == KEY and document["payload"] == payload(2)
    assert others(state) == [] and lines == []


def test_no_state_reads_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = State(None, lines.append)
    assert nothing.update(DOCUMENT, SCHEMA, KEY, lambda old: pytest.fail("merged")) is None
    assert nothing.load(DOCUMENT, SCHEMA, KEY) is None
    nothing.forget()
    assert list(tmp_path.iterdir()) == [] and lines == []


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_folder().name == "omnidraft"
    if sys.platform == "linux":
        assert default_state_folder() == tmp_path / "omnidraft"


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def sealed(path: Path, content: Any) -> None:
    """Write a payload with a right checksum: only the schema can tell that it is wrong."""
    path.write_bytes(module._document(SCHEMA, KEY, content))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda path: path.write_text("[]"),
    "nested too deeply": lambda path: path.write_text("[" * 100_000),
    "a huge number": lambda path: path.write_text("9" * 10_000),
    "not a number": lambda path: rewrite(path, payload={"columns": COLUMNS, "entries": [float("nan")]}),
    "no payload": lambda path: path.write_text(json.dumps({"schema": SCHEMA, "key": KEY, "checksum": ""})),
    "one count changed": lambda path: path.write_text(path.read_text().replace("[1,2],1,", "[1,2],7,")),
    "another version": lambda path: rewrite(path, schema="omnidraft-ngram-cache/2"),
    "a key that is none": lambda path: rewrite(path, key=[]),
    "a wrong shape": lambda path: sealed(path, {"columns": COLUMNS, "entries": [[5]]}),
    "a negative id": lambda path: sealed(path, {"columns": COLUMNS, "entries": [[5, [1, -2], 1, 0, 0, 0, 0, None]]}),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_set_aside_with_one_line_and_work_goes_on(state: State, lines: list[str], damage: str) -> None:
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    DAMAGE[damage](file_of(state))
    assert state.load(DOCUMENT, SCHEMA, KEY) is None
    assert len(lines) == 1 and "\n" not in lines[0] and str(file_of(state)) in lines[0]
    assert [name for name in others(state) if name.startswith("ngram_cache.json.damaged-")]
    assert state.update(DOCUMENT, SCHEMA, KEY, count_one) == payload(1)
    assert len(lines) == 1


def test_a_file_too_large_is_not_read(state: State, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    assert state.load(DOCUMENT, SCHEMA, KEY) is None
    assert "at most 100" in lines[0]
    assert state.update(DOCUMENT, SCHEMA, KEY, count_one) is None  # nor written, since it could not be read
    assert len(lines) == 2 and not file_of(state).exists()


def test_a_document_made_for_something_else_names_what_differs(state: State, lines: list[str]) -> None:
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    assert state.load(DOCUMENT, SCHEMA, {**KEY, "target_tokenizer": "c" * 64}) is None
    assert len(lines) == 1 and "target_tokenizer differs" in lines[0] and "draft_tokenizer" not in lines[0]
    assert [name.split("-")[0] for name in others(state)] == ["ngram_cache.json.other"]


def test_few_of_those_set_aside_are_kept(state: State) -> None:
    for round_ in range(KEPT_ASIDE + 3):
        state.update(DOCUMENT, SCHEMA, KEY, count_one)
        file_of(state).write_text(f"damage {round_}")
        state.load(DOCUMENT, SCHEMA, KEY)
    assert [(file_of(state).parent / n).read_text()[-1] for n in others(state)] == ["3", "4", "5"]


def test_a_payload_that_could_not_be_read_again_is_not_written(state: State) -> None:
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    with pytest.raises(ValueError):
        state.update(DOCUMENT, SCHEMA, KEY, lambda old: {"entries": "none"})
    assert state.load(DOCUMENT, SCHEMA, KEY) == payload(1)


@pytest.mark.parametrize("name", ["../outside.json", "/etc/passwd", "a/../../b", "", ".hidden", "a//b"])
def test_documents_stay_in_the_folder(state: State, name: str) -> None:
    with pytest.raises(ValueError):
        state.load(name, SCHEMA, KEY)


@pytest.mark.parametrize("schema", ["ngram-cache", "omnidraft-ngram-cache/9", "omnidraft-../x/1"])
def test_unknown_schemas_are_a_fault_of_the_caller(state: State, schema: str) -> None:
    with pytest.raises(ValueError):
        state.update(DOCUMENT, schema, KEY, count_one)


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OmniDraftError, match=r"^[^\n]*file/state: not writable[^\n]*--state DIR or --no-state$"):
        State(tmp_path / "file" / "state", print)
    with pytest.raises(OmniDraftError, match="not writable"):
        State(tmp_path / "file", print)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    State(tmp_path / "state", print)
    (tmp_path / "state").chmod(0o500)
    with pytest.raises(OmniDraftError, match="not writable"):
        State(tmp_path / "state", print)


def test_a_folder_of_something_else_is_refused_so_that_forget_cannot_empty_it(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(OmniDraftError, match="folder of its own"):
        State(tmp_path, print)


def test_forget_removes_everything_learned(state: State, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept.txt").write_text("not ours")
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    file_of(state).write_text("damaged")
    state.load(DOCUMENT, SCHEMA, KEY)
    assert state.folder is not None
    (state.folder / "link").symlink_to(outside)
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    state.forget()
    assert {p.name for p in state.folder.rglob("*")} <= {MARKER, LOCK}
    assert (outside / "kept.txt").exists()
    assert state.load(DOCUMENT, SCHEMA, KEY) is None
    assert state.update(DOCUMENT, SCHEMA, KEY, count_one) == payload(1)


@pytest.mark.parametrize("step", ["fsync", "open"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_ctrl_c_leaves_the_old_document(
    state: State, lines: list[str], monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    real = getattr(os, step)

    def fails(first: Any, *rest: Any) -> Any:
        if step == "open" and not str(first).endswith(".new"):
            return real(first, *rest)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module.os, step, fails)
        if isinstance(error, OSError):
            assert state.update(DOCUMENT, SCHEMA, KEY, count_one) is None
            assert len(lines) == 1 and "No space left" in lines[0]
        else:
            with pytest.raises(KeyboardInterrupt):
                state.update(DOCUMENT, SCHEMA, KEY, count_one)
    assert others(state) == []
    assert state.update(DOCUMENT, SCHEMA, KEY, count_one) == payload(2)  # the lock is free, the count not doubled


def _update_under_a_size_limit(folder: Path) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    lines: list[str] = []
    state = State(folder, lines.append)
    many = {"columns": COLUMNS, "entries": [[n, [1, 2], 1, 0, 0, 0, 0, None] for n in range(1000)]}
    assert state.update(DOCUMENT, SCHEMA, KEY, lambda old: many) is None
    assert len(lines) == 1 and "not saved" in lines[0]
    assert state.load(DOCUMENT, SCHEMA, KEY) == payload(1)


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_write_that_the_kernel_cuts_short_leaves_the_old_document(state: State) -> None:
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    assert _in_a_process(_update_under_a_size_limit, state.folder) == 0
    assert others(state) == []


def _in_a_process(target: Callable[..., None], *arguments: Any) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


def _hammer(folder: Path, times: int) -> None:
    lines: list[str] = []
    state = State(folder, lines.append)
    for _ in range(times):
        assert state.update(DOCUMENT, SCHEMA, KEY, count_one) is not None
        assert seen(state.load(DOCUMENT, SCHEMA, KEY)) > 0
    assert lines == []


def test_processes_at_once_lose_no_count(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_hammer, args=(tmp_path / "state", 40)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    lines: list[str] = []
    assert seen(State(tmp_path / "state", lines.append).load(DOCUMENT, SCHEMA, KEY)) == 160
    assert lines == []


def _write_for_ever(folder: Path, in_place: bool) -> None:
    os.fsync = lambda descriptor: time.sleep(0.04)  # so that kills land in the middle of a write
    if in_place:

        def write(path: Path, data: bytes) -> None:
            with path.open("wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                os.fsync(file.fileno())
                file.write(data[len(data) // 2 :])

        module._write = write
    state = State(folder, print)
    filler = [[n, [1, 2], 1, 0, 0, 0, 0, None] for n in range(6, 1000)]
    while True:
        written = state.update(
            DOCUMENT, SCHEMA, KEY, lambda old: {"columns": COLUMNS, "entries": [*count_one(old)["entries"], *filler]}
        )
        os.write(1, f"{seen(written)}\n".encode())


def _killed_now_and_then(state: State, in_place: bool) -> Iterator[int]:
    """Start the writer, kill it at a random moment, yield the last count that it reported as written; again."""
    dice = random.Random(0)
    call = f"import test_state as t; t._write_for_ever(t.Path({str(state.folder)!r}), {in_place})"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    for _ in range(8):
        command = [sys.executable, "-c", call]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as writer:
            assert writer.stdout is not None
            reported = int(writer.stdout.readline())
            time.sleep(dice.random() * 0.1)
            writer.kill()
            yield max([reported, *map(int, writer.stdout.read().split())])


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_writer_leaves_a_whole_document(state: State, lines: list[str]) -> None:
    for reported in _killed_now_and_then(state, in_place=False):
        assert seen(state.load(DOCUMENT, SCHEMA, KEY)) in (reported, reported + 1)
        assert set(others(state)) <= {".ngram_cache.json.new"}  # at most the last one, which the next write replaces
    assert lines == []
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    assert others(state) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_writer_that_writes_in_place_is_found_out(state: State, lines: list[str]) -> None:
    """Control: the kills of the test above do land in the middle of a write."""
    for _ in _killed_now_and_then(state, in_place=True):
        state.load(DOCUMENT, SCHEMA, KEY)
        if lines:
            break
    assert len(lines) == 1 and "damaged" in lines[0]


def test_a_lock_that_is_never_freed_costs_the_save_and_not_the_run(
    state: State, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state.update(DOCUMENT, SCHEMA, KEY, count_one)
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    with state._lock():
        assert state.update(DOCUMENT, SCHEMA, KEY, count_one) is None
        assert state.load(DOCUMENT, SCHEMA, KEY) is None
    assert len(lines) == 2
    assert state.load(DOCUMENT, SCHEMA, KEY) == payload(1)


def test_a_number_beyond_all_bounds_is_damage(tmp_path: Path) -> None:
    """JSON has no infinity, but 1e999 reads as one."""
    complaints: list[str] = []
    state = State(tmp_path, complaints.append)
    state.update("calibration.json", "omnidraft-calibration/1", {}, lambda old: {})
    text = (tmp_path / "calibration.json").read_text().replace('"payload":{}', '"payload":{"a":1e999}')
    text = text.replace('"payload": {}', '"payload": {"a": 1e999}')
    assert "1e999" in text
    (tmp_path / "calibration.json").write_text(text)
    assert state.load("calibration.json", "omnidraft-calibration/1", {}) is None
    assert len(complaints) == 1


FILE = "pairs/one/weights.bin"
HASH = hashlib.sha256(b"whole").hexdigest()
FILE_DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(b"whol"),
    "another": lambda path: path.write_bytes(b"Whole"),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
}


def test_a_file_is_read_by_its_hash(state: State, lines: list[str]) -> None:
    assert state.write_file(FILE, b"old") == hashlib.sha256(b"old").hexdigest()
    assert state.write_file(FILE, b"whole") == HASH
    assert state.read_file(FILE, HASH) == b"whole"
    assert state.folder is not None
    assert [p.name for p in (state.folder / FILE).parent.iterdir()] == ["weights.bin"] and lines == []


@pytest.mark.parametrize("damage", FILE_DAMAGE)
def test_a_damaged_file_is_set_aside_with_one_line(state: State, lines: list[str], damage: str) -> None:
    state.write_file(FILE, b"whole")
    assert state.folder is not None
    FILE_DAMAGE[damage](state.folder / FILE)
    assert state.read_file(FILE, HASH, "version 3 is dropped") is None
    assert len(lines) == 1 and str(state.folder / FILE) in lines[0] and lines[0].endswith("version 3 is dropped")
    assert len(list(state.folder.rglob("weights.bin.damaged-*"))) == (damage != "missing")
    assert state.write_file(FILE, b"whole") == HASH and state.read_file(FILE, HASH) == b"whole"


def test_a_file_that_cannot_be_read_for_now_is_not_called_damaged(
    state: State, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state.write_file(FILE, b"whole")
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    with state._lock(), pytest.raises(OSError):
        state.read_file(FILE, HASH)
    assert state.read_file(FILE, HASH) == b"whole" and lines == []


def test_a_full_disk_leaves_the_old_file(state: State, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    state.write_file(FILE, b"whole")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert state.write_file(FILE, b"new") is None
    assert len(lines) == 1 and "No space left" in lines[0]
    assert state.read_file(FILE, HASH) == b"whole"


def test_no_state_keeps_no_files(lines: list[str]) -> None:
    nothing = State(None, lines.append)
    assert nothing.write_file(FILE, b"whole") is None and nothing.read_file(FILE, HASH) is None
    nothing.keep_only("pairs", ())
    assert nothing.together(lambda: 7) == 7 and lines == []


def test_keep_only_spares_what_is_named_and_what_was_set_aside_last(state: State) -> None:
    for round_ in range(KEPT_ASIDE + 2):
        state.write_file(f"pairs/one/{round_}.bin", b"damaged")
        assert state.read_file(f"pairs/one/{round_}.bin", HASH) is None
    for name in ("pairs/one/a.bin", "pairs/one/b.bin", "pairs/other/a.bin"):
        state.write_file(name, b"whole")
    assert state.folder is not None
    (state.folder / "pairs/one/.killed.new").touch()
    state.keep_only("pairs/one", {"a.bin"})
    left = sorted(p.name.split("-")[0] for p in (state.folder / "pairs/one").iterdir())
    assert left == ["2.bin.damaged", "3.bin.damaged", "4.bin.damaged", "a.bin"]
    state.keep_only("pairs/one", (), aside=0)
    assert list((state.folder / "pairs/one").iterdir()) == []
    assert state.read_file("pairs/other/a.bin", HASH) == b"whole"


def _add_together(folder: Path) -> None:
    state = State(folder, print)

    def twice() -> bool:
        first = state.update(DOCUMENT, SCHEMA, KEY, count_one)
        time.sleep(0.001)
        return seen(state.update(DOCUMENT, SCHEMA, KEY, count_one)) == seen(first) + 1

    assert all(state.together(twice) for _ in range(20))


def test_nobody_comes_between_calls_made_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_together, args=(tmp_path / "state",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 3
    assert seen(State(tmp_path / "state", print).load(DOCUMENT, SCHEMA, KEY)) == 120


def test_together_keeps_other_threads_out(state: State, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    found: list[Any] = []

    def work() -> int:
        other = threading.Thread(target=lambda: found.append(state.update(DOCUMENT, SCHEMA, KEY, count_one)))
        other.start()
        other.join()
        return seen(state.update(DOCUMENT, SCHEMA, KEY, count_one))

    assert state.together(work) == 1 and found == [None] and len(lines) == 1
    with state._lock():
        assert state.together(work) is None
    assert len(lines) == 2


def test_forget_removes_files_too(state: State) -> None:
    state.write_file(FILE, b"whole")
    state.read_file(FILE, "0" * 64)
    state.write_file(FILE, b"whole")
    state.forget()
    assert state.folder is not None
    assert {p.name for p in state.folder.rglob("*")} <= {MARKER, LOCK}
