"""What a platform needs of a bundle: one target at one precision, its drafter, and a manifest of just that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft.runtime.bundle import MANIFEST, Bundle, Graph, Target, open_bundle, read_manifest
from omnidraft.runtime.qnn import SIMULATOR
from omnidraft.tools.packages.archive import Item

FOLDER = "bundle"


@dataclass(frozen=True)
class Selection:
    """The part of a bundle that goes into a package. `learns`: with what the drafter learns with on the device.

    `static`: graphs of fixed shapes of target and drafter, which go along where a platform has a use for them.
    """

    bundle: Bundle
    name: str
    target: Target
    graph: Graph
    learns: bool
    static: tuple[Graph, ...] = ()

    @property
    def files(self) -> dict[str, str]:
        """File of the bundle -> the row of the size table it belongs to."""
        drafter, target = self.bundle.drafter, self.target
        head, training = (part or {} for part in (drafter.head, drafter.training))
        graph = f"target {self.name} {self.graph.precision}"
        rows: list[tuple[str, Sequence[str | None]]] = [
            ("drafter", [n for n in _graph_files(self.bundle, drafter.model) if n not in head.values()]),
            (graph, _graph_files(self.bundle, self.graph.model)),
            ("static graphs", [n for g in self.static for n in self.bundle.folder_files(g.model)]),
            ("tokenizers and map", [drafter.tokenizer, target.tokenizer, target.map]),
            ("chat templates", [drafter.chat_template, target.chat_template]),
        ]
        if self.learns:
            rows += [("acceptance head", list(head.values())), ("training graphs", list(training.values()))]
        return {name: row for row, names in rows for name in names if name is not None}

    def manifest(self) -> dict[str, Any]:
        """The bundle's manifest, cut down to what is inside. Without what it learns with, the drafter cannot learn."""
        whole = read_manifest(self.bundle.path / MANIFEST)
        drafter = whole["drafter"]
        if not self.learns:
            drafter = {**drafter, "trainable": False, "lora": None, "training": None, "head": None}
        models = {graph.model for graph in (self.graph, *self.static)}
        drafter = {**drafter, "graphs": [g for g in drafter.get("graphs", ()) if g["model"] in models]}
        target = whole["targets"][self.name]
        chosen = [g for g in target["graphs"] if g["model"] in models]
        files = {name: whole["files"][name] for name in sorted(self.files)}
        return {**whole, "drafter": drafter, "targets": {self.name: {**target, "graphs": chosen}}, "files": files}

    def items(self) -> list[Item]:
        """The bundle's files and its manifest, under `bundle/`. Every file's hash is checked here."""
        self.bundle.verify(self.files)
        found = [
            Item(f"{FOLDER}/{name}", self.bundle.path / name, row, self.bundle.files[name]["sha256"])
            for name, row in self.files.items()
        ]
        text = json.dumps(self.manifest(), indent=1) + "\n"
        return [*found, Item(f"{FOLDER}/{MANIFEST}", text.encode(), "notes and licences")]


def select(path: Path, target: str | None, precision: str | None, learns: bool, static: bool) -> Selection:
    """Open a bundle and choose the target (default: its first) at a precision (default: the target's first).

    `static`: with each model's first graph of fixed shapes, and those compiled for devices, if it has any.
    Raises OmniDraftError for a bundle, target or precision that is not there.
    """
    bundle = open_bundle(path)
    name, info = bundle.target(target)
    along = (*_fixed(info.graphs), *_fixed(bundle.drafter.graphs)) if static else ()
    return Selection(bundle, name, info, bundle.graph(name, precision, ("cpu",)), learns, along)


def _fixed(graphs: Sequence[Graph]) -> list[Graph]:
    plain = [graph for graph in graphs if graph.profile == "static"]
    return plain[:1] + [graph for graph in graphs if graph.qnn and graph.qnn["soc"] != SIMULATOR]


def _graph_files(bundle: Bundle, model: str) -> list[str]:
    """A graph and the files with its weights, which are named after it."""
    return [name for name in bundle.folder_files(model) if name == model or name.startswith(f"{model}.")]
