"""onnxruntime-training in its worker: torch's gradients, onnx-step's steps, and what happens when it breaks."""

from __future__ import annotations

import ast
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from learning import VARIANTS, random_batch, random_lora, torch_gradient, write_graphs

from omnidraft.adapters import onnx_step, ort_training
from omnidraft.adapters.layout import Layout
from omnidraft.adapters.onnx_step import OnnxStepTrainer
from omnidraft.adapters.ort_training import MANIFEST, NAME, VERSION, OrtTrainingTrainer
from omnidraft.adapters.trainer import CLIP, Snapshot, Trainer, TrainerError
from omnidraft.adapters.trainers import FallbackTrainer, default_python, open_trainer
from omnidraft.export.training_graph import LOSS, STEP, WEIGHTS
from omnidraft.runtime.bundle import sha256
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.setup_training import REQUIREMENTS, facts, install, unsupported

RANK, RATE = 4, 1e-3
VOCABULARY = 300
WHY_NOT = unsupported(facts(Path(sys.executable)))
needs_package = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """onnxruntime-training, installed as setup-training does (some ten seconds)."""
    folder = tmp_path_factory.mktemp("training") / "packages"
    assert install(folder)["onnxruntime"] == VERSION
    return folder


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Layout]:
    folder = tmp_path_factory.mktemp("graphs")
    _, layout = write_graphs(folder, vocab_size=VOCABULARY)
    return folder, layout


@pytest.fixture
def start(packages: Path, graphs: tuple[Path, Layout], tmp_path: Path) -> Iterator[Callable[..., OrtTrainingTrainer]]:
    """Starts trainers of the small drafter, and ends them."""
    folder, layout = graphs
    made: list[OrtTrainingTrainer] = []

    def trainer(**options: Any) -> OrtTrainingTrainer:
        artifacts = options.pop("artifacts", tmp_path / "artifacts")
        made.append(OrtTrainingTrainer(folder / LOSS, layout, RANK, packages, artifacts, **options))
        return made[-1]

    yield trainer
    for one in made:
        one.close()


def scaled(batch: dict[str, Any], scale: float) -> dict[str, Any]:
    """The same batch with another weight, so another norm of the gradient."""
    return {**batch, "w_kl": batch["w_kl"] * np.float32(scale), "w_nll": batch["w_nll"] * np.float32(scale)}


def batches(count: int, *scales: float) -> list[dict[str, Any]]:
    return [scaled(random_batch(VOCABULARY, seed=i % 3), scales[i % len(scales)]) for i in range(count)]


def run(trainer: Trainer, work: list[dict[str, Any]]) -> list[float]:
    return [trainer.step(batch, RATE) for batch in work]


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def worker(trainer: OrtTrainingTrainer) -> subprocess.Popen[bytes]:
    return trainer._worker.process


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends within some seconds; one that waits for its parent to ask is gone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


# The numbers


