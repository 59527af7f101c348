"""What a soak must keep to: memory, state files, texts, and not a line of complaint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median

from omnidraft.adapters.index import KEEP
from omnidraft.runtime.state import MAX_BYTES
from omnidraft.tools.soak_loop import Soak

GROWTH = 0.02  # of resident memory after warm-up
WARM_UP = (
    3  # cycles at least, and a third of all: until every array has its size and learning has done all that it does
)
MEANT = 3  # cycles that "then" and "now" are the median of
KIB, MIB = 1 << 10, 1 << 20

# Files of the state folder by pattern: (most bytes of one, most files in one folder).
BOUNDS: dict[str, tuple[int, int]] = {
    "omnidraft-state.txt": (KIB, 1),
    ".lock": (0, 1),
    "calibration.json": (256 * KIB, 1),
    "hashes.json": (MIB, 1),
    "pairs/*/ngram_cache.json": (MIB, 1),
    "answers/*.json": (MIB, 8),
    "learning/*/learning.json": (8 * MIB, 1),
    "learning/*/replay.json": (8 * MIB, 1),
    "learning/*/candidate/*.bin": (MAX_BYTES, 1),
    "adapters/*/index.json": (64 * KIB, 1),
    "adapters/*/*.onnx_adapter": (MAX_BYTES, KEEP),
    "adapters/*/*.optimizer": (MAX_BYTES, KEEP),
}


@dataclass(frozen=True)
class Limit:
    """One line of the verdict. `held` None: the run was too short to say."""

    line: str
    held: bool | None


def limits(run: Soak, complaints: Sequence[str]) -> list[Limit]:
    """The verdict on a run, whose state folder is still there: what holds, and a limit for each thing that does not.

    `complaints`: lines that the runtime said.
    """
    return [
        _memory([cycle.memory for cycle in run.cycles]),
        *_state([*(cycle.state for cycle in run.cycles), run.state_files()]),
        *_texts(run.compared, run.differing),
        *([Limit(f"a complaint: {line}", False) for line in complaints] or [Limit("no complaint", True)]),
    ]


def _memory(resident: Sequence[int]) -> Limit:
    after = resident[max(WARM_UP, len(resident) // 3) :]
    if len(after) <= MEANT:
        least = WARM_UP + MEANT + 1
        return Limit(f"memory: {len(resident)} cycles of at least {least}; give more --minutes", None)
    then, now = median(after[:MEANT]), median(after[-MEANT:])
    growth = now / then - 1
    line = f"memory: {then / MIB:.0f} MiB after warm-up, {now / MIB:.0f} MiB at the end, {growth:+.1%}"
    return Limit(f"{line} (limit {GROWTH:+.0%})", growth <= GROWTH)


def _state(sizes: Sequence[Mapping[str, int]]) -> list[Limit]:
    wrong: dict[str, str] = {}
    for files in sizes:
        counts: dict[tuple[str, str], int] = {}
        for name, size in files.items():
            pattern = next((pattern for pattern in BOUNDS if fnmatchcase(name, pattern)), None)
            if pattern is None:
                wrong.setdefault(name, f"state: {name} ({size} bytes) is not a file that the state folder should have")
                continue
            most_bytes, most_files = BOUNDS[pattern]
            if size > most_bytes:
                wrong.setdefault(name, f"state: {name} has {size} bytes (limit {most_bytes})")
            folder = name.rpartition("/")[0]
            counts[pattern, folder] = counts.get((pattern, folder), 0) + 1
            if counts[pattern, folder] > most_files:
                wrong.setdefault(folder + pattern, f"state: more than {most_files} of {pattern} in {folder}")
    if wrong:
        return [Limit(line, False) for line in wrong.values()]
    return [Limit(f"state: {sum(sizes[-1].values()) / MIB:.1f} MiB at the end, every file within its bound", True)]


def _texts(compared: int, differing: Sequence[str]) -> list[Limit]:
    if differing:
        return [Limit(f"text: {line}", False) for line in differing]
    return [Limit(f"text: {compared} answers compared with plain decoding, none differs", True if compared else None)]
