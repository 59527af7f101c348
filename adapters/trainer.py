"""What a trainer is: something that takes one AdamW step on the LoRA vector for a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omnidraft.adapters.layout import Floats

Batch = Mapping[str, NDArray[Any]]
"""Inputs of the training graphs by name, without the LoRA parameters (see `batch.py`)."""
CLIP = 1.0  # norm of the gradient of a step, which is a mean over positions


@dataclass(frozen=True)
class Snapshot:
    """Where training stands: the LoRA vector, and the optimizer's state in the form of one trainer.

    `optimizer` may be empty: the moments begin anew then, as they do in a trainer of another name. `head`: the
    acceptance head that learned with these weights, None for the drafter's own; trainers leave it alone.
    """

    lora: Floats
    steps: int = 0
    trainer: str = ""
    optimizer: bytes = b""
    head: Mapping[str, Floats] | None = None


class TrainerError(Exception):
    """A trainer cannot start, or has died; the message is one line for the user."""


class Trainer(Protocol):
    """One drafter's trainer. Both that exist give the same gradients and the same loss."""

    name: str

    @property
    def weights(self) -> Floats:
        """The LoRA vector after the last step; not to be changed."""
        ...

    def step(self, batch: Batch, rate: float) -> float:
        """One step at a learning rate; returns the batch's loss before it. Raises TrainerError."""
        ...

    def gradient(self, batch: Batch) -> Floats:
        """Gradient of the loss by the LoRA vector, not clipped; nothing changes. Raises TrainerError."""
        ...

    def load(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot."""
        ...

    def snapshot(self) -> Snapshot:
        """Where training stands (a copy)."""
        ...

    def close(self) -> None:
        """Free what it holds. It cannot be used afterwards."""
        ...


def pack_moments(first: Floats, second: Floats) -> bytes:
    """AdamW's moments as `Snapshot.optimizer` of onnx-step."""
    return np.stack([first, second]).astype("<f4").tobytes()


def unpack_moments(data: bytes, size: int) -> tuple[Floats, Floats]:
    """What `pack_moments` packed; zeros for empty data. Raises ValueError for another length."""
    if not data:
        return np.zeros(size, np.float32), np.zeros(size, np.float32)
    first, second = np.frombuffer(data, "<f4").reshape(2, size).astype(np.float32)
    return first, second
