"""What a long run says: lines and a bar on the error stream."""

from __future__ import annotations

import sys
from typing import Protocol


class Log(Protocol):
    """Where the stages say what they do."""

    def note(self, line: str) -> None:
        """Something that the user should know."""

    def stage(self, what: str, total: int) -> None:
        """A stage of `total` steps begins; it replaces the one before."""

    def advance(self, steps: int, what: str) -> None:
        """Some steps are done; `what` describes the state now."""


class Bar:
    """A Log with a progress bar."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, redirect_stdout=False, redirect_stderr=False)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, line: str) -> None:
        """See Log."""
        self._console.print(line, highlight=False, soft_wrap=True)

    def stage(self, what: str, total: int) -> None:
        """See Log."""
        self._bar.reset(self._task, total=total, description=what)
        if not self._console.is_terminal:
            self.note(f"{what}: {total}")

    def advance(self, steps: int, what: str) -> None:
        """See Log."""
        self._bar.update(self._task, advance=steps, description=what)
