"""Faults on order, of the disk and of ONNX Runtime, in the process itself. (`kills` is for those that end it.)"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime as ort

from omnidraft.adapters import store
from omnidraft.runtime.adapter_file import save_adapter

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink")
INJECTED = "injected for the test"


class Disk:
    """Counts what is done to a folder, and lets the n-th of it fail with an errno; if `lasting`, all from then on.

    What a file was given and not yet synced is half lost when that is what fails.
    """

    def __init__(self, folder: Path, code: int, n: int, lasting: bool) -> None:
        self.folder, self.code, self.n, self.lasting = str(folder), code, n, lasting
        self.effects = 0

    @property
    def struck(self) -> bool:
        return self.effects >= self.n

    def effect(self, path: str) -> None:
        if not path.startswith(self.folder):
            return
        self.effects += 1
        if self.effects == self.n or (self.lasting and self.struck):
            raise OSError(self.code, os.strerror(self.code), path)


_disk: Disk | None = None
_sync = os.fsync


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _disk is None:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
    if (writes or event in CHANGES) and isinstance(arguments[0], str | os.PathLike):
        _disk.effect(os.fspath(arguments[0]))


def _fsync(descriptor: int) -> None:
    if _disk is not None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        try:
            _disk.effect(str(path))
        except OSError:
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
            raise
    _sync(descriptor)


def _save_adapter(path: Path, parameters: Mapping[str, Any]) -> None:
    """ONNX Runtime's own writes are not seen by Python."""
    if _disk is not None:
        try:
            _disk.effect(str(path))
        except OSError:
            path.write_bytes(b"half")
            raise
    save_adapter(path, parameters)


sys.addaudithook(_audit)  # it cannot be removed, but is idle without a disk


@contextmanager
def failing_disk(folder: Path, code: int, n: int = 1, lasting: bool = True) -> Iterator[Disk]:
    """A Disk while the context lasts."""
    global _disk
    os.fsync, store.save_adapter = _fsync, _save_adapter  # type: ignore[assignment]
    _disk = Disk(folder, code, n, lasting)
    try:
        yield _disk
    finally:
        _disk, os.fsync, store.save_adapter = None, _sync, save_adapter


class _Passes:
    """An ONNX Runtime session whose passes fail from the n-th on, `count` of them."""

    def __init__(self, session: Any, n: int, count: int) -> None:
        self._session, self._fails, self.passes = session, range(n, n + count), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def _pass(self, run: Callable[..., Any], *arguments: Any) -> Any:
        self.passes += 1
        if self.passes in self._fails:
            raise RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : {INJECTED}\nand a second line")
        return run(*arguments)

    def run(self, *arguments: Any) -> Any:
        return self._pass(self._session.run, *arguments)

    def run_with_iobinding(self, *arguments: Any) -> Any:
        return self._pass(self._session.run_with_iobinding, *arguments)


@contextmanager
def failing_passes(model: Any, n: int, count: int = 1) -> Iterator[_Passes]:
    """Passes n to n + count - 1 of a decoder, an acceptance head or a trainer fail while the context lasts."""
    session = model._session
    model._session = _Passes(session, n, count)
    try:
        yield model._session
    finally:
        model._session = session


@contextmanager
def failing_sessions(n: int) -> Iterator[list[str]]:
    """The n-th session that is created is not; the names of those that were asked for."""
    asked: list[str] = []
    real = ort.InferenceSession

    def create(model: Any, *arguments: Any, **named: Any) -> Any:
        asked.append(str(model))
        if len(asked) == n:
            raise RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : {INJECTED}\nand a second line")
        return real(model, *arguments, **named)

    ort.InferenceSession = create
    try:
        yield asked
    finally:
        ort.InferenceSession = real
