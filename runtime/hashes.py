"""SHA-256 of files, remembered in the state folder, so that a later start need not read what has not changed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from omnidraft.runtime.state import Payload, State

FILE, SCHEMA = "hashes.json", "omnidraft-hashes/1"
MOST = 1024  # files remembered; the oldest entries go first
# A file changed so lately may change again without a new time: clocks of file systems are coarse.
SETTLED_NS = 2_000_000_000


class Hashes:
    """Digests of files by path, for as long as size, times and inode stay; without a state folder, all are computed.

    It saves time and is no protection from who can write the state folder: that is the user.
    """

    def __init__(self, state: State | None = None) -> None:
        self._state = state
        self._known: Payload | None = None

    def of(self, paths: Iterable[Path]) -> dict[Path, str]:
        """The digest of each file. Raises OSError."""
        found, new = {}, {}
        for path in paths:
            known = self._remembered().get(str(path.absolute()))
            identity = _identity(path.stat())
            if known is not None and {name: known[name] for name in identity} == identity:
                found[path] = str(known["sha256"])
                continue
            found[path] = digest = sha256(path)
            settled = time.time_ns() - max(identity["mtime_ns"], identity["ctime_ns"]) > SETTLED_NS
            if settled and _identity(path.stat()) == identity:
                new[str(path.absolute())] = {**identity, "sha256": digest}
        if new and self._state is not None:
            written = self._state.update(FILE, SCHEMA, {}, lambda old: _joined(old or {}, new))
            self._known = written or self._known
        return found

    def _remembered(self) -> Payload:
        if self._known is None:
            self._known = (self._state and self._state.load(FILE, SCHEMA, {})) or {}
        return self._known


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _identity(status: os.stat_result) -> dict[str, int]:
    """What changes with a file's content, as far as the system tells. `ctime_ns` cannot be set back on POSIX."""
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }


def _joined(old: Payload, new: Payload) -> Payload:
    kept = {name: value for name, value in old.items() if name not in new} | new
    return dict(list(kept.items())[-MOST:])
