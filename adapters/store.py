"""Where adapters are kept: versions of the LoRA weights of one drafter for one target, in the state folder.

Files are written first and the index that names them last, all under the folder's lock: a process that is killed
leaves the versions of before or after, and what it wrote in vain goes when the next version comes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omnidraft.adapters.index import Facts, Index, Version, adapter_name, optimizer_name
from omnidraft.adapters.layout import Floats, Layout
from omnidraft.adapters.trainer import Snapshot
from omnidraft.runtime.acceptance import HEAD_PREFIX
from omnidraft.runtime.acceptance import check as check_head
from omnidraft.runtime.adapter_file import load_adapter, save_adapter
from omnidraft.runtime.bundle import Bundle, ModelInfo
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.files import write_whole
from omnidraft.runtime.state import State

SCHEMA = "omnidraft-adapters/1"
FOLDER, DOCUMENT = "adapters", "index.json"
SCRATCH = ".adapter.new"


class AdapterStore:
    """The adapter of one pair; it belongs to the weights of both models.

    A version whose files are missing or damaged is dropped with one line, and the nearest whole version before it is
    used. Where nothing can be written, one line says why and the versions stay as they were.
    """

    def __init__(self, state: State, drafter: ModelInfo, target: ModelInfo, layout: Layout) -> None:
        self._state, self._layout = state, layout
        self._empty = Index(drafter.source["name"], target.source["name"])
        self._key = {"drafter": drafter.weights_sha256, "target": target.weights_sha256}
        self._folder = f"{FOLDER}/{drafter.weights_sha256[:12]}-{target.weights_sha256[:12]}"
        self._document = f"{self._folder}/{DOCUMENT}"

    def index(self) -> Index:
        """The versions and which is in use; the files are not looked at."""
        payload = self._state.load(self._document, SCHEMA, dict(self._key))
        return self._empty if payload is None else Index.from_payload(payload)

    def versions(self) -> tuple[Version, ...]:
        """The kept versions, oldest first; the files are not looked at."""
        return self.index().versions

    def current(self) -> tuple[Version | None, Snapshot | None]:
        """The version in use, checked and read; (None, None) is the drafter as shipped."""
        return self._state.together(self._read_current) or (None, None)

    def add(self, snapshot: Snapshot, facts: Facts) -> Version | None:
        """Keep a snapshot as a new version, which is then in use; None if it could not be kept.

        Raises ValueError for weights that are not finite or not of this drafter.
        """
        if not np.isfinite(snapshot.lora).all():
            raise ValueError("weights that are not finite")
        self._layout.rank(snapshot.lora)
        if self._state.folder is None:
            return None
        return self._state.together(lambda: self._add(snapshot, facts))

    def use(self, number: int) -> bool:
        """Go back to a kept version, or to 0, the drafter as shipped.

        False if its files are damaged or nothing can be written; OmniDraftError for a number that is not kept.
        """
        return bool(self._state.together(lambda: self._use(number)))

    def parameters(self, number: int) -> dict[str, Floats] | None:
        """LoRA parameters of a version by name; None if its files are damaged. Raises OmniDraftError as `use`."""
        snapshot = self._state.together(lambda: self._snapshot(self._find(number)))
        return None if snapshot is None else self._layout.parameters(snapshot.lora)

    def export(self, number: int, path: Path) -> bool:
        """Copy a version's LoRA weights to a file of the user's; False if they are damaged.

        Raises OmniDraftError as `use`, and if `path` cannot be written.
        """
        data = self._state.together(lambda: self._adapter(self._find(number)))
        if data is None:
            return False
        try:
            write_whole(path, data)
        except OSError as error:
            raise OmniDraftError(f"{path}: not written ({error.strerror}); give another FILE") from None
        return True

    def import_(self, path: Path) -> Version | None:
        """Keep an .onnx_adapter file as a new version, which is then in use; None if it could not be kept.

        Raises OmniDraftError if the file is no adapter of this drafter.
        """
        return self.add(read_adapter(path, self._layout), Facts(note=f"imported from {path.name}"))

    def forget(self) -> bool:
        """Remove every version and what was set aside; False if it could not be done. Numbers go on."""
        return bool(self._state.together(self._forget))

    def _find(self, number: int) -> Version:
        index = self.index()
        found = index.find(number)
        if found is None:
            kept = ", ".join(str(version.number) for version in index.versions) or "none"
            raise OmniDraftError(f"{index.drafter} for {index.target}: no version {number}; kept: {kept}")
        return found

    def _read_current(self) -> tuple[Version, Snapshot] | None:
        index = self.index()
        while (version := index.find(index.current)) is not None:
            snapshot = self._snapshot(version)
            if snapshot is not None:
                return version, snapshot
            index = index.without(version.number)  # also where the document cannot be written
        return None

    def _use(self, number: int) -> bool:
        if number and self._snapshot(self._find(number)) is None:
            return False
        return self._change(lambda index: index.using(number)) is not None

    def _add(self, snapshot: Snapshot, facts: Facts) -> Version | None:
        adapter, optimizer = self._write(".onnx_adapter", self._encoded(snapshot)), None
        if adapter is not None and snapshot.optimizer:
            optimizer = self._write(".optimizer", snapshot.optimizer)
        if adapter is None or (snapshot.optimizer and optimizer is None):
            return None
        version = Version(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            rank=self._layout.rank(snapshot.lora),
            trainer=snapshot.trainer,
            steps=snapshot.steps,
            loss=facts.loss,
            samples=facts.samples,
            forecast=facts.forecast,
            note=facts.note,
            adapter=adapter,
            optimizer=optimizer,
        )
        index = self._change(lambda index: index.added(version))
        if index is None:
            return None
        self._state.keep_only(self._folder, {DOCUMENT, *index.files()})
        return index.find(index.current)

    def _forget(self) -> bool:
        if self._change(lambda index: Index(index.drafter, index.target, last=index.last)) is None:
            return False
        self._state.keep_only(self._folder, {DOCUMENT}, aside=0)
        return True

    def _change(self, change: Callable[[Index], Index]) -> Index | None:
        """The index after a change, None if it could not be written."""
        payload = self._state.update(
            self._document,
            SCHEMA,
            dict(self._key),
            lambda old: change(self._empty if old is None else Index.from_payload(old)).payload(),
        )
        return None if payload is None else Index.from_payload(payload)

    def _encoded(self, snapshot: Snapshot) -> bytes:
        assert self._state.folder is not None
        scratch = self._state.folder / self._folder / SCRATCH  # ONNX Runtime writes to paths only
        scratch.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            save_adapter(scratch, {**self._layout.parameters(snapshot.lora), **(snapshot.head or {})})
            return scratch.read_bytes()
        finally:
            scratch.unlink(missing_ok=True)

    def _write(self, suffix: str, data: bytes) -> str | None:
        name = hashlib.sha256(data).hexdigest()[:12] + suffix
        return self._state.write_file(f"{self._folder}/{name}", data)

    def _adapter(self, version: Version) -> bytes | None:
        return self._read(version, adapter_name(version), version.adapter)

    def _snapshot(self, version: Version) -> Snapshot | None:
        assert self._state.folder is not None
        optimizer = self._optimizer(version)
        if optimizer is None or self._adapter(version) is None:
            return None
        try:
            found = read_adapter(self._state.folder / self._folder / adapter_name(version), self._layout)
        except OmniDraftError as error:  # whole, but of another ONNX Runtime
            self._state.warn(f"{error}; version {version.number} is dropped")
            self._drop(version)
            return None
        return replace(found, steps=version.steps, trainer=version.trainer, optimizer=optimizer)

    def _optimizer(self, version: Version) -> bytes | None:
        """The optimizer's state, empty where none was kept; None if it is damaged."""
        name = optimizer_name(version)
        return b"" if name is None else self._read(version, name, str(version.optimizer))

    def _read(self, version: Version, name: str, sha256: str) -> bytes | None:
        data = self._state.read_file(f"{self._folder}/{name}", sha256, f"version {version.number} is dropped")
        if data is None:
            self._drop(version)
        return data

    def _drop(self, version: Version) -> None:
        self._change(lambda index: index.without(version.number))


