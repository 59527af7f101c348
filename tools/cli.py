"""The omnidraft command: one module per verb, and one place where errors become a line."""

from __future__ import annotations

import sys

import typer

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.bench import bench
from omnidraft.tools.export import export
from omnidraft.tools.run import run
from omnidraft.tools.show import show

app = typer.Typer(
    help="On-device speculative decoding: one small drafter for every target model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for verb in (export, run, show, bench):
    app.command()(verb)


def main() -> None:
    """Run the command line; an OmniDraftError becomes one line and status 1, Ctrl-C status 130."""
    try:
        app()
    except OmniDraftError as error:
        print(f"omnidraft: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("omnidraft: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe is gone; Python would complain again when it flushes at exit.
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    main()
