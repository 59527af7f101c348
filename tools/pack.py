"""`omnidraft pack`: one archive with what one platform needs of a bundle."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from omnidraft.tools.packages.archive import Item


def pack(
    bundle: o.BundlePath,
    platform: Annotated[str, typer.Option("--for", help="linux-arm64, web, android or ios.")],
    out: Annotated[Path, typer.Option(help="The archive, .tar.gz or .zip; an archive that is there is replaced.")],
    target: o.Target = None,
    precision: o.Precision = None,
    ort_format: Annotated[
        bool,
        typer.Option("--ort-format", help="Write graphs in ORT format, with the operators that a reduced build needs."),
    ] = False,
    node_modules: Annotated[
        Path | None,
        typer.Option(help="For web: folder with the page's npm packages, to go along. [default: npm fetches them]"),
    ] = None,
) -> None:
    """Pack one target of a bundle, with its drafter, for another platform."""
    from rich.console import Console

    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.tools.packages.archive import check_out, sums, write_archive
    from omnidraft.tools.packages.contents import select
    from omnidraft.tools.packages.ort_format import convert, cost
    from omnidraft.tools.packages.platforms import PLATFORMS, Request

    if platform not in PLATFORMS:
        raise OmniDraftError(f"--for {platform}: choose one of {', '.join(PLATFORMS)}")
    if node_modules is not None and platform != "web":
        raise OmniDraftError(f"--node-modules is for --for web; leave it out for {platform}")
    check_out(out)
    kind = PLATFORMS[platform]
    selection = exported = select(bundle, target, precision, kind.needs)
    with TemporaryDirectory(prefix="omnidraft-pack-") as room:
        items: list[Item] = []
        if ort_format:
            selection, operators = convert(exported, kind.needs, Path(room))
            items.append(operators)
        items += [*kind.items(Request(selection, node_modules, o.warn)), *selection.items()]
        items.append(sums(items))
        write_archive(out, f"omnidraft-{platform}", items)
        table = sizes(items, f"{selection.name} {selection.graph.precision} for {platform}")
    console = Console()
    console.print(table)
    if ort_format:
        print(cost(exported, selection))
    console.print(f"wrote {out}, {out.stat().st_size / 1e6:.1f} MB", markup=False, highlight=False, soft_wrap=True)


def sizes(items: Sequence[Item], title: str) -> Table:
    """Files and megabytes of each part, as unpacked, largest first."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", show_footer=True)
    parts: dict[str, list[int]] = {}
    for item in items:
        parts.setdefault(item.part, []).append(item.size)
    total = sum(map(sum, parts.values()))
    table.add_column("part", "unpacked")
    table.add_column("files", str(len(items)), justify="right")
    table.add_column("MB", f"{total / 1e6:.2f}", justify="right")
    for part, found in sorted(parts.items(), key=lambda pair: (-sum(pair[1]), pair[0])):
        table.add_row(escape(part), str(len(found)), f"{sum(found) / 1e6:.2f}")
    return table
