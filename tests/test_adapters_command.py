"""omnidraft adapters as a user meets it: on a bundle whose models are empty files, so none can have been loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnidraft.adapters.index import Facts, Forecast
from omnidraft.adapters.layout import Layout
from omnidraft.adapters.store import AdapterStore, open_store
from omnidraft.adapters.trainer import Snapshot
from omnidraft.runtime.adapter_file import load_adapter, save_adapter
from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.state import State

PROJECTIONS = {"layers.0.q": [6, 4], "layers.0.v": [6, 2]}
LAYOUT = Layout(PROJECTIONS)
MODEL = "graphs/model.onnx"


def model(name: str, weights: str, **parts: Any) -> dict[str, Any]:
    return {
        "architecture": "LlamaForCausalLM", "source": {"name": name, "kind": "huggingface"},
        "weights_sha256": weights * 64, "tokenizer": "tokenizer.json", "tokenizer_sha256": "0" * 64,
        "chat_template": None, "bos": None, "template_tokens": {}, "stop_ids": [], "vocabulary": 384, "context": 512,
        "license": "mit", **parts,
    }  # fmt: skip


def write_bundle(folder: Path, lora: dict[str, Any] | None) -> Path:
    """A manifest of a drafter and two targets, and empty files for all that it names."""
    parity = {"top1_agreement": 1.0, "greedy_equal": True}
    graph = {"profile": "cpu", "precision": "int8", "model": MODEL, "parity": parity, "quantization": {}, "opset": 2}
    drafter = model("small", "a", model=MODEL, precision="int8", trainable=lora is not None, lora=lora,
                    parity=parity, opset=21, training=None, head=None)  # fmt: skip
    targets = {
        name: model(f"big-{name}", weights, map="map.json", graphs=[graph])
        for name, weights in {"one": "b", "two": "c"}.items()
    }
    names = ("tokenizer.json", "map.json", MODEL)
    manifest = {"schema": "omnidraft-bundle/2", "created": "today", "tools": {}, "drafter": drafter, "targets": targets,
                "files": {name: {"sha256": "0" * 64, "size": 0} for name in names}}  # fmt: skip
    (folder / MODEL).parent.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def learner(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", {"projections": PROJECTIONS})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def adapters(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omnidraft.tools.cli", "adapters", *map(str, arguments)]
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": {**os.environ, "COLUMNS": "160"}, **options}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **settings)


def says(*arguments: str | Path) -> str:
    done = adapters(*arguments)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def fails(*arguments: str | Path) -> str:
    """The one line a failing command prints."""
    done = adapters(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("omnidraft: "), done.stderr
    return done.stderr


def store(bundle: Path, folder: Path, target: str | None = None) -> AdapterStore:
    return open_store(open_bundle(bundle), target, State(folder, pytest.fail))


def lora(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(LAYOUT.width * 2, np.float32)


def learn(bundle: Path, folder: Path, *seeds: int, target: str | None = None) -> None:
    for seed in seeds:
        snapshot = Snapshot(lora(seed), seed * 10, "onnx-step", b"moments")
        store(bundle, folder, target).add(snapshot, Facts("projected", seed * 640, Forecast(0.41, 0.4 + seed / 10)))


def in_use(bundle: Path, folder: Path, target: str | None = None) -> int:
    return store(bundle, folder, target).index().current


def row(table: str, *words: str) -> bool:
    return any(all(word in line.split() for word in words) for line in table.splitlines())


def test_list_needs_no_bundle(learner: Path, folder: Path) -> None:
    assert says("list", "--state", folder) == f"no adapters in {folder}\n"
    assert not folder.exists(), "to look is not to write"
    learn(learner, folder, 1, 2)
    learn(learner, folder, 3, target="two")
    store(learner, folder).use(1)
    (learner / "manifest.json").unlink()
    table = says("list", "--state", folder)
    assert row(table, "small", "big-one", "1", "1,", "2", "20", "0.41", "0.60")
    assert row(table, "small", "big-two", "1", "30", "0.70")


def test_show_marks_the_one_in_use(learner: Path, folder: Path) -> None:
    assert says("show", learner, "--state", folder).count("\n") == 1
    learn(learner, folder, 1, 2)
    table = says("show", learner, "--state", folder)
    assert row(table, "2", "*", "1", "20", "0.60", "onnx-step,", "1280", "projected")
    assert "│ 2 *" in table and "│ 1 *" not in table and "│ 0 *" not in table
    store(learner, folder).use(0)
    assert row(says("show", learner, "--state", folder), "0", "*", "shipped")
    assert "nothing learned yet" in says("show", learner, "--target", "two", "--state", folder)


def test_rollback_goes_to_the_parent_or_to_a_number(learner: Path, folder: Path) -> None:
    learn(learner, folder, 1, 2, 3)
    at = ("--state", folder)
    assert says("rollback", learner, *at) == "version 2 is in use, was version 3\n" and in_use(learner, folder) == 2
    assert says("rollback", learner, "--to", "0", *at) == "the drafter as shipped is in use, was version 2\n"
    assert in_use(learner, folder) == 0
    assert says("rollback", learner, *at) == "the drafter as shipped is in use already\n"
    assert says("rollback", learner, "--to", "3", *at) == "version 3 is in use, was the drafter as shipped\n"
    assert in_use(learner, folder) == 3
    assert "no version 7; kept: 1, 2, 3" in fails("rollback", learner, "--to", "7", *at)


def test_rollback_to_a_damaged_version_is_one_line_and_changes_nothing(learner: Path, folder: Path) -> None:
    learn(learner, folder, 1, 2)
    (path,) = folder.rglob(f"{store(learner, folder).versions()[0].adapter[:12]}.*")
    path.write_bytes(b"")
    assert f"{path}: damaged" in fails("rollback", learner, "--state", folder)
    assert in_use(learner, folder) == 2


def test_export_and_import_carry_the_numbers(learner: Path, folder: Path, tmp_path: Path) -> None:
    file, at = tmp_path / "mine.onnx_adapter", ("--state", folder)
    assert "as shipped" in fails("export", learner, file, *at)
    learn(learner, folder, 1, 2)
    assert says("export", learner, file, "--version", "1", *at) == f"version 1 is in {file}\n"
    assert np.array_equal(LAYOUT.vector(load_adapter(file)), lora(1))
    says("export", learner, file, *at)
    assert np.array_equal(LAYOUT.vector(load_adapter(file)), lora(2))
    assert says("import", learner, file, "--target", "two", *at).startswith("version 1 is in use, imported from")
    version, snapshot = store(learner, folder, "two").current()
    assert version is not None and snapshot is not None and np.array_equal(snapshot.lora, lora(2))
    assert in_use(learner, folder, "one") == 2, "the other pair is left alone"
    assert "not written" in fails("export", learner, tmp_path / "none" / "file", *at)


def test_import_refuses_what_does_not_fit(learner: Path, folder: Path, tmp_path: Path) -> None:
    file, at = tmp_path / "x.onnx_adapter", ("--state", folder)
    assert f"{file}: no such adapter" in fails("import", learner, file, *at)
    file.write_bytes(b"text")
    assert f"{file}: not an adapter, or a damaged one" in fails("import", learner, file, *at)
    save_adapter(file, Layout({"layers.0.q": [8, 4]}).parameters(np.zeros(12, np.float32)))
    assert f"{file}: not an adapter of this drafter" in fails("import", learner, file, *at)
    save_adapter(file, LAYOUT.parameters(np.full(LAYOUT.width, np.inf, np.float32)))
    assert "not finite" in fails("import", learner, file, *at)
    assert store(learner, folder).versions() == ()


def test_a_drafter_that_cannot_learn_is_one_line(tmp_path: Path, folder: Path) -> None:
    fixed = write_bundle(tmp_path / "fixed", None)
    for verb in (["show", fixed], ["rollback", fixed], ["export", fixed, "x"], ["import", fixed, "x"]):
        assert "its drafter cannot learn" in fails(*verb, "--state", folder)


def test_wrong_bundle_target_and_state_are_one_line(learner: Path, folder: Path, tmp_path: Path) -> None:
    assert "no such bundle" in fails("show", tmp_path / "none", "--state", folder)
    assert "it has one, two" in fails("show", learner, "--target", "three", "--state", folder)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for verb in (["list"], ["forget", "--yes"], ["show", learner]):
        assert "holds files of something else" in fails(*verb, "--state", tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def everything(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name not in (".lock", "omnidraft-state.txt")]


def fill(learner: Path, folder: Path) -> None:
    learn(learner, folder, 1)
    state = State(folder, pytest.fail)
    state.update("calibration.json", "omnidraft-calibration/1", {}, lambda old: {})
    state.write_file("samples/text.bin", bytes(3_000_000))


def test_forget_removes_everything_learned(learner: Path, folder: Path) -> None:
    assert says("forget", "--yes", "--state", folder) == f"nothing learned in {folder}\n" and not folder.exists()
    fill(learner, folder)
    expected = f"removed 5 files, 3.0 MB, in {folder}: adapters, calibration.json, samples\n"
    assert says("forget", "--yes", "--state", folder) == expected
    assert everything(folder) == [] and in_use(learner, folder) == 0
    assert says("forget", "--yes", "--state", folder) == f"nothing learned in {folder}\n"


def test_forget_asks_and_without_anybody_to_ask_does_nothing(learner: Path, folder: Path) -> None:
    fill(learner, folder)
    assert "--yes is needed" in fails("forget", "--state", folder)
    assert len([path for path in everything(folder) if path.is_file()]) == 5


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("answer", ["n", "y"])
def test_forget_does_what_is_answered(learner: Path, folder: Path, answer: str) -> None:
    import pty

    fill(learner, folder)
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    done = adapters("forget", "--state", folder, stdin=theirs)
    os.close(ours)
    os.close(theirs)
    assert "5 files, 3.0 MB" in done.stderr and "Traceback" not in done.stderr
    assert (done.returncode, everything(folder) == []) == ((0, True) if answer == "y" else (1, False))


def test_every_verb_of_the_group_ends_an_error_with_one_line(learner: Path, tmp_path: Path) -> None:
    """The state folder cannot be made: an error of the system, not of ours."""
    (tmp_path / "file").write_text("")
    blocked = ("--state", tmp_path / "file" / "state")
    for verb in (["show", learner], ["rollback", learner], ["export", learner, "x"], ["import", learner, "x"]):
        assert "not writable as a state folder" in fails(*verb, *blocked)
