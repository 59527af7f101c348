"""What a platform needs of a bundle: one target at one precision, its drafter, and a manifest of just that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft.runtime.bundle import MANIFEST, Bundle, Graph, Target, open_bundle, read_manifest
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.qnn import SIMULATOR
from omnidraft.tools.packages.archive import Item

FOLDER = "bundle"


@dataclass(frozen=True)
class Needs:
    """What a platform has a use for.

    `learns`: what the drafter learns with; `static`: graphs of fixed shapes beside those that decode; `profiles`: of
    target graphs that can decode there, the best first.
    """

    learns: bool
    static: bool
    profiles: tuple[str, ...] = ("cpu",)


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
            ("drafter", [n for n in self.bundle.files if n == drafter.model or n.startswith(f"{drafter.model}.")]),
            (graph, self.bundle.folder_files(self.graph.model)),
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


def select(path: Path, target: str | None, precision: str | None, needs: Needs) -> Selection:
    """Open a bundle and choose the target (default: its first) at a precision (default: the target's first).

    Raises OmniDraftError for a bundle, target or precision that is not there, or without a graph that can decode.
    """
    bundle = open_bundle(path)
    name, info = bundle.target(target)
    have = list(dict.fromkeys(graph.profile for graph in info.graphs))
    if not set(have) & set(needs.profiles):
        raise OmniDraftError(
            f"{path}: target {name!r} has {', '.join(have)} graphs only, and such a package decodes with those of "
            f"{' or '.join(needs.profiles)}; export again with --profile {','.join(('cpu', *have))}"
        )
    graph = bundle.graph(name, precision, needs.profiles)
    along = (*_fixed(info.graphs), *_fixed(bundle.drafter.graphs)) if needs.static else ()
    return Selection(bundle, name, info, graph, needs.learns, tuple(other for other in along if other is not graph))


def _fixed(graphs: Sequence[Graph]) -> list[Graph]:
    """A model's first graph of fixed shapes, if it has any, and those that were compiled for devices."""
    plain = [graph for graph in graphs if graph.profile == "static"]
    return plain[:1] + [graph for graph in graphs if graph.qnn and graph.qnn["soc"] != SIMULATOR]
