"""Measured rows as tables, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.markup import escape
from rich.table import Table

from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.measure import Row

Absent = Mapping[str, Mapping[str, str]]
"""By precision: the peers that took no part, with the reason."""


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn: names stand on the left, figures on the right; `notes` are lines below."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def terminal(self) -> Table:
        """For rich."""
        table = Table(
            title=escape(self.title), title_justify="left", caption=escape("\n".join(self.notes)) or None,
            caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for i, name in enumerate(self.head):
            table.add_column(name, justify="right" if i else "left", no_wrap=True)
        for cells in self.lines:
            table.add_row(*cells)
        return table

    def markdown(self) -> str:
        """With a heading."""
        ruler = ["---", *["---:"] * (len(self.head) - 1)]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in (self.head, ruler, *self.lines))
        return "\n\n".join([f"## {self.title}", table, *self.notes])


def sheets(
    rows: Sequence[Row], target: str, sampling: Sampling, columns: Sequence[str], absent: Absent
) -> Iterator[Sheet]:
    """One for each task and precision, with some of COLUMNS, narrow enough for a terminal of 80 columns."""
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    for (task, precision), group in groupby(rows, lambda row: (row.task, row.precision)):
        lines = list(group)
        found = {name: [COLUMNS[name](row) for row in lines] for name in (*columns, "learn")}
        shown = {name: cells for name, cells in found.items() if name != "learn" or set(cells) != {"-"}}
        cells = [[row.row, *rest] for row, *rest in zip(lines, *shown.values(), strict=True)]
        notes = [f"{peer} is not compared: {reason}" for peer, reason in absent.get(precision, {}).items()]
        yield Sheet(f"{task}: {target} {precision}, {how}", ["row", *shown], cells, notes)


def tables(rows: Sequence[Row], target: str, sampling: Sampling, columns: Sequence[str]) -> Iterator[Table]:
    """The same for a terminal, where no peers were asked for."""
    return (sheet.terminal() for sheet in sheets(rows, target, sampling, columns, {}))


def _range(interval: tuple[float, ...] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f}..{interval[-1]:.2f}"


def _figure(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"


def _gain(interval: tuple[float, ...] | None) -> str:
    return "-" if interval is None else f"{_short(interval[0])}..{_short(interval[-1])}"


def _short(figure: float) -> str:
    return f"{figure:+.2f}".replace("0.", ".")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "tok/s": lambda row: _figure(row.tokens_per_second, 1),
    "speed-up": lambda row: _figure(row.speedup, 2),
    "accept": lambda row: _figure(row.acceptance_rate, 2),
    "/verify": lambda row: _figure(row.tokens_per_verify, 2),
    "k": lambda row: _figure(row.mean_draft_length, 1),
    "95 %": lambda row: _range(row.speedup_interval),
    "gain": lambda row: _gain(row.gain),
    "accept +": lambda row: _gain(row.acceptance_gain),
    "last": lambda row: _range(row.last_gain),
    "n-gram": lambda row: _figure(row.ngram_use, 2),
    "learn": lambda row: _figure(row.with_learning, 1),
    "equal": lambda row: "-" if row.same_text is None else f"{row.same_text}/{row.n}",
}
LENGTHS = ("tok/s", "speed-up", "accept", "/verify", "k", "last", "equal")
MAPS = ("tok/s", "speed-up", "accept", "/verify", "gain", "n-gram", "equal")
PAPER = ("accept", "accept +", "speed-up", "95 %", "equal")
