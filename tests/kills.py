"""A forked child that dies at its n-th effect on the file system, as a process may that learns."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from omnidraft.adapters import store as module
from omnidraft.runtime.adapter_file import save_adapter

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


def die_at(n: int) -> None:
    """From now on, the n-th effect is the last: before it happens, with what was not synced half lost."""
    effects = 0

    def effect(unsynced: str | int | None = None) -> None:
        nonlocal effects
        effects += 1
        if effects == n:
            if unsynced is not None and stat.S_ISREG(os.stat(unsynced).st_mode):  # noqa: PTH116
                os.truncate(unsynced, os.stat(unsynced).st_size // 2)  # noqa: PTH116
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"):
            effect()

    def fsync(descriptor: int) -> None:
        effect(descriptor)
        sync(descriptor)

    def save(path: Path, parameters: dict[str, np.ndarray]) -> None:
        effect()
        save_adapter(path, parameters)
        effect(str(path))

    sync, os.fsync = os.fsync, fsync
    module.save_adapter = save  # ONNX Runtime's writes are not seen by Python
    sys.addaudithook(audit)


def survives(n: int, work: Callable[[], object]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            die_at(n)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the child failed by itself: {status}"
    return status == 0
