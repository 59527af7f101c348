"""omnidraft soak: a long run under all that changes in a day, and limits that it must keep to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from math import ceil
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.runtime.pair import Pair
    from omnidraft.runtime.state import State
    from omnidraft.tools.soak_limits import Limit
    from omnidraft.tools.soak_loop import Cycle, Leg, Soak

ROWS = 10  # of the table
LENGTH = 64  # tokens of an earlier answer


def soak(
    bundle: o.BundlePath,
    prompts: Annotated[Path, typer.Option(help="JSONL with prompt, and task if you like; tasks take turns.")],
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.")] = 60.0,
    precision: o.Precision = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    threads: o.Threads = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the run to this .png or .svg file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Run for long, with tasks, targets, draft policies, learning and cancellations taking turns; then say what grew.

    Every target of the bundle takes part; what is learned goes to a folder that is removed afterwards. Ends with
    status 1 and a line for each limit that was broken: memory, state files, texts, complaints.
    """
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.state import State
    from omnidraft.tools.measure import read_prompts
    from omnidraft.tools.personalize import check_outputs
    from omnidraft.tools.soak_limits import limits
    from omnidraft.tools.soak_loop import Soak

    _check_packages()
    check_outputs(plot, json_file)
    tasks = read_prompts(prompts)
    complaints: list[str] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="omnidraft-soak-") as folder:
        state = State(Path(folder), complaints.append)
        pairs = _load(bundle, precision, threads, state)
        _fill(pairs, state)
        work = Soak(pairs, _fitting(pairs, tasks, max_new_tokens), state, max_new_tokens, complaints.append)
        try:
            _go(work, minutes)
        except KeyboardInterrupt:
            interrupted = True
        except OmniDraftError as error:  # what was measured until here is worth a report
            complaints.append(str(error))
        found = limits(work, complaints)
    _say(work.cycles, found)
    if json_file is not None:
        document = {
            "cycles": [cycle.as_dict() for cycle in work.cycles],
            "limits": [{"line": limit.line, "held": limit.held} for limit in found],
        }
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if plot is not None and work.cycles:
        from omnidraft.tools.soak_plot import draw_soak

        draw_soak(work.cycles, f"{bundle.name}, {', '.join(pair.name for pair in pairs)}", plot)
        print(f"{plot}: the run as a picture")
    for limit in found:
        if limit.held is False:
            o.warn(limit.line)
    if any(limit.held is False for limit in found):
        raise typer.Exit(1)
    if interrupted:
        raise KeyboardInterrupt


def _check_packages() -> None:
    from importlib.util import find_spec

    from omnidraft.runtime.errors import OmniDraftError

    if find_spec("psutil") is None:
        raise OmniDraftError("soak needs the package psutil; pip install psutil")


def _load(bundle: Path, precision: str | None, threads: int, state: State) -> list[Pair]:
    """Every target of the bundle, each with the drafter. Raises OmniDraftError where soaking would show nothing."""
    from omnidraft.runtime.bundle import open_bundle
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.pair import load_pair

    opened = open_bundle(bundle)
    if opened.drafter.training is None:
        raise OmniDraftError(f"{bundle}: its drafter cannot learn; export one of Llama architecture")
    return [load_pair(bundle, name, precision, threads, state=state) for name in opened.targets]


def _fill(pairs: Sequence[Pair], state: State) -> None:
    """As many earlier answers as are ever kept, as after long use: they would fill for hours, and look like growth."""
    import numpy as np

    from omnidraft.runtime.answers import Answers
    from omnidraft.runtime.lookup import MOST_TOKENS

    for pair in pairs:
        answers, rng = Answers.of(state, pair.target), np.random.default_rng(0)
        for answer in rng.integers(pair.target.decoder.vocabulary, size=(MOST_TOKENS // LENGTH, LENGTH)).tolist():
            answers.add(answer)
        answers.save()


def _fitting(pairs: Sequence[Pair], tasks: dict[str, list[str]], max_new_tokens: int) -> list[str]:
    """The prompts that fit every target, tasks taking turns; one line says how many do not. Raises OmniDraftError."""
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.invariance import WIDEST

    turns = [text for text in chain.from_iterable(zip_longest(*tasks.values())) if text is not None]
    found = []
    for text in turns:
        with suppress(OmniDraftError):
            ids = [pair.target.prompts.chat([{"role": "user", "content": text}]) for pair in pairs]
            room = [pair.target.info.context - max_new_tokens - WIDEST for pair in pairs]
            if all(len(one) <= most for one, most in zip(ids, room, strict=True)):
                found.append(text)
    if not found:
        raise OmniDraftError("none of the prompts fits every target; give shorter ones, or less --max-new-tokens")
    if len(found) < len(turns):
        o.warn(f"{len(turns) - len(found)} of {len(turns)} prompts are too long for a target, left out")
    return found


def _go(work: Soak, minutes: float) -> None:
    from omnidraft.tools.log import Bar

    end, shown = monotonic() + 60 * minutes, 0
    with Bar() as log:
        log.stage("minutes", ceil(minutes))

        def advance(leg: Leg) -> None:
            nonlocal shown
            passed = int(work.elapsed / 60)
            learns = ", learning" if leg.learning else ""
            log.advance(passed - shown, f"cycle {len(work.cycles) + 1}: {leg.target}, draft {leg.draft}{learns}")
            shown = passed

        while monotonic() < end and work.cycle(lambda: monotonic() < end, advance):
            log.note(_line(work.cycles[-1]))


def _line(cycle: Cycle) -> str:
    speed = f"{cycle.tokens_per_second:.0f}" if cycle.tokens_per_second else "-"
    return f"{cycle.end / 60:.1f} min: {cycle.memory / 2**20:.0f} MiB, {speed} tokens/s"


def _say(cycles: Sequence[Cycle], found: Sequence[Limit]) -> None:
    """A table of some cycles, evenly spaced, and the verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(cycles)} cycles of {cycles[0].answers if cycles else 0} answers", title_justify="left")
    for column in ("min", "MiB", "peak", "state KiB", "accepted", "tokens/s", "first ms", "round ms"):
        table.add_column(column, justify="right")
    step = max(1, -(-len(cycles) // ROWS))
    for cycle in [*cycles[:-1:step], *cycles[-1:]]:
        rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in cycle.acceptance.values())
        first, rounds = ("/".join(f"{1e3 * t:.0f}" for t in times[:2]) for times in (cycle.first_token, cycle.round))
        speed = "-" if cycle.tokens_per_second is None else f"{cycle.tokens_per_second:.0f}"
        memory, peak = (f"{size / 2**20:.0f}" for size in (cycle.memory, cycle.peak))
        state = f"{sum(cycle.state.values()) / 2**10:.0f}"
        table.add_row(f"{cycle.end / 60:.1f}", memory, peak, state, rates, speed, first, rounds)
    if cycles:
        Console().print(table)
        print("MiB: held at the end of a cycle; peak: most behind an answer; times: median/95 %; accepted: by target")
    for limit in found:
        verdict = {True: "held", False: "BROKEN", None: "not checked"}[limit.held]
        print(f"{verdict}: {limit.line}")
