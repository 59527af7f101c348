"""A bench as pictures: speed-up, acceptance rate, and where the time of a token goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omnidraft.runtime.clock import PHASES
from omnidraft.tools.measure import Row

WIDTH = 0.8  # of a group of bars


def draw_bench(rows: Sequence[Row], folder: Path) -> None:
    """Write speed_up.png, acceptance.png and phases.png, each with a panel for each precision."""
    _draw(rows, folder / "speed_up.png", "speed-up against plain decoding, median, 95 %", _speed_ups)
    if any(row.acceptance_rate is not None for row in rows):
        drafted = [row for row in rows if row.acceptance_rate is not None]
        _draw(drafted, folder / "acceptance.png", "acceptance rate", _acceptance)
    _draw(rows, folder / "phases.png", "seconds of decoding, all prompts", _phases)


def draw_learning(losses: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """The loss of each step, by lessons and row. Every row has a loss of its own: only courses can be compared."""
    figure, panels = _figure(len(losses))
    for axes, (lessons, courses) in zip(panels, losses.items(), strict=True):
        for name, values in courses.items():
            axes.plot(range(1, len(values) + 1), values, label=name)
        axes.set_title(f"loss of each step of learning: {lessons}", fontsize="medium")
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def _draw(rows: Sequence[Row], path: Path, title: str, panel: Callable[[Any, Sequence[Row]], None]) -> None:
    precisions = list(dict.fromkeys(row.precision for row in rows))
    figure, panels = _figure(len(precisions))
    for axes, precision in zip(panels, precisions, strict=True):
        panel(axes, [row for row in rows if row.precision == precision])
        axes.set_title(f"{title}: {precision}", fontsize="medium")
    figure.savefig(path)


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4 * panels), dpi=120, layout="constrained")
    return figure, figure.subplots(panels, 1, squeeze=False)[:, 0].tolist()


def _speed_ups(axes: Any, rows: Sequence[Row]) -> None:
    axes.axhline(1, color="0.5", linewidth=0.8)
    _bars(axes, rows, lambda row: row.speedup, lambda row: row.speedup_interval)


def _acceptance(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_ylim(0, 1)
    _bars(axes, rows, lambda row: row.acceptance_rate, lambda row: None)


def _bars(
    axes: Any, rows: Sequence[Row], height: Callable[[Row], float | None],
    interval: Callable[[Row], tuple[float, float] | None],
) -> None:  # fmt: skip
    """A group for each task, a bar for each row in it."""
    tasks, names = (list(dict.fromkeys(getattr(row, part) for row in rows)) for part in ("task", "row"))
    found = {(row.task, row.row): row for row in rows}
    width = WIDTH / len(names)
    for number, name in enumerate(names):
        for group, task in enumerate(tasks):
            row = found.get((task, name))
            value = None if row is None else height(row)
            if row is None or value is None:
                continue
            ends = interval(row)
            error = None if ends is None else [[max(0, value - ends[0])], [max(0, ends[1] - value)]]
            at, label = group - WIDTH / 2 + (number + 0.5) * width, name if group == 0 else None
            axes.bar(at, value, width * 0.9, yerr=error, color=f"C{number % 10}", label=label, capsize=2)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))


def _phases(axes: Any, rows: Sequence[Row]) -> None:
    """Of each row, over all tasks; rows that do not tell their phases apart have one."""
    tasks = {row.task for row in rows}
    last = rows[-1].task  # that of all tasks, where there are several
    shown = [row for row in rows if row.task == last or len(tasks) == 1]
    left = [0.0] * len(shown)
    for number, phase in enumerate(phase for phase in PHASES if phase != "prefill"):
        seconds = [row.phases.get(phase, 0.0) for row in shown]
        axes.barh(range(len(shown)), seconds, left=left, color=f"C{number}", label=phase)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.set_yticks(range(len(shown)), [row.row for row in shown])
    axes.invert_yaxis()
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
