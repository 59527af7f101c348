"""omnidraft show: what is in a bundle, without loading a model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from omnidraft.tools import options as o


def show(
    bundle: o.BundlePath,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as it is.")] = False,
) -> None:
    """Describe a bundle."""
    from rich.console import Console
    from rich.table import Table

    from omnidraft.runtime.bundle import MANIFEST, open_bundle

    opened = open_bundle(bundle)
    if as_json:
        print(json.dumps(json.loads((bundle / MANIFEST).read_text(encoding="utf-8")), indent=1))
        return
    console = Console()
    table = Table(title=str(bundle), title_justify="left")
    for column in ("model", "architecture", "precision", "MB", "vocabulary", "context", "top-1", "greedy", "licence"):
        table.add_column(column, justify="right" if column in ("MB", "vocabulary", "context", "top-1") else "left")

    def add(label: str, model: object, info: object, parity: dict[str, object], precision: str) -> None:
        size = sum(opened.files[name]["size"] for name in opened.folder_files(str(model))) / 1e6
        agreement = parity.get("top1_agreement")
        table.add_row(
            label,
            getattr(info, "architecture", ""),
            precision,
            f"{size:.1f}",
            str(getattr(info, "vocabulary", "")),
            str(getattr(info, "context", "")),
            f"{agreement:.3f}" if isinstance(agreement, float) else "-",
            "equal" if parity.get("greedy_equal") else "differs",
            getattr(info, "license", ""),
        )

    drafter = opened.drafter
    learns = "learns" if drafter.trainable else "cannot learn"
    add(f"drafter ({learns})", drafter.model, drafter, drafter.parity, drafter.precision)
    for name, target in opened.targets.items():
        for graph in target.graphs:
            add(f"target {name}", graph.model, target, graph.parity, graph.precision)
    console.print(table)
    console.print(
        "top-1 and greedy: agreement with the source checkpoint on the parity gate's text. "
        f"Exported {opened.created} with " + ", ".join(f"{k} {v}" for k, v in opened.tools.items())
    )
