"""omnidraft show: what is in a bundle, without loading a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.runtime.bundle import Graph, ModelInfo


def show(
    bundle: o.BundlePath,
    check: Annotated[bool, typer.Option("--check", help="Compare every file with its hash.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as it is.")] = False,
) -> None:
    """Describe a bundle."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from omnidraft.runtime.bundle import MANIFEST, open_bundle, read_manifest

    opened = open_bundle(bundle)
    if check:
        opened.verify(opened.files)
    if as_json:
        print(json.dumps(read_manifest(bundle / MANIFEST), indent=1))
        return
    console = Console()
    if check:
        console.print(f"all {len(opened.files)} files are as they were exported")
    table = Table(title=escape(str(bundle)), title_justify="left")
    for column in ("model", "precision", "MB", "vocabulary", "context", "same top-1", "same text"):
        table.add_column(column, justify="right" if column in ("MB", "vocabulary", "context", "same top-1") else "left")

    drafter = opened.drafter
    lines: list[tuple[str, ModelInfo, Graph]] = [("drafter", drafter, graph) for graph in drafter.all_graphs]
    for name, target in opened.targets.items():
        lines += [(f"target {name}", target, graph) for graph in target.graphs]
    for label, info, graph in lines:
        size = sum(opened.files[name]["size"] for name in opened.folder_files(graph.model)) / 1e6
        context = info.context if graph.static is None else graph.static["context"]
        margin = graph.parity.get("greedy_margin")  # of the checkpoint, where the graph chose otherwise
        equal = "yes" if graph.parity["greedy_equal"] else "no" if margin is None else f"no (margin {margin:.2g})"
        figures = (f"{size:.1f}", str(info.vocabulary), str(context), f"{graph.parity['top1_agreement']:.3f}", equal)
        table.add_row(label, graph.label, *figures)
    console.print(table)
    for label, _, graph in lines:
        if graph.nnapi is not None:
            console.print(f"{label} ({graph.label}): {nnapi(graph.nnapi)}", markup=False, highlight=False)
    described: dict[str, ModelInfo] = {"drafter": drafter, **opened.targets}
    for label, info in described.items():
        console.print(f"{label}: {info.architecture}, from {info.source['name']}, licence {info.license}", markup=False)
    console.print(
        f"The drafter {'has' if drafter.trainable else 'has no'} LoRA inputs. same top-1, same text: greedy choices "
        "and text against the source checkpoint; drafting never changes a graph's own text. "
        f"Exported {opened.created} with " + ", ".join(f"{k} {v}" for k, v in opened.tools.items())
    )


def nnapi(found: dict[str, Any]) -> str:
    """What ONNX Runtime's checker said about a graph and NNAPI."""
    lacking = f", not {', '.join(found['unsupported'])}" if found["unsupported"] else ""
    return (
        f"NNAPI takes {found['share']:.1%} of {found['nodes']} nodes by name and shape{lacking}, partitions: "
        f"{found['partitions']}, verdict: {found['verdict']}, by ONNX Runtime's checker; nothing was run"
    )
