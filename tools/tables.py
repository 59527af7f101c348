"""Measured rows as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich import box
from rich.markup import escape
from rich.table import Table

from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.measure import Row


def tables(rows: Sequence[Row], target: str, sampling: Sampling, columns: Sequence[str]) -> Iterator[Table]:
    """One table for each task and precision, with some of COLUMNS, narrow enough for a terminal of 80 columns."""
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    for (task, precision), group in groupby(rows, lambda row: (row.task, row.precision)):
        title = f"{escape(task)}: {target} {precision}, {how}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("row", no_wrap=True)
        lines = list(group)
        found = {name: [COLUMNS[name](row) for row in lines] for name in (*columns, "learn")}
        shown = {name: cells for name, cells in found.items() if name != "learn" or set(cells) != {"-"}}
        for column in shown:
            table.add_column(column, justify="right", no_wrap=True)
        for row, *cells in zip(lines, *shown.values(), strict=True):
            table.add_row(row.row, *cells)
        yield table


def _range(interval: tuple[float, ...] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f}..{interval[-1]:.2f}"


def _figure(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"


def _short(figure: float) -> str:
    return f"{figure:+.2f}".replace("0.", ".")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "tok/s": lambda row: _figure(row.tokens_per_second, 1),
    "speed-up": lambda row: _figure(row.speedup, 2),
    "accept": lambda row: _figure(row.acceptance_rate, 2),
    "/verify": lambda row: _figure(row.tokens_per_verify, 2),
    "k": lambda row: _figure(row.mean_draft_length, 1),
    "gain": lambda row: "-" if row.gain is None else f"{_short(row.gain[0])}..{_short(row.gain[2])}",
    "last": lambda row: _range(row.last_gain),
    "n-gram": lambda row: _figure(row.ngram_use, 2),
    "learn": lambda row: _figure(row.with_learning, 1),
    "equal": lambda row: "-" if row.same_text is None else f"{row.same_text}/{row.n}",
}
LENGTHS = ("tok/s", "speed-up", "accept", "/verify", "k", "last", "equal")
MAPS = ("tok/s", "speed-up", "accept", "/verify", "gain", "n-gram", "equal")
