"""The bundle: one folder with a drafter, its targets and a manifest that describes every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import fastjsonschema

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.external_data import external_files
from omnidraft.runtime.hashes import Hashes
from omnidraft.runtime.hashes import sha256 as sha256
from omnidraft.runtime.state import State
from omnidraft.runtime.untrusted import MIB, leaves, parse_json, read_limited

SCHEMA = "omnidraft-bundle/2"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 8 * MIB
PROFILES = ("cpu", "portable", "static")


@dataclass(frozen=True)
class Graph:
    """A model's ONNX graph of a profile (what it is made for) at a precision.

    `static`: what the runtime must know of graphs with fixed shapes (see `StaticDecoder`), one for each width, that lie
    beside `model`, the widest of them; None where one graph takes any number of rows. `nnapi`: what ONNX Runtime's
    checker says of them. `qnn`: what they were compiled for, in a profile "qnn:SOC"; precision fp16 is there only.
    """

    profile: str
    precision: str
    model: str
    parity: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    opset: int = 0
    static: dict[str, Any] | None = None
    nnapi: dict[str, Any] | None = None
    qnn: dict[str, Any] | None = None

    @property
    def label(self) -> str:
        """For people: the precision, and the profile where that is not the usual one."""
        return self.precision if self.profile == "cpu" else f"{self.precision}, {self.profile}"

    @property
    def folder(self) -> str:
        """Where its files are."""
        return self.model.rsplit("/", 1)[0]

    @property
    def models(self) -> list[str]:
        """The .onnx files: one, or one for each width."""
        if self.static is None:
            return [self.model]
        return [f"{self.folder}/{name}" for name in self.static["widths"].values()]


@dataclass(frozen=True)
class ModelInfo:
    """What drafter and targets have in common. Paths are relative to the bundle."""

    architecture: str
    source: dict[str, Any]
    weights_sha256: str
    tokenizer: str
    tokenizer_sha256: str
    chat_template: str | None
    bos: int | None
    template_tokens: dict[str, str]
    stop_ids: tuple[int, ...]
    vocabulary: int
    context: int
    license: str


@dataclass(frozen=True)
class Drafter(ModelInfo):
    """The model that guesses. `lora` names the layers that can learn, None if the graph has no hooks.

    `training`: the files of the graphs it learns with, "loss", "step" and their "weights"; None without hooks.
    `head`: the files of its acceptance head, "graph" and "weights"; None if the graph does not give hidden states.
    `graphs`: those of other profiles than cpu.
    """

    model: str
    precision: str
    trainable: bool
    lora: dict[str, Any] | None
    training: dict[str, str] | None
    head: dict[str, str] | None
    parity: dict[str, Any]
    opset: int
    graphs: tuple[Graph, ...] = ()

    @property
    def all_graphs(self) -> tuple[Graph, ...]:
        """That of the cpu profile first."""
        return Graph("cpu", self.precision, self.model, self.parity, {}, self.opset), *self.graphs


@dataclass(frozen=True)
class Target(ModelInfo):
    """A model that decides. The first graph is the default one."""

    map: str
    graphs: tuple[Graph, ...]


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Every path in it has been found; hashes are checked by `verify`."""

    path: Path
    drafter: Drafter
    targets: dict[str, Target]
    files: dict[str, dict[str, Any]]
    tools: dict[str, str]
    created: str
    hashes: Hashes = field(default_factory=Hashes)

    def target(self, name: str | None) -> tuple[str, Target]:
        """The target called `name`, or the first one for None. Raises OmniDraftError if unknown."""
        if name is None:
            return next(iter(self.targets.items()))
        if name not in self.targets:
            raise OmniDraftError(f"{self.path}: no target {name!r}; it has {', '.join(self.targets)}")
        return name, self.targets[name]

    def graph(self, target: str, precision: str | None, profiles: Sequence[str] = PROFILES) -> Graph:
        """The first graph of a target at a precision (None: any), one profile after the other.

        Raises OmniDraftError if there is none.
        """
        graphs = self.targets[target].graphs
        for profile in profiles:
            for graph in graphs:
                if graph.profile == profile and precision in (None, graph.precision):
                    return graph
        have = ", ".join(f"{g.precision} ({g.profile})" for g in graphs)
        wanted = "graph" if precision is None else f"precision {precision!r}"
        raise OmniDraftError(
            f"{self.path}: target {target!r} has no {wanted} of the profile {' or '.join(profiles)}; it has {have}"
        )

    def drafter_graph(self, profiles: Sequence[str] = PROFILES) -> Graph:
        """The drafter's graph of the first profile that it has one of. Raises OmniDraftError if there is none."""
        graphs = self.drafter.all_graphs
        found = [graph for profile in profiles for graph in graphs if graph.profile == profile]
        if not found:
            have = ", ".join(graph.profile for graph in graphs)
            raise OmniDraftError(f"{self.path}: the drafter has no {' or '.join(profiles)} graph; it has {have}")
        return found[0]

    def digest(self, graph: Graph) -> str:
        """SHA-256 of a graph's .onnx file, or of the digests of several."""
        found = [str(self.files[name]["sha256"]) for name in graph.models]
        return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()

    def folder_files(self, relative: str) -> list[str]:
        """Files that belong to a graph: the model and what lies beside it (external data)."""
        folder = relative[: relative.rfind("/") + 1]
        return [name for name in self.files if name.startswith(folder) and "/" not in name[len(folder) :]]

    def verify(self, names: Iterable[str]) -> None:
        """Check size and SHA-256 of files of the bundle, and that graphs read nothing but files beside them.

        Raises OmniDraftError for the first that differs.
        """
        names = list(names)
        for name in names:
            path, expected = self.path / name, self.files[name]
            size = path.stat().st_size
            if size != expected["size"]:
                raise OmniDraftError(
                    f"{path}: {size} bytes, the manifest says {expected['size']}; the file is truncated or was "
                    "changed: export the bundle again or copy it anew"
                )
        for path, digest in self.hashes.of(self.path / name for name in names).items():
            if digest != self.files[path.relative_to(self.path).as_posix()]["sha256"]:
                raise OmniDraftError(f"{path}: changed since export (SHA-256 differs); export the bundle again")
        for name in self.graph_files.intersection(names):
            self._check_external(name)

    @property
    def graph_files(self) -> set[str]:
        """Every file that is loaded as a graph."""
        drafter, targets = self.drafter, self.targets.values()
        graphs = [*drafter.all_graphs, *(graph for target in targets for graph in target.graphs)]
        others = [(drafter.head or {}).get("graph"), *((drafter.training or {}).get(part) for part in ("loss", "step"))]
        return {model for graph in graphs for model in graph.models} | {name for name in others if name is not None}

    def _check_external(self, name: str) -> None:
        folder = name[: name.rfind("/") + 1]
        beside = {file.removeprefix(folder) for file in self.folder_files(name)}
        others = external_files(self.path / name) - beside
        if others:
            raise OmniDraftError(
                f"{self.path / name}: reads {min(others)!r}, which is no file of the bundle beside it; "
                "do not use it, or export the bundle again"
            )


