"""Graphs in ONNX Runtime's own format, looked at without a session: their inputs, and that they read no other file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.external_data import external_files
from omnidraft.runtime.graph_inputs import UNKNOWN, dynamic_inputs, graph_inputs
from omnidraft.runtime.ort_format import CONTEXT
from omnidraft.runtime.placed import CPU


def write_ort(path: Path, shapes: Sequence[Sequence[int | str | None]]) -> Path:
    """A graph with an input of each shape, through ONNX Runtime."""
    inputs = [helper.make_tensor_value_info(f"x{i}", onnx.TensorProto.FLOAT, shape) for i, shape in enumerate(shapes)]
    nodes = [helper.make_node("Neg", [value.name], [f"y{i}"]) for i, value in enumerate(inputs)]
    outputs = [helper.make_empty_tensor_value_info(f"y{i}") for i in range(len(inputs))]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(model.SerializeToString(), options, providers=[CPU])
    return path


def test_inputs_are_read_as_they_were_declared(tmp_path: Path) -> None:
    shapes: list[list[int | str | None]] = [[1, "rows", None, 2**40], [], [7], ["é", 0]]
    path = write_ort(tmp_path / "x.ort", shapes)
    assert graph_inputs(path) == {
        f"x{i}": tuple(UNKNOWN if d is None else d for d in shape) for i, shape in enumerate(shapes)
    }
    assert dynamic_inputs(path) == ["x0", "x3"]


def test_a_file_of_another_kind_is_one_line(tmp_path: Path) -> None:
    whole = write_ort(tmp_path / "whole.ort", [[1, 2]]).read_bytes()
    other = helper.make_model(helper.make_graph([], "g", [], [])).SerializeToString()
    for number, data in enumerate((b"", b"ORTM", whole[:40], other)):
        path = tmp_path / f"{number}.ORT"
        path.write_bytes(data)
        with pytest.raises(OmniDraftError, match=rf"{number}\.ORT: not a graph in ORT format; pack again"):
            graph_inputs(path)


def test_a_graph_that_could_read_other_files_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime goes by the name of the file, in either case of letters."""
    whole = write_ort(tmp_path / "a.ORT", [[1, 2]]).read_bytes()
    ort.InferenceSession(tmp_path / "a.ORT", providers=[CPU])
    assert external_files(tmp_path / "a.ORT") == set()
    (tmp_path / "a.ORT").write_bytes(whole + CONTEXT)
    with pytest.raises(OmniDraftError, match=r"a\.ORT: holds a compiled graph"):
        external_files(tmp_path / "a.ORT")
    (tmp_path / "x.onnx").write_bytes(whole)
    with pytest.raises(OmniDraftError, match=r"x\.onnx: not an ONNX graph"):
        external_files(tmp_path / "x.onnx")
