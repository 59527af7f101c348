"""Which trainer runs, and why; setting up onnxruntime-training; a learner's session with it."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Loaded
from learning import RANK, batches, needs_package, random_lora, take, worker, write_graphs
from sessions import answer, generate, learning

from omnidraft.adapters import ort_training
from omnidraft.adapters.layout import Layout
from omnidraft.adapters.onnx_step import OnnxStepTrainer
from omnidraft.adapters.ort_training import NAME, VERSION, OrtTrainingTrainer
from omnidraft.adapters.trainer import Snapshot, TrainerError
from omnidraft.adapters.trainers import FallbackTrainer, default_python, open_trainer
from omnidraft.export.training_graph import LOSS, STEP, WEIGHTS
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.setup_training import REQUIREMENTS, facts, install, unsupported


@needs_package
def test_auto_takes_the_worker_and_goes_on_without_it(
    graphs: tuple[Path, Layout], packages: Path, tmp_path: Path
) -> None:
    folder, layout = graphs
    said: list[str] = []
    trainer, why = open_trainer("auto", folder, layout, RANK, packages, tmp_path / "artifacts", warn=said.append)
    assert isinstance(trainer, FallbackTrainer)
    assert (trainer.name, why, said) == (NAME, NAME, [])
    work = batches(6, 1.0)
    before = take(trainer, work[:3])
    at_death = trainer.snapshot()
    assert trainer._first is not None
    worker(trainer._first).kill()
    after = take(trainer, work[3:])
    assert trainer.name == trainer.snapshot().trainer == "onnx-step"
    assert len(said) == 1 and "signal 9" in said[0] and "onnx-step goes on" in said[0] and "\n" not in said[0]
    twin = OnnxStepTrainer(folder / STEP, layout, RANK)
    assert take(twin, work[:3]) == pytest.approx(before, rel=1e-4)
    twin.load(Snapshot(at_death.lora))
    assert take(twin, work[3:]) == after
    trainer.close()


@needs_package
def test_a_worker_that_dies_at_a_load_or_a_snapshot_is_replaced_too(
    graphs: tuple[Path, Layout], packages: Path, tmp_path: Path
) -> None:
    folder, layout = graphs
    lora = random_lora(layout, RANK)
    for action in ("load", "snapshot", "gradient"):
        said: list[str] = []
        trainer, _ = open_trainer("auto", folder, layout, RANK, packages, tmp_path / "artifacts", warn=said.append)
        trainer.load(Snapshot(lora))
        assert isinstance(trainer, FallbackTrainer) and trainer._first is not None
        worker(trainer._first).kill()
        if action == "load":
            trainer.load(Snapshot(2 * lora))
        elif action == "gradient":
            trainer.gradient(batches(1, 1.0)[0])
        assert np.array_equal(trainer.snapshot().lora, 2 * lora if action == "load" else lora)
        assert len(said) == 1
        trainer.close()


@needs_package
def test_a_chosen_trainer_is_that_one(graphs: tuple[Path, Layout], packages: Path, tmp_path: Path) -> None:
    folder, layout = graphs
    for choice, kind in ((NAME, OrtTrainingTrainer), ("onnx-step", OnnxStepTrainer)):
        trainer, why = open_trainer(choice, folder, layout, RANK, packages, tmp_path, warn=pytest.fail)
        assert type(trainer) is kind
        assert why == trainer.name == choice
        trainer.close()


def test_without_its_folder_auto_says_so_and_a_choice_is_refused(graphs: tuple[Path, Layout], tmp_path: Path) -> None:
    folder, layout = graphs
    rest = (folder, layout, RANK, tmp_path / "missing", tmp_path / "artifacts")
    trainer, why = open_trainer("auto", *rest, warn=pytest.fail)
    assert trainer.name == "onnx-step"
    assert why == "onnx-step (onnxruntime-training is not installed; omnidraft setup-training)"
    with pytest.raises(OmniDraftError, match=r"missing is missing; omnidraft setup-training makes it"):
        open_trainer(NAME, *rest, warn=pytest.fail)
    with pytest.raises(OmniDraftError, match="choose auto, onnxruntime-training, onnx-step"):
        open_trainer("torch", *rest, warn=pytest.fail)


@pytest.mark.parametrize("python", [None, "no-such-python"], ids=["an empty folder", "no interpreter"])
def test_a_folder_that_does_not_work_is_a_reason(
    python: str | None, graphs: tuple[Path, Layout], tmp_path: Path
) -> None:
    folder, layout = graphs
    (tmp_path / "packages").mkdir()
    interpreter = tmp_path / python if python else None
    rest = (folder, layout, RANK, tmp_path / "packages", tmp_path / "artifacts", interpreter)
    trainer, why = open_trainer("auto", *rest, warn=pytest.fail)
    reason = "cannot be started" if python else "run omnidraft setup-training"
    assert trainer.name == "onnx-step" and reason in why and "\n" not in why
    with pytest.raises(OmniDraftError, match=reason):
        open_trainer(NAME, *rest, warn=pytest.fail)


@needs_package
def test_damaged_bundles_name_the_file(graphs: tuple[Path, Layout], packages: Path, tmp_path: Path) -> None:
    _, layout = write_graphs(tmp_path)
    arguments = (tmp_path / LOSS, layout, RANK, packages, tmp_path / "artifacts")
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainerError, match=r"weights\.bin is too short"):
        OrtTrainingTrainer(*arguments)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(TrainerError, match=r"No such file.*weights\.bin"):
        OrtTrainingTrainer(*arguments)
    (tmp_path / LOSS).write_bytes(b"nonsense")
    with pytest.raises(TrainerError, match="prepare failed"):
        OrtTrainingTrainer(*arguments)
    (tmp_path / LOSS).unlink()
    with pytest.raises(TrainerError, match=r"loss\.onnx: no such file"):
        OrtTrainingTrainer(*arguments)


# Setting up


@needs_package
def test_setup_replaces_its_own_folder_only(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNIDRAFT_TRAINING_PYTHON", raising=False)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine too")
    for folder in ("precious", "file", "precious/thesis.txt"):
        with pytest.raises(OmniDraftError, match=f"{folder}: holds something else"):
            install(tmp_path / folder)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine too"
    assert default_python(packages) is None
    monkeypatch.setenv("OMNIDRAFT_TRAINING_PYTHON", "/somewhere/python3.8")
    assert default_python(packages) == Path("/somewhere/python3.8")


@needs_package
def test_a_failing_pip_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIP_CONFIG_FILE", os.devnull), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(name, value)
    with pytest.raises(OmniDraftError, match=r"pip could not install .*No matching distribution") as caught:
        install(tmp_path / "packages")
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_where_there_is_no_package_the_line_says_what_to_do() -> None:
    good = {"python": [3, 11], "kind": "CPython", "system": "linux", "machine": "x86_64", "glibc": True, "wide": True}
    assert unsupported(good) == ""
    assert unsupported({**good, "system": "darwin", "machine": "arm64", "glibc": False}) == ""
    for change in (
        {"python": [3, 13]}, {"python": [3, 7]}, {"kind": "PyPy"}, {"machine": "aarch64"}, {"glibc": False},
        {"system": "win32", "machine": "arm64"}, {"wide": False}, {"system": "emscripten"},
    ):  # fmt: skip
        why = unsupported({**good, **change})
        assert "--python" in why and "onnx-step needs nothing" in why and "\n" not in why
    with pytest.raises(OmniDraftError, match="not a Python that runs"):
        facts(Path("no-such-python"))


def test_the_version_is_the_same_everywhere() -> None:
    assert REQUIREMENTS[0] == f"onnxruntime-training-cpu=={VERSION}"
    assert all("==" in requirement for requirement in REQUIREMENTS)


def test_the_worker_is_a_script_of_its_own_that_python_3_8_reads() -> None:
    tree = ast.parse(Path(ort_training.ort_worker.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names <= {"numpy", "onnx", "onnxruntime"}


# A session with it


@pytest.fixture
def installed(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after setup-training, with a cache of its own."""
    monkeypatch.setenv("OMNIDRAFT_TRAINING_PACKAGES", str(packages))
    monkeypatch.delenv("OMNIDRAFT_TRAINING_PYTHON", raising=False)
    monkeypatch.setattr("omnidraft.adapters.learner.default_artifacts", lambda: tmp_path / "artifacts")