def open_store(bundle: Bundle, target: str | None, state: State) -> AdapterStore:
    """The adapters of a bundle's drafter for a target, the first for None.

    Raises OmniDraftError if the drafter cannot learn or the target is unknown.
    """
    _, info = bundle.target(target)
    if bundle.drafter.lora is None:
        raise OmniDraftError(
            f"{bundle.path}: its drafter cannot learn, it has no LoRA inputs; export one of Llama architecture"
        )
    return AdapterStore(state, bundle.drafter, info, Layout(bundle.drafter.lora["projections"]))


def stored(state: State) -> list[Index]:
    """Every pair of a state folder that has versions, whatever bundle it belongs to."""
    if state.folder is None:
        return []
    names = sorted(path.parent.name for path in (state.folder / FOLDER).glob(f"*/{DOCUMENT}"))
    pairs = [name for name in names if re.fullmatch("[0-9a-f]{12}-[0-9a-f]{12}", name)]
    payloads = [state.load(f"{FOLDER}/{name}/{DOCUMENT}", SCHEMA, None) for name in pairs]
    indexes = [Index.from_payload(payload) for payload in payloads if payload is not None]
    return [index for index in indexes if index.versions]


def read_adapter(path: Path, layout: Layout) -> Snapshot:
    """LoRA vector, and acceptance head if there is one, of an .onnx_adapter file.

    Raises OmniDraftError if it does not fit the drafter.
    """
    parameters = load_adapter(path)
    head = {name: parameters.pop(name) for name in list(parameters) if name.startswith(HEAD_PREFIX)}
    try:
        if head:
            check_head(head)
        _check(parameters)
        vector = layout.vector(parameters)
        layout.rank(vector)
    except (ValueError, OmniDraftError) as error:
        raise OmniDraftError(f"{path}: not an adapter of this drafter ({error})") from None
    return Snapshot(vector, head=head or None)


def _check(parameters: dict[str, NDArray[np.generic]]) -> None:
    for name, value in parameters.items():
        if value.dtype != np.float32 or value.ndim != 2 or 0 in value.shape:
            raise ValueError(
                f"{name} is {value.dtype} {value.shape}, not float32 [in, rank] or [rank, out], rank 1 or more"
            )
        if not np.isfinite(value).all():
            raise ValueError(f"{name} has numbers that are not finite")
