"""A target in batches of rows of unequal length: its ONNX graph on the CPU, its checkpoint in torch on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from omnidraft.export.libraries import quiet
from omnidraft.export.sources import Source

# What a device runs by default, and in batches the fastest on processors with VNNI; elsewhere no slower than fp32.
PRECISION = "int8"


class Network(Protocol):
    """Rows of tokens behind a past of their own. `most`: rows worth running at once; `room`: bytes for logits."""

    vocabulary: int
    most: int
    room: int

    def begin(self, rows: int, capacity: int) -> None:
        """Forget the past; make room for `rows` sequences of `capacity` tokens."""

    def run(self, ids: np.ndarray, lengths: np.ndarray) -> Any:
        """Feed int64 [B, S] of which the first `lengths` [B] of each row count; only the first run may pad.

        Returns float32 logits [B, S, V], a torch tensor on the device that lives until the next run.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""


def rows_at_once(network: Network, length: int) -> int:
    """How many rows of `length` tokens a run may have, for its logits to fit."""
    return max(1, min(network.most, network.room // (4 * network.vocabulary * max(length, 1))))


def load_network(source: Source, device: str, threads: int) -> Network:
    """The target on "cpu" (`threads` of it) or "cuda". Both give the same logits up to rounding."""
    if device == "cpu":
        from omnidraft.export.target import MODEL, build_target

        return OnnxNetwork(build_target(source, PRECISION) / MODEL, threads)
    return TorchNetwork(source, device)


class OnnxNetwork:
    """The graph that export builds. GroupQueryAttention takes each row's length from the sum of its mask."""

    def __init__(self, model: Path, threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._ort, self._session = ort, ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        past = [i for i in self._session.get_inputs() if i.name.startswith("past_key")]
        self._past = {i.name: (i.shape[1], i.shape[3]) for i in past}
        self.vocabulary = int(next(o for o in self._session.get_outputs() if o.name == "logits").shape[-1])
        self.most, self.room = 64, 3 << 30

    def begin(self, rows: int, capacity: int) -> None:
        """See Network."""
        self._lengths = np.zeros(rows, np.int64)
        self._kv = {n: np.zeros((rows, h, capacity, s), np.float32) for n, (h, s) in self._past.items()}
        self._bind()

    def run(self, ids: np.ndarray, lengths: np.ndarray) -> Any:
        """See Network."""
        import torch

        self._lengths = self._lengths + lengths
        mask = (np.arange(self._lengths.max()) < self._lengths[:, None]).astype(np.int64)
        self._logits = np.empty((*ids.shape, self.vocabulary), np.float32)
        self._binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids))
        self._binding.bind_cpu_input("attention_mask", mask)
        value = self._ort.OrtValue.ortvalue_from_numpy(self._logits)
        self._binding.bind_ortvalue_output("logits", value)
        self._session.run_with_iobinding(self._binding)
        return torch.from_numpy(self._logits)

    def keep(self, rows: Sequence[int]) -> None:
        """See Network."""
        index = list(rows)
        self._lengths = self._lengths[index]
        for name in list(self._kv):  # one at a time: both copies of all layers would be twice the memory
            self._kv[name] = self._kv[name][index]
        self._bind()

    def _bind(self) -> None:
        self._binding = self._session.io_binding()
        self._values = {name: self._ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._kv.items()}
        for name, value in self._values.items():
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)


class TorchNetwork:
    """The checkpoint in transformers, in float32: what the padding of a shorter row holds is masked out."""

    def __init__(self, source: Source, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        with quiet():
            model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
        self._model, self._device = model.to(device).eval(), device
        self.vocabulary = int(source.vocabulary)
        self.most, self.room = 512, 16 << 30

    def begin(self, rows: int, capacity: int) -> None:
        """See Network; the cache of transformers grows by itself."""
        import torch
        from transformers import DynamicCache

        self._cache = DynamicCache()
        self._mask = torch.zeros((rows, 0), dtype=torch.int64, device=self._device)

    def run(self, ids: np.ndarray, lengths: np.ndarray) -> Any:
        """See Network."""
        import torch

        fresh = torch.arange(ids.shape[1], device=self._device)
        before = self._mask.sum(1, keepdim=True)
        real = fresh < torch.from_numpy(lengths).to(self._device)[:, None]
        self._mask = torch.cat([self._mask, real.to(torch.int64)], 1)
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.from_numpy(ids).to(self._device),
                attention_mask=self._mask,
                position_ids=before + fresh,
                cache=self._cache,
                use_cache=True,
            )
        return out.logits.float()

    def keep(self, rows: Sequence[int]) -> None:
        """See Network."""
        import torch

        index = torch.tensor(list(rows), device=self._device)
        self._cache.batch_select_indices(index)
        self._mask = self._mask[index]
