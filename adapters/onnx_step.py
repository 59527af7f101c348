"""The trainer that runs anywhere: forward, backward and AdamW as one ordinary graph on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from omnidraft.adapters.layout import Floats, Layout
from omnidraft.adapters.trainer import CLIP, Batch, Snapshot, TrainerError, pack_moments, unpack_moments

BETAS = (0.9, 0.999)  # those of the graph
LARGE = 64 << 20  # bytes of frozen weights from which memory counts more than speed


class OnnxStepTrainer:
    """Runs step.onnx of a bundle on the CPU execution provider."""

    name = "onnx-step"

    def __init__(self, graph: Path, layout: Layout, rank: int, threads: int = 1) -> None:
        """Raises TrainerError if ONNX Runtime cannot load the graph."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.enable_mem_pattern = False  # a plan would be kept for every shape, and nearly every batch has a new one
        options.enable_cpu_mem_arena = False  # it would keep what the largest batch needed; as quick without
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if (graph.parent / "weights.bin").stat().st_size > LARGE:
            # A sixth slower, but no second copy of the frozen weights.
            options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises many types
            raise TrainerError(f"{graph}: ONNX Runtime cannot load it ({str(error).splitlines()[0]})") from None
        self._steps = 0
        self.load(Snapshot(layout.initial(rank)))

    @property
    def weights(self) -> Floats:
        """See Trainer."""
        return self._lora

    def step(self, batch: Batch, rate: float) -> float:
        """See Trainer."""
        loss, self._lora, self._first, self._second = self._run(
            ["loss", "lora_out", "moment_1_out", "moment_2_out"], batch, self._steps + 1, rate
        )
        self._steps += 1
        return float(loss)

    def gradient(self, batch: Batch) -> Floats:
        """See Trainer."""
        gradient: Floats = self._run(["grad"], batch, 1, 0.0)[0]
        return gradient

    def load(self, snapshot: Snapshot) -> None:
        """See Trainer."""
        own = snapshot.trainer == self.name
        self._lora, self._steps = snapshot.lora.astype(np.float32), snapshot.steps if own else 0
        self._first, self._second = unpack_moments(snapshot.optimizer if own else b"", len(self._lora))

    def snapshot(self) -> Snapshot:
        """See Trainer."""
        return Snapshot(self._lora.copy(), self._steps, self.name, pack_moments(self._first, self._second))

    def close(self) -> None:
        """See Trainer."""
        del self._session

    def _run(self, outputs: list[str], batch: Batch, step: int, rate: float) -> list[np.ndarray]:
        feeds = {
            **batch, "lora": self._lora, "moment_1": self._first, "moment_2": self._second,
            "correction": np.array([1 - beta**step for beta in BETAS], np.float32),
            "rate": np.array([rate], np.float32), "clip": np.array([CLIP], np.float32),
        }  # fmt: skip
        try:
            found: list[np.ndarray] = self._session.run(outputs, feeds)
        except Exception as error:  # ONNX Runtime raises many types
            raise TrainerError(f"{self.name}: the step failed ({str(error).splitlines()[0]})") from None
        return found
