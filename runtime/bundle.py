"""The bundle: one folder with a drafter, its targets and a manifest that describes every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import fastjsonschema

from omnidraft.runtime.errors import OmniDraftError

SCHEMA = "omnidraft-bundle/2"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Graph:
    """One ONNX graph of a target: a profile (where it runs) at a precision."""

    profile: str
    precision: str
    model: str
    parity: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    opset: int = 0


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
    """

    model: str
    precision: str
    trainable: bool
    lora: dict[str, Any] | None
    training: dict[str, str] | None
    head: dict[str, str] | None
    parity: dict[str, Any]
    opset: int


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

    def target(self, name: str | None) -> tuple[str, Target]:
        """The target called `name`, or the first one for None. Raises OmniDraftError if unknown."""
        if name is None:
            return next(iter(self.targets.items()))
        if name not in self.targets:
            raise OmniDraftError(f"{self.path}: no target {name!r}; it has {', '.join(self.targets)}")
        return name, self.targets[name]

    def graph(self, target: str, precision: str | None, profile: str = "cpu") -> Graph:
        """The graph of a target at a precision, or its first one for None. Raises OmniDraftError if absent."""
        graphs = [g for g in self.targets[target].graphs if g.profile == profile]
        for graph in graphs:
            if precision in (None, graph.precision):
                return graph
        have = ", ".join(g.precision for g in graphs)
        raise OmniDraftError(f"{self.path}: target {target!r} has no precision {precision!r}; it has {have}")

    def folder_files(self, relative: str) -> list[str]:
        """Files that belong to a graph: the model and what lies beside it (external data)."""
        folder = relative.rsplit("/", 1)[0] + "/"
        return [name for name in self.files if name.startswith(folder) and "/" not in name[len(folder) :]]

    def verify(self, names: Iterable[str]) -> None:
        """Check size and SHA-256 of files of the bundle. Raises OmniDraftError for the first that differs."""
        for name in names:
            path, expected = self.path / name, self.files[name]
            size = path.stat().st_size
            if size != expected["size"]:
                raise OmniDraftError(
                    f"{path}: {size} bytes, the manifest says {expected['size']}; the file is truncated or was "
                    "changed: export the bundle again or copy it anew"
                )
            if sha256(path) != expected["sha256"]:
                raise OmniDraftError(f"{path}: changed since export (SHA-256 differs); export the bundle again")


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _check() -> Any:
    schema = json.loads((Path(__file__).parent / "schemas" / "manifest.json").read_text(encoding="utf-8"))
    return fastjsonschema.compile(schema)


def parse_manifest(text: str | bytes, path: Path) -> dict[str, Any]:
    """A manifest that fits its schema. Raises OmniDraftError naming the part that does not."""
    try:
        manifest = json.loads(text)
        _check()(manifest)
    except ValueError as error:  # of decoding, JSON and schema alike
        raise OmniDraftError(f"{path}: not a manifest of this OmniDraft ({error}); export the bundle again") from None
    return manifest


def open_bundle(path: Path) -> Bundle:
    """Read the manifest and find every file it names; no model is loaded and no hash computed.

    Raises OmniDraftError if the folder is not a bundle, or a file is missing or leaves the folder.
    """
    source = path / MANIFEST
    make = "make one with: omnidraft export --drafter default --target NAME=SRC --out DIR"
    if path.is_file():
        raise OmniDraftError(f"{path}: is a file; give the bundle's folder")
    if not path.is_dir():
        raise OmniDraftError(f"{path}: no such bundle; {make}")
    if not source.is_file():
        raise OmniDraftError(f"{path}: not a bundle, it has no {MANIFEST}; {make}")
    manifest = parse_manifest(source.read_bytes(), source)
    root = path.resolve()
    for name in manifest["files"]:
        file = (path / name).resolve()
        if not file.is_relative_to(root):
            raise OmniDraftError(f"{source}: {name!r} leaves the bundle's folder")
        if not file.is_file():
            raise OmniDraftError(f"{path / name}: missing; export the bundle again or copy it anew")
    named = [manifest["drafter"][k] for k in ("model", "tokenizer", "chat_template")]
    for part in ("training", "head"):
        named += (manifest["drafter"][part] or {}).values()
    for target in manifest["targets"].values():
        named += [target["tokenizer"], target["chat_template"], target["map"]]
        named += [graph["model"] for graph in target["graphs"]]
    for name in named:
        if name is not None and name not in manifest["files"]:
            raise OmniDraftError(f"{source}: {name!r} is used but not listed under files; export the bundle again")
    drafter = manifest["drafter"]
    return Bundle(
        path=path,
        drafter=Drafter(**{**drafter, "stop_ids": tuple(drafter["stop_ids"])}),
        targets={
            name: Target(
                **{
                    **target,
                    "stop_ids": tuple(target["stop_ids"]),
                    "graphs": tuple(Graph(**graph) for graph in target["graphs"]),
                }
            )
            for name, target in manifest["targets"].items()
        },
        files=manifest["files"],
        tools=manifest["tools"],
        created=manifest["created"],
    )
