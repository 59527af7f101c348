"""omnidraft adapters: what the drafter has learned on this device, version by version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.adapters.index import Forecast, Index, Version
    from omnidraft.adapters.store import AdapterStore
    from omnidraft.runtime.state import State


def list_(state: o.StateFolder = None) -> None:
    """List every drafter and target with a learned adapter."""
    from omnidraft.adapters.store import stored

    folder = _folder(state)
    indexes = stored(_state(folder)) if folder.is_dir() else []
    if not indexes:
        print(f"no adapters in {folder}")
        return
    rows: list[tuple[str, ...]] = []
    for index in indexes:
        last = index.versions[-1]
        numbers = ", ".join(str(version.number) for version in index.versions)
        rows.append((index.drafter, index.target, str(index.current), numbers, str(last.steps), _shown(last.forecast)))
    _table(str(folder), ("drafter", "target", "current", "versions", "last steps", "last acceptance"), rows)


def show(bundle: o.BundlePath, target: o.Target = None, state: o.StateFolder = None) -> None:
    """Show the versions of a bundle's adapter; * is the one in use."""
    index = _store(bundle, target, state).index()
    if not index.versions:
        print(f"{index.drafter} for {index.target}: nothing learned yet, the drafter is as shipped")
        return
    rows = [_mark(index, 0, "", "", "", "", "as shipped")]
    for version in index.versions:
        learned = (str(version.parent), str(version.rank), str(version.steps), _shown(version.forecast))
        rows.append(_mark(index, version.number, *learned, _history(version)))
    _table(f"{index.drafter} for {index.target}", ("version", "parent", "rank", "steps", "acceptance", "made"), rows)


def rollback(
    bundle: o.BundlePath,
    target: o.Target = None,
    to: Annotated[
        int | None, typer.Option(min=0, help="Version; 0 is the drafter as shipped. [default: the parent]")
    ] = None,
    state: o.StateFolder = None,
) -> None:
    """Use an earlier version again. None is removed: a later rollback may go forward."""
    store = _store(bundle, target, state)
    index = store.index()
    current = index.find(index.current)
    number = to if to is not None else current.parent if current else 0
    if number == index.current:
        print(f"{_called(number)} is in use already")
        return
    _done(store.use(number))
    print(f"{_called(number)} is in use, was {_called(index.current)}")


def export(
    bundle: o.BundlePath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The .onnx_adapter file to write.")],
    target: o.Target = None,
    version: Annotated[int | None, typer.Option(min=1, help="Which version. [default: the one in use]")] = None,
    state: o.StateFolder = None,
) -> None:
    """Write a version to a file for ONNX Runtime. It carries traces of the text it was learned from."""
    from omnidraft.runtime.errors import OmniDraftError

    store = _store(bundle, target, state)
    number = store.index().current if version is None else version
    if number == 0:
        raise OmniDraftError("the drafter is in use as shipped, it has no adapter to export; give --version N")
    _done(store.export(number, file))
    print(f"{_called(number)} is in {file}")


def import_(
    bundle: o.BundlePath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An .onnx_adapter file of this drafter.")],
    target: o.Target = None,
    state: o.StateFolder = None,
) -> None:
    """Take an adapter from a file and use it."""
    imported = _store(bundle, target, state).import_(file)
    _done(imported is not None)
    if imported is not None:
        print(f"{_called(imported.number)} is in use, imported from {file}")


def forget(
    state: o.StateFolder = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove everything learned: adapters, kept text, n-gram caches, measurements."""
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.state import LOCK, MARKER

    folder = _folder(state)
    opened = _state(folder) if folder.is_dir() else None
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (MARKER, LOCK)]
    if opened is None or not files:
        print(f"nothing learned in {folder}")
        return
    parts = ", ".join(sorted({path.relative_to(folder).parts[0] for path in files}))
    what = f"{len(files)} files, {sum(path.lstat().st_size for path in files) / 1e6:.1f} MB, in {folder}: {parts}"
    if not yes:
        if not sys.stdin.isatty():
            raise OmniDraftError(f"{folder}: --yes is needed where nobody can be asked; nothing was removed")
        if not typer.confirm(f"Remove {what}?", err=True):
            raise OmniDraftError("nothing was removed")
    opened.forget()
    print(f"removed {what}")


VERBS = (list_, show, rollback, export, import_, forget)


def _folder(state: Path | None) -> Path:
    from omnidraft.runtime.state import default_state_folder

    return state or default_state_folder()


def _state(folder: Path) -> State:
    from omnidraft.runtime.state import State

    return State(folder, o.warn)


def _store(bundle: Path, target: str | None, state: Path | None) -> AdapterStore:
    from omnidraft.adapters.store import open_store
    from omnidraft.runtime.bundle import open_bundle

    return open_store(open_bundle(bundle), target, _state(_folder(state)))


def _done(worked: bool) -> None:
    """End with status 1 where the store has already said in a line why it could not."""
    if not worked:
        raise typer.Exit(1)


def _called(number: int) -> str:
    return f"version {number}" if number else "the drafter as shipped"


def _mark(index: Index, number: int, *columns: str) -> tuple[str, ...]:
    return f"{number} *" if number == index.current else str(number), *columns


def _history(version: Version) -> str:
    parts = [version.created[:16].replace("T", " ") + " UTC", version.trainer]
    if version.samples:
        parts.append(f"{version.samples} positions")
    if version.loss:
        parts.append(f"{version.loss} loss")
    return ", ".join(part for part in (*parts, version.note) if part)


def _shown(forecast: Forecast) -> str:
    before, after = ("?" if rate is None else f"{rate:.2f}" for rate in (forecast.before, forecast.after))
    return "" if before == after == "?" else f"{before} → {after}"


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
