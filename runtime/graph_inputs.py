"""The inputs of an ONNX graph, read from the file alone.

What a provider can run, and how much memory a cache takes, has to be known before a session is made, and making one
for that would read all the weights.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from omnidraft.runtime.errors import OmniDraftError

Shape = tuple[int | str, ...]
Span = tuple[int, int]
UNKNOWN = "?"

# Where ONNX keeps things: the numbers of the fields on the way there (onnx.proto).
INPUTS = (7, 11)  # ModelProto.graph, GraphProto.input
NAME = (1,)  # ValueInfoProto.name
DIMENSIONS = (2, 1, 2, 1)  # ValueInfoProto.type, TypeProto.tensor_type, Tensor.shape, TensorShapeProto.dim
SIZE, SYMBOL = (1,), (2,)  # Dimension.dim_value, Dimension.dim_param


def graph_inputs(model: Path) -> dict[str, Shape]:
    """Name → shape of every input; a dimension is a number, or the name of what it depends on ("?" without one).

    Weights are stepped over, not read. Raises OmniDraftError for a file that is not ONNX, OSError.
    """
    try:
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return dict(_input(data, span) for span in _find(data, (0, len(data)), *INPUTS))
    except (ValueError, IndexError):  # of an empty file, of bytes that are no fields, of names that are no text
        raise OmniDraftError(f"{model}: not an ONNX graph; export again") from None


def dynamic_inputs(model: Path) -> list[str]:
    """Names of the inputs with a dimension that is not fixed. Raises as `graph_inputs`."""
    return [name for name, shape in graph_inputs(model).items() if any(isinstance(size, str) for size in shape)]


def _input(data: mmap.mmap, span: Span) -> tuple[str, Shape]:
    begin, end = next(_find(data, span, *NAME), (0, 0))
    return data[begin:end].decode(), tuple(_dimension(data, dim) for dim in _find(data, span, *DIMENSIONS))


def _dimension(data: mmap.mmap, span: Span) -> int | str:
    for begin, _ in _find(data, span, *SIZE):
        return _number(data, begin)[0]
    for begin, end in _find(data, span, *SYMBOL):
        return data[begin:end].decode()
    return UNKNOWN


def _find(data: mmap.mmap, span: Span, field: int, *inner: int) -> Iterator[Span]:
    """Where the content of a field lies, or of fields inside it; a field may be there several times."""
    for number, begin, end in _fields(data, *span):
        if number == field and inner:
            yield from _find(data, (begin, end), *inner)
        elif number == field:
            yield begin, end


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, begin, end) of each field of a protocol buffer message that lies from `at` to `end`."""
    while at < end:
        tag, at = _number(data, at)
        kind = tag & 7
        if kind == 0:
            stop = _number(data, at)[1]
        elif kind == 2:
            size, at = _number(data, at)
            stop = at + size
        elif kind in (1, 5):
            stop = at + (8 if kind == 1 else 4)
        else:
            raise ValueError(kind)
        if stop > end:
            raise ValueError(stop)
        yield tag >> 3, at, stop
        at = stop


def _number(data: mmap.mmap, at: int) -> tuple[int, int]:
    """(value, end) of a base-128 number."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
