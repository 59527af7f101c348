"""What is found about a device, and what is wrong: versions, execution providers, the trainer."""

from __future__ import annotations

import importlib
import platform
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

LEAST_ORT = (1, 31)


@dataclass(frozen=True)
class Problem:
    """One line that names what is wrong and the fix. `stops`: nothing can be generated until it is mended."""

    line: str
    stops: bool = False


@dataclass
class Diagnosis:
    """`found`: area → what → what was found about it; `problems` in the order they were found."""

    found: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def note(self, area: str, what: str, found: str) -> None:
        """Something that was looked at."""
        self.found.setdefault(area, {})[what] = found

    def problem(self, line: str, stops: bool = False) -> None:
        """Something that is wrong."""
        self.problems.append(Problem(line, stops))

    @property
    def works(self) -> bool:
        """Whether nothing that was found stops work."""
        return not any(problem.stops for problem in self.problems)


def installed(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def look_at_versions(diagnosis: Diagnosis) -> None:
    """Ours, and those of what runs on a device."""
    diagnosis.note("versions", "omnidraft", installed("omnidraft") or "run from a folder")
    diagnosis.note("versions", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("onnxruntime", "numpy", "tokenizers"):
        diagnosis.note("versions", name, importlib.import_module(name).__version__)
    ours = diagnosis.found["versions"]["onnxruntime"]
    if tuple(int(part) for part in ours.split(".")[:2]) < LEAST_ORT:
        least = ".".join(map(str, LEAST_ORT))
        diagnosis.problem(f"onnxruntime {ours} is older than {least}: pip install 'onnxruntime>={least}'", stops=True)


def look_at_providers(diagnosis: Diagnosis) -> None:
    """Which execution providers can be had, on which devices."""
    import onnxruntime as ort

    from omnidraft.runtime.placement import PROVIDERS, Unavailable, devices, known_devices

    for ep, provider in PROVIDERS.items():
        package = installed(provider.package) if provider.package else None
        try:
            devices(ep)
        except Unavailable as reason:
            diagnosis.note("providers", ep, str(reason))
            if package is not None:
                diagnosis.problem(f"{reason}")
            continue
        kinds = {f"{device.device.type.name} ({device.device.vendor})" for device in known_devices(provider)}
        brought = f", by {provider.package} {package}" if package else ""
        diagnosis.note("providers", ep, f"{provider.name} on {', '.join(sorted(kinds)) or 'this device'}{brought}")
    others = set(ort.get_available_providers()) - {provider.name for provider in PROVIDERS.values()}
    if others:
        diagnosis.note("providers", "never used", ", ".join(sorted(others)))


def look_at_trainer(diagnosis: Diagnosis) -> None:
    """What would learn here. A worker is started and asked for its versions, if one is installed."""
    from omnidraft.adapters.onnx_step import OnnxStepTrainer
    from omnidraft.adapters.ort_training import NAME, Worker
    from omnidraft.adapters.trainer import TrainerError
    from omnidraft.adapters.trainers import default_packages, default_python

    packages, plain = default_packages(), OnnxStepTrainer.name
    if not packages.is_dir():
        diagnosis.note("learning", "trainer", f"{plain} ({NAME} is not installed; omnidraft setup-training)")
        return
    try:
        with closing(Worker(packages, default_python(packages), seconds=60.0)) as worker:
            versions = worker.call("versions")
    except TrainerError as error:
        diagnosis.note("learning", "trainer", f"{plain}, because {NAME} does not start")
        diagnosis.problem(f"{error}: omnidraft setup-training installs it anew, and until then {plain} learns")
    else:
        diagnosis.note("learning", "trainer", f"{NAME} {versions['onnxruntime']} in {packages}")


def megabytes(size: float) -> str:
    """A size for people."""
    return f"{size / 1e6:.1f} MB" if size < 1e8 else f"{size / 1e6:.0f} MB"
