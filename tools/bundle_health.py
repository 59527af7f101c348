"""What is found about a bundle on this device: damage, memory, compiled graphs, calibration. No model is loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft.tools.diagnosis import Diagnosis, megabytes

if TYPE_CHECKING:
    from omnidraft.runtime.bundle import Bundle, Graph

TOKENS = 1000  # of a conversation whose memory is looked at
# What a process takes at most comes to this, within a quarter, for two targets at three precisions on x86-64.
PROGRAM = 150e6  # bytes of Python, ONNX Runtime, tokenizers and vocabulary maps
PACKED = 1.25  # bytes of weights in memory for each on disk: kernels keep some of them in an order of their own
VERDICTS = {
    "EP_NOT_APPLICABLE": "which cannot be compared with this device",
    "EP_SUPPORTED_OPTIMAL": "which this device is",
    "EP_SUPPORTED_PREFER_RECOMPILATION": "which is not quite this device",
    "EP_UNSUPPORTED": "which is not this device",
}
UNFIT = "EP_UNSUPPORTED"


def look_at_bundle(diagnosis: Diagnosis, path: Path, state: Path) -> None:
    """Every file's hash; what each graph needs in memory; what compiled graphs were made for; what is calibrated."""
    from omnidraft.runtime.bundle import open_bundle
    from omnidraft.runtime.errors import OmniDraftError

    try:
        opened = open_bundle(path)
    except OmniDraftError as error:
        diagnosis.note("bundle", "folder", f"{path}: cannot be opened")
        diagnosis.problem(str(error), stops=True)
        return
    damaged = 0
    for name in opened.files:
        try:
            opened.verify([name])
        except OmniDraftError as error:
            damaged += 1
            diagnosis.problem(str(error), stops=True)
    files = f"{damaged} of {len(opened.files)} files damaged" if damaged else f"all {len(opened.files)} files intact"
    diagnosis.note("bundle", "folder", f"{path}, {files}")
    if not opened.drafter.trainable:
        diagnosis.note("learning", "drafter", "has no LoRA inputs: it drafts and cannot learn")
    if not damaged:
        _look_at_memory(diagnosis, opened)
        _look_at_compatibility(diagnosis, opened)
    _look_at_calibration(diagnosis, opened, state)


