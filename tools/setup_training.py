"""omnidraft setup-training: onnxruntime-training in a folder of its own, proved by starting a worker once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

VERSION = "1.19.2"
# Versions that every interpreter onnxruntime-training has a package for can install, without dependencies: they are
# all that the worker imports, and nothing of them is shared with OmniDraft's own environment.
REQUIREMENTS = (
    f"onnxruntime-training-cpu=={VERSION}",
    "onnx==1.17.0",
    "protobuf==5.29.5",
    "flatbuffers==24.3.25",
    "numpy==1.26.4; python_version >= '3.9'",
    "numpy==1.24.4; python_version < '3.9'",
)
FACTS = (
    "import json, platform as p, sys\n"
    "glibc = p.libc_ver()[0] == 'glibc'\n"
    "machine, kind = p.machine().lower(), p.python_implementation()\n"
    "print(json.dumps(dict(python=sys.version_info[:2], kind=kind, system=sys.platform, machine=machine,"
    " glibc=glibc, wide=sys.maxsize > 2**32)))"
)
Facts = dict[str, Any]


def setup_training(
    packages: Annotated[
        Path | None, typer.Option(help="Where to install. [default: the platform's folder for data]")
    ] = None,
    python: Annotated[Path | None, typer.Option(help="An interpreter for the worker, 3.8 to 3.12.")] = None,
) -> None:
    """Install onnxruntime-training for learning on the device; without it, onnx-step learns."""
    from omnidraft.adapters.trainers import default_packages
    from omnidraft.tools.package_folder import megabytes

    folder = packages or default_packages()
    if python is None and os.environ.get("OMNIDRAFT_TRAINING_PYTHON"):
        python = Path(os.environ["OMNIDRAFT_TRAINING_PYTHON"])
    print(f"installing onnxruntime-training {VERSION} and what it needs into {folder}", flush=True)
    install(folder, python)
    size = megabytes(folder)
    print(f"It works: {folder}, {size:.0f} MB. Training uses it from now on; to remove it, delete that folder.")


def install(folder: Path, python: Path | None = None) -> dict[str, str]:
    """Install into the folder, which is replaced as a whole once a worker has started from the new one.

    Returns versions by package. Raises OmniDraftError, and leaves the folder as it was, if the interpreter has no
    package, if pip fails, or if the folder holds something else.
    """
    from omnidraft.adapters.ort_training import Worker
    from omnidraft.adapters.trainer import TrainerError
    from omnidraft.adapters.trainers import SETUP
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.tools.package_folder import make_folder

    interpreter = python or Path(sys.executable)
    why = unsupported(facts(interpreter))
    if why:
        raise OmniDraftError(why)

    def prove(new: Path) -> dict[str, str]:
        try:
            with closing(Worker(new, python)) as worker:
                return {name: str(version) for name, version in worker.call("versions").items()}
        except TrainerError as error:
            raise OmniDraftError(f"what was installed does not work and was removed: {error}") from None

    own = python and str(python.absolute())
    return make_folder(folder, interpreter, REQUIREMENTS, (SETUP, {"python": own, "packages": REQUIREMENTS}), prove)


def facts(python: Path) -> Facts:
    """What decides whether there is a package for an interpreter. Raises OmniDraftError if it does not run."""
    from omnidraft.runtime.errors import OmniDraftError

    try:
        done = subprocess.run([python, "-I", "-c", FACTS], capture_output=True, text=True, timeout=60)
        found: Facts = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise OmniDraftError(f"{python}: not a Python that runs; name another with --python") from None
    return found


def unsupported(facts: Facts) -> str:
    """Why onnxruntime-training has no package for an interpreter, in one line; empty if it has."""
    major, minor = facts["python"]
    system, machine = facts["system"], facts["machine"]
    platforms = {
        "linux": machine in ("x86_64", "amd64") and facts["glibc"],
        "darwin": machine in ("x86_64", "arm64"),
        "win32": machine in ("x86_64", "amd64"),
    }
    python = facts["kind"] == "CPython" and (3, 8) <= (major, minor) <= (3, 12) and facts["wide"]
    if python and platforms.get(system, False):
        return ""
    return (
        f"onnxruntime-training {VERSION} has no package for {facts['kind']} {major}.{minor} on {system} {machine}, "
        "only for CPython 3.8 to 3.12 on x86-64 Linux (glibc), macOS and x86-64 Windows; name such a Python with "
        "--python, or do without: onnx-step needs nothing"
    )
