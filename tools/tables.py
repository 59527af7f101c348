"""Measured rows as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.markup import escape
from rich.table import Table

from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.measure import Row


def tables(rows: Sequence[Row], target: str, sampling: Sampling) -> Iterator[Table]:
    """One table for each task and precision, narrow enough for a terminal of 80 columns."""
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    for (task, precision), group in groupby(rows, lambda row: (row.task, row.precision)):
        title = f"{escape(task)}: {target} {precision}, {how}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("row", no_wrap=True)
        lines = list(group)
        learning = any(row.with_learning is not None for row in lines)
        last = "learn" if learning else "n-gram"
        for column in ("tok/s", "speed-up", "accept", "/verify", "gain", last, "equal"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in lines:
            figures = (row.speedup, row.acceptance_rate, row.tokens_per_verify)
            table.add_row(
                row.row,
                _figure(row.tokens_per_second, 1),
                *(_figure(figure, 2) for figure in figures),
                "-" if row.gain is None else f"{_short(row.gain[0])}..{_short(row.gain[2])}",
                _figure(row.with_learning, 1) if learning else _figure(row.ngram_use, 2),
                "-" if row.same_text is None else f"{row.same_text}/{row.n}",
            )
        yield table


def _figure(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"


def _short(figure: float) -> str:
    return f"{figure:+.2f}".replace("0.", ".")