@cache
def _check() -> Any:
    schema = json.loads((Path(__file__).parent / "schemas" / "manifest.json").read_text(encoding="utf-8"))
    return fastjsonschema.compile(schema)


def parse_manifest(text: str | bytes, path: Path) -> dict[str, Any]:
    """A manifest that fits its schema. Raises OmniDraftError naming the part that does not."""
    try:
        manifest = parse_json(text)
        _check()(manifest)
    except ValueError as error:  # of decoding, JSON and schema alike
        why = str(error)[:200]
        raise OmniDraftError(f"{path}: not a manifest of this OmniDraft ({why}); export the bundle again") from None
    described: dict[str, Any] = manifest
    return described


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a bundle. Raises OmniDraftError if it is too large or does not fit its schema; OSError."""
    try:
        return parse_manifest(read_limited(path, MAX_MANIFEST_BYTES), path)
    except ValueError as error:
        raise OmniDraftError(f"{path}: not a manifest ({error}); export the bundle again") from None


def open_bundle(path: Path, state: State | None = None) -> Bundle:
    """Read the manifest and find every file it names; no model is loaded and no hash computed.

    `state`: where hashes are remembered; without it, every check reads the whole file.
    Raises OmniDraftError if the folder is not a bundle, or a file is missing, is a link or leaves the folder.
    """
    source = path / MANIFEST
    make = "make one with: omnidraft export --drafter default --target NAME=SRC --out DIR"
    if path.is_file():
        raise OmniDraftError(f"{path}: is a file; give the bundle's folder")
    if not path.is_dir():
        raise OmniDraftError(f"{path}: no such bundle; {make}")
    if not source.is_file():
        raise OmniDraftError(f"{path}: not a bundle, it has no {MANIFEST}; {make}")
    manifest = read_manifest(source)
    for name in manifest["files"]:
        why = leaves(path, name)
        if why:
            raise OmniDraftError(f"{source}: {name!r} {why}")
        if not (path / name).is_file():
            raise OmniDraftError(f"{path / name}: missing; export the bundle again or copy it anew")
    named = [manifest["drafter"][k] for k in ("model", "tokenizer", "chat_template")]
    for part in ("training", "head"):
        named += (manifest["drafter"][part] or {}).values()
    for target in manifest["targets"].values():
        named += [target["tokenizer"], target["chat_template"], target["map"]]
    graphs = {
        name: tuple(Graph(**graph) for graph in model.get("graphs", ()))
        for name, model in [(None, manifest["drafter"]), *manifest["targets"].items()]
    }
    for graph in (graph for some in graphs.values() for graph in some):
        named += [graph.model, *graph.models]
        named += [] if graph.static is None else [f"{graph.folder}/{graph.static['weights']}"]
    for name in named:
        if name is not None and name not in manifest["files"]:
            raise OmniDraftError(f"{source}: {name!r} is used but not listed under files; export the bundle again")
    if len({name.rsplit("/", 1)[0] for name in (manifest["drafter"]["training"] or {}).values()}) > 1:
        raise OmniDraftError(f"{source}: the training graphs are not in one folder; export the bundle again")
    for label, model in [("drafter", manifest["drafter"]), *manifest["targets"].items()]:
        if max(model["stop_ids"] + [model["bos"] or 0]) >= model["vocabulary"]:
            raise OmniDraftError(f"{source}: {label} has token ids beyond its vocabulary; export the bundle again")
    drafter = manifest["drafter"]
    return Bundle(
        path=path,
        drafter=Drafter(**{**drafter, "stop_ids": tuple(drafter["stop_ids"]), "graphs": graphs[None]}),
        targets={
            name: Target(**{**target, "stop_ids": tuple(target["stop_ids"]), "graphs": graphs[name]})
            for name, target in manifest["targets"].items()
        },
        files=manifest["files"],
        tools=manifest["tools"],
        created=manifest["created"],
        hashes=Hashes(state),
    )
