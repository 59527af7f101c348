"""omnidraft bench: how much drafting gains, row by row, against plain decoding of the same graph."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.tools.measure import Row


def bench(
    bundle: o.BundlePath,
    prompts: Annotated[Path, typer.Option(help="JSONL with prompt, and task and id if you like.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts of each task.")] = 8,
    target: o.Target = None,
    precision: Annotated[str | None, typer.Option(help="One or more, by commas. [default: the target's first]")] = None,
    draft: o.DraftLength = "auto",
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    max_new_tokens: o.MaxNewTokens = 96,
    verification: o.Verification = "coupled",
    threads: o.Threads = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Compare plain decoding, the paper's translation and ours, interleaved, on the same prompts.

    Every row starts without a cache and keeps nothing. Figures are medians over prompts of decoding
    alone; the time to the first token is apart.
    """
    from rich.console import Console
    from rich.progress import Progress

    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.tools.measure import measure, read_prompts

    if Options(draft).draft_length == 0:
        raise OmniDraftError("bench compares drafting with plain decoding; --draft off leaves nothing to compare")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise OmniDraftError(f"{json_file}: its folder does not exist; make it first")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    tasks = read_prompts(prompts, n)
    console, rows = Console(), []
    for name in precision.split(",") if precision else [None]:
        engines = make_rows(bundle, target, name, draft, verification, threads)
        with Progress(console=console, transient=True) as progress:
            for task, texts in tasks.items():
                bar = progress.add_task(task, total=len(texts) * len(engines))
                rows += measure(engines, task, texts, sampling, max_new_tokens, lambda: progress.advance(bar))  # noqa: B023
    for table in _tables(rows, sampling):
        console.print(table)
    console.print(LEGEND)
    for row in rows:
        if row.same_text is not None and row.same_text < row.n:
            o.warn(f"{row.task}, {row.row}, {row.precision}: text equal to plain for {row.same_text} of {row.n} only")
    if json_file is not None:
        machine = {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}
        described = {"machine": machine, "sampling": vars(sampling), "max_new_tokens": max_new_tokens}
        document: dict[str, Any] = {**described, "rows": [row.as_dict() for row in rows]}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def make_rows(
    bundle: Path, target: str | None, precision: str | None, draft: str, verification: str, threads: int
) -> dict[str, Engine]:
    """One engine per row of the bench, all on the same loaded pair."""
    from omnidraft.runtime.calibration import least_rows
    from omnidraft.runtime.engine import Engine
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.pair import load_pair
    from omnidraft.runtime.state import State
    from omnidraft.runtime.translation import Mode

    pair = load_pair(bundle, target, precision, threads)
    nowhere = State(None, o.warn)
    w0 = least_rows(pair, nowhere)
    if w0 is None:
        o.warn("no width gives equal rows on this device: texts may differ between rows")
    options = {
        "plain, 1 row": Options("off", "near"),
        f"plain, {w0 or 1} rows": Options("off"),
        "direct map only": Options(draft, "exact", verification, Mode.DIRECT),
        "+ online cache": Options(draft, "exact", verification, Mode.ONLINE),
        "+ static map": Options(draft, "exact", verification, Mode.STATIC),
        "static + online": Options(draft, "exact", verification, Mode.FULL),
    }
    return {row: Engine(pair, chosen, nowhere, w0) for row, chosen in options.items()}


def _tables(rows: list[Row], sampling: Sampling) -> Iterator[Any]:
    """One table for each task and precision, narrow enough for a terminal of 80 columns."""
    from rich.table import Table

    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    for (task, precision), group in groupby(rows, lambda row: (row.task, row.precision)):
        table = Table(title=f"{task}: {precision}, {how}", title_justify="left")
        table.add_column("row", no_wrap=True)
        for column in ("tokens/s", "speed-up", "accept", "/verify", "n-gram", "cover", "equal"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in group:
            figures = (row.acceptance_rate, row.tokens_per_verify, row.ngram_use, row.coverage)
            table.add_row(
                row.row,
                f"{row.tokens_per_second:.1f}",
                f"{row.speedup:.2f}",
                *("-" if figure is None else f"{figure:.2f}" for figure in figures),
                "-" if row.same_text is None else f"{row.same_text}/{row.n}",
            )
        yield table


LEGEND = (
    "speed-up: against plain decoding with 1-row passes, median over prompts. accept: acceptance rate; "
    "/verify: tokens per verify; n-gram: n-gram use; cover: coverage; equal: texts equal to plain decoding."
)
