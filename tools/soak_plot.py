"""A soak as a picture: memory, state files, speed and acceptance, and latencies, cycle by cycle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from omnidraft.tools.soak_loop import PERCENTILES, Cycle

MIB = 1 << 20


def draw_soak(cycles: Sequence[Cycle], title: str, path: Path) -> None:
    """Write a PNG or SVG of at least one cycle."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 10), dpi=120, layout="constrained")
    memory, state, speed, latency = figure.subplots(4, 1, sharex=True)
    minutes = [cycle.end / 60 for cycle in cycles]
    memory.plot(minutes, [cycle.peak / MIB for cycle in cycles], color="0.6", label="most resident behind an answer")
    memory.plot(minutes, [cycle.memory / MIB for cycle in cycles], label="held at the end of a cycle")
    memory.set_ylabel("MiB")
    rooms: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(cycles))
    for i, cycle in enumerate(cycles):
        for name, size in cycle.state.items():
            rooms[name.split("/")[0] if "/" in name else "calibration"][i] += size / MIB
    for room, sizes in sorted(rooms.items()):
        state.plot(minutes, sizes, label=room)
    state.set_ylabel("state, MiB")
    speed.plot(minutes, [cycle.tokens_per_second or 0 for cycle in cycles], color="0.4", label="tokens/s")
    speed.set_ylabel("tokens/s")
    rates = speed.twinx()
    for number, name in enumerate(cycles[0].acceptance):
        rates.plot(minutes, [cycle.acceptance.get(name) for cycle in cycles], color=f"C{number}", label=name)
    rates.set_ylabel("acceptance rate")
    rates.set_ylim(0, 1)
    for number, percentile in enumerate(PERCENTILES):
        for times, style in (("first_token", "--"), ("round", "-")):
            values = [1e3 * getattr(cycle, times)[number] for cycle in cycles]
            label = f"{times.replace('_', ' ')}, {percentile} %"
            latency.plot(minutes, values, style, color=f"C{number}", label=label)
    latency.set_ylabel("ms")
    latency.set_yscale("log")
    latency.set_xlabel("minutes; a point is one run through all targets, policies, learning and not")
    for axes in (memory, state, speed, rates, latency):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="lower right" if axes is rates else "upper left")
    for axes in (memory, state, speed):
        axes.set_ylim(bottom=0)
    memory.set_title(title, fontsize="medium")
    figure.savefig(path)
