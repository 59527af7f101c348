"""The inputs of a graph, read from the file alone.

What a provider can run, and how much memory a cache takes, has to be known before a session is made, and making one
for that would read all the weights.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from omnidraft.runtime import ort_format
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.protobuf import Data, Span, find, number, text

Shape = ort_format.Shape
UNKNOWN = "?"

# Where ONNX keeps things: the numbers of the fields on the way there (onnx.proto).
INPUTS = (7, 11)  # ModelProto.graph, GraphProto.input
NAME = (1,)  # ValueInfoProto.name
DIMENSIONS = (2, 1, 2, 1)  # ValueInfoProto.type, TypeProto.tensor_type, Tensor.shape, TensorShapeProto.dim
SIZE, SYMBOL = (1,), (2,)  # Dimension.dim_value, Dimension.dim_param


def graph_inputs(model: Path) -> dict[str, Shape]:
    """Name → shape of every input; a dimension is a number, or the name of what it depends on ("?" without one).

    Weights are stepped over, not read.
    Raises OmniDraftError for a file that is neither ONNX nor in ORT format; OSError.
    """
    if ort_format.is_ort_format(model):
        return ort_format.inputs(model, UNKNOWN)
    try:
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return dict(_input(data, span) for span in find(data, (0, len(data)), *INPUTS))
    except (ValueError, IndexError):  # of an empty file, of bytes that are no fields, of names that are no text
        raise OmniDraftError(f"{model}: not an ONNX graph; export again") from None


def dynamic_inputs(model: Path) -> list[str]:
    """Names of the inputs with a dimension that is not fixed. Raises as `graph_inputs`."""
    return [name for name, shape in graph_inputs(model).items() if any(isinstance(size, str) for size in shape)]


def _input(data: Data, span: Span) -> tuple[str, Shape]:
    name = text(data, next(find(data, span, *NAME), (0, 0)))
    return name, tuple(_dimension(data, dim) for dim in find(data, span, *DIMENSIONS))


def _dimension(data: Data, span: Span) -> int | str:
    for begin, _ in find(data, span, *SIZE):
        return number(data, begin)[0]
    for symbol in find(data, span, *SYMBOL):
        return text(data, symbol)
    return UNKNOWN
