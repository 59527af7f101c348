"""What every reader of a stranger's file begins with: how large it may be, whether it is JSON, where it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from omnidraft.runtime.files import Unusable, read_regular

MIB = 1 << 20


def parse_json(data: bytes | str) -> Any:
    """JSON as the standard has it. Raises ValueError, also for NaN and for nesting that no file of ours has."""
    try:
        return json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a regular file. Raises ValueError for anything else, and over `limit` bytes; OSError."""
    try:
        return read_regular(path, limit)
    except Unusable as why:
        raise ValueError(str(why)) from None


def leaves(root: Path, name: str) -> str:
    """Why a file of a folder must not be read: in a few words, "" if it may.

    `name` is relative, its parts joined by "/", as a manifest has it. Links are refused wherever they lead: what they
    lead to may change after it was checked.
    """
    path = root / name
    try:
        if not path.resolve().is_relative_to(root.resolve()):
            return "leaves the bundle's folder"
        above = [path, *path.parents]
        if any(part.is_symlink() for part in above[: above.index(root)]):
            return "is a link, or in a linked folder; copy the file itself there"
    except (OSError, ValueError, RuntimeError):  # a loop of links, a name that no system takes
        return "is no path"
    return ""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
