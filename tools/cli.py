"""The omnidraft command: one module per verb, and one place where errors become a line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools import adapters
from omnidraft.tools.bench import bench
from omnidraft.tools.calibrate import calibrate
from omnidraft.tools.chat import chat
from omnidraft.tools.doctor import doctor
from omnidraft.tools.export import export
from omnidraft.tools.pack import pack
from omnidraft.tools.personalize import personalize
from omnidraft.tools.run import run
from omnidraft.tools.serve import serve
from omnidraft.tools.setup_optimum import setup_optimum
from omnidraft.tools.setup_training import setup_training
from omnidraft.tools.show import show
from omnidraft.tools.soak import soak
from omnidraft.tools.train_head import train_head
from omnidraft.tools.training.command import train_drafter

VERBS = (
    export, run, chat, serve, show, doctor, calibrate, bench, pack, personalize, setup_training, setup_optimum,
    train_drafter, train_head, soak,
)  # fmt: skip

GROUPS: dict[str, tuple[str, tuple[Callable[..., None], ...]]] = {
    "adapters": ("What the drafter has learned on this device, version by version.", adapters.VERBS),
}


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
            print(f"omnidraft: {error.filename or command_name(verb)}: {error.strerror or error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print("omnidraft: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return run_verb


def command_name(verb: Callable[..., None]) -> str:
    """What a user types: `list_` is list, `train_drafter` is train-drafter."""
    return verb.__name__.rstrip("_").replace("_", "-")


def _commands(help_text: str, verbs: tuple[Callable[..., None], ...]) -> typer.Typer:
    made = typer.Typer(
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for verb in verbs:
        made.command(command_name(verb))(guarded(verb))
    return made


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            ours = version("omnidraft")
        except PackageNotFoundError:  # what `pack` makes runs from where it was unpacked
            ours = "(unpacked)"
        print(f"omnidraft {ours}, onnxruntime {version('onnxruntime')}")
        raise typer.Exit


app = _commands("On-device speculative decoding: one small drafter for every target model.", VERBS)
for name, group in GROUPS.items():
    app.add_typer(_commands(*group), name=name)


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say the version, and end.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console may not know every character
    app()


if __name__ == "__main__":
    main()
