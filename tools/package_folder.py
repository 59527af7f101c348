"""Packages in a folder of their own, for a worker process alone to see: there as a whole and proved, or not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omnidraft.runtime.errors import OmniDraftError

T = TypeVar("T")


def make_folder(
    folder: Path,
    python: Path,
    requirements: Sequence[str],
    mark: tuple[str, Mapping[str, Any]],
    prove: Callable[[Path], T],
) -> T:
    """Install exactly these requirements for an interpreter; the folder is replaced once `prove(the new one)` returns.

    `mark`: name and content of a file that tells a folder as ours. Returns what `prove` does. Raises OmniDraftError,
    and leaves the folder as it was, if it holds something else or pip fails; what `prove` raises too.
    """
    name, content = mark
    ours = folder.is_dir() and ((folder / name).is_file() or not any(folder.iterdir()))
    if folder.exists() and not ours:
        raise OmniDraftError(f"{folder}: holds something else; name another folder with --packages")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        new = Path(temporary) / "new"
        _pip(python, new, requirements)
        (new / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        proved = prove(new)
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        new.rename(folder)
        shutil.rmtree(Path(temporary) / "old", ignore_errors=True)
    return proved


def megabytes(folder: Path) -> float:
    """What the files of a folder take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def _pip(python: Path, target: Path, requirements: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--target", str(target), *requirements]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise OmniDraftError(f"pip could not install {requirements[0].partition('==')[0]} ({errors[-1]})")