def memory() -> int | None:
    """Bytes that programs may still take without swapping; None where the system does not say it in a file."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None


@dataclass(frozen=True)
class Needs:
    """Bytes that a graph takes: on disk, in memory, and for its KV cache of so many `tokens`."""

    disk: int
    weights: float
    cache: int
    tokens: int

    @property
    def memory(self) -> float:
        """In all."""
        return self.weights + self.cache

    def __str__(self) -> str:
        return f"{megabytes(self.disk)} on disk, {megabytes(self.cache)} for {self.tokens} tokens"


def model_needs(opened: Bundle, graph: Graph) -> Needs:
    """What a graph needs. On the CPU each width of a static one has weights of its own in memory."""
    from omnidraft.runtime.graph_inputs import graph_inputs

    inputs = graph_inputs(opened.path / graph.model)
    row = 0
    for name, shape in inputs.items():
        if name.startswith("past_"):
            heads, size = shape[1], shape[3]
            row += heads * size * 4 if isinstance(heads, int) and isinstance(size, int) else 0
    disk = sum(opened.files[name]["size"] for name in opened.folder_files(graph.model))
    if graph.static is None:
        return Needs(disk, PACKED * disk, row * TOKENS, TOKENS)
    tokens = int(graph.static["context"])
    copies = len(graph.models) if graph.qnn is None else 1
    return Needs(disk, copies * disk, row * tokens, tokens)


def _look_at_memory(diagnosis: Diagnosis, opened: Bundle) -> None:
    free = memory()
    diagnosis.note("memory", "free", "unknown on this system" if free is None else megabytes(free))
    diagnosis.note("memory", "OmniDraft itself", f"about {megabytes(PROGRAM)}")
    drafters = [model_needs(opened, graph) for graph in opened.drafter.all_graphs]
    for graph, needs in zip(opened.drafter.all_graphs, drafters, strict=True):
        diagnosis.note("memory", f"drafter, {graph.label}", str(needs))
    for name, target in opened.targets.items():
        needed: list[tuple[Graph, float]] = []
        for graph in target.graphs:
            needs = model_needs(opened, graph)
            needed.append((graph, PROGRAM + drafters[0].memory + needs.memory))
            diagnosis.note("memory", _label(name, graph), f"{needs}; about {megabytes(needed[-1][1])} in all")
        fitting = [graph for graph, need in needed if free is None or need <= free]
        fix = f"use --precision {fitting[0].precision}" if fitting else "close other programs"
        for graph, need in needed:
            if graph not in fitting:
                told = f"{_label(name, graph)}: needs about {megabytes(need)}, {megabytes(free or 0)} are free"
                diagnosis.problem(f"{told}; {fix}", stops=not fitting)


def _look_at_compatibility(diagnosis: Diagnosis, opened: Bundle) -> None:
    for name, graphs in (("drafter", opened.drafter.graphs), *((n, t.graphs) for n, t in opened.targets.items())):
        compiled = [graph for graph in graphs if graph.qnn is not None]
        verdicts = [_look_at_compiled(diagnosis, opened, name, graph) for graph in compiled]
        if verdicts and set(verdicts) == {UNFIT}:
            diagnosis.problem(f"{name}: no graph is compiled for this device; use --ep cpu, or export for its SoC")


def _look_at_compiled(diagnosis: Diagnosis, opened: Bundle, name: str, graph: Graph) -> str:
    """ONNX Runtime's verdict on a compiled graph, "" where there is none."""
    from omnidraft.runtime.placement import Unavailable, compatibility

    assert graph.qnn is not None
    made_for = f"compiled for {graph.qnn['soc']} ({graph.qnn['compatibility']})"
    try:
        _, verdict = compatibility(opened.path / graph.model, "qnn")
    except Unavailable as reason:
        diagnosis.note("bundle", _label(name, graph), f"{made_for}, not compared with this device: {reason}")
        return ""
    diagnosis.note("bundle", _label(name, graph), f"{made_for}, {VERDICTS[verdict]}" if verdict else made_for)
    return verdict


def _look_at_calibration(diagnosis: Diagnosis, opened: Bundle, state: Path) -> None:
    from omnidraft.runtime.calibration import FILE, SCHEMA
    from omnidraft.runtime.files import Unusable
    from omnidraft.runtime.invariance import fingerprint
    from omnidraft.runtime.pair import default_threads
    from omnidraft.runtime.placed import CPU
    from omnidraft.runtime.placement import PROVIDERS
    from omnidraft.runtime.state import read_document

    known: dict[str, Any] = {}
    with suppress(OSError, Unusable):  # what is wrong with it is said where the state folder is looked at
        known = read_document(state / FILE, SCHEMA, {})
    for name, target in opened.targets.items():
        for graph in target.graphs:
            provider = CPU if graph.qnn is None else PROVIDERS["qnn"].name
            key = fingerprint(opened.digest(graph), default_threads(), provider)
            diagnosis.note("calibration", _label(name, graph), _calibrated(known.get(key)))


def _calibrated(known: dict[str, Any] | None) -> str:
    if known is None or "w0" not in known:
        return "not measured yet, the first run does it"
    promise = f"W₀ = {known['w0']}, text is exact" if known["w0"] else "no W₀, text is near"
    if known.get("width"):
        promise = f"no W₀, text is exact with {known['width']} rows in every pass"
    return promise + (", pass times known" if "passes" in known else ", pass times not measured yet")


def _label(target: str, graph: Graph) -> str:
    return f"{target}, {graph.label}"
