"""Static graphs compiled for a Snapdragon's HTP: EPContext graphs, which hold nothing but QNN's binary.

The HTP computes float graphs in float16, and QDQ graphs in the integers that they name. All widths of a model share
one binary and its weights; QNN's simulator loads no shared binary, so it gets one for each width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from omnidraft.export.static_graph import IR_VERSION
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.placed import RECORD, assignment, describe
from omnidraft.runtime.placement import PROVIDERS, Unavailable, compatibility, devices, first_line, session_options
from omnidraft.runtime.qnn import SIMULATOR, soc_model

QNN = PROVIDERS["qnn"].name
ZEROS = "zeros.bin"  # what all LoRA inputs are by default, as large as the largest
# Nothing is run here, so nothing is set up for running; and since compiling happens once, it may take its time.
AHEAD = {"enable_htp_prepare_only": "1", "htp_graph_finalization_optimization_mode": "3"}


def compile_contexts(folder: Path, description: Mapping[str, Any], soc: str, out: Path) -> dict[str, Any]:
    """Compile every width of what `write_static` or `quantize_static` described; write {graph} and {graph}_qnn.bin.

    `soc`: one of `qnn.SOCS`, or "simulator". Returns `static`, the description that `StaticDecoder` takes, whose
    weights are the first graph's binary; and `qnn`: `soc`, `binaries`, `shared` (one for all widths), and
    `compatibility`, ONNX Runtime's line on the device and the version of QNN that they were made for. Inputs and
    outputs, LoRA included, are those of the graphs.

    Raises OmniDraftError if QNN is not installed, does not know the SoC, or leaves nodes of a graph to the CPU.
    """
    settings = {**PROVIDERS["qnn"].settings, **AHEAD, "soc_model": str(soc_model(soc))}
    names = list(description["widths"].values())
    out.mkdir(parents=True, exist_ok=True)
    # In a process of its own: when compiling fails half-way, QNN keeps graphs and shares them with the next model.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            made_for = process.submit(_compile_all, folder, names, out, soc, settings).result()
        except BrokenProcessPool:
            raise OmniDraftError(f"{folder}: QNN crashed while compiling for {soc}; is memory free?") from None
    binaries = [name for graph in names if (out / (name := f"{Path(graph).stem}_qnn.bin")).is_file()]
    facts = {"soc": soc, "binaries": binaries, "shared": soc != SIMULATOR, "compatibility": made_for}
    return {"static": {**description, "weights": binaries[0]}, "qnn": facts}


def _compile_all(folder: Path, names: Sequence[str], out: Path, soc: str, settings: Mapping[str, str]) -> str:
    """Compile one graph after the other; returns the compatibility line."""
    for name in names:
        last = name == names[-1]
        sharing = {"ep.share_ep_contexts": str(int(soc != SIMULATOR)), "ep.stop_share_ep_contexts": str(int(last))}
        _compile(folder / name, out / name, soc, settings, sharing)
        _tidy(out / name)
    return compatibility(out / names[0], "qnn")[0]


def _compile(graph: Path, out: Path, soc: str, settings: Mapping[str, str], sharing: Mapping[str, str]) -> None:
    options = session_options(1)
    entries = {
        RECORD: "1",
        "ep.context_enable": "1",
        "ep.context_embed_mode": "0",
        "ep.context_file_path": str(out),
    }
    for key, value in {**entries, **sharing}.items():
        options.add_session_config_entry(key, value)
    try:
        options.add_provider_for_devices(devices("qnn"), dict(settings))
    except Unavailable as reason:
        raise OmniDraftError(f"{graph}: cannot be compiled for {soc}: {reason}") from None
    try:
        session = ort.InferenceSession(graph, options, enable_fallback=0)
    except Exception as error:  # ONNX Runtime raises many types, all with one message
        raise OmniDraftError(f"{graph}: QNN does not compile it for {soc} ({first_line(error)})") from None
    left = [node for provider, nodes in assignment(session).items() if provider != QNN for node in nodes]
    if left:
        raise OmniDraftError(f"{graph}: {len(left)} nodes ({describe(left)}) do not run on {soc}; use another profile")


def _tidy(path: Path) -> None:
    """Make LoRA's zeros inputs again, which compiling made constants; ask for no more of a runtime than is used."""
    model = onnx.load(path)
    domains = {node.domain for node in model.graph.node}
    used = [entry for entry in model.opset_import if entry.domain in {"", *domains}]
    del model.opset_import[:]
    model.opset_import.extend(used)
    model.ir_version = IR_VERSION
    largest = 0
    for tensor in (tensor for tensor in model.graph.initializer if ".lora_" in tensor.name):
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        size = numpy_helper.to_array(tensor).nbytes
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", ZEROS), ("offset", 0), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        largest = max(largest, size)
    if largest:
        (path.parent / ZEROS).write_bytes(bytes(largest))
    path.write_bytes(model.SerializeToString())
