"""omnidraft show: what is in a bundle, without loading a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.runtime.bundle import ModelInfo


def show(
    bundle: o.BundlePath,
    check: Annotated[bool, typer.Option("--check", help="Compare every file with its hash.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as it is.")] = False,
) -> None:
    """Describe a bundle."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from omnidraft.runtime.bundle import MANIFEST, open_bundle

    opened = open_bundle(bundle)
    if check:
        opened.verify(opened.files)
    if as_json:
        print(json.dumps(json.loads((bundle / MANIFEST).read_text(encoding="utf-8")), indent=1))
        return
    console = Console()
    if check:
        console.print(f"all {len(opened.files)} files are as they were exported")
    table = Table(title=escape(str(bundle)), title_justify="left")
    for column in ("model", "precision", "MB", "vocabulary", "context", "same top-1", "same text"):
        table.add_column(column, justify="right" if column in ("MB", "vocabulary", "context", "same top-1") else "left")

    drafter = opened.drafter
    lines: list[tuple[str, ModelInfo, str, str, dict[str, Any]]] = [
        ("drafter", drafter, drafter.model, drafter.precision, drafter.parity)
    ]
    for name, target in opened.targets.items():
        lines += [(f"target {name}", target, graph.model, graph.precision, graph.parity) for graph in target.graphs]
    for label, info, model, precision, parity in lines:
        size = sum(opened.files[name]["size"] for name in opened.folder_files(model)) / 1e6
        sizes = (f"{size:.1f}", str(info.vocabulary), str(info.context))
        equal = "yes" if parity["greedy_equal"] else "no"
        table.add_row(label, precision, *sizes, f"{parity['top1_agreement']:.3f}", equal)
    console.print(table)
    described: dict[str, ModelInfo] = {"drafter": drafter, **opened.targets}
    for label, info in described.items():
        console.print(f"{label}: {info.architecture}, from {info.source['name']}, licence {info.license}", markup=False)
    console.print(
        f"The drafter {'has' if drafter.trainable else 'has no'} LoRA inputs. same top-1, same text: greedy choices "
        "and text against the source checkpoint; drafting never changes a graph's own text. "
        f"Exported {opened.created} with " + ", ".join(f"{k} {v}" for k, v in opened.tools.items())
    )
