"""omnidraft doctor: what is here, what is wrong, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.tools.diagnosis import Diagnosis


def doctor(
    bundle: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="Folder made by omnidraft export.")] = None,
    state: o.StateFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at this device, a bundle and the state folder, and say for each problem what to do.

    No model is loaded, and nothing is changed. The exit status is 1 if something stops work.
    """
    from omnidraft.runtime.state import default_state_folder
    from omnidraft.tools import diagnosis as d
    from omnidraft.tools.bundle_health import look_at_bundle
    from omnidraft.tools.state_health import look_at_state

    folder = state or default_state_folder()
    diagnosis = d.Diagnosis()
    d.look_at_versions(diagnosis)
    d.look_at_providers(diagnosis)
    d.look_at_trainer(diagnosis)
    if bundle is not None:
        look_at_bundle(diagnosis, bundle, folder)
    look_at_state(diagnosis, folder)
    if as_json:
        print(json.dumps({**asdict(diagnosis), "works": diagnosis.works}, ensure_ascii=False))
    else:
        _show(diagnosis)
    if not diagnosis.works:
        raise typer.Exit(1)


def _show(diagnosis: Diagnosis) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False, padding=(0, 1, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for area, found in diagnosis.found.items():
        for i, (what, line) in enumerate(found.items()):
            table.add_row("" if i else area, escape(what), escape(line), end_section=i + 1 == len(found))
    Console().print(table)
    for problem in diagnosis.problems:
        print(f"{'stops work' if problem.stops else 'problem'}: {problem.line}")
    if not diagnosis.problems:
        print("no problem found")
