"""omnidraft doctor: what it finds, what it says to do about it, and that it changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime as ort
import psutil
import pytest
from conftest import Loaded
from filelock import FileLock
from onnxruntime.capi import _pybind_state as binding
from test_cli import omnidraft

from omnidraft.runtime.calibration import calibrate
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.placed import CPU
from omnidraft.runtime.state import LOCK, State
from omnidraft.tools import bundle_health
from omnidraft.tools.bundle_health import VERDICTS, look_at_bundle, memory, model_needs
from omnidraft.tools.diagnosis import Diagnosis, look_at_providers, look_at_trainer, look_at_versions
from omnidraft.tools.state_health import look_at_state

DOCUMENT = "calibration.json"


def doctor(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    done = omnidraft("doctor", "--json", *arguments)
    assert done.returncode == status, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["works"] == (status == 0)
    assert all("\n" not in problem["line"] for problem in found["problems"])
    return found


def state_of(folder: Path) -> Diagnosis:
    diagnosis = Diagnosis()
    look_at_state(diagnosis, folder)
    return diagnosis


def only_problem(diagnosis: Diagnosis, stops: bool) -> str:
    (problem,) = diagnosis.problems
    assert problem.stops == stops and "\n" not in problem.line
    return problem.line


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every name in a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder with one good document."""
    folder = tmp_path / "state"
    State(folder, pytest.fail).update(DOCUMENT, "omnidraft-calibration/1", {}, lambda _: {"a graph": {"w0": 2}})
    return folder


def test_a_device_without_a_bundle_is_looked_at(tmp_path: Path) -> None:
    found = doctor("--state", tmp_path / "state")["found"]
    assert found["versions"]["onnxruntime"] == ort.__version__
    assert found["providers"]["cpu"].startswith(CPU)
    assert set(found) == {"versions", "providers", "learning", "state"}
    assert not (tmp_path / "state").exists(), "a doctor makes nothing"


def test_people_get_a_table_and_the_problems_below(state: Path) -> None:
    (state / DOCUMENT).write_text("{")
    done = omnidraft("doctor", "--state", state)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    table, _, problems = done.stdout.partition("\nproblem: ")
    assert "onnxruntime" in table and problems.count("\n") == 1 and str(state / DOCUMENT) in problems


@pytest.mark.model
def test_a_good_bundle_has_no_problem(bundle: Path, tmp_path: Path) -> None:
    answer = doctor(bundle, "--state", tmp_path / "state")
    found = answer["found"]
    assert "files intact" in found["bundle"]["folder"]
    graphs = {f"{name}, {precision}" for name in ("smollm2", "qwen3") for precision in ("int8", "int4", "fp32")}
    assert graphs <= set(found["memory"]) and graphs == set(found["calibration"])
    assert set(found["calibration"].values()) == {"not measured yet, the first run does it"}
    assert not any(problem["stops"] for problem in answer["problems"])


@pytest.mark.model
def test_no_model_is_loaded(bundle: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "InferenceSession", pytest.fail)
    diagnosis = Diagnosis()
    look_at_versions(diagnosis)
    look_at_providers(diagnosis)
    look_at_trainer(diagnosis)
    look_at_bundle(diagnosis, bundle, state)
    assert diagnosis.found["memory"]


@pytest.mark.model
def test_a_calibration_is_found_as_it_was_measured(loaded: dict[str, Loaded], bundle: Path, tmp_path: Path) -> None:
    pair = loaded["int8"].pair
    calibration = calibrate(pair, State(tmp_path / "state", pytest.fail), times=False)
    diagnosis = Diagnosis()
    look_at_bundle(diagnosis, bundle, tmp_path / "state")
    lines = diagnosis.found["calibration"]
    assert lines.pop("smollm2, int8") == f"W₀ = {calibration.w0}, text is exact, pass times not measured yet"
    assert all(line.startswith("not measured") for line in lines.values())


@pytest.mark.model
def test_memory_needed_is_that_of_the_decoder(loaded: dict[str, Loaded], bundle: Path) -> None:
    pair = loaded["int4"].pair
    needs, decoder = model_needs(pair.bundle, pair.target.graph), pair.target.decoder
    assert isinstance(decoder, Decoder)
    assert needs.disk == sum(path.stat().st_size for path in (bundle / pair.target.graph.folder).iterdir())
    buffers = sum(heads * decoder.capacity * size * 4 for heads, size in decoder.kv.values())
    assert needs.cache * decoder.capacity == buffers * needs.tokens


