"""Folders of results that are slow to make, each under a key of what it was made from."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import platformdirs
from filelock import FileLock

SIZES = "sizes.json"


def cache_root() -> Path:
    """Where exports keep conversions; deleting it costs time only."""
    return platformdirs.user_cache_path("omnidraft")


def key_of(**parts: Any) -> str:
    """SHA-256 of everything that a result depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find(kind: str, key: str) -> Path | None:
    """The finished folder of a result; None if there is none, or a file of it is missing or cut short."""
    folder = cache_root() / kind / key
    try:
        sizes = json.loads((folder / SIZES).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return None
    return folder if whole else None


def find_or_make(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder of a result, filled by `make(folder)` where it is not there yet.

    It takes its name only once it is complete; two processes wait for each other.
    """
    parent = cache_root() / kind
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / f"{key}.lock"):
        found = find(kind, key)
        if found is not None:
            return found
        target, made = parent / key, Path(mkdtemp(prefix="making-", dir=parent))
        try:
            make(made)
            sizes = {file.relative_to(made).as_posix(): file.stat().st_size for file in _files(made)}
            (made / SIZES).write_text(json.dumps(sizes), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return target


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
