"""onnxruntime-training in its worker: torch's gradients, onnx-step's steps, and what happens when it breaks."""

from __future__ import annotations

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
from learning import (
    RANK,
    RATE,
    VARIANTS,
    batches,
    needs_package,
    random_batch,
    random_lora,
    relative,
    take,
    torch_gradient,
    worker,
    write_graphs,
)  # fmt: skip

from omnidraft.adapters import onnx_step, ort_training
from omnidraft.adapters.layout import Layout
from omnidraft.adapters.onnx_step import OnnxStepTrainer
from omnidraft.adapters.ort_training import MANIFEST, NAME, OrtTrainingTrainer
from omnidraft.adapters.trainer import CLIP, Snapshot, Trainer, TrainerError
from omnidraft.export.training_graph import LOSS, STEP, WEIGHTS
from omnidraft.runtime.bundle import sha256


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
        return take(trainer, work), trainer.snapshot().lora

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
    losses = take(start(), batches(1, 1.0) * 30)
    assert losses[-1] < 0.95 * losses[0]
    assert sha256(graphs[0] / WEIGHTS) == before


@needs_package
def test_a_gradient_changes_nothing(start: Callable[..., OrtTrainingTrainer]) -> None:
    trainer, work = start(), batches(6, 1.0)
    expected = take(trainer, work)
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
    take(trainer, work[:5])
    middle = trainer.snapshot()
    take(trainer, work[5:])
    end = trainer.snapshot()
    other = start()
    for again in (trainer, other):
        again.load(middle)
        assert np.array_equal(again.snapshot().lora, middle.lora)
        take(again, work[5:])
        assert np.abs(again.snapshot().lora - end.lora).max() <= slack
        assert again.snapshot().steps == end.steps == 10
    trainer.load(Snapshot(middle.lora, middle.steps))
    take(trainer, work[5:])
    assert np.abs(trainer.snapshot().lora - end.lora).max() > 0.1 * RATE, "the moments change nothing here"


@needs_package
def test_a_snapshot_of_the_other_trainer_begins_moments_anew(
    graphs: tuple[Path, Layout], start: Callable[..., OrtTrainingTrainer]
) -> None:
    trainer, step = start(), OnnxStepTrainer(graphs[0] / STEP, graphs[1], RANK)
    work = batches(4, 1.0)
    for first, second in ((step, trainer), (trainer, step)):
        take(first, work)
        foreign = first.snapshot()
        second.load(foreign)
        found = take(second, work), second.snapshot()
        second.load(Snapshot(foreign.lora))
        assert found[0] == take(second, work)
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
    expected = take(start(), batches(3, 1.0))
    (folder,) = (path for path in artifacts.iterdir() if path.is_dir())
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted([*ort_training.ort_worker.FILES, MANIFEST])
    damages: list[Callable[[bytes], bytes]] = [lambda good: good[:-1], lambda good: bytes([good[0] ^ 1]) + good[1:]]
    for name, damage in zip(files, itertools.cycle(damages), strict=False):
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        assert take(start(), batches(3, 1.0)) == expected, name
        assert sorted(path.name for path in folder.iterdir()) == files
    (folder / ort_training.ort_worker.TRAINING).unlink()
    assert take(start(), batches(3, 1.0)) == expected
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
