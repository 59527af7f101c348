"""The acceptance head's graph, in standard operators of opset 17, with its weights inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from omnidraft.export.onnx_writer import FLOAT
from omnidraft.export.training_graph import IR_VERSION, OPSET
from omnidraft.runtime.acceptance import HEAD_FILE, check, neutral
from omnidraft.runtime.adapter_file import load_adapter, save_adapter
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.features import FEATURES

GRAPH, WEIGHTS = "head.onnx", "head.onnx_adapter"


def build_head(source: Path, hidden_size: int, folder: Path) -> bool:
    """Write GRAPH and WEIGHTS into a folder; whether the drafter's folder `source` has a head that was trained.

    Without one, the head says what the drafter says. Raises OmniDraftError if the file there does not fit.
    """
    trained = (source / HEAD_FILE).is_file()
    parameters = load_adapter(source / HEAD_FILE) if trained else neutral(hidden_size)
    try:
        check(parameters, hidden_size)
    except OmniDraftError as error:
        raise OmniDraftError(f"{source / HEAD_FILE}: {error}") from None
    write_head(folder / GRAPH, parameters)
    save_adapter(folder / WEIGHTS, parameters)
    return trained


def write_head(path: Path, parameters: Mapping[str, NDArray[np.float32]]) -> None:
    """Write head.onnx: hidden [n, H], features [n, F] -> logit [n], see `runtime/acceptance.py`.

    The parameters are inputs with a value of their own, so that learned ones may take their place. Raises
    OmniDraftError if they are not those of a head.
    """
    check(parameters)
    values = {name: np.ascontiguousarray(value, np.float32) for name, value in parameters.items()}
    w1, b1, w2, skip, b2 = (f"acceptance.{part}" for part in ("w1", "b1", "w2", "skip", "b2"))
    hidden_size = values[w1].shape[0] - len(FEATURES)
    nodes = [
        helper.make_node("Concat", ["hidden", "features"], ["x"], axis=1),
        helper.make_node("Gemm", ["x", w1, b1], ["layer"]),
        helper.make_node("Sigmoid", ["layer"], ["gate"]),
        helper.make_node("Mul", ["layer", "gate"], ["active"]),
        helper.make_node("Gemm", ["features", skip, b2], ["direct"]),
        helper.make_node("Gemm", ["active", w2, "direct"], ["column"]),
        helper.make_node("Squeeze", ["column", "last"], ["logit"]),
    ]
    inputs = {"hidden": ["n", hidden_size], "features": ["n", len(FEATURES)]}
    inputs.update({name: list(value.shape) for name, value in values.items()})
    initializers = [numpy_helper.from_array(value, name) for name, value in values.items()]
    initializers.append(numpy_helper.from_array(np.array([1], np.int64), "last"))
    graph = helper.make_graph(
        nodes,
        "acceptance",
        [helper.make_tensor_value_info(name, FLOAT, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info("logit", FLOAT, ["n"])],
        initializers,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="omnidraft",
    )
    path.write_bytes(model.SerializeToString())
