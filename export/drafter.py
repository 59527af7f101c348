"""The drafter's graph: our own builder where it can, onnxruntime-genai's otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy bfloat16, which safetensors asks for by name)
import numpy as np
from numpy.typing import NDArray

from omnidraft.export.sources import Source
from omnidraft.export.target import DATA, MODEL
from omnidraft.runtime.errors import OmniDraftError

TRAINING = "training"


def build_drafter(source: Source, precision: str, folder: Path) -> dict[str, Any]:
    """Write model.onnx and model.onnx.data of a Llama-architecture drafter into a folder, and training/ beside them.

    The source must have no `llama_graph.obstacle`. Returns what the manifest says of its LoRA hooks: each
    projection with [in, out]. Raises OmniDraftError if weights are missing or of another shape.
    """
    import onnx

    from omnidraft.export.llama_graph import build_graph, lora_sizes, read_shape
    from omnidraft.export.training_graph import write_training_graphs

    shape, weights = read_shape(source.config), Weights(source)
    model = build_graph(shape, weights, precision)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / MODEL, save_as_external_data=True, all_tensors_to_one_file=True, location=DATA)
    (folder / DATA).chmod((folder / MODEL).stat().st_mode)  # onnx makes it readable by its owner alone
    write_training_graphs(shape, weights, folder / TRAINING)
    return {"projections": {name: list(size) for name, size in lora_sizes(shape).items()}}


class Weights:
    """Float32 tensors of a checkpoint by name; safetensors files are read one tensor at a time."""

    def __init__(self, source: Source) -> None:
        from safetensors import safe_open

        self._where: dict[str, Path] = {}
        for path in source.weights:
            with safe_open(path, framework="numpy") as file:
                self._where |= dict.fromkeys(file.keys(), path)

    def __call__(self, name: str) -> NDArray[np.float32]:
        """The tensor of that name. Raises OmniDraftError if there is none."""
        from safetensors import safe_open

        if name not in self._where:
            files = ", ".join(str(path) for path in sorted(set(self._where.values())))
            raise OmniDraftError(f"{files}: no tensor {name!r}; it is not a whole Llama checkpoint")
        with safe_open(self._where[name], framework="numpy") as file:
            return np.asarray(file.get_tensor(name), np.float32)
