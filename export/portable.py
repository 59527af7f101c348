"""Plain-operator graphs with a past that grows, from optimum-onnx: what other toolchains take.

optimum-onnx runs in a process of its own, on packages in a folder of its own that `omnidraft setup-optimum` makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import platformdirs

from omnidraft.export import cache, optimum_worker, parity
from omnidraft.export.sources import Source
from omnidraft.export.target import MODEL
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.portable_decoder import PortableDecoder

OPTIMUM = "0.1.0"
# optimum-onnx, the newest transformers that it knows, and what of their needs the export extra does not bring; in
# versions that go together. They are installed without dependencies: torch, onnx and numpy are the export extra's.
REQUIREMENTS = (
    f"optimum-onnx=={OPTIMUM}",
    "optimum==2.1.0",
    "transformers==4.57.6",
    "tokenizers==0.22.2",
    "huggingface-hub==0.36.2",
    "requests==2.34.2",
    "urllib3==2.8.0",
    "idna==3.20",
    "certifi==2026.10.19.post1",
    "charset-normalizer==3.5.3",
)
SETUP = "omnidraft-setup.json"
"""Written into the package folder by setup-optimum: the requirements that it holds."""


def default_packages() -> Path:
    """Where setup-optimum installs: OMNIDRAFT_OPTIMUM_PACKAGES, or the platform's folder for data."""
    named = os.environ.get("OMNIDRAFT_OPTIMUM_PACKAGES")
    return Path(named) if named else platformdirs.user_data_path("omnidraft", appauthor=False) / f"optimum-{OPTIMUM}"


def require_packages(packages: Path) -> None:
    """Raise OmniDraftError, with the command that helps, where the folder does not hold the packages."""
    try:
        held = json.loads((packages / SETUP).read_text(encoding="utf-8"))["packages"]
    except (OSError, ValueError, LookupError, TypeError):
        raise OmniDraftError(f"{packages}: optimum-onnx is not there; run omnidraft setup-optimum") from None
    if held != [*REQUIREMENTS]:
        raise OmniDraftError(f"{packages}: holds other versions than this OmniDraft uses; run omnidraft setup-optimum")


def write_profile(source: Source, root: Path, where: str, what: str, threads: int) -> dict[str, Any]:
    """Write the graph of a checkpoint into the folder `where` of a bundle at `root`. Returns what the manifest says.

    `what`: the model's name in errors. Raises OmniDraftError for a graph that does not pass the gate.
    """
    import onnx

    made, folder = build_portable(source), root / where
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns(cache.SIZES))
    decoder = PortableDecoder(folder / MODEL, threads)
    figures = parity.measure(decoder, parity.reference(source, threads), source.context)
    parity.require(figures, "fp32", f"{what}, portable,")
    opsets = onnx.load(folder / MODEL, load_external_data=False).opset_import
    return {
        "profile": "portable",
        "precision": "fp32",
        "model": f"{where}/{MODEL}",
        "parity": figures,
        "quantization": {},
        "opset": next(int(entry.version) for entry in opsets if entry.domain == ""),
    }


def build_portable(source: Source, packages: Path | None = None) -> Path:
    """The folder (cached) with model.onnx of a checkpoint at fp32, and with its weights where they exceed 2 GB.

    `packages`: what setup-optimum made, by default at `default_packages()`. Raises OmniDraftError without it, and if
    optimum-onnx cannot export the architecture.
    """
    packages = packages or default_packages()
    require_packages(packages)
    key = cache.key_of(
        weights=source.weights_sha256, config=source.config, packages=REQUIREMENTS, torch=version("torch")
    )

    def make(folder: Path) -> None:
        with TemporaryDirectory(prefix="optimum-", dir=folder) as scratch:
            checkpoint, made = Path(scratch) / "checkpoint", Path(scratch) / "out"
            write_checkpoint(source, checkpoint)
            why = _run_worker(packages, checkpoint, made)
            if why:
                raise OmniDraftError(f"{source.name}: optimum-onnx {OPTIMUM} cannot export it ({why})")
            for path in made.glob(f"{MODEL}*"):
                shutil.move(path, folder / path.name)

    return cache.find_or_make("portable", key, make)


def write_checkpoint(source: Source, folder: Path) -> None:
    """A folder that the older transformers reads: links to the weights, and a configuration in its words."""
    folder.mkdir()
    for path in source.weights:
        (folder / path.name).symlink_to(path.resolve())
    for index in source.folder.glob("*.safetensors.index.json"):
        shutil.copyfile(index, folder / index.name)
    (folder / "config.json").write_text(json.dumps(older_config(source.config)), encoding="utf-8")


def older_config(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of transformers 5 in the words of 4: the rotary settings had keys of their own.

    The older one would take its defaults for what it does not find, and say nothing.
    """
    rotary = dict(config.get("rope_parameters") or {})
    if "rope_theta" not in rotary:
        return config
    older = {name: value for name, value in config.items() if name != "rope_parameters"}
    older["rope_theta"] = rotary.pop("rope_theta")
    if rotary.get("rope_type", "default") != "default":
        older["rope_scaling"] = rotary
    return older


def check_worker(packages: Path) -> None:
    """Raise OmniDraftError if optimum-onnx in the folder does not work with the torch that is here."""
    why = _run_worker(packages)
    if why:
        raise OmniDraftError(f"optimum-onnx {OPTIMUM} does not work here ({why})")


def _run_worker(packages: Path, *arguments: Path) -> str:
    """Why the worker failed, in one line; empty if it did not."""
    # -I: it sees no setting of this environment for Python, and no module of the working folder.
    command = [sys.executable, "-I", optimum_worker.__file__, *map(str, (packages.resolve(), *arguments))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == 1 and said:
        return said[-1][:300]
    return f"it ended with status {done.returncode}" if done.returncode else ""
