"""The other files that a graph reads, found in the file alone: weights beside it, and compiled contexts."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.ort_format import check_alone, is_ort_format
from omnidraft.runtime.protobuf import Data, Span, fields, find, text

DEEPEST = 16  # graphs inside nodes of graphs

# Where ONNX keeps things (onnx.proto): message → number of a field → the message that it holds.
INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
EXTERNAL_DATA = 13  # TensorProto.external_data, pairs of key and value
OPERATOR, ATTRIBUTE = 4, 5  # NodeProto
NAME, INTEGER, BYTES = 1, 3, 4  # AttributeProto
CONTEXT, CONTEXT_FILE, EMBEDDED = "EPContext", "ep_cache_context", "embed_mode"


def external_files(model: Path) -> set[str]:
    """Every file that a graph reads, as it names them; none, if it is in ORT format.

    Raises OmniDraftError for a file that is neither ONNX nor in ORT format; OSError.
    """
    if is_ort_format(model):
        check_alone(model)
        return set()
    try:
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return set(_named(data, "model", (0, len(data)), 0))
    except (ValueError, IndexError):  # of an empty file, of bytes that are no fields, of names that are no text
        raise OmniDraftError(f"{model}: not an ONNX graph; export again") from None


def _named(data: Data, kind: str, span: Span, depth: int) -> Iterator[str]:
    if depth > DEEPEST * len(INSIDE):
        raise ValueError("nested too deeply")
    if kind == "tensor":
        yield from _locations(data, span)
        return
    if kind == "node":
        if data.find(b"location", *span) < 0 and data.find(CONTEXT.encode(), *span) < 0:
            return  # most nodes: they are many, and this is a hundred times as fast as looking inside
        yield from _contexts(data, span)
    for number, begin, end in fields(data, *span):
        inner = INSIDE[kind].get(number)
        if inner is not None:
            yield from _named(data, inner, (begin, end), depth + 1)


def _locations(data: Data, tensor: Span) -> Iterator[str]:
    for pair in find(data, tensor, EXTERNAL_DATA):
        if _text(data, pair, 1) == "location":
            yield _text(data, pair, 2)


def _contexts(data: Data, node: Span) -> Iterator[str]:
    """What a node that holds a compiled graph names, unless the compiled graph is inside it."""
    if _text(data, node, OPERATOR) != CONTEXT:
        return
    found = {_text(data, span, NAME): span for span in find(data, node, ATTRIBUTE)}
    if EMBEDDED in found and not any(data[begin] for begin, _ in find(data, found[EMBEDDED], INTEGER)):
        yield _text(data, found.get(CONTEXT_FILE, (0, 0)), BYTES)


def _text(data: Data, span: Span, field: int) -> str:
    return text(data, next(find(data, span, field), (0, 0)))
