"""What the loop asks of a language model, whatever its graphs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from omnidraft.runtime.placed import Placed


class CausalModel(Protocol):
    """Runs rows of tokens behind a past of `length` committed rows (batch size 1): `Decoder`, `StaticDecoder`.

    `fed`: the first `length` are the tokens whose rows the past holds, what stands behind them means nothing;
    `hidden`: last hidden states float32 [m, H] of the newest run, None if the graphs give none; `seconds`: spent inside
    graphs since they were loaded; `owner`: whose rows the past holds; `placed`: where it runs.
    """

    length: int
    fed: list[int]
    seconds: float
    owner: object
    vocabulary: int
    placed: Placed
    hidden: np.ndarray | None

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of rows that passes are padded to, ascending; () if passes have the rows they are given."""
        ...

    def reserve(self, capacity: int) -> None:
        """Make room for so many rows of past; nothing where room is fixed."""
        ...

    def run(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Feed m tokens behind the past, which grows by m. Logits float32 [m, V], valid until the next run."""
        ...

    def rollback(self, length: int) -> None:
        """Forget every row after the first `length`."""
        ...

    def set_adapter(self, parameters: Mapping[str, np.ndarray] | None) -> None:
        """Use LoRA parameters from the next run on, None for none; the past is emptied."""
        ...


def held(model: CausalModel, ids: Sequence[int]) -> int:
    """How many of the first of `ids` the past holds, in its first rows."""
    pairs = zip(model.fed[: model.length], ids, strict=False)
    return next((i for i, (have, wanted) in enumerate(pairs) if have != wanted), min(model.length, len(ids)))
