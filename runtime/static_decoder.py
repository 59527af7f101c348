"""A causal language model as graphs of fixed shapes, one for each width, for devices that run nothing else.

The host owns the past: one buffer [1, heads, C, D] for each key and value, bound to every graph, in which slot p
holds position p. A pass of m rows takes the narrowest graph that holds them and pads with copies of its last token;
only the m real rows are written to the buffer, so rolling back is setting a length, and nothing is ever moved.

C is all there is: a window that slid on would forget, and its text would not be that of other graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort

from omnidraft.runtime.causal_model import CausalModel
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.placement import Wish, first_line, open_session, session_options

PARTS = ("key", "value")
PASTS, ROWS = (37, 150), 17  # rows that are compared, and the pasts they stand behind
ANYWHERE = Wish()


class StaticDecoder:
    """Runs rows of tokens behind a past of `length` committed rows (batch size 1); used as `Decoder` is."""

    def __init__(self, folder: Path, description: Mapping[str, Any], threads: int = 1, wish: Wish = ANYWHERE) -> None:
        """Load every width of what `write_static` or `quantize_static` described.

        Raises OmniDraftError if ONNX Runtime cannot, or if a graph is not the one that is described.
        """
        self.description = description
        self.context = int(description["context"])
        self.vocabulary = int(description["vocabulary"])
        opened = {
            int(width): open_session(folder / name, partial(session_options, threads), wish)
            for width, name in description["widths"].items()
        }
        for width, (session, _) in opened.items():
            _check(folder / description["widths"][str(width)], session, width, description)
        self._masked = np.float32(description["masked"])
        self._cos, self._sin = rotary_tables(description)
        self._at = np.arange(self.context, dtype=np.int32)
        past = (1, description["kv_heads"], self.context, description["head_size"])
        self._past = {name: np.zeros(past, np.float32) for name in _past_names(description)}
        bound = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._past.items()}
        self._graphs = [_Graph(opened[width][0], width, bound) for width in sorted(opened)]
        placed = [where for _, where in opened.values()]
        self.placed = next((where for where in placed if where.why), placed[0])  # the one to complain about
        self.lora_names = self._graphs[0].lora_names
        self.owner: object = None  # whose rows the buffer holds
        self.fed: list[int] = []  # see CausalModel
        self._parameters: Mapping[str, np.ndarray] | None = None
        self.hidden: np.ndarray | None = None
        self.seconds = 0.0
        self.length = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of rows that there is a graph for, ascending."""
        return tuple(graph.width for graph in self._graphs)

    @property
    def capacity(self) -> int:
        """Rows of past that there is room for: C."""
        return self.context

    def reserve(self, capacity: int) -> None:
        """Nothing to do: the graphs were made for C rows. A larger wish is none until rows are fed (see `run`)."""

    def run(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Feed m tokens behind the past; the past grows by m.

        Returns float32 logits [m, V], a view that the next run may overwrite; `hidden` is then the matching [m, H],
        if the graphs give it. More rows than the widest graph has go through it one chunk after another.
        Raises ValueError for no token or a full window, OmniDraftError if the provider fails.
        """
        m, widest = len(ids), self._graphs[-1].width
        if m == 0 or self.length + m > self.context:
            raise ValueError(f"{m} rows behind {self.length} do not fit {self.context}")
        if m <= widest:
            logits, self.hidden = self._pass(ids)
            return logits
        edges = [*range(0, m, widest), m]
        if edges[-1] - edges[-2] == 1 and widest > 2:
            edges[-2] -= 1  # no pass of one row where there are more: it may take another kernel (two-row rule)
        parts = []
        for begin, end in pairwise(edges):
            logits, hidden = self._pass(ids[begin:end])
            parts.append((logits.copy(), None if hidden is None else hidden.copy()))
        found = [hidden for _, hidden in parts if hidden is not None]
        self.hidden = np.concatenate(found) if found else None
        return np.concatenate([logits for logits, _ in parts])

    def rollback(self, length: int) -> None:
        """Forget every row after the first `length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back from {self.length} rows to {length}")
        self.length = length

    def set_adapter(self, parameters: Mapping[str, np.ndarray] | None) -> None:
        """Use LoRA parameters (lora_A [in, r], lora_B [r, out], float32) from the next run on; None for none.

        r up to the graphs' rank; the rest is filled with zeros, which add nothing. The mapping in use already is no
        work. Past rows were computed with the weights before, so the past is emptied.
        Raises OmniDraftError if the names are not those of the graphs, or if the rank is larger.
        """
        if parameters is not None and set(parameters) != set(self.lora_names):
            raise OmniDraftError("the adapter's layers are not those of this drafter; it belongs to another one")
        if parameters is self._parameters:
            return
        shapes = self._graphs[0].lora_shapes
        padded = {name: _pad(np.asarray(value, np.float32), shapes[name]) for name, value in (parameters or {}).items()}
        values = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in padded.items()}
        for graph in self._graphs:
            graph.bind(values)
        self._parameters, self.length = parameters, 0

    def feeds(self, ids: Sequence[int] | np.ndarray, width: int) -> dict[str, np.ndarray]:
        """What a pass over up to `width` ids behind the past would be fed (views; for calibration)."""
        graph = next(graph for graph in self._graphs if graph.width == width)
        self._fill(graph, ids)
        return {**graph.inputs, **self._past}

    def _pass(self, ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """One pass of at most as many rows as the widest graph has."""
        m, begin = len(ids), self.length
        graph = next(graph for graph in self._graphs if graph.width >= m)
        self._fill(graph, ids)
        started = perf_counter()
        try:
            graph.run()
        except Exception as error:  # ONNX Runtime raises many types, all with one message
            raise OmniDraftError(f"{self.placed.actual} failed in a pass ({first_line(error)}); try --ep cpu") from None
        for name, past in self._past.items():
            past[:, :, begin : begin + m] = graph.outputs[name.replace("past", "new")][:, :, :m]
        self.seconds += perf_counter() - started
        self.fed[begin:] = ids
        self.length = begin + m
        hidden = graph.outputs.get("hidden_states")
        return graph.outputs["logits"][0, :m], None if hidden is None else hidden[0, :m]

    def _fill(self, graph: _Graph, ids: Sequence[int] | np.ndarray) -> None:
        """Write a pass's inputs in place. A pad row that finds no slot any more has none: nobody looks at it."""
        m, begin, end = len(ids), self.length, min(self.length + graph.width, self.context)
        inputs = graph.inputs
        inputs["input_ids"][0, :m] = ids
        inputs["input_ids"][0, m:] = ids[-1]
        inputs["order"][:] = self._at - self.context
        inputs["order"][begin:end] = self._at[: end - begin]
        rows = begin + np.arange(graph.width)
        inputs["attention_mask"][0, 0] = np.where(self._at <= rows[:, None], np.float32(0), self._masked)
        inputs["cos"][0, 0] = self._cos[begin : begin + graph.width]
        inputs["sin"][0, 0] = self._sin[begin : begin + graph.width]


class _Graph:
    """The graph of one width with its own arrays, bound once."""

    def __init__(self, session: ort.InferenceSession, width: int, past: Mapping[str, ort.OrtValue]) -> None:
        self.width, self._session, self._past = width, session, past
        given = {i.name: i for i in session.get_inputs()}
        lora = {i.name: tuple(i.shape) for i in session.get_overridable_initializers() if ".lora_" in i.name}
        self.lora_names, self.lora_shapes = tuple(lora), lora
        self.inputs = {name: _empty(i) for name, i in given.items() if name not in past}
        self.outputs = {o.name: _empty(o) for o in session.get_outputs()}
        self.bind({})

    def bind(self, adapter: Mapping[str, ort.OrtValue]) -> None:
        """Bind everything anew, with an adapter; an empty one leaves the graph's zeros."""
        self._binding = self._session.io_binding()
        self._held = [ort.OrtValue.ortvalue_from_numpy(array) for array in self.inputs.values()]
        made = [ort.OrtValue.ortvalue_from_numpy(array) for array in self.outputs.values()]
        for name, value in (*zip(self.inputs, self._held, strict=True), *self._past.items(), *adapter.items()):
            self._binding.bind_ortvalue_input(name, value)
        for name, value in zip(self.outputs, made, strict=True):
            self._binding.bind_ortvalue_output(name, value)
        self._held += [*made, *adapter.values()]

    def run(self) -> None:
        """Compute the outputs from what stands in the inputs and the past."""
        self._session.run_with_iobinding(self._binding)


def exact_width(decoder: CausalModel, context: int) -> int | None:
    """The narrowest width at which neither a row's place in a pass nor what stands behind it changes its bits.

    Measured, where `invariance.probe` finds no W₀ that holds across widths: with every pass padded to this width, and
    no more proposals than it holds, text with drafting is text without. None if there is no such width of two rows or
    more, or none at all. `context`: the model's positions. Empties the past.
    """
    rng = np.random.default_rng(0)
    for width in (width for width in decoder.widths if 1 < width <= ROWS):
        pasts = [past for past in PASTS if past + 2 * ROWS <= context] or [0]
        ids = rng.integers(0, decoder.vocabulary, max(pasts) + ROWS).tolist()
        if all(_slots_agree(decoder, width, ids[: past + ROWS], past) for past in pasts):
            return width
    return None


def _slots_agree(decoder: CausalModel, width: int, ids: list[int], past: int) -> bool:
    """Whether passes of 1, 2 … `width` real rows give the rows behind a past the same bits."""
    decoder.rollback(0)
    if past:
        decoder.run(ids[:past])
    found = []
    for size in range(width, 0, -1):
        decoder.rollback(past)
        rows = []
        for begin in range(past, len(ids), size):
            real = ids[begin : begin + size]
            padding = [ids[-size]] * (width - len(real))
            rows.append(decoder.run(real + padding)[: len(real)].copy())
            decoder.rollback(begin + len(real))
        found.append(np.concatenate(rows))
    decoder.rollback(0)
    return all(np.array_equal(other, found[0]) for other in found[1:])


def rotary_tables(description: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin float32 [positions, D] for every position that a pass, its padding included, can have."""
    size, widest = description["head_size"], max(int(width) for width in description["widths"])
    half = np.arange(0, size, 2, dtype=np.float64) / size
    at = np.arange(description["context"] + widest, dtype=np.float64) / description["rope_factor"]
    angles = np.outer(at, description["rope_theta"] ** -half)
    both = np.concatenate([angles, angles], axis=1)
    return np.cos(both).astype(np.float32), np.sin(both).astype(np.float32)


def _past_names(description: Mapping[str, Any]) -> list[str]:
    return [f"past_{part}_{layer}" for layer in range(description["layers"]) for part in PARTS]


def _check(path: Path, session: ort.InferenceSession, width: int, description: Mapping[str, Any]) -> None:
    """Raise OmniDraftError where a graph is not the one described, before anything of that size is made."""
    context, size, vocabulary = (description[name] for name in ("context", "head_size", "vocabulary"))
    expected = {
        "input_ids": [1, width],
        "order": [context],
        "attention_mask": [1, 1, width, context],
        **{name: [1, 1, width, size] for name in ("cos", "sin")},
        **{name: [1, description["kv_heads"], context, size] for name in _past_names(description)},
        "logits": [1, width, vocabulary],
    }
    found = {value.name: list(value.shape) for value in session.get_inputs()}
    found |= {value.name: list(value.shape) for value in session.get_outputs() if value.name == "logits"}
    for name in expected | found:
        have, wanted = found.get(name, "missing"), expected.get(name, "not there")
        if have != wanted:
            raise OmniDraftError(f"{path}: {name} is {have}, its description says {wanted}; export again")


def _empty(value: Any) -> np.ndarray:
    """An array for an input or output of a graph: those of ours are int32 ids and float32."""
    return np.zeros(value.shape, np.int32 if value.type == "tensor(int32)" else np.float32)


def _pad(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A LoRA matrix filled with zeros to the rank of the graph."""
    if any(have > room for have, room in zip(value.shape, shape, strict=True)):
        raise OmniDraftError(
            f"the adapter has rank {min(value.shape)}, the static graphs hold {min(shape)}; use --profile cpu"
        )
    padded = np.zeros(shape, np.float32)
    padded[tuple(slice(size) for size in value.shape)] = value
    return padded
