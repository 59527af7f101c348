"""A causal language model as one graph of plain operators, which is given the past and returns a longer one.

Nothing is shared between the graph's past and present, so each pass copies the rows of the past in, and the new ones
out. In return every toolchain reads such a graph, and a row's place in memory is nobody's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.placement import Wish, first_line, open_session, session_options

GROW = 256  # rows of past are reserved in multiples of this
PAST, PRESENT = "past_key_values", "present"
FED = ("input_ids", "attention_mask", "position_ids")
ANYWHERE = Wish()


class PortableDecoder:
    """Runs rows of tokens behind a past of `length` committed rows (batch size 1); a `CausalModel`."""

    widths: tuple[int, ...] = ()  # see CausalModel

    def __init__(self, model: Path, threads: int = 1, wish: Wish = ANYWHERE) -> None:
        """Load a graph. Raises OmniDraftError if it cannot be loaded, or if it is not one of this kind."""
        self._session, self.placed = open_session(model, partial(session_options, threads), wish)
        inputs = {i.name: i.shape for i in self._session.get_inputs()}
        outputs = {o.name: o.shape for o in self._session.get_outputs()}
        past = {name: shape for name, shape in inputs.items() if name.startswith(PAST)}
        self._presents = [name.replace(PAST, PRESENT) for name in past]
        lacking = {"input_ids", "logits", *self._presents} - {*inputs, *outputs}
        foreign = {*inputs} - {*FED, *past}
        sizes = [shape[axis] for shape in past.values() for axis in (1, 3)] + [outputs.get("logits", [""])[-1]]
        if not past or lacking or foreign or not all(isinstance(size, int) for size in sizes):
            raise OmniDraftError(f"{model}: not a portable graph ({_difference(lacking, foreign)}); export again")
        self._fed = [name for name in FED if name in inputs]  # some architectures count positions for themselves
        self._sizes = {name: (shape[1], shape[3]) for name, shape in past.items()}
        self.vocabulary = int(outputs["logits"][-1])
        self.owner: object = None  # whose rows the past holds
        self.fed: list[int] = []  # see CausalModel
        self.hidden: np.ndarray | None = None
        self.seconds = 0.0
        self.length = 0
        self.capacity = 0
        self._past: dict[str, np.ndarray] = {}
        self.reserve(GROW)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows of past, which keeps its rows; a smaller wish is no work."""
        if capacity <= self.capacity:
            return
        self.capacity = -(-capacity // GROW) * GROW
        for name, (heads, size) in self._sizes.items():
            rows = np.zeros((1, heads, self.capacity, size), np.float32)
            if self.length:
                rows[:, :, : self.length] = self._past[name][:, :, : self.length]
            self._past[name] = rows

    def run(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Feed m tokens behind the past; the past grows by m. Returns float32 logits [m, V].

        Raises ValueError for no token or no room, OmniDraftError if the provider fails.
        """
        begin, end = self.length, self.length + len(ids)
        if begin == end or end > self.capacity:
            raise ValueError(f"{len(ids)} rows behind {begin} do not fit {self.capacity}")
        given = {
            "input_ids": np.asarray(ids, np.int64)[None],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begin, end)[None],
        }
        started = perf_counter()
        feeds = {name: given[name] for name in self._fed}
        feeds |= {name: np.ascontiguousarray(rows[:, :, :begin]) for name, rows in self._past.items()}
        try:
            logits, *presents = self._session.run(["logits", *self._presents], feeds)
        except Exception as error:  # ONNX Runtime raises many types, all with one message
            raise OmniDraftError(f"{self.placed.actual} failed in a pass ({first_line(error)}); try --ep cpu") from None
        for rows, present in zip(self._past.values(), presents, strict=True):
            rows[:, :, begin:end] = present[:, :, begin:]
        self.seconds += perf_counter() - started
        self.fed[begin:] = ids
        self.length = end
        found: np.ndarray = logits[0]
        return found

    def rollback(self, length: int) -> None:
        """Forget every row after the first `length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back from {self.length} rows to {length}")
        self.length = length

    def set_adapter(self, parameters: Mapping[str, np.ndarray] | None) -> None:
        """None is all there is. Raises OmniDraftError for anything else: these graphs have no LoRA inputs."""
        if parameters is not None:
            raise OmniDraftError("a portable graph has no LoRA inputs; draft with the drafter's cpu or static graphs")


def _difference(lacking: set[str], foreign: set[str]) -> str:
    """What is wrong with a graph's inputs and outputs, in a few words."""
    if lacking:
        return f"it lacks {', '.join(sorted(lacking)[:3])}"
    if foreign:
        return f"it wants {', '.join(sorted(foreign)[:3])}"
    return "its past or its sizes are not declared"
