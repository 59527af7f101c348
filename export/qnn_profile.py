"""The QNN profiles of one model: its static graphs, compiled for each SoC, and described."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omnidraft.export import cache, parity
from omnidraft.export.qnn_context import AHEAD, compile_contexts
from omnidraft.export.static_profile import DESCRIPTION, FLOAT, StaticModel
from omnidraft.runtime import bundle
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.placement import PROVIDERS, Wish
from omnidraft.runtime.qnn import SIMULATOR, SOCS
from omnidraft.runtime.static_decoder import StaticDecoder

PREFIX = "qnn:"
NAMES = tuple(PREFIX + soc for soc in (*SOCS, SIMULATOR))
FLOAT16 = "fp16"  # what the HTP makes of a float graph
COMPILED = 1  # counts the changes of what compiling does, so that older cached graphs are left alone


def precision(made_from: str) -> str:
    """The precision of what is compiled from static graphs of another."""
    return FLOAT16 if made_from == FLOAT else made_from


def check_installed() -> None:
    """Raise OmniDraftError where nothing can be compiled, before there is any work."""
    package = PROVIDERS["qnn"].package
    try:
        version(package)
    except PackageNotFoundError:
        raise OmniDraftError(f"--profile {PREFIX}SOC needs the package {package}: pip install {package}") from None


def write_profiles(
    model: StaticModel,
    static: Sequence[Mapping[str, Any]],
    root: Path,
    folder: str,
    profiles: Sequence[str],
    step: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Compile what `static_profile.write_profile` returned. Returns what the manifest says of it.

    Writes qnn-SOC-PRECISION/ into `folder` of the bundle at `root`. Parity figures of the simulator's graphs are
    measured on it; nothing else can be run here, so graphs for SoCs have those of their static graphs on the CPU.
    Raises OmniDraftError for graphs that cannot be compiled, or do not pass the gate.
    """
    made = []
    for profile in profiles:
        soc = profile.removeprefix(PREFIX)
        for entry in static:
            kind = precision(entry["precision"])
            step(f"{kind} graphs for QNN, {soc}")
            relative = f"{folder}/qnn-{soc}-{kind}"
            described = _compiled(root / Path(entry["model"]).parent, entry["static"], soc, root / relative)
            figures = entry["parity"]
            if soc == SIMULATOR:
                figures = _gate(model, root / relative, described["static"], kind)
            widest = Path(entry["model"]).name
            made.append(
                {
                    **{key: value for key, value in entry.items() if key not in ("static", "nnapi")},
                    **{"profile": profile, "precision": kind, "model": f"{relative}/{widest}", "parity": figures},
                    **described,
                }
            )
    return made


def _compiled(source: Path, description: Mapping[str, Any], soc: str, out: Path) -> dict[str, Any]:
    """Compile into a cache, which is minutes for a large model, and copy."""
    graphs = [*description["widths"].values(), description["weights"]]
    key = cache.key_of(
        graphs=[bundle.sha256(source / name) for name in graphs],
        soc=soc,
        settings=AHEAD,
        versions=[COMPILED, version("onnxruntime"), version(PROVIDERS["qnn"].package)],
    )

    def make(made: Path) -> None:
        found = compile_contexts(source, description, soc, made)
        (made / DESCRIPTION).write_text(json.dumps(found), encoding="utf-8")

    made = cache.find_or_make("qnn", key, make)
    shutil.copytree(made, out, ignore=shutil.ignore_patterns(cache.SIZES, DESCRIPTION))
    found: dict[str, Any] = json.loads((made / DESCRIPTION).read_text(encoding="utf-8"))
    return found


def _gate(model: StaticModel, folder: Path, description: Mapping[str, Any], precision: str) -> dict[str, Any]:
    decoder = StaticDecoder(folder, description, wish=Wish("qnn", strict=True))
    figures = parity.measure(decoder, parity.reference(model.source, model.threads), model.slots)
    parity.require(figures, precision, f"{model.what}, on QNN's simulator,")
    return figures