@needs_package
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_gradients_are_torchs_and_those_of_onnx_step(overrides: dict[str, Any], packages: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model, layout = write_graphs(tmp_path, **overrides)
    batch, lora = random_batch(model.config.vocab_size), random_lora(layout, RANK)
    ours = OrtTrainingTrainer(tmp_path / LOSS, layout, RANK, packages, tmp_path / "artifacts")
    step = OnnxStepTrainer(tmp_path / STEP, layout, RANK)
    for trainer in (ours, step):
        trainer.load(Snapshot(lora))
    loss, exact = torch_gradient(model, layout, lora, batch)
    expected, found = layout.parameters(exact.astype(np.float32)), layout.parameters(ours.gradient(batch))
    twin = layout.parameters(step.gradient(batch))
    for name in expected:
        assert relative(found[name], expected[name]) <= 1e-4, name
        assert relative(found[name], twin[name]) <= 1e-4, name
    assert np.array_equal(ours.snapshot().lora, lora)
    assert ours.step(batch, 0.0) == pytest.approx(loss, rel=1e-5)
    ours.close()


@needs_package
def test_steps_are_those_of_onnx_step_clipped_or_not(
    graphs: tuple[Path, Layout], start: Callable[..., OrtTrainingTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, layout = graphs
    lora = random_lora(layout, RANK)
    ours, step = start(), OnnxStepTrainer(folder / STEP, layout, RANK)

    def weights(trainer: Trainer, work: list[dict[str, Any]]) -> tuple[list[float], np.ndarray]:
        trainer.load(Snapshot(lora))
        return run(trainer, work), trainer.snapshot().lora

    # Adam forgets a scale that all steps share, so clipping shows only where some steps are clipped.
    for scales in ((1.0,), (1.0, 40.0)):
        work = batches(20, *scales)
        step.load(Snapshot(lora))
        norms = [float(np.linalg.norm(step.gradient(batch))) for batch in work[:6]]
        assert any(norm > CLIP for norm in norms) == (len(scales) > 1)
        assert any(norm < CLIP for norm in norms)
        (expected, twin), (found, own) = weights(step, work), weights(ours, work)
        assert np.allclose(found, expected, rtol=1e-4, atol=0)
        assert np.abs(own - twin).max() <= 20 * RATE
        assert np.median(np.abs(own - twin)) <= 1e-3 * RATE
    monkeypatch.setattr(onnx_step, "CLIP", 1e9)
    unclipped, other = weights(step, work)
    assert not np.allclose(unclipped, expected, rtol=1e-4, atol=0), "clipping changes nothing here"
    assert np.median(np.abs(other - twin)) > 0.1 * RATE


@needs_package
def test_the_loss_falls_and_the_frozen_weights_stay(
    graphs: tuple[Path, Layout], start: Callable[..., OrtTrainingTrainer]
) -> None:
    before = sha256(graphs[0] / WEIGHTS)
    losses = run(start(), batches(1, 1.0) * 30)
    assert losses[-1] < 0.95 * losses[0]
    assert sha256(graphs[0] / WEIGHTS) == before


@needs_package
def test_a_gradient_changes_nothing(start: Callable[..., OrtTrainingTrainer]) -> None:
    trainer, work = start(), batches(6, 1.0)
    expected = run(trainer, work)
    trainer.load(Snapshot(trainer._layout.initial(RANK)))
    found = []
    for batch in work:
        assert np.array_equal(trainer.gradient(batch), trainer.gradient(batch))
        found.append(trainer.step(batch, RATE))
    assert found == expected


# Snapshots


@needs_package
@pytest.mark.parametrize(("scales", "slack"), [((1.0,), 0.0), ((1.0, 40.0), 1e-2 * RATE)], ids=["", "clipped"])
def test_a_snapshot_goes_on_as_if_nothing_had_happened(
    scales: tuple[float, ...], slack: float, start: Callable[..., OrtTrainingTrainer]
) -> None:
    """Bit for bit; a clipped step sums its norm in an order that depends on where memory lies."""
    trainer, work = start(), batches(10, *scales)
    run(trainer, work[:5])
    middle = trainer.snapshot()
    run(trainer, work[5:])
    end = trainer.snapshot()
    other = start()
    for again in (trainer, other):
        again.load(middle)
        assert np.array_equal(again.snapshot().lora, middle.lora)
        run(again, work[5:])
        assert np.abs(again.snapshot().lora - end.lora).max() <= slack
        assert again.snapshot().steps == end.steps == 10
    trainer.load(Snapshot(middle.lora, middle.steps))
    run(trainer, work[5:])
    assert np.abs(trainer.snapshot().lora - end.lora).max() > 0.1 * RATE, "the moments change nothing here"


@needs_package
def test_a_snapshot_of_the_other_trainer_begins_moments_anew(
    graphs: tuple[Path, Layout], start: Callable[..., OrtTrainingTrainer]
) -> None:
    trainer, step = start(), OnnxStepTrainer(graphs[0] / STEP, graphs[1], RANK)
    work = batches(4, 1.0)
    for first, second in ((step, trainer), (trainer, step)):
        run(first, work)
        foreign = first.snapshot()
        second.load(foreign)
        found = run(second, work), second.snapshot()
        second.load(Snapshot(foreign.lora))
        assert found[0] == run(second, work)
        assert np.array_equal(found[1].lora, second.snapshot().lora)
        assert found[1].steps == len(work)


@needs_package
def test_a_damaged_or_foreign_snapshot_is_refused_and_changes_nothing(start: Callable[..., OrtTrainingTrainer]) -> None:
    trainer, batch = start(), batches(1, 1.0)[0]
    trainer.step(batch, RATE)
    good = trainer.snapshot()
    for optimizer in (b"nonsense", good.optimizer[: len(good.optimizer) // 2]):
        with pytest.raises(TrainerError, match="load failed"):
            trainer.load(Snapshot(good.lora, 1, NAME, optimizer))
    with pytest.raises(ValueError, match="rank 8, not 4"):
        trainer.load(Snapshot(np.tile(good.lora, 2)))
    assert np.array_equal(trainer.snapshot().lora, good.lora)
    after = trainer.step(batch, RATE)
    trainer.load(good)
    assert trainer.step(batch, RATE) == after


# What breaks


@needs_package
def test_a_batch_that_fits_nothing_is_one_line_and_harmless(start: Callable[..., OrtTrainingTrainer]) -> None:
    trainer, batch = start(), batches(1, 1.0)[0]
    for bad in ({**batch, "labels": batch["labels"][:2]}, {"input_ids": batch["input_ids"]}):
        with pytest.raises(TrainerError, match="step failed") as caught:
            trainer.step(bad, RATE)
        assert "\n" not in str(caught.value)
    assert trainer.step(batch, RATE) == start().step(batch, RATE)


@needs_package
def test_a_worker_that_was_killed_is_one_line(start: Callable[..., OrtTrainingTrainer]) -> None:
    trainer, batch = start(), batches(1, 1.0)[0]
    trainer.step(batch, RATE)
    worker(trainer).kill()
    actions: list[Callable[[], Any]] = [
        lambda: trainer.step(batch, RATE),
        lambda: trainer.gradient(batch),
        trainer.snapshot,
        lambda: trainer.load(Snapshot(trainer.weights)),
    ]
    for action in actions:
        with pytest.raises(TrainerError, match="the worker died of signal 9") as caught:
            action()
        assert "\n" not in str(caught.value)
    trainer.close()
    with pytest.raises(TrainerError, match="closed"):
        trainer.step(batch, RATE)


@needs_package
@pytest.mark.skipif(os.name != "posix", reason="stops a process with a signal")
def test_a_worker_that_is_killed_or_hangs_during_a_step(start: Callable[..., OrtTrainingTrainer]) -> None:
    batch = batches(1, 1.0)[0]
    trainer = start()
    worker(trainer).send_signal(signal.SIGSTOP)
    threading.Timer(0.5, worker(trainer).kill).start()
    with pytest.raises(TrainerError, match="died of signal 9"):
        trainer.step(batch, RATE)
    hanging = start(seconds=5.0)
    worker(hanging).send_signal(signal.SIGSTOP)
    with pytest.raises(TrainerError, match="no answer for 5 s"):
        hanging.step(batch, RATE)
    assert is_gone(worker(hanging).pid)


@needs_package
@pytest.mark.skipif(os.name != "posix", reason="sessions and signals are POSIX's")
def test_the_worker_leaves_with_its_parent_and_knows_no_terminal(
    graphs: tuple[Path, Layout], packages: Path, start: Callable[..., OrtTrainingTrainer], tmp_path: Path
) -> None:
    assert os.getsid(worker(start()).pid) != os.getsid(0)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom omnidraft.adapters.ort_training import Worker\n"
        f"worker = Worker(Path({str(packages)!r}))\nworker.call('versions')\n"
        "print(worker.process.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert is_gone(pid)


@needs_package
def test_damaged_artifacts_are_made_again(start: Callable[..., OrtTrainingTrainer], tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    expected = run(start(), batches(3, 1.0))
    (folder,) = (path for path in artifacts.iterdir() if path.is_dir())
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted([*ort_training.ort_worker.FILES, MANIFEST])
    damages: list[Callable[[bytes], bytes]] = [lambda good: good[:-1], lambda good: bytes([good[0] ^ 1]) + good[1:]]
    for name, damage in zip(files, itertools.cycle(damages), strict=False):
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        assert run(start(), batches(3, 1.0)) == expected, name
        assert sorted(path.name for path in folder.iterdir()) == files
    (folder / ort_training.ort_worker.TRAINING).unlink()
    assert run(start(), batches(3, 1.0)) == expected
    left = artifacts / ".making-left-by-a-kill"
    left.mkdir()
    (folder / MANIFEST).unlink()
    stamp = folder.stat().st_mtime_ns
    start()
    assert not left.exists()
    assert folder.stat().st_mtime_ns != stamp
    stamp = folder.stat().st_mtime_ns
    start()
    assert folder.stat().st_mtime_ns == stamp, "what is whole is used"


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


# Which trainer runs


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
    before = run(trainer, work[:3])
    at_death = trainer.snapshot()
    assert trainer._first is not None
    worker(trainer._first).kill()
    after = run(trainer, work[3:])
    assert trainer.name == trainer.snapshot().trainer == "onnx-step"
    assert len(said) == 1 and "signal 9" in said[0] and "onnx-step goes on" in said[0] and "\n" not in said[0]
    twin = OnnxStepTrainer(folder / STEP, layout, RANK)
    assert run(twin, work[:3]) == pytest.approx(before, rel=1e-4)
    twin.load(Snapshot(at_death.lora))
    assert run(twin, work[3:]) == after
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
