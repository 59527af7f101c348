"""omnidraft calibrate: measure what draft lengths are decided by on this device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.runtime.calibration import Calibration
    from omnidraft.runtime.pair import Pair

SHOWN = (1, 2, 3, 5, 9)
LENGTHS = (1, 2, 3, 4, 6, 8)


def calibrate(
    bundle: o.BundlePath,
    target: o.Target = None,
    precision: o.Precision = None,
    threads: o.Threads = 0,
    ep: o.Ep = "auto",
    strict_ep: o.StrictEp = False,
    profile: o.Profile = "auto",
    state: o.StateFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure this device anew: W₀, how long target passes and draft steps take, and what drafting must reach to pay.

    That happens by itself at first use; do it again when the device was busy then.
    """
    from omnidraft.runtime.calibration import calibrate as measure
    from omnidraft.runtime.pair import load_pair
    from omnidraft.runtime.placed import warnings
    from omnidraft.runtime.placement import read_wishes
    from omnidraft.runtime.state import State, default_state_folder

    kept = State(state or default_state_folder(), o.warn)
    pair = load_pair(bundle, target, precision, threads, wishes=read_wishes(ep, strict_ep, profile), state=kept)
    for line in warnings(pair.placement):
        o.warn(line)
    found = measure(pair, kept, anew=True, tell=o.tell)
    if as_json:
        parts = {"target": found.target, "drafter": found.drafter}
        passes = {name: None if times is None else times.as_dict() for name, times in parts.items()}
        rows = {"w0": found.w0, "width": found.width, "reuse": found.reuse}
        print(json.dumps({**rows, "threads": pair.threads, **passes}))
        return
    _show(pair, found)


def break_even(target: list[float], draw: float, k: int, least: int) -> float | None:
    """The acceptance rate, the same for every proposal, from which k of them beat none; None if nothing does.

    `target`: seconds by rows; `draw`: seconds of a draw. Solves (1 + a + … + aᵏ) / (k · draw + T(k + 1))
    = 1 / T(least).
    """
    wanted = (k * draw + target[max(k + 1, least)]) / target[least]
    low, high = 0.0, 1.0
    if wanted > k + 1:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**i for i in range(k + 1)) < wanted:
            low = middle
        else:
            high = middle
    return high


def _show(pair: Pair, found: Calibration) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    assert found.target is not None and found.drafter is not None
    past = found.target.pasts[0]
    step = found.drafter.at(past)[1]
    promise = f"W0 = {found.w0}: text is exact" if found.w0 else "no W0: text is near, not exact"
    if found.width is not None:
        promise = f"no W0, text is exact with {found.width} rows in every pass"
    keeps = found.reuse or found.least_rows is None  # near text keeps rows in any case
    kept = "a next turn reads what is new" if keeps else "a next turn reads everything anew"
    console.print(f"{pair.name} {pair.precision}, {pair.threads} threads; {promise}; {kept}", markup=False)
    table = Table(title="milliseconds of a target pass", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("past", *(f"{rows} rows" for rows in SHOWN)):
        table.add_column(column, justify="right")
    for behind in found.target.pasts:
        times = found.target.at(behind)
        table.add_row(str(behind), *(f"{times[rows] * 1e3:.1f}" for rows in SHOWN if rows < len(times)))
    console.print(table)
    console.print(f"a draft step takes {step * 1e3:.2f} ms")
    times = found.target.at(past)
    parts = []
    for k in LENGTHS:
        needed = break_even(times, step, k, 1)
        parts.append(f"k = {k}: {'never' if needed is None else f'{needed:.2f}'}")
    console.print("acceptance rate from which drafting beats one-row passes: " + ", ".join(parts))
