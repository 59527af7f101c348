"""Qualcomm's HTP simulator for tests, in processes of its own: a plug-in once registered is there for every test."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CONSTRAINTS = (Path(__file__).parent.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
PACKAGE = next(line for line in CONSTRAINTS if line.startswith("onnxruntime-qnn"))
HERE = (platform.system(), platform.machine()) == ("Linux", "x86_64") and sys.version_info[:2] in ((3, 11), (3, 14))
REASON = f"the simulator is in the packages of {PACKAGE} for CPython 3.11 and 3.14 on x86-64 Linux only"

missing = pytest.mark.skipif(find_spec("onnxruntime_qnn") is not None, reason="onnxruntime-qnn is installed here")


def needed(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test as one that runs on the simulator."""
    return pytest.mark.slow(pytest.mark.skipif(not HERE, reason=REASON)(test))


def install(folder: Path) -> Path:
    """onnxruntime-qnn into a folder (243 MB), for beside the onnxruntime that is there."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), PACKAGE], check=True)
    return folder


def beside(packages: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """A Python process that can import onnxruntime-qnn."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def facts(packages: Path, script: str, folder: Path) -> dict[str, Any]:
    """What a script of this folder prints as JSON; the simulator has printed lines of its own before."""
    output = beside(packages, Path(__file__).parent / script, folder).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found
