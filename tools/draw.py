"""Sessions as a picture: acceptance rate over prompts, and when an adapter was kept or rolled back.

python -m omnidraft.tools.draw OUT.svg LABEL=FILE[+FILE...] ... draws one line for each label; its files, written by
`omnidraft personalize --json`, follow one another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omnidraft.tools.session import Session, acceptance_rate

SMOOTH = 12  # prompts that a point of a line is the mean of


def draw_sessions(lines: Mapping[str, Sequence[Session]], title: str, path: Path) -> None:
    """Write a PNG or SVG; each line is a row of sessions, and begins its mean anew where one of them begins."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, (label, sessions) in enumerate(lines.items()):
        rates: list[float] = []
        for session in sessions:
            offset = len(rates)
            if number == 0:
                _mark(axes, session, offset)
            rates += _smoothed(session.responses)
        axes.plot(range(1, len(rates) + 1), rates, color=f"C{number}", label=label, zorder=3)
    axes.set_xlabel("prompts; vertical lines: an adapter was kept (green) or rolled back (red)")
    axes.set_ylabel(f"acceptance rate, mean of {SMOOTH} prompts")
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize="small", loc="lower right")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path)


def _mark(axes: Any, session: Session, offset: int) -> None:
    """Where tasks begin, and what became of candidates."""
    responses = session.responses
    for at, _, kept in session.rounds:
        if kept is not None:
            axes.axvline(offset + at, color="C2" if kept else "C3", alpha=0.35, linewidth=0.8)
    for begin, row in enumerate(responses):
        if begin == 0 or responses[begin - 1][0] != row[0]:
            axes.axvline(offset + begin + 0.5, color="0.6", linestyle=":", linewidth=1)
            place = (offset + begin + 1, 0.985)
            axes.annotate(row[0], place, xycoords=("data", "axes fraction"), va="top", fontsize="small")


def _smoothed(responses: Sequence[Sequence[Any]]) -> list[float]:
    """Means over the last SMOOTH responses of the same task."""
    found, begin = [], 0
    for i, row in enumerate(responses):
        begin = i if row[0] != responses[begin][0] else max(begin, i - SMOOTH + 1)
        rate = acceptance_rate(responses[begin : i + 1])
        found.append(float("nan") if rate is None else rate)
    return found


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    out, *lines = arguments
    read: dict[str, list[Session]] = {}
    for line in lines:
        label, _, files = line.partition("=")
        documents = (json.loads(Path(name).read_text(encoding="utf-8")) for name in files.split("+"))
        read[label] = [Session(**document["session"]) for document in documents]
    draw_sessions(read, "", Path(out))


if __name__ == "__main__":
    main(sys.argv[1:])
