"""Imports point one way: which room may import which, and which packages reach a device."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEVICE = {"numpy", "onnxruntime", "tokenizers", "jinja2", "fastjsonschema", "filelock", "platformdirs"}
ROOMS = {
    "runtime": set(),
    "adapters": {"runtime"},
    "models": set(),
    "export": {"runtime", "models"},
    "tools": {"runtime", "adapters", "models", "export"},
}
# What a room may import beside the standard library; None: anything.
PACKAGES: dict[str, set[str] | None] = {
    "runtime": DEVICE,
    "adapters": DEVICE,
    "models": set(),
    "export": None,
    "tools": None,
}


def imports(path: Path) -> set[str]:
    """Every module that a file names, wherever in the file; relative imports are not used here."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        top, *rest = module.split(".")
        if top == "omnidraft":
            assert rest and rest[0] in ROOMS[room] | {room}, f"{room} may not import {module}"
        elif PACKAGES[room] is not None and top not in sys.stdlib_module_names:
            worker = {"onnx"} if path.name == "ort_worker.py" else set()  # a program of its own, in a folder of its own
            assert top in (PACKAGES[room] or set()) | worker, f"{room} may not import {module}"


def test_torch_lives_in_export_training_and_peers_only() -> None:
    users = {
        str(p.relative_to(ROOT)) for p in sources() if {m.split(".")[0] for m in imports(p)} & {"torch", "transformers"}
    }
    assert users, "the check is vacuous"
    assert all(user.startswith(("export/", "tools/training/", "tools/peers/run_")) for user in users)


def test_algorithm_modules_do_no_io() -> None:
    pure = (
        "noise",
        "sampling",
        "drafting",
        "verification",
        "paper",
        "translation",
        "trie",
        "ngram_cache",
        "lookup",
        "policy",
        "pass_times",
        "features",
        "stop",
        "logprobs",
        "clock",
    )
    forbidden = {"os", "io", "pathlib", "onnxruntime", "subprocess", "socket", "json"}
    for name in pure:
        assert not imports(ROOT / "runtime" / f"{name}.py") & forbidden, name


def test_files_stay_readable() -> None:
    long = {
        str(p.relative_to(ROOT)): n for p in sources() if (n := len(p.read_text(encoding="utf-8").splitlines())) > 330
    }
    assert not long, f"files over 330 lines: {long}"


@pytest.mark.parametrize("module", ["runtime.decoder", "adapters.store", "export.pipeline", "tools.cli"])
def test_telemetry_is_off_before_onnxruntime_is_imported(module: str) -> None:
    code = (
        "import sys, os, importlib.abc\n"
        "class Watch(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'onnxruntime': assert os.environ.get('ORT_DISABLE_TELEMETRY') == '1'\n"
        f"sys.meta_path.insert(0, Watch())\nimport omnidraft.{module}"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
