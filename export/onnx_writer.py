"""Nodes, constants and weights of a graph that is written by hand, in the order in which they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

PAGE = 4096  # weights begin at page borders, so that they can be mapped into memory

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


class WeightsFile:
    """Tensors of several graphs in one file of external data, each written once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._where: dict[str, tuple[int, NDArray[Any]]] = {}
        self._end = 0

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Append a tensor; the first call creates the file."""
        offset = -(-self._end // PAGE) * PAGE
        with self.path.open("ab" if self._where else "wb") as file:
            file.write(bytes(offset - self._end))
            file.write(np.ascontiguousarray(array).tobytes())
        self._end = offset + array.nbytes
        self._where[name] = offset, np.empty((0, *array.shape), array.dtype)

    def proto(self, name: str) -> onnx.TensorProto:
        """The tensor as an initializer that points into the file."""
        offset, like = self._where[name]
        tensor = TensorProto(name=name, dims=like.shape[1:], data_location=TensorProto.EXTERNAL)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(like.dtype)
        length = int(np.prod(like.shape[1:])) * like.itemsize
        for key, value in (("location", self.path.name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


class GraphWriter:
    """Collects one graph. Every method that adds something returns its name."""

    def __init__(self, weights: WeightsFile) -> None:
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._constants: dict[tuple[bytes, tuple[int, ...], str], str] = {}

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """A node with one output."""
        name = name or f"{kind}.{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def split(self, x: str, sizes: str, count: int, axis: int) -> list[str]:
        """`x` in `count` parts along an axis."""
        name = f"Split.{len(self._nodes)}"
        parts = [f"{name}.{i}" for i in range(count)]
        self._nodes.append(helper.make_node("Split", [x, sizes], parts, name=name, axis=axis))
        return parts

    def ints(self, *values: int) -> str:
        """A constant int64 vector."""
        return self.constant(np.array(values, np.int64))

    def number(self, value: float) -> str:
        """A constant float32 scalar."""
        return self.constant(np.array(value, np.float32))

    def constant(self, array: NDArray[Any]) -> str:
        """A constant; equal ones are kept once."""
        key = array.tobytes(), array.shape, str(array.dtype)
        if key not in self._constants:
            name = self._constants[key] = f"constant.{len(self._constants)}"
            self._initializers[name] = numpy_helper.from_array(array, name)
        return self._constants[key]

    def weight(self, name: str) -> str:
        """A tensor of the weights file."""
        if name not in self._initializers:
            self._initializers[name] = self._weights.proto(name)
        return name

    def input(self, name: str, kind: int, *dims: int | str) -> str:
        """An input; a text is the name of a dimension that may vary."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, dims))
        return name

    def output(self, name: str, kind: int, *dims: int | str) -> str:
        """An output; the node that makes it has its name."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, dims))
        return name

    def save(self, path: Path, opset: int, ir_version: int) -> None:
        """Write the graph beside its weights file."""
        graph = helper.make_graph(
            self._nodes, path.stem, self._inputs, self._outputs, list(self._initializers.values())
        )
        imports = [helper.make_opsetid("", opset)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version, producer_name="omnidraft")
        path.write_bytes(model.SerializeToString())
