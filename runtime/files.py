"""Files that are whole or not there: how one is written, read with suspicion, and set aside."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from omnidraft.runtime.errors import one_line

_ASIDE = re.compile(r"\.[a-z-]+-([0-9]{8}T[0-9]{6}\.[0-9]{6}Z)$")


class Unusable(Exception):
    """A file that must not be used. `label` becomes part of the name it is set aside under."""

    def __init__(self, label: str, why: str) -> None:
        super().__init__(one_line(why))
        self.label = label


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file, so that a reader finds the old or the new one, never a torn one. Raises OSError.

    Of two writers at once one may lose; the state folder's lock keeps them apart.
    """
    # One fixed name: what a killed process left is replaced, nothing piles up.
    temporary = path.with_name(f".{path.name}.new")
    try:
        with suppress(FileNotFoundError):
            temporary.unlink()
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        # The new file is in place. Where a folder cannot be synced, a power cut may bring back the old one.
        with suppress(OSError):
            _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a file. Raises Unusable if it is no regular file or over `limit` bytes; OSError."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would block, a link could lead anywhere
        raise Unusable("damaged", "not a regular file")
    if status.st_size > limit:
        raise Unusable("damaged", f"damaged: {status.st_size} bytes, at most {limit} are read")
    return path.read_bytes()


def set_aside(path: Path, label: str, kept: int) -> Path:
    """Rename a file to a name that says why and when; the last `kept` of its kind stay. Raises OSError."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = path.with_name(f"{path.name}.{label}-{stamp}")
    path.rename(aside)
    for old in sorted(path.parent.glob(f"{path.name}.{label}-*"))[:-kept]:
        old.unlink()
    return aside


def remove_inside(folder: Path, spared: Collection[str]) -> None:
    """Remove everything in a folder but files of these names at its top; links are not followed. Raises OSError."""
    for path, folders, files in os.walk(folder, topdown=False):
        here = Path(path)
        for name in files:
            if here != folder or name not in spared:
                (here / name).unlink()
        for name in folders:
            inner = here / name
            if inner.is_symlink():
                inner.unlink()
            else:
                inner.rmdir()


def last_aside(folder: Path, count: int) -> list[Path]:
    """What was set aside in a folder last, the newest at the end. Raises OSError if there is no folder."""
    found = sorted((match[1], path) for path in folder.iterdir() if (match := _ASIDE.search(path.name)))
    return [path for _, path in found[max(0, len(found) - count) :]]
