"""Versions of an adapter: exact, kept apart by pair, and never used when damaged."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omnidraft.adapters.index import KEEP, Facts, Forecast, Version
from omnidraft.adapters.layout import Layout
from omnidraft.adapters.store import AdapterStore, stored
from omnidraft.adapters.trainer import Snapshot
from omnidraft.runtime.acceptance import neutral
from omnidraft.runtime.adapter_file import load_adapter, save_adapter
from omnidraft.runtime.bundle import ModelInfo
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.state import LOCK, MARKER, State

LAYOUT = Layout({"layers.0.q": [6, 4], "layers.0.v": [6, 2]})
FACTS = Facts("projected", 640, Forecast(0.41, 0.52), "cooking")


def model(name: str, sha256: str) -> ModelInfo:
    source = {"name": name, "kind": "huggingface"}
    return ModelInfo("LlamaForCausalLM", source, sha256 * 64, "t", "0" * 64, None, None, {}, (), 400, 512, "mit")


DRAFTER, TARGET = model("small", "a"), model("large", "b")


def snapshot(seed: int, rank: int = 2) -> Snapshot:
    numbers = np.random.default_rng(seed).standard_normal(LAYOUT.width * rank, np.float32)
    return Snapshot(numbers, seed * 10, "onnx-step", b"moments %d" % seed)


def same(found: Snapshot | None, expected: Snapshot) -> bool:
    return (
        found is not None
        and np.array_equal(found.lora, expected.lora)
        and replace(found, lora=expected.lora) == expected
    )


def open_store(folder: Path, lines: list[str] | None = None, target: ModelInfo = TARGET) -> AdapterStore:
    return AdapterStore(State(folder, pytest.fail if lines is None else lines.append), DRAFTER, target, LAYOUT)


def numbers(store: AdapterStore) -> list[int]:
    return [version.number for version in store.versions()]


def add(store: AdapterStore, *seeds: int) -> Version:
    for seed in seeds:
        version = store.add(snapshot(seed), FACTS)
    assert version is not None
    return version


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()} - {MARKER, LOCK, ".lock"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def lines() -> list[str]:
    return []


def test_the_acceptance_head_goes_with_its_adapter(folder: Path, tmp_path: Path, lines: list[str]) -> None:
    """It is kept, read, exported and imported with the LoRA weights; a head that is none is one clear line."""
    head = neutral(8)
    store = open_store(folder)
    assert store.add(replace(snapshot(1), head=head), FACTS) is not None
    found = open_store(folder).current()[1]
    assert found is not None and found.head is not None and set(found.head) == set(head)
    assert all(np.array_equal(found.head[name], head[name]) for name in head)
    assert set(store.parameters(1) or {}) == set(LAYOUT.names())
    assert store.export(1, tmp_path / "out.onnx_adapter")
    again = open_store(tmp_path / "other").import_(tmp_path / "out.onnx_adapter")
    assert again is not None
    imported = open_store(tmp_path / "other").current()[1]
    assert imported is not None and imported.head is not None
    head["acceptance.w2"] = head["acceptance.w2"][:3]
    save_adapter(tmp_path / "bad.onnx_adapter", {**LAYOUT.parameters(snapshot(1).lora), **head})
    with pytest.raises(OmniDraftError, match=r"^[^\n]*bad.onnx_adapter: not an adapter of this drafter[^\n]*w2[^\n]*$"):
        open_store(tmp_path / "other").import_(tmp_path / "bad.onnx_adapter")


def test_what_is_added_is_current_and_exact(folder: Path) -> None:
    assert open_store(folder).current() == (None, None)
    added = add(open_store(folder), 1)
    found, read = open_store(folder).current()
    assert found == added and same(read, snapshot(1))
    assert (added.number, added.parent, added.rank, added.steps, added.trainer) == (1, 0, 2, 10, "onnx-step")
    assert Facts(added.loss, added.samples, added.forecast, added.note) == FACTS
    parameters = open_store(folder).parameters(1)
    assert parameters is not None and np.array_equal(LAYOUT.vector(parameters), snapshot(1).lora)


def test_an_optimizer_is_optional(folder: Path) -> None:
    bare = replace(snapshot(1), optimizer=b"")
    assert open_store(folder).add(bare, Facts()) is not None
    assert same(open_store(folder).current()[1], bare)


def test_pairs_are_kept_apart(folder: Path) -> None:
    other = model("other", "c")
    add(open_store(folder), 1)
    assert open_store(folder, target=other).current() == (None, None)
    add(open_store(folder, target=other), 2, 3)
    assert same(open_store(folder).current()[1], snapshot(1))
    assert same(open_store(folder, target=other).current()[1], snapshot(3))
    indexes = stored(State(folder, pytest.fail))
    assert [(index.target, index.current) for index in indexes] == [("large", 1), ("other", 2)]
    open_store(folder).forget()
    assert [index.target for index in stored(State(folder, pytest.fail))] == ["other"]
    assert same(open_store(folder, target=other).current()[1], snapshot(3))


def test_another_drafter_of_the_same_first_digits_is_set_aside(folder: Path, lines: list[str]) -> None:
    """The folder's name has twelve digits of each hash; the key has all."""
    add(open_store(folder), 1)
    alike = replace(TARGET, weights_sha256="b" * 12 + "c" * 52)
    assert open_store(folder, lines, alike).current() == (None, None)
    assert len(lines) == 1 and "target differs" in lines[0]


