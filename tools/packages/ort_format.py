"""The bundle of a package with its graphs in ORT format, and the operators that a reduced ONNX Runtime needs for them.

ONNX Runtime's own tool converts. Graphs of fixed shapes are for compilers, so their operators stay as they are (its
style "Runtime"); all others are fused ahead of time as on every start ("Fixed"), and compute the same bits.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omnidraft.runtime.bundle import MANIFEST, sha256
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.external_data import external_files
from omnidraft.tools.packages.archive import Item
from omnidraft.tools.packages.contents import Needs, Selection, select

CONFIG = "required_operators_and_types.config"
MOST = 2**31 - 1  # bytes of a flat buffer
STYLES = {"Fixed": ".ort", "Runtime": ".with_runtime_opt.ort"}  # and how the tool ends the names of what it writes
TOOL = "onnxruntime.tools.convert_onnx_models_to_ort"


def convert(selection: Selection, needs: Needs, room: Path) -> tuple[Selection, Item]:
    """The selection as a bundle in the empty folder `room`, and the configuration of a reduced build that decodes it.

    The graphs that it learns with stay ONNX: two trainers read them, and they share weights. Raises OmniDraftError for
    compiled graphs, for those too large for the format, and if the tool fails.
    """
    if find_spec("onnx") is None:
        raise OmniDraftError("--ort-format needs the package onnx: pip install -c constraints.txt -e '.[export]'")
    compiled = sorted({graph.qnn["soc"] for graph in selection.static if graph.qnn})
    if compiled:
        raise OmniDraftError(
            f"{selection.bundle.path}: graphs compiled for {', '.join(compiled)} have no ORT format; leave out "
            "--ort-format, or export without --profile qnn:SOC"
        )
    selection.bundle.verify(selection.files)
    styles = _styles(selection)
    read = {name: _read_by(selection, name) for name in styles}
    made, operators = room / "bundle", set[str]()
    for style in STYLES:
        names = [name for name in styles if styles[name] == style]
        if names:
            source = room / style
            _copy(selection.bundle.path, source, {file for name in names for file in (name, *read[name])})
            operators.update(_run(source, made, style))
            shutil.rmtree(source)
    inside = styles.keys() | {file for files in read.values() for file in files}
    _copy(selection.bundle.path, made, selection.files.keys() - inside)
    manifest = _described(selection.manifest(), styles.keys())
    files = sorted(path for path in made.rglob("*") if path.is_file())
    manifest["files"] = {path.relative_to(made).as_posix(): _entry(path) for path in files}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    heading = f"# of the graphs in bundle/, converted with onnxruntime {version('onnxruntime')}\n"
    config = Item(CONFIG, (heading + "".join(sorted(operators))).encode(), "operators of a reduced build")
    return select(made, selection.name, selection.graph.precision, needs), config


def cost(before: Selection, after: Selection) -> str:
    """What the format takes, in one line."""
    onnx, ort = (sum(s.bundle.files[name]["size"] for name in s.files) / 1e6 for s in (before, after))
    return f"in ORT format every graph holds its weights: {ort:.1f} MB of bundle in place of {onnx:.1f}"


def _styles(selection: Selection) -> dict[str, str]:
    """Every graph that decodes, and the tool's style for it."""
    drafter, graphs = selection.bundle.drafter, (selection.graph, *selection.static)
    head = [drafter.head["graph"]] if selection.learns and drafter.head else []
    found = dict.fromkeys([drafter.model, *head], "Fixed")
    return found | {name: "Runtime" if graph.static else "Fixed" for graph in graphs for name in graph.models}


def _read_by(selection: Selection, graph: str) -> set[str]:
    """Files with the weights of a graph. Raises OmniDraftError if all that is too much for one file."""
    path, files = selection.bundle.path / graph, selection.bundle.files
    read = {f"{graph.rpartition('/')[0]}/{name}" for name in external_files(path)}
    size = sum(files[name]["size"] for name in (graph, *read))
    if size > MOST:
        raise OmniDraftError(
            f"{path}: {size / 1e9:.1f} GB with its weights, and a file in ORT format holds 2; leave out --ort-format, "
            "or take a smaller --precision"
        )
    return read


def _copy(source: Path, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)


def _run(source: Path, out: Path, style: str) -> list[str]:
    """Convert every graph under a folder, with what it reads beside it. Returns the lines that name operators."""
    command = [sys.executable, "-m", TOOL, str(source), "--output_dir", str(out), "--optimization_style", style]
    command += ["--enable_type_reduction", "--target_platform", "arm"]  # it matters to quantized static graphs only
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        why = re.sub(r".*\[ONNXRuntimeError\] : \d+ : \w+ : ", "", said[-1]).replace(f"{source}/", "")[:300]
        raise OmniDraftError(f"ONNX Runtime cannot convert to ORT format ({why}); leave out --ort-format")
    (config,) = out.glob("*.config")
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    config.unlink()
    for path in out.rglob(f"*{STYLES[style]}"):
        path.rename(path.with_name(path.name.removesuffix(STYLES[style]) + ".ort"))
    return [line for line in lines if not line.startswith("#")]


def _described(manifest: dict[str, Any], converted: Iterable[str]) -> dict[str, Any]:
    """A manifest with the new names of converted graphs. A static one's weights are in the graph that stands for it."""
    names = {name: f"{name.removesuffix('.onnx')}.ort" for name in converted}
    drafter = {**manifest["drafter"], "model": names[manifest["drafter"]["model"]]}
    if drafter["head"]:
        drafter["head"] = {**drafter["head"], "graph": names[drafter["head"]["graph"]]}
    drafter["graphs"] = [_graph(graph, names) for graph in drafter["graphs"]]
    targets = {
        name: {**target, "graphs": [_graph(graph, names) for graph in target["graphs"]]}
        for name, target in manifest["targets"].items()
    }
    return {**manifest, "drafter": drafter, "targets": targets}


def _graph(graph: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    folder, _, _ = graph["model"].rpartition("/")
    renamed = {**graph, "model": names[graph["model"]]}
    if "static" in graph:
        widths = {width: Path(names[f"{folder}/{name}"]).name for width, name in graph["static"]["widths"].items()}
        renamed["static"] = {**graph["static"], "widths": widths, "weights": Path(renamed["model"]).name}
    return renamed


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256(path)}
