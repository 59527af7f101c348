"""Run in a process of its own, where onnxruntime-qnn can be imported: prints what compiled graphs do, as JSON.

One small decoder with random weights, as target and drafter, compiled for the simulator and for two SoCs.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from checkpoints import write_checkpoint
from onnx import helper

from omnidraft.export.qnn_context import compile_contexts
from omnidraft.export.sources import locate, resolve
from omnidraft.export.static_graph import write_static
from omnidraft.export.static_quantize import quantize_static
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.placement import Wish
from omnidraft.runtime.static_decoder import StaticDecoder, exact_width

WIDTHS, CONTEXT, RANK = (1, 3, 16), 96, 4
IDS = np.random.default_rng(5).integers(0, 384, CONTEXT).tolist()
STRICT = Wish("qnn", strict=True)


def rows(decoder: StaticDecoder, size: int) -> np.ndarray:
    """Logits of IDS in passes of so many rows."""
    decoder.rollback(0)
    return np.concatenate([decoder.run(IDS[i : i + size]).copy() for i in range(0, CONTEXT, size)])


def compare(folder: Path, description: dict[str, Any], out: Path) -> dict[str, Any]:
    """Compile for the simulator, and hold what it computes against the CPU's."""
    compiled = compile_contexts(folder, description, "simulator", out)["static"]
    simulated, cpu = StaticDecoder(out, compiled, wish=STRICT), StaticDecoder(folder, description)
    found, expected = rows(simulated, 16), rows(cpu, 16)
    return {
        "share": simulated.placed.share,
        "difference": float(np.abs(found - expected).max() / np.abs(expected).max()),
        "agreement": float((found.argmax(axis=1) == expected.argmax(axis=1)).mean()),
        "equal across widths": bool(np.array_equal(found, rows(simulated, 3))),
        "exact width": exact_width(simulated, CONTEXT),
    }


def adapted(folder: Path, description: dict[str, Any], out: Path) -> dict[str, float]:
    """The effect of an adapter on the simulator, how far it is from that on the CPU, and what is left of it."""
    compiled = compile_contexts(folder, description, "simulator", out)["static"]
    simulated, cpu = StaticDecoder(out, compiled, wish=STRICT), StaticDecoder(folder, description)
    rng, before = np.random.default_rng(0), rows(simulated, 16)
    assert set(simulated.lora_names) == set(cpu.lora_names)
    shapes = onnx.load(out / compiled["widths"]["1"], load_external_data=False).graph.initializer
    adapter = {zeros.name: rng.normal(scale=0.1, size=zeros.dims).astype(np.float32) for zeros in shapes}
    for decoder in (simulated, cpu):
        decoder.set_adapter(adapter)
    found, expected = rows(simulated, 16), rows(cpu, 16)
    simulated.set_adapter(None)
    return {
        "effect": float(np.abs(found - before).max()),
        "difference": float(np.abs(found - expected).max()),
        "left": float(np.abs(rows(simulated, 16) - before).max()),
    }


def shipped(folder: Path, description: dict[str, Any], out: Path, soc: str) -> dict[str, Any]:
    """A compilation for a SoC: its descriptions, which binary and graph each file asks for, what the binaries hold."""
    found = compile_contexts(folder, description, soc, out)
    named = []
    for name in found["static"]["widths"].values():
        (node,) = onnx.load(out / name).graph.node
        texts = {attribute.name: attribute.s.decode() for attribute in node.attribute}
        named.append((texts["ep_cache_context"], texts["partition_name"]))
    data = b"".join((out / name).read_bytes() for name in found["qnn"]["binaries"])
    held = {match.decode() for match in re.findall(rb"QNNExecutionProvider_QNNExecutionProvider_\d+_\d+_\d+", data)}
    return {
        **found,
        "named": [binary for binary, _ in named],
        "asked": sorted(graph for _, graph in named),
        "held": sorted(held),
        "bytes": len(data),
    }


def with_trilu(folder: Path, description: dict[str, Any], out: Path) -> dict[str, Any]:
    """The same graphs, with an operator at the end that the HTP does not have."""
    shutil.copytree(folder, out)
    for name in description["widths"].values():
        model = onnx.load(out / name, load_external_data=False)
        last = next(node for node in model.graph.node if "logits" in node.output)
        last.output[0] = "full"
        model.graph.node.append(helper.make_node("Trilu", ["full"], ["logits"]))
        (out / name).write_bytes(model.SerializeToString())
    return description


def refused(action: Callable[[], Any]) -> str:
    try:
        action()
    except OmniDraftError as error:
        return str(error)
    return ""


def damaged(out: Path, compiled: dict[str, Any], spoil: Callable[[bytes], bytes]) -> str:
    """What is said of compiled graphs whose binaries are spoilt."""
    for name in compiled["qnn"]["binaries"]:
        (out / name).write_bytes(spoil((out / name).read_bytes()))
    return refused(lambda: StaticDecoder(out, compiled["static"], wish=STRICT))


def main(folder: Path) -> None:
    ort.set_default_logger_severity(4)
    source = resolve(locate(str(write_checkpoint(folder / "model"))))
    target, drafter = folder / "target", folder / "drafter"
    floats = write_static(source, target, WIDTHS, CONTEXT, False)
    samples = [np.random.default_rng(seed).integers(0, 384, 60).tolist() for seed in range(3)]
    integers = quantize_static(target, floats, "a16w8", samples)
    learning = write_static(source, drafter, WIDTHS, CONTEXT, True, RANK)
    odd = with_trilu(target, floats, folder / "odd")
    spoilt = compile_contexts(target, floats, "simulator", folder / "spoilt")
    facts = {
        "float": compare(target, floats, folder / "f"),
        "a16w8": compare(target, integers, folder / "i"),
        "adapter": adapted(drafter, learning, folder / "d"),
        "simulator": shipped(target, floats, folder / "s", "simulator"),
        "SM8650": shipped(target, floats, folder / "57", "SM8650"),
        "Trilu": refused(lambda: compile_contexts(folder / "odd", odd, "SM8650", folder / "o")),
        "SM8650 again": shipped(target, floats, folder / "57-2", "SM8650"),
        "X-Elite": shipped(target, integers, folder / "60", "X-Elite"),
        "truncated": damaged(folder / "spoilt", spoilt, lambda data: data[: len(data) // 2]),
        "empty": damaged(folder / "spoilt", spoilt, lambda data: b""),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