def test_rollback_and_forward(folder: Path) -> None:
    store = open_store(folder)
    add(store, 1, 2, 3)
    for number in (2, 0, 3):
        assert store.use(number)
        assert same(store.current()[1], snapshot(number)) if number else store.current() == (None, None)
    store.use(1)
    assert add(store, 4).parent == 1, "learned from the one in use"
    with pytest.raises(OmniDraftError, match=r"^[^\n]*no version 9; kept: 1, 2, 3, 4$"):
        store.use(9)


def test_the_line_of_the_current_one_is_kept_then_the_newest(folder: Path) -> None:
    store = open_store(folder)
    add(store, 1, 2, 3)
    store.use(1)
    add(store, 4, 5)
    assert numbers(store) == [1, 2, 3, 4, 5] and KEEP == 5
    add(store, 6)
    assert numbers(store) == [1, 3, 4, 5, 6], "1 is an ancestor, 2 is not"
    assert [version.parent for version in store.versions()] == [0, 1, 1, 4, 5], "2 was between 1 and 3"
    assert files(folder) == {"index.json"} | store.index().files()
    for version in store.versions():
        store.use(version.number)
        assert same(store.current()[1], snapshot(version.number))


def test_numbers_are_never_used_twice(folder: Path) -> None:
    store = open_store(folder)
    add(store, 1, 2)
    assert store.forget() and store.current() == (None, None) and files(folder) == {"index.json"}
    assert add(store, 3).number == 3
    assert add(store, 3).number == 4 and same(store.current()[1], snapshot(3)), "the same files twice"


def test_no_state_keeps_nothing(lines: list[str]) -> None:
    store = AdapterStore(State(None, lines.append), DRAFTER, TARGET, LAYOUT)
    assert store.add(snapshot(1), FACTS) is None and store.current() == (None, None) and lines == []


@pytest.mark.parametrize("lora", [np.full(LAYOUT.width, np.nan, np.float32), np.zeros(LAYOUT.width - 1, np.float32)])
def test_weights_that_no_drafter_should_use_are_not_kept(folder: Path, lora: np.ndarray) -> None:
    add(open_store(folder), 1)
    with pytest.raises(ValueError):
        open_store(folder).add(Snapshot(lora), Facts())
    assert same(open_store(folder).current()[1], snapshot(1))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "foreign": lambda path: save_adapter(path, {"layers.0.q.lora_A": np.ones((8, 2), np.float32)}),
}


