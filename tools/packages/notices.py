"""Whose work is in a package, and under which licence."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from omnidraft.runtime.bundle import ModelInfo
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.packages.archive import Item
from omnidraft.tools.packages.contents import Selection

PART = "notes and licences"


def notices(selection: Selection, others: list[str]) -> list[Item]:
    """LICENSES/: our licence, and a list of models and other software (`others`: a line each)."""
    distribution = _distribution()
    models: dict[str, ModelInfo] = {"drafter": selection.bundle.drafter, f"target {selection.name}": selection.target}
    lines = ["# What is in this package, and under which licence", ""]
    lines += [f"- OmniDraft {distribution.version}: Apache-2.0, see omnidraft.txt"]
    lines += [
        f"- {label}: {info.architecture}, from {info.source['name']}, weights {info.weights_sha256[:12]}: "
        f"{info.license}. Its notices, if it has any, are at its source."
        for label, info in models.items()
    ]
    lines += [f"- {other}" for other in others]
    return [
        Item("LICENSES/NOTICES.md", ("\n".join(lines) + "\n").encode(), PART),
        Item("LICENSES/omnidraft.txt", _own_licence(distribution), PART),
    ]


def requirements() -> Item:
    """requirements.txt: what the runtime needs, in the versions that are installed here."""
    wanted = [line for line in _distribution().requires or [] if "extra ==" not in line]
    names = sorted(re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in wanted)
    text = "".join(f"{name}=={metadata.version(name)}\n" for name in names)
    return Item("requirements.txt", text.encode(), PART)


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("omnidraft")
    except metadata.PackageNotFoundError:
        raise OmniDraftError(
            "pack needs omnidraft as an installed package; in the clone run: pip install -c constraints.txt -e ."
        ) from None


def _own_licence(distribution: metadata.Distribution) -> bytes:
    for file in distribution.files or []:
        path = Path(str(file.locate()))
        if file.name == "LICENSE" and path.is_file():
            return path.read_bytes()
    raise OmniDraftError("omnidraft's LICENSE is not installed with it; run: pip install -c constraints.txt -e .")