@pytest.mark.model
def test_what_does_not_fit_is_told_with_what_does(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_free(size: float) -> Diagnosis:
        monkeypatch.setattr(bundle_health, "memory", lambda: size)
        diagnosis = Diagnosis()
        look_at_bundle(diagnosis, bundle, bundle / "no state")
        return diagnosis

    assert with_free(1e12).problems == []
    some = with_free(450e6)
    assert some.works and [p.line for p in some.problems if "use --precision" in p.line]
    none = with_free(1e6)
    assert not none.works and all("close other programs" in p.line for p in none.problems)


def test_free_memory_is_that_of_the_system() -> None:
    found = memory()
    if found is None:
        pytest.skip("this system does not say it in a file")
    assert abs(found - psutil.virtual_memory().available) < 0.2 * psutil.virtual_memory().total


@pytest.mark.model
def test_every_damaged_file_is_named(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy", copy_function=os.link))
    damaged = [copy / "drafter/model.onnx", copy / "targets/smollm2/tokenizer.json"]
    for path in damaged:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-1] + b"?")
    problems = doctor(copy, "--state", tmp_path / "state", status=1)["problems"]
    assert len(problems) == 2 and all(problem["stops"] for problem in problems)
    assert {p["line"].partition(": changed since export")[0] for p in problems} == {str(path) for path in damaged}
    (copy / "targets/smollm2/vocabulary.json").unlink()
    (problem,) = doctor(copy, "--state", tmp_path / "state", status=1)["problems"]
    assert "vocabulary.json: missing; export the bundle again" in problem["line"]


def test_a_missing_bundle_stops_work_and_the_rest_is_still_looked_at(tmp_path: Path, state: Path) -> None:
    answer = doctor(tmp_path / "none", "--state", state, status=1)
    (problem,) = answer["problems"]
    assert "no such bundle" in problem["line"]
    assert answer["found"]["state"]["holds"].endswith("in 3 files, 1 of them documents")


def test_a_state_folder_is_left_as_it_is(state: Path) -> None:
    before = snapshot(state)
    assert state_of(state).problems == []
    assert snapshot(state) == before


def damage(document: Path) -> None:
    text = document.read_text()
    document.write_text(text.replace('"w0":2', '"w0":3'))


def rename_schema(document: Path) -> None:
    document.write_text(document.read_text().replace("omnidraft-calibration/1", "omnidraft-calibration/9"))


def invent_schema(document: Path) -> None:
    document.write_text(document.read_text().replace("omnidraft-calibration/1", "omnidraft-something/1"))


def replace_by_a_pipe(document: Path) -> None:
    document.unlink()
    os.mkfifo(document)


@pytest.mark.parametrize("harm", [damage, rename_schema, invent_schema, replace_by_a_pipe])
def test_a_document_that_does_not_check_is_named_and_stays(state: Path, harm: Callable[[Path], None]) -> None:
    harm(state / DOCUMENT)
    before = snapshot(state)
    diagnosis = state_of(state)
    line = only_problem(diagnosis, stops=False)
    assert line.startswith(str(state / DOCUMENT)) and "delete it" in line
    assert diagnosis.works and snapshot(state) == before


def test_a_folder_of_something_else_stops_work(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").touch()
    assert "holds files of something else" in only_problem(state_of(tmp_path), stops=True)


def test_a_file_in_place_of_the_folder_stops_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inner"):
        assert "--no-state" in only_problem(state_of(folder), stops=True)


@pytest.fixture
def powerless() -> Iterator[Path]:
    """A folder of somebody else, seen by a user who may read it and no more."""
    folder = Path(tempfile.mkdtemp())
    State(folder / "state", pytest.fail)
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    for path in (folder, folder / "state"):
        path.chmod(0o555)
    for path in (folder / "state").iterdir():
        path.chmod(0o444)
    try:
        if root:
            os.seteuid(65534)  # root may write anywhere
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, folder / "state"):
            path.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_may_only_be_read_stops_work(powerless: Path) -> None:
    assert "not writable as a state folder" in only_problem(state_of(powerless / "state"), stops=True)
    assert "cannot be made" in only_problem(state_of(powerless / "new" / "state"), stops=True)


def test_a_lock_that_another_process_holds_is_told(state: Path) -> None:
    with FileLock(state / LOCK):
        assert "another process holds its lock" in only_problem(state_of(state), stops=False)
    assert state_of(state).problems == []


def test_every_verdict_of_onnxruntime_is_understood() -> None:
    assert set(VERDICTS) == set(binding.OrtCompiledModelCompatibility.__members__)


def test_a_training_folder_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIDRAFT_TRAINING_PACKAGES", str(tmp_path))
    diagnosis = Diagnosis()
    look_at_trainer(diagnosis)
    assert "setup-training" in only_problem(diagnosis, stops=False)
    assert diagnosis.found["learning"]["trainer"].startswith("onnx-step")
