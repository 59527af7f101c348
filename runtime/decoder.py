"""A causal language model on ONNX Runtime with one KV buffer that is never copied.

The graph's past and present are the same memory (GroupQueryAttention's shared buffer), so that
rolling back is setting a length. One IOBinding lives as long as the buffer: binding sixty tensors
anew at every step would cost a tenth of a drafter's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort

from omnidraft.runtime.causal_model import CausalModel
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.placement import Wish, first_line, open_session, session_options

GROW = 256  # KV rows are reserved in multiples of this
MOST_ROW, MOST_WIDE = 4 << 20, 2_000_000  # numbers in a KV row of all layers, and in a row of an output
MOST_KEPT = 24  # widest pass whose arrays are kept: those of rounds; a prefill chunk is too large
ANYWHERE = Wish()


class Decoder:
    """Runs rows of tokens behind a past of `length` committed rows (batch size 1)."""

    widths: tuple[int, ...] = ()  # see CausalModel

    def __init__(self, model: Path, threads: int = 1, wish: Wish = ANYWHERE) -> None:
        """Load a graph; `placed` says where it runs. Raises OmniDraftError if it cannot be loaded, or not as wished."""
        self._session, self.placed = open_session(model, partial(session_options, threads), wish)
        inputs = {i.name: i for i in self._session.get_inputs()}
        outputs = {o.name: o for o in self._session.get_outputs()}
        if not _decodes({n: i.shape for n, i in inputs.items()}, {n: o.shape for n, o in outputs.items()}):
            raise OmniDraftError(f"{model}: not a decoder's graph, or one of impossible sizes; export again")
        self.vocabulary = int(outputs["logits"].shape[-1])
        self.lora_names = tuple(i.name for i in self._session.get_overridable_initializers() if ".lora_" in i.name)
        self._past = {n: tuple(i.shape[d] for d in (1, 3)) for n, i in inputs.items() if n.startswith("past_key")}
        self._hidden_size = int(outputs["hidden_states"].shape[-1]) if "hidden_states" in outputs else 0
        self.owner: object = None  # whose rows the buffer holds
        self.fed: list[int] = []  # see CausalModel
        self._parameters: Mapping[str, np.ndarray] | None = None
        self._adapter: dict[str, ort.OrtValue] = {}
        self._kv: dict[str, ort.OrtValue] = {}
        self._rows = self._arrays(MOST_KEPT)  # all widths share them: one array each would be 300 rows of logits
        self._widths: dict[int, dict[str, tuple[np.ndarray, Any]]] = {}
        self.hidden: np.ndarray | None = None
        self.seconds = 0.0
        self.length = 0
        self.capacity = 0
        self.reserve(GROW)

    @property
    def kv(self) -> dict[str, tuple[int, ...]]:
        """(heads, head size) of each past key and value, by its input's name."""
        return dict(self._past)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows of past, which keeps its rows; a smaller wish is no work."""
        if capacity <= self.capacity:
            return
        self.capacity = -(-capacity // GROW) * GROW
        self._binding = self._session.io_binding()
        self._width = 0
        self._mask = np.ones((1, self.capacity), np.int64)
        for name, (heads, size) in self._past.items():
            rows = np.zeros((1, heads, self.capacity, size), np.float32)
            if self.length:
                rows[:, :, : self.length] = self._kv[name].numpy()[:, :, : self.length]
            self._kv[name] = value = ort.OrtValue.ortvalue_from_numpy(rows)
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        self._bind_adapter()

    def run(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Feed m tokens behind the past; the past grows by m.

        Returns float32 logits [m, V], a view that the next run overwrites; `hidden` is then the
        matching [m, H], if the graph gives it. Raises ValueError for no token or a full buffer, OmniDraftError if the
        provider fails.
        """
        m = len(ids)
        total = self.length + m
        if m == 0 or total > self.capacity:
            raise ValueError(f"{m} rows behind {self.length} do not fit {self.capacity}")
        if m != self._width:
            self._bind_width(m)
        self._ids[0] = ids
        self.fed[self.length :] = ids
        self._binding.bind_cpu_input("attention_mask", self._mask[:, :total])
        begin = perf_counter()
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime raises many types, all with one message
            raise OmniDraftError(f"{self.placed.actual} failed in a pass ({first_line(error)}); try --ep cpu") from None
        self.seconds += perf_counter() - begin
        self.length = total
        return self._logits[0]

    def rollback(self, length: int) -> None:
        """Forget every row after the first `length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back from {self.length} rows to {length}")
        self.length = length

    def set_adapter(self, parameters: Mapping[str, np.ndarray] | None) -> None:
        """Use LoRA parameters (lora_A [in, r], lora_B [r, out], float32) from the next run on; None for none.

        The mapping in use already is no work. Past rows were computed with the weights before, so the past is
        emptied. They are bound as inputs because `run_with_iobinding` ignores ONNX Runtime's active adapters.
        Raises OmniDraftError if the names are not those of the graph.
        """
        if parameters is not None and set(parameters) != set(self.lora_names):
            raise OmniDraftError("the adapter's layers are not those of this drafter; it belongs to another one")
        if parameters is self._parameters:
            return
        self._parameters = parameters
        self._adapter = {
            name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value, np.float32))
            for name, value in (parameters or {}).items()
        }
        capacity, self.capacity, self.length = self.capacity, 0, 0
        self.reserve(capacity)

    def _bind_adapter(self) -> None:
        for name, value in self._adapter.items():
            self._binding.bind_ortvalue_input(name, value)

    def _arrays(self, m: int) -> dict[str, np.ndarray]:
        """What passes of up to m rows read and write beside the past, one row after the other."""
        arrays: dict[str, np.ndarray] = {
            "input_ids": np.empty(m, np.int64),
            "logits": np.empty((m, self.vocabulary), np.float32),
        }
        if self._hidden_size:
            arrays["hidden_states"] = np.empty((m, self._hidden_size), np.float32)
        return arrays

    def _bind_width(self, m: int) -> None:
        """Bind arrays for passes of m rows; they stay bound while the width stays."""
        made = self._widths.get(m)
        if made is None:
            arrays = self._rows if m <= MOST_KEPT else self._arrays(m)
            views = {name: array[None, :m] for name, array in arrays.items()}
            made = {name: (view, ort.OrtValue.ortvalue_from_numpy(view)) for name, view in views.items()}
            if m <= MOST_KEPT:
                self._widths[m] = made
        for name, (_, value) in made.items():
            bind = self._binding.bind_ortvalue_input if name == "input_ids" else self._binding.bind_ortvalue_output
            bind(name, value)
        self._width = m
        self._ids, self._logits = made["input_ids"][0], made["logits"][0]
        self.hidden = made["hidden_states"][0][0] if self._hidden_size else None


def _decodes(inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, Sequence[Any]]) -> bool:
    """Whether shapes by name are those that `Decoder` feeds and reads, within bounds that any model keeps."""
    past = {name: shape for name, shape in inputs.items() if name.startswith("past_key")}
    sizes = [shape[axis] for shape in past.values() if len(shape) == 4 for axis in (1, 3)]
    wide = [outputs[name][-1] for name in ("logits", "hidden_states") if outputs.get(name)]
    return (
        inputs.keys() - past.keys() == {"input_ids", "attention_mask"}
        and "logits" in outputs
        and {name.replace("past_key_values", "present") for name in past} <= outputs.keys()
        and len(sizes) == 2 * len(past)
        and all(isinstance(size, int) and 0 < size <= MOST_WIDE for size in [*sizes, *wide])
        and sum(heads * size for heads, size in zip(sizes[::2], sizes[1::2], strict=True)) <= MOST_ROW
    )


def prefill(decoder: CausalModel, ids: Sequence[int], chunk: int, least: int) -> np.ndarray:
    """Feed what the past lacks of a prompt, in fixed chunks, and return the logits [V] of its last token.

    The chunks depend on the lengths of prompt and past only, and none has fewer than `least` rows (the last
    takes rows from the one before, a prompt of one token gets a pad row that is then forgotten):
    a one-row attention block would take another kernel (DESIGN.md, two-row rule). Needs
    chunk ≥ 2 · least, so that the chunk that gives rows away keeps enough.
    """
    ids = list(ids[decoder.length :])
    starts = list(range(0, len(ids), chunk))
    if len(starts) > 1 and len(ids) - starts[-1] < least:
        starts[-1] = len(ids) - least
    for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        rows = ids[begin:end]
        padding = [rows[-1]] * max(0, least - len(rows))
        logits = decoder.run(rows + padding)
        decoder.rollback(decoder.length - len(padding))
    return logits[len(rows) - 1].copy()