@needs_package
@pytest.mark.model
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, seed=3)], ids=["greedy", "sampled"])
def test_text_with_this_trainer_is_text_without(
    loaded: dict[str, Loaded], prompts: list[str], tmp_path: Path, sampling: Sampling
) -> None:
    asked = prompts[3:5] * 3
    plain = loaded["int8"].engine("off")
    expected = [generate(plain, prompt, sampling).tokens for prompt in asked]
    with learning(loaded["int8"], tmp_path / "state", trainer=NAME, interval=1) as learner:
        done = answer(learner, asked, sampling)
        assert learner.trainer_reason == NAME and learner.version > 0
        assert {version.trainer for version in learner.store.versions()} == {NAME}
    assert [report.tokens for report, _ in done] == expected
    with learning(loaded["int8"], tmp_path / "state", trainer="onnx-step", interval=1) as learner:
        ((report, learned),) = answer(learner, asked[:1], sampling)
    assert report.tokens == expected[0] and learned is not None, "the other trainer goes on from its weights"


@needs_package
@pytest.mark.model
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("choice", ["auto", NAME])
def test_a_worker_that_dies_in_a_session_is_one_line(
    loaded: dict[str, Loaded], prompts: list[str], tmp_path: Path, choice: str
) -> None:
    """Chosen by name it ends the session; with auto, onnx-step goes on."""
    said: list[str] = []
    with learning(loaded["int8"], tmp_path / "state", said.append, trainer=choice, interval=1) as learner:
        answer(learner, prompts[3:4])
        trainer = learner._trainer
        first = trainer._first if isinstance(trainer, FallbackTrainer) else trainer
        assert isinstance(first, OrtTrainingTrainer)
        worker(first).kill()
        if choice == NAME:
            with pytest.raises(OmniDraftError, match=r"^[^\n]*the worker died of signal 9[^\n]*$"):
                answer(learner, prompts[4:5])
            assert said == []
        else:
            answer(learner, prompts[4:5])
            assert len(said) == 1 and "onnx-step goes on" in said[0]
