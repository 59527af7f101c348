"""The omnidraft command: one module per verb, and one place where errors become a line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from io import TextIOWrapper
from typing import Any

import typer

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.bench import bench
from omnidraft.tools.export import export
from omnidraft.tools.run import run
from omnidraft.tools.show import show
from omnidraft.tools.training.command import train_drafter

VERBS = (export, run, show, bench, train_drafter)

app = typer.Typer(
    help="On-device speculative decoding: one small drafter for every target model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb, ending with one line and status 1 for an OmniDraftError, 130 for Ctrl-C."""

    @wraps(verb)
    def run_verb(**arguments: Any) -> None:
        try:
            verb(**arguments)
        except OmniDraftError as error:
            print(f"omnidraft: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                # The reader of a pipe is gone; Python would complain again when it flushes at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(141) from None
            print(f"omnidraft: {error.filename or verb.__name__}: {error.strerror or error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print("omnidraft: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return run_verb


for verb in VERBS:
    app.command(verb.__name__.replace("_", "-"))(guarded(verb))


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console may not know every character
    app()


if __name__ == "__main__":
    main()
