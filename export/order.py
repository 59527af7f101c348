"""What an export is asked for, and what of it makes no sense."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnidraft.export import portable, qnn_profile, static_profile
from omnidraft.runtime import bundle
from omnidraft.runtime.errors import OmniDraftError

PRECISIONS = {"cpu": ("fp32", "int8", "int4"), "portable": ("fp32",), "static": static_profile.PRECISIONS}
EXPORTERS = {"genai": "cpu", "optimum": "portable"}  # whose graphs take any number of rows, and their profiles

TARGET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Order:
    """What to export. Every precision is one of the targets' in each profile that has it; the first is the default.

    `context`: slots of static graphs, None for as many as usual.
    """

    drafter: str
    targets: Mapping[str, str]
    out: Path
    precisions: Sequence[str]
    drafter_precision: str
    threads: int = 1
    profiles: Sequence[str] = ("cpu",)
    context: int | None = None

    @property
    def compiled(self) -> list[str]:
        """Profiles that are compiled from static graphs."""
        return [profile for profile in self.profiles if profile in qnn_profile.NAMES]

    def of(self, profile: str) -> list[str]:
        """Precisions of a profile. Portable graphs have fp32 only; static ones always: the others are made from it."""
        if profile in self.compiled:
            return [qnn_profile.precision(made_from) for made_from in self.of("static")]
        if profile not in self.profiles and not (profile == "static" and self.compiled):
            return []
        found = [precision for precision in self.precisions if precision in PRECISIONS[profile]]
        if profile in ("portable", "static") and "fp32" not in found:
            found.append("fp32")
        return found or ["int8"]


def read_profiles(text: str, exporter: str = "genai") -> tuple[str, ...]:
    """The profiles of --profile, by commas. Behind `qnn:SOC` further SoCs may stand alone, as in qnn:SM8550,SM8650.

    `exporter`: one of EXPORTERS; its profile stands for cpu. Raises OmniDraftError if it is unknown, or has no work.
    """
    _check_choice("--exporter", [exporter], [*EXPORTERS])
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        whole = qnn_profile.PREFIX + part
        found.append(whole if found and found[-1] in qnn_profile.NAMES and whole in qnn_profile.NAMES else part)
    if "cpu" not in found and exporter != "genai":
        raise OmniDraftError(f"--exporter {exporter} writes what cpu stands for; add cpu to --profile, or leave it out")
    return tuple(EXPORTERS[exporter] if profile == "cpu" else profile for profile in found)


def check(order: Order) -> None:
    """Raise OmniDraftError for an order that contradicts itself, or would replace what is not a bundle."""
    _check_choice("--profile", order.profiles, (*bundle.PROFILES, *qnn_profile.NAMES))
    if order.compiled:
        qnn_profile.check_installed()
    if "portable" in order.profiles:
        portable.require_packages(portable.default_packages())
    if order.precisions:
        kinds = ["static" if profile in order.compiled else profile for profile in order.profiles]
        known = [precision for kind in kinds for precision in PRECISIONS[kind]]
        _check_choice("--precision", order.precisions, list(dict.fromkeys(known)))
    _check_choice("--drafter-precision", [order.drafter_precision], PRECISIONS["cpu"])
    if order.context is not None and not order.of("static"):
        raise OmniDraftError("--context is for static graphs; add --profile cpu,static, or leave it out")
    if not order.targets:
        raise OmniDraftError("--target: give at least one target, as in --target smollm2=smollm2")
    for name in order.targets:
        if not TARGET_NAME.fullmatch(name):
            raise OmniDraftError(f"--target {name!r}: a name is made of letters, digits, '_', '.' and '-'")
    _check_replaceable(order.out)


def _check_choice(option: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    for name in chosen:
        if name not in known:
            raise OmniDraftError(f"{option} {name}: unknown here; choose from {', '.join(known)}")
    if not chosen or len(set(chosen)) != len(chosen):
        raise OmniDraftError(f"{option}: give one or more of {', '.join(known)}, each once, by commas")


def _check_replaceable(out: Path) -> None:
    """What is at --out will be deleted: it must be an empty folder, or a bundle with nothing beside its own files."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        manifest = json.loads((out / bundle.MANIFEST).read_bytes())
        ours = {out / bundle.MANIFEST, *(out / name for name in manifest["files"])}
        if not str(manifest["schema"]).startswith(bundle.SCHEMA.split("/")[0]):
            raise ValueError
    except (OSError, ValueError, TypeError, LookupError):
        raise OmniDraftError(f"--out {out}: exists and is not a bundle; choose another folder or remove it") from None
    others = [path for path in out.rglob("*") if not path.is_dir() and path not in ours]
    if others:
        raise OmniDraftError(f"{others[0]}: is not of the bundle, which would be replaced; move it elsewhere")
