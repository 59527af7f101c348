"""Which trainer runs: the one asked for, or the first that can, with the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import platformdirs

from omnidraft.adapters.layout import Floats, Layout
from omnidraft.adapters.onnx_step import OnnxStepTrainer
from omnidraft.adapters.ort_training import NAME, VERSION, OrtTrainingTrainer
from omnidraft.adapters.trainer import Batch, Snapshot, Trainer, TrainerError
from omnidraft.runtime.errors import OmniDraftError

TRAINERS = ("auto", NAME, OnnxStepTrainer.name)
LOSS, STEP = "loss.onnx", "step.onnx"
SETUP = "omnidraft-setup.json"
"""Written into the package folder by setup-training: {"python": the interpreter it is for, null for our own}."""

T = TypeVar("T")


def default_packages() -> Path:
    """Where setup-training installs: OMNIDRAFT_TRAINING_PACKAGES, or the platform's folder for data."""
    named = os.environ.get("OMNIDRAFT_TRAINING_PACKAGES")
    return Path(named) if named else platformdirs.user_data_path("omnidraft", appauthor=False) / f"{NAME}-{VERSION}"


def default_artifacts() -> Path:
    """A cache of what onnxruntime-training derives from a bundle's loss.onnx."""
    return platformdirs.user_cache_path("omnidraft", appauthor=False) / "training"


def default_python(packages: Path) -> Path | None:
    """The worker's interpreter: OMNIDRAFT_TRAINING_PYTHON, or the one that setup-training was given; None: our own."""
    named = os.environ.get("OMNIDRAFT_TRAINING_PYTHON")
    if not named:
        try:
            named = json.loads((packages / SETUP).read_text(encoding="utf-8"))["python"]
        except (OSError, ValueError, LookupError, TypeError):
            return None  # a folder that was unpacked by hand
    return Path(named) if named else None


def open_trainer(
    choice: str, folder: Path, layout: Layout, rank: int, packages: Path, artifacts: Path,
    python: Path | None = None, *, warn: Callable[[str], None], threads: int = 1,
) -> tuple[Trainer, str]:  # fmt: skip
    """The trainer, and in a few words which it is and why.

    `folder` is drafter/training of a bundle. With `auto`, a worker that dies later is replaced too, and `warn` gets
    one line about it. Raises OmniDraftError for a choice that cannot run.
    """
    if choice not in TRAINERS:
        raise OmniDraftError(f"trainer {choice!r} is not known; choose {', '.join(TRAINERS)}")

    def plain() -> OnnxStepTrainer:
        return OnnxStepTrainer(folder / STEP, layout, rank, threads)

    try:
        if choice == OnnxStepTrainer.name:
            return plain(), choice
        if choice == "auto" and not packages.is_dir():
            return plain(), f"{OnnxStepTrainer.name} ({NAME} is not installed; omnidraft setup-training)"
        python = python or default_python(packages)
        try:
            derived = OrtTrainingTrainer(folder / LOSS, layout, rank, packages, artifacts, python, threads)
        except TrainerError as error:
            if choice == NAME:
                raise
            return plain(), f"{OnnxStepTrainer.name} ({error})"
        return derived if choice == NAME else FallbackTrainer(derived, plain, warn), NAME
    except TrainerError as error:
        raise OmniDraftError(str(error)) from None


class FallbackTrainer:
    """onnxruntime-training until it fails; then onnx-step, from the weights of the last step that succeeded."""

    def __init__(
        self, first: OrtTrainingTrainer, second: Callable[[], OnnxStepTrainer], warn: Callable[[str], None]
    ) -> None:
        self._first: OrtTrainingTrainer | None = first
        self._trainer: Trainer = first
        self._second, self._warn = second, warn
        self.name = first.name  # that of the trainer that runs

    @property
    def weights(self) -> Floats:
        """See Trainer."""
        return self._trainer.weights

    def step(self, batch: Batch, rate: float) -> float:
        """See Trainer."""
        return self._try(lambda trainer: trainer.step(batch, rate))

    def gradient(self, batch: Batch) -> Floats:
        """See Trainer."""
        return self._try(lambda trainer: trainer.gradient(batch))

    def load(self, snapshot: Snapshot) -> None:
        """See Trainer."""
        self._try(lambda trainer: trainer.load(snapshot))

    def snapshot(self) -> Snapshot:
        """See Trainer."""
        return self._try(lambda trainer: trainer.snapshot())

    def close(self) -> None:
        """See Trainer."""
        self._trainer.close()

    def _try(self, action: Callable[[Trainer], T]) -> T:
        try:
            return action(self._trainer)
        except TrainerError as error:
            if self._first is None:
                raise
            weights = self._first.weights
            self._first.close()
            self._trainer, self._first = self._second(), None
            self._trainer.load(Snapshot(weights))
            self.name = self._trainer.name
            self._warn(f"{error}; {self.name} goes on from the last weights, with new moments")
            return action(self._trainer)
