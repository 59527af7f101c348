"""How LoRA parameters lie in one vector, which is what trainers and files of learned weights share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Layout:
    """The projections of a drafter that can learn, in graph order: name -> (in, out).

    A vector of rank r holds lora_A [in, r] and lora_B [r, out] of each, A before B: `width` · r numbers.
    """

    def __init__(self, projections: Mapping[str, Any]) -> None:
        """`projections`: as the manifest has them under drafter.lora."""
        self._sizes = {name: (int(rows), int(columns)) for name, (rows, columns) in projections.items()}
        self.width = sum(rows + columns for rows, columns in self._sizes.values())

    def rank(self, vector: Floats) -> int:
        """The rank of a vector. Raises ValueError if no rank gives its length."""
        if len(vector) == 0 or len(vector) % self.width:
            raise ValueError(f"{len(vector)} numbers are no multiple of {self.width}")
        return len(vector) // self.width

    def names(self) -> list[str]:
        """Names of the parameters, as the graphs call them, in the vector's order."""
        return [f"{name}.lora_{part}" for name in self._sizes for part in "AB"]

    def parameters(self, vector: Floats) -> dict[str, Floats]:
        """Views of the vector by parameter."""
        found, at = {}, 0
        for name, shape in self._shapes(self.rank(vector)):
            size = shape[0] * shape[1]
            found[name] = vector[at : at + size].reshape(shape)
            at += size
        return found

    def vector(self, parameters: Mapping[str, NDArray[Any]]) -> Floats:
        """What `parameters` takes apart. Raises ValueError for names or shapes of another drafter."""
        if set(parameters) != set(self.names()):
            raise ValueError("the layers are not those of this drafter")
        rank = parameters[self.names()[0]].shape[-1]
        for name, shape in self._shapes(rank):
            if parameters[name].shape != shape:
                raise ValueError(f"{name} is {parameters[name].shape}, not {shape}")
        return np.concatenate([np.asarray(parameters[name], np.float32).ravel() for name in self.names()])

    def initial(self, rank: int, seed: int = 0) -> Floats:
        """Where learning begins: A of variance 1 / in, B zero, so that nothing changes (Hu et al. 2021)."""
        rng = np.random.default_rng(seed)
        vector = np.zeros(self.width * rank, np.float32)
        for name, part in self.parameters(vector).items():
            if name.endswith(".lora_A"):
                part[:] = rng.standard_normal(part.shape, np.float32) / np.sqrt(part.shape[0])
        return vector

    def _shapes(self, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, (rows, columns) in self._sizes.items():
            yield f"{name}.lora_A", (rows, rank)
            yield f"{name}.lora_B", (rank, columns)