@pytest.mark.parametrize("part", ["adapter", "optimizer"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_version_is_dropped_with_one_line_for_the_one_before(
    folder: Path, lines: list[str], damage: str, part: str
) -> None:
    store = open_store(folder, lines)
    add(store, 1, 2, 3)
    (path,) = folder.rglob(f"{getattr(store.versions()[2], part)[:12]}.*")
    DAMAGE[damage](path)
    version, read = store.current()
    assert version is not None and version.number == 2 and same(read, snapshot(2))
    assert len(lines) == 1 and str(path) in lines[0] and lines[0].endswith("version 3 is dropped")
    assert numbers(store) == [1, 2]
    assert add(store, 4).number == 4 and len(lines) == 1
    assert {name for name in files(folder) if ".damaged-" not in name} == {"index.json"} | store.index().files()


def test_ancestors_are_found_behind_a_damaged_one_and_in_the_end_the_drafter_as_shipped(
    folder: Path, lines: list[str]
) -> None:
    store = open_store(folder, lines)
    add(store, 1, 2, 3)
    for lost in (2, 3):
        for path in folder.rglob(f"{store.versions()[lost - 1].adapter[:12]}.*"):
            path.unlink()
    version, _ = store.current()
    assert version is not None and version.number == 1 and len(lines) == 2
    for path in folder.rglob("*.onnx_adapter"):
        path.write_bytes(b"")
    assert store.current() == (None, None) and len(lines) == 3
    assert store.current() == (None, None) and len(lines) == 3, "said once"


def test_a_version_that_turns_out_damaged_is_not_used(folder: Path, lines: list[str]) -> None:
    store = open_store(folder, lines)
    add(store, 1, 2)
    (path,) = folder.rglob(f"{store.versions()[0].adapter[:12]}.*")
    path.write_bytes(b"")
    assert not store.use(1) and len(lines) == 1
    assert same(store.current()[1], snapshot(2))


def test_a_damaged_index_is_set_aside_and_work_goes_on(folder: Path, lines: list[str]) -> None:
    store = open_store(folder, lines)
    add(store, 1)
    (path,) = folder.rglob("index.json")
    path.write_bytes(path.read_bytes()[:-9])
    assert store.current() == (None, None) and len(lines) == 1
    add(store, 2)
    assert same(store.current()[1], snapshot(2))
    assert len(list(folder.rglob("index.json.damaged-*"))) == 1 and len(lines) == 1


def test_a_full_disk_leaves_the_versions_as_they_were(
    folder: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    store = open_store(folder, lines)
    add(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert store.add(snapshot(2), FACTS) is None
        assert not store.use(0)
    assert len(lines) == 2 and all("No space left" in line for line in lines)
    assert numbers(store) == [1] and same(store.current()[1], snapshot(1))


def test_export_and_import_are_exact(folder: Path, tmp_path: Path) -> None:
    store = open_store(folder)
    add(store, 1, 2)
    assert store.export(1, tmp_path / "out.onnx_adapter")
    assert np.array_equal(LAYOUT.vector(load_adapter(tmp_path / "out.onnx_adapter")), snapshot(1).lora)
    imported = store.import_(tmp_path / "out.onnx_adapter")
    assert imported is not None and (imported.number, imported.parent, imported.steps) == (3, 2, 0)
    assert imported.note == "imported from out.onnx_adapter" and imported.optimizer is None
    assert same(store.current()[1], Snapshot(snapshot(1).lora))
    with pytest.raises(OmniDraftError, match="none: not written"):
        store.export(1, tmp_path / "file" / "none")


RIGHT = LAYOUT.parameters(np.zeros(36, np.float32))
FOREIGN: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "other layers": ({name.replace("0", "9"): part for name, part in RIGHT.items()}, "the layers"),
    "a layer too few": ({name: part for name, part in RIGHT.items() if ".v." not in name}, "the layers"),
    "other sizes": ({**RIGHT, "layers.0.q.lora_A": np.zeros((8, 2), np.float32)}, r"is \(8, 2\), not \(6, 2\)"),
    "two ranks": ({**RIGHT, "layers.0.v.lora_B": np.zeros((3, 2), np.float32)}, "lora_B is"),
    "rank 0": ({name: part[:, :0] if name[-1] == "A" else part[:0] for name, part in RIGHT.items()}, "rank 1 or more"),
    "float16": ({name: part.astype(np.float16) for name, part in RIGHT.items()}, "float16"),
    "not a number": (LAYOUT.parameters(np.full(36, np.nan, np.float32)), "not finite"),
    "one infinite": (LAYOUT.parameters(np.append(np.zeros(35, np.float32), np.float32(np.inf))), "not finite"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(folder: Path, tmp_path: Path, case: str) -> None:
    parameters, why = FOREIGN[case]
    add(open_store(folder), 1)
    save_adapter(tmp_path / "x.onnx_adapter", {name: np.ascontiguousarray(part) for name, part in parameters.items()})
    with pytest.raises(OmniDraftError, match=rf"^[^\n]*x.onnx_adapter: not an adapter of this drafter[^\n]*{why}"):
        open_store(folder).import_(tmp_path / "x.onnx_adapter")
    assert numbers(open_store(folder)) == [1]


@pytest.mark.parametrize("data", [b"", b"not an adapter"])
def test_a_file_that_is_no_adapter_is_refused(folder: Path, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(OmniDraftError, match="not an adapter, or a damaged one"):
        open_store(folder).import_(tmp_path / "x")
    with pytest.raises(OmniDraftError, match="no such adapter"):
        open_store(folder).import_(tmp_path / "y")


def _add_many(folder: Path, seeds: range, results: multiprocessing.Queue[list[int]]) -> None:
    store = open_store(folder)
    added = []
    for seed in seeds:
        added.append(add(store, seed).number)
        assert store.current()[1] is not None
    results.put(added)


def test_processes_at_once_give_no_number_twice(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_add_many, args=(folder, range(i * 100, i * 100 + 12), results)) for i in range(3)
    ]
    for process in processes:
        process.start()
    given = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert sorted(number for numbers in given for number in numbers) == list(range(1, 37))
    store = open_store(folder)
    assert numbers(store) == [32, 33, 34, 35, 36] and store.current()[1] is not None
    assert files(folder) == {"index.json"} | store.index().files()
