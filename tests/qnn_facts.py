"""Run in a process of its own, where onnxruntime-qnn can be imported: prints where small graphs ran, as JSON.

QNN's HTP simulator runs on x86-64 Linux; what it computes is fp16.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.placement import Wish, compatibility, devices, open_session

SIMULATED = {"soc_model": "57", "htp_arch": "75"}  # SM8650
OTHER = {"soc_model": "69", "htp_arch": "79"}  # SM8750


def quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def write(path: Path, rows: int | str, *ops: str) -> Path:
    """y = ops(x w), with x [rows, 8]."""
    rng = np.random.default_rng(0)
    weights = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], rng.normal(size=64))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h0"])]
    nodes += [helper.make_node(op, [f"h{i}"], [f"h{i + 1}"], f"h{i + 1}") for i, op in enumerate(ops)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 8]) for name in ("x", f"h{len(ops)}")]
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def place(model: Path, strict: bool = False, **settings: str) -> dict[str, Any]:
    try:
        session, placed = open_session(model, quiet, Wish("qnn", strict, settings))
    except OmniDraftError as error:
        return {"refused": str(error)}
    return {**asdict(placed), "listed": session.get_providers()}


def difference(model: Path) -> float:
    """Of the outputs on QNN and on the CPU, the largest."""
    x = {"x": np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)}
    wishes = (Wish("qnn", True, SIMULATED), Wish("cpu"))
    on_qnn, on_cpu = (open_session(model, quiet, wish)[0].run(None, x)[0] for wish in wishes)
    return float(np.abs(on_qnn - on_cpu).max())


def compiled(model: Path, to: Path, settings: dict[str, str]) -> Path:
    options = quiet()
    options.add_provider_for_devices(devices("qnn"), {"backend_type": "htp", **settings})
    ort.ModelCompiler(options, str(model), embed_compiled_data_into_model=True).compile_to_file(str(to))
    return to


def main(folder: Path) -> None:
    ort.set_default_logger_severity(4)
    fits = write(folder / "fits.onnx", 8, "Relu", "Sigmoid")
    partly = write(folder / "partly.onnx", 8, "Relu", "Trilu", "Sigmoid")
    dynamic = write(folder / "dynamic.onnx", "rows", "Relu")
    context = compiled(fits, folder / "context.onnx", SIMULATED)
    facts = {
        "fits": place(fits, strict=True, **SIMULATED),
        "difference": difference(fits),
        "partly": place(partly, **SIMULATED),
        "partly, strict": place(partly, strict=True, **SIMULATED),
        "dynamic": place(dynamic, **SIMULATED),
        "no backend": place(fits, backend_type="cpu"),
        "no backend, strict": place(fits, strict=True, backend_type="cpu"),
        "wrong settings": place(fits, soc_model="0", enable_htp_fp16_precision="1"),
        "context": place(context, strict=True, **SIMULATED),
        "made for": [*compatibility(context, "qnn"), *compatibility(fits, "qnn")],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
