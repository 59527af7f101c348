"""`omnidraft export`: checkpoints to a bundle."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from omnidraft.runtime.errors import OmniDraftError


def export(
    drafter: Annotated[str, typer.Option(help="Drafter: folder, hub id, .gguf file, or 'default'.")],
    target: Annotated[list[str], typer.Option(help="NAME=SRC, once per target; SRC as for --drafter, or 'smollm2'.")],
    out: Annotated[Path, typer.Option(help="The bundle's folder; a bundle that is there is replaced.")],
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precisions of the targets; the first is the default. cpu: fp32, int8, int4. static: fp32, a16w8, "
            "a8w8. [default: int8; static graphs: fp32]"
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="What to make graphs for, by commas or one by one. cpu: any number of rows. portable: the same in "
            "plain operators, at fp32, for other toolchains. static: fixed shapes, for NPUs. "
            "qnn:SOC,SOC…: compiled for Snapdragon; SM8450, SM8550, SM8650, SM8750, SM8850, X-Elite, simulator. "
            "[default: cpu]"
        ),
    ] = None,
    exporter: Annotated[
        str, typer.Option(help="Who writes graphs for any number of rows: genai; optimum: then cpu means portable.")
    ] = "genai",
    context: Annotated[
        int | None, typer.Option(min=64, help="Positions of static graphs. [default: 1024, or the model's own]")
    ] = None,
    drafter_precision: Annotated[str, typer.Option(help="Precision of the drafter.")] = "int8",
    threads: Annotated[int, typer.Option(min=1, help="Threads for the checks against the checkpoints.")] = 1,
) -> None:
    """Export a drafter and its targets to a bundle, checked against their checkpoints."""
    targets: dict[str, str] = {}
    for entry in target:
        name, found, source = entry.partition("=")
        if not (found and name and source):
            raise OmniDraftError(f"--target {entry}: write NAME=SRC, as in smollm2=smollm2")
        if name in targets:
            raise OmniDraftError(f"--target {entry}: the name {name!r} is given twice")
        targets[name] = source
    for module in ("torch", "transformers", "onnx", "onnxruntime_genai", "gguf", "safetensors", "psutil"):
        if find_spec(module) is None:
            raise OmniDraftError(
                f"export needs the package {module}; in the clone run: pip install -c constraints.txt -e '.[export]'"
            )
    from omnidraft.export.order import Order, check, read_profiles
    from omnidraft.export.pipeline import export as run

    precisions = tuple(part.strip() for part in precision.split(",")) if precision is not None else ()
    profiles = read_profiles(",".join(profile or ["cpu"]), exporter)
    order = Order(drafter, targets, out, precisions, drafter_precision, threads, profiles, context)
    check(order)  # before a bar is drawn: an order that makes no sense is one line
    began = time.perf_counter()
    with _Bar() as progress:
        run(order, progress)
    progress.note(f"wrote {out} in {time.perf_counter() - began:.0f} s")


class _Bar:
    """A progress bar on standard error, whatever libraries do to sys.stderr meanwhile."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = Console(file=sys.stderr)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(
            *columns, TimeElapsedColumn(), console=self._console, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task("looking for the models", total=None)
        self._begun = 0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._bar.update(self._task, completed=self._begun, description="done")
        self._bar.stop()

    def plan(self, steps: int) -> None:
        self._bar.update(self._task, total=steps)

    def step(self, what: str) -> None:
        self._bar.update(self._task, completed=self._begun, description=what)
        self._begun += 1

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
