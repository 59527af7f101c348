"""omnidraft setup-optimum: optimum-onnx in a folder of its own, proved by importing it once."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer


def setup_optimum(
    packages: Annotated[
        Path | None, typer.Option(help="Where to install. [default: the platform's folder for data]")
    ] = None,
) -> None:
    """Install optimum-onnx for export --exporter optimum."""
    from omnidraft.export.portable import OPTIMUM, default_packages
    from omnidraft.tools.package_folder import megabytes

    folder = packages or default_packages()
    print(f"installing optimum-onnx {OPTIMUM} and the older transformers that it needs into {folder}", flush=True)
    install(folder)
    print(f"It works: {folder}, {megabytes(folder):.0f} MB. To remove it, delete that folder.")


def install(folder: Path) -> None:
    """Install into the folder, which is replaced as a whole once a worker has imported what it needs from it.

    Raises OmniDraftError, and leaves the folder as it was, if pip fails, if what it installed does not work with the
    torch that is here, or if the folder holds something else.
    """
    from omnidraft.export.portable import REQUIREMENTS, SETUP, check_worker
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.tools.package_folder import make_folder

    if find_spec("torch") is None:
        raise OmniDraftError(
            "optimum-onnx exports with torch; in the clone run: pip install -c constraints.txt -e '.[export]'"
        )
    make_folder(folder, Path(sys.executable), REQUIREMENTS, (SETUP, {"packages": REQUIREMENTS}), check_worker)
